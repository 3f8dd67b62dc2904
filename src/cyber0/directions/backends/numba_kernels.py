"""Directions, perturbation and commit on the CPU: numba kernels that give the bits of definition.py.

Work is done in tiles of 1,024 coordinates that stay in the first-level cache: draw a tile of a direction,
add it to a tile of the update, and only at the end touch w. Kernels release the GIL; cpu.py hands out the work.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, uint32, uint64

from cyber0.directions.backends.float_mode import EXACT, set_float_mode
from cyber0.directions.backends.low_rank_kernels import add_low_rank_tile, low_rank_tile
from cyber0.directions.backends.rounding import (
    canonical,
    moved,
    moved32,
    narrow_stochastically_tile,
    narrow_tile,
    widen_tile,
)
from cyber0.directions.definition import BYTE_CENTRE, BYTE_WEIGHTS, HALF_WORDS, LARGEST, NORM_GRID, POLYNOMIAL
from cyber0.directions.philox import INDEX_BITS, KEY_INCREMENTS, MULTIPLIERS, Stream
from cyber0.kernels.compiled import inline, kernel
from cyber0.kernels.threads import TILE

GAUSSIAN, RADEMACHER, SPHERE, LOW_RANK = 0, 1, 2, 3
CODES = {"gaussian": GAUSSIAN, "rademacher": RADEMACHER, "sphere": SPHERE, "low_rank": LOW_RANK}

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in KEY_INCREMENTS)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_A, _B, _C, _D = (np.float32(c) for c in POLYNOMIAL)
_B0, _B1, _B2, _B3 = (np.int32(w) for w in BYTE_WEIGHTS)
_CENTRE = np.int32(BYTE_CENTRE)
_GRID, _HALF = np.float32(NORM_GRID), np.float32(0.5)
_LARGEST, _LARGEST32 = np.float64(LARGEST), np.float32(LARGEST)
ROUNDING, _HALF_WORDS = np.uint64(Stream.ROUNDING << INDEX_BITS), np.uint64(HALF_WORDS)
_ONE_BITS = np.uint32(0x3F800000)


@inline
def _philox_round(c0, c1, c2, c3, k0, k1):
    p0 = c0 * _M0
    p1 = c2 * _M1
    return (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW


@kernel
def philox(pairs, block, round, index, key):
    """Fill `pairs` (two words in each uint64) with consecutive blocks. Unrolled by hand: it then vectorises."""
    a0, b0 = key & _LOW, key >> _32
    a1, b1 = (a0 + _W0) & _LOW, (b0 + _W1) & _LOW
    a2, b2 = (a1 + _W0) & _LOW, (b1 + _W1) & _LOW
    a3, b3 = (a2 + _W0) & _LOW, (b2 + _W1) & _LOW
    a4, b4 = (a3 + _W0) & _LOW, (b3 + _W1) & _LOW
    a5, b5 = (a4 + _W0) & _LOW, (b4 + _W1) & _LOW
    a6, b6 = (a5 + _W0) & _LOW, (b5 + _W1) & _LOW
    a7, b7 = (a6 + _W0) & _LOW, (b6 + _W1) & _LOW
    a8, b8 = (a7 + _W0) & _LOW, (b7 + _W1) & _LOW
    a9, b9 = (a8 + _W0) & _LOW, (b8 + _W1) & _LOW
    low, high = block & _LOW, block >> _32  # a tile never crosses 2^32 blocks: its first block is a multiple
    for j in range(pairs.shape[0] // 2):
        c0, c1, c2, c3 = _philox_round(low + uint64(j), high, round, index, a0, b0)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a1, b1)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a2, b2)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a3, b3)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a4, b4)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a5, b5)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a6, b6)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a7, b7)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a8, b8)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a9, b9)
        pairs[2 * j] = c0 | (c1 << _32)
        pairs[2 * j + 1] = c2 | (c3 << _32)


@kernel
def _gaussian_tile(pairs, z, tile, round, index, key):
    philox(pairs, uint64(tile) * uint64(TILE // 4), round, index, key)
    words = pairs.view(np.uint32)
    for i in range(TILE):
        w = words[i]
        total = (
            (int32(w << uint32(24)) >> int32(24)) * _B0
            + (int32(w << uint32(16)) >> int32(24)) * _B1
            + (int32(w << uint32(8)) >> int32(24)) * _B2
            + (int32(w) >> int32(24)) * _B3
            + _CENTRE
        )
        x = float32(total)
        t = x * x
        z[i] = x * (_A + t * (_B + t * (_C + t * _D)))


@kernel
def _rademacher_tile(pairs, z, tile, round, index, key):
    few = pairs[: TILE // 64]
    philox(few, uint64(tile) * uint64(TILE // 128), round, index, key)
    words = few.view(np.uint32)
    bits = z.view(np.uint32)
    for j in range(TILE // 32):
        w = words[j]
        for i in range(32):
            bits[32 * j + i] = _ONE_BITS | ((w >> uint32(i)) << uint32(31))


@kernel
def _direction_tile(pairs, z, tile, round, index, key, distribution, scale, factors, row):
    """Write a tile of a direction; of low-rank ones, from the numbers in a row of `factors`."""
    if distribution == LOW_RANK:
        low_rank_tile(z, tile, factors, row)
    elif distribution == RADEMACHER:
        _rademacher_tile(pairs, z, tile, round, index, key)
    else:
        _gaussian_tile(pairs, z, tile, round, index, key)
        if distribution == SPHERE:
            for i in range(TILE):
                z[i] = z[i] * scale


@kernel
def draw(numbers, draws, keys, rounds, firsts, a, b):
    """Write numbers of the stream, by runs of (first, length, place), to rows [a, b): one a direction of all steps."""
    old = set_float_mode(EXACT)
    pairs, z = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.float32)
    each = numbers.shape[0] // keys.shape[0]
    for row in range(a, b):
        s, index = row // each, uint64(firsts[row // each] + uint64(row % each))
        for run in range(draws.shape[0]):
            at, count, place = draws[run, 0], draws[run, 1], draws[run, 2]
            for tile in range(at // TILE, (at + count - 1) // TILE + 1):
                i0, i1 = max(tile * TILE, at), min((tile + 1) * TILE, at + count)
                _gaussian_tile(pairs, z, tile, rounds[s], index, keys[s])
                target, source = numbers[row, place + i0 - at : place + i1 - at], z[i0 - tile * TILE :]
                for i in range(i1 - i0):
                    target[i] = source[i]
    set_float_mode(old)


@kernel
def fill(out, start, low, high, key, round, first, distribution, scales, factors, a, b):
    """Write coordinates [start + low, start + high) of directions [first + a, first + b) to rows [a, b) of out."""
    old = set_float_mode(EXACT)
    pairs, z = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.float32)
    for row in range(a, b):
        for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
            i0, i1 = max(tile * TILE, start + low), min((tile + 1) * TILE, start + high)
            whole = i1 - i0 == TILE
            target = out[row, i0 - start : i1 - start] if whole else z
            index = first + uint64(row)
            _direction_tile(pairs, target, tile, round, index, key, distribution, scales[row], factors, row)
            if not whole:
                for i in range(i0, i1):
                    out[row, i - start] = z[i - tile * TILE]
    set_float_mode(old)


@kernel
def squared_norm_units(low, high, key, round, index):
    """Return the sum of z^2 over coordinates low .. high - 1 of a Gaussian direction, in integer units."""
    old = set_float_mode(EXACT)
    pairs, z = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.float32)
    total = int64(0)
    for tile in range(low // TILE, (high - 1) // TILE + 1):
        _gaussian_tile(pairs, z, tile, round, index, key)
        a, b = max(tile * TILE, low) - tile * TILE, min((tile + 1) * TILE, high) - tile * TILE
        part = int64(0)
        for i in range(a, b):
            part += int64(int32(z[i] * z[i] * _GRID + _HALF))
        total += part
    set_float_mode(old)
    return total


@kernel
def coefficients(lr, values, k):
    """Return fp32(lr * values / k), clamped to the finite range, whatever the thread's floating-point mode."""
    old = set_float_mode(EXACT)
    out = np.empty(values.shape[0], np.float32)
    for i in range(values.shape[0]):
        c = lr * values[i] / k
        c = _LARGEST if c > _LARGEST else c
        out[i] = float32(-_LARGEST if c < -_LARGEST else c)
    set_float_mode(old)
    return out


