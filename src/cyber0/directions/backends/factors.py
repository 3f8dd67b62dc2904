"""Low-rank directions by pieces of w: which numbers of the stream a piece needs, and where kernels find them.

The numbers that all directions of a pass need for one piece lie in memory, one row a direction; a weight then costs a
few multiplications a direction. Pieces and steps are cut so that the rows stay within a few megabytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cyber0.directions.low_rank import Factored, LowRankLayout

BEGIN, END, RANK, COLUMNS, SKIPPED, ROWS, B, A = range(8)
"""Columns of `Piece.parts`: see there."""
Table = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Coordinates begin .. end - 1 of w, and how they are made from numbers of the stream.

    Args:
        begin: The first coordinate.
        end: The one after the last.
        parts: One row for each tensor that has some of them: the first of its coordinates here and the one after the
            last, its rank (0: entries), its columns, how many weights of its first row here are left out, how many
            rows are here, and where the first of its b (or entries) and the first of its a are in the numbers drawn.
        draws: Which numbers are drawn: one row for each run of them, with its first, its length and its place.
    """

    begin: int
    end: int
    parts: Table
    draws: Table

    @property
    def width(self) -> int:
        """How many numbers a direction needs."""
        return int(self.draws[:, 1].sum())

    @property
    def widest(self) -> int:
        """How many of them all rows of a matrix share, at most."""
        return int((self.parts[:, RANK] * self.parts[:, COLUMNS]).max(initial=0))


def piece_of(layout: LowRankLayout, begin: int, end: int) -> Piece:
    """Return how coordinates begin .. end - 1 of w are made."""
    parts, draws, place = [], list[list[int]](), 0
    for t in _tensors(layout, begin, end):
        low, high = max(begin, t.start) - t.start, min(end, t.start + t.size) - t.start
        first = low // t.columns if t.rank else 0
        rows = -(-high // t.columns) - first if t.rank else 0
        runs = [(t.at + r * t.rows + first, rows) for r in range(t.rank)]
        runs.append((t.at + t.rank * t.rows, t.rank * t.columns) if t.rank else (t.at + low, high - low))
        skipped = low - first * t.columns if t.rank else 0
        parts.append((t.start + low, t.start + high, t.rank, t.columns, skipped, rows, place, place + t.rank * rows))
        for at, count in runs:
            if draws and draws[-1][0] + draws[-1][1] == at:
                draws[-1][1] += count
            else:
                draws.append([at, count, place])
            place += count
    return Piece(begin, end, np.array(parts, np.int64).reshape(-1, 8), np.array(draws, np.int64).reshape(-1, 3))


def pieces(layout: LowRankLayout, begin: int, end: int, most: int) -> Iterator[Piece]:
    """Cut coordinates begin .. end - 1 of w into pieces that need no more than `most` numbers a direction.

    A matrix is cut between rows. All its columns are drawn again for each piece, so a piece of it has at least as many
    rows as columns, whatever `most` is.
    """
    low, width = begin, 0
    for t in _tensors(layout, begin, end):
        if width + t.drawn > most and low < max(begin, t.start):
            yield piece_of(layout, low, t.start)
            low, width = t.start, 0
        if t.drawn > most:
            step = max(most // t.rank - t.columns, t.columns) * t.columns if t.rank else max(most, 1)
            while min(t.start + t.size, end) - low > step:
                cut = low + step - ((low - t.start) % t.columns if t.rank else 0)
                yield piece_of(layout, low, cut)
                low = cut
        width += t.drawn
    if low < end:
        yield piece_of(layout, low, end)


def _tensors(layout: LowRankLayout, begin: int, end: int) -> Iterator[Factored]:
    """Return the tensors with coordinates among begin .. end - 1."""
    if begin < 0 or end > layout.dimension:
        raise ValueError(f"coordinates {begin} .. {end - 1} were requested of {layout.dimension}")
    place = max(bisect.bisect_right(layout.starts, begin) - 1, 0)
    while place < len(layout.tensors) and layout.tensors[place].start < end:
        if layout.tensors[place].start + layout.tensors[place].size > begin:
            yield layout.tensors[place]
        place += 1
