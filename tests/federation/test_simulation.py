"""A whole federation in one process: it learns, withstands Byzantine clients, repeats itself, and counts its bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from synthetic import Blobs, config, one_thread  # noqa: F401
from torch import nn

from cyber0 import Simulation
from cyber0.attacks import Attack, Knowledge
from cyber0.config.choices import DISTRIBUTIONS, ESTIMATORS, PROBING_ESTIMATORS
from cyber0.config.registry import RULES
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, LedgerError
from cyber0.estimate.batches import Batch
from cyber0.federation.population import byzantine_clients
from cyber0.ledger import Ledger
from cyber0.protocol.decider import invited_clients


def simulate(*overrides: str, kind: str = "linear", task: Blobs | None = None) -> Simulation:
    return Simulation(config(*overrides), task=task or Blobs(kind))


def finished(*overrides: str, kind: str = "linear", task: Blobs | None = None) -> Simulation:
    simulation = simulate(*overrides, kind=kind, task=task)
    while simulation.round < simulation.config.rounds:
        simulation.run_round()
    return simulation


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_accuracy_improves(kind: str) -> None:
    simulation = simulate("federation.byzantine=0", "rounds=60", kind=kind)
    before = simulation.evaluate()
    for _ in range(60):
        simulation.run_round()
    after = simulation.evaluate()
    assert after.accuracy > before.accuracy + 0.2 and after.accuracy > 0.75
    assert after.loss < before.loss


def finished_against(attack: Attack, *overrides: str) -> Simulation:
    simulation = simulate("rounds=40", *overrides)
    simulation._attack = attack
    for _ in range(40):
        simulation.run_round()
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("factor", [-1e3, 1e30, -1e30, np.nan, np.inf])
def test_robust_rules_withstand_what_the_mean_does_not(factor: float) -> None:
    """Full knowledge keeps to the range of the honest values, which is how it gets past the trimming; others don't."""

    def push(known: Knowledge) -> NDArray[np.float64]:
        return np.tile(known.honest.mean(axis=0) * factor, (known.byzantine, 1))

    honest = finished("rounds=40", "federation.byzantine=0").evaluate()
    for rule in ("trimmed_mean", "median"):
        robust = finished_against(push, f"aggregation.rule={rule}")
        assert robust.decided == 40
        assert robust.evaluate().accuracy > honest.accuracy - 0.1
    plain = finished_against(push, "aggregation.rule=mean", "aggregation.beta=0")
    if np.isfinite(factor):
        assert not plain.evaluate().accuracy > honest.accuracy - 0.3
    else:
        assert plain.evaluate().accuracy > honest.accuracy - 0.1  # refused at the door, whatever the rule


STEPS = [(rule, before, 3) for rule in RULES if rule != "mean" for before in ("none", "nnm")
         if before == "none" or not RULES.entry(rule).traits["history"]]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "before", "byzantine"), [*STEPS, ("trimmed_mean", "bucketing", 1)])
def test_every_rule_and_step_withstands_byzantine_clients(rule: str, before: str, byzantine: int) -> None:
    def push(known: Knowledge) -> NDArray[np.float64]:
        return np.tile(known.honest.mean(axis=0) * -1e30, (known.byzantine, 1))

    chosen = (f"aggregation.rule={rule}", f"aggregation.before={before}", f"aggregation.beta={byzantine / 12}")
    if RULES.entry(rule).traits["reference"]:
        chosen += ("aggregation.reference=20",)
    simulation = simulate("federation.clients=12", f"federation.byzantine={byzantine}", *chosen)
    before_training = simulation.evaluate()
    simulation._attack = push
    for _ in range(40):
        simulation.run_round()
    assert simulation.decided == 40
    assert simulation.evaluate().accuracy > before_training.accuracy + 0.1


def test_the_trimmed_mean_still_learns_under_full_knowledge() -> None:
    simulation = simulate("rounds=60")
    before = simulation.evaluate()
    for _ in range(60):
        simulation.run_round()
    assert simulation.evaluate().accuracy > before.accuracy + 0.2


def test_accepted_hurts_more_than_literal() -> None:
    accepted, literal, none = (
        finished("rounds=40", f"federation.attack={attack}", f"federation.attack_reading={reading}").evaluate().loss
        for attack, reading in (("full_knowledge", "accepted"), ("full_knowledge", "literal"), ("none", "accepted"))
    )
    assert accepted > literal > none


