"""Attacks that look back and ahead: best_response against rules with a history, and xfed, which looks at nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyber0 import Simulation, aggregate, attacks
from cyber0.aggregate.reputation import Reputation
from cyber0.attacks import Attack, Knowledge
from cyber0.config import Config
from cyber0.errors import ConfigError
from cyber0.protocol.decider import REHEARSE_EVERY

RANDOM = np.random.default_rng


def made(**changes: Any) -> Knowledge:
    rule = aggregate.make("trimmed_mean", 0.25)
    known = Knowledge(RANDOM(0).normal(size=(6, 8)), RANDOM(1).normal(size=(2, 8)), byzantine=2, invited=8, tolerated=2,
                      round=40, decide=lambda rows: rule.decide(rows).values)  # fmt: skip
    return replace(known, **changes)


def config(attack: str, rounds: int = 60, **changes: Any) -> Config:
    return Config.from_dict({
        "rounds": rounds, "task": {"name": "logistic"}, "method": {"k": 16, "lr": 0.1},
        "federation": {"attack": attack, "partition": "by_label"}, "aggregation": {"rule": "reputation"},
    } | changes)  # fmt: skip


# xfed.


def test_xfed_reverses_the_own_row_at_the_length_of_recent_decisions() -> None:
    past = np.zeros((5, 8))
    past[:, 0] = [1e6, 3, 4, 5, 60]
    known = made(past=past)
    sent = attacks.xfed(scale=2.0, spread=1.0, window=4)(known)
    length = 2 * (4.5 + 1.0)  # the median of 3, 4, 5, 60, and of 1.5, 0.5, 0.5, 55.5
    assert np.linalg.norm(sent, axis=1) == pytest.approx(length)
    assert np.sum(sent * known.own, axis=1) == pytest.approx(-length * np.linalg.norm(known.own, axis=1))


def test_xfed_knows_nothing_of_other_clients() -> None:
    known = made(past=RANDOM(2).normal(size=(3, 8)))
    sent = attacks.xfed()(known)
    other = replace(known, honest=known.honest + 1, own=known.own * [[1.0], [-3.0]], decide=None)
    assert np.array_equal(attacks.xfed()(other)[0], sent[0])


@pytest.mark.parametrize("past", [None, np.zeros((0, 8))])
def test_before_the_first_decision_xfed_sends_its_own_row_reversed(past: Any) -> None:
    known = made(past=past)
    assert attacks.xfed()(known) == pytest.approx(-known.own)
    assert attacks.xfed()(replace(known, own=np.zeros((2, 8)))).tolist() == np.zeros((2, 8)).tolist()


def test_impossible_options_of_xfed_are_refused() -> None:
    with pytest.raises(ConfigError, match="window = 0"):
        attacks.xfed(window=0)


# Plans.


def test_best_response_follows_the_strategy_under_which_the_honest_loss_falls_least() -> None:
    probe, calls = made(), list[int]()
    wanted = attacks.ipm(0.5)(probe)

    def rehearse(attack: Attack) -> float:
        calls.append(1)
        return -1.0 if np.array_equal(attack(probe), wanted) else 0.0

    planning = attacks.best_response()
    known = made(rehearse=rehearse, rehearsed=40)
    assert np.array_equal(planning(known), attacks.ipm(0.5)(known))
    count = len(calls)
    planning(replace(known, round=59))
    assert len(calls) == count  # the plan stays until the next rehearsal
    planning(replace(known, round=60, rehearsed=60))
    assert len(calls) == 2 * count


def test_best_response_behaves_well_for_a_while_if_that_is_best() -> None:
    early, late = made(round=0), made(round=15)
    good, bad = attacks.mimic()(early), attacks.ipm(1.0)(late)

    def rehearse(attack: Attack) -> float:
        rests = np.array_equal(attack(early), good)
        return -float(np.array_equal(attack(late), bad)) * (2.0 if rests else 1.0)

    known, planning = made(rehearse=rehearse, rehearsed=40), attacks.best_response()
    assert np.array_equal(planning(known), good)
    assert np.array_equal(planning(replace(known, round=55)), bad)


def test_without_a_history_best_response_searches_as_before() -> None:
    simulation = Simulation(config("best_response", aggregation={"rule": "trimmed_mean"}))
    for _ in range(REHEARSE_EVERY + 1):
        simulation.run_round()
    assert simulation.federator.decider.rehearsal is None and not simulation.needs_own
    assert Simulation(config("ipm")).federator.decider.rehearsal is None  # only attacks that plan are given any


def gains(attack: str, rounds: int = 120) -> float:
    """Return how much the loss falls in a run."""
    simulation = Simulation(config(attack, rounds))
    before = simulation.evaluate().loss
    for _ in range(rounds):
        simulation.run_round()
    return before - simulation.evaluate().loss


def test_best_response_does_no_less_harm_to_a_rule_with_a_history_than_simple_attacks() -> None:
    planned = gains("best_response")
    others = {attack: gains(attack) for attack in ("ipm", "alie", "min_max", "full_knowledge", "mirror")}
    assert planned <= min(others.values()) + 0.1 * abs(min(others.values())), (planned, others)


def test_rehearsing_changes_nothing_that_the_rule_remembers() -> None:
    simulation = Simulation(config("best_response"))
    for _ in range(REHEARSE_EVERY):
        simulation.run_round()
    known, rehearsal = simulation._rehearsal(), simulation.federator.decider.rehearsal
    assert rehearsal is not None and isinstance(rehearsal.decider.memory, Reputation)
    memory = rehearsal.decider.memory
    before = memory.losses.copy()
    first = known["rehearse"](attacks.ipm(2.0))
    assert known["rehearse"](attacks.ipm(2.0)) == first != known["rehearse"](attacks.mimic())
    assert np.array_equal(memory.losses, before)


@pytest.mark.parametrize("attack", ["best_response", "xfed"])
def test_after_a_restart_the_attackers_send_what_they_would_have_sent(attack: str, tmp_path: Path) -> None:
    whole = Simulation(config(attack))
    for _ in range(60):
        whole.run_round()
    killed = Simulation.create(config(attack), tmp_path, lambda: None)
    for _ in range(33):
        killed.run_round()
    killed.close()
    resumed = Simulation.resume(config(attack), tmp_path)
    resumed.catch_up()
    for _ in range(27):
        resumed.run_round()
    assert resumed.ledger.chain == whole.ledger.chain
    resumed.close()
