"""Rules that compare whole rows, the mean around the median, and the steps before a rule."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cyber0 import aggregate
from cyber0.aggregate import (
    PRE_AGGREGATIONS,
    AggregationError,
    Rule,
    bucketing,
    centered_clipping,
    distances,
    geometric_median,
    krum,
    make,
    mda,
    meamed,
    mean,
    multi_krum,
    nnm,
    trimmed_mean,
)
from cyber0.aggregate.selection import MDA_BYZANTINE
from cyber0.config.schema import Config
from cyber0.config.tolerance import PAIRWISE_ROWS
from cyber0.errors import ConfigError

Floats = NDArray[Any]
NEW = ["krum", "multi_krum", "geometric_median", "meamed", "centered_clipping", "mda"]
SELECTING = ["krum", "multi_krum", "mda"]


@st.composite
def clouds(draw: st.DrawFn, spare: int = 3, dtype: type | None = None) -> tuple[Floats, int]:
    """Rows without ties in their distances, and how many of them may be Byzantine clients."""
    b = draw(st.integers(0, 3))
    rows, columns = draw(st.integers(2 * b + spare, 2 * b + spare + 6)), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = dtype or draw(st.sampled_from([np.float32, np.float64]))
    return generator.standard_normal((rows, columns)).astype(kind), b


def share(b: int, rows: int) -> float:
    return b / rows


def distance(x: Floats, y: Floats) -> float:
    return float(np.sqrt(((x.astype(np.float64) - y.astype(np.float64)) ** 2).sum()))


def krum_order(rows: Floats, b: int) -> list[int]:
    """The rows by their Krum scores, as one would write it on a blackboard."""
    scores = []
    for x in rows:
        squares = sorted(distance(x, y) ** 2 for y in rows)
        scores.append(sum(squares[: len(rows) - b]))
    return sorted(range(len(rows)), key=lambda i: scores[i])


def plain_krum(rows: Floats, b: int) -> Floats:
    return rows[krum_order(rows, b)[0]].astype(np.float64)


def plain_multi_krum(rows: Floats, b: int) -> Floats:
    return rows[krum_order(rows, b)[: len(rows) - b]].astype(np.float64).mean(axis=0)


def plain_meamed(rows: Floats, b: int) -> Floats:
    values = []
    for column in rows.astype(np.float64).T:
        middle = np.median(column)
        nearest = sorted(column, key=lambda v: (abs(v - middle), v))[: len(rows) - b]
        values.append(np.mean(nearest))
    return np.array(values)


def plain_mda(rows: Floats, b: int) -> Floats:
    def diameter(subset: tuple[int, ...]) -> float:
        return max((distance(rows[i], rows[j]) for i, j in itertools.combinations(subset, 2)), default=0.0)

    best = min(itertools.combinations(range(len(rows)), len(rows) - b), key=diameter)
    return rows[list(best)].astype(np.float64).mean(axis=0)


def plain_clipping(rows: Floats, b: int) -> Floats:
    x = rows.astype(np.float64)
    v = np.median(x, axis=0)
    radius = np.median([distance(row, v) for row in x])
    for _ in range(3):
        v = v + np.mean([(row - v) * min(1.0, radius / max(distance(row, v), 1e-300)) for row in x], axis=0)
    return v


def plain_nnm(rows: Floats, b: int) -> Floats:
    x = rows.astype(np.float64)
    nearest = [sorted(range(len(x)), key=lambda j: distance(x[i], x[j]))[: len(x) - b] for i in range(len(x))]
    return np.array([x[group].mean(axis=0) for group in nearest])


PLAIN: dict[str, Callable[[Floats, int], Floats]] = {
    "krum": plain_krum,
    "multi_krum": plain_multi_krum,
    "meamed": plain_meamed,
    "mda": plain_mda,
    "centered_clipping": plain_clipping,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
@given(cloud=clouds())
@settings(max_examples=40, deadline=None)
def test_a_rule_agrees_with_its_plain_definition(name: str, cloud: tuple[Floats, int]) -> None:
    rows, b = cloud
    found = make(name, share(b, len(rows)))(rows)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, PLAIN[name](rows, b), rtol=1e-7, atol=1e-7)


@given(cloud=clouds())
@settings(max_examples=60, deadline=None)
def test_no_point_is_nearer_to_all_rows_than_the_geometric_median(cloud: tuple[Floats, int]) -> None:
    rows = cloud[0].astype(np.float64)
    found = geometric_median()(rows)

    def total(z: Floats) -> float:
        return sum(distance(row, z) for row in rows)

    best = total(found)
    generator = np.random.default_rng(0)
    others = [found + scale * generator.standard_normal(rows.shape[1]) for scale in (1e-4, 1e-2, 1.0) for _ in range(8)]
    assert all(best <= total(z) * (1 + 1e-12) for z in [*others, *rows])


@pytest.mark.parametrize("seed", range(6))
def test_the_geometric_median_of_tiny_numbers_warns_of_nothing(seed: int) -> None:
    """Newton's step overflows there, and the plain step is taken."""
    rows = np.random.default_rng(seed).normal(size=(5, 3)) * 1e-150
    rows[1] = rows[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = geometric_median(0.2)(rows)
    assert (rows.min(axis=0) <= found).all() and (found <= rows.max(axis=0)).all()


@given(values=st.lists(st.integers(-20, 20), min_size=1, max_size=15))
@settings(deadline=None)
def test_the_geometric_median_of_single_numbers_is_a_median(values: list[int]) -> None:
    column = np.array(values, np.float64)[:, None]
    found, ranked = geometric_median()(column)[0], sorted(values)
    low, high = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    assert low - 1e-9 <= found <= high + 1e-9
    assert found == pytest.approx(np.median(column))


def test_the_geometric_median_may_be_a_row_or_take_a_number_of_smoothed_steps() -> None:
    cross = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
    assert geometric_median()(cross + 7).tolist() == [7.0, 7.0]
    rows = np.random.default_rng(0).standard_normal((9, 4)) + 1
    z = np.zeros(4)
    for _ in range(3):
        pull = 1 / np.maximum([distance(row, z) for row in rows], 0.1)
        z = pull @ rows / pull.sum()
    np.testing.assert_allclose(geometric_median(iterations=3, nu=0.1)(rows), z, rtol=1e-12)


# Mixing makes rows alike, and rounding then settles the ties of a rule that selects: only continuous rules after it.
CONTINUOUS = ["trimmed_mean", "geometric_median", "centered_clipping"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before"), [*((name, "none") for name in NEW), *((name, "nnm") for name in CONTINUOUS)]
)
@given(cloud=clouds(dtype=np.float64), data=st.data())
@settings(max_examples=15, deadline=None)
def test_order_shift_and_scale_carry_over(name: str, before: str, cloud: tuple[Floats, int], data: Any) -> None:
    rows, b = cloud
    rule = make(name, share(b, len(rows)), before=before)
    shift = data.draw(st.floats(-1e3, 1e3))
    # Of two numbers equally far from the median the lower stays, so a mirror image may keep the other one.
    scale = data.draw(st.floats(1e-3, 1e3))
    expected = rule(rows)
    np.testing.assert_allclose(rule(rows * scale + shift), expected * scale + shift, rtol=1e-5, atol=1e-5 * scale)
    if name != "mda":  # of equally tight subsets the first is taken
        order = data.draw(st.permutations(range(len(rows))))
        np.testing.assert_allclose(rule(rows[list(order)]), expected, rtol=1e-6, atol=1e-6)


def byzantine_rows(draw: st.DrawFn, count: int, columns: int, dtype: Any) -> Floats:
    lie = st.one_of(
        st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0]), st.floats(-(2.0**126), 2.0**126, width=32)
    )
    return np.array(draw(st.lists(lie, min_size=count * columns, max_size=count * columns)), dtype).reshape(
        count, columns
    )


