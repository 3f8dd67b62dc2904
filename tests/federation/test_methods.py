"""What cyber0 is compared with: each method does what its paper says, under any attack, rule and partition."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from synthetic import CLASSES, FEATURES, MODELS, After, Blobs, config, make_model, one_thread, own_config  # noqa: F401

from cyber0 import attacks
from cyber0.attacks import Knowledge
from cyber0.config import choices
from cyber0.config.files import load
from cyber0.config.registry import ATTACKS, PARTITIONS, PRE_AGGREGATIONS, RULES
from cyber0.config.schema import Config
from cyber0.directions import reference
from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.estimate.batches import Batch
from cyber0.estimate.gradients import Gradients
from cyber0.federation import methods
from cyber0.federation.methods import FedZO, FirstOrder, Mezo, VectorFederation
from cyber0.federation.simulation import Federation, Simulation
from cyber0.model.vector import Parameters
from cyber0.report.writer import ReportWriter
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run

VECTOR_METHODS = ("fedavg", "trimmed_mean", "krum", "fedzo")
HONEST = ("federation.byzantine=0",)


def make(method: str, *overrides: str, kind: str = "linear", task: Blobs | None = None) -> Any:
    return methods.make(config(f"method.name={method}", *overrides), task=task or Blobs(kind))


def finished(method: str, *overrides: str, kind: str = "linear", rounds: int = 0) -> Any:
    federation = make(method, *overrides, kind=kind)
    while federation.round < (rounds or federation.config.rounds):
        federation.run_round()
    return federation


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters() if p.requires_grad])


def plain_step(model: torch.nn.Module, task: Blobs, batch: Batch, lr: float) -> None:
    """One step of SGD, by hand."""
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = task.losses(task.outputs(model, batch.inputs), batch.targets).mean()
    with torch.no_grad():
        for p, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            if gradient is not None:
                p -= lr * gradient


# The methods.


def test_every_method_on_offer_is_there() -> None:
    assert list(methods.FEDERATIONS) == list(choices.METHODS)
    kinds = {name: type(make(name, *HONEST)) for name in choices.METHODS}
    assert kinds == {"cyber0": Simulation, "fedavg": FirstOrder, "trimmed_mean": FirstOrder, "krum": FirstOrder,
                     "fedzo": FedZO, "mezo": Mezo}  # fmt: skip


def test_a_federation_does_not_train_by_another_method() -> None:
    with pytest.raises(ConfigError, match=r"'fedavg' is not what Simulation does.*methods\.make"):
        Simulation(config("method.name=fedavg"), task=Blobs())


@pytest.mark.parametrize("kind", ["linear", "mlp", "half used"])
def test_fedavg_with_one_step_is_sgd_on_the_union_of_the_batches(kind: str) -> None:
    federation = make("fedavg", *HONEST, kind=kind)
    task, model = federation.task, copy.deepcopy(federation.parameters.model)
    everybody = np.arange(12)
    for t in range(5):
        plain_step(model, task, federation.samples.batch(everybody, t), 0.1)
        federation.run_round()
        assert torch.allclose(weights_of(federation.parameters.model), weights_of(model), atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "mlp", "branching"])
def test_local_steps_are_those_of_a_loop_over_the_clients(kind: str) -> None:
    federation = make("fedavg", *HONEST, "method.local_epochs=3", "method.lr_schedule=linear", kind=kind)
    task, model = federation.task, copy.deepcopy(federation.parameters.model)
    for t in range(3):
        ends = []
        for client in range(12):
            local = copy.deepcopy(model)
            for epoch in range(3):
                plain_step(local, task, federation.samples.batch(np.array([client]), t, epoch), federation.lr_at(t))
            ends.append(weights_of(local))
        mean = torch.stack(ends).mean(0)
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(mean, model.parameters())
        federation.run_round()
        assert torch.allclose(weights_of(federation.parameters.model), mean, atol=1e-6)


@pytest.mark.parametrize(("estimator", "other"), [("two_point", -1e-3), ("one_sided", 0.0)])
def test_fedzo_moves_by_the_mean_of_its_clients_own_estimates(estimator: str, other: float) -> None:
    federation = make("fedzo", *HONEST, "federation.clients=3", "method.k=4", "method.local_epochs=2",
                      f"method.estimator={estimator}", kind="mlp")  # fmt: skip
    task, start, d = federation.task, copy.deepcopy(federation.parameters.model), federation.parameters.dimension
    moves = []
    for client in range(3):
        w = weights_of(start)
        for epoch in range(2):
            batch = federation.samples.batch(np.array([client]), 0, epoch)
            estimate = torch.zeros(d)
            for r in range(4):
                z = torch.from_numpy(reference(0, 0, (client * 2 + epoch) * 4 + r, 0, d, "gaussian"))
                far, near = (loss_at(start, w + c * z, task, batch) for c in (1e-3, other))
                estimate += (far - near) / (1e-3 - other) / 4 * z
            w = w - 0.1 * estimate
        moves.append(w)
    federation.run_round()
    assert torch.allclose(weights_of(federation.parameters.model), torch.stack(moves).mean(0), atol=1e-3)
    assert not torch.allclose(weights_of(federation.parameters.model), weights_of(start), atol=1e-2)


def loss_at(model: torch.nn.Module, w: torch.Tensor, task: Blobs, batch: Batch) -> float:
    other = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(w, other.parameters())
    with torch.no_grad():
        return float(task.losses(task.outputs(other, batch.inputs), batch.targets).double().mean())


@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
def test_mezo_is_cyber0_with_one_client_that_has_everything(estimator: str) -> None:
    setting = f"method.estimator={estimator}"
    central = finished("mezo", *HONEST, setting)
    alone = Simulation(config(*HONEST, "federation.clients=1", "aggregation.rule=mean", setting), task=Blobs())
    while alone.round < 30:
        alone.run_round()
    assert central.parameters.digest() == alone.parameters.digest()
    assert central.traffic() == (0, 0)
    assert central.label_counts().tolist() == [[120] * CLASSES]


@pytest.mark.slow
@pytest.mark.parametrize("method", choices.METHODS)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_every_method_learns(method: str, kind: str) -> None:
    lr = "0.05" if method in ("fedzo", "mezo", "cyber0") else "0.1"
    federation = make(method, *HONEST, f"method.lr={lr}", "method.k=16", "federation.clients=5", kind=kind)
    before = federation.evaluate()
    for _ in range(30):
        federation.run_round()
    after = federation.evaluate()
    assert after.loss < before.loss and after.accuracy > before.accuracy + 0.1


# Gradients: three paths to the same result.


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("counts", [(4, 4, 4), (3, 1, 1, 5)])
def test_all_paths_give_the_gradients_of_each_client_alone(kind: str, counts: tuple[int, ...]) -> None:
    task, model = Blobs(kind), make_model(kind)
    parameters = Parameters(model)
    start, batch = parameters.digest(), task.batch(*counts)
    shifts = torch.linspace(-0.1, 0.1, len(counts))[:, None] * torch.cos(torch.arange(parameters.dimension))
    for at in (None, parameters.vector() + shifts):
        plain = Gradients(parameters, task)
        plain._linear = plain._batched = False
        slow, fast = plain.each(batch, at), Gradients(parameters, task).each(batch, at)
        assert slow.shape == (len(counts), parameters.dimension)
        assert torch.allclose(fast, slow, atol=1e-5)
        begin = 0
        for i, count in enumerate(counts):
            other = copy.deepcopy(model)
            if at is not None:
                trained = [p for p in other.parameters() if p.requires_grad]
                torch.nn.utils.vector_to_parameters(at[i], trained)
            before = weights_of(other)
            part = Batch(batch.inputs[begin : begin + count], batch.targets[begin : begin + count], np.array([count]))
            begin += count
            plain_step(other, task, part, 1.0)
            assert torch.allclose(before - weights_of(other), slow[i], atol=1e-5)
    assert parameters.digest() == start


def test_the_path_of_a_model_is_the_fastest_that_fits() -> None:
    paths = {}
    for kind in ("linear", "mlp", "branching"):
        task = Blobs(kind)
        gradients = Gradients(Parameters(make_model(kind)), task)
        gradients.each(task.batch(4, 4))
        paths[kind] = (gradients._linear, gradients._batched)
    assert paths == {"linear": (True, True), "mlp": (False, True), "branching": (False, False)}


def test_a_use_of_weights_that_batching_misses_is_found() -> None:
    class Hidden(torch.nn.Module):
        """Uses its weights through a view from before, which nothing can replace."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = torch.nn.Linear(FEATURES, 8), torch.nn.Linear(8, CLASSES)
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.first(x))) * self.seen[0].sum()

    task, model = Blobs(), Hidden()
    model.load_state_dict({n: torch.cos(torch.arange(t.numel())).view(t.shape) for n, t in model.state_dict().items()})
    parameters = Parameters(model)
    model.seen.append(model.first.weight.T)
    gradients = Gradients(parameters, task)
    rows = gradients.each(task.batch(4, 4))
    plain = Gradients(parameters, task)
    plain._batched = False
    assert not gradients._batched and torch.equal(rows, plain.each(task.batch(4, 4)))


