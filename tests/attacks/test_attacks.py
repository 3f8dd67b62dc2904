"""Attacks: what Byzantine clients send, against a plain definition; and the tables of names agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attackers import finished, knowledge, made
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic import Blobs, config, one_thread  # noqa: F401

from cyber0 import Simulation, aggregate, attacks
from cyber0.attacks import Knowledge, full_knowledge, none
from cyber0.config import choices
from cyber0.config.registry import ATTACKS, PARTITIONS, RULES
from cyber0.config.schema import FederationConfig
from cyber0.errors import ConfigError
from cyber0.protocol.federator import Receipt
from cyber0.tasks import partition

# Few distinct values, so that ties and a mean of exactly 0 are common.
values = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
columns = st.integers(1, 4)


@st.composite
def honest_matrices(draw: st.DrawFn) -> NDArray[np.float64]:
    rows, width = draw(st.integers(1, 9)), draw(columns)
    return np.array(draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=rows, max_size=rows)))


def plain(column: list[float], tolerated: int, reading: str) -> float:
    """Algorithm 3 for one direction."""
    place = 1 if reading == "accepted" else min(max(tolerated, 1), len(column))
    ascending = sorted(column)
    return ascending[place - 1] if sum(column) / len(column) >= 0 else ascending[len(column) - place]


@given(honest_matrices(), st.integers(1, 5), st.integers(0, 6), st.sampled_from(attacks.READINGS))
def test_full_knowledge_is_algorithm_3(
    honest: NDArray[np.float64], byzantine: int, tolerated: int, reading: str
) -> None:
    before = honest.copy()
    sent = full_knowledge(reading)(knowledge(honest, byzantine, tolerated))
    expected = [plain(column, tolerated, reading) for column in honest.T.tolist()]
    assert sent.shape == (byzantine, honest.shape[1])
    assert sent.tolist() == [expected] * byzantine
    assert np.array_equal(honest, before)


@given(honest_matrices(), st.integers(1, 4), st.sampled_from(attacks.READINGS))
def test_what_byzantine_clients_send_lies_among_the_honest_values(
    honest: NDArray[np.float64], b: int, reading: str
) -> None:
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
    """With b rows at the smallest honest value, b of the b + 1 copies go below, b honest values above: one stays."""
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


def test_byzantine_clients_who_were_invited_alone_have_nothing_to_copy_and_do_not_crash() -> None:
    for reading in attacks.READINGS:
        sent = full_knowledge(reading)(knowledge(np.zeros((0, 3)), 2, 0))
        assert sent.shape == (2, 3) and np.isfinite(sent).all()


def test_none_sends_what_an_honest_client_would() -> None:
    own = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert none()(Knowledge(np.zeros((3, 2)), own, 2, 5, 1, 0)) is own
    assert ATTACKS.entry("none").traits["needs_own"]


def test_an_unknown_attack_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'full_knowlege'.*did you mean 'full_knowledge'"):
        attacks.make("full_knowlege")
    with pytest.raises(ConfigError, match=r"federation.attack = 'zzz' is not a choice.*full_knowledge"):
        attacks.make("zzz")
    with pytest.raises(ConfigError, match="reading = 'strict' must be one of accepted, literal"):
        attacks.make("full_knowledge", {"reading": "strict"})


def test_every_public_factory_is_registered_and_says_what_it_does_in_one_line() -> None:
    assert set(attacks.READINGS) == set(choices.ATTACK_READINGS)
    for registry, module in ((ATTACKS, attacks), (RULES, aggregate), (PARTITIONS, partition)):
        for name, text in registry.items():
            assert getattr(module, name) is registry.entry(name).factory
            assert text.endswith((".", ":")) and len(text) <= 116, (name, text)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_can_be_made_by_its_name(name: str) -> None:
    assert aggregate.make(name, 0.25).name == name


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_can_be_made_by_its_name(name: str) -> None:
    parts = partition.make(name)(np.arange(12) % 3, 4, 0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(12))


@st.composite
def rounds(draw: st.DrawFn, most_rows: int = 8) -> Knowledge:
    """A round with 1 to 8 honest clients, 1 to 4 Byzantine clients, and few or many numbers."""
    rows, width, byzantine = (
        draw(st.integers(1, most_rows)),
        draw(st.sampled_from([1, 2, 5, 40])),
        draw(st.integers(1, 4)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    offset, spread = draw(st.sampled_from([0.0, -3.0, 50.0])), draw(st.sampled_from([0.1, 1.0, 20.0]))
    return made(offset + spread * rng.normal(size=(rows, width)), byzantine, round=draw(st.integers(0, 5)))


def direction(known: Knowledge) -> NDArray[np.float64]:
    return np.where(known.honest.mean(axis=0) >= 0, 1.0, -1.0)


@given(honest_matrices(), st.integers(1, 5), st.integers(0, 6), st.sampled_from(attacks.READINGS))
def test_always_small_and_always_large_ignore_the_mean(
    honest: NDArray[np.float64], byzantine: int, tolerated: int, reading: str
) -> None:
    place = 1 if reading == "accepted" else min(max(tolerated, 1), len(honest))
    ascending = [sorted(column) for column in honest.T.tolist()]
    known = knowledge(honest, byzantine, tolerated)
    assert attacks.always_small(reading)(known).tolist() == [[c[place - 1] for c in ascending]] * byzantine
    assert attacks.always_large(reading)(known).tolist() == [[c[-place] for c in ascending]] * byzantine


@pytest.mark.parametrize("reading", attacks.READINGS)
def test_random_choice_tosses_a_fair_coin_for_each_direction_and_round(reading: str) -> None:
    honest = np.random.default_rng(0).normal(size=(9, 2000))
    sent = [attacks.random_choice(reading)(made(honest, 3, round)) for round in (0, 0, 1)]
    small = attacks.always_small(reading)(made(honest, 3))[0]
    large = attacks.always_large(reading)(made(honest, 3))[0]
    is_small = sent[0][0] == small
    assert (is_small | (sent[0][0] == large)).all()
    assert 0.45 < is_small.mean() < 0.55
    assert np.array_equal(sent[0], sent[1]) and (sent[0] != sent[2]).any()
    assert (sent[0] == sent[0][0]).all()  # the Byzantine clients act on the same coin


def test_label_flip_and_none_and_sign_flip_send_their_own_numbers() -> None:
    known = made(np.ones((5, 3)), 2)
    assert attacks.label_flip()(known) is known.own
    assert attacks.sign_flip()(known).tolist() == (-4 * known.own).tolist()
    assert [name for name in ATTACKS if ATTACKS.entry(name).traits["needs_own"]] == [
        "none", "label_flip", "sign_flip", "sleeper", "xfed",
    ]  # fmt: skip


@given(rounds())
def test_ipm_reverses_the_plain_mean(known: Knowledge) -> None:
    mean = known.honest.mean(axis=0)
    np.testing.assert_allclose(attacks.ipm(0.5)(known), np.tile(-0.5 * mean, (known.byzantine, 1)))
    everybody = np.concatenate([known.honest, attacks.ipm()(known)]).mean(axis=0)
    np.testing.assert_allclose(everybody, -mean * len(known.honest) / known.invited, rtol=1e-9, atol=1e-9)


def test_alie_has_the_strength_of_its_paper() -> None:
    # The paper's example: of 50 workers 24 are corrupted, s = 2, and Phi(z) < 24 / 26.
    assert attacks.alie_strength(50, 24) == pytest.approx(1.4260768722848, abs=1e-9)
    assert attacks.alie_strength(12, 3) == pytest.approx(0.1397102988991, abs=1e-9)
    assert attacks.alie_strength(12, 0) == 0.0
    assert 0 < attacks.alie_strength(6, 4) < 1  # a majority of Byzantine clients: finite all the same


@given(rounds())
def test_alie_shifts_the_mean_by_z_deviations_against_itself(known: Knowledge) -> None:
    mean, z = known.honest.mean(axis=0), attacks.alie_strength(known.invited, known.byzantine)
    expected = [m - z * s * d for m, s, d in zip(mean, direction(known), known.honest.std(axis=0), strict=True)]
    np.testing.assert_allclose(attacks.alie()(known), np.tile(expected, (known.byzantine, 1)), rtol=1e-9, atol=1e-12)


@given(rounds())
def test_mimic_copies_the_client_furthest_along_the_top_principal_direction(known: Knowledge) -> None:
    sent = attacks.mimic()(known)
    assert (sent == sent[0]).all() and (known.honest == sent[0]).all(axis=1).any()
    centred = known.honest - known.honest.mean(axis=0)
    top = np.linalg.svd(centred)[2][0]
    reach = np.abs(centred @ top)
    assert abs((sent[0] - known.honest.mean(axis=0)) @ top) >= reach.max() * (1 - 1e-6) - 1e-9


def test_gaussian_is_noise_of_mean_0() -> None:
    known = made(np.full((6, 4000), 30.0), 3)
    sent = attacks.gaussian(10.0)(known)
    assert abs(sent.mean()) < 0.5 and abs(sent.std() - 10) < 0.5
    assert abs(np.corrcoef(sent)[0, 1]) < 0.1
    assert np.array_equal(sent, attacks.gaussian(10.0)(known))
    assert (sent != attacks.gaussian(10.0)(made(known.honest, 3, round=1))).any()
    assert abs(attacks.gaussian()(known).std() - 200) < 10


def test_a_strength_is_what_the_factory_takes_and_0_its_default() -> None:
    known = made(np.random.default_rng(2).normal(0.5, 1, size=(9, 5)), 3, rule=aggregate.mean())
    having = [name for name in ATTACKS if ATTACKS.entry(name).traits["strength"]]
    assert having == ["sign_flip", "ipm", "alie", "gaussian", "fang_trimmed_mean", "xfed", "best_response"]
    for name in having:
        by_alias = FederationConfig(attack=name, attack_strength=3.0).attack_arguments
        assert list(by_alias.values()) == [3.0]
        sent, default = attacks.make(name, by_alias)(known), attacks.make(name)(known)
        np.testing.assert_array_equal(sent, getattr(attacks, name)(3.0)(known))
        np.testing.assert_array_equal(default, getattr(attacks, name)()(known))
        assert (sent != default).any()
        assert FederationConfig(attack=name, attack_strength=0.0).attack_arguments == {}
    with pytest.raises(ConfigError, match=r"'mimic' takes no strength.* = 2.0; .*sign_flip"):
        FederationConfig(attack="mimic", attack_strength=2.0)


@pytest.mark.slow
def test_the_strength_of_a_config_reaches_the_byzantine_clients() -> None:
    weak, strong = (
        finished("federation.attack=ipm", "aggregation.rule=mean", "rounds=5", f"federation.attack_strength={strength}")
        for strength in (1e-6, 20.0)
    )
    assert strong.evaluate().loss > weak.evaluate().loss + 0.1


def test_nonfinite_sends_every_kind_of_broken_number() -> None:
    sent = np.concatenate([attacks.nonfinite()(made(np.ones((3, 2)), 1, round)) for round in range(4)])
    assert np.isnan(sent[0]).all()
    assert sent[1:, 0].tolist() == [np.inf, -np.inf, 1e38]
    assert np.isnan(attacks.nonfinite()(made(np.ones((3, 2)), 5))[[0, 4]]).all()


def bisected(inside: Any) -> float:
    """The largest gamma at which a condition holds, as the paper finds it."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) else (low, middle)
    return low


