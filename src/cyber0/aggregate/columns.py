"""Rules that look at each column by itself: mean, median, trimmed mean, mean around the median."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.rule import Matrix, Outcome, Rule

# Columns copied at once into transposed order: 16 float32 are one cache line, so every line is read once.
_COLUMNS_PER_COPY = 16
# From so many elements on, blocks are shared out among the cores.
_ELEMENTS_WORTH_THREADS = 1 << 22
# Elements worked on at once: temporaries stay in the cache, and a small matrix is a single block.
_ELEMENTS_PER_BLOCK = 1 << 18
# Rows copied at once.
_ROWS_PER_COPY = 1 << 12
# Up to so many rows a vectorised sort is faster than two selections.
_FEW_ROWS = 256
# From so many numbers on, plain means are added up row by row, without a copy.
_LONG_ROW = 1 << 14


def mean() -> Rule:
    """Average each column. One liar suffices to move it anywhere: for comparison, not for use among liars."""
    return Rule("mean", 0.0, _mean)


def median(beta: float = 0.0) -> Rule:
    """Take the median of each column; the mean of the two middle numbers if there are an even number.

    Args:
        beta: the share of liars among the invited to guard against. It does not change the median, only how many rows
            it insists on, 2 floor(beta * invited) + 1, below which liars could be the majority.
    """
    return Rule("median", beta, _median)


def trimmed_mean(beta: float) -> Rule:
    """Average each column without its b smallest and b largest numbers, b = floor(beta * invited).

    Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018. Of equal numbers
    at the lower end those of the first rows are left out, at the upper end those of the last, as in a stable sort.

    Args:
        beta: the share of liars to guard against, in [0, 0.5).
    """
    return Rule("trimmed_mean", beta, _trim)


def meamed(beta: float) -> Rule:
    """Average in each column the m - b numbers nearest to its median, b = floor(beta * invited).

    Xie et al., "Generalized Byzantine-tolerant SGD", 2018 (mean around the median). With x_(1) <= ... <= x_(m) these
    are neighbours in the order: sum_{i=s+1}^{s+m-b} x_(i) / (m - b) for the s in 0 .. b that makes them nearest. Of two
    numbers equally far from the median the lower one stays, so the order of the clients does not matter.

    Args:
        beta: the share of liars to guard against, in [0, 0.5).
    """
    return Rule("meamed", beta, _around_median)


_Cut: TypeAlias = tuple[Matrix, Matrix, int | NDArray[np.int64], int | NDArray[np.int64]]
"""The smallest and the largest number to keep of each row, and how many there are to drop below and above."""


def _mean(rows: Matrix, b: int) -> Outcome:
    if rows.shape[1] < _LONG_ROW:
        return _cut_columns(rows, 0, None)
    values = np.zeros(rows.shape[1], np.float64)
    for start in range(0, len(values), _LONG_ROW):
        part = values[start : start + _LONG_ROW]
        with np.errstate(over="ignore", invalid="ignore"):
            for row in rows[:, start : start + _LONG_ROW]:
                part += row
    return Outcome(values / len(rows), np.zeros(len(rows), np.int64))


def _median(rows: Matrix, b: int) -> Outcome:
    # Trimming as much as can be trimmed leaves the middle one or two.
    return _trim(rows, (len(rows) - 1) // 2)


def _trim(rows: Matrix, b: int) -> Outcome:
    """Average every column without its b smallest and b largest numbers."""
    if b == 0:
        return _mean(rows, 0)
    return _cut_columns(rows, 2 * b, lambda block: _ends(block, b))


def _around_median(rows: Matrix, b: int) -> Outcome:
    """Average every column without the b numbers farthest from its median."""
    if b == 0:
        return _mean(rows, 0)
    return _cut_columns(rows, b, lambda block: _far_ends(block, b))


def _cut_columns(rows: Matrix, dropped: int, cut: Callable[[Matrix], _Cut] | None) -> Outcome:
    """Average every column without `dropped` numbers, those that `cut` finds in a block of columns."""
    count, columns = rows.shape
    values = np.empty(columns, np.float64)
    height = max(1, _ELEMENTS_PER_BLOCK // count)
    width = max(height, _COLUMNS_PER_COPY)

    def work(start: int) -> NDArray[np.int64]:
        """Average a few columns, and return how many numbers of each row were kept."""
        turned = _transpose(rows[:, start : start + width])
        kept = np.zeros(count, np.int64)
        for first in range(0, len(turned), height):
            block = turned[first : first + height]
            place = slice(start + first, start + first + len(block))
            if cut is None:
                kept += len(block)
                values[place] = _row_means(block.astype(np.float64), count)
            else:
                values[place] = _cut_block(block, count - dropped, cut(block), kept)
        return kept

    kept = np.zeros(count, np.int64)
    for part in _map(work, range(0, columns, width), rows.size >= _ELEMENTS_WORTH_THREADS):
        kept += part
    return Outcome(values, columns - kept)


def _map(work: Callable[[int], NDArray[np.int64]], starts: range, threads: bool) -> Iterator[NDArray[np.int64]]:
    """Do the work at each start, on every core if it is worth it: numpy works without Python's lock."""
    if not threads or len(starts) < 2:
        yield from map(work, starts)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(work, starts)


