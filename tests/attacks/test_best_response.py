"""The best response is as strong as the other attacks, by what the optimizer makes of a decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attackers import finished, knowledge, made
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic import Blobs, config, one_thread  # noqa: F401

from cyber0 import Simulation, aggregate, attacks, optimizers
from cyber0.attacks import Attack
from cyber0.errors import ConfigError
from cyber0.federation.rehearsal import rehearse

ONE_RULE_EACH = {
    "mean": 0.0, "median": 0.25, "trimmed_mean": 0.25, "krum": 0.25, "multi_krum": 0.25, "geometric_median": 0.25,
    "centered_clipping": 0.25, "mda": 0.25, "reputation": 0.25,
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(ONE_RULE_EACH)), st.sampled_from(["sgd", "zscore", "rank"]))
def test_best_response_is_at_least_as_strong_as_every_other_attack_that_stays_in_reach(
    seed: int, name: str, optimizer: str
) -> None:
    honest = np.random.default_rng(seed).normal(0.3, 1, size=(9, 6))
    rule, taken = aggregate.make(name, ONE_RULE_EACH[name]), optimizers.make(optimizer, {})

    def step(decided: np.ndarray) -> np.ndarray:
        return taken.scaled(taken.start(), decided)[0]

    known = replace(made(honest, 3, rule=rule), step=None if optimizer == "sgd" else step)

    def gain(attack: Attack) -> float:
        return float(step(rule(np.concatenate([honest, attack(known)]))) @ honest.mean(axis=0))

    best = gain(attacks.best_response())
    for other in ("full_knowledge", "always_small", "ipm", "alie", "mimic", "min_max", "min_sum", "fang_krum"):
        assert best <= gain(attacks.make(other)) + 1e-9, other


def test_best_response_turns_a_decision_that_the_optimizer_normalises_instead_of_shrinking_it() -> None:
    honest = np.random.default_rng(4).normal([1.0, 1.0, -2.0, 0.3], 1.0, size=(9, 4))
    rule, zscore = aggregate.make("trimmed_mean", 0.25), optimizers.make("zscore", {})

    def step(decided: np.ndarray) -> np.ndarray:
        return zscore.scaled((), decided)[0]

    known = made(honest, 3, rule=rule)
    shrinks, turns = (attacks.best_response()(k) for k in (known, replace(known, step=step)))
    after = [step(rule(np.concatenate([honest, rows]))) @ honest.mean(axis=0) for rows in (shrinks, turns)]
    assert after[1] < after[0] - 1e-3


@pytest.mark.parametrize("name", ["sgd", "momentum", "zscore", "adaptive"])
def test_attackers_know_what_the_optimizer_makes_of_a_decision(name: str) -> None:
    federation = Simulation(config(f"method.optimizer={name}", "method.k=4"), task=Blobs())
    seen: list[attacks.Knowledge] = []
    attack = federation._attack

    def noted(known: attacks.Knowledge) -> attacks.Matrix:
        seen.append(known)
        return attack(known)

    federation._attack = noted
    federation.run_round()
    federation.run_round()
    updates, decided = federation.client.updates, np.array([1.0, 2.0, -4.0, 0.5])
    assert seen[1].step is not None
    if name in ("sgd", "momentum"):
        assert seen[1].step(decided).tolist() == decided.tolist()
    else:
        assert seen[1].step(decided).tolist() != decided.tolist()
    before = updates.optimizer.taken(updates.optimizer.start(), decided)
    assert seen[0].step is not None and seen[0].step(decided).tolist() == before.tolist()


def test_a_rehearsal_knows_what_the_optimizer_makes_of_a_decision() -> None:
    settings = config("method.optimizer=zscore", "method.k=4", "aggregation.rule=reputation", "rounds=8",
                      "federation.byzantine=2", "federation.attack=best_response")  # fmt: skip
    federation = Simulation(settings, task=Blobs())
    seen: list[attacks.Knowledge] = []
    for _ in range(6):
        federation.run_round()
    rehearsal = federation.federator.decider.rehearsal
    assert rehearsal is not None

    def noted(known: attacks.Knowledge) -> attacks.Matrix:
        seen.append(known)
        return attacks.mimic()(known)

    rehearse(rehearsal, noted, federation.byzantine, 0, lambda rows: rows.astype(np.float32))
    assert seen and all(known.step is not None for known in seen)
    assert abs(float(seen[0].step(np.array([1.0, 2.0, -4.0, 0.5])).sum())) < 1e-12  # of z-scores


def test_best_response_finds_how_far_a_rule_on_whole_rows_follows() -> None:
    """A rule that takes the row nearest to the others: going too far loses everything, so a step has to be found."""
    honest = np.random.default_rng(3).normal(0.4, 1, size=(9, 12))

    def rule(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return aggregate.krum(3 / len(rows))(rows)

    known = made(honest, 3, rule=rule)
    mean = honest.mean(axis=0)
    sent = attacks.best_response()(known)
    decided = float(rule(np.concatenate([honest, sent])) @ mean)
    assert decided < float(rule(honest) @ mean)
    assert decided <= float(rule(np.concatenate([honest, attacks.fang_krum()(known)])) @ mean) + 1e-9


def test_best_response_sends_the_first_of_the_rows_that_do_the_same_harm() -> None:
    honest = np.random.default_rng(4).normal(1, 1, size=(5, 3))

    def deaf(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return honest[0]

    sent = attacks.best_response()(made(honest, 2, rule=deaf))
    assert sent.tolist() == [honest.min(axis=0).tolist()] * 2  # every column's smallest value is tried first


def test_best_response_survives_a_rule_that_refuses_and_asks_for_one_that_is_absent() -> None:
    def refuse(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        raise aggregate.AggregationError("too few rows")

    honest = np.arange(6.0).reshape(3, 2)
    assert attacks.best_response()(made(honest, 2, rule=refuse)).tolist() == [[2.0, 3.0]] * 2
    with pytest.raises(ConfigError, match="decide"):
        attacks.best_response()(knowledge(honest, 1, 0))


def test_best_response_refines_the_distance_between_powers_of_two() -> None:
    """The decision falls towards one row at 0.3 of the reach along -mean and rises behind it."""
    honest = np.array([[1.0, 2.0], [1.2, 1.8], [0.8, 2.2]])
    mean = honest.mean(axis=0)
    target = mean - 0.3 * 2.0 * np.linalg.norm(honest - mean, axis=1).max() * mean / np.linalg.norm(mean)

    def decide(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return mean * (1.0 + np.linalg.norm(rows[-1] - target))

    sent = attacks.best_response(2.0)(replace(knowledge(honest, 1, 1), decide=decide))
    assert np.linalg.norm(sent[0] - target) < 0.02 * np.linalg.norm(target - mean)


def test_best_response_passes_over_rows_that_would_give_no_finite_decision() -> None:
    honest = np.array([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])

    def decide(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.full(2, np.nan) if rows[-1, 0] < 1.0 else rows.mean(axis=0)

    sent = attacks.best_response()(replace(knowledge(honest, 1, 1), decide=decide))
    assert np.isfinite(decide(np.concatenate([honest, sent]))).all()
    assert sent[0, 1] > 0  # the other column is pushed as far as it goes


@pytest.mark.slow
def test_the_best_response_hurts_a_simulation_as_much_as_full_knowledge() -> None:
    losses = [
        finished("federation.byzantine=3", f"federation.attack={name}").evaluate().loss
        for name in ("none", "full_knowledge", "best_response")
    ]
    assert losses[2] >= losses[1] - 1e-3 > losses[0]


def test_an_attack_of_ones_own_may_use_what_the_optimizer_makes_of_a_decision(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n\ndef turn():\n    return lambda known: 0 * known.own - "
        "known.step(known.decide(np.concatenate([known.honest, known.own])))\n"
    )
    settings = config(f"federation.attack={file}:turn", "federation.byzantine=2", "method.optimizer=rank", "method.k=4")
    federation = Simulation(settings, task=Blobs())
    federation.run_round()
    assert federation.round == 1
