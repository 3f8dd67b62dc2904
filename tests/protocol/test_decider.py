"""How rounds are decided: what the rule's memory is told, who is expelled, and what that does to later rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from wire import make_header

from cyber0 import aggregate
from cyber0.aggregate import Guilt, Matrix, Outcome, Rule
from cyber0.errors import ConfigError
from cyber0.ledger import Ledger, Reports
from cyber0.protocol.decider import Decider
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import Report

K, CLIENTS = 4, 8


class Told:
    """A memory that averages, stores what it is told, and finds the clients guilty that it is given."""

    def __init__(self, guilty: Mapping[int, list[int]] | None = None) -> None:
        self.steps: list[NDArray[Any]] = []
        self._guilty = guilty or {}

    def combine(self, rows: Matrix, clients: NDArray[np.int64], b: int, round: int) -> Outcome:
        return Outcome(rows.astype(np.float64).mean(axis=0), np.zeros(len(rows), np.int64))

    def learn(self, rows: Matrix, clients: NDArray[np.int64], values: Matrix, lr: float) -> None:
        self.steps.append(values)

    def guilty(self, clients: NDArray[np.int64], b: int) -> list[Guilt]:
        named = self._guilty.get(len(self.steps) - 1, [])
        return [Guilt(i, f"{i} of {b}", {"b": b}) for i in named if i in clients]


def federator_of(memory: Told, ledger: Ledger, **options: Any) -> Federator:
    rule = Rule("told", 0.25, remembers=lambda clients: memory)
    return Federator(ledger, rule, CLIENTS, lr_at=lambda t: 0.1, **options)


def run_rounds(federator: Federator, rounds: int) -> list[NDArray[np.float32]]:
    decided = []
    for _ in range(rounds):
        announcement = federator.open_round()
        for client in announcement.invited.tolist():
            values = np.random.default_rng((announcement.round, client)).normal(size=K).astype(np.float32)
            federator.receive(Report(client, announcement.round, values))
        decision = federator.decide()
        assert decision is not None and decision.values is not None
        decided.append(decision.values)
    return decided


def ledger_with(optimizer: str = "sgd", **options: Any) -> Ledger:
    return Ledger.create(None, make_header(CLIENTS, k=K, optimizer=optimizer, optimizer_options=options))


def test_a_memory_is_told_the_decision_itself_with_sgd_and_with_optimizers_of_vectors() -> None:
    for optimizer, options in (("sgd", {}), ("momentum", {"beta": 0.9})):
        memory = Told()
        decided = run_rounds(federator_of(memory, ledger_with(optimizer, **options)), 3)
        assert [step.tolist() for step in memory.steps] == [values.tolist() for values in decided]


def test_a_memory_is_told_the_scalars_of_the_step_that_was_taken() -> None:
    memory = Told()
    run_rounds(federator_of(memory, ledger_with("zscore")), 3)
    for step in memory.steps:
        assert step.mean() == pytest.approx(0, abs=1e-12) and np.square(step).mean() == pytest.approx(1)


def test_a_federator_that_was_killed_tells_its_memory_the_same_steps(tmp_path: Any) -> None:
    path, memory, again = tmp_path / "ledger.bin", Told(), Told()
    with Ledger.create(
        path, make_header(CLIENTS, k=K, optimizer="adaptive", optimizer_options={"beta": 0.5})
    ) as ledger:
        run_rounds(federator_of(memory, ledger, reports=Reports.beside(ledger, tmp_path / "reports.bin")), 4)
        run_rounds(federator_of(again, ledger, reports=Reports.beside(ledger, tmp_path / "reports.bin")), 2)
    assert [step.tolist() for step in again.steps[:4]] == [step.tolist() for step in memory.steps]
    assert len(again.steps) == 6


# Expulsion.


def test_an_expelled_client_is_not_invited_and_the_tolerance_shrinks() -> None:
    federator = federator_of(Told({1: [5]}), ledger_with(), expel=True)
    run_rounds(federator, 2)
    assert [(one.client, one.round) for one in federator.expulsions] == [(5, 1)]
    announcement = federator.open_round()
    assert announcement.invited.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert (federator.invited_count, federator.tolerated, federator.required) == (7, 1, 5)
    assert federator.receive(Report(5, 2, np.zeros(K, np.float32))) is Receipt.NOT_INVITED
    assert federator.decider.invited(1).tolist() == list(range(8))  # it was then


def test_at_most_b_clients_are_expelled() -> None:
    federator = federator_of(Told({0: [7, 1, 2], 1: [3]}), ledger_with(), expel=True)
    run_rounds(federator, 3)
    assert [one.client for one in federator.expulsions] == [7, 1]  # b = 2 of 8
    assert federator.tolerated == 0


def test_expulsions_do_not_lower_the_number_of_reports_that_a_decision_needs() -> None:
    federator = federator_of(Told({0: [7, 1]}), ledger_with(), expel=True)
    run_rounds(federator, 1)
    assert federator.open_round().invited.tolist() == [0, 2, 3, 4, 5, 6]
    for client in (0, 2, 3, 4):  # 2 b + 1 = 5 of the 8 were needed before
        federator.receive(Report(client, 1, np.ones(K, np.float32)))
    decision = federator.decide(deadline=True)
    assert federator.tolerated == 0 and decision is not None and decision.values is None


def test_nobody_is_expelled_without_whom_the_quorum_could_not_be_met() -> None:
    federator = federator_of(Told({0: [7, 1]}), ledger_with(), expel=True, quorum=7)
    run_rounds(federator, 3)
    assert [one.client for one in federator.expulsions] == [7]
    assert federator.required == federator.invited_count == 7


def test_nobody_is_expelled_unless_asked_for() -> None:
    federator = federator_of(Told({0: [7]}), ledger_with())
    run_rounds(federator, 2)
    assert federator.expulsions == [] and federator.invited_count == CLIENTS


def test_expelling_is_refused_where_clients_are_sampled() -> None:
    with pytest.raises(ConfigError, match=r"invites 4 of 8 to a round; set federation\.participation = 1\.0 or"):
        federator_of(Told(), ledger_with(), expel=True, participation=0.5)


def test_a_rule_that_gathers_no_evidence_is_refused() -> None:
    for rule in ("trimmed_mean", "fit_reference"):
        with pytest.raises(ConfigError, match=r'set aggregation\.rule = "reputation"'):
            Decider(aggregate.make(rule, 0.25), make_header(CLIENTS), expel=True)
