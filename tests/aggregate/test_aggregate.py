"""Robust rules: what they compute, and what a Byzantine client can't do to them."""

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
from cyber0.aggregate import (
    RULES,
    AggregationError,
    Outcome,
    columns,
    make,
    meamed,
    mean,
    median,
    tolerated,
    trimmed_mean,
)
from cyber0.errors import ConfigError, Cyber0Error

BETAS = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.45, 0.49])
# A few integers, so that ties are common, and ordinary numbers.
NUMBERS = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6, width=32))


@st.composite
def matrices(draw: st.DrawFn, min_rows: int = 1, max_rows: int = 30, dtype: type = np.float32) -> NDArray[Any]:
    shape = (draw(st.integers(min_rows, max_rows)), draw(st.integers(1, 6)))
    return draw(hnp.arrays(dtype, shape, elements=NUMBERS))


def by_definition(matrix: NDArray[Any], b: int, round: int = 0) -> tuple[list[float], list[int]]:
    """The trimmed mean and the excluded counts as one would write them on a blackboard."""
    rows, columns = matrix.shape
    values, excluded = [], [0] * rows
    for column in range(columns):
        numbers = matrix[:, column].tolist()
        ranked = sorted(numbers)
        kept = ranked[b : rows - b]
        values.append(sum(kept) / len(kept))
        for row in left_out(numbers, kept[0], kept[-1], b, b, round * columns + column):
            excluded[row] += 1
    return values, excluded


def left_out(numbers: list[float], low: float, high: float, below: int, above: int, turn: int) -> list[int]:
    """Who is left out if `below` go beneath and `above` go above the range kept; equal numbers take turns."""
    under = [row for row, x in enumerate(numbers) if x < low]
    over = [row for row, x in enumerate(numbers) if x > high]
    surplus = {low: below - len(under)}
    surplus[high] = surplus.get(high, 0) * (low == high) + above - len(over)
    tied = []
    for value, count in surplus.items():
        equal = [row for row, x in enumerate(numbers) if x == value]
        tied += [equal[(turn * count + i) % len(equal)] for i in range(count)]
    return under + over + tied


def test_the_number_of_tolerated_byzantine_clients_is_not_spoiled_by_rounding() -> None:
    assert tolerated(0.25, 12) == 3
    assert tolerated(0.29, 100) == 29  # 0.29 * 100 = 28.999999999999996
    assert [tolerated(i / 100, 100) for i in range(50)] == list(range(50))
    assert tolerated(0.0, 7) == tolerated(0.4, 0) == 0


@pytest.mark.slow
@given(beta=st.floats(0, 0.5, exclude_max=True), invited=st.integers(0, 10**6))
@settings(deadline=None)
def test_tolerated_byzantine_clients_are_always_a_minority(beta: float, invited: int) -> None:
    assert 2 * tolerated(beta, invited) < max(1, invited)


@pytest.mark.parametrize("beta", [-0.1, 0.5, 1.0, float("nan"), float("inf")])
def test_an_impossible_beta_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"0 <= beta < 0\.5"):
        tolerated(beta, 12)
    with pytest.raises(ConfigError):
        trimmed_mean(beta)
    with pytest.raises(ConfigError):
        make("mean", beta)


@pytest.mark.slow
@given(matrix=matrices(), beta=BETAS, round=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_the_trimmed_mean_agrees_with_its_definition(matrix: NDArray[Any], beta: float, round: int) -> None:
    outcome = trimmed_mean(beta).decide(matrix, round=round)
    values, excluded = by_definition(matrix, tolerated(beta, len(matrix)), round)
    np.testing.assert_allclose(outcome.values, values, rtol=1e-12, atol=1e-9)
    assert outcome.excluded.tolist() == excluded
    assert outcome.values.dtype == np.float64
    assert outcome.excluded.dtype == np.int64


@pytest.mark.slow
@given(matrix=matrices(), beta=BETAS, data=st.data())
@settings(deadline=None)
def test_the_order_of_the_rows_does_not_matter(matrix: NDArray[Any], beta: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(matrix))))
    for rule in (trimmed_mean(beta or 0.1), median(), meamed(beta or 0.1)):
        if tolerated(rule.beta, len(matrix)) or rule.name == "median":
            assert rule(matrix[list(order)]).tobytes() == rule(matrix).tobytes()
    np.testing.assert_allclose(mean()(matrix[list(order)]), mean()(matrix), rtol=1e-12, atol=1e-9)


