"""Rules that judge a client by all the rounds so far."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cyber0 import Simulation
from cyber0.aggregate import Matrix, Memory, Rule, make, nnm, reputation
from cyber0.config import Config
from cyber0.config.schema import to_dict
from cyber0.errors import ConfigError, LedgerError
from cyber0.federation import build
from cyber0.ledger import Ledger, Reports
from cyber0.runs.replay import check_decisions
from cyber0.storage import LEDGER, REPORTS

SETTINGS = {
    "rounds": 30, "task": {"name": "logistic"}, "method": {"k": 16, "lr": 0.1},
    "federation": {"attack": "full_knowledge", "partition": "iid"}, "aggregation": {"rule": "reputation"},
}  # fmt: skip
RANDOM = np.random.default_rng


def test_a_client_along_whose_reports_the_model_keeps_going_sits_out_until_the_others_have_caught_up() -> None:
    rule, rows = reputation(0.25), np.eye(4)
    memory = rule.memory(4)
    assert memory is not None

    def sits_out() -> list[bool]:
        return (rule.decide(rows, memory=memory).excluded > 0).tolist()

    for _ in range(20):
        memory.learn(rows, np.arange(4), rows[3], 0.1)
    assert sits_out() == [False, False, False, True]
    for _ in range(20):
        memory.learn(rows, np.arange(4), rows[:3].sum(axis=0), 0.1)
    assert sits_out() == [False] * 4


def test_at_most_b_clients_sit_out() -> None:
    rule, rows = reputation(0.25), np.eye(8)
    memory = rule.memory(8)
    assert memory is not None
    for _ in range(20):
        memory.learn(rows, np.arange(8), rows[:3].sum(axis=0) * [1, 2, 3, 0, 0, 0, 0, 0], 0.1)
    assert np.flatnonzero(rule.decide(rows, memory=memory).excluded).tolist() == [1, 2]


def test_without_a_history_nobody_is_left_out_and_no_row_counts_for_more_than_the_median() -> None:
    rows = RANDOM(1).normal(size=(8, 16))
    rows[0] *= 1e6
    outcome = reputation(0.25).decide(rows)
    assert not outcome.excluded.any()
    assert np.linalg.norm(outcome.values) <= np.median(np.linalg.norm(rows, axis=1))


def remembering(rows_of: Callable[[int], Matrix], rounds: int = 60, clients: int = 12) -> tuple[Rule, Memory]:
    """Return the rule and its memory of rounds with these rows, in which the model did not move."""
    rule = reputation(0.25)
    memory = rule.memory(clients)
    assert memory is not None
    for number in range(rounds):
        memory.learn(rows_of(number), np.arange(clients), np.zeros(64), 0.1)
    return rule, memory


def unlike(seed: int) -> Matrix:
    """Return rows of clients of which no two agree, all of length 1."""
    return np.linalg.qr(RANDOM(seed).normal(size=(64, 12)))[0].T


@pytest.mark.parametrize(("sign", "most"), [(1.0, 1.1), (-1.0, 0.4)])
def test_clients_that_send_the_same_row_or_its_reverse_count_little_more_than_one(sign: float, most: float) -> None:
    def colluding(seed: int) -> Matrix:
        rows = unlike(seed)
        rows[[1, 2]] = rows[0], sign * rows[0]
        return rows

    rule, memory = remembering(colluding)
    rows = colluding(1000)
    weights = rule.decide(rows, memory=memory).values @ rows.T
    honest = weights[3:].mean()
    assert weights[0] <= most * honest  # each of the three has a third of an honest client's weight
    alone, empty = remembering(unlike)
    assert alone.decide(unlike(1000), memory=empty).values @ unlike(1000).T == pytest.approx(1 / 12, rel=0.1)


def test_what_at_least_b_others_agree_with_costs_no_weight() -> None:
    def alike(seed: int) -> Matrix:
        rows = 0.3 * unlike(seed)
        rows[:8] += unlike(seed)[11] * 1.0
        return rows

    rule, memory = remembering(alike)
    rows = alike(1000)
    values = rule.decide(rows, memory=memory).values
    direction = unlike(1000)[11]
    assert values @ direction > 0.6  # eight of twelve agree on it


@pytest.mark.parametrize(("shared", "sits_out"), [(1.0, [11]), (0.0, [])])
def test_a_client_that_contradicts_the_others_sits_out_only_where_they_agree(
    shared: float, sits_out: list[int]
) -> None:
    def contradicted(seed: int) -> Matrix:
        rows = unlike(seed)
        common = RANDOM(seed + 1).normal(size=64) / 8
        rows[:11] += shared * common
        rows[11] = -rows[:11].mean(axis=0)
        return rows

    rule, memory = remembering(contradicted)
    assert np.flatnonzero(rule.decide(contradicted(1000), memory=memory).excluded).tolist() == sits_out


def test_who_opposes_the_others_sits_out_also_where_single_reports_hardly_resemble_each_other() -> None:
    rule, who = reputation(0.25, rounds=500.0), np.arange(12)
    memory = rule.memory(12)
    assert memory is not None
    for number in range(300):  # one sample a client: the mean cosine of two honest reports is 0.04
        rows = RANDOM((1, number)).normal(size=48) + 5 * RANDOM((2, number)).normal(size=(12, 48))
        rows[9:] *= -1
        memory.learn(rows, who, rows[:9].mean(axis=0), 0.01)
    assert np.flatnonzero(rule.decide(rows, memory=memory, clients=who).excluded).tolist() == [9, 10, 11]


@pytest.mark.parametrize("centred", [True, False])
def test_what_curvature_adds_to_all_scalars_hides_no_one_from_centred_cosines(centred: bool) -> None:
    rule, who = reputation(0.25, rounds=200.0, centred=centred), np.arange(12)
    memory = rule.memory(12)
    assert memory is not None
    for number in range(100):
        rows = RANDOM((1, number)).normal(size=48) + 3 * RANDOM((2, number)).normal(size=(12, 48))
        rows[9:] *= -1
        memory.learn(rows + 30.0, who, rows[:9].mean(axis=0), 0.01)
    excluded = np.flatnonzero(rule.decide(rows + 30.0, memory=memory, clients=who).excluded).tolist()
    assert excluded == ([9, 10, 11] if centred else [])


def test_deciding_changes_no_memory() -> None:
    rule, rows = reputation(0.25), RANDOM(2).normal(size=(8, 4))
    memory = rule.memory(8)
    assert memory is not None
    first = rule.decide(rows, memory=memory).values
    assert np.array_equal(rule.decide(rows, memory=memory).values, first)


def test_the_order_of_the_clients_does_not_matter() -> None:
    rule, order = reputation(0.25), RANDOM(3).permutation(8)
    one, other = rule.memory(8), rule.memory(8)
    assert one is not None and other is not None
    for number in range(50):
        rows = RANDOM(number).normal(size=(8, 4)) + np.linspace(-1, 1, 8)[:, None]
        decided = rule.decide(rows, round=number, memory=one)
        permuted = rule.decide(rows[order], round=number, memory=other, clients=order)
        np.testing.assert_allclose(permuted.values, decided.values, rtol=1e-12)
        assert np.array_equal(permuted.excluded, decided.excluded[order])
        one.learn(rows, np.arange(8), decided.values, 0.1)
        other.learn(rows[order], order, decided.values, 0.1)


def test_a_row_that_is_not_finite_is_left_out_and_those_after_it_keep_their_clients() -> None:
    rule = reputation(0.25)
    memory = rule.memory(4)
    assert memory is not None
    memory.learn(np.array([[0.1], [0.1], [0.1], [0.1]]), np.arange(4), np.array([1.0]), 0.1)
    rows = np.array([[np.nan], [1.0], [1.0], [1.0]])
    assert rule.decide(rows, memory=memory).excluded.tolist() == [1, 0, 0, 0]


def test_impossible_options_and_a_pre_aggregation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"margin = 0\.5"):
        reputation(0.25, margin=0.5)
    with pytest.raises(ConfigError, match=r'aggregation\.before = "none"'):
        nnm(reputation(0.25))
    with pytest.raises(ConfigError, match="mixes them"):
        make("reputation", 0.25, before="nnm")
    with pytest.raises(ConfigError, match=r"aggregation\.rule = 'reputation' .* use another rule"):
        Config.from_dict({"method": {"name": "fedavg"}, "aggregation": {"rule": "reputation"}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 rounds by a rule with a history."""
    out = tmp_path_factory.mktemp("history")
    simulation = Simulation.create(Config.from_dict(SETTINGS), out, lambda: None)
    for _ in range(30):
        simulation.run_round()
    simulation.close()
    return out


