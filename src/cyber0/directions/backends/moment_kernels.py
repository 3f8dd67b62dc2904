"""Steps of optimizers with vectors beside w, on the CPU: numba kernels that give the bits of moments.py.

As in numba_kernels.py, a tile of 1,024 coordinates passes through all steps before the next one: w and the vectors are
read and written once, however many steps there are.
"""

from __future__ import annotations

import numpy as np
from numba import float32

from cyber0.directions.backends.float_mode import EXACT, set_float_mode
from cyber0.directions.backends.numba_kernels import round_tile, update_tile
from cyber0.directions.backends.rounding import moved, moved32, widen_tile
from cyber0.directions.moments import LIMIT
from cyber0.kernels.compiled import inline, kernel
from cyber0.kernels.threads import TILE

MOMENTUM, ADAM, HESSIAN = 0, 1, 2
CODES = {"momentum": MOMENTUM, "adam": ADAM, "hessian": HESSIAN}

_LIMIT = np.float32(LIMIT)


@inline
def _bounded(u):
    """Return u clamped, 0 where it is not a number. By comparisons: min and max disagree about NaN."""
    u = u if u == u else float32(0.0)
    u = _LIMIT if u > _LIMIT else u
    return -_LIMIT if u < -_LIMIT else u


@kernel
def _move_tile(rule, u, first, second, constants):
    """Advance a tile of the vectors by its u, and overwrite u by what w moves by."""
    n = u.shape[0]
    for i in range(n):
        u[i] = _bounded(u[i])
    if rule == MOMENTUM:
        keep, take = constants[0], constants[1]
        for i in range(n):
            first[i] = keep * first[i] + take * u[i]
            u[i] = first[i]
    elif rule == ADAM:
        keep_m, take_m, keep_v, take_v = constants[0], constants[1], constants[2], constants[3]
        correct_m, correct_v, lr, eps = constants[4], constants[5], constants[6], constants[7]
        for i in range(n):
            first[i] = keep_m * first[i] + take_m * u[i]
            second[i] = keep_v * second[i] + take_v * (u[i] * u[i])
            u[i] = np.divide(lr * (first[i] * correct_m), np.sqrt(second[i] * correct_v) + eps)
    elif rule == HESSIAN:
        keep, take, floor, lr = constants[0], constants[1], constants[2], constants[3]
        for i in range(n):
            step = _bounded(np.divide(u[i], np.sqrt(first[i])))
            first[i] = keep * first[i] + take * (step * step + floor)
            u[i] = lr * step


@kernel
def advance32(weights, first, second, start, low, high, steps, rule, constants, distribution, factors):
    """Float32: weights[low:high] and the vectors there after all steps, in place."""
    old = set_float_mode(EXACT)
    keys, rounds, firsts, _, c, scales = steps
    pairs = np.empty(TILE // 2, np.uint64)
    z, u = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
        a, b = max(tile * TILE, start + low) - start, min((tile + 1) * TILE, start + high) - start
        shift, n = a + start - tile * TILE, b - a
        x, update = weights[a:b], u[shift : shift + n]
        for s in range(c.shape[0]):
            update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution, factors)
            _move_tile(rule, update, first[a:b], second[a:b], constants[s])
            for i in range(n):
                x[i] = moved32(x[i], update[i])
    set_float_mode(old)


@kernel
def advance16(weights, first, second, start, low, high, steps, rule, constants, distribution, factors, storage):
    """The same for the uint16 patterns of float16 or bfloat16, rounded after every step."""
    old = set_float_mode(EXACT)
    keys, rounds, firsts, roundings, c, scales = steps
    pairs = np.empty(TILE // 2, np.uint64)
    z, u, x = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range((start + low) // TILE, (start + high - 1) // TILE + 1):
        a, b = max(tile * TILE, start + low) - start, min((tile + 1) * TILE, start + high) - start
        shift, n = a + start - tile * TILE, b - a
        stored, update = weights[a:b], u[shift : shift + n]
        for s in range(c.shape[0]):
            update_tile(u, z, pairs, tile, s, keys, rounds, firsts, c, scales, distribution, factors)
            _move_tile(rule, update, first[a:b], second[a:b], constants[s])
            widen_tile(stored, 0, n, x, storage)
            for i in range(n):
                x[i] = moved(x[i], update[i])
            round_tile(x, stored, pairs, tile, shift, n, keys[s], rounds[s], roundings[s], storage)
    set_float_mode(old)