@pytest.mark.slow
@given(matrix=matrices(dtype=np.float64), beta=BETAS, shift=st.floats(-1e3, 1e3), scale=st.floats(-1e3, 1e3))
@settings(deadline=None)
def test_shifting_and_scaling_the_reports_shifts_and_scales_the_result(
    matrix: NDArray[Any], beta: float, shift: float, scale: float
) -> None:
    for rule in (trimmed_mean(beta), median(), mean()):
        np.testing.assert_allclose(rule(matrix * scale + shift), rule(matrix) * scale + shift, rtol=1e-9, atol=1e-4)


@pytest.mark.slow
@given(honest=matrices(min_rows=3), data=st.data())
@settings(max_examples=300, deadline=None)
def test_tolerated_byzantine_clients_cannot_move_the_result_out_of_the_honest_range(
    honest: NDArray[Any], data: st.DataObject
) -> None:
    byzantine = data.draw(st.integers(0, (len(honest) - 1) // 2))
    invited = len(honest) + byzantine
    lie = st.one_of(st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0]), st.floats(width=32))
    byzantine_rows = data.draw(hnp.arrays(np.float32, (byzantine, honest.shape[1]), elements=lie))
    order = data.draw(st.permutations(range(invited)))
    matrix = np.concatenate([honest, byzantine_rows])[list(order)]
    beta = byzantine / invited
    assert tolerated(beta, invited) == byzantine
    low, high = honest.min(axis=0), honest.max(axis=0)
    for rule in (trimmed_mean(beta), median(beta)):
        values = rule(matrix, invited=invited).astype(np.float32)
        assert ((low <= values) & (values <= high)).all()


COLUMN_RULES = ["mean", "median", "trimmed_mean", "meamed"]


def same(one: Outcome, other: Outcome) -> bool:
    return one.values.tobytes() == other.values.tobytes() and one.excluded.tolist() == other.excluded.tolist()


