"""Steps of 16-bit matrices along low-rank directions in Triton: tiles of triton_low_rank.py.

A block of rounding words serves 8 consecutive coordinates, or two of them do, and a program computes the words of a
tile as matrices with an eighth of its columns. So the weights of a tile are taken apart in the same way: plane p has
the columns p, p + 8, p + 16, ... Then no number has to move to another thread until all steps are done; to put words in
the order of the weights at each step took longer than all else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cyber0.directions.backends.triton_kernels import (
    _LARGEST,
    _ROUNDING,
    _moved,
    _narrow_stochastically,
    _philox,
    _unsigned,
)

WORD_BLOCK = 8  # coordinates that a block of rounding words serves at most
_TAME = tl.constexpr(1e27)  # coefficients up to this give finite steps, however many and of whatever rank


@triton.jit
def _words_of(meta, step, first, columns, HALVES: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """Return the words that round the planes of a tile, whose first coordinate is a multiple of 8, as `columns` is.

    Ones below a half make it a word that rounds as it does.
    """
    at = meta + 5 * step
    k0, k1 = _unsigned(tl.load(at)), _unsigned(tl.load(at + 1))
    t, n = _unsigned(tl.load(at + 2)), _unsigned(tl.load(at + 4))
    block = (first + tl.arange(0, R)[:, None].to(tl.int64) * columns) // 8 + tl.arange(0, G)[None, :]
    if HALVES:
        r0, r1, r2, r3 = _philox_of(block, t, n, k0, k1)
        even0, even1, even2, even3 = r0 << 16 | 0xFFFF, r1 << 16 | 0xFFFF, r2 << 16 | 0xFFFF, r3 << 16 | 0xFFFF
        return even0, r0 | 0xFFFF, even1, r1 | 0xFFFF, even2, r2 | 0xFFFF, even3, r3 | 0xFFFF
    r0, r1, r2, r3 = _philox_of(block * 2, t, n, k0, k1)
    r4, r5, r6, r7 = _philox_of(block * 2 + 1, t, n, k0, k1)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def _philox_of(number, t, n, k0, k1):
    """Return the words of blocks of the rounding stream."""
    number = number.to(tl.uint64)
    return _philox(number.to(tl.uint32), (number >> 32).to(tl.uint32), t, n | _ROUNDING, k0, k1)


@triton.jit
def _planes(x, R: tl.constexpr, G: tl.constexpr):
    """Return the columns 0, 8, ..., those 1, 9, ..., up to 7, 15, ... of a tile."""
    even, odd = tl.split(tl.reshape(x, (R, G, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _tile_of_planes(x0, x1, x2, x3, x4, x5, x6, x7, R: tl.constexpr, G: tl.constexpr):
    """Return a tile again."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (R, G * 8))


@triton.jit
def _added(u, c, b, a, more_b, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK: tl.constexpr):
    """Return u + c z for a plane: b are the first factors of its rows, `a` points to those of its columns less i."""
    z = b[:, None] * tl.load(a + i, mask=iks, other=0.0)[None, :]
    for q in range(1, LAYOUT_RANK):
        more = tl.load(more_b + q * rows + o, mask=oks, other=0.0)
        z = z + more[:, None] * tl.load(a + q * columns + i, mask=iks, other=0.0)[None, :]
    if LAYOUT_RANK > 1:
        z = z * scale
    return u + c * z