@settings(max_examples=40, deadline=None)
@given(rounds(), st.sampled_from(["std", "unit", "sign", "signed_std"]))
def test_min_max_and_min_sum_go_as_far_as_bisection_does(known: Knowledge, perturbation: str) -> None:
    honest, mean, sign = known.honest, known.honest.mean(axis=0), direction(known)
    deviation = honest.std(axis=0)
    p = {
        "std": -deviation, "unit": -mean / np.linalg.norm(mean), "sign": -sign, "signed_std": -sign * deviation,
    }[perturbation]  # fmt: skip
    squares = ((honest[:, None] - honest[None]) ** 2).sum(axis=2)

    def within_max(gamma: float) -> bool:
        return bool((((mean + gamma * p - honest) ** 2).sum(axis=1)).max() <= squares.max())

    def within_sum(gamma: float) -> bool:
        return bool(((mean + gamma * p - honest) ** 2).sum() <= squares.sum(axis=1).max())

    for attack, inside in ((attacks.min_max, within_max), (attacks.min_sum, within_sum)):
        sent = attack(perturbation)(known)
        gamma = bisected(inside) if len(honest) > 1 else 0.0
        np.testing.assert_allclose(sent, np.tile(mean + gamma * p, (known.byzantine, 1)), rtol=1e-5, atol=1e-5)