def test_byzantine_clients_are_drawn_by_the_seed_and_fixed_for_the_run() -> None:
    simulation = simulate("federation.clients=40", "federation.byzantine=10")
    byzantine = simulation.byzantine.copy()
    assert byzantine.sum() == 10
    for _ in range(3):
        simulation.run_round()
    assert np.array_equal(simulation.byzantine, byzantine)
    assert np.array_equal(byzantine_clients(0, 40, 10), byzantine)
    drawn = {tuple(np.flatnonzero(byzantine_clients(seed, 40, 10))) for seed in range(8)}
    assert len(drawn) == 8
    often = sum(byzantine_clients(seed, 40, 10).astype(int) for seed in range(400))
    assert (np.abs(often - 100) < 5 * np.sqrt(400 * 0.25 * 0.75)).all()


def test_only_byzantine_clients_that_lie_are_spared_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    for attack, expected in (("full_knowledge", 9), ("none", 12)):
        simulation = simulate(f"federation.attack={attack}")
        asked: list[int] = []
        measure = simulation.client.measure
        monkeypatch.setattr(
            simulation.client, "measure", lambda a, who, m=measure, s=asked: (s.extend(who), m(a, who))[1]
        )
        record = simulation.run_round()
        assert len(asked) == expected
        assert record.reported.all()
        if expected == 9:
            assert not simulation.byzantine[asked].any()


