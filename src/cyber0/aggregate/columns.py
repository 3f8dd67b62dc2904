"""Coordinate-wise rules: mean, median, trimmed mean, mean around the median.

Sums are taken in float64 and in an order that depends on the shape of the matrix alone. Up to `_FEW_ROWS` rows, what is
left of a column is added up in ascending order, so not a bit depends on the order of the clients; of more rows, where a
column is not sorted, in pairs in the order of the clients. Plain means add up in the order of the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.rule import Matrix, Outcome, Rule
from cyber0.config.registry import rule
from cyber0.kernels.threads import run_in_threads, thread_count

# Columns copied at once into transposed order: 16 float32 are one cache line, so every line is read once.
_COLUMNS_PER_COPY = 16
# From so many elements on, columns are shared out among the threads.
_ELEMENTS_WORTH_THREADS = 1 << 22
# From so many elements on, compiled kernels earn what it takes to load them.
_ELEMENTS_WORTH_KERNELS = 1 << 24
# Elements worked on at once: temporaries stay in the cache, and a small matrix is a single block.
_ELEMENTS_PER_BLOCK = 1 << 17
# Rows copied at once.
_ROWS_PER_COPY = 1 << 12
# Up to so many rows a column is sorted; of more, only the numbers at the cuts are found.
_FEW_ROWS = 256
# From so many numbers on, plain means are added up row by row, however many rows there are.
_LONG_ROW = 1 << 14
# From so many columns on, rows are added up in one call.
_WIDE = 128

_T = TypeVar("_T")
_Counts: TypeAlias = int | NDArray[np.int64]
_Excluded: TypeAlias = NDArray[np.int64]


@rule
def mean() -> Rule:
    """Average each column: no defence, one Byzantine client can move it anywhere.

    Examples:
        >>> mean()(np.array([[1.0], [2.0], [300.0]]))
        array([101.])
    """
    return Rule("mean", 0.0, _mean, spreads=True)


@rule
def median(beta: float = 0.0) -> Rule:
    """Take the median of each column; the mean of the two middle numbers if there are an even number.

    Args:
        beta: the share of Byzantine clients among the invited to guard against. It does not change the median, only how
            many rows it insists on, 2 floor(beta * invited) + 1, below which Byzantine clients could be the majority.

    Examples:
        >>> median()(np.array([[1.0], [2.0], [300.0]]))
        array([2.])
    """
    return Rule("median", beta, _median)


@rule
def trimmed_mean(beta: float) -> Rule:
    """Average each column without its b smallest and b largest numbers, b = floor(beta * invited).

    Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018. Which of several
    equal numbers are left out changes nothing but the counts: they take turns, see `_in_turn`.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).

    Examples:
        Of four clients one at either end is left out, and `decide` counts whose scalars these were:

        >>> reports = np.array([[1.0], [2.0], [4.0], [-99.0]])
        >>> trimmed_mean(0.25)(reports)
        array([1.5])
        >>> trimmed_mean(0.25).decide(reports, invited=4).excluded
        array([0, 0, 1, 1])
    """
    return Rule("trimmed_mean", beta, _trim)


@rule
def meamed(beta: float) -> Rule:
    """Average in each column the m - b numbers nearest to its median, b = floor(beta * invited).

    Xie et al., "Generalized Byzantine-tolerant SGD", 2018 (mean around the median). With x_(1) <= ... <= x_(m) these
    are neighbours in the order: sum_{i=s+1}^{s+m-b} x_(i) / (m - b) for the s in 0 .. b that makes them nearest. Of two
    numbers equally far from the median the lower one stays, so the order of the clients does not matter.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
    """
    return Rule("meamed", beta, _around_median)


def _mean(rows: Matrix, b: int, round: int) -> Outcome:
    count, columns = rows.shape
    totals = np.zeros(columns, np.float64)
    kernels = _kernels(rows)
    if count > _FEW_ROWS and columns < _LONG_ROW:
        _over_columns(rows, lambda start, stop: _add_in_pairs(rows, start, stop, totals))
    elif kernels is not None:
        _over_columns(rows, lambda start, stop: kernels.add(rows, start, stop, totals))
    else:
        _over_columns(rows, lambda start, stop: _add_in_order(rows, start, stop, totals))
    totals /= count
    return Outcome(totals, np.zeros(count, np.int64))


def _median(rows: Matrix, b: int, round: int) -> Outcome:
    # Trimming as much as can be trimmed leaves the middle one or two.
    return _trim(rows, (len(rows) - 1) // 2, round)


def _trim(rows: Matrix, b: int, round: int) -> Outcome:
    """Average every column without its b smallest and b largest numbers."""
    return _cut(rows, 2 * b, False, round) if b else _mean(rows, 0, round)


def _around_median(rows: Matrix, b: int, round: int) -> Outcome:
    """Average every column without the b numbers farthest from its median."""
    return _cut(rows, b, True, round) if b else _mean(rows, 0, round)


def _cut(rows: Matrix, dropped: int, around: bool, round: int) -> Outcome:
    """Average every column without `dropped` numbers: those farthest from its median, or as many at each end."""
    count, columns = rows.shape
    values = np.empty(columns, np.float64)
    turn = round * columns  # columns are counted on from round to round
    kernels = _kernels(rows)

    def work(start: int, stop: int) -> _Excluded:
        excluded = np.zeros(count, np.int64)
        if count > _FEW_ROWS:
            _cut_many(rows, dropped, around, turn, start, stop, values, excluded)
        elif kernels is not None:
            kernels.cut(rows, _network(count), dropped, around, turn, start, stop, values, excluded)
        else:
            _cut_few(rows, dropped, around, turn, start, stop, values, excluded)
        return excluded

    parts = _over_columns(rows, work)
    return Outcome(values, parts[0] if len(parts) == 1 else np.add.reduce(parts, axis=0))


def _cut_few(
    rows: Matrix,
    dropped: int,
    around: bool,
    turn: int,
    start: int,
    stop: int,
    values: NDArray[np.float64],
    excluded: _Excluded,
) -> None:
    """Do the columns from start to stop by sorting them: fill in their values, and add to the excluded counts."""
    count = len(rows)
    left = count - dropped
    for place in _blocks(start, stop, count):
        block = rows[:, place]
        ranked = np.sort(block, axis=0)
        if around:
            below = _far_below(ranked, dropped)
            low = np.take_along_axis(ranked, below[None], axis=0)[0]
            high = np.take_along_axis(ranked, below[None] + (left - 1), axis=0)[0]
            rank = np.arange(count)[:, None]
            kept = np.where((rank >= below) & (rank < below + left), ranked, ranked.dtype.type(0))
        else:
            half = dropped // 2
            low, high, kept = ranked[half], ranked[half + left - 1], ranked[half : half + left]
        totals = values[place]
        totals[...] = 0.0
        _add_rows(kept, totals)
        totals /= left
        outside = (block < low) | (block > high)
        if np.count_nonzero(outside) != dropped * len(low):
            beneath: _Counts = below[:, None] if around else half
            tied = _tied_out(block.T, low[:, None], high[:, None], beneath, dropped - beneath, turn + place.start)
            outside |= tied.T
        excluded += np.add.reduce(outside, axis=1, dtype=np.int64)


def _far_below(ranked: Matrix, dropped: int) -> NDArray[np.int64]:
    """Return how many go at the lower end of each column, whose numbers are sorted, if the farthest from its median go.

    The i-th smallest goes if the one m - b places above, which would stay in its stead, is nearer.
    """
    count = len(ranked)
    with np.errstate(over="ignore", invalid="ignore"):
        median = ranked[(count - 1) // 2 : count // 2 + 1].astype(np.float64).mean(axis=0)
        farther = median - ranked[:dropped] > ranked[count - dropped :] - median
    below: NDArray[np.int64] = np.add.reduce(farther, axis=0, dtype=np.int64)
    return below


def _cut_many(
    rows: Matrix,
    dropped: int,
    around: bool,
    turn: int,
    start: int,
    stop: int,
    values: NDArray[np.float64],
    excluded: _Excluded,
) -> None:
    """Do the same for so many rows that finding the thresholds is faster than sorting."""
    count = len(rows)
    left = count - dropped
    for first in range(start, stop, _COLUMNS_PER_COPY):
        turned = _transpose(rows[:, first : min(first + _COLUMNS_PER_COPY, stop)])
        for place in _blocks(0, len(turned), count):
            block = turned[place]
            low, high, below, above = _far_ends(block, dropped) if around else _ends(block, dropped // 2)
            # Only thresholds come from a selection. What is kept is found by comparison and summed in the order of the
            # clients, so that no bit of the result depends on how the selection permutes.
            keep = (block >= low) & (block <= high)
            if np.count_nonzero(keep) != len(block) * left:
                keep &= ~_tied_out(block, low, high, below, above, turn + first + place.start)
            excluded += len(block) - (keep[0] if len(block) == 1 else np.add.reduce(keep, axis=0, dtype=np.int64))
            with np.errstate(over="ignore", invalid="ignore"):
                means = np.add.reduce((block * keep).astype(np.float64), axis=1) / left
            values[first + place.start : first + place.stop] = means


def _ends(block: Matrix, b: int) -> tuple[Matrix, Matrix, int, int]:
    """Return the smallest and the largest number to keep of each row, and how many go below and above: b each."""
    # Two selections of one position each: NumPy has a vectorised kernel for that, and none for two positions at once.
    left = block.shape[1] - 2 * b
    selected = np.partition(block, b, axis=1)
    high = np.partition(selected[:, b:], left - 1, axis=1)[:, left - 1, None]
    return selected[:, b, None], high, b, b


def _far_ends(block: Matrix, dropped: int) -> tuple[Matrix, Matrix, NDArray[np.int64], NDArray[np.int64]]:
    """Return the same if those farthest from the median go."""
    ranked = np.sort(block, axis=1)
    below = _far_below(ranked.T, dropped)[:, None]
    low = np.take_along_axis(ranked, below, axis=1)
    high = np.take_along_axis(ranked, below + (block.shape[1] - dropped - 1), axis=1)
    return low, high, below, dropped - below


def _tied_out(block: Matrix, low: Matrix, high: Matrix, below: _Counts, above: _Counts, turn: int) -> NDArray[np.bool_]:
    """Tell which numbers are left out though they equal one that is kept; rows are columns of the matrix here."""
    lower = below - np.add.reduce(block < low, axis=1, dtype=np.int64, keepdims=True)
    upper = above - np.add.reduce(block > high, axis=1, dtype=np.int64, keepdims=True)
    alike = low == high
    lower, upper = np.where(alike, lower + upper, lower), np.where(alike, 0, upper)
    turns = turn + np.arange(len(block), dtype=np.int64)[:, None]
    return _in_turn(block == low, lower, turns) | _in_turn(block == high, upper, turns)


def _in_turn(equal: NDArray[np.bool_], surplus: NDArray[np.int64], turns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Choose `surplus` of the equal numbers of each row, in turn from one to the next.

    So clients that send the same numbers are left out equally often. Of t equal numbers, counted from 0 in the order of
    the clients, those at (turn surplus + i) mod t go, i = 0 .. surplus - 1.
    """
    place = np.cumsum(equal, axis=1, dtype=np.int64) - 1
    ties = place[:, -1:] + 1
    chosen: NDArray[np.bool_] = equal & ((place - turns % ties * surplus) % ties < surplus)
    return chosen


