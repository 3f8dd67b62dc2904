"""Which directions a run draws: a distribution, for weights of a certain number and, where it matters, shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from cyber0.directions.definition import F32, GAUSSIAN_REACH, Distribution, distribution_named, reference
from cyber0.directions.low_rank import LowRankLayout

_MARGIN = 1.0 + 2.0**-20
"""For what the roundings of a product, a sum and a scale may add."""


@dataclass(frozen=True)
class DirectionSpace:
    """The directions of one distribution for certain weights.

    Args:
        distribution: A name from DISTRIBUTIONS.
        dimension: d, how many weights there are.
        layout: How the numbers drawn become coordinates; only distributions that depend on the shapes of the weights
            have one.
    """

    distribution: str
    dimension: int
    layout: LowRankLayout | None = None

    def __post_init__(self) -> None:
        if self.known.shaped != (self.layout is not None):
            raise ValueError(
                f"{self.distribution} directions depend on the shapes of the weights: pass layout=LowRankLayout.of("
                "shapes, rank)"
                if self.known.shaped
                else f"{self.distribution} directions don't depend on shapes: pass no layout"
            )
        if self.layout is not None and self.layout.dimension != self.dimension:
            raise ValueError(f"a layout of {self.layout.dimension} weights was given for {self.dimension}")

    @classmethod
    def of(cls, distribution: str, shapes: Iterable[Sequence[int]], rank: int = 1) -> DirectionSpace:
        """Return the space for weights of these shapes, in the order of w.

        Args:
            distribution: A name from DISTRIBUTIONS.
            shapes: One shape a tensor.
            rank: Of low-rank directions; others have none, and must be given 1.
        """
        if distribution_named(distribution).shaped:
            layout = LowRankLayout.of(shapes, rank)
            return cls(distribution, layout.dimension, layout)
        if rank != 1:
            raise ValueError(f"rank = {rank} can't be used with distribution {distribution!r}, only with 'low_rank'")
        return cls(distribution, sum(prod(shape) for shape in shapes))

    @property
    def known(self) -> Distribution:
        """The distribution."""
        return distribution_named(self.distribution)

    @property
    def text(self) -> str:
        """The distribution and its rank, if it has one, for people."""
        return repr(self.distribution) if self.layout is None else f"{self.distribution!r} of rank {self.layout.rank}"

    @property
    def factor(self) -> float:
        """By which a slope along a direction is multiplied to estimate the gradient: d on the unit sphere."""
        return self.known.factor(self.dimension)

    @property
    def reach(self) -> float:
        """No coordinate of any direction is further from 0."""
        rank = 0 if self.layout is None else max((t.rank for t in self.layout.tensors), default=0)
        return GAUSSIAN_REACH**2 * rank**0.5 * _MARGIN if rank else GAUSSIAN_REACH

    def coordinates(self, seed: int, round: int, index: int, start: int, count: int) -> F32:
        """Return coordinates start .. start + count - 1 of one direction: the definition of its bits."""
        place = (seed, round, index, start, count)
        return reference(*place, self.distribution, dimension=self.dimension, layout=self.layout)
