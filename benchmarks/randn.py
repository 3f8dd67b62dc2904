"""w + c z with Triton's own normal numbers (Box-Muller): what one would write instead of our kernel. Not a script."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _randn_kernel(w, out, c, seed, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.randn(seed, place)
    tl.store(out + place, (tl.load(w + place).to(tl.float32) + c * z).to(out.dtype.element_ty))


@triton.jit
def _randn4x_kernel(w, out, c, seed, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0) * (4 * BLOCK) + lane
    z0, z1, z2, z3 = tl.randn4x(seed, tl.program_id(0) * BLOCK + lane)
    kind = out.dtype.element_ty
    tl.store(out + first, (tl.load(w + first).to(tl.float32) + c * z0).to(kind))
    tl.store(out + first + BLOCK, (tl.load(w + first + BLOCK).to(tl.float32) + c * z1).to(kind))
    tl.store(out + first + 2 * BLOCK, (tl.load(w + first + 2 * BLOCK).to(tl.float32) + c * z2).to(kind))
    tl.store(out + first + 3 * BLOCK, (tl.load(w + first + 3 * BLOCK).to(tl.float32) + c * z3).to(kind))


def perturb(w: torch.Tensor, out: torch.Tensor, c: float, seed: int, *, four_at_once: bool) -> None:
    """Write w + c z to out; the size must be a multiple of 4 * BLOCK and less than 2^31.

    `tl.randn` uses one of the four words of a Philox block, `tl.randn4x` all of them.
    """
    if w.numel() % (4 * BLOCK) or w.numel() >= 1 << 31:
        raise ValueError(f"the size must be a multiple of {4 * BLOCK} below 2^31, got {w.numel()}")
    if four_at_once:
        _randn4x_kernel[(w.numel() // (4 * BLOCK),)](w, out, c, seed, BLOCK=BLOCK)
    else:
        _randn_kernel[(w.numel() // BLOCK,)](w, out, c, seed, BLOCK=BLOCK)
