"""Attacks: what Byzantine clients send, against a plain definition; and the tables of names agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cyber0 import aggregate, attacks, choices
from cyber0.attacks import Knowledge, full_knowledge, none
from cyber0.errors import ConfigError
from cyber0.tasks import partition

# Few distinct values, so that ties and a mean of exactly 0 are common.
values = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
columns = st.integers(1, 4)


@st.composite
def honest_matrices(draw: st.DrawFn) -> NDArray[np.float64]:
    rows, width = draw(st.integers(1, 9)), draw(columns)
    return np.array(draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=rows, max_size=rows)))


def knowledge(honest: NDArray[np.float64], liars: int, tolerated: int) -> Knowledge:
    own = np.zeros((0, honest.shape[1]))
    return Knowledge(honest, own, liars, invited=len(honest) + liars, tolerated=tolerated, round=0)


def plain(column: list[float], tolerated: int, reading: str) -> float:
    """Algorithm 3 for one direction."""
    place = 1 if reading == "accepted" else min(max(tolerated, 1), len(column))
    ascending = sorted(column)
    return ascending[place - 1] if sum(column) / len(column) >= 0 else ascending[len(column) - place]


@given(honest_matrices(), st.integers(1, 5), st.integers(0, 6), st.sampled_from(attacks.READINGS))
def test_full_knowledge_is_algorithm_3(honest: NDArray[np.float64], liars: int, tolerated: int, reading: str) -> None:
    before = honest.copy()
    sent = full_knowledge(reading)(knowledge(honest, liars, tolerated))
    expected = [plain(column, tolerated, reading) for column in honest.T.tolist()]
    assert sent.shape == (liars, honest.shape[1])
    assert sent.tolist() == [expected] * liars
    assert np.array_equal(honest, before)


@given(honest_matrices(), st.integers(1, 4), st.sampled_from(attacks.READINGS))
def test_what_liars_send_lies_among_the_honest_values(honest: NDArray[np.float64], b: int, reading: str) -> None:
    sent = full_knowledge(reading)(knowledge(honest, b, b))
    assert (sent >= honest.min(axis=0)).all() and (sent <= honest.max(axis=0)).all()
    assert all((column == sent[0, j]).any() for j, column in enumerate(honest.T))


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_accepted_pulls_the_trimmed_mean_further_than_literal_and_against_the_honest_mean(b: int, seed: int) -> None:
    honest = np.random.default_rng(seed).normal(0.1, 1, size=(3 * b + 1, 6))
    rule = aggregate.trimmed_mean(b / (4 * b + 1))
    decided = {}
    for reading in attacks.READINGS:
        sent = full_knowledge(reading)(knowledge(honest, b, b))
        decided[reading] = rule(np.concatenate([honest, sent]))
    sign = np.where(honest.mean(axis=0) >= 0, 1.0, -1.0)
    untouched = rule(honest, invited=4 * b + 1) if 3 * b + 1 > 2 * b else honest.mean(axis=0)
    assert (sign * (untouched - decided["accepted"]) >= -1e-12).all()
    assert (sign * (decided["literal"] - decided["accepted"]) >= -1e-12).all()


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_accepted_values_survive_the_trimming(b: int, seed: int) -> None:
    """With b liars at the smallest honest value, b of the b + 1 copies go below, b honest values above: one stays."""
    honest = np.random.default_rng(seed).normal(1, 1, size=(3 * b + 1, 5))
    sent = full_knowledge("accepted")(knowledge(honest, b, b))
    ordered = np.sort(honest, axis=0)
    low = honest.mean(axis=0) >= 0
    # Lower end trimmed: b copies; upper end trimmed: the b largest honest. Left: one copy and the rest.
    left = np.where(low, ordered[: len(ordered) - b].mean(axis=0), ordered[b:].mean(axis=0))
    found = aggregate.trimmed_mean(b / (4 * b + 1))(np.concatenate([honest, sent]))
    np.testing.assert_allclose(found, left, rtol=1e-12)
    # A little further out and the copies are cut off: nothing is gained.
    beyond = sent + np.where(low, -100.0, 100.0)
    outside = aggregate.trimmed_mean(b / (4 * b + 1))(np.concatenate([honest, beyond]))
    np.testing.assert_allclose(outside, left, rtol=1e-12)


def test_liars_who_were_invited_alone_have_nothing_to_copy_and_do_not_crash() -> None:
    for reading in attacks.READINGS:
        sent = full_knowledge(reading)(knowledge(np.zeros((0, 3)), 2, 0))
        assert sent.shape == (2, 3) and np.isfinite(sent).all()


def test_none_sends_what_an_honest_client_would() -> None:
    own = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert none()(Knowledge(np.zeros((3, 2)), own, 2, 5, 1, 0)) is own
    assert "none" in attacks.NEED_OWN


def test_an_unknown_attack_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'full_knowlege'.*did you mean 'full_knowledge'"):
        attacks.make("full_knowlege")
    with pytest.raises(ConfigError, match=r"unknown attack 'zzz'.*full_knowledge"):
        attacks.make("zzz")
    with pytest.raises(ConfigError, match="attack_reading = 'strict' must be one of accepted, literal"):
        attacks.make("full_knowledge", "strict")


def test_every_name_that_can_be_chosen_has_a_factory_and_the_other_way_round() -> None:
    assert list(attacks.ATTACKS) == list(choices.ATTACKS)
    assert set(attacks.READINGS) == set(choices.ATTACK_READINGS)
    assert set(aggregate.RULES) == set(choices.RULES)
    assert set(partition.PARTITIONS) == set(choices.PARTITIONS)
    assert set(attacks.ATTACKS) >= attacks.NEED_OWN


@pytest.mark.parametrize("name", choices.ATTACKS)
def test_every_attack_sends_one_row_a_liar(name: str) -> None:
    honest, own = np.arange(12.0).reshape(4, 3), np.ones((2, 3))
    sent = attacks.make(name)(Knowledge(honest, own, 2, 6, 1, 0))
    assert sent.shape == (2, 3)


@pytest.mark.parametrize("name", choices.RULES)
def test_every_rule_can_be_made_by_its_name(name: str) -> None:
    assert aggregate.make(name, 0.25).name == name


@pytest.mark.parametrize("name", choices.PARTITIONS)
def test_every_partition_can_be_made_by_its_name(name: str) -> None:
    parts = partition.make(name)(np.arange(12) % 3, 4, 0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(12))
