"""What an interrupt or an exception in the middle must not break."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, config
from torch import nn

from cyber0 import Simulation, ZeroOrder
from cyber0.directions import Step, engine
from cyber0.errors import ModelError
from cyber0.kernels import threads
from cyber0.model.vector import Parameters


def two_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def interrupted_at(monkeypatch: pytest.MonkeyPatch, call: int, of: Any = engine.WeightPass, name: str = "run") -> None:
    """Raise KeyboardInterrupt at the n-th call of the commit kernel, once."""
    calls, original = [0], getattr(of, name)

    def run(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return original(*arguments, **named)

    monkeypatch.setattr(of, name, run)


def test_a_commit_that_was_interrupted_half_way_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters(two_blocks())
    step = Step(0, 0, np.ones(2, np.float32))
    interrupted_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        parameters.commit(step)
    monkeypatch.undo()
    for use in (lambda: parameters.commit(step), parameters.digest, lambda: parameters.perturbed(None).__enter__()):
        with pytest.raises(ModelError, match="interrupted half way"):
            use()


@pytest.mark.parametrize(("k", "kernel"), [(2, (engine.WeightPass, "run")), (1, (engine, "move"))])
def test_an_optimizer_never_leaves_its_ledger_after_an_interrupted_commit(
    k: int, kernel: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = two_blocks(), two_blocks()
    optimizer, undisturbed = ZeroOrder(model, lr=0.1, k=k), ZeroOrder(twin, lr=0.1, k=k)
    start, x = {name: t.clone() for name, t in optimizer.parameters.state().items()}, torch.randn(8, 4)

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    optimizer.step(loss)
    interrupted_at(monkeypatch, 2, *kernel)  # the second of two blocks
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(loss)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="interrupted half way"):
        optimizer.step(loss)
    optimizer.restore(start)  # and this is the way back
    for _ in range(2):
        undisturbed.step(lambda: twin(x).square().mean())
    assert optimizer.parameters.digest() == undisturbed.parameters.digest()
    optimizer.step(loss)
    assert optimizer.round == 3


def test_an_excursion_mends_an_interrupted_local_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters(two_blocks())
    before = parameters.digest()
    interrupted_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt), parameters.excursion():
        parameters.commit(Step(0, 0, np.ones(2, np.float32)))
    monkeypatch.undo()
    assert parameters.digest() == before


@pytest.mark.parametrize("segment", [1, 2])
def test_an_excursion_interrupted_while_it_puts_w_back_is_noticed_and_loading_w_mends_it(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = Parameters(two_blocks())
    before, w = parameters.digest(), {name: t.clone() for name, t in parameters.state().items()}
    calls, original = [0], torch.Tensor.copy_

    def copy(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == segment:
            raise KeyboardInterrupt
        return original(*arguments, **named)

    with pytest.raises(KeyboardInterrupt), parameters.excursion():
        parameters.commit(Step(0, 0, np.ones(2, np.float32)))
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.undo()
    for use in (parameters.digest, lambda: parameters.excursion().__enter__()):
        with pytest.raises(ModelError, match="interrupted half way"):
            use()
    parameters.load(w)
    assert parameters.digest() == before


@pytest.mark.parametrize("remedy", ["load", "set_vector"])
def test_the_remedy_after_an_interrupted_commit_is_accepted(remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters(two_blocks())
    before, w = parameters.digest(), parameters.vector()
    named = {name: t.clone() for name, t in parameters.state().items()}
    interrupted_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        parameters.commit(Step(0, 0, np.ones(2, np.float32)))
    monkeypatch.undo()
    if remedy == "load":
        parameters.load(named)
    else:
        parameters.set_vector(w)
    assert parameters.digest() == before


def test_no_thread_still_works_when_a_piece_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYBER0_THREADS", "2")
    running = threading.Event()
    done: list[int] = []

    def kernel(low: int, high: int) -> None:
        if low == 0:
            running.wait(5)
            raise KeyboardInterrupt
        running.set()
        time.sleep(0.2)
        done.append(low)

    with pytest.raises(KeyboardInterrupt):
        threads.run_in_threads(kernel, [(0, 1), (1, 2)])
    assert done == [1]


class Failing(Blobs):
    """A task whose losses raise when told to."""

    fail = False

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("no memory")
        return super().losses(outputs, targets)


def test_a_round_that_could_not_be_measured_can_be_run_again() -> None:
    task = Failing()
    simulation = Simulation(config("rounds=4"), task=task)
    undisturbed = Simulation(config("rounds=4"), task=Blobs())
    for failing in (False, True, False, False):
        task.fail = failing
        if failing:
            with pytest.raises(RuntimeError, match="no memory"):
                simulation.run_round()
            task.fail = False
        simulation.run_round()
        undisturbed.run_round()
    assert simulation.parameters.digest() == undisturbed.parameters.digest()


def test_a_commit_that_was_interrupted_before_it_began_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, undisturbed = (Simulation(config("rounds=3"), task=Blobs()) for _ in range(2))
    simulation.run_round()
    original = simulation.client.apply
    monkeypatch.setattr(simulation.client, "apply", lambda decision: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        simulation.run_round()
    monkeypatch.setattr(simulation.client, "apply", original)
    simulation.run_round()
    for _ in range(3):
        undisturbed.run_round()
    assert simulation.round == 3 and simulation.parameters.digest() == undisturbed.parameters.digest()
    assert simulation.traffic() == undisturbed.traffic()