@given(honest_matrices(), st.integers(1, 4))
def test_fang_trimmed_mean_sends_values_just_beyond_the_honest_range(
    honest: NDArray[np.float64], byzantine: int
) -> None:
    sent = attacks.fang_trimmed_mean()(made(honest, byzantine))
    for column, forged in zip(honest.T, sent.T, strict=True):
        low, high = column.min(), column.max()
        if column.mean() >= 0:
            assert (forged <= low).all() and (forged >= (low / 2 if low > 0 else 2 * low)).all()
        else:
            assert (forged >= high).all() and (forged <= (high / 2 if high < 0 else 2 * high)).all()


def test_fang_trimmed_mean_can_take_its_sign_from_the_truth() -> None:
    known = made(np.array([[1.0, 1.0], [3.0, 3.0]]), 2)
    attack = attacks.fang_trimmed_mean(sign_from="truth")
    sent = attack(replace(known, truth=np.array([1.0, -1.0])))
    assert (sent[:, 0] <= 1).all() and (sent[:, 1] >= 3).all()
    with pytest.raises(ConfigError, match="sign_from"):
        attack(known)
    with pytest.raises(ConfigError, match="'guess' must be one of honest, truth"):
        attacks.fang_trimmed_mean(sign_from="guess")


def krum(rows: NDArray[np.float64], f: int) -> int:
    """The row that our rule picks."""
    decided = aggregate.krum(f / len(rows))(rows)
    return int(np.flatnonzero((rows == decided).all(axis=1))[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.sampled_from([3, 30]))
def test_fang_krum_makes_krum_pick_a_byzantine_client_and_twice_as_far_would_not(
    seed: int, byzantine: int, width: int
) -> None:
    honest = np.random.default_rng(seed).normal(0.5, 1, size=(2 * byzantine + 3, width))
    sent = attacks.fang_krum()(made(honest, byzantine))
    size = np.abs(sent[0, 0])
    np.testing.assert_allclose(sent, np.tile(-size * direction(made(honest, byzantine)), (byzantine, 1)))
    if size < 1e-5:
        return
    assert krum(np.concatenate([honest, sent]), byzantine) >= len(honest)
    spread = min(
        sum(sorted(((row - other) ** 2).sum() for j, other in enumerate(honest) if j != i)[: len(honest) - 2])
        for i, row in enumerate(honest)
    )
    bound = np.sqrt(spread / ((len(honest) - byzantine - 1) * width))
    bound += max(np.linalg.norm(row) for row in honest) / np.sqrt(width)
    assert size <= bound * (1 + 1e-9)
    if size < bound * 0.99:
        assert krum(np.concatenate([honest, 2 * sent]), byzantine) < len(honest)


def test_mirror_images_cancel_their_victims() -> None:
    honest = np.random.default_rng(5).normal(size=(9, 16))
    known = Knowledge(honest, np.empty((0, 16)), byzantine=3, invited=12, tolerated=3, round=4)
    sent = attacks.mirror()(known)
    assert np.array_equal(sent, -honest[[0, 3, 6]])
    assert np.allclose(honest.sum(axis=0) + sent.sum(axis=0), np.delete(honest, [0, 3, 6], axis=0).sum(axis=0))


@pytest.mark.parametrize("cosine", [0.3, 0.7, 1.0])
def test_decorrelated_rows_are_as_long_as_honest_ones_and_as_alike_as_asked(cosine: float) -> None:
    honest = np.random.default_rng(6).normal(size=(9, 16)) + 0.5
    known = Knowledge(honest, np.empty((0, 16)), byzantine=3, invited=12, tolerated=3, round=4)
    sent = attacks.decorrelated_ipm(cosine)(known)
    lengths = np.linalg.norm(sent, axis=1)
    assert np.allclose(lengths, np.median(np.linalg.norm(honest, axis=1)))
    alike = (sent / lengths[:, None]) @ (sent / lengths[:, None]).T
    assert np.allclose(alike[~np.eye(3, dtype=bool)], cosine)
    assert (sent @ honest.mean(axis=0) < 0).all()
    again = attacks.decorrelated_ipm(cosine)(known)
    assert np.array_equal(sent, again)


def test_decorrelated_rows_need_no_more_columns_than_there_are_and_a_possible_cosine() -> None:
    known = Knowledge(np.ones((9, 1)), np.empty((0, 1)), byzantine=3, invited=12, tolerated=3, round=0)
    assert np.isfinite(attacks.decorrelated_ipm()(known)).all()
    with pytest.raises(ConfigError, match=r"cosine = 1\.5 is impossible"):
        attacks.decorrelated_ipm(1.5)


def test_a_sleeper_is_honest_until_it_attacks() -> None:
    honest = np.random.default_rng(5).normal(size=(9, 6))
    for number in (0, 4):
        known = made(honest, 3, round=number)
        assert attacks.sleeper(after=5)(known) is known.own
    known = made(honest, 3, round=5)
    assert np.array_equal(attacks.sleeper(after=5, attack="ipm")(known), attacks.ipm()(known))
    with pytest.raises(ConfigError, match="after = -1"):
        attacks.sleeper(after=-1)
    with pytest.raises(ConfigError, match=r"label_flip.*name another"):
        attacks.sleeper(attack="label_flip")


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("honest", [0, 1, 2, 9])
@pytest.mark.parametrize("byzantine", [1, 4])
def test_every_attack_copes_with_any_number_of_honest_clients_and_byzantine_clients(
    name: str, honest: int, byzantine: int
) -> None:
    rng = np.random.default_rng(0)
    for width in (1, 64, 3000):
        known = made(rng.normal(size=(honest, width)), byzantine)
        before = known.honest.copy()
        sent = attacks.make(name)(known)
        assert sent.shape == (byzantine, width)
        assert name == "nonfinite" or np.isfinite(sent).all()
        assert np.array_equal(known.honest, before)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in ("none", "label_flip", "sign_flip")])