def _add_in_order(rows: Matrix, start: int, stop: int, totals: NDArray[np.float64]) -> None:
    """Add up the columns from start to stop, row by row."""
    for place in _blocks(start, stop, min(len(rows), _FEW_ROWS)):
        _add_rows(rows[:, place], totals[place])


def _add_rows(rows: Matrix, totals: NDArray[np.float64]) -> None:
    """Add the rows to the totals, one after the other."""
    with np.errstate(over="ignore", invalid="ignore"):
        if rows.shape[1] < _WIDE or len(rows) > _FEW_ROWS:
            for row in rows:
                totals += row
        else:  # the same sums: along the first axis of a wide matrix numpy adds row to row
            totals += np.add.reduce(rows.astype(np.float64), axis=0)


def _add_in_pairs(rows: Matrix, start: int, stop: int, totals: NDArray[np.float64]) -> None:
    """Add up the columns from start to stop, each by pairwise summation."""
    for first in range(start, stop, _COLUMNS_PER_COPY):
        last = min(first + _COLUMNS_PER_COPY, stop)
        with np.errstate(over="ignore", invalid="ignore"):
            for column, place in zip(_transpose(rows[:, first:last]), range(first, last), strict=True):
                totals[place] = np.add.reduce(column.astype(np.float64))


