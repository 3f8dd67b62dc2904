"""Optimizers with vectors beside w: what they compute, and that their vectors go wherever the weights go."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from synthetic import Blobs
from synthetic import config as blobs_config

from cyber0 import Simulation, ZeroOrder
from cyber0.config import Config
from cyber0.directions import Directions, DirectionSpace, Probe, Step, definition, moments
from cyber0.directions.backends import moment_kernels
from cyber0.directions.definition import GAUSSIAN_REACH
from cyber0.errors import ConfigError, LedgerError, ModelError
from cyber0.estimate import batched
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.gradients import project
from cyber0.ledger.rates import AgreedRates
from cyber0.ledger.record import Decision
from cyber0.model.blocks import perturbed
from cyber0.model.cuda_graphs import CapturedGraphs
from cyber0.model.vector import Parameters
from cyber0.optimizers import OPTIMIZERS, make
from cyber0.protocol.client import replay
from cyber0.serve.conduct import FederatorCheck, Misconduct
from cyber0.serve.participant import Participant
from cyber0.serve.snapshots import SnapshotError, load_snapshot, save_snapshot
from cyber0.serve.state import MemoryState, RecordState

WITH_VECTORS = [name for name in OPTIMIZERS if make(name).vectors]
SETTINGS = ("rounds=8", "task.dtype=bfloat16", "method.lr=0.02")


def simulation(name: str, *more: str) -> Simulation:
    return Simulation(blobs_config(*SETTINGS, f"method.optimizer={name}", *more), task=Blobs())


def trained(name: str, *more: str, rounds: int = 6) -> Simulation:
    made = simulation(name, *more)
    for _ in range(rounds):
        made.run_round()
    return made


def updates(name: str, rows: list[list[float]], lr: float = 0.1, options: dict[str, Any] | None = None) -> np.ndarray:
    """Return by what w moves in each round, by the definition, for directions that are the unit vectors."""
    optimizer = make(name, options)
    state, d = optimizer.start(), len(rows[0])
    held = tuple(np.full(d, start, np.float32) for start in optimizer.vectors.values())
    found = []
    for row in rows:
        update = optimizer.step(state, lr, np.float32(row), 1)
        state = update.state
        rule, constants = moments.rule_of(update.elementwise)
        by, held = rule.move(moments.bounded(update.coefficients), held, constants)
        found.append(by)
    return np.array(found, np.float64)


def test_momentum_is_a_running_mean_of_the_steps_of_sgd() -> None:
    rows, m, expected = [[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]], np.zeros(2), []
    for row in rows:
        m = 0.8 * m + 0.2 * 0.1 * np.array(row)
        expected.append(m)
    np.testing.assert_allclose(updates("momentum", rows, options={"beta": 0.8}), expected, rtol=1e-6)


def test_momentum_without_memory_is_sgd() -> None:
    sgd, plain = simulation("sgd"), simulation("momentum", "method.optimizer_options.beta=0.0")
    for made in (sgd, plain):
        for _ in range(4):
            made.run_round()
    assert sgd.parameters.digest() == plain.parameters.digest()


def test_adam_is_adam_on_the_estimated_gradient() -> None:
    rows = [[1.0, -2.0, 0.0], [3.0, 0.5, 1e-3], [-1.0, 4.0, 0.0]]
    options = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    theirs, expected = torch.optim.Adam([w], lr=0.1, betas=(0.8, 0.95), eps=1e-3), []
    for row in rows:
        before, w.grad = w.detach().clone(), torch.tensor(row, dtype=torch.float64)
        theirs.step()
        expected.append((before - w.detach()).numpy())
    np.testing.assert_allclose(updates("adam", rows, options=options), expected, rtol=1e-5, atol=1e-9)


def test_a_first_step_of_adam_has_the_length_lr_in_every_coordinate() -> None:
    found = updates("adam", [[1e-3, -5.0, 1e6]], lr=0.25)
    np.testing.assert_allclose(found, [[0.25, -0.25, 0.25]], rtol=1e-4)


def test_hessian_divides_the_update_by_a_root_that_follows_its_square() -> None:
    rows, h, expected = [[1.0, -20.0], [3.0, 0.5], [-1.0, 40.0]], np.ones(2), []
    for row in rows:
        step = np.array(row) / np.sqrt(h)
        h = 0.9 * h + 0.1 * (step**2 + 0.05)
        expected.append(0.1 * step)
    options = {"nu": 0.1, "floor": 0.05}
    np.testing.assert_allclose(updates("hessian", rows, options=options), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("hessian", {"nu": 0.0}, "nu = 0.0 must be at least 1e-06 and at most 1"),
        ("hessian", {"floor": 2.0}, "floor = 2.0 must be at least 1e-12 and at most 1"),
        ("momentum", {"beta": 1.0}, "beta = 1.0 must be at least 0 and at most 0.999999"),
        ("adam", {"beta1": 0.9, "beta2": 0.5}, "beta1 = 0.9 must be at most beta2 = 0.5"),
        ("adam", {"eps": 0.0}, "eps = 0.0 must be at least 1e-12"),
        ("adam", {"beta2": 1.0}, "beta2 = 1.0 must be"),
    ],
)
def test_options_by_which_steps_would_have_no_limit_are_refused(
    name: str, options: dict[str, float], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        make(name, options)


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_no_weight_moves_further_than_the_reach(name: str) -> None:
    rng, optimizer, lr = np.random.default_rng(5), make(name), 0.3
    rows = [rng.normal(size=6) * 10.0 ** rng.integers(-30, 5) for _ in range(200)]
    rows[50:60] = [np.zeros(6)] * 10
    moved = np.abs(updates(name, [row.tolist() for row in rows], lr)).max(axis=1) * GAUSSIAN_REACH
    carried = 0.0
    for row, by in zip(rows, moved, strict=True):
        reach = optimizer.reach(lr, np.float32(row), 1, GAUSSIAN_REACH)
        carried = max(carried, reach) if optimizer.carries else reach
        assert by / GAUSSIAN_REACH <= carried * (1 + 1e-6)


# Scaled directions.


def curved(model: torch.nn.Module, **options: Any) -> Parameters:
    """Return weights beside which there is an h of 4 for the first parameter, 16 for the others."""
    parameters = Parameters(model, **options)
    parameters.hold_vectors(make("hessian").vectors)
    h = parameters.moments.vectors["h"].fill_(16.0)
    h[: parameters.layout[0].size] = 4.0
    return parameters


def small(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).to(dtype)


def test_every_way_to_draw_directions_draws_scaled_ones() -> None:
    plain, scaled = Parameters(small()), curved(small())
    roots = scaled.moments.vectors["h"].sqrt()
    expected = plain.directions(1, 2, 3, 4) / roots
    assert torch.equal(scaled.directions(1, 2, 3, 4), expected)
    parts = [part.reshape(4, -1) for part in scaled.direction_tensors(1, 2, 3, 4)]
    assert torch.equal(torch.cat(parts, 1), expected) and scaled._drawn is None
    gradient = [torch.full_like(p, 1.0) for p in scaled.tensors]
    np.testing.assert_allclose(
        project(scaled, gradient, Directions(1, 2, 4, 3)), expected.sum(1).double(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_probe_and_steps_before_it_are_along_scaled_directions(dtype: torch.dtype) -> None:
    scaled = curved(small(dtype))
    step, probe = Step(5, 1, np.float32([0.25, -0.5])), Probe(5, 2, 1, 0.125)
    z = [scaled.directions(5, t, j, 1)[0] for t, j in ((1, 0), (1, 1), (2, 1))]
    expected = scaled.vector() - 0.25 * z[0] + 0.5 * z[1] + 0.125 * z[2]
    weight_pass = scaled.weight_pass(probe, [step])
    found = torch.cat([perturbed(s, weight_pass).float() for s in scaled.segments])
    torch.testing.assert_close(found, expected.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    before = scaled.digest()
    x = torch.ones(2, 4, dtype=dtype)
    with torch.no_grad(), scaled.perturbed(probe, [step]):
        outputs = scaled.model(x)
    twin = Parameters(small(dtype))
    twin.set_vector(expected)
    with torch.no_grad():
        torch.testing.assert_close(outputs, twin.model(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
    assert scaled.digest() == before


@pytest.mark.parametrize("estimator", ["two_point", "one_sided", "gradient", "forward"])
@pytest.mark.parametrize("model", ["linear", "batched", "streamed"])
def test_slopes_are_those_along_scaled_directions(model: str, estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.nn.Linear(4, 1) if model == "linear" else small()
    if model == "streamed":
        monkeypatch.setattr(batched, "BATCHED_DIMENSION", 0)
    parameters, x, y = curved(made), torch.randn(8, 4), torch.randn(8)
    evaluator = Evaluator(parameters, SquaredError(), estimator, 1e-3)
    directions = Directions(7, 3, 5)
    found = evaluator.estimate(Batch(x, y, np.array([8])), directions)[0]
    loss = SquaredError().losses(SquaredError().outputs(made, x), y).mean()
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters.tensors)])
    expected = parameters.directions(7, 3, 0, 5) @ gradient
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0.05, atol=0.02)


class SquaredError:
    def outputs(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        return model(inputs)[:, 0]

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square()


def test_a_pass_along_scaled_directions_is_never_captured() -> None:
    parameters = curved(small())
    graphs = CapturedGraphs(parameters, lambda: torch.zeros(1))
    graphs._able = True
    with torch.no_grad():
        assert not graphs._capturable(())
        parameters.hold_vectors({})
        assert graphs._capturable(())
        parameters.hold_vectors(make("hessian").vectors)
    with pytest.raises(NotImplementedError, match="never captured"):
        parameters.weight_pass(Probe(1, 2, 3, 0.1)).renew((), None)


def test_the_vectors_of_adam_scale_no_direction() -> None:
    parameters = Parameters(small())
    expected = parameters.directions(1, 2, 3, 2)
    parameters.hold_vectors(make("adam").vectors)
    assert torch.equal(parameters.directions(1, 2, 3, 2), expected)


# Vectors go where the weights go.


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", WITH_VECTORS)
def test_one_commit_at_a_time_and_a_replay_in_one_pass_give_the_same_vectors(name: str, storage: str) -> None:
    run, fresh = trained(name, f"task.dtype={storage}"), simulation(name, f"task.dtype={storage}")
    replay(run.ledger.header, fresh.parameters, run.ledger)
    assert fresh.parameters.digest() == run.parameters.digest()
    assert fresh.parameters.vectors_digest() == run.parameters.vectors_digest() != ""
    fresh.client.move_to(run_start(run), 0, fresh.client.chain)
    replay(run.ledger.header, fresh.parameters, run.ledger)  # the vectors start again with the weights
    assert fresh.parameters.vectors_digest() == run.parameters.vectors_digest()


def run_start(run: Simulation) -> dict[str, torch.Tensor]:
    start = Simulation(run.config, task=Blobs()).parameters
    return {name: t.clone() for name, t in start.state().items()}


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_weights_on_a_ball_and_their_vectors_are_replayed_too(name: str) -> None:
    settings = ("method.projection_radius=0.05", "task.dtype=float32")
    run, free, fresh = trained(name, *settings), trained(name, "task.dtype=float32"), simulation(name, *settings)
    fresh.client.catch_up(run.ledger.records(0))
    assert fresh.client.digest() == run.client.digest() != free.client.digest()
    assert float(run.parameters.vector().norm()) <= 0.05 * (1 + 1e-6)


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_the_digest_of_a_client_covers_every_vector(name: str) -> None:
    client = trained(name).client
    before = client.digest()
    assert before != client.parameters.digest()
    for vector in client.parameters.moments.vectors.values():
        vector[3] += 1.0
        assert client.digest() != before
        vector[3] -= 1.0
    plain = trained("sgd").client
    assert plain.digest() == plain.parameters.digest()


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_an_interrupted_commit_is_noticed_and_restored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[torch.nn.Module, ZeroOrder]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        return model, ZeroOrder(model, lr=0.1, k=2, optimizer=name)

    (model, optimizer), (twin, undisturbed), x = made(), made(), torch.randn(8, 4)
    start = {key: t.clone() for key, t in optimizer.parameters.state().items()}
    optimizer.step(lambda: model(x).square().mean())
    calls, kernel = [0], moment_kernels.advance32

    def interrupted(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        kernel(*arguments)

    monkeypatch.setattr(moment_kernels, "advance32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lambda: model(x).square().mean())
    monkeypatch.undo()
    for use in (lambda: optimizer.step(lambda: model(x).square().mean()), optimizer.parameters.vectors_digest):
        with pytest.raises(ModelError, match="interrupted half way"):
            use()
    optimizer.restore(start)
    for _ in range(2):
        undisturbed.step(lambda: twin(x).square().mean())
    assert optimizer.parameters.digest() == undisturbed.parameters.digest()
    assert optimizer.parameters.vectors_digest() == undisturbed.parameters.vectors_digest()


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_loading_weights_starts_the_vectors_again_and_others_are_refused(name: str) -> None:
    run, fresh = trained(name), simulation(name)
    start = run_start(run)
    for wrong in ({}, {"x": torch.zeros(3)}, {key: torch.zeros(3) for key in make(name).vectors}):
        with pytest.raises(ModelError, match="the optimizer's vectors are"):
            run.parameters.load(start, wrong)
    run.parameters.load(start)
    assert run.parameters.vectors_digest() == fresh.parameters.vectors_digest()


def test_weights_that_need_no_vectors_drop_those_of_another_optimizer() -> None:
    run = trained("momentum")
    run.parameters.hold_vectors({})
    assert run.parameters.vectors_digest() == "" and not run.parameters.moments.vectors


# Snapshots.


def participant(name: str, state: Any = None) -> Participant:
    client = simulation(name).client
    w0 = {key: t.clone() for key, t in client.parameters.state().items()}
    return Participant(client, state or MemoryState(), 0, start=lambda: w0)


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_a_client_continues_from_a_snapshot_with_the_bits_of_a_replay(name: str, tmp_path: Path) -> None:
    run, early = trained(name), participant(name)
    early.client.catch_up(run.ledger.records(0, 4))
    save_snapshot(tmp_path / "s.safetensors", early.client, early.run)
    late = participant(name)
    late.resume_from(load_snapshot(tmp_path / "s.safetensors"))
    late.client.catch_up(run.ledger.records(4))
    assert late.client.digest() == run.client.digest()
    record: dict[str, Any] = {}
    early.state = RecordState(record, early.run, 0)
    early.save()
    again = participant(name, RecordState(record, early.run, 0))
    snapshot = again.state.snapshot()
    assert snapshot is not None
    again.resume_from(snapshot)
    again.client.catch_up(run.ledger.records(4))
    assert again.client.digest() == run.client.digest()


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_a_snapshot_whose_vectors_are_damaged_is_refused(name: str, tmp_path: Path) -> None:
    run, path = trained(name), tmp_path / "s.safetensors"
    vector = "." + list(make(name).vectors)[-1]
    changes = {
        "what it holds has the digest": lambda v: v + torch.eye(1, len(v))[0],
        "is not finite": lambda v: v * torch.inf + torch.inf,
        r"vector '\w' is \(\(\d+, 1\), 'float32'\)": lambda v: v.view(-1, 1),
        "'float64'": lambda v: v.double(),
        "absent, and in the run": lambda v: None,
    }
    for fault, change in changes.items():
        save_snapshot(path, run.client, participant(name).run)
        with safe_open(path, "pt") as file:
            stated, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
        changed = change(tensors.pop(vector))
        save_file({**tensors, **({} if changed is None else {vector: changed})}, path, stated)
        fresh = participant(name)
        before = fresh.client.digest()
        with pytest.raises(SnapshotError, match=fault):
            fresh.resume_from(load_snapshot(path))
        assert fresh.client.digest() == before


def test_a_snapshot_without_vectors_is_refused_by_a_run_that_has_some_and_the_other_way_round(tmp_path: Path) -> None:
    for kind, other in (("sgd", "momentum"), ("momentum", "sgd")):
        path, mine = tmp_path / kind, participant(other)
        save_snapshot(path, trained(kind).client, mine.run)
        with pytest.raises(SnapshotError, match="optimizer's vector 'm'"):
            mine.resume_from(load_snapshot(path))


def test_a_record_stores_weights_only_if_they_and_their_vectors_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    dimension = participant("sgd").client.parameters.dimension
    monkeypatch.setattr("cyber0.serve.state.RECORD_BYTES", 4 * dimension)
    for name, stored in (("sgd", True), ("momentum", False)):
        record: dict[str, Any] = {}
        mine = participant(name)
        RecordState(record, mine.run, 0).save(mine.client, mine.run)
        assert ("weights" in record) == stored


# What a federator may do.


def test_a_client_counts_what_momentum_still_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    header = dataclasses.replace(simulation("momentum", "task.dtype=float16").ledger.header, k=1, local_epochs=1)
    full, carried = [0.0], [0.0]
    check = FederatorCheck(header, AgreedRates(header), invited=1, fullness=lambda: full[0], carried=lambda: carried[0])
    large = Decision(0, 1.0, np.float32([8000.0]), bytes(32), 8)  # up to 38,709 of 65,504 a weight
    small = Decision(1, 1.0, np.float32([1.0]), bytes(32), 8)
    assert not check.fits(large)
    check.look(large)
    assert not check.fits(small)  # m may be as large as before, and the weights too
    full[0], carried[0] = 0.5, 30000.0
    check.look(small)
    assert not check.fits(small)
    full[0] = 0.6
    with pytest.raises(Misconduct, match="may change a weight by 30000"):
        check.look(small)


def test_adams_lr_can_not_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"method\.lr = \"auto\" can't be used with method\.optimizer = 'adam'"):
        Config().with_overrides(["method.optimizer=adam", "method.lr=auto"])
    with pytest.raises(ValueError, match="lr=\"auto\" can't be used with optimizer='adam'; set lr to a number"):
        ZeroOrder(small(), lr="auto", optimizer="adam")
    ZeroOrder(small(), lr="auto", optimizer="momentum")


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_local_epochs_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"method\.local_epochs = 2 can't be used with method\.optimizer = "):
        Config().with_overrides([f"method.optimizer={name}", "method.local_epochs=2"])
    with pytest.raises(LedgerError, match=rf"local_epochs = 2 .* must be 1 with optimizer = '{name}'"):
        dataclasses.replace(simulation(name).ledger.header, local_epochs=2)


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_the_memory_is_4_bytes_a_weight_and_vector(name: str) -> None:
    parameters = Parameters(torch.nn.Linear(100, 10))
    parameters.hold_vectors(make(name).vectors)
    held = sum(v.nbytes for v in parameters.moments.vectors.values())
    assert held == 4 * parameters.dimension * len(make(name).vectors)


def test_the_definition_moves_w_as_sgd_does_by_what_the_rule_returns() -> None:
    w, c = np.float32([1.0, 2.0, 3.0]), np.float32([0.5])
    keep = moments.Elementwise("momentum", np.float32([0.0, 1.0]))
    moved, _ = moments.advance(
        w, "float32", 0, [np.zeros(3, np.float32)], [Step(1, 2, c, elementwise=keep)], DirectionSpace("gaussian", 3)
    )
    np.testing.assert_array_equal(
        moved, definition.apply(w, "float32", 0, [Step(1, 2, c)], None, DirectionSpace("gaussian", 3))
    )