@pytest.mark.slow
@pytest.mark.parametrize("before", ["none", "nnm"])
@pytest.mark.parametrize("name", NEW)
@given(cloud=clouds(spare=3), data=st.data())
@settings(max_examples=25, deadline=None)
def test_byzantine_clients_move_a_rule_no_farther_than_it_promises(
    name: str, before: str, cloud: tuple[Floats, int], data: Any
) -> None:
    honest, b = cloud
    columns, n = honest.shape[1], len(honest) + b
    matrix = np.concatenate([honest, byzantine_rows(data.draw, b, columns, honest.dtype)])
    order = data.draw(st.permutations(range(n)))
    found = make(name, share(b, n), before=before)(matrix[list(order)])
    diameter = max((distance(x, y) for x in honest for y in honest), default=0.0)
    # An honest row has n - b rows within a diameter, so its mixture is that near to it: mixing makes the cloud of
    # honest rows at most three times as wide, and a mixed Byzantine client is still one Byzantine client.
    spread = diameter * (3 if before == "nnm" else 1)
    root = np.sqrt(columns)
    promised = {
        "krum": np.sqrt(n) * spread,
        "multi_krum": np.sqrt(n) * spread,
        "mda": spread,
        "meamed": 2 * root * spread,  # each column within its honest range, and as much again
        "geometric_median": 2 * (n - b) / (n - 2 * b) * spread,
        "centered_clipping": (root + 3 * (1 + root)) * spread,  # the start, and three steps of a radius
    }[name]
    nearest = min(distance(found, x) for x in honest)
    assert nearest <= (promised + diameter) * (1 + 1e-6)