@pytest.mark.parametrize("attack", ["full_knowledge", "label_flip", "none"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_first_batch_is_the_same_wherever_a_run_begins(
    attack: str, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(
        f"federation.attack={attack}", "federation.participation=0.5", "federation.accept_risk=true",
        f"method.local_epochs={epochs}",
    )  # fmt: skip
    batches: list[Batch] = []
    estimate = simulation.client.evaluator.estimate
    monkeypatch.setattr(
        simulation.client.evaluator, "estimate", lambda batch, *rest: (batches.append(batch), estimate(batch, *rest))[1]
    )
    for _ in range(2):
        simulation.run_round()
    first = simulation.first_batch(alone=epochs > 1)
    assert torch.equal(first.inputs, batches[0].inputs) and torch.equal(first.targets, batches[0].targets)


def test_only_invited_clients_are_measured_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate("federation.clients=40", "federation.byzantine=1", "federation.participation=0.25")
    asked: list[int] = []
    measure = simulation.client.measure
    monkeypatch.setattr(simulation.client, "measure", lambda a, who: (asked.extend(who), measure(a, who))[1])
    seen = set()
    for t in range(6):
        asked.clear()
        record = simulation.run_round()
        invited = invited_clients(0, t, 40, 0.25)
        assert len(invited) == 10
        assert set(asked) == {i for i in invited if not simulation.byzantine[i]}
        assert np.array_equal(np.flatnonzero(record.reported), invited)
        seen.add(tuple(invited))
    assert len(seen) == 6
    up, down = simulation.traffic()
    assert (up, down) == (6 * 10 * 4 * 8 // 40, 6 * 4 * 8)


def test_a_risky_sample_is_refused_unless_the_risk_is_accepted() -> None:
    settings = ["federation.clients=1000", "federation.byzantine=250", "federation.participation=0.012"]
    with pytest.raises(ConfigError, match=r"35\.\d% of the samples of 12.*federation.accept_risk"):
        Config().with_overrides(settings)
    accepted = Config().with_overrides([*settings, "federation.accept_risk=true"])
    assert accepted.risk == pytest.approx(0.351, abs=0.005)
    small = Config().with_overrides(["federation.clients=1000", "federation.byzantine=20", settings[2]])
    assert 0 < small.risk < 0.01


def test_a_sample_of_nothing_but_byzantine_clients_does_not_crash() -> None:
    simulation = simulate("federation.clients=4", "federation.byzantine=3", "federation.participation=0.25",
                          "federation.accept_risk=true", "aggregation.rule=median", "aggregation.beta=0")  # fmt: skip
    for _ in range(8):
        simulation.run_round()
    assert torch.isfinite(simulation.parameters.vector()).all()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    digests = [finished("rounds=8", f"seed={seed}").parameters.digest() for seed in (5, 5, 6, 5 + 2**32, 0)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_distribution_trains_with_every_estimator(distribution: str, estimator: str) -> None:
    settings = [f"method.distribution={distribution}", f"method.estimator={estimator}", "federation.attack=none"]
    settings += ["method.mu=0"] if estimator not in PROBING_ESTIMATORS else []
    settings += ["method.lr=0.1"] if distribution != "sphere" else ["method.lr=0.1", "method.mu=0.01"]
    simulation = simulate(*settings, "rounds=30")
    before = simulation.evaluate().loss
    for _ in range(30):
        simulation.run_round()
    assert simulation.evaluate().loss < 0.75 * before
    assert simulation.decided == 30


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["copy", "regenerate"])
def test_local_epochs_train_and_cost_e_times_the_numbers(memory: str) -> None:
    simulation = simulate("method.local_epochs=3", "method.k=4", f"method.local_memory={memory}", "rounds=15",
                          "federation.clients=6", "federation.byzantine=1", kind="mlp")  # fmt: skip
    before = simulation.evaluate().loss
    for _ in range(15):
        record = simulation.run_round()
        assert record.values is not None and record.values.shape == (12,)
    assert simulation.evaluate().loss < before
    assert simulation.traffic() == (15 * 4 * 12, 15 * 4 * 12)


def test_a_round_costs_4_bytes_a_number_each_way() -> None:
    assert finished("rounds=7", "method.k=5").traffic() == (7 * 4 * 5, 7 * 4 * 5)


def test_weights_stay_in_the_ball() -> None:
    free, held = (finished("rounds=25", f"method.projection_radius={radius}") for radius in (0, 0.8))
    assert free.parameters.vector().norm() > 1.0
    assert held.parameters.vector().norm() <= 0.8 * (1 + 1e-5)
    assert held.ledger.header.projection_radius == 0.8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_16_bit_weights_train(dtype: str, kind: str) -> None:
    simulation = simulate(f"task.dtype={dtype}", "method.mu=0.05", "rounds=40", "federation.attack=none", kind=kind)
    before = simulation.evaluate()
    for _ in range(40):
        simulation.run_round()
    assert simulation.evaluate().accuracy > max(0.6, before.accuracy + 0.15)
    assert all(p.dtype == getattr(torch, dtype) for p in simulation.parameters.tensors)


def test_small_updates_of_16_bit_weights_are_not_lost() -> None:
    start = simulate("task.dtype=bfloat16").parameters.vector()
    end = finished("task.dtype=bfloat16", "method.lr=1e-4", "method.mu=0.05", "rounds=40").parameters.vector()
    exact = finished("method.lr=1e-4", "rounds=40")
    wanted = exact.parameters.vector() - simulate().parameters.vector()
    along = torch.dot(end - start, wanted) / torch.dot(wanted, wanted)
    assert 0.3 < along < 2.0  # plain rounding keeps nearly nothing


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_of_each_round_is_in_the_ledger(schedule: str) -> None:
    simulation = finished(f"method.lr_schedule={schedule}", "rounds=10")
    shape = {
        "constant": lambda t: 1.0,
        "linear": lambda t: 1 - t / 10,
        "cosine": lambda t: 0.5 * (1 + np.cos(np.pi * t / 10)),
    }[schedule]
    assert [r.lr for r in simulation.ledger] == pytest.approx([0.1 * shape(t) for t in range(10)], rel=1e-12)


def test_two_thousand_clients_work() -> None:
    task = Blobs(samples=4000)
    simulation = simulate("federation.clients=2000", "federation.byzantine=500", "method.batch_size=2",
                          "federation.attack=none", task=task)  # fmt: skip
    before = simulation.evaluate().loss
    for _ in range(5):
        record = simulation.run_round()
        assert record.reported.all()
    assert simulation.evaluate().loss < before


class Overflowing(Blobs):
    """Losses that are NaN in some rounds."""

    bad = False

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().losses(outputs, targets) * (float("nan") if self.bad else 1.0)


@pytest.mark.filterwarnings("ignore:.* the losses of client 0 are not finite")
@pytest.mark.parametrize("attack", ["full_knowledge", "none"])
def test_rounds_without_finite_numbers_are_abandoned_and_leave_the_weights(attack: str) -> None:
    task = Overflowing()
    simulation = simulate(f"federation.attack={attack}", task=task)
    simulation.run_round()
    before = simulation.parameters.digest()
    task.bad = True
    for t in (1, 2):
        record = simulation.run_round()
        assert record.values is None and record.round == t
    assert simulation.parameters.digest() == before
    assert (simulation.round, simulation.decided) == (3, 1)
    task.bad = False
    assert simulation.run_round().values is not None
    assert simulation.traffic()[1] == 2 * 4 * 8


class OneBad(Blobs):
    """Samples of one class have infinite losses."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.where(targets == 0, torch.inf, super().losses(outputs, targets))


@pytest.mark.filterwarnings("ignore:.* the losses of client 0 are not finite")
def test_one_honest_client_with_infinite_losses_does_not_stop_the_others() -> None:
    settings = ("federation.partition=by_label", "federation.clients=12", "federation.byzantine=1")
    simulation = simulate(*settings, task=OneBad())
    record = simulation.run_round()
    assert record.values is not None
    assert 7 <= record.reported.sum() <= 10  # three of twelve clients hold class 0
    assert simulation.federator.rejections


def test_replaying_the_ledger_gives_the_simulations_weights() -> None:
    simulation = finished("rounds=12")
    again = Simulation(simulation.config, task=Blobs(), ledger=lambda _: simulation.ledger)
    again.catch_up(5)
    assert again.round == 5
    again.catch_up()
    assert (again.round, again.parameters.digest()) == (12, simulation.parameters.digest())
    assert again.traffic() == simulation.traffic() and again.decided == simulation.decided


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_run_that_is_gone_on_with_ends_as_if_never_interrupted(at: int, tmp_path: Any) -> None:
    whole = finished("rounds=12")
    path = tmp_path / "ledger.bin"
    first = Simulation(config("rounds=12"), task=Blobs(), ledger=lambda header: Ledger.create(path, header))
    for _ in range(at):
        first.run_round()
    first.ledger.close()
    second = Simulation(config("rounds=12"), task=Blobs(), ledger=lambda _: Ledger.open(path, writable=True))
    second.catch_up()
    assert second.round == at
    while second.round < 12:
        second.run_round()
    assert second.parameters.digest() == whole.parameters.digest()
    assert second.ledger.chain == whole.ledger.chain


def test_a_ledger_of_another_run_is_refused_by_naming_the_difference() -> None:
    ledger = simulate("method.k=4").ledger
    with pytest.raises(LedgerError, match=r"another run: it differs in .*k"):
        Simulation(config("method.k=8"), task=Blobs(), ledger=lambda _: ledger)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        simulate("device=cuda")


def test_byzantine_clients_see_exactly_what_honest_clients_send() -> None:
    simulation, seen = simulate("rounds=2"), []

    def copy_first(known: Knowledge) -> NDArray[np.float64]:
        seen.append(known.honest.copy())
        return np.tile(known.honest[0], (known.byzantine, 1))

    simulation._attack = copy_first
    simulation.run_round()
    honest = simulation.federator._values[~simulation.byzantine]
    np.testing.assert_array_equal(seen[0], honest.astype(np.float64))
    np.testing.assert_array_equal(simulation.federator._values[simulation.byzantine], np.tile(honest[:1], (3, 1)))


@pytest.mark.slow
@pytest.mark.mnist
def test_the_first_round_of_a_process_is_like_any_other() -> None:
    """In a fresh process with all its threads: what a resumed run measures must be what the first would have."""
    script = (
        "from cyber0 import Config, Simulation\n"
        "digests = set()\n"
        "for _ in range(3):\n"
        "    simulation = Simulation(Config(rounds=2))\n"
        "    simulation.run_round(), simulation.run_round()\n"
        "    digests.add(simulation.parameters.digest())\n"
        "print(len(digests))\n"
    )
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CYBER0_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


class Watching(Blobs):
    """A task that does not think of eval mode, with everything that a task may measure."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.modes: dict[str, bool] = {}

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        self.modes["evaluate"] = any(m.training for m in model.modules())
        return super().evaluate(model)

    def evaluate_more(self, model: nn.Module, loss: float, accuracy: float) -> dict[str, float]:
        self.modes["evaluate_more"] = any(m.training for m in model.modules())
        return {}

    def train_loss(self, model: nn.Module) -> float:
        self.modes["train_loss"] = any(m.training for m in model.modules())
        return 0.0


def test_a_task_evaluates_the_model_in_eval_mode_and_its_mode_comes_back() -> None:
    task = Watching()
    simulation = Simulation(config(), task=task)
    simulation.parameters.model.train()
    simulation.evaluate_more(simulation.evaluate())
    simulation.train_loss()
    assert task.modes == {"evaluate": False, "evaluate_more": False, "train_loss": False}
    assert all(m.training for m in simulation.parameters.model.modules())