@pytest.mark.slow
@given(
    matrix=matrices(min_rows=2, max_rows=40), beta=BETAS, budget=st.integers(1, 100), copied=st.integers(1, 5),
    few=st.sampled_from([1, 256]), name=st.sampled_from(COLUMN_RULES),
)  # fmt: skip
@settings(deadline=None)
def test_the_result_does_not_depend_on_how_the_work_is_cut_into_blocks(
    matrix: NDArray[Any], beta: float, budget: int, copied: int, few: int, name: str
) -> None:
    rule = make(name, beta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_FEW_ROWS", few)
        whole = rule.decide(matrix, round=3)
        patch.setattr(columns, "_ELEMENTS_PER_BLOCK", budget)
        patch.setattr(columns, "_ELEMENTS_WORTH_THREADS", 1)
        patch.setattr(columns, "_COLUMNS_PER_COPY", copied)
        patch.setattr(columns, "_ROWS_PER_COPY", copied)
        patch.setattr(aggregate.rule, "_ELEMENTS_PER_CHECK", copied)
        patch.setenv("CYBER0_THREADS", "3")
        assert same(rule.decide(matrix, round=3), whole)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32), rows=st.integers(2, 60), width=st.sampled_from([1, 7, 511, 512, 1100]), beta=BETAS,
    name=st.sampled_from(COLUMN_RULES), dtype=st.sampled_from([np.float32, np.float64]), ties=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_compiled_kernels_give_the_same_bits(
    seed: int, rows: int, width: int, beta: float, name: str, dtype: type, ties: bool
) -> None:
    matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(dtype)
    matrix = np.round(matrix) if ties else matrix
    matrix[0] = np.finfo(np.float32).max
    rule = make(name, beta)
    plain = rule.decide(matrix, round=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_ELEMENTS_WORTH_KERNELS", 1)
        patch.setattr(columns, "_ELEMENTS_WORTH_THREADS", 1)
        patch.setenv("CYBER0_THREADS", "2")
        assert columns._kernels(matrix) is not None
        assert same(rule.decide(matrix, round=seed), plain)


def test_without_numba_a_large_matrix_is_aggregated_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(0).standard_normal((9, 50))
    expected = trimmed_mean(0.25).decide(matrix)
    monkeypatch.setattr(columns, "_ELEMENTS_WORTH_KERNELS", 1)
    monkeypatch.setitem(sys.modules, "cyber0.aggregate.kernels", None)
    monkeypatch.delattr(aggregate, "kernels", raising=False)
    columns._load_kernels.cache_clear()
    try:
        assert columns._load_kernels() is None
        assert same(trimmed_mean(0.25).decide(matrix), expected)
    finally:
        columns._load_kernels.cache_clear()


@pytest.mark.parametrize("count", [1, 2, 3, 12, 100, 255, 256])
def test_the_network_sorts(count: int) -> None:
    numbers = np.random.default_rng(count).integers(0, 2, (count, 400)) | np.random.default_rng(1).integers(0, 2, 400)
    expected = np.sort(numbers, axis=0)
    for low, high in columns._network(count).tolist():
        assert low < high
        numbers[[low, high]] = np.sort(numbers[[low, high]], axis=0)
    assert (numbers == expected).all()


@pytest.mark.slow
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


@pytest.mark.slow
@given(matrix=matrices())
@settings(deadline=None)
def test_the_median_is_the_middle_number_or_the_mean_of_the_two(matrix: NDArray[Any]) -> None:
    outcome = median().decide(matrix)
    np.testing.assert_array_equal(outcome.values, np.median(matrix.astype(np.float64), axis=0))
    left_out = len(matrix) - (2 if len(matrix) % 2 == 0 else 1)
    assert outcome.excluded.sum() == left_out * matrix.shape[1]


@pytest.mark.slow
@given(matrix=matrices())
@settings(deadline=None)
def test_the_mean_leaves_nobody_out(matrix: NDArray[Any]) -> None:
    outcome = mean().decide(matrix)
    np.testing.assert_allclose(outcome.values, matrix.astype(np.float64).mean(axis=0), rtol=1e-12, atol=1e-9)
    assert not outcome.excluded.any()


def test_equal_numbers_take_turns_in_being_left_out() -> None:
    alike = np.zeros((5, 5), np.float32)
    assert trimmed_mean(0.4).decide(alike).excluded.tolist() == [4] * 5
    # Three Byzantine clients send the smallest honest number: two of the four go in each column, each as often.
    matrix = np.array([[2.0], [1], [1], [3], [4], [1], [1], [5]], np.float32).repeat(6, axis=1)
    assert trimmed_mean(0.25).decide(matrix).excluded.tolist() == [0, 3, 3, 0, 6, 3, 3, 6]
    # With one number a round they take turns from round to round.
    counts = sum(trimmed_mean(0.25).decide(matrix[:, :1], round=t).excluded for t in range(6))
    assert counts.tolist() == [0, 3, 3, 0, 6, 3, 3, 6]


@pytest.mark.slow
@given(matrix=matrices(min_rows=5), beta=BETAS, round=st.integers(0, 9), few=st.sampled_from([1, 256]))
@settings(deadline=None)
def test_as_many_numbers_are_left_out_as_should_be(matrix: NDArray[Any], beta: float, round: int, few: int) -> None:
    b, width = tolerated(beta, len(matrix)), matrix.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_FEW_ROWS", few)
        assert trimmed_mean(beta).decide(matrix, round=round).excluded.sum() == 2 * b * width
        assert meamed(beta).decide(matrix, round=round).excluded.sum() == b * width


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_plain_mean_drops_what_is_not_finite_and_keeps_what_overflows(dtype: type) -> None:
    matrix = np.ones((4, 3), dtype)
    matrix[2, 1], matrix[1, 0] = -np.inf, np.nan
    outcome = mean().decide(matrix)
    assert outcome.values.tolist() == [1.0] * 3 and outcome.excluded.tolist() == [0, 3, 3, 0]
    enormous = np.full((3, 2), np.finfo(np.float64).max)
    assert np.isposinf(mean()(enormous)).all() and not mean().decide(enormous).excluded.any()


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


@pytest.mark.slow
@pytest.mark.parametrize("module", ["aggregate", "protocol.messages", "protocol.federator", "ledger"])
def test_the_federators_modules_run_on_numpy_alone(module: str) -> None:
    code = f"import sys, cyber0.{module}; print([m for m in ('torch', 'numba', 'scipy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