@pytest.mark.parametrize("kind", ["linear", "no bias", "frozen backbone", "mlp"])
def test_the_gradient_over_all_samples_is_the_mean_of_the_clients_own(kind: str) -> None:
    task, parameters = Blobs(kind), Parameters(make_model(kind))
    gradients, batch = Gradients(parameters, task), task.batch(300, 20, 160)
    shares = torch.from_numpy(np.repeat(1 / (3 * batch.counts), batch.counts).astype(np.float32))
    for _ in range(2):  # what is kept of the first time serves at other weights
        whole = gradients.of_all(task.train_inputs, task.train_targets, shares)
        assert torch.allclose(whole, gradients.each(batch).mean(0), atol=1e-6)
        parameters.set_vector(parameters.vector() + 0.1 * torch.cos(torch.arange(parameters.dimension)))


# Any attack, any rule, any partition.


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", ["krum", "fedzo"])
def test_every_attack_works_on_vectors(attack: str, method: str) -> None:
    federation = finished(method, f"federation.attack={attack}", "aggregation.beta=0.25", rounds=2)
    assert federation.round == 2 and federation.decided == 2
    assert bool(torch.isfinite(federation.w).all())


@pytest.mark.parametrize("before", PRE_AGGREGATIONS)
@pytest.mark.parametrize("rule", [name for name in RULES if not RULES.entry(name).traits["history"]])
def test_every_rule_works_on_vectors(rule: str, before: str) -> None:
    chosen = (f"aggregation.rule={rule}", f"aggregation.before={before}", "aggregation.beta=0.1")
    federation = make("fedavg", *chosen, "federation.byzantine=1", "federation.attack=sign_flip")
    start = federation.evaluate()
    for _ in range(15):
        federation.run_round()
    assert federation.decided == 15
    assert federation.evaluate().loss < start.loss


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("method", ["fedavg", "fedzo", "mezo"])
def test_every_partition_works(partition: str, method: str) -> None:
    federation = finished(method, *HONEST, f"federation.partition={partition}", "federation.alpha=0.3", rounds=3)
    assert federation.decided == 3