@pytest.mark.parametrize("before", PRE_AGGREGATIONS)
@pytest.mark.parametrize("name", NEW)
def test_enormous_doubles_neither_overflow_nor_win(name: str, before: str) -> None:
    rows = np.random.default_rng(1).standard_normal((24, 5))
    rows[3], rows[7] = 1e300, -1.7e308
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert np.abs(make(name, 0.1, before=before)(rows)).max() < 5


def test_rows_of_the_selecting_rules_are_excluded_as_a_whole() -> None:
    rows = np.random.default_rng(2).standard_normal((12, 7)).astype(np.float32)
    rows[5] += 100
    for name, kept in (("krum", 1), ("multi_krum", 9), ("mda", 9)):
        excluded = make(name, 0.25).decide(rows).excluded
        assert sorted(excluded.tolist()) == [0] * kept + [7] * (12 - kept)
        assert excluded[5] == 7
    for rule in (geometric_median(0.25), centered_clipping(0.25)):
        assert not rule.decide(rows).excluded.any()
    assert meamed(0.25).decide(rows).excluded.sum() == 3 * 7


def test_dropped_rows_count_as_absent_for_every_rule() -> None:
    rows = np.random.default_rng(3).standard_normal((12, 4)).astype(np.float32)
    rows[2, 1], rows[9, 0] = np.nan, -np.inf
    finite = np.isfinite(rows).all(axis=1)
    for name in NEW:
        outcome = make(name, 0.25).decide(rows)
        np.testing.assert_array_equal(outcome.values, make(name, 0.25)(rows[finite], invited=12))
        assert outcome.excluded[[2, 9]].tolist() == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("before", PRE_AGGREGATIONS)
@pytest.mark.parametrize("name", [*NEW, "mean", "trimmed_mean"])
def test_long_rows_in_blocks_are_as_one_block(
    name: str, before: str, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(4).standard_normal((24, 20_011)).astype(dtype)
    rows[:3] *= 5
    rule = make(name, 0.125, before=before)
    found = rule.decide(rows)
    monkeypatch.setattr(distances, "_ELEMENTS_PER_BLOCK", 1 << 30)
    monkeypatch.setattr(aggregate.columns, "_LONG_ROW", 1 << 30)
    whole = rule.decide(rows)
    np.testing.assert_allclose(found.values, whole.values, rtol=1e-6, atol=1e-7)
    assert found.excluded.tolist() == whole.excluded.tolist()


def test_products_give_the_distances_that_differences_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(5).standard_normal((20, 30)).astype(np.float32)
    rows += 1000  # in common, so that plain inner products would lose seven digits
    rows[4] = 1e38
    exact = distances.squared_distances(rows)
    monkeypatch.setattr(distances, "_EXACT_DIFFERENCES", 0)
    np.testing.assert_allclose(distances.squared_distances(rows), exact, rtol=1e-9)


def test_ties_are_settled_the_same_way_every_time() -> None:
    square = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]] * 2)
    assert krum(0.25).decide(square).excluded.tolist() == [0] + [2] * 7
    assert mda(0.125).decide(square).excluded.tolist() == [0] * 7 + [2]
    assert meamed(0.34)(np.array([[0.0], [2], [1]])).tolist() == [0.5]
    assert meamed(0.34)(np.array([[2.0], [1], [0]])).tolist() == [0.5]
    for name in NEW:
        rule = make(name, 0.25)
        np.testing.assert_array_equal(rule(square), rule(square.copy()))
        np.testing.assert_allclose(rule(np.ones((12, 3))), 1.0, rtol=1e-15)


