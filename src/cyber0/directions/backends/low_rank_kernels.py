"""Coordinates of low-rank directions on the CPU, from numbers that have been drawn: the bits of low_rank.py."""

from __future__ import annotations

import numpy as np

from cyber0.directions.backends.factors import BEGIN, COLUMNS, END, RANK, ROWS, SKIPPED, A, B
from cyber0.kernels.compiled import kernel
from cyber0.kernels.threads import TILE

NO_FACTORS = (np.zeros((0, 8), np.int64), np.zeros((0, 0), np.float32), np.float32(1))
"""What kernels are given for other distributions: parts, numbers drawn and scale."""


@kernel
def low_rank_tile(z, tile, factors, row):
    """Write those coordinates of a tile that are in the piece; the row of numbers is that of the direction."""
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
        else:
            columns = parts[p, COLUMNS]
            o, i = (here + parts[p, SKIPPED]) // columns, (here + parts[p, SKIPPED]) % columns
            while done < high - start:
                n = min(columns - i, high - start - done)
                _row(z[done : done + n], numbers[row], b + o, parts[p, A] + i, parts[p], scale)
                done, o, i = done + n, o + 1, 0
        p += 1


@kernel
def _row(target, numbers, b, a, part, scale):
    """Write consecutive coordinates of one row of a matrix."""
    n = target.shape[0]
    factor, columns = numbers[b], numbers[a : a + n]
    for i in range(n):
        target[i] = factor * columns[i]
    for r in range(1, part[RANK]):
        factor, columns = numbers[b + r * part[ROWS]], numbers[a + r * part[COLUMNS] : a + r * part[COLUMNS] + n]
        for i in range(n):
            target[i] = target[i] + factor * columns[i]
    if part[RANK] > 1:
        for i in range(n):
            target[i] = target[i] * scale