def test_robust_rules_withstand_what_the_mean_does_not() -> None:
    attacked = ("federation.attack=sign_flip", "federation.byzantine=3")
    plain, trimmed, krum = (finished(name, *attacked).evaluate() for name in ("fedavg", "trimmed_mean", "krum"))
    assert trimmed.accuracy > 0.75 and krum.accuracy > 0.75
    assert plain.loss > trimmed.loss


def test_broken_reports_count_as_not_sent_and_too_few_end_the_round() -> None:
    federation = make("fedavg", "federation.attack=nonfinite", "aggregation.rule=trimmed_mean")
    federation.run_round()
    assert federation.decided == 1
    assert sum(federation.federator.rejections.values()) == 3  # NaN, inf, -inf
    federation._attack = lambda known: np.full((known.byzantine, known.honest.shape[1]), np.nan)
    federation.run_round()
    assert sum(federation.federator.rejections.values()) == 6
    needy = make("fedavg", "federation.attack=nonfinite", "serve.quorum=12")
    start = needy.parameters.digest()
    needy.run_round()
    assert (needy.round, needy.decided, needy.parameters.digest()) == (1, 0, start)


def test_the_byzantine_clients_know_the_rule_in_force_and_see_d_numbers() -> None:
    seen: list[Knowledge] = []

    def spy(known: Knowledge) -> NDArray[np.float64]:
        seen.append(known)
        return np.zeros((known.byzantine, known.honest.shape[1]))

    federation = make("krum")
    federation._attack = spy
    federation.run_round()
    (known,) = seen
    assert known.honest.shape == (9, 68) and known.truth is None and known.decide is not None
    decided = known.decide(np.concatenate([known.honest, np.zeros((3, 68))]))
    assert torch.allclose(federation.w, Parameters(make_model("linear")).vector() - 0.1 * torch.tensor(decided).float())