def test_rows_of_honest_clients_that_are_not_finite_are_not_looked_at(name: str) -> None:
    honest = np.random.default_rng(0).normal(size=(6, 5))
    broken = np.concatenate([honest, np.full((1, 5), np.nan)])
    one, other = (attacks.make(name)(made(rows, 2, rule=aggregate.median())) for rows in (honest, broken))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("factory", [attacks.fang_trimmed_mean, attacks.fang_krum])
def test_an_unknown_source_of_the_sign_is_refused(factory: Any) -> None:
    with pytest.raises(ConfigError, match="sign_from = 'nobody' must be one of honest, truth"):
        factory(sign_from="nobody")


@pytest.mark.parametrize("seed", range(5))
def test_fang_krum_halves_from_the_bound_of_its_paper(seed: int) -> None:
    honest, byzantine = np.random.default_rng(seed).normal(size=(9, 4)) + 1.0, 3
    sent = attacks.fang_krum()(knowledge(honest, byzantine, 3))
    squares = np.sort(((honest[:, None] - honest[None]) ** 2).sum(axis=2), axis=1)[:, 1:]
    near = squares[:, : 12 - byzantine - 2].sum(axis=1).min()
    bound = np.sqrt(near / ((12 - 2 * byzantine - 1) * 4)) + np.sqrt((honest**2).sum(axis=1).max() / 4)
    halvings = np.log2(bound / np.abs(sent[0]))
    assert np.abs(halvings - np.round(halvings)).max() < 1e-9