@kernel
def to_float32(value):
    """Return fp32(value), whatever the thread's floating-point mode."""
    old = set_float_mode(EXACT)
    out = np.empty(1, np.float32)
    out[0] = float32(value)
    set_float_mode(old)
    return out


@kernel
def update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution, factors):
    if distribution == LOW_RANK and c.shape[1] > 0:
        for r in range(c.shape[1]):
            add_low_rank_tile(u, z, tile, factors, s * c.shape[1] + r, c[s, r], r == 0)
        return
    for i in range(TILE):
        u[i] = float32(0.0)
    for r in range(c.shape[1]):
        index, row = uint64(firsts[s] + uint64(r)), s * c.shape[1] + r
        _direction_tile(pairs, z, tile, rounds[s], index, keys[s], distribution, scales[s, r], factors, row)
        factor = c[s, r]
        for i in range(TILE):
            u[i] = u[i] + factor * z[i]


@kernel
def _all_finite(x):
    odd = np.uint32(0)
    for i in range(x.shape[0]):
        odd |= uint32(0) if abs(x[i]) <= _LARGEST32 else uint32(1)
    return odd == 0


@kernel
def apply32(source, out, start, low, high, steps, probe, distribution, factors):
    """Float32: out[low:high] = source[low:high] after all steps, then perturbed by the probe."""
    old = set_float_mode(EXACT)
    keys, rounds, firsts, _, c, scales = steps
    probing, key, round, index, coefficient, scale = probe
    factor = float32(coefficient)  # here, not in Python: there the user's mode would flush a denormal
    pairs = np.empty(TILE // 2, np.uint64)
    z, u, x = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
        a, b = max(tile * TILE, start + low) - start, min((tile + 1) * TILE, start + high) - start
        shift, n = a + start - tile * TILE, b - a
        before, after = source[a:b], out[a:b]  # slices: an index a + i would keep the loops from being vectorised
        finite = True
        # First without what moved32 does about numbers that are not finite: a weight that becomes one stays one.
        for _ in range(2):
            for i in range(n):
                x[i] = before[i]
            for s in range(c.shape[0]):
                update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution, factors)
                update = u[shift : shift + n]
                if finite:
                    for i in range(n):
                        x[i] = x[i] - update[i]
                else:
                    for i in range(n):
                        x[i] = moved32(x[i], update[i])
            if not finite or c.shape[0] == 0:
                break
            finite = _all_finite(x[:n])
            if finite:
                break
        if probing:
            _direction_tile(pairs, z, tile, round, index, key, distribution, scale, factors, c.size)
            drawn = z[shift : shift + n]
            for i in range(n):
                x[i] = canonical(x[i] + factor * drawn[i])
        for i in range(n):
            after[i] = x[i]
    set_float_mode(old)


