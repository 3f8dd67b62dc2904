"""The moments that docs/THEORY.md states for low-rank directions, against many directions."""

from __future__ import annotations

import numpy as np
import pytest

from cyber0.directions import DirectionSpace

SHAPES = [(6, 4), (5,), (3, 2, 4), (2, 2)]
DRAWN = 60_000


def directions(rank: int) -> tuple[DirectionSpace, np.ndarray]:
    """Return many directions of a small model; numbers of the stream are cut into them, which is faster."""
    space = DirectionSpace.of("low_rank", SHAPES, rank)
    layout = space.layout
    assert layout is not None
    numbers = DirectionSpace("gaussian", 1).coordinates(3, 1, rank, 0, DRAWN * layout.drawn)
    rows = numbers.reshape(DRAWN, layout.drawn).astype(np.float64)
    parts = []
    for t in layout.tensors:
        here = rows[:, t.at : t.at + t.drawn]
        if t.rank:
            b = here[:, : rank * t.rows].reshape(-1, rank, t.rows)
            a = here[:, rank * t.rows :].reshape(-1, rank, t.columns)
            here = np.einsum("jro,jri->joi", b, a).reshape(DRAWN, -1) / np.sqrt(rank)
        parts.append(here)
    z = np.concatenate(parts, axis=1)
    first = layout.coordinates(lambda start, count: numbers[start : start + count], 0, space.dimension)
    np.testing.assert_allclose(z[0], first, rtol=1e-5, atol=1e-6)
    return space, z


def stated(space: DirectionSpace, gradient: np.ndarray) -> float:
    """Return E ||<G, z> z||^2 by the formula."""
    assert space.layout is not None
    total = 0.0
    for t in space.layout.tensors:
        extra = 2 * (t.rows + t.columns + 1) / t.rank if t.rank else 0.0
        total += float((gradient[t.start : t.start + t.size] ** 2).sum()) * (space.dimension + 2 + extra)
    return total


@pytest.mark.parametrize("rank", [1, 2])
def test_the_estimate_has_the_mean_and_the_second_moment_that_are_stated(rank: int) -> None:
    space, z = directions(rank)
    assert space.layout is not None and [t.rank for t in space.layout.tensors] == [rank, 0, rank, 0]
    rng = np.random.default_rng(5)
    for one in (*space.layout.tensors, None):
        gradient = np.zeros(space.dimension)
        here = slice(None) if one is None else slice(one.start, one.start + one.size)
        gradient[here] = rng.normal(size=len(gradient[here]))
        estimates = (z @ gradient)[:, None] * z
        squares = (estimates**2).sum(1)
        error = 4.5 * squares.std() / np.sqrt(DRAWN)
        assert abs(squares.mean() - stated(space, gradient)) < error < 0.2 * squares.mean()
        np.testing.assert_array_less(np.abs(estimates.mean(0) - gradient), 5 * estimates.std(0) / np.sqrt(DRAWN))


@pytest.mark.parametrize("rank", [1, 2])
def test_the_fourth_moment_of_an_entry_is_3_plus_6_over_the_rank(rank: int) -> None:
    space, z = directions(rank)
    assert space.layout is not None
    for t in space.layout.tensors:
        fourth = (z[:, t.start : t.start + t.size] ** 4).mean(1)  # of one direction: its entries are not independent
        expected = 3 + 6 / t.rank if t.rank else 3.0
        assert abs(fourth.mean() - expected) < 5 * fourth.std() / np.sqrt(DRAWN)
