"""The kernels of fusion.py, in Triton: element by element, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

BLOCK, ROWS = 2048, 32  # elements, and rows of a head's size, a program


@triton.jit
def _silu_times(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(x, cos, sin, out, rows, heads, angles, HALF: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (lane < HALF)[None, :]
    first = row[:, None] * (2 * HALF) + lane[None, :]
    angle = (row // heads % angles)[:, None] * (2 * HALF) + lane[None, :]
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + first, (a * cos_a - b * sin_a).to(kind), mask=inside)
    tl.store(out + first + HALF, (b * cos_b + a * sin_b).to(kind), mask=inside)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        _silu_times[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK=BLOCK)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return contiguous (samples, tokens, heads, size) turned by (samples or 1, tokens, size) angles."""
    out, rows = torch.empty_like(x), x.shape[0] * x.shape[1] * x.shape[2]
    if rows:
        angles, half = cos.shape[0] * cos.shape[1], x.shape[3] // 2
        _rotate[(triton.cdiv(rows, ROWS),)](x, cos, sin, out, rows, x.shape[2], angles, HALF=half, ROWS=ROWS)
    return out