def _transpose(rows: Matrix) -> Matrix:
    """Copy into column order, a few rows at a time: four times faster than in one go if there are many."""
    turned = np.empty(rows.shape[::-1], rows.dtype)
    for start in range(0, len(rows), _ROWS_PER_COPY):
        turned[:, start : start + _ROWS_PER_COPY] = rows[start : start + _ROWS_PER_COPY].T
    return turned


def _blocks(start: int, stop: int, count: int) -> Iterator[slice]:
    """Yield the columns, of so many numbers each, to work on at once."""
    width = max(1, _ELEMENTS_PER_BLOCK // count)
    for first in range(start, stop, width):
        yield slice(first, min(first + width, stop))


def _over_columns(rows: Matrix, work: Callable[[int, int], _T]) -> list[_T]:
    """Do the work on all columns, in pieces on every core if it is worth it: numpy works without Python's lock."""
    columns = rows.shape[1]
    pieces = 4 * thread_count() if rows.size >= _ELEMENTS_WORTH_THREADS else 1  # more than threads: some are slower
    if pieces == 1 or columns < 2:
        return [work(0, columns)]
    width = -(-columns // pieces)
    return run_in_threads(work, [(start, min(start + width, columns)) for start in range(0, columns, width)])


def _kernels(rows: Matrix) -> ModuleType | None:
    """Return the compiled kernels where they are worth it and available; without them the bits are the same."""
    return _load_kernels() if rows.size >= _ELEMENTS_WORTH_KERNELS and rows.flags.c_contiguous else None


@cache
def _load_kernels() -> ModuleType | None:
    try:
        from cyber0.aggregate import kernels
    except ImportError:  # a federator runs on numpy alone
        return None
    return kernels


@cache
def _network(count: int) -> NDArray[Any]:
    """Return the pairs to compare and exchange, in this order, that sort `count` numbers.

    Batcher's merge exchange (Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2M).
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << (count - 1).bit_length() >> 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            q, r, d = q >> 1, p, q - p
        p >>= 1
    return np.array(pairs, np.int64).reshape(-1, 2)
