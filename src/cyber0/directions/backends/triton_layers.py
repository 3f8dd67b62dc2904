"""Layers with a low-rank perturbation in Triton: what torch needs several kernels for, in one.

The factors of the directions are those of low_rank.py. What a layer computes has no defined bits, unlike a direction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 4
FEW_ROWS, MANY_ROWS = 4, 8  # of a program: few where there would not be programs enough for a whole GPU
MANY = 4096  # rows from which on there are
SOME_COLUMNS, MORE_COLUMNS = 512, 1024  # of x and y that a program reads at a time
WIDE = 4096  # a layer in which it reads more of them
NORM_NUMBERS, NORM_WIDTH = 4096, 8192  # of x that a program of a norm reads, and of the longest row with a kernel
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["rows", "each", "inner_stride", "outer_stride", "z_stride", "S"])
def _product_kernel(
    y, x, inner, outer, scaled, z, distances, rows, each, inner_stride, outer_stride, z_stride, S,
    IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add c (x inner) outer, and c z if there is a bias, to some rows of y that belong to one direction."""
    direction = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    oks = row < rows
    place = (direction * rows + row).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    t = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, IN, COLUMNS):
        i = begin + column
        a = tl.load(inner + direction * inner_stride + i, mask=i < IN, other=0.0).to(tl.float32)
        part = tl.load(x + place[:, None] * IN + i[None, :], mask=oks[:, None] & (i < IN)[None, :], other=0.0)
        t += tl.sum(part.to(tl.float32) * a[None, :], axis=1)
    group = direction * S + row // each
    t = t * tl.load(scaled + group, mask=oks, other=0.0)
    if BIAS:
        c = tl.load(distances + group, mask=oks, other=0.0)
    for begin in range(0, OUT, COLUMNS):
        o = begin + column
        b = tl.load(outer + direction * outer_stride + o, mask=o < OUT, other=0.0).to(tl.float32)
        where, mask = y + place[:, None] * OUT + o[None, :], oks[:, None] & (o < OUT)[None, :]
        found = tl.load(where, mask=mask, other=0.0).to(tl.float32) + t[:, None] * b[None, :]
        if BIAS:
            along = tl.load(z + direction * z_stride + o, mask=o < OUT, other=0.0).to(tl.float32)
            found += c[:, None] * along[None, :]
        tl.store(where, found.to(y.dtype.element_ty), mask=mask)


def add_product(
    y: torch.Tensor, x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor, scaled: torch.Tensor,
    bias: tuple[torch.Tensor, torch.Tensor] | None,
) -> bool:  # fmt: skip
    """Add c (x inner) outer to y in place, and return whether that was done: only for directions of rank 1.

    Args:
        y: (rows, ..., out), rows of all groups in order.
        x: (rows, ..., in).
        inner: (D, R, in).
        outer: (D, R, out).
        scaled: c / sqrt(R), (D, S).
        bias: z of a bias, (D, out), and c, (D, S), if a bias is perturbed along with it.
    """
    given = [y, x, inner, outer, *(() if bias is None else bias)]
    if inner.shape[1] != 1 or not (y.is_contiguous() and x.is_contiguous()) or not y.numel():
        return False
    if any(t.dtype not in DTYPES or t.stride(-1) != 1 for t in given):
        return False
    (d, s), width, out = scaled.shape, x.shape[-1], y.shape[-1]
    rows = x.numel() // width // d
    z, distances = (scaled, scaled) if bias is None else bias
    some = MANY_ROWS if rows * d >= MANY else FEW_ROWS
    at_a_time = MORE_COLUMNS if max(width, out) >= WIDE else SOME_COLUMNS
    _product_kernel[(-(-rows // some), d)](
        y, x, inner, outer, scaled, z, distances, rows, rows // s, inner.stride(0), outer.stride(0), z.stride(0), s,
        IN=width, OUT=out, BIAS=bias is not None, ROWS=some, COLUMNS=at_a_time, num_warps=WARPS,
    )  # fmt: skip
    return True


@triton.jit(do_not_specialize=["rows", "each", "z_stride", "shift_stride", "S"])
def _norm_kernel(
    out, x, weight, z, bias, shift, distances, eps, rows, each, z_stride, shift_stride, S, CENTRED: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some rows of one direction, each over its root mean square, times weight + c z, plus bias + c shift."""
    direction = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    oks = row < rows
    i = tl.arange(0, COLUMNS)
    iks = i < WIDTH
    at, mask = (direction * rows + row).to(tl.int64)[:, None] * WIDTH + i[None, :], oks[:, None] & iks[None, :]
    found = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        found = tl.where(mask, found - (tl.sum(found, axis=1) / WIDTH)[:, None], 0.0)
    found = found * tl.rsqrt(tl.sum(found * found, axis=1) / WIDTH + eps)[:, None]
    w = tl.load(weight + i, mask=iks, other=0.0).to(tl.float32)
    along = tl.load(z + direction * z_stride + i, mask=iks, other=0.0).to(tl.float32)
    c = tl.load(distances + direction * S + row // each, mask=oks, other=0.0)
    found = found * (w[None, :] + c[:, None] * along[None, :])
    if BIAS:
        w = tl.load(bias + i, mask=iks, other=0.0).to(tl.float32)
        along = tl.load(shift + direction * shift_stride + i, mask=iks, other=0.0).to(tl.float32)
        found += w[None, :] + c[:, None] * along[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


def norm(
    x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], bias: tuple[torch.Tensor, torch.Tensor] | None,
    distances: torch.Tensor, eps: float, *, centred: bool,
) -> torch.Tensor | None:  # fmt: skip
    """Return an RMS or layer norm with the weight and bias of each group; None for what it has no kernel for.

    That is x, less its mean if centred, over its root mean square, times weight + c z, plus the bias likewise.

    Args:
        x: (rows, ..., width), rows of all groups in order.
        weight: At w itself, (width,), and its z, (D, width).
        bias: The same of the bias, if there is one.
        distances: c, (D, S).
        eps: What is added to the mean square.
        centred: Whether the mean of each row is taken from it first.
    """
    width, (d, s) = x.shape[-1], distances.shape
    if not (x.is_contiguous() and x.numel()) or width > NORM_WIDTH:
        return None
    if any(t.dtype not in DTYPES or t.stride(-1) != 1 for t in (x, *weight, *(bias or ()))):
        return None
    out, rows, columns = torch.empty_like(x), x.numel() // width // d, triton.next_power_of_2(width)
    some, shift = max(1, NORM_NUMBERS // columns), bias or weight
    _norm_kernel[(-(-rows // some), d)](
        out, x, *weight, *shift, distances, eps, rows, rows // s, weight[1].stride(0), shift[1].stride(0), s,
        CENTRED=centred, BIAS=bias is not None, WIDTH=width, ROWS=some, COLUMNS=columns, num_warps=WARPS,
    )  # fmt: skip
    return out