def _transpose(rows: Matrix) -> Matrix:
    """Copy into column order, a few rows at a time: four times faster than in one go if there are many."""
    if len(rows) <= _ROWS_PER_COPY:
        return np.ascontiguousarray(rows.T)
    turned = np.empty(rows.shape[::-1], rows.dtype)
    for start in range(0, len(rows), _ROWS_PER_COPY):
        turned[:, start : start + _ROWS_PER_COPY] = rows[start : start + _ROWS_PER_COPY].T
    return turned


def _ends(block: Matrix, b: int) -> _Cut:
    """Cut b at each end."""
    left = block.shape[1] - 2 * b
    if block.shape[1] <= _FEW_ROWS:
        ranked = np.sort(block, axis=1)
        return ranked[:, b, None], ranked[:, b + left - 1, None], b, b
    # Two selections of one position each: NumPy has a vectorised kernel for that, and none for two positions at once.
    selected = np.partition(block, b, axis=1)
    high = np.partition(selected[:, b:], left - 1, axis=1)[:, left - 1, None]
    return selected[:, b, None], high, b, b


def _far_ends(block: Matrix, b: int) -> _Cut:
    """Cut the b farthest from the median, some at one end and the rest at the other."""
    count = block.shape[1]
    ranked = np.sort(block, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        median = ranked[:, (count - 1) // 2 : count // 2 + 1].astype(np.float64).mean(axis=1, keepdims=True)
        # The i-th smallest goes if the one m - b places above, which would stay in its stead, is nearer.
        farther = median - ranked[:, :b] > ranked[:, count - b :] - median
    below = np.add.reduce(farther, axis=1, dtype=np.int64, keepdims=True)
    low = np.take_along_axis(ranked, below, axis=1)
    high = np.take_along_axis(ranked, below + (count - b - 1), axis=1)
    return low, high, below, b - below


def _cut_block(block: Matrix, left: int, cut: _Cut, kept: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the means of what is left of the rows of `block`, columns of the matrix; count in `kept` what stays."""
    # Only thresholds come from a selection. What is kept is found by comparison and summed in the order of the clients,
    # so that no bit of the result depends on how the selection permutes.
    low, high, *_ = cut
    keep = (block >= low) & (block <= high)
    if np.count_nonzero(keep) != len(block) * left:
        _drop_ties(block, keep, cut)
    kept += keep[0] if len(block) == 1 else np.add.reduce(keep, axis=0, dtype=np.int64)
    return _row_means((block * keep).astype(np.float64), left)


def _drop_ties(block: Matrix, keep: NDArray[np.bool_], cut: _Cut) -> None:
    """Clear in `keep` the numbers equal to a threshold that are surplus, so that as many go as should, as in a sort."""
    low, high, below, above = cut
    surplus = below - np.add.reduce(block < low, axis=1, dtype=np.int64, keepdims=True)
    if surplus.any():
        equal = block == low
        rank = np.cumsum(equal, axis=1, dtype=np.int32)
        keep &= ~(equal & (rank <= surplus))
    surplus = above - np.add.reduce(block > high, axis=1, dtype=np.int64, keepdims=True)
    if surplus.any():
        equal = block == high
        rank = np.cumsum(equal, axis=1, dtype=np.int32)
        keep &= ~(equal & (rank > rank[:, -1:] - surplus))


def _row_means(block: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    # Numbers near the end of float64 may overflow to infinity; whoever decides sees it, so a warning adds nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        means: NDArray[np.float64] = np.add.reduce(block, axis=1) / count
    return means
