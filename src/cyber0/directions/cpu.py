"""Directions, perturbation and commit on the CPU: numba kernels that give the bits of definition.py.

Work is done in tiles of 1,024 coordinates that stay in the first-level cache: draw a tile of a direction,
add it to a tile of the update, and only at the end touch w. Kernels release the GIL; `run_in_threads`
splits the coordinates, which can't change a bit because a coordinate depends on nothing but its number.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from cyber0.directions.definition import BYTE_CENTRE, BYTE_WEIGHTS, NAN16, NAN32, NORM_GRID, POLYNOMIAL
from cyber0.directions.philox import INDEX_BITS, KEY_INCREMENTS, MULTIPLIERS, Stream

TILE = 1024
THREADED_FROM = 1 << 16  # coordinates times directions; below, handing out work costs more than it saves

GAUSSIAN, RADEMACHER, SPHERE = 0, 1, 2
FLOAT16, BFLOAT16 = 1, 2

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in KEY_INCREMENTS)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_A, _B, _C, _D = (np.float32(c) for c in POLYNOMIAL)
_B0, _B1, _B2, _B3 = (np.int32(w) for w in BYTE_WEIGHTS)
_CENTRE = np.int32(BYTE_CENTRE)
_GRID, _HALF = np.float32(NORM_GRID), np.float32(0.5)
_ROUNDING = np.uint64(Stream.ROUNDING << INDEX_BITS)
_ONE_BITS = np.uint32(0x3F800000)
_TINY = np.float32(2.0**-24)
_NAN16, _NAN32 = np.uint32(NAN16), np.uint32(NAN32)

_MACHINE = platform.machine().lower()


@intrinsic
def _set_float_mode(typingctx: Any, mode: Any) -> Any:
    """Set the thread's floating-point mode and return the old one (x86: MXCSR, ARM: FPCR).

    A user may have asked torch to flush denormals on this thread; the bits of a commit must not depend on it.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        module = builder.module
        if _MACHINE in ("x86_64", "amd64"):
            slot = cgutils.alloca_once(builder, ir.IntType(32))
            pointer = builder.bitcast(slot, ir.PointerType(ir.IntType(8)))
            kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8))])
            store = cgutils.get_or_insert_function(module, kind, "llvm.x86.sse.stmxcsr")
            load = cgutils.get_or_insert_function(module, kind, "llvm.x86.sse.ldmxcsr")
            builder.call(store, [pointer])
            old = builder.zext(builder.load(slot), ir.IntType(64))
            builder.store(builder.trunc(args[0], ir.IntType(32)), slot)
            builder.call(load, [pointer])
            return old
        if _MACHINE in ("aarch64", "arm64"):
            get = cgutils.get_or_insert_function(module, ir.FunctionType(ir.IntType(64), []), "llvm.aarch64.get.fpcr")
            put = cgutils.get_or_insert_function(
                module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), "llvm.aarch64.set.fpcr"
            )
            old = builder.call(get, [])
            builder.call(put, [args[0]])
            return old
        return args[0]

    return types.uint64(types.uint64), codegen


# Round to nearest even, denormals kept, no traps.
_EXACT = np.uint64(0x1F80) if _MACHINE in ("x86_64", "amd64") else np.uint64(0)


