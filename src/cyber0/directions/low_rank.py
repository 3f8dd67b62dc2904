"""Low-rank directions: the factors of every matrix are drawn, not its entries.

A tensor of two or more dimensions is a matrix with one row for each index of its first dimension (the outputs of a
linear layer, the channels of a convolution, the tokens of an embedding) and all other dimensions as columns. Where
rank * (rows + columns) is less than rows * columns, its part of a direction is

    z[o, i] = (b_1[o] a_1[i] + ... + b_R[o] a_R[i]) / sqrt(R)

with factors b_r and a_r from the standard normal stream; every other tensor gets entries from that stream. The stream
of one direction is the one of "gaussian": its coordinates 0, 1, ... go to the tensors in the order of the layout, to a
matrix first b_1, ..., b_R, then a_1, ..., a_R. So a direction depends on the shapes of the weights, unlike all others.

Every entry has mean 0 and variance 1, and entries are uncorrelated but not independent.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Factored:
    """One tensor of a layout.

    Args:
        start: Its first coordinate in w.
        rows: Of the matrix; of a tensor that gets entries, 1.
        columns: Of the matrix; of a tensor that gets entries, their number.
        at: The first coordinate of the stream that is used for it.
        rank: How many pairs of factors it has; 0: entries.
    """

    start: int
    rows: int
    columns: int
    at: int
    rank: int

    @property
    def size(self) -> int:
        """How many weights it has."""
        return self.rows * self.columns

    @property
    def drawn(self) -> int:
        """How many numbers of the stream are used for it."""
        return self.rank * (self.rows + self.columns) or self.size


@dataclass(frozen=True)
class LowRankLayout:
    """How the stream of a direction becomes its coordinates, for weights of certain shapes."""

    tensors: tuple[Factored, ...]
    rank: int

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]], rank: int) -> LowRankLayout:
        """Return the layout of weights of these shapes, in the order of w.

        Args:
            shapes: One shape a tensor.
            rank: R, at least 1.
        """
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        tensors, start, at = [], 0, 0
        for shape in shapes:
            size = math.prod(shape)
            rows = int(shape[0]) if len(shape) > 1 and size else 1
            factored = rank * (rows + size // rows) < size
            one = Factored(start, rows if factored else 1, size // (rows if factored else 1), at, rank * factored)
            tensors.append(one)
            start, at = start + one.size, at + one.drawn
        return cls(tuple(tensors), rank)

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.rank))

    def __hash__(self) -> int:
        return self._hash  # kept: layouts are keys of tables, and may have hundreds of tensors

    @cached_property
    def dimension(self) -> int:
        """How many weights there are."""
        return sum(t.size for t in self.tensors)

    @cached_property
    def drawn(self) -> int:
        """How many numbers of the stream a direction takes."""
        return sum(t.drawn for t in self.tensors)

    @cached_property
    def scale(self) -> np.float32:
        """1 / sqrt(R), rounded to float32."""
        return np.float32(1.0 / math.sqrt(self.rank))

    @cached_property
    def starts(self) -> list[int]:
        """The first coordinate of every tensor."""
        return [t.start for t in self.tensors]

    def coordinates(self, stream: Callable[[int, int], F32], start: int, count: int) -> F32:
        """Return coordinates start .. start + count - 1 of one direction: the definition of its bits.

        Every product and sum is rounded to float32, the sum over r taken in order; the scale comes last, and not at all
        for R = 1.

        Args:
            stream: Returns numbers (start, count) of the direction's stream.
            start: First coordinate of w.
            count: How many coordinates.
        """
        if start < 0 or count < 0 or start + count > self.dimension:
            raise ValueError(f"coordinates {start} .. {start + count - 1} were requested of {self.dimension}")
        parts, end = [np.empty(0, np.float32)], start + count
        for t in self.tensors[max(bisect.bisect_right(self.starts, start) - 1, 0) :]:
            low, high = max(start, t.start) - t.start, min(end, t.start + t.size) - t.start
            if t.start >= end:
                break
            if low >= high:
                continue
            parts.append(self._of_matrix(t, stream, low, high) if t.rank else stream(t.at + low, high - low))
        return np.concatenate(parts)

    def _of_matrix(self, t: Factored, stream: Callable[[int, int], F32], low: int, high: int) -> F32:
        first, last = low // t.columns, -(-high // t.columns)
        total = np.zeros((last - first, t.columns), dtype=np.float32)
        for r in range(t.rank):
            b = stream(t.at + r * t.rows + first, last - first)
            a = stream(t.at + t.rank * t.rows + r * t.columns, t.columns)
            product = b[:, None] * a[None, :]
            total = product if r == 0 else total + product
        if t.rank > 1:
            total = total * self.scale
        return np.ascontiguousarray(total).reshape(-1)[low - first * t.columns : high - first * t.columns]
