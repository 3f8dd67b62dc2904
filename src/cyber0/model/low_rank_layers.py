"""Layers with a low-rank perturbation beside their own weights: the weights that would result are never built.

Rows come in groups: `distances` has one number for each of D directions and S distances, and rows are ordered by
direction, then distance, then sample. A matrix W that is perturbed by c left right^T gives

    x (W + c left right^T) = x W + c (x left) right^T

where both products on the right cost R / columns of the first one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cyber0.directions.backends import backend_of
from cyber0.model.factors import LowRank

Tensor = torch.Tensor


def add_product(
    y: Tensor, x: Tensor, inner: Tensor, outer: Tensor, scaled: Tensor,
    bias: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return y + c (x inner) outer for each group, written to y where that is possible.

    Args:
        y: (rows, ..., out), rows of all groups in order.
        x: (rows, ..., in).
        inner: (D, R, in).
        outer: (D, R, out).
        scaled: c / sqrt(R), (D, S).
        bias: z of a bias, (D, out), c, (D, S), and the largest c, if a bias is perturbed along with it.
    """
    if backend_of(y.device).add_product(y, x, inner, outer, scaled, None if bias is None else bias[:2]):
        return y
    d, s = scaled.shape
    x = x.reshape(d, -1, x.shape[-1])
    t = _times(torch.bmm(x, inner.to(x.dtype).transpose(1, 2)), scaled, y.dtype)
    outer = outer.to(y.dtype)
    if bias is not None:  # one more factor, so that y is read and written once
        z, distances, unit = bias  # c itself, rounded to 16 bits, would be off by the same amount in every entry
        signs = (distances / unit).to(y.dtype)[:, :, None].expand(d, s, t.shape[1] // s).reshape(d, -1, 1)
        t, outer = torch.cat([t, signs], dim=2), torch.cat([outer, (z * unit).to(y.dtype)[:, None]], dim=1)
    return _add(y, t, outer)


def add_rows(y: Tensor, tokens: Tensor, low_rank: LowRank, scaled: Tensor) -> Tensor:
    """Return y + c left[token] right^T for each group: what an embedding adds to its rows y, (rows, ..., columns).

    Args:
        y: What the embedding itself gives.
        tokens: (rows, ...).
        low_rank: Of the embedding's matrix.
        scaled: c / sqrt(R), (D, S).
    """
    d, rank = low_rank.left.shape[:2]
    index = tokens.reshape(d, 1, -1).expand(d, rank, -1).long()
    t = _times(low_rank.left.gather(2, index).transpose(1, 2), scaled, y.dtype)
    return _add(y, t, low_rank.right.to(y.dtype))


def add_convolution(y: Tensor, x: Tensor, low_rank: LowRank, scaled: Tensor, options: dict[str, Any]) -> Tensor:
    """Return y + c (the convolution of x with the right factors, as R channels) left^T for each group.

    Args:
        y: What the convolution itself gives, (rows, channels, ...).
        x: (rows, channels, ...).
        low_rank: Of the filters.
        scaled: c / sqrt(R), (D, S).
        options: Stride, padding, dilation and groups of the convolution.
    """
    d, s = scaled.shape
    rank, outputs = low_rank.left.shape[1:]
    parts, channels = int(options.get("groups", 1)), x.shape[1]
    # Directions become groups of channels, so that each has its own filters.
    side_by_side = x.reshape(d, -1, *x.shape[1:]).transpose(0, 1).reshape(-1, d * channels, *x.shape[2:])
    filters = low_rank.right.to(x.dtype)[:, None].expand(d, parts, *low_rank.right.shape[1:]).flatten(0, 2)
    convolve = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[x.dim()]
    t = convolve(side_by_side, filters, None, **{**options, "groups": d * parts})
    n, places = len(t), t.shape[2:]
    t = t.view(n, d, parts, rank, -1).permute(1, 0, 2, 4, 3)  # directions, samples, parts, places, rank
    t = t.reshape(d, s, n // s, parts, -1, rank)
    scale = scaled.view(d, s, 1, 1, 1, 1)
    t = torch.mul(t, scale, out=torch.empty_like(t)).view(d, n, parts, -1, rank)
    left = low_rank.left.to(t.dtype).view(d, 1, rank, parts, outputs // parts).transpose(2, 3)
    correction = torch.matmul(t, left).transpose(3, 4)  # directions, samples, parts, outputs of a part, places
    return y.add_(correction.reshape(d * n, outputs, *places).to(y.dtype))


def build(base: Tensor, low_rank: LowRank, scaled: Tensor) -> Tensor:
    """Return the perturbed matrix of each group: for uses that no layer here covers."""
    d, s = scaled.shape
    left = low_rank.left.float()[:, None] * scaled[:, :, None, None]
    right = low_rank.right.float().flatten(2)[:, None].expand(d, s, -1, -1)
    moved = torch.baddbmm(
        base.float().reshape(1, len(base), -1), left.flatten(0, 1).transpose(1, 2), right.flatten(0, 1)
    )  # fmt: skip
    return moved.view(d * s, *base.shape).to(base.dtype)


def _times(t: Tensor, scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Return t, (D, rows, R), times its groups' c in float32, rounded once."""
    d, s = scaled.shape
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    torch.mul(unflattened(t, 1, s, -1), scaled[:, :, None, None], out=out.view(d, s, -1, t.shape[2]))
    return out


def _add(y: Tensor, t: Tensor, outer: Tensor) -> Tensor:
    if y.is_contiguous():
        y.view(len(t), -1, y.shape[-1]).baddbmm_(t, outer)
        return y
    return torch.baddbmm(y.reshape(len(t), -1, y.shape[-1]), t, outer).view(y.shape)


def unflattened(t: Tensor, dimension: int, *sizes: int) -> Tensor:
    """Return a view of a tensor with one dimension as several."""
    found: Tensor = t.unflatten(dimension, sizes)  # type: ignore[no-untyped-call]  # torch has no types for it
    return found