def test_attacks_compute_in_float64_whatever_the_reports_are_stored_in() -> None:
    stored = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    for name in ("alie", "ipm", "min_max", "mimic"):
        attack = attacks.make(name)
        narrow, wide = attack(knowledge(stored, 2, 2)), attack(knowledge(stored.astype(np.float64), 2, 2))  # type: ignore[arg-type]
        assert narrow.dtype == np.float64 and np.array_equal(narrow, wide), name


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("rule", ["trimmed_mean", "mean"])
def test_every_attack_runs_in_a_simulation(name: str, rule: str) -> None:
    simulation = finished("rounds=5", f"federation.attack={name}", f"aggregation.rule={rule}")
    assert simulation.round == 5
    if name == "nonfinite":
        assert simulation.federator.rejections[Receipt.NOT_FINITE] > 0
    if name != "nonfinite" or rule == "trimmed_mean":  # 1e38 is a number, and ruins the plain mean
        assert simulation.decided == 5
        assert np.isfinite(simulation.evaluate().loss)


def test_label_flip_lowers_the_accuracy_of_the_plain_mean() -> None:
    settings = ("aggregation.rule=mean", "federation.byzantine=5")
    honest, poisoned = (finished(*settings, f"federation.attack={name}") for name in ("none", "label_flip"))
    assert poisoned.evaluate().loss > honest.evaluate().loss + 0.1
    assert poisoned.evaluate().accuracy < honest.evaluate().accuracy