@pytest.mark.slow
@given(cloud=clouds(spare=1))
@settings(max_examples=60, deadline=None)
def test_the_tightest_rows_are_found_among_ties_too(cloud: tuple[Floats, int]) -> None:
    rows, b = np.round(cloud[0] * 2), cloud[1]
    np.testing.assert_allclose(mda(share(b, len(rows)))(rows), plain_mda(rows, b), atol=1e-6)


def test_the_tightest_rows_of_a_hundred_are_affordable() -> None:
    rows = np.random.default_rng(6).standard_normal((100, 50))
    rows[::5] += 0.5
    outcome = mda(0.1).decide(rows)
    kept = np.flatnonzero(outcome.excluded == 0)
    assert len(kept) == 90
    spread = distances.squared_distances(rows)
    assert spread[np.ix_(kept, kept)].max() <= spread[:90, :90].max()


@given(cloud=clouds())
@settings(max_examples=40, deadline=None)
def test_mixing_averages_the_nearest_rows(cloud: tuple[Floats, int]) -> None:
    rows, b = cloud
    rule = nnm(trimmed_mean(share(b, len(rows))))
    mixed = plain_nnm(rows, b).astype(rows.dtype)
    np.testing.assert_allclose(rule(rows), trimmed_mean(share(b, len(rows)))(mixed), rtol=1e-5, atol=1e-6)


@given(cloud=clouds(dtype=np.float64), data=st.data())
@settings(max_examples=40, deadline=None)
def test_mixing_does_not_depend_on_the_order_of_equally_near_rows(cloud: tuple[Floats, int], data: Any) -> None:
    rows, b = np.round(cloud[0]), cloud[1]  # on a grid, where rows are alike and distances equal
    order = list(data.draw(st.permutations(range(len(rows)))))
    mixed: list[Floats] = []

    def spy(matrix: Floats, b: int, round: int) -> aggregate.Outcome:
        mixed.append(matrix)
        return mean().combine(matrix, b, round)

    rule = nnm(Rule("spy", share(b, len(rows)), spy))
    rule(rows)
    rule(rows[order])
    np.testing.assert_allclose(mixed[1], mixed[0][order], rtol=1e-12, atol=1e-12)
    # Nothing but what is nearest is mixed in: no mixture is farther away than its farthest member.
    for x, y in zip(rows, mixed[0], strict=True):
        assert distance(x, y) <= sorted(distance(x, other) for other in rows)[len(rows) - b - 1] + 1e-9