@njit(nogil=True, inline="always")
def _philox_round(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    p0 = c0 * _M0
    p1 = c2 * _M1
    return (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW


@njit(nogil=True, cache=True)
def _philox(pairs, block, round, index, key):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def _gaussian_tile(pairs, z, tile, round, index, key):  # type: ignore[no-untyped-def]
    _philox(pairs, uint64(tile) * uint64(TILE // 4), round, index, key)
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


@njit(nogil=True, cache=True)
def _rademacher_tile(pairs, z, tile, round, index, key):  # type: ignore[no-untyped-def]
    few = pairs[: TILE // 64]
    _philox(few, uint64(tile) * uint64(TILE // 128), round, index, key)
    words = few.view(np.uint32)
    bits = z.view(np.uint32)
    for j in range(TILE // 32):
        w = words[j]
        for i in range(32):
            bits[32 * j + i] = _ONE_BITS | ((w >> uint32(i)) << uint32(31))


@njit(nogil=True, cache=True)
def _direction_tile(pairs, z, tile, round, index, key, distribution, scale):  # type: ignore[no-untyped-def]
    if distribution == RADEMACHER:
        _rademacher_tile(pairs, z, tile, round, index, key)
    else:
        _gaussian_tile(pairs, z, tile, round, index, key)
        if distribution == SPHERE:
            for i in range(TILE):
                z[i] = z[i] * scale


@njit(nogil=True, cache=True)
def fill(out, start, low, high, key, round, first, distribution, scales, a, b):  # type: ignore[no-untyped-def]
    """Write coordinates start + low .. start + high - 1 of directions first + a .. first + b - 1 to out's rows a .. b - 1."""
    old = _set_float_mode(_EXACT)
    pairs, z = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.float32)
    for row in range(a, b):
        for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
            _direction_tile(pairs, z, tile, round, first + uint64(row), key, distribution, scales[row])
            i0, i1 = max(tile * TILE, start + low), min((tile + 1) * TILE, start + high)
            for i in range(i0, i1):
                out[row, i - start] = z[i - tile * TILE]
    _set_float_mode(old)


@njit(nogil=True, cache=True)
def squared_norm_units(low, high, key, round, index):  # type: ignore[no-untyped-def]
    """Return the sum of z^2 over coordinates low .. high - 1 of a Gaussian direction, in integer units."""
    old = _set_float_mode(_EXACT)
    pairs, z = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.float32)
    total = int64(0)
    for tile in range(low // TILE, (high - 1) // TILE + 1):
        _gaussian_tile(pairs, z, tile, round, index, key)
        a, b = max(tile * TILE, low) - tile * TILE, min((tile + 1) * TILE, high) - tile * TILE
        part = int64(0)
        for i in range(a, b):
            part += int64(int32(z[i] * z[i] * _GRID + _HALF))
        total += part
    _set_float_mode(old)
    return total


@njit(nogil=True, cache=True)
def coefficients(lr, values, k):  # type: ignore[no-untyped-def]
    """Return fp32(lr * values / k), whatever the thread's floating-point mode."""
    old = _set_float_mode(_EXACT)
    out = np.empty(values.shape[0], np.float32)
    for i in range(values.shape[0]):
        out[i] = float32(lr * values[i] / k)
    _set_float_mode(old)
    return out


@njit(nogil=True, inline="always")
def _canonical(x):  # type: ignore[no-untyped-def]
    return x if x == x else np.float32(np.nan)


@njit(nogil=True, cache=True)
def _widen_tile(stored, low, n, x, storage):  # type: ignore[no-untyped-def]
    bits = x.view(np.uint32)
    if storage == BFLOAT16:
        for i in range(n):
            bits[i] = uint32(stored[low + i]) << uint32(16)
        return
    for i in range(n):
        h = uint32(stored[low + i])
        magnitude = h & uint32(0x7FFF)
        if magnitude < uint32(0x400):  # subnormal: an exact product, free of float32 denormals
            x[i] = float32(int32(magnitude)) * _TINY
        elif magnitude < uint32(0x7C00):
            bits[i] = (magnitude << uint32(13)) + uint32(112 << 23)
        else:
            bits[i] = uint32(0x7F800000) | (magnitude << uint32(13))
        bits[i] |= (h >> uint32(15)) << uint32(31)


@njit(nogil=True, inline="always")
def _fp16_parts(a):  # type: ignore[no-untyped-def]
    """Split |x| into the integer to shift and the number of bits below fp16's last one."""
    exponent = int32(a >> uint32(23))
    if exponent >= int32(113):
        return a - uint32(112 << 23), uint32(13)
    if exponent == int32(0):
        return a & uint32(0x7FFFFF), uint32(125)
    return (a & uint32(0x7FFFFF)) | uint32(0x800000), uint32(int32(126) - exponent)


@njit(nogil=True, cache=True)
def _narrow_tile(x, stored, low, n, storage):  # type: ignore[no-untyped-def]
    """Round to nearest even, overflow to infinity."""
    bits = x.view(np.uint32)
    for i in range(n):
        w = bits[i]
        sign, a = (w >> uint32(31)) << uint32(15), w & uint32(0x7FFFFFFF)
        nan = a > uint32(0x7F800000)
        if storage == BFLOAT16:
            m = (a + uint32(0x7FFF) + ((a >> uint32(16)) & uint32(1))) >> uint32(16)
            stored[low + i] = np.uint16(_NAN16 if nan else sign | m)
        else:
            kept, below = _fp16_parts(a)
            if below > uint32(25):
                m = uint32(0)
            else:
                lo = kept >> below
                rest = kept - (lo << below)
                half = uint32(1) << (below - uint32(1))
                m = lo + uint32(1) if rest > half or (rest == half and lo & uint32(1)) else lo
            m = min(m, uint32(0x7C00))
            stored[low + i] = np.uint16(_NAN16 if nan else sign | m)


@njit(nogil=True, cache=True)
def _narrow_stochastically_tile(x, words, stored, low, n, storage):  # type: ignore[no-untyped-def]
    """Round up with the probability of the fraction, saturating at the largest finite value."""
    bits = x.view(np.uint32)
    for i in range(n):
        w = bits[i]
        sign, a = (w >> uint32(31)) << uint32(15), w & uint32(0x7FFFFFFF)
        nan = a > uint32(0x7F800000)
        if storage == BFLOAT16:
            m = (a >> uint32(16)) + (uint32(1) if words[i] < ((a & uint32(0xFFFF)) << uint32(16)) else uint32(0))
            stored[low + i] = np.uint16(_NAN16 if nan else sign | min(m, uint32(0x7F7F)))
        else:
            kept, below = _fp16_parts(a)
            lo = kept >> below if below < uint32(32) else uint32(0)
            rest = kept - (lo << below) if below < uint32(32) else kept
            if below <= uint32(32):
                threshold = uint64(rest) << uint64(uint32(32) - below)
            else:
                threshold = uint64(rest) >> uint64(below - uint32(32)) if below < uint32(60) else uint64(0)
            m = lo + (uint32(1) if uint64(words[i]) < threshold else uint32(0))
            stored[low + i] = np.uint16(_NAN16 if nan else sign | min(m, uint32(0x7BFF)))


@njit(nogil=True, cache=True)
def _update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution):  # type: ignore[no-untyped-def]
    for i in range(TILE):
        u[i] = float32(0.0)
    for r in range(c.shape[1]):
        _direction_tile(pairs, z, tile, rounds[s], uint64(firsts[s] + uint64(r)), keys[s], distribution, scales[s, r])
        factor = c[s, r]
        for i in range(TILE):
            u[i] = u[i] + factor * z[i]


@njit(nogil=True, cache=True)
def apply32(source, out, start, low, high, steps, look, distribution):  # type: ignore[no-untyped-def]
    """Float32: out[low:high] = source[low:high] after all steps, then looked at through `look`."""
    old = _set_float_mode(_EXACT)
    keys, rounds, firsts, roundings, c, scales = steps
    looking, key, round, index, factor, scale = look
    pairs = np.empty(TILE // 2, np.uint64)
    z, u, x = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
        a, b = max(tile * TILE, start + low) - start, min((tile + 1) * TILE, start + high) - start
        shift, n = a + start - tile * TILE, b - a
        for i in range(n):
            x[i] = source[a + i]
        for s in range(c.shape[0]):
            _update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution)
            for i in range(n):
                x[i] = _canonical(x[i] - u[shift + i])
        if looking:
            _direction_tile(pairs, z, tile, round, index, key, distribution, scale)
            for i in range(n):
                x[i] = _canonical(x[i] + factor * z[shift + i])
        for i in range(n):
            out[a + i] = x[i]
    _set_float_mode(old)


@njit(nogil=True, cache=True)
def apply16(source, out, start, low, high, steps, look, distribution, storage):  # type: ignore[no-untyped-def]
    """The same for the uint16 patterns of float16 or bfloat16, rounded after every step."""
    old = _set_float_mode(_EXACT)
    keys, rounds, firsts, roundings, c, scales = steps
    looking, key, round, index, factor, scale = look
    pairs, stored = np.empty(TILE // 2, np.uint64), np.empty(TILE, np.uint16)
    words = pairs.view(np.uint32)
    z, u, x = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
        a, b = max(tile * TILE, start + low) - start, min((tile + 1) * TILE, start + high) - start
        shift, n = a + start - tile * TILE, b - a
        for i in range(n):
            stored[i] = source[a + i]
        for s in range(c.shape[0]):
            _update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution)
            _widen_tile(stored, 0, n, x, storage)
            for i in range(n):
                x[i] = x[i] - u[shift + i]
            _philox(pairs, uint64(tile) * uint64(TILE // 4), rounds[s], _ROUNDING | uint64(roundings[s]), keys[s])
            _narrow_stochastically_tile(x, words[shift:], stored, 0, n, storage)
        if looking:
            _direction_tile(pairs, z, tile, round, index, key, distribution, scale)
            _widen_tile(stored, 0, n, x, storage)
            for i in range(n):
                x[i] = x[i] + factor * z[shift + i]
            _narrow_tile(x, stored, 0, n, storage)
        for i in range(n):
            out[a + i] = stored[i]
    _set_float_mode(old)


@njit(nogil=True, cache=True)
def scale32(values, factor):  # type: ignore[no-untyped-def]
    """Multiply float32 weights by one float32 factor, in place."""
    old = _set_float_mode(_EXACT)
    for i in range(values.shape[0]):
        values[i] = _canonical(values[i] * factor)
    _set_float_mode(old)


@njit(nogil=True, cache=True)
def scale16(values, factor, storage):  # type: ignore[no-untyped-def]
    """Multiply 16-bit weights by one float32 factor, rounded to nearest even, in place."""
    old = _set_float_mode(_EXACT)
    x = np.empty(TILE, np.float32)
    for low in range(0, values.shape[0], TILE):
        n = min(TILE, values.shape[0] - low)
        _widen_tile(values, low, n, x, storage)
        for i in range(n):
            x[i] = x[i] * factor
        _narrow_tile(x, values, low, n, storage)
    _set_float_mode(old)


def thread_count() -> int:
    """Return how many threads the kernels use: $CYBER0_THREADS, else the processors this process may use."""
    wanted = os.environ.get("CYBER0_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """One pool per process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="cyber0")


def run_in_threads(kernel: Callable[[int, int], Any], pieces: list[tuple[int, int]]) -> list[Any]:
    """Call kernel(low, high) for every piece, one thread each, and return the results in order."""
    if len(pieces) == 1:
        return [kernel(*pieces[0])]
    pool = _pool(thread_count(), os.getpid())
    futures = [pool.submit(kernel, low, high) for low, high in pieces[1:]]
    return [kernel(*pieces[0]), *(f.result() for f in futures)]


def split(start: int, count: int, work: int) -> list[tuple[int, int]]:
    """Cut [0, count) for the threads, at multiples of the tile of coordinate start + i; one piece if `work` is small."""
    threads = thread_count() if work >= THREADED_FROM else 1
    if threads == 1 or count <= 2 * TILE:
        return [(0, count)]
    step = -(-count // (threads * TILE)) * TILE
    cuts = [0, *range(step - start % TILE, count, step), count]
    return list(zip(cuts, cuts[1:], strict=False))


def split_rows(rows: int, work: int) -> list[tuple[int, int]]:
    """Cut [0, rows) into one range a thread; one piece if `work` is small."""
    threads = min(rows, thread_count()) if work >= THREADED_FROM else 1
    cuts = [rows * i // threads for i in range(threads + 1)]
    return list(zip(cuts, cuts[1:], strict=False))