@triton.jit
def _update_planes(
    numbers, rows, columns, begin_b, begin_a, width, s, step0, K, coefficients, o, i, oks, iks, scale,
    ONE: tl.constexpr, TOGETHER: tl.constexpr, LAYOUT_RANK: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return u of one step for the planes of a tile, and whether a coefficient is so large that it may be infinite."""
    u0 = tl.zeros((R, G), tl.float32)
    u1, u2, u3, u4, u5, u6, u7 = u0, u0, u0, u0, u0, u0, u0
    wild = s * 0
    for some in range(0, 1 if ONE else K, TOGETHER):
        for n in tl.static_range(TOGETHER):
            row = numbers + (s * K + some + n).to(tl.int64) * width
            bs, a = row + begin_b, row + begin_a
            b = tl.load(bs + o, mask=oks, other=0.0)
            c = tl.load(coefficients + (step0 + s) * K + some + n)
            wild = wild | tl.where(tl.abs(c) <= _TAME, 0, 1)
            u0 = _added(u0, c, b, a, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u1 = _added(u1, c, b, a + 1, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u2 = _added(u2, c, b, a + 2, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u3 = _added(u3, c, b, a + 3, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u4 = _added(u4, c, b, a + 4, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u5 = _added(u5, c, b, a + 5, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u6 = _added(u6, c, b, a + 6, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
            u7 = _added(u7, c, b, a + 7, bs, rows, columns, i, o, oks, iks, scale, LAYOUT_RANK)
    return u0, u1, u2, u3, u4, u5, u6, u7, wild


@triton.jit
def _exactly(x, u, word, DTYPE: tl.constexpr):
    """Return 16-bit weights, kept in float32, after a step."""
    return _narrow_stochastically(_moved(x, u), word, DTYPE).to(tl.float32)


@triton.jit
def _quickly(x, u, word):
    """Return the same in bfloat16 where all is finite: a carry out of the lower half rounds up."""
    least = (word ^ 0xFFFFFFFF) >> 16
    return (((x - u).to(tl.uint32, bitcast=True) + least) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _odd(x):
    return tl.where(tl.abs(x) <= _LARGEST, 0, 1)


@triton.jit
def _any_odd(x0, x1, x2, x3, x4, x5, x6, x7):
    """Return where a weight is not finite."""
    return _odd(x0) | _odd(x1) | _odd(x2) | _odd(x3) | _odd(x4) | _odd(x5) | _odd(x6) | _odd(x7)


@triton.jit
def steps_in_16_bits(
    stored, first, numbers, rows, columns, begin_b, begin_a, width, scale, step0, S, K, meta, coefficients, o, i, oks,
    iks, HALVES: tl.constexpr, ONE: tl.constexpr, UNROLL: tl.constexpr, TOGETHER: tl.constexpr,
    LAYOUT_RANK: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return a tile of R rows and 8 G columns after the steps.

    A tile in bfloat16 is first computed by `_quickly`, which is right while all is finite. An infinite weight stays
    infinite, so the end shows it. A tile that has one, or had a NaN, or whose steps have a coefficient above _TAME, is
    computed again exactly.
    """
    DTYPE: tl.constexpr = stored.dtype
    x0, x1, x2, x3, x4, x5, x6, x7 = _planes(stored.to(tl.float32), R, G)
    exactly = True
    if tl.bfloat16 == DTYPE:
        odd, wild = _any_odd(x0, x1, x2, x3, x4, x5, x6, x7), S * 0
        for some in range(0, S, UNROLL):
            for more in tl.static_range(UNROLL):
                u0, u1, u2, u3, u4, u5, u6, u7, huge = _update_planes(
                    numbers, rows, columns, begin_b, begin_a, width, some + more, step0, K, coefficients, o, i, oks,
                    iks, scale, ONE, TOGETHER, LAYOUT_RANK, R, G,
                )  # fmt: skip
                w0, w1, w2, w3, w4, w5, w6, w7 = _words_of(meta, step0 + some + more, first, columns, HALVES, R, G)
                x0, x1, x2, x3 = _quickly(x0, u0, w0), _quickly(x1, u1, w1), _quickly(x2, u2, w2), _quickly(x3, u3, w3)
                x4, x5, x6, x7 = _quickly(x4, u4, w4), _quickly(x5, u5, w5), _quickly(x6, u6, w6), _quickly(x7, u7, w7)
                wild = wild | huge
        odd = odd | _any_odd(x0, x1, x2, x3, x4, x5, x6, x7)
        exactly = (tl.max(tl.max(odd, axis=1), axis=0) | wild) > 0
    if exactly:
        x0, x1, x2, x3, x4, x5, x6, x7 = _planes(stored.to(tl.float32), R, G)
        for s in range(S):
            u0, u1, u2, u3, u4, u5, u6, u7, huge = _update_planes(
                numbers, rows, columns, begin_b, begin_a, width, s, step0, K, coefficients, o, i, oks, iks, scale, ONE,
                TOGETHER, LAYOUT_RANK, R, G,
            )  # fmt: skip
            w0, w1, w2, w3, w4, w5, w6, w7 = _words_of(meta, step0 + s, first, columns, HALVES, R, G)
            x0, x1 = _exactly(x0, u0, w0, DTYPE), _exactly(x1, u1, w1, DTYPE)
            x2, x3 = _exactly(x2, u2, w2, DTYPE), _exactly(x3, u3, w3, DTYPE)
            x4, x5 = _exactly(x4, u4, w4, DTYPE), _exactly(x5, u5, w5, DTYPE)
            x6, x7 = _exactly(x6, u6, w6, DTYPE), _exactly(x7, u7, w7, DTYPE)
    return _tile_of_planes(x0, x1, x2, x3, x4, x5, x6, x7, R, G).to(DTYPE)
