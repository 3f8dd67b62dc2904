"""Robust rules: what they compute, and what a liar can't do to them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from cyber0 import aggregate
from cyber0.aggregate import RULES, AggregationError, columns, make, mean, median, tolerated, trimmed_mean
from cyber0.errors import ConfigError, Cyber0Error

BETAS = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.45, 0.49])
# A few integers, so that ties are common, and ordinary numbers.
NUMBERS = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6, width=32))


@st.composite
def matrices(draw: st.DrawFn, min_rows: int = 1, max_rows: int = 30, dtype: type = np.float32) -> NDArray[Any]:
    shape = (draw(st.integers(min_rows, max_rows)), draw(st.integers(1, 6)))
    return draw(hnp.arrays(dtype, shape, elements=NUMBERS))


def by_definition(matrix: NDArray[Any], b: int) -> tuple[list[float], list[int]]:
    """The trimmed mean and the excluded counts as one would write them on a blackboard."""
    rows, columns = matrix.shape
    values, excluded = [], [0] * rows
    for column in range(columns):
        ranked = sorted(range(rows), key=lambda row: (matrix[row, column], row))
        for row in ranked[:b] + ranked[rows - b :]:
            excluded[row] += 1
        kept = ranked[b : rows - b]
        values.append(sum(float(matrix[row, column]) for row in kept) / len(kept))
    return values, excluded


def test_the_number_of_tolerated_liars_is_not_spoiled_by_rounding() -> None:
    assert tolerated(0.25, 12) == 3
    assert tolerated(0.29, 100) == 29  # 0.29 * 100 = 28.999999999999996
    assert [tolerated(i / 100, 100) for i in range(50)] == list(range(50))
    assert tolerated(0.0, 7) == tolerated(0.4, 0) == 0


@given(beta=st.floats(0, 0.5, exclude_max=True), invited=st.integers(0, 10**6))
@settings(deadline=None)
def test_tolerated_liars_are_always_a_minority(beta: float, invited: int) -> None:
    assert 2 * tolerated(beta, invited) < max(1, invited)


@pytest.mark.parametrize("beta", [-0.1, 0.5, 1.0, float("nan"), float("inf")])
def test_an_impossible_beta_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"0 <= beta < 0\.5"):
        tolerated(beta, 12)
    with pytest.raises(ConfigError):
        trimmed_mean(beta)
    with pytest.raises(ConfigError):
        make("mean", beta)


@given(matrix=matrices(), beta=BETAS)
@settings(max_examples=300, deadline=None)
def test_the_trimmed_mean_agrees_with_its_definition(matrix: NDArray[Any], beta: float) -> None:
    outcome = trimmed_mean(beta).decide(matrix)
    values, excluded = by_definition(matrix, tolerated(beta, len(matrix)))
    np.testing.assert_allclose(outcome.values, values, rtol=1e-12, atol=1e-9)
    assert outcome.excluded.tolist() == excluded
    assert outcome.values.dtype == np.float64
    assert outcome.excluded.dtype == np.int64


@given(matrix=matrices(), beta=BETAS, data=st.data())
@settings(deadline=None)
def test_the_order_of_the_rows_does_not_matter(matrix: NDArray[Any], beta: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(matrix))))
    for rule in (trimmed_mean(beta), median(), mean()):
        np.testing.assert_allclose(rule(matrix[list(order)]), rule(matrix), rtol=1e-12, atol=1e-9)


@given(matrix=matrices(dtype=np.float64), beta=BETAS, shift=st.floats(-1e3, 1e3), scale=st.floats(-1e3, 1e3))
@settings(deadline=None)
def test_shifting_and_scaling_the_reports_shifts_and_scales_the_result(
    matrix: NDArray[Any], beta: float, shift: float, scale: float
) -> None:
    for rule in (trimmed_mean(beta), median(), mean()):
        np.testing.assert_allclose(rule(matrix * scale + shift), rule(matrix) * scale + shift, rtol=1e-9, atol=1e-4)


@given(honest=matrices(min_rows=3), data=st.data())
@settings(max_examples=300, deadline=None)
def test_tolerated_liars_cannot_move_the_result_out_of_the_honest_range(
    honest: NDArray[Any], data: st.DataObject
) -> None:
    liars = data.draw(st.integers(0, (len(honest) - 1) // 2))
    invited = len(honest) + liars
    lie = st.one_of(st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0]), st.floats(width=32))
    lies = data.draw(hnp.arrays(np.float32, (liars, honest.shape[1]), elements=lie))
    order = data.draw(st.permutations(range(invited)))
    matrix = np.concatenate([honest, lies])[list(order)]
    beta = liars / invited
    assert tolerated(beta, invited) == liars
    low, high = honest.min(axis=0), honest.max(axis=0)
    for rule in (trimmed_mean(beta), median(beta)):
        values = rule(matrix, invited=invited).astype(np.float32)
        assert ((low <= values) & (values <= high)).all()


@given(matrix=matrices(min_rows=2, max_rows=40), beta=BETAS, budget=st.integers(1, 100), copied=st.integers(1, 5))
@settings(deadline=None)
def test_the_result_does_not_depend_on_how_the_work_is_cut_into_blocks(
    matrix: NDArray[Any], beta: float, budget: int, copied: int
) -> None:
    whole = trimmed_mean(beta).decide(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_ELEMENTS_PER_BLOCK", budget)
        patch.setattr(columns, "_ELEMENTS_WORTH_THREADS", 1)
        patch.setattr(columns, "_FEW_ROWS", copied)
        patch.setattr(columns, "_COLUMNS_PER_COPY", copied)
        patch.setattr(columns, "_ROWS_PER_COPY", copied)
        patch.setattr(aggregate.rule, "_ELEMENTS_PER_CHECK", copied)
        cut = trimmed_mean(beta).decide(matrix)
    assert cut.values.tobytes() == whole.values.tobytes()
    assert cut.excluded.tolist() == whole.excluded.tolist()


@given(matrix=matrices(min_rows=2), beta=BETAS)
@settings(deadline=None)
def test_the_result_does_not_depend_on_the_layout_in_memory(matrix: NDArray[Any], beta: float) -> None:
    rule = trimmed_mean(beta)
    assert rule(np.asfortranarray(matrix)).tobytes() == rule(matrix).tobytes()
    assert rule(np.repeat(matrix, 2, axis=1)[:, ::2]).tobytes() == rule(matrix).tobytes()
    assert rule(matrix.astype(matrix.dtype.newbyteorder())).tobytes() == rule(matrix.astype(np.float64)).tobytes()


def test_many_rows_go_the_same_way_as_few() -> None:
    matrix = np.random.default_rng(0).integers(-50, 50, (20_000, 20)).astype(np.float32)
    outcome = trimmed_mean(0.25).decide(matrix)
    values, excluded = by_definition(matrix, 5_000)
    np.testing.assert_allclose(outcome.values, values, rtol=1e-12)
    assert outcome.excluded.tolist() == excluded


@given(matrix=matrices())
@settings(deadline=None)
def test_the_median_is_the_middle_number_or_the_mean_of_the_two(matrix: NDArray[Any]) -> None:
    outcome = median().decide(matrix)
    np.testing.assert_array_equal(outcome.values, np.median(matrix.astype(np.float64), axis=0))
    left_out = len(matrix) - (2 if len(matrix) % 2 == 0 else 1)
    assert outcome.excluded.sum() == left_out * matrix.shape[1]


@given(matrix=matrices())
@settings(deadline=None)
def test_the_mean_leaves_nobody_out(matrix: NDArray[Any]) -> None:
    outcome = mean().decide(matrix)
    np.testing.assert_allclose(outcome.values, matrix.astype(np.float64).mean(axis=0), rtol=1e-12, atol=1e-9)
    assert not outcome.excluded.any()


def test_equal_numbers_at_the_thresholds_go_by_row() -> None:
    matrix = np.array([[1.0], [1.0], [1.0], [1.0], [1.0]], np.float32)
    assert trimmed_mean(0.4).decide(matrix).excluded.tolist() == [1, 1, 0, 1, 1]
    matrix = np.array([[2.0], [0.0], [0.0], [2.0], [1.0]], np.float32)
    assert trimmed_mean(0.2).decide(matrix).excluded.tolist() == [0, 1, 0, 1, 0]


def test_rows_that_are_not_finite_are_excluded_everywhere_and_count_as_absent() -> None:
    matrix = np.arange(24, dtype=np.float32).reshape(8, 3)
    matrix[2, 1] = np.nan
    matrix[5, 0] = np.inf
    outcome = trimmed_mean(0.25).decide(matrix)
    finite = [0, 1, 3, 4, 6, 7]
    values, excluded = by_definition(matrix[finite], 2)  # the trim count stays that of 8 invited
    np.testing.assert_allclose(outcome.values, values)
    assert outcome.excluded[finite].tolist() == excluded
    assert outcome.excluded[[2, 5]].tolist() == [3, 3]


def test_silence_does_not_weaken_the_defence() -> None:
    matrix = np.array([[0.0], [2.0], [3.0], [7.0], [1e9]], np.float32)
    assert trimmed_mean(0.25)(matrix, invited=8) == [3.0]  # two go at each end, as if all 8 had answered
    assert trimmed_mean(0.25)(matrix) == [4.0]  # with 5 invited one goes at each end


@pytest.mark.parametrize("rule", [trimmed_mean(0.25), median(0.25)])
def test_too_few_rows_are_an_error_that_says_how_many_are_needed(rule: aggregate.Rule) -> None:
    matrix = np.zeros((6, 2))
    with pytest.raises(AggregationError, match="6 usable rows of 12 invited clients, and needs at least 7") as caught:
        rule.decide(matrix, invited=12)
    assert isinstance(caught.value, (ValueError, Cyber0Error))


def test_nobody_left_is_an_error_for_every_rule() -> None:
    for name in RULES:
        for matrix in (np.zeros((0, 3)), np.full((4, 3), np.nan)):
            with pytest.raises(AggregationError):
                make(name, 0.25).decide(matrix)


def test_what_is_not_a_matrix_of_numbers_is_refused() -> None:
    for bad in (np.zeros(3), np.zeros((2, 2, 2)), np.zeros((2, 2), complex), np.array([["a"]]), np.ones((2, 2), bool)):
        with pytest.raises(AggregationError):
            mean()(bad)
    with pytest.raises(AggregationError, match="3 rows but only 2 invited"):
        mean()(np.zeros((3, 1)), invited=2)


def test_lists_integers_and_no_columns_are_fine() -> None:
    assert median()([[1], [2], [10]]).tolist() == [2.0]
    outcome = trimmed_mean(0.25).decide(np.zeros((4, 0), np.float32))
    assert outcome.values.shape == (0,)
    assert outcome.excluded.tolist() == [0, 0, 0, 0]


def test_means_are_taken_in_double_precision() -> None:
    matrix = np.array([[3e38], [3e38], [-3e38]], np.float32)
    assert np.isfinite(mean()(matrix)).all()


def test_the_matrix_is_not_changed() -> None:
    matrix = np.random.default_rng(1).standard_normal((9, 5)).astype(np.float32)
    before = matrix.copy()
    for name in RULES:
        make(name, 0.25).decide(matrix)
    np.testing.assert_array_equal(matrix, before)


def test_a_misspelt_rule_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'trimmed_mean'"):
        make("trimed_mean", 0.25)
    assert [make(name, 0.25).name for name in RULES] == list(RULES)
    assert make("trimmed_mean", 0.25).beta == make("median", 0.25).beta == 0.25


@pytest.mark.parametrize("module", ["aggregate", "protocol", "ledger", "federator"])
def test_the_federators_modules_run_on_numpy_alone(module: str) -> None:
    code = f"import sys, cyber0.{module}; print([m for m in ('torch', 'numba', 'scipy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