def test_who_was_trimmed_is_counted_in_numbers() -> None:
    federation = finished("trimmed_mean", rounds=4)
    assert (federation.federator.sent == 4 * 68).all()
    assert federation.federator.trimmed.sum() == 4 * 68 * 6
    picked = finished("krum", "federation.attack=sign_flip", rounds=4).federator.trimmed
    assert picked.sum() == 4 * 68 * 11 and set(picked.tolist()) <= {n * 68 for n in range(5)}


@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_d_numbers_go_up_and_down_for_everyone_who_is_asked(method: str) -> None:
    assert finished(method, *HONEST, rounds=3).traffic() == (3 * 4 * 68, 3 * 4 * 68)
    some = make(method, *HONEST, "federation.participation=0.75", "aggregation.beta=0.2")
    record = some.run_round()
    assert record.reported.sum() == 9
    assert some.traffic() == (9 * 4 * 68 // 12, 9 * 4 * 68 // 12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("method", ["fedavg", "fedzo"])
def test_small_updates_of_16_bit_weights_are_not_lost(method: str, dtype: str) -> None:
    settings = ("method.lr=1e-5", "method.mu=0.05", "method.local_epochs=2", "federation.clients=3")
    federation = make(method, *HONEST, *settings, f"task.dtype={dtype}", kind="mlp")
    start = federation.w.clone()
    for _ in range(5):
        federation.run_round()
    assert 0 < float((federation.w - start).norm()) < 1e-2
    assert torch.equal(federation.parameters.vector(), federation.w.to(getattr(torch, dtype)).float())


def test_the_weights_stay_in_their_ball() -> None:
    federation = finished("fedavg", *HONEST, "method.projection_radius=0.5", rounds=5)
    assert float(federation.w.norm()) == pytest.approx(0.5, rel=1e-5)


def test_d_numbers_travel_as_float32_whatever_the_codec() -> None:
    coarse, plain = (finished("fedavg", f"serve.codec={codec}", rounds=3) for codec in ("log8", "float32"))
    assert coarse.parameters.digest() == plain.parameters.digest()
    assert coarse.traffic() == plain.traffic()


# The truth.


def known_to_attackers(method: str, *overrides: str) -> tuple[Knowledge, Any]:
    seen: list[Knowledge] = []
    federation = make(method, "federation.attack=fang_trimmed_mean", "federation.attack_sign=truth", *overrides)
    attack = federation._attack
    federation._attack = lambda known: (seen.append(known), attack(known))[1]
    federation.run_round()
    return seen[0], federation


@pytest.mark.parametrize(("method", "mode"), [("fedavg", "shared"), ("cyber0", "shared"), ("cyber0", "chained")])
def test_the_truth_is_what_the_honest_send_had_they_measured_on_all_they_have(method: str, mode: str) -> None:
    everything = ("method.batch_size=480", "federation.partition=dirichlet", "method.estimator=gradient")
    exact, _ = known_to_attackers(method, *everything, f"serve.seed_mode={mode}")
    assert exact.truth is not None
    assert np.allclose(exact.truth, exact.honest.mean(axis=0), atol=1e-5)
    if mode == "chained":  # other settings, so other directions
        return
    noisy, _ = known_to_attackers(method, "federation.partition=dirichlet", "method.estimator=gradient")
    assert noisy.truth is not None and np.allclose(noisy.truth, exact.truth, atol=1e-5)
    assert not np.allclose(noisy.truth, noisy.honest.mean(axis=0), atol=1e-3)


def test_the_truth_of_cyber0_covers_every_local_epoch() -> None:
    known, _ = known_to_attackers("cyber0", "method.local_epochs=2", "method.distribution=sphere")
    assert known.truth is not None and known.truth.shape == (16,) == known.honest.shape[1:]


@pytest.mark.parametrize("attack", ["fang_krum", "fang_trimmed_mean"])
def test_attacks_can_take_their_sign_from_the_truth(attack: str) -> None:
    known, _ = known_to_attackers("fedavg", "method.batch_size=2")
    assert known.truth is not None
    differs = np.sign(known.truth) != np.sign(known.honest.mean(axis=0))
    assert differs.any()
    by_truth, by_honest = (attacks.make(attack, {"sign_from": sign})(known) for sign in ("truth", "honest"))
    assert np.array_equal(by_truth[:, ~differs], by_honest[:, ~differs]) or attack == "fang_krum"
    assert (by_truth[:, differs] != by_honest[:, differs]).all()


# Settings.


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(overrides=overrides)
    return str(error.value)


def test_the_rule_is_the_methods_own_unless_another_is_asked_for() -> None:
    own = {"cyber0": "trimmed_mean", "fedavg": "mean", "trimmed_mean": "trimmed_mean", "krum": "krum", "fedzo": "mean",
           "mezo": "mean"}  # fmt: skip
    for method, rule in own.items():
        for made in (load(overrides=[f"method.name={method}", *HONEST]),
                     Config().with_overrides([f"method.name={method}", *HONEST])):  # fmt: skip
            assert made.aggregation.rule == rule
    assert load(overrides=["method.name=fedzo", "aggregation.rule=median"]).aggregation.rule == "median"
    median = Config().with_overrides(["aggregation.rule=median"])
    assert median.with_overrides(["method.name=fedavg"]).aggregation.rule == "median"


def test_a_method_named_after_a_rule_takes_no_other() -> None:
    message = refused("method.name=krum", "aggregation.rule=median")
    assert "aggregation.rule = 'median'" in message and 'method.name = "fedavg"' in message


def test_central_training_has_no_byzantine_clients_no_sampling_and_no_rule() -> None:
    assert "federation.byzantine = 0" in refused("method.name=mezo")
    assert "federation.participation" in refused("method.name=mezo", *HONEST, "federation.participation=0.5")
    assert "aggregation.rule" in refused("method.name=mezo", *HONEST, "aggregation.rule=krum")
    assert load(overrides=["method.name=mezo", "federation.attack=none"]).method.name == "mezo"


def test_more_directions_than_there_are_for_all_clients_of_fedzo_are_refused() -> None:
    message = refused("method.name=fedzo", "method.k=100000", "federation.clients=168")
    assert "federation.clients = 168" in message and "method.k" in message
    assert load(overrides=["method.name=fedzo", "method.k=100000", "federation.clients=167"]).method.k == 100000


# Runs.

SETTINGS = ("rounds=23", "evaluate_every=5", "method.lr_schedule=cosine", "federation.attack=random_choice")


def settings(method: str, *overrides: str) -> Config:
    return own_config(f"method.name={method}", *SETTINGS, *(HONEST if method == "mezo" else ()), *overrides)


def results_of(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [tuple(v for name, v in row.items() if name != "seconds") for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "mezo"])
def test_the_folder_is_complete(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = Run.start(settings(method), folder).run([ReportWriter()])
    kept = "ledger.bin" if method == "mezo" else "state.safetensors"
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        "config.toml", "w0.safetensors", "model.safetensors", kept, "partition.csv", "metrics.csv", "clients.csv",
        "sources.json",
        "summary.json", "report.html", "plots/accuracy.png", "plots/suspects.png", "plots/partition.png"}  # fmt: skip
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (summary["method"], summary["rounds"], summary["dimension"]) == (method, 23, 68)
    assert summary["uplink_bytes_per_client"] == (0 if method == "mezo" else 23 * 4 * 68)
    assert load(folder / "config.toml") == settings(method)


def test_the_state_is_the_model_by_name(tmp_path: Path) -> None:
    run = Run.start(settings("fedavg"), tmp_path / "run")
    run.run()
    saved = load_file(tmp_path / "run/state.safetensors")
    model = run.simulation.parameters.model
    assert {name: t.tolist() for name, t in saved.items()} == {n: p.tolist() for n, p in model.named_parameters()}


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 12, 23])
@pytest.mark.parametrize("method", ["trimmed_mean", "fedzo", "mezo"])
def test_an_interrupted_run_ends_as_if_it_never_was(method: str, at: int, tmp_path: Path) -> None:
    partly = () if method == "mezo" else ("federation.participation=0.8", "federation.accept_risk=true")
    chosen = settings(method, *partly)
    whole = Run.start(chosen, tmp_path / "whole").run()

    with pytest.raises(Killed):
        Run.start(chosen, tmp_path / "run").run([After(at, Killed())])
    summary = Run.resume(tmp_path / "run").run()
    for key in ("model_digest", "uplink_bytes_per_client", "rejected_reports", "final_loss"):
        assert summary[key] == whole[key], key
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    assert (tmp_path / "run/clients.csv").read_text() == (tmp_path / "whole/clients.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 12, 23])
def test_reports_that_were_rejected_before_a_kill_are_counted_after_it(at: int, tmp_path: Path) -> None:
    chosen = settings("trimmed_mean", "federation.attack=nonfinite")
    whole = Run.start(chosen, tmp_path / "whole").run()
    assert whole["rejected_reports"]["not_finite"] > 23

    with pytest.raises(Killed):
        Run.start(chosen, tmp_path / "run").run([After(at, Killed())])
    assert Run.resume(tmp_path / "run").run()["rejected_reports"] == whole["rejected_reports"]
    (tmp_path / "run/metrics.csv").unlink()  # its rows are made again by playing from the start
    assert Run.resume(tmp_path / "run").run()["rejected_reports"] == whole["rejected_reports"]


def test_evaluations_that_were_lost_are_made_again(tmp_path: Path) -> None:
    whole = Run.start(settings("fedavg"), tmp_path / "run").run()
    expected = results_of(tmp_path / "run")
    (tmp_path / "run/metrics.csv").unlink()
    assert Run.resume(tmp_path / "run").run()["model_digest"] == whole["model_digest"]
    assert results_of(tmp_path / "run") == expected


def test_an_interrupt_between_decision_and_commit_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, whole = make("trimmed_mean"), finished("trimmed_mean", rounds=3)
    cut.run_round()
    with monkeypatch.context() as patch:
        patch.setattr(VectorFederation, "apply", lambda self, record: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cut.run_round()
    cut.run_round()
    assert (cut.round, cut.decided, cut.traffic()) == (3, 3, whole.traffic())
    assert cut.parameters.digest() == whole.parameters.digest()


def test_an_interrupt_while_measuring_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, whole = (make("fedzo", "method.local_epochs=2") for _ in range(2))
    losses, calls = cut.task.losses, [0]

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 20:
            raise KeyboardInterrupt
        return losses(*arguments)

    monkeypatch.setattr(cut.task, "losses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cut.run_round()
    assert cut.parameters.digest() == whole.parameters.digest()
    cut.run_round()
    whole.run_round()
    assert cut.parameters.digest() == whole.parameters.digest()


def test_a_folder_with_a_run_of_any_method_is_not_started_in(tmp_path: Path) -> None:
    Run.start(settings("fedavg", "rounds=1"), tmp_path / "run").run()
    for method in ("fedavg", "cyber0"):
        with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
            Run.start(settings(method, "rounds=1"), tmp_path / "run")


def test_one_process_at_a_time_writes_a_state(tmp_path: Path) -> None:
    run = Run.start(settings("fedavg"), tmp_path / "run")
    with pytest.raises(LedgerError, match="being written by another process"):
        Run.resume(tmp_path / "run")
    run.simulation.close()
    Run.resume(tmp_path / "run").simulation.close()


def test_a_state_of_another_run_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    Run.start(settings("fedavg"), tmp_path / "run").run()
    file = tmp_path / "run/config.toml"
    text = file.read_text()
    file.write_text(text.replace("batch_size = 16", "batch_size = 17"))
    with pytest.raises(LedgerError, match=r"another run: it differs in method\.batch_size \(now 17, on record 16\)"):
        Run.resume(tmp_path / "run")
    file.write_text(text)
    (tmp_path / "run/state.safetensors").write_bytes(b"junk")
    with pytest.raises(DataError, match="can't be read as the state of a run"):
        Run.resume(tmp_path / "run")


def test_a_run_without_a_ledger_says_so_when_it_is_to_be_replayed(tmp_path: Path) -> None:
    Run.start(settings("krum", "rounds=1"), tmp_path / "run").run()
    with pytest.raises(LedgerError, match=r"method without a ledger.*state\.safetensors"):
        rebuild(tmp_path / "run")


def test_the_face_is_complete() -> None:
    for kind in methods.FEDERATIONS.values():
        assert issubclass(kind, Federation) and not kind.__abstractmethods__


@pytest.mark.mnist
def test_fedavg_learns_mnist() -> None:
    federation = methods.make(load(overrides=["method.name=fedavg", "federation.byzantine=0"]))
    while federation.round < 60:
        federation.run_round()
    assert federation.evaluate().accuracy > 0.8
