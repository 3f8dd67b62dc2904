"""Coordinates of low-rank directions on the CPU, from numbers that have been drawn: the bits of low_rank.py."""

from __future__ import annotations

import numpy as np
from numba import float32

from cyber0.directions.backends.factors import BEGIN, COLUMNS, END, RANK, ROWS, SKIPPED, A, B
from cyber0.kernels.compiled import kernel
from cyber0.kernels.threads import TILE

COORDINATES, BEGUN, ADDED = 0, 1, 2  # only z is wanted; u = 0 + c z; u = u + c z
NO_FACTORS = (np.zeros((0, 8), np.int64), np.zeros((0, 0), np.float32), np.float32(1))
"""What kernels are given for other distributions: parts, numbers drawn and scale."""


@kernel
def low_rank_tile(z, tile, factors, row):
    """Write those coordinates of a tile that are in the piece; the row of numbers is that of the direction."""
    _tile(z, z, tile, factors, row, np.float32(0), COORDINATES)


@kernel
def add_low_rank_tile(u, z, tile, factors, row, c, first):
    """Add c times these coordinates to u, or to 0 if it is the first direction; z is scratch."""
    _tile(z, u, tile, factors, row, c, BEGUN if first else ADDED)


@kernel
def _tile(z, u, tile, factors, row, c, mode):
    parts, numbers, scale = factors
    start = tile * TILE
    p, after = 0, parts.shape[0]
    while p < after:  # the first part that ends behind the beginning of the tile
        middle = (p + after) // 2
        if parts[middle, END] <= start:
            p = middle + 1
        else:
            after = middle
    while p < parts.shape[0] and parts[p, BEGIN] < start + TILE:
        low, high = max(parts[p, BEGIN], start), min(parts[p, END], start + TILE)
        here, done, b = low - parts[p, BEGIN], low - start, parts[p, B]
        if parts[p, RANK] == 0:
            entries, target = numbers[row, b + here : b + here + high - low], z[done : done + high - low]
            for i in range(high - low):
                target[i] = entries[i]
            _add(u[done : done + high - low], target, c, mode)
        else:
            columns = parts[p, COLUMNS]
            o, i = (here + parts[p, SKIPPED]) // columns, (here + parts[p, SKIPPED]) % columns
            while done < high - start:
                n = min(columns - i, high - start - done)
                sums, a = u[done : done + n], parts[p, A] + i
                if parts[p, RANK] == 1 and mode == BEGUN:  # the usual case of a replay, through the registers once
                    factor, along = numbers[row, b + o], numbers[row, a : a + n]
                    for q in range(n):
                        sums[q] = float32(0.0) + c * (factor * along[q])
                else:
                    _row(z[done : done + n], sums, numbers[row], b + o, a, parts[p], scale, c, mode)
                done, o, i = done + n, o + 1, 0
        p += 1


@kernel
def _row(z, u, numbers, b, a, part, scale, c, mode):
    """Write consecutive coordinates of one row of a matrix, or add them to u."""
    n = z.shape[0]
    factor, columns = numbers[b], numbers[a : a + n]
    for i in range(n):
        z[i] = factor * columns[i]
    for r in range(1, part[RANK]):
        factor, columns = numbers[b + r * part[ROWS]], numbers[a + r * part[COLUMNS] : a + r * part[COLUMNS] + n]
        for i in range(n):
            z[i] = z[i] + factor * columns[i]
    if part[RANK] > 1:
        for i in range(n):
            z[i] = z[i] * scale
    _add(u, z, c, mode)


@kernel
def _add(u, z, c, mode):
    if mode == BEGUN:
        for i in range(z.shape[0]):
            u[i] = float32(0.0) + c * z[i]
    elif mode == ADDED:
        for i in range(z.shape[0]):
            u[i] = u[i] + c * z[i]
