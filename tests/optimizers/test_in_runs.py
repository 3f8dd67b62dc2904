"""Optimizers in runs: what is replayed, resumed and joined late has the very bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import DOCS

import cyber0
from cyber0 import ZeroOrder
from cyber0.config import Config
from cyber0.errors import ConfigError, LedgerError
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger
from cyber0.model.vector import Parameters
from cyber0.optimizers import OPTIMIZERS, make
from cyber0.protocol.client import replay

RIDGE = ["task.name=ridge", "rounds=12", "method.k=4", "method.batch_size=16", "method.lr=0.02"]


def config(name: str, *more: str) -> Config:
    return Config().with_overrides([*RIDGE, f"method.optimizer={name}", *more])


def trained(name: str, rounds: int = 12, *more: str) -> Simulation:
    simulation = Simulation(config(name, *more))
    for _ in range(rounds):
        simulation.run_round()
    return simulation


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_replay_gives_the_bits_and_the_state_of_the_run(name: str) -> None:
    run, fresh = trained(name), Simulation(config(name))
    assert replay(run.ledger.header, fresh.parameters, run.ledger) == 12
    assert fresh.parameters.digest() == run.parameters.digest()
    late = Simulation(config(name))
    late.client.catch_up(run.ledger.records(0, 5))
    late.client.catch_up(run.ledger.records(5))
    assert late.client.digest() == run.client.digest() and late.client.updates.state == run.client.updates.state


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_optimizer_decides_where_the_run_goes(name: str) -> None:
    assert (trained(name).parameters.digest() == trained("sgd").parameters.digest()) == (name == "sgd")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_it_lowers_the_loss_with_byzantine_clients(name: str) -> None:
    simulation = Simulation(config(name, "rounds=60"))
    before = simulation.evaluate().loss
    for _ in range(60):
        simulation.run_round()
    assert simulation.evaluate().loss < before


def test_a_pass_that_is_refused_leaves_the_state_of_the_weights() -> None:
    run, late = trained("adaptive"), Simulation(config("adaptive"))
    late.client.catch_up(run.ledger.records(0, 3))
    at = late.client.digest()
    records = list(run.ledger.records(3))
    with pytest.raises(Exception, match="expected the decision of round 5"):
        late.client.catch_up([*records[:2], records[4]])
    assert late.client.digest() == at
    late.client.catch_up(records)
    assert late.client.digest() == run.client.digest()


def test_local_steps_use_the_optimizer_with_the_state_before_the_round() -> None:
    copied = trained("adaptive", 6, "method.local_epochs=3")
    regenerated = trained("adaptive", 6, "method.local_epochs=3", "method.local_memory=regenerate")
    assert copied.ledger.chain != trained("sgd", 6, "method.local_epochs=3").ledger.chain
    for a, b in zip(copied.ledger, regenerated.ledger, strict=True):
        np.testing.assert_allclose(a.values, b.values, atol=1e-4)  # float32 losses over 2 mu: two paths to them


def test_a_header_states_all_options_and_a_run_continues_with_those_alone(tmp_path: Path) -> None:
    simulation = Simulation.create(config("adaptive"), tmp_path, lambda: None)
    simulation.run_round()
    simulation.close()
    with Ledger.open(tmp_path / Simulation.state_file) as ledger:
        assert (ledger.header.optimizer, ledger.header.optimizer_options) == ("adaptive", {"beta": 0.98})
        assert b'"optimizer":{"name":"adaptive","options":{"beta":0.98},"version":1}' in ledger.header.to_json()
    resumed = Simulation.resume(config("adaptive", "method.optimizer_options.beta=0.98"), tmp_path)
    resumed.catch_up()
    resumed.run_round()
    assert resumed.client.digest() == trained("adaptive", 2).client.digest()
    resumed.close()
    with pytest.raises(LedgerError, match=r"method\.optimizer_options\.beta \(now 0\.5, on record 0\.98\)"):
        Simulation.resume(config("adaptive", "method.optimizer_options.beta=0.5"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["method.optimizer=adaptiv"], "did you mean 'adaptive'"),
        (["method.optimizer=normalized", "method.k=1"], r"method\.k = 1 .* method\.k to at least 2"),
        (["method.optimizer=rank", "method.k=1", "method.local_epochs=5"], r"method\.k to at least 2"),
        (["method.optimizer=adaptive", "method.name=fedavg"], "decides vectors"),
        (["method.optimizer_options={beta = 0.9}"], "sgd takes no such option"),
    ],
)
def test_what_can_not_be_combined_is_refused(overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Config().with_overrides(overrides)


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def steps(optimizer: ZeroOrder, model: torch.nn.Module, count: int) -> None:
    x = torch.linspace(-1, 1, 32).view(8, 4)
    for _ in range(count):
        optimizer.step(lambda: model(x).square().mean())


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_zero_order_resumes_and_restores_to_the_bit(name: str, tmp_path: Path) -> None:
    def made(model: torch.nn.Module, path: Path | None) -> ZeroOrder:
        return ZeroOrder(model, lr=1e-2, k=3, optimizer=name, ledger=path)

    whole, parts = small_model(), small_model()
    start = {n: p.detach().clone() for n, p in parts.named_parameters()}
    steps(made(whole, None), whole, 7)
    first = made(parts, tmp_path / "a.ledger")
    steps(first, parts, 4)
    first.close()
    again = small_model()
    second = made(again, tmp_path / "a.ledger")
    steps(second, again, 3)
    assert second.parameters.digest() == Parameters(whole, "gaussian").digest()
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)
    second.restore(start)
    assert second.parameters.digest() == Parameters(whole, "gaussian").digest()


def test_zero_order_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="optimizer = 'adm' is not a choice; "):
        ZeroOrder(small_model(), lr=1e-2, optimizer="adm")
    with pytest.raises(ValueError, match="k must be at least 2, got 1"):
        ZeroOrder(small_model(), lr=1e-2, optimizer="normalized")
    with pytest.raises(ValueError, match="optimizer_options"):
        ZeroOrder(small_model(), lr=1e-2, optimizer_options={"beta": 0.9})


@pytest.mark.mnist
@pytest.mark.slow
def test_the_commands_of_the_document_train(tmp_path: Path) -> None:
    text = (DOCS / "concepts" / "optimizers.md").read_text(encoding="utf-8")
    commands = re.findall(r"^cyber0 run (--set method\.optimizer=.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for number, command in enumerate(commands):
        settings = [part for part in command.split() if part != "--set"]
        overrides = [*settings, "rounds=8", "evaluate_every=8"]
        summary = cyber0.run(Config().with_overrides(overrides), out=tmp_path / str(number))
        assert summary["final_accuracy"] > 0.2 and summary["rounds"] == 8


@pytest.mark.parametrize("name", ["momentum", "adam", "hessian"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_vectors_are_float32_whatever_type_torch_makes_by_default(name: str, default: torch.dtype) -> None:
    expected = trained(name).client.digest()
    torch.set_default_dtype(default)
    try:
        fresh = Simulation(config(name))
        assert {v.dtype for v in fresh.parameters.moments.vectors.values()} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)
    fresh.client.catch_up(trained(name).ledger)
    assert fresh.client.digest() == expected


def test_powers_vanish_before_they_depend_on_how_denormals_are_treated() -> None:
    for name, rounds in {"adaptive": 2100, "adam": 500}.items():
        optimizer = make(name)
        state = optimizer.start()
        for _ in range(rounds):
            state = optimizer.step(state, 0.1, np.ones(2), 2).state
        assert 0.0 in state and optimizer.possible(state, {})


@pytest.mark.parametrize(
    ("name", "state", "least"),
    [("adaptive", (-1.0, 0.5), {}), ("adaptive", (1.0, 1.5), {}), ("adam", (1 / 0.9, 1.0), {"m": 0.0, "v": 0.0}),
     ("adam", (0.5, 0.5), {"m": 0.0, "v": -1e-9}), ("hessian", (), {"h": -1.0}), ("hessian", (), {"h": 1e-4})],
)  # fmt: skip
def test_states_that_no_rounds_lead_to_are_told_apart(name: str, state: tuple[float, ...], least: Any) -> None:
    assert not make(name).possible(state, least)
    assert make(name).possible(make(name).start(), dict.fromkeys(make(name).vectors, 1.0))


def test_zero_order_refuses_a_ledger_that_somebody_else_began_meanwhile(tmp_path: Path) -> None:
    models = small_model(), small_model()
    first, second = (ZeroOrder(m, lr="auto", k=4, ledger=tmp_path / "a.ledger") for m in models)
    steps(first, models[0], 2)
    first.close()
    with pytest.raises(LedgerError, match="was written to while this ZeroOrder measured"):
        steps(second, models[1], 1)


def test_a_diagnosis_does_not_judge_steps_that_it_can_not_try() -> None:
    model = small_model()
    optimizer = ZeroOrder(model, lr=1e-2, optimizer="adam")
    with pytest.raises(ConfigError, match="can't judge the learning rate of optimizer = 'adam'"):
        optimizer.diagnose(lambda: model(torch.ones(2, 4)).square().mean())


@pytest.mark.parametrize(
    ("name", "options"), [(None, {}), (torch.optim.Adam, {}), ("adam", [1]), ("adam", "beta1=0.5")]
)
def test_zero_order_takes_a_name_and_a_dict(name: Any, options: Any) -> None:
    with pytest.raises(TypeError, match="optimizer must be a name and optimizer_options a dict"):
        ZeroOrder(small_model(), lr=1e-2, optimizer=name, optimizer_options=options)