def test_a_run_stores_its_reports_though_nothing_asks_for_them(folder: Path) -> None:
    assert (folder / REPORTS).exists()


def test_the_decisions_are_recomputed_from_the_reports(folder: Path) -> None:
    with Ledger.open(folder / LEDGER) as ledger:
        assert check_decisions(folder, ledger).rounds == 30


def test_a_federator_that_was_killed_decides_as_if_it_had_not_been(folder: Path, tmp_path: Path) -> None:
    for name in (LEDGER, REPORTS):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = Config.from_dict(SETTINGS | {"rounds": 40})
    resumed, whole = Simulation.resume(config, tmp_path), Simulation(config)
    resumed.catch_up()
    for _ in range(30):
        whole.run_round()
    assert [whole.run_round().values.tolist() for _ in range(10)] == [
        resumed.run_round().values.tolist() for _ in range(10)
    ]
    resumed.close()


def test_a_federator_without_the_reports_of_earlier_rounds_is_refused(folder: Path) -> None:
    with Ledger.open(folder / LEDGER) as ledger, pytest.raises(ConfigError, match=r"restore reports\.bin from a copy"):
        build.make_federator(ledger, Config.from_dict(SETTINGS))


def test_a_changed_report_is_noticed(folder: Path, tmp_path: Path) -> None:
    with Ledger.open(folder / LEDGER) as ledger:
        stored = list(Reports(folder / REPORTS, ledger.header.scalars))
        changed = Reports(tmp_path / REPORTS, ledger.header.scalars, rounds=0)
        for number, rows in stored:
            changed.append(number, rows * (2 if number == 3 else 1))
        changed.close()
        with pytest.raises(LedgerError, match="round"):
            check_decisions(tmp_path, ledger)