def test_buckets_are_means_of_every_row_once_and_new_in_every_round() -> None:
    rows = np.random.default_rng(7).standard_normal((11, 4)).astype(np.float32)
    seen: list[Floats] = []

    def spy(matrix: Floats, b: int, round: int) -> aggregate.Outcome:
        seen.append(matrix)
        return mean().combine(matrix, b, round)

    rule = bucketing(Rule("spy", 0.0, spy), 3, seed=5)
    for round in (0, 0, 1):
        rule(rows, round=round)
    assert seen[0].shape == (4, 4) and seen[0].dtype == np.float32
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    for means in seen:
        np.testing.assert_allclose(means[:3].sum(axis=0) * 3 + means[3] * 2, rows.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_a_bucket_shares_its_exclusions_and_steps_combine() -> None:
    rows = np.random.default_rng(8).standard_normal((12, 3))
    rows[4] = 1e6
    excluded = bucketing(krum(0.1), 2).decide(rows).excluded
    assert sorted(excluded.tolist()) == [0, 0] + [3] * 10 and excluded[4] == 3
    both = nnm(bucketing(trimmed_mean(0.1), 2, seed=1))
    assert both.name == "trimmed_mean after bucketing after nnm"
    assert np.abs(both(rows)).max() < 5


def test_too_few_rows_for_the_rule_or_its_buckets_are_an_error() -> None:
    with pytest.raises(AggregationError, match="krum has 8 usable rows of 12 invited clients, and needs at least 9"):
        krum(0.25)(np.zeros((8, 2)), invited=12)
    with pytest.raises(AggregationError, match="needs at least 13"):
        bucketing(trimmed_mean(0.25), 2)(np.zeros((12, 2)))
    with pytest.raises(AggregationError, match="too many pairs"):
        multi_krum(0.0)(np.zeros((PAIRWISE_ROWS + 1, 1), np.float32))
    with pytest.raises(ConfigError, match="at most 20"):
        mda(0.25)(np.zeros((100, 2)))


def test_impossible_settings_of_a_rule_are_refused() -> None:
    for bad in (
        lambda: geometric_median(iterations=0),
        lambda: geometric_median(iterations=3, nu=0.0),
        lambda: centered_clipping(iterations=0),
        lambda: centered_clipping(radius=-1.0),
        lambda: bucketing(mean(), 0),
        lambda: make("krum", 0.25, before="nmn"),
    ):
        with pytest.raises(ConfigError):
            bad()
    with pytest.raises(AggregationError, match="start has the shape"):
        centered_clipping(start=[1.0, 2.0])(np.zeros((3, 3)))


def test_centred_clipping_walks_no_farther_than_its_radius_a_step() -> None:
    rows = np.full((9, 4), 1e6, np.float32)
    for steps in (1, 2, 5):
        found = centered_clipping(radius=2.0, iterations=steps, start=0.0)(rows)
        assert np.sqrt((found**2).sum()) == pytest.approx(2.0 * steps)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        Config().with_overrides(overrides)
    return str(error.value)


def test_a_config_whose_rule_cannot_work_is_refused_with_the_remedy() -> None:
    few = ("federation.clients=8", "aggregation.beta=0.4")
    message = refused("aggregation.rule=krum", *few)
    assert "aggregation.rule" in message and "9 reports" in message and "lower aggregation.beta" in message
    assert 'aggregation.before = "none"' in refused("aggregation.before=bucketing")
    message = refused("aggregation.rule=mda", "federation.clients=100")
    assert "aggregation.rule" in message and str(MDA_BYZANTINE) in message
    for override in ("aggregation.rule=geometric_median", "aggregation.before=nnm"):
        assert "every pair" in refused(override, "federation.clients=20000")
    Config().with_overrides(
        ["federation.clients=20000", "aggregation.rule=meamed", "aggregation.beta=0.2", "aggregation.before=bucketing"]
    )
    Config().with_overrides(["aggregation.rule=mean", "aggregation.before=bucketing"])


def test_a_rule_needs_a_majority_or_more_and_twice_as_many_in_buckets_of_two() -> None:
    assert list(PRE_AGGREGATIONS) == ["none", "nnm", "bucketing"]
    for name in aggregate.RULES:
        needed = {"krum": 9, "multi_krum": 9, "fit_reference": 8}.get(name, 7)  # the reference is no vote
        assert make(name, 0.25).required(3) == needed
        if aggregate.RULES.entry(name).traits["history"]:
            continue  # such a rule needs the clients' own rows
        assert make(name, 0.25, before="bucketing").required(3) == 2 * needed - 1


def test_the_geometric_median_of_a_nearly_flat_cloud_is_found() -> None:
    """Plain steps crawl here: they start at a row that is nearly the best place."""
    rows = np.array([[-1.495, -0.0967], [1.2658, -0.0102], [-0.9196, 0.0261], [0.4398, 0.0583], [-0.4778, 0.0133],
                     [0.1876, 0.0146]])  # fmt: skip
    found = aggregate.geometric_median(0.0)(rows)
    pulls = (rows - found) / np.linalg.norm(rows - found, axis=1, keepdims=True)
    assert np.linalg.norm(pulls.sum(axis=0)) < 1e-6  # the unit vectors toward the rows balance


def test_mixing_guards_the_plain_mean_against_the_byzantine_share_beta() -> None:
    honest, byzantine = np.zeros((9, 2)), np.full((3, 2), 1e6)
    rows = np.concatenate([honest, byzantine])
    plain = aggregate.make("mean", 0.25)(rows)
    mixed = aggregate.make("mean", 0.25, before="nnm")(rows)
    np.testing.assert_allclose(plain, 250_000.0)
    # An honest row mixes the nine honest; a Byzantine client's row its three and six of the honest.
    np.testing.assert_allclose(mixed, 3 * (3e6 / 9) / 12)
