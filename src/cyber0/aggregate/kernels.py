"""Kernels for large matrices of few rows: every column sorted in place by a network, many columns at a time.

They give the bits of columns.py, which says what is computed. A tile of columns stays in the cache; a compare-exchange
of two of its rows is a minimum and a maximum of contiguous numbers, so it is vectorised and nothing is transposed.
Columns are independent of each other: how they are cut into pieces can't change a bit.
"""

from __future__ import annotations

import numpy as np

from cyber0.kernels.compiled import kernel

TILE = 512  # columns: 100 rows of float32 are 200 KB, in the second-level cache, in pieces that are read ahead
LONG_TILE = 4096  # columns of a plain sum


@kernel
def _sort(tile, pairs):
    for k in range(pairs.shape[0]):
        low, high = tile[pairs[k, 0]], tile[pairs[k, 1]]
        for c in range(tile.shape[1]):
            x, y = low[c], high[c]
            low[c] = x if x < y else y
            high[c] = y if x < y else x


@kernel
def _choose_ends(tile, dropped, below):
    """Find how many go at the lower end of each column if those farthest from the median go."""
    count = tile.shape[0]
    half = count // 2
    for c in range(tile.shape[1]):
        median = np.float64(tile[half, c])
        if count % 2 == 0:
            median = (np.float64(tile[half - 1, c]) + median) / 2
        below[c] = 0
        for i in range(dropped):
            below[c] += median - tile[i, c] > tile[count - dropped + i, c] - median


@kernel
def _add_kept(tile, left, below, total):
    """Add up what is left of each column, in ascending order."""
    total[:] = 0.0
    for i in range(tile.shape[0]):
        row = tile[i]
        for c in range(tile.shape[1]):
            total[c] += np.float64(row[c]) if below[c] <= i < below[c] + left else 0.0


@kernel
def _add_middle(tile, left, total):
    total[:] = 0.0
    start = (tile.shape[0] - left) // 2
    for i in range(start, start + left):
        row = tile[i]
        for c in range(tile.shape[1]):
            total[c] += row[c]


@kernel
def _count_outside(rows, first, last, low, high, excluded):
    for i in range(rows.shape[0]):
        row, outside = rows[i, first:last], np.int32(0)
        for c in range(row.shape[0]):
            outside += np.int32(row[c] < low[c]) + np.int32(row[c] > high[c])
        excluded[i] += outside


@kernel
def _count_in_turn(column, value, surplus, turn, excluded):
    """Count as left out `surplus` of the numbers that equal a value, in turn from column to column."""
    ties = 0
    for i in range(column.shape[0]):
        ties += column[i] == value
    start, place = turn % ties * surplus, 0
    for i in range(column.shape[0]):
        if column[i] == value:
            excluded[i] += (place - start) % ties < surplus
            place += 1


@kernel
def _count_ties(column, ranked, below, left, turn, excluded):
    """Count the numbers equal to a kept one that are left out."""
    low, high, lower, upper = ranked[below], ranked[below + left - 1], 0, 0
    while below - lower > 0 and ranked[below - lower - 1] == low:
        lower += 1
    while below + left + upper < ranked.shape[0] and ranked[below + left + upper] == high:
        upper += 1
    if low == high:
        lower, upper = lower + upper, 0
    if lower > 0:
        _count_in_turn(column, low, lower, turn, excluded)
    if upper > 0:
        _count_in_turn(column, high, upper, turn, excluded)


@kernel
def _count_equal(xs, ys):
    equal = np.int32(0)
    for c in range(xs.shape[0]):
        equal += np.int32(xs[c] == ys[c])
    return equal


@kernel
def _gather(tile, below, left, low, high):
    """Find the ends of what is left of each column, and whether a number at an end is also left out."""
    count, tied = tile.shape[0], False
    for c in range(low.shape[0]):
        start, stop = below[c], below[c] + left
        low[c], high[c] = tile[start, c], tile[stop - 1, c]
        tied |= start > 0 and tile[max(start, 1) - 1, c] == low[c]
        tied |= stop < count and tile[min(stop, count - 1), c] == high[c]
    return tied


@kernel
def cut(rows, pairs, dropped, around, first_turn, start, stop, values, excluded):
    """Average the columns from start to stop without `dropped` numbers each; see `columns._cut`."""
    count, half = rows.shape[0], dropped // 2
    left = count - dropped
    tile = np.zeros((count, TILE), rows.dtype)
    low, high = np.empty(TILE, rows.dtype), np.empty(TILE, rows.dtype)
    below, total = np.full(TILE, half), np.empty(TILE)
    for first in range(start, stop, TILE):
        last = min(first + TILE, stop)
        width = last - first
        for i in range(count):
            source, target = rows[i, first:last], tile[i]  # slices of a row are known to be contiguous
            for c in range(width):
                target[c] = source[c]
        _sort(tile, pairs)
        if around:
            _choose_ends(tile, dropped, below)
            _add_kept(tile, left, below, total)
            tied = _gather(tile, below, left, low[:width], high[:width])
        else:
            _add_middle(tile, left, total)
            low[:], high[:] = tile[half], tile[half + left - 1]
            tied = _count_equal(tile[half - 1, :width], low) + _count_equal(tile[half + left, :width], high) > 0
        for c in range(width):
            values[first + c] = total[c] / left
        _count_outside(rows, first, last, low, high, excluded)
        if tied:
            for c in range(width):
                _count_ties(rows[:, first + c], tile[:, c], below[c], left, first_turn + first + c, excluded)


@kernel
def add(rows, start, stop, total):
    """Add up the columns from start to stop, in the order of the rows."""
    for first in range(start, stop, LONG_TILE):
        last = min(first + LONG_TILE, stop)
        part = total[first:last]
        for i in range(rows.shape[0]):
            row = rows[i, first:last]
            for c in range(part.shape[0]):
                part[c] += row[c]
