"""The factors of several low-rank directions, in fixed places, as the layers of a model use them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cyber0.directions import Directions, DirectionSpace, Probe, engine
from cyber0.directions.backends import backend_of
from cyber0.directions.low_rank import LowRankLayout

Tensor = torch.Tensor

ALIGNMENT = 64  # elements; matrix products on a GPU take their fastest kernels only where rows begin at such addresses
SLAB = 1 << 22  # numbers drawn at a time where they are stored in another type or place


@dataclass(frozen=True)
class ProbeBatch:
    """Probes along some directions, each at every one of the distances; each is a group of the rows of a batch.

    Args:
        directions: Which.
        distances: c in w + c z, signed.
        with_w: Whether w itself comes first, as one more group; there must be one distance then.
    """

    directions: Directions
    distances: tuple[float, ...]
    with_w: bool = False

    @classmethod
    def of(cls, probe: Probe) -> ProbeBatch:
        """Return a single probe as a batch."""
        return cls(Directions(probe.seed, probe.round, 1, probe.index), (float(probe.coefficient),))

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Directions, with one for w; distances; whether w is there: what decides the shapes of all tensors."""
        return self.directions.k + self.with_w, len(self.distances), self.with_w

    @property
    def groups(self) -> int:
        return self.shape[0] * self.shape[1]


class LowRank(NamedTuple):
    """What a matrix is perturbed by, but for the distance: the sum over r of left_r right_r^T, for each direction.

    Of a tensor with more dimensions, `right` has all but the first.
    """

    left: Tensor
    """(directions, R, rows)."""
    right: Tensor
    """(directions, R, *columns)."""


class Factors:
    """The factors of a batch of probes, and the distances.

    Captured passes read them where they are; `renew` overwrites them.

    Args:
        layout: Of all trained tensors.
        shapes: Theirs.
        dtypes: The types that their layers compute in.
        batch: The first probes.
        device: Where the model is.
    """

    def __init__(
        self, layout: LowRankLayout, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype],
        batch: ProbeBatch, device: torch.device,
    ) -> None:  # fmt: skip
        self._layout, self._device = layout, device
        self._shapes = [tuple(shape) for shape in shapes]
        self._rows, self._distances_each, self._with_w = batch.shape
        self._places, self._index = _places(layout, ALIGNMENT if aligned(device) else 1)
        self._index_there = None if self._index is None else torch.from_numpy(self._index).to(device)
        self._size = layout.drawn if self._index is None else len(self._index)
        self._drawn: Directions | None = None
        self._probed: tuple[float, ...] | None = None
        self._typed = {
            dtype: torch.zeros(self._rows, self._size, dtype=dtype, device=device) for dtype in dict.fromkeys(dtypes)
        }
        self._views: dict[tuple[int, torch.dtype], LowRank | Tensor] = {}
        self.distances = torch.empty(self._rows, self._distances_each, device=device)
        """c of each direction and distance, in float32."""
        self.scaled_distances = torch.empty_like(self.distances)
        """The same times 1 / sqrt(R), for the products of factors."""
        self.unit = torch.empty((), device=device)
        """The largest distance, which the others are multiples of in 16 bits too: two_point has 1 and -1."""
        self.renew(batch)

    def renew(self, batch: ProbeBatch) -> None:
        """Draw the factors of other probes, of the same numbers, in the same places; those in place are kept."""
        if batch.shape != (self._rows, self._distances_each, self._with_w):
            raise ValueError(f"these are the factors of {self.distances.shape} probes, not of {batch.shape}")
        if batch.distances != self._probed:
            here = torch.tensor(batch.distances, dtype=torch.float32).repeat(self._rows, 1)
            here[: int(self._with_w)] = 0.0
            self.distances.copy_(here)
            scale = float(self._layout.scale) if self._layout.rank > 1 else 1.0
            torch.mul(self.distances, scale, out=self.scaled_distances)
            self.unit.fill_(max(map(abs, batch.distances)) or 1.0)
            self._probed = batch.distances
        if batch.directions != self._drawn:
            self._drawn = batch.directions
            for stored in self._typed.values():
                self._draw(stored, batch.directions)

    def of(self, number: int, dtype: torch.dtype) -> LowRank | Tensor:
        """Return the factors of a tensor, by its number in the layout; of one that gets entries, (directions, n)."""
        if (number, dtype) not in self._views:
            with torch._C._DisableFuncTorch():  # a model may use its weights inside vmap or grad: stay a plain tensor
                self._views[number, dtype] = self._view(number, self._typed[dtype])
        return self._views[number, dtype]

    def _view(self, number: int, stored: Tensor) -> LowRank | Tensor:
        t, places, shape = self._layout.tensors[number], self._places[number], self._shapes[number]
        if not t.rank:
            return stored[:, places[0] : places[0] + t.size]

        def several(first: int, second: int, length: int) -> Tensor:
            strides = (self._size, second - first, 1)
            return stored.as_strided((self._rows, t.rank, length), strides, first)

        ends = [*places, places[-1]]  # with one factor on each side any distance between factors will do
        left = several(places[0], ends[1], t.rows)
        right = several(places[t.rank], ends[t.rank + 1], t.columns)
        return LowRank(left, right.view(self._rows, t.rank, *shape[1:]))

    def _draw(self, stored: Tensor, d: Directions) -> None:
        """Write the factors of the directions; the row of w itself stays 0."""
        begin, drawn = int(self._with_w), self._layout.drawn
        if self._index_there is None and stored.dtype == torch.float32:
            _fill(stored[begin:], d, 0)
            return
        slab = max(1, SLAB // drawn)
        for first in range(0, d.k, slab):
            raw = torch.empty(min(slab, d.k - first), drawn, device=self._device)
            _fill(raw, d, first)
            placed = raw if self._index_there is None else raw.index_select(1, self._index_there)
            stored[begin + first : begin + first + len(raw)].copy_(placed)


def aligned(device: torch.device) -> bool:
    """Return whether factors begin at aligned places."""
    return not backend_of(device).host


def _fill(out: Tensor, directions: Directions, first: int) -> None:
    stream = DirectionSpace("gaussian", out.shape[1])
    engine.fill(out, 0, directions.seed, directions.round, directions.first + first, stream)


def _places(layout: LowRankLayout, alignment: int) -> tuple[list[list[int]], np.ndarray | None]:
    """Return where each factor of each tensor is stored, and the numbers of the stream in that order.

    The order is None where it is the stream's own.
    """
    places, parts, at = [], [], 0
    for t in layout.tensors:
        lengths = [t.rows] * t.rank + [t.columns] * t.rank if t.rank else [t.size]
        mine, source = [], t.at
        for length in lengths:
            mine.append(at)
            padded = -(-length // alignment) * alignment
            parts.append(np.minimum(np.arange(source, source + padded), source + max(length - 1, 0)))
            at, source = at + padded, source + length
        places.append(mine)
    if at == layout.drawn:
        return places, None
    return places, np.concatenate(parts)
