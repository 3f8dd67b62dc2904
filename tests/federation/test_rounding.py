"""Rounding by 16 random bits a weight in runs: replayed, resumed and joined late to the bit, named in the header."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cyber0 import ZeroOrder
from cyber0.config import Config
from cyber0.config.schema import to_dict
from cyber0.errors import ConfigError, LedgerError
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger
from cyber0.protocol.client import replay

RIDGE = ["task.name=ridge", "task.dtype=bfloat16", "rounds=8", "method.k=4", "method.batch_size=16", "method.mu=0.05"]
BY_16 = "method.rounding=stochastic16"


def config(*more: str) -> Config:
    return Config().with_overrides([*RIDGE, *more])


def trained(*more: str, rounds: int = 8) -> Simulation:
    simulation = Simulation(config(*more))
    for _ in range(rounds):
        simulation.run_round()
    return simulation


@pytest.mark.parametrize("more", [[], ["method.optimizer=momentum"], ["method.local_epochs=2"]])
def test_a_replay_and_a_late_client_have_the_bits_of_the_run(more: list[str]) -> None:
    run, fresh, late = trained(BY_16, *more), Simulation(config(BY_16, *more)), Simulation(config(BY_16, *more))
    assert replay(run.ledger.header, fresh.parameters, run.ledger) == 8
    late.client.catch_up(run.ledger.records(0, 5))
    late.client.catch_up(run.ledger.records(5))
    assert fresh.parameters.digest() == run.parameters.digest()
    assert late.client.digest() == run.client.digest()


@pytest.mark.parametrize("more", [[], ["method.optimizer=momentum"]])
def test_the_rounding_decides_the_bits_of_a_commit(more: list[str]) -> None:
    run, other = trained(BY_16, *more), Simulation(config(*more))
    replay(other.ledger.header, other.parameters, run.ledger)
    assert other.parameters.digest() != run.parameters.digest()


def test_local_steps_are_rounded_by_it_too() -> None:
    more = ["method.local_epochs=2", "method.local_memory=copy"]
    assert trained(BY_16, *more, rounds=1).ledger.chain != trained(*more, rounds=1).ledger.chain
    values = [next(iter(trained(*a, *more, rounds=1).ledger)).values for a in ([], [BY_16])]
    assert values[0] is not None and values[1] is not None
    assert (values[0][:4] == values[1][:4]).all() and (values[0][4:] != values[1][4:]).any()


def test_the_header_names_it_and_a_header_without_it_stays_as_it_was() -> None:
    named, plain = (json.loads(Simulation(config(*more)).ledger.header.to_json()) for more in ([BY_16], []))
    assert named["rounding"] == {"name": "stochastic16", "options": {}, "version": 1}
    assert plain["rounding"] == {"name": "stochastic", "options": {}, "version": 1}
    assert "rounding" not in plain["settings"]["method"] and "rounding" not in named["settings"]["method"]
    assert "rounding" not in to_dict(config())["method"]
    assert to_dict(config(BY_16))["method"]["rounding"] == "stochastic16"


def test_a_run_is_resumed_with_its_rounding_and_no_other(tmp_path: Path) -> None:
    run = Simulation.create(config(BY_16), tmp_path, lambda: None)
    run.run_round()
    run.close()
    with Ledger.open(tmp_path / Simulation.state_file) as ledger:
        assert ledger.header.rounding == "stochastic16"
        assert ledger.header.config["method"]["rounding"] == "stochastic16"
    resumed = Simulation.resume(config(BY_16), tmp_path)
    resumed.catch_up()
    resumed.run_round()
    assert resumed.client.digest() == trained(BY_16, rounds=2).client.digest()
    resumed.close()
    with pytest.raises(LedgerError, match=r"method\.rounding \(now None, on record 'stochastic16'\)"):
        Simulation.resume(config(), tmp_path)


def test_it_is_refused_where_nothing_would_be_rounded_by_it() -> None:
    with pytest.raises(ConfigError, match=r"method\.rounding = 'stochastic16' .* stored in float32; leave"):
        Simulation(config(BY_16, "task.dtype=float32"))
    with pytest.raises(ConfigError, match=r"method\.name = 'fedavg' rounds to nearest; leave method\.rounding out"):
        config(BY_16, "method.name=fedavg")
    with pytest.raises(ConfigError, match="did you mean 'stochastic16'"):
        config("method.rounding=stochastic1")


def small_model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(dtype)


def test_zero_order_resumes_with_it_to_the_bit(tmp_path: Path) -> None:
    path, x = tmp_path / "a.ledger", torch.linspace(-1, 1, 32).view(8, 4).to(torch.bfloat16)

    def digest_after(count: int, ledger: Path | None, rounding: str = "stochastic16") -> str:
        model = small_model()
        optimizer = ZeroOrder(model, lr=1e-2, mu=0.05, k=3, rounding=rounding, ledger=ledger)
        for _ in range(count):
            optimizer.step(lambda: model(x).float().square().mean())
        optimizer.close()
        return optimizer.parameters.digest()

    digest_after(4, path)
    assert digest_after(3, path) == digest_after(7, None) != digest_after(7, None, "stochastic")
    with pytest.raises(LedgerError, match="differs in rounding"):
        digest_after(1, path, "stochastic")


def test_zero_order_refuses_it_for_float32_and_names_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="rounding = 'stochastic16' is how steps of 16-bit weights are rounded"):
        ZeroOrder(small_model(torch.float32), lr=1e-2, rounding="stochastic16")
    with pytest.raises(ValueError, match="rounding = 'nearest' is not a choice; possible are stochastic, stochastic16"):
        ZeroOrder(small_model(), lr=1e-2, mu=0.05, rounding="nearest")
