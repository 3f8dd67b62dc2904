"""Spaces of directions for tests: any distribution, any number of weights."""

from __future__ import annotations

import math

from cyber0.directions import DirectionSpace
from cyber0.directions.definition import distribution_named

SHAPES = [(37, 53), (53,), (3, 5, 2, 2), (), (1, 40), (40, 9), (5, 2100), (1500, 3), (2, 2)]


def some_space(distribution: str, dimension: int, rank: int = 1) -> DirectionSpace:
    """Return a space of that many weights; where shapes matter, of matrices and tensors of many sizes."""
    if not distribution_named(distribution).shaped:
        return DirectionSpace(distribution, dimension)
    shapes: list[tuple[int, ...]] = []
    left = dimension
    for shape in SHAPES * (1 if dimension < 1 << 20 else 8):
        if math.prod(shape) <= left:
            shapes.append(shape)
            left -= math.prod(shape)
    rows = math.isqrt(left // 2)
    shapes += [(rows, left // rows), (left % rows,)] if rows else [(left,)]
    return DirectionSpace.of(distribution, shapes, rank)
