"""The kernels of fusion.py and gated.py, in Triton: computed in float32, rounded at the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cyber0.directions.backends.triton_layers import FEW_ROWS, MANY, MANY_ROWS, SOME_COLUMNS

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


@triton.jit(do_not_specialize=["rows", "each", "stride", "S"])
def _perturbed_silu_times(
    gate, up, x, gate_inner, gate_outer, up_inner, up_outer, scaled, rows, each, stride, S, IN: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write silu(gate + t b^T) * (up + t' b'^T) to gate, for some rows of one direction: t = c x a."""
    direction = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    oks = row < rows
    place = (direction * rows + row).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    gate_t, up_t = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for begin in range(0, IN, COLUMNS):
        i = begin + column
        part = tl.load(x + place[:, None] * IN + i[None, :], mask=oks[:, None] & (i < IN)[None, :], other=0.0)
        part = part.to(tl.float32)
        a = tl.load(gate_inner + direction * stride + i, mask=i < IN, other=0.0).to(tl.float32)
        gate_t += tl.sum(part * a[None, :], axis=1)
        a = tl.load(up_inner + direction * stride + i, mask=i < IN, other=0.0).to(tl.float32)
        up_t += tl.sum(part * a[None, :], axis=1)
    c = tl.load(scaled + direction * S + row // each, mask=oks, other=0.0)
    gate_t, up_t = gate_t * c, up_t * c
    for begin in range(0, OUT, COLUMNS):
        o = begin + column
        at, mask = place[:, None] * OUT + o[None, :], oks[:, None] & (o < OUT)[None, :]
        b = tl.load(gate_outer + direction * stride + o, mask=o < OUT, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32) + gate_t[:, None] * b[None, :]
        b = tl.load(up_outer + direction * stride + o, mask=o < OUT, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32) + up_t[:, None] * b[None, :]
        tl.store(gate + at, (g / (1.0 + tl.exp(-g)) * u).to(gate.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _attend(
    q, k, v, out, T, scale, q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the causal attention of one head of one sample: (sample, token, head, size)."""
    sample, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    shared = head // (HEADS // SHARED)
    token, lane = tl.arange(0, TOKENS), tl.arange(0, SIZE)
    inside = (token < T)[:, None]
    queries = tl.load(q + sample * q_sample + head * q_head + token[:, None] * q_token + lane[None, :], inside, 0.0)
    keys = tl.load(k + sample * k_sample + shared * k_head + token[:, None] * k_token + lane[None, :], inside, 0.0)
    values = tl.load(v + sample * v_sample + shared * v_head + token[:, None] * v_token + lane[None, :], inside, 0.0)
    scores = tl.dot(queries, tl.trans(keys)) * scale
    scores = tl.where((token[None, :] <= token[:, None]) & (token[None, :] < T), scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)
    found = tl.dot(weights.to(values.dtype), values) / total[:, None]
    at = (sample * T + token[:, None]) * (HEADS * SIZE) + head * SIZE + lane[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


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


def perturbed_silu_times(
    gate: Tensor, up: Tensor, x: Tensor, gate_factors: tuple[Tensor, Tensor], up_factors: tuple[Tensor, Tensor],
    scaled: Tensor,
) -> Tensor | None:  # fmt: skip
    """Return silu(gate + c (x a) b^T) * (up + c (x a') b'^T), written to gate; None for what this has no kernel for.

    Args:
        gate: (rows, ..., out), rows of all groups in order; up has the same shape.
        up: The other product.
        x: (rows, ..., in).
        gate_factors: a and b of the first matrix, (D, R, in) and (D, R, out).
        up_factors: Those of the second one.
        scaled: c / sqrt(R), (D, S).
    """
    factors, (d, s) = [*gate_factors, *up_factors], scaled.shape
    if not all(t.is_contiguous() for t in (gate, up, x)) or not gate.numel():
        return None
    if factors[0].shape[1] != 1 or any(t.stride(-1) != 1 or t.stride(0) != factors[0].stride(0) for t in factors):
        return None
    width, out = x.shape[-1], gate.shape[-1]
    rows = x.numel() // width // d
    some = MANY_ROWS if rows * d >= MANY else FEW_ROWS
    (gate_inner, gate_outer), (up_inner, up_outer) = gate_factors, up_factors
    _perturbed_silu_times[(triton.cdiv(rows, some), d)](
        gate, up, x, gate_inner, gate_outer, up_inner, up_outer, scaled, rows, rows // s, factors[0].stride(0), s,
        IN=width, OUT=out, ROWS=some, COLUMNS=SOME_COLUMNS,
    )  # fmt: skip
    return gate


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the causal attention of few tokens, (samples, heads, tokens, size), laid out token by token."""
    (samples, heads, tokens, size), shared = q.shape, k.shape[1]
    out = torch.empty(samples, tokens, heads, size, dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(tokens))
    strides = [t.stride(i) for t in (q, k, v) for i in range(3)]
    _attend[(samples * heads,)](
        q, k, v, out, tokens, scale, *strides,
        HEADS=heads, SHARED=shared, SIZE=size, TOKENS=padded, num_warps=1 if padded == 16 else 4 * padded // 64,
    )  # fmt: skip
    return out.transpose(1, 2)