@kernel
def perturb32(source, out, low, high, z, coefficient):
    """Float32: out[low:high] = source[low:high] perturbed by a direction that is in memory."""
    old = set_float_mode(EXACT)
    factor = float32(coefficient)
    before, after, drawn = source[low:high], out[low:high], z[low:high]
    for i in range(high - low):
        after[i] = canonical(before[i] + factor * drawn[i])
    set_float_mode(old)


@kernel
def move32(weights, low, high, z, c):
    """Float32: the same step for weights[low:high] from directions that lie in memory, the rows of z."""
    old = set_float_mode(EXACT)
    u = np.empty(TILE, np.float32)
    for begin in range(low, high, TILE):
        n = min(TILE, high - begin)
        for i in range(n):
            u[i] = float32(0.0)
        for r in range(c.shape[0]):
            factor, row = c[r], z[r, begin : begin + n]
            for i in range(n):
                u[i] = u[i] + factor * row[i]
        part = weights[begin : begin + n]
        for i in range(n):
            part[i] = moved32(part[i], u[i])
    set_float_mode(old)


@kernel
def round_tile(x, stored, pairs, tile, shift, n, key, round, rounding, storage):
    """Round x, coordinates shift .. shift + n - 1 of a tile, to `stored` by the words of a step."""
    index = ROUNDING | (uint64(rounding) & _LOW)
    if uint64(rounding) & _HALF_WORDS:
        few = pairs[: TILE // 4]
        philox(few, uint64(tile) * uint64(TILE // 8), round, index, key)
        narrow_stochastically_tile(x, few.view(np.uint16)[shift:], stored, 0, n, storage)
    else:
        philox(pairs, uint64(tile) * uint64(TILE // 4), round, index, key)
        narrow_stochastically_tile(x, pairs.view(np.uint32)[shift:], stored, 0, n, storage)


@kernel
def apply16(source, out, start, low, high, steps, probe, distribution, factors, storage):
    """The same for the uint16 patterns of float16 or bfloat16, rounded after every step."""
    old = set_float_mode(EXACT)
    keys, rounds, firsts, roundings, c, scales = steps
    probing, key, round, index, coefficient, scale = probe
    factor = float32(coefficient)  # here, not in Python: there the user's mode would flush a denormal
    pairs, stored = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.uint16)
    z, u, x = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
        a, b = max(tile * TILE, start + low) - start, min((tile + 1) * TILE, start + high) - start
        shift, n = a + start - tile * TILE, b - a
        before, after = source[a:b], out[a:b]
        for i in range(n):
            stored[i] = before[i]
        for s in range(c.shape[0]):
            update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution, factors)
            widen_tile(stored, 0, n, x, storage)
            update = u[shift : shift + n]
            for i in range(n):
                x[i] = moved(x[i], update[i])
            round_tile(x, stored, pairs, tile, shift, n, keys[s], rounds[s], roundings[s], storage)
        if probing:
            _direction_tile(pairs, z, tile, round, index, key, distribution, scale, factors, c.size)
            widen_tile(stored, 0, n, x, storage)
            drawn = z[shift : shift + n]
            for i in range(n):
                x[i] = x[i] + factor * drawn[i]
            narrow_tile(x, stored, 0, n, storage)
        for i in range(n):
            after[i] = stored[i]
    set_float_mode(old)


@kernel
def scale32(values, factor):
    """Multiply float32 weights by one float32 factor, in place."""
    old = set_float_mode(EXACT)
    for i in range(values.shape[0]):
        values[i] = canonical(values[i] * factor)
    set_float_mode(old)


@kernel
def scale16(values, factor, storage):
    """Multiply 16-bit weights by one float32 factor, rounded to nearest even, in place."""
    old = set_float_mode(EXACT)
    x = np.empty(TILE, np.float32)
    for low in range(0, values.shape[0], TILE):
        n = min(TILE, values.shape[0] - low)
        widen_tile(values, low, n, x, storage)
        for i in range(n):
            x[i] = x[i] * factor
        narrow_tile(x, values, low, n, storage)
    set_float_mode(old)