def test_label_flip_poisons_the_targets_of_the_byzantine_clients_alone() -> None:
    simulation = Simulation(config("federation.attack=label_flip"), task=Blobs())
    clients = np.arange(12)
    plain = Simulation(config("federation.attack=none"), task=Blobs()).client.samples.batch(clients, 3)
    flipped = simulation.client.samples.batch(clients, 3)
    byzantine = torch.from_numpy(np.repeat(simulation.byzantine, plain.counts))
    assert torch.equal(flipped.inputs, plain.inputs)
    assert torch.equal(flipped.targets[byzantine], Blobs.classes - 1 - plain.targets[byzantine])
    assert torch.equal(flipped.targets[~byzantine], plain.targets[~byzantine])


def test_labels_are_not_flipped_where_there_are_none() -> None:
    task = Blobs()
    task.classes = 1
    with pytest.raises(ConfigError, match="1 classes"):
        Simulation(config("federation.attack=label_flip"), task=task)


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_the_literal_reading_takes_b_from_beta_whatever_the_rule(rule: str) -> None:
    from synthetic import Blobs, config

    from cyber0.federation.simulation import Simulation

    federation = Simulation(
        config(f"aggregation.rule={rule}", "aggregation.beta=0.25", "federation.clients=12"), task=Blobs()
    )
    seen: list[int] = []
    attack = federation._attack

    def noted(known: attacks.Knowledge) -> attacks.Matrix:
        seen.append(known.tolerated)
        return attack(known)

    federation._attack = noted
    federation.run_round()
    assert seen == [3]


def test_the_truth_is_computed_for_attacks_against_its_sign_alone() -> None:
    assert attacks.needs_truth("fang_krum", {"sign_from": "truth"})
    assert attacks.needs_truth("fang_trimmed_mean", {"sign_from": "truth", "b": 3.0})
    assert not attacks.needs_truth("fang_krum", {"sign_from": "honest"})
    assert not attacks.needs_truth("fang_krum", {}) and not attacks.needs_truth("ipm", {})