def test_clients_that_never_reported_do_not_make_the_others_implausible() -> None:
    rule, who = reputation(0.2), np.arange(9)
    memory = rule.memory(20)
    assert memory is not None
    for number in range(60):
        rows = np.ones((9, 16)) + 0.01 * RANDOM(number).normal(size=(9, 16))
        outcome = rule.decide(rows, 20, number, memory=memory, clients=who)
        assert not outcome.excluded.any()
        memory.learn(rows, who, outcome.values, 0.1)


def test_a_late_client_does_not_shield_those_that_disagree_with_all() -> None:
    rule = reputation(0.25)
    memory = rule.memory(12)
    assert memory is not None
    for number in range(40):
        common = RANDOM(number).normal(size=64)
        rows = common + 2 * RANDOM(1000 + number).normal(size=(12, 64))
        rows[10:] -= 2 * common
        rows[9] = 0.0
        who = np.arange(12) if number >= 30 else np.delete(np.arange(12), 9)
        outcome = rule.decide(rows[who], 12, number, memory=memory, clients=who)
        if number >= 30:
            assert set(who[outcome.excluded > 0]) == {10, 11}
        memory.learn(rows[who], who, outcome.values, 0.1)


def test_too_many_clients_to_remember_are_refused() -> None:
    settings = {"clients": 10_000, "participation": 0.001, "byzantine": 0}
    with pytest.raises(ConfigError, match=r"can for 2000; lower federation\.clients \(it is 10000\)"):
        Config.from_dict({"federation": settings, "aggregation": {"rule": "reputation"}})


def test_reports_of_another_run_are_refused(folder: Path, tmp_path: Path) -> None:
    with Ledger.open(folder / LEDGER) as ledger:
        other = Reports(tmp_path / REPORTS, ledger.header.scalars, rounds=0)
        for number in range(30):
            other.append(number, np.zeros((11, ledger.header.scalars), np.float32))
        other.close()
        (tmp_path / LEDGER).write_bytes((folder / LEDGER).read_bytes())
    with pytest.raises(LedgerError, match="does not hold the reports of round 0"):
        Simulation.resume(Config.from_dict(SETTINGS), tmp_path)


OWN = """
import numpy as np
from cyber0.aggregate import Outcome, Rule

class Last:
    "Decides what was decided before, halfway to the mean."
    values = 0.0
    def combine(self, rows, clients, b, round):
        return Outcome((rows.mean(axis=0) + self.values) / 2, np.zeros(len(rows), np.int64))
    def learn(self, rows, clients, values, lr):
        self.values = values.astype(np.float64)

def halfway(beta):
    return Rule("halfway", beta, remembers=lambda clients: Last())
"""


def test_a_rule_of_ones_own_may_have_a_history_and_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(OWN)
    config = Config.from_dict(SETTINGS | {"aggregation": {"rule": f"{tmp_path / 'rules.py'}:halfway"}})
    whole, part = Simulation(config), Simulation.create(config, tmp_path, lambda: None)
    expected = [whole.run_round().values.tolist() for _ in range(6)]
    found = [part.run_round().values.tolist() for _ in range(3)]
    part.close()
    resumed = Simulation.resume(config, tmp_path)
    resumed.catch_up()
    assert found + [resumed.run_round().values.tolist() for _ in range(3)] == expected
    resumed.close()


def test_headers_of_runs_without_a_trusted_client_are_those_of_before() -> None:
    assert "reference" not in to_dict(Config())["aggregation"]
    assert to_dict(Config.from_dict({"federation": {"clients": 13}, "aggregation": {
        "rule": "fit_reference", "reference": 5}}))["aggregation"]["reference"] == 5  # fmt: skip
