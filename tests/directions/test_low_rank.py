"""Low-rank directions: which tensors have factors, the moments of their entries, and the bits that kernels give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import some_space

from cyber0.directions import DirectionSpace, Probe, Step, definition, engine, reference
from cyber0.directions.backends import cpu, factors
from cyber0.directions.definition import GAUSSIAN_REACH
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


# What the kernels give.

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def bits(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16).numpy().view(f"u{t.element_size()}").copy()


def assert_applied(space: DirectionSpace, storage: str, start: int, count: int, steps: list[Step]) -> None:
    """Compare steps and a probe with the definition."""
    probe = Probe(5, 6, 2, 1e-2)
    w = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.1).to(DTYPES[storage])
    stored = w.numpy().copy() if storage == "float32" else bits(w)
    for p in (None, probe):
        expected = definition.apply(stored, storage, start, steps, p, space)
        found = engine.apply(w, torch.empty_like(w), start, steps, p, space)
        np.testing.assert_array_equal(bits(found), expected.view(f"u{w.element_size()}"))


@given(st.integers(0, 2**64 - 1), st.integers(1, 9), st.integers(1, 6000), st.data())
@settings(max_examples=40, deadline=None)
def test_any_piece_of_any_directions_has_the_bits_of_the_definition(
    seed: int, rank: int, dimension: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, dimension))
    count, rows = data.draw(st.integers(0, dimension - start)), data.draw(st.integers(1, 3))
    space = some_space("low_rank", dimension, rank)
    out = engine.fill(torch.full((rows, count), torch.nan), start, seed, 7, 3, space)
    for r in range(rows):
        assert out[r].numpy().tobytes() == space.coordinates(seed, 7, 3 + r, start, count).tobytes()


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize(
    "limits", [(1 << 25, 1 << 19), (1 << 14, 1 << 10), (1 << 10, 1)], ids=["usual", "small", "least"]
)
def test_a_pass_has_the_bits_of_the_definition_however_it_is_cut(
    limits: tuple[int, int], storage: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "FACTOR_BYTES", limits[0])
    monkeypatch.setattr(cpu, "SHARED_BYTES", limits[1])
    rng = np.random.default_rng(3)
    steps = [Step(9 + t, t, np.float32(rng.normal(size=3) * 1e-2), t, t % 2) for t in range(5)]
    space = some_space("low_rank", 6000, rank)
    for start, count in ((0, 6000), (1021, 1100), (4999, 1)):
        assert_applied(space, storage, start, count, steps)


@pytest.mark.parametrize("storage", DTYPES)
def test_many_steps_at_once_are_the_steps_one_by_one(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SHARED_BYTES", 1 << 12)
    space = some_space("low_rank", 9000, 2)
    steps = [Step(1, t, np.float32([1e-2, -3e-3])) for t in range(20)]
    together = torch.randn(9000, generator=torch.Generator().manual_seed(2)).to(DTYPES[storage])
    alone = together.clone()
    engine.apply(together, together, 0, steps, None, space)
    for step in steps:
        engine.apply(alone, alone, 0, [step], None, space)
    np.testing.assert_array_equal(bits(together), bits(alone))


@given(st.integers(1, 4), st.integers(1, 30_000), st.integers(1, 4000), st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_cover_the_weights_and_stay_within_their_limit(
    rank: int, dimension: int, most: int, data: st.DataObject
) -> None:
    layout = some_space("low_rank", dimension, rank).layout
    assert layout is not None
    begin = data.draw(st.integers(0, dimension))
    end = data.draw(st.integers(begin, dimension))
    found = list(factors.pieces(layout, begin, end, most))
    assert [p.begin for p in found] == [begin, *(p.end for p in found)][: len(found)]
    assert (found[-1].end if found else begin) == end and all(p.begin < p.end for p in found)
    # A piece has at least as many rows as columns, and one row more where it begins or ends within a row.
    least = max((2 * rank * (t.columns + 1) for t in layout.tensors if t.rank), default=0)
    assert all(p.width <= max(most, least) for p in found)


def test_drawing_for_pieces_costs_at_most_twice_what_drawing_for_all_costs() -> None:
    layout = LowRankLayout.of([(5000, 40), (40, 700)], 2)
    for most in (1, 100, 1000, 20_000):
        found = list(factors.pieces(layout, 0, layout.dimension, most))
        assert sum(p.width for p in found) <= 2.2 * layout.drawn


# Spaces.


@pytest.mark.parametrize("rank", [1, 2, 9])
def test_no_coordinate_is_beyond_the_reach(rank: int) -> None:
    space = DirectionSpace.of("low_rank", [(40, 50), (9,)], rank)
    assert GAUSSIAN_REACH**2 * rank**0.5 <= space.reach <= GAUSSIAN_REACH**2 * rank**0.5 * 1.00001
    assert max(float(np.abs(space.coordinates(1, 2, j, 0, 2009)).max()) for j in range(50)) <= space.reach
    # The worst case: all factors at their reach, with all roundings upwards.
    layout = LowRankLayout.of([(40, 50)], rank)
    worst = layout.coordinates(lambda start, count: np.full(count, GAUSSIAN_REACH, np.float32), 0, 2000)
    assert float(worst.max()) <= space.reach


def test_the_reach_is_that_of_a_number_where_no_tensor_has_factors() -> None:
    assert DirectionSpace.of("low_rank", [(9,), (2, 2)], 1).reach == GAUSSIAN_REACH
    assert DirectionSpace("gaussian", 10).reach == GAUSSIAN_REACH


def test_the_reference_says_what_low_rank_directions_need() -> None:
    with pytest.raises(ValueError, match=r"'low_rank' needs layout=LowRankLayout.of\(shapes, rank\)"):
        reference(1, 2, 3, 0, 10, "low_rank")
    layout = LowRankLayout.of(SHAPES, 1)
    z = reference(11, 3, 5, 4, 20, "low_rank", layout=layout)
    assert z.tobytes() == drawn(layout, 5, 4, 20).tobytes()


def test_a_space_needs_a_layout_where_shapes_matter_and_only_there() -> None:
    layout = LowRankLayout.of([(6, 6)], 2)
    assert DirectionSpace("low_rank", 36, layout) == DirectionSpace.of("low_rank", [(6, 6)], 2)
    assert DirectionSpace.of("sphere", [(6, 6), (4,), ()]) == DirectionSpace("sphere", 41)
    for text, make in (
        ("pass layout=", lambda: DirectionSpace("low_rank", 36)),
        ("a layout of 36 weights was given for 35", lambda: DirectionSpace("low_rank", 35, layout)),
        ("pass no layout", lambda: DirectionSpace("gaussian", 36, layout)),
        ("rank = 2 can't be used with distribution 'gaussian'", lambda: DirectionSpace.of("gaussian", [(6, 6)], 2)),
    ):
        with pytest.raises(ValueError, match=text):
            make()
