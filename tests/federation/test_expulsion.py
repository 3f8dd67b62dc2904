"""federation.expel in a whole federation: the same clients live, after a restart, and in verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cyber0 import Simulation
from cyber0.config import Config
from cyber0.config.schema import to_dict
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger import Header, Ledger, Reports
from cyber0.runs.replay import check_decisions
from cyber0.storage import LEDGER, REPORTS


def config(rounds: int = 60, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "rounds": rounds, "task": {"name": "logistic"}, "method": {"k": 32, "lr": 0.05},
        "federation": {"attack": "sign_flip", "expel": True}, "aggregation": {"rule": "reputation"},
    }  # fmt: skip
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    return Config.from_dict(settings)


def run(settings: Config, out: Path, rounds: int) -> Simulation:
    simulation = Simulation.create(settings, out, lambda: None)
    for _ in range(rounds):
        simulation.run_round()
    return simulation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("expel")
    run(config(), out, 60).close()
    return out


def test_the_byzantine_clients_are_expelled_and_no_others(folder: Path) -> None:
    with Ledger.open(folder / LEDGER) as ledger:
        found = check_decisions(folder, ledger)
        simulation = Simulation(config())
        assert sorted(one.client for one in found.expulsions) == simulation.byzantine.nonzero()[0].tolist()
        last = max(one.round for one in found.expulsions)
        assert last < 59
        assert [int(record.reported.sum()) for record in ledger][last + 1 :] == [9] * (59 - last)


def test_a_federator_that_was_killed_has_expelled_the_same_and_goes_on_alike(folder: Path, tmp_path: Path) -> None:
    whole = run(config(80), tmp_path, 80)
    other = tmp_path / "killed"
    other.mkdir()
    run(config(80), other, 20).close()
    resumed = Simulation.resume(config(80), other)
    resumed.catch_up()
    for _ in range(60):
        resumed.run_round()
    assert resumed.federator.expulsions == whole.federator.expulsions != []
    assert (resumed.ledger.chain, resumed.traffic()) == (whole.ledger.chain, whole.traffic())
    assert resumed.rejected == whole.rejected == 0
    for each in (whole, resumed):
        each.close()


def test_a_report_of_an_expelled_client_in_the_ledger_does_not_verify(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    run(config(federation={"expel": False}), tmp_path / "plain", 60).close()
    with Ledger.open(tmp_path / "plain" / LEDGER) as ledger, Ledger.open(folder / LEDGER) as expelling:
        changed = Ledger.create(tmp_path / LEDGER, expelling.header)
        reports = Reports.beside(changed, tmp_path / REPORTS)
        for record, (number, rows) in zip(ledger, Reports(tmp_path / "plain" / REPORTS, 32), strict=True):
            reports.append(number, rows)
            changed.append(record)
        changed.close()
        reports.close()
    with Ledger.open(tmp_path / LEDGER) as ledger, pytest.raises(LedgerError, match="to which it was not invited: "):
        check_decisions(tmp_path, ledger)


@pytest.mark.parametrize("dealt", [{"partition": "by_label"}, {"partition": "dirichlet", "alpha": 0.1}, {}])
@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_honest_client_is_expelled(dealt: dict[str, Any], batch: int, seed: int) -> None:
    for attack in ("none", "ipm", "mirror"):
        settings = config(federation={**dealt, "attack": attack}, method={"batch_size": batch})
        simulation = Simulation(Config.from_dict(to_dict(settings) | {"seed": seed}))
        for _ in range(60):
            simulation.run_round()
        honest = [one for one in simulation.federator.expulsions if not simulation.byzantine[one.client]]
        assert honest == [] and (attack != "none" or simulation.federator.expulsions == [])


def test_a_rule_without_a_history_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"aggregation\.rule = 'trimmed_mean' does not; set aggregation\.rule = 'rep"):
        config(aggregation={"rule": "trimmed_mean"})


def test_a_sample_of_the_clients_a_round_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"federation\.participation = 0\.5 invites 6 of 12 to a round; set "):
        config(federation={"participation": 0.5, "accept_risk": True})


def test_runs_that_do_not_expel_have_the_header_that_they_had() -> None:
    simulation = Simulation(config(federation={"expel": False}))
    assert isinstance(simulation.ledger.header, Header)
    assert "expel" not in simulation.ledger.header.config["federation"]
    assert Simulation(config()).ledger.header.config["federation"]["expel"] is True
