"""Low-rank directions: which tensors have factors, and the moments of their entries."""

from __future__ import annotations

import numpy as np
import pytest

from cyber0.directions import reference
from cyber0.directions.low_rank import LowRankLayout

SHAPES = [(7, 5), (5,), (), (4, 3, 2, 2), (1, 30), (30, 1), (3, 0), (2, 2), (6, 9)]


def drawn(layout: LowRankLayout, index: int, start: int = 0, count: int | None = None) -> np.ndarray:
    def stream(begin: int, size: int) -> np.ndarray:
        return reference(11, 3, index, begin, size, "gaussian")

    return layout.coordinates(stream, start, layout.dimension - start if count is None else count)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_matrix_has_the_rank_that_is_asked_for(rank: int) -> None:
    layout, sizes = LowRankLayout.of(SHAPES, rank), [int(np.prod(shape)) for shape in SHAPES]
    z, at = drawn(layout, 0), 0
    assert len(z) == layout.dimension == sum(sizes) and z.dtype == np.float32
    for shape, size, t in zip(SHAPES, sizes, layout.tensors, strict=True):
        part, at = z[at : at + size], at + size
        rows = shape[0] if len(shape) > 1 else 1
        if size and rank * (rows + size // rows) < size:
            assert t.rank == rank and np.linalg.matrix_rank(part.reshape(rows, -1), tol=1e-5) == rank
        else:
            assert t.rank == 0 and t.drawn == size
            assert part.tobytes() == reference(11, 3, 0, t.at, size, "gaussian").tobytes()
    assert layout.drawn == sum(t.drawn for t in layout.tensors)


@pytest.mark.parametrize("rank", [1, 2])
def test_any_piece_of_a_direction_is_a_piece_of_all_of_it(rank: int) -> None:
    layout = LowRankLayout.of(SHAPES, rank)
    whole = drawn(layout, 2)
    for start, count in [(0, 0), (0, 1), (6, 40), (34, 2), (35, 7), (layout.dimension, 0), (80, layout.dimension - 80)]:
        assert drawn(layout, 2, start, count).tobytes() == whole[start : start + count].tobytes()
    with pytest.raises(ValueError, match="were requested of"):
        drawn(layout, 2, layout.dimension, 1)


@pytest.mark.parametrize("rank", [1, 4])
def test_entries_have_mean_zero_and_variance_one_and_are_uncorrelated(rank: int) -> None:
    layout = LowRankLayout.of([(12, 11), (3,)], rank)
    z = np.stack([drawn(layout, j) for j in range(4000)]).astype(np.float64)
    assert np.abs(z.mean(0)).max() < 5 / np.sqrt(4000) * 1.1
    second = z.T @ z / len(z)
    assert np.abs(second - np.eye(layout.dimension)).max() < 6 * 3 / np.sqrt(4000)
    assert second.diagonal().mean() == pytest.approx(1.0, abs=0.03)


def test_the_numbers_of_two_tensors_and_two_directions_differ() -> None:
    layout = LowRankLayout.of([(8, 8), (8, 8)], 1)
    z = drawn(layout, 0)
    assert not np.array_equal(z[:64], z[64:]) and not np.array_equal(z, drawn(layout, 1))


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        LowRankLayout.of([(3, 3)], 0)
