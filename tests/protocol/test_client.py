"""The client: local epochs as the paper's Algorithm 4, decisions in order, and a model that differs is refused."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from synthetic import Blobs, config, make_model, moved, one_thread, plain_one_sided, plain_two_point  # noqa: F401

from cyber0 import Simulation
from cyber0.directions import Directions, Step, reference
from cyber0.errors import LedgerError, ModelError, ProtocolError
from cyber0.estimate.batches import Samples
from cyber0.estimate.evaluator import Evaluator
from cyber0.ledger import Header, Record
from cyber0.ledger.record import Decision
from cyber0.model.vector import Parameters
from cyber0.protocol.client import Client, Updates, _few, check_model, replay
from cyber0.protocol.messages import Announcement

SEED, E, K, MU, LR = 99, 3, 4, 1e-2, 0.05
SIZES = [11, 30, 5, 60]


def header_of(parameters: Parameters, **changes: Any) -> Header:
    header = Header(
        seed=SEED, layout=parameters.layout, distribution=parameters.space.distribution,
        k=K, local_epochs=E, mu=MU, estimator="two_point", lr=LR, lr_schedule="constant", projection_radius=None,
        weights_digest=parameters.digest(), rest_digest=parameters.rest_digest(), clients=len(SIZES),
    )  # fmt: skip
    return replace(header, **changes)


def make(
    kind: str = "mlp", *, dtype: str = "float32", memory: str = "copy", task: Blobs | None = None, stream: bool = False,
    estimator: str = "two_point", distribution: str = "gaussian", **changes: Any,
) -> Client:  # fmt: skip
    task = Blobs(kind) if task is None else task
    parameters = Parameters(make_model(kind, dtype=dtype), distribution)
    samples = Samples(task.train_inputs, task.train_targets, shares(), 8, SEED)
    evaluator = Evaluator(parameters, task, estimator, MU)
    if stream:
        evaluator._batched = False
    header = header_of(parameters, estimator=estimator, **changes)
    return Client(header, parameters, samples, evaluator, lambda t: LR / (1 + t), memory)


def shares() -> list[NDArray[np.int64]]:
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def announce(round: int = 0) -> Announcement:
    return Announcement(round, np.arange(len(SIZES)))


def decision(round: int, numbers: int = E * K, *, abandoned: bool = False, lr: float = LR) -> Decision:
    values = np.random.default_rng(round).normal(size=numbers).astype(np.float32)
    return Decision(round, lr, None if abandoned else values, b"")


def flat(model: torch.nn.Module) -> NDArray[np.float32]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["copy", "regenerate"])
@pytest.mark.parametrize("distribution", ["gaussian", "sphere"])
@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
def test_local_epochs_are_algorithm_4(memory: str, distribution: str, estimator: str) -> None:
    """Every client walks from epoch to epoch by its own estimates and sends all E * k numbers, taken on the way."""
    client = make(memory=memory, distribution=distribution, estimator=estimator)
    plain = plain_two_point if estimator == "two_point" else plain_one_sided
    before = client.parameters.digest()
    for round in (0, 1):
        lr = LR / (1 + round)
        found = client.measure(announce(round), [0, 3])
        assert found.shape == (2, E * K)
        for row, who in zip(found, (0, 3), strict=True):
            walker, expected = copy.deepcopy(client.parameters.model), []
            for e in range(E):
                batch = client.samples.batch(np.array([who]), round, e)
                directions = Directions(SEED, round, K, first=e * K)
                g = plain(walker, Blobs(), batch, directions, MU, distribution)[0]
                expected.append(g)
                d = client.parameters.dimension
                u = np.zeros(d, np.float32)
                for r in range(K):
                    z = reference(SEED, round, e * K + r, 0, d, distribution, dimension=d)
                    u = u + np.float32(lr * g[r] / K) * z
                walker = moved(walker, -u)
            scale = np.abs(expected).max()
            np.testing.assert_allclose(row, np.concatenate(expected), rtol=2e-3, atol=2e-4 * scale)
        assert round or client.parameters.digest() == before
        client.apply(decision(round))


def test_every_participant_commits_all_the_decided_numbers_to_the_rounds_w_with_lr_over_k() -> None:
    client, decided = make(), decision(0)
    start = flat(client.parameters.model)
    client.measure(announce(), [1])
    client.apply(decided)
    u = np.zeros_like(start)
    assert decided.values is not None
    for j, value in enumerate(decided.values):
        u = u + np.float32(LR * float(value) / K) * reference(SEED, 0, j, 0, len(start), "gaussian")
    assert np.array_equal(flat(client.parameters.model), start - u)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["mlp", "linear", "tied"])
def test_copy_and_regenerate_give_the_same_bits(kind: str, dtype: str) -> None:
    kept, regenerated = (make(kind, dtype=dtype, memory=m, stream=True) for m in ("copy", "regenerate"))
    before = kept.parameters.digest()
    for client in (kept, regenerated):
        client.apply(decision(0, abandoned=True))
    rows = [client.measure(announce(1), [0, 1, 2, 3]) for client in (kept, regenerated)]
    assert np.array_equal(rows[0], rows[1])
    assert np.abs(rows[0][:, K:]).max() > 0
    assert kept.parameters.digest() == regenerated.parameters.digest() == before


def test_each_local_step_has_directions_and_rounding_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    client, walked = make(dtype="bfloat16"), []
    commit = client.parameters.commit
    monkeypatch.setattr(client.parameters, "commit", lambda step: (walked.append(step), commit(step)))
    client.measure(announce(), [1])
    # The last epoch's step is never probed; the rounding bits of the commit itself are those of index 0.
    assert [(s.seed, s.round, s.first, s.rounding) for s in walked] == [(SEED, 0, e * K, e + 1) for e in range(E - 1)]


@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_copy_and_regenerate_agree_on_whatever_path_they_take(kind: str, estimator: str) -> None:
    memories = ("copy", "regenerate")
    rows = [make(kind, memory=memory, estimator=estimator).measure(announce(), [0, 3]) for memory in memories]
    np.testing.assert_allclose(rows[0], rows[1], rtol=2e-3, atol=2e-4 * np.abs(rows[0]).max())


class FailsAfter(Blobs):
    """Raises in the middle of the local epochs."""

    def __init__(self, calls: int) -> None:
        super().__init__("mlp")
        self.left = calls

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().losses(outputs, targets)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory", ["copy", "regenerate"])
def test_w_comes_back_to_the_bit_when_a_local_epoch_is_interrupted(memory: str, dtype: str) -> None:
    for calls in (0, 2 * K + 1, 4 * K + 3):
        client = make(memory=memory, dtype=dtype, stream=True, task=FailsAfter(calls))
        before = client.parameters.digest()
        with pytest.raises(KeyboardInterrupt):
            client.measure(announce(), [0])
        assert client.parameters.digest() == before
        assert client.next_round == 0


@pytest.mark.parametrize("estimator", ["gradient", "forward"])
def test_local_epochs_work_without_probing_steps(estimator: str) -> None:
    client = make(estimator=estimator)
    before = client.parameters.digest()
    exact = client.measure(announce(), [3])
    np.testing.assert_allclose(exact, make().measure(announce(), [3]), rtol=0.02, atol=0.01 * np.abs(exact).max())
    assert client.parameters.digest() == before


@pytest.mark.parametrize("epochs", [1, E])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_client_alone_reports_its_row_of_the_common_measurement(kind: str, epochs: int) -> None:
    everybody = make(kind, local_epochs=epochs).measure(announce(), [0, 1, 2, 3])
    for i in range(len(SIZES)):
        report = make(kind, local_epochs=epochs).report(announce(), i)
        assert (report.client, report.round, report.values.dtype) == (i, 0, np.float32)
        assert report.values.shape == (epochs * K,)
        np.testing.assert_allclose(report.values, everybody[i], rtol=2e-3, atol=2e-4 * np.abs(everybody).max())


@pytest.mark.parametrize(("estimator", "sides"), [("two_point", [MU, -MU]), ("one_sided", [MU])])
@pytest.mark.parametrize(("number", "probed"), [(0, True), (K - 1, True), (K, False)])
def test_samples_at_fault_are_sought_at_w_and_at_the_probes_of_the_first_local_epoch(
    number: int, probed: bool, estimator: str, sides: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of later epochs were taken at weights that are gone."""
    client, probes = make(estimator=estimator), []
    at = client.parameters.perturbed
    monkeypatch.setattr(client.parameters, "perturbed", lambda probe: probes.append(probe) or at(probe))
    assert len(client._nonfinite_samples(0, number)) == 0
    expected = [(number, side) for side in sides] if probed else []
    assert probes[0] is None and [(probe.index, probe.coefficient) for probe in probes[1:]] == expected


def test_a_scalar_beyond_float32_is_sent_as_infinite_and_refused_by_the_federator_not_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make()
    monkeypatch.setattr(client, "measure", lambda *_: np.full((1, E * K), -1e300))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isneginf(client.report(announce(), 0).values).all()


def test_eight_samples_are_named_and_of_more_the_first_eight() -> None:
    assert _few(np.arange(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert _few(np.arange(9)) == "0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_nobody_asked_means_no_rows() -> None:
    assert make().measure(announce(), []).shape == (0, E * K)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("radius", [None, 1.0])
def test_catching_up_in_one_go_equals_round_by_round_and_skips_abandoned_rounds(
    dtype: str, radius: float | None
) -> None:
    rounds = [decision(t, abandoned=t in (2, 3, 7), lr=LR / (1 + t)) for t in range(9)]
    at_once = make(dtype=dtype, projection_radius=radius)
    at_once.catch_up(rounds)
    one_by_one = make(dtype=dtype, projection_radius=radius)
    for one in rounds:
        before = one_by_one.parameters.digest()
        one_by_one.apply(one)
        assert (one_by_one.parameters.digest() == before) == (one.values is None)
    in_parts = make(dtype=dtype, projection_radius=radius)
    in_parts.catch_up(rounds[:4])
    in_parts.catch_up([])
    in_parts.catch_up(iter(rounds[4:]))
    digests = {client.parameters.digest() for client in (at_once, one_by_one, in_parts)}
    assert len(digests) == 1
    assert at_once.next_round == one_by_one.next_round == in_parts.next_round == 9


def test_a_record_is_as_good_as_a_decision() -> None:
    first, second, decided = make(), make(), decision(0)
    first.apply(decided)
    clients = np.ones(len(SIZES), np.bool_)
    second.apply(Record(0, decided.lr, decided.values, clients, np.zeros(len(SIZES), np.int64)))
    assert first.parameters.digest() == second.parameters.digest()


@pytest.mark.parametrize("wrong", [[1], [0, 0], [0, 2], [0, 1, 3]])
def test_decisions_out_of_order_are_refused_and_move_nothing(wrong: list[int]) -> None:
    client = make()
    before = client.parameters.digest()
    with pytest.raises(ProtocolError, match="expected the decision of round"):
        client.catch_up([decision(t) for t in wrong])
    assert (client.next_round, client.parameters.digest()) == (0, before)
    client.catch_up([decision(0), decision(1)])
    fresh = make()
    fresh.catch_up([decision(0), decision(1)])
    assert client.parameters.digest() == fresh.parameters.digest()


def test_a_round_that_is_not_the_next_can_not_be_measured() -> None:
    client = make()
    with pytest.raises(ProtocolError, match=r"round 1 was announced.*those of round 0: catch up first"):
        client.measure(announce(1), [0])
    client.apply(decision(0))
    with pytest.raises(ProtocolError, match="catch up first"):
        client.measure(announce(0), [0])


@pytest.mark.parametrize(
    ("task", "text"),
    [({"name": "my_task.py:Spam"}, r"your copy of my_task\.py:Spam is not the one .* copy that file, and use the same"),
     ({"name": "sst2", "model": "my-model"}, r"your copy of the model 'my-model' is another revision .*\(--model DIR"),
     ({"name": "mnist"}, "task 'mnist' follows from the seed: use the versions of cyber0 and torch"),
     ({"name": "mnist", "weights": "w0.safetensors"}, r"in a file \(task\.weights\): pass your copy of it, --weights")],
)  # fmt: skip
def test_who_has_another_model_is_told_what_to_do_for_that_kind_of_task(task: dict[str, str], text: str) -> None:
    header = header_of(Parameters(make_model("mlp")), settings={"task": task})
    model = make_model("mlp")
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    for other in (Parameters(model), Parameters(make_model("frozen backbone"))):
        with pytest.raises(ModelError, match=text):
            check_model(header, other)


def test_a_model_that_differs_is_refused_by_name() -> None:
    header = header_of(Parameters(make_model("frozen backbone")))

    def changed(model: torch.nn.Module, name: str) -> torch.nn.Module:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] += 1e-3
        return model

    def accept(parameters: Parameters) -> Client:
        samples = Samples(Blobs().train_inputs, Blobs().train_targets, shares(), 8, SEED)
        return Client(header, parameters, samples, Evaluator(parameters, Blobs()), lambda t: LR)

    accept(Parameters(make_model("frozen backbone")))
    with pytest.raises(ModelError, match="weights digest"):
        accept(Parameters(changed(make_model("frozen backbone"), "head.bias")))
    with pytest.raises(ModelError, match=r"frozen weights or buffers.*rest digest"):
        accept(Parameters(changed(make_model("frozen backbone"), "backbone.0.weight")))
    with pytest.raises(ModelError, match=r"differ in .*weight"):
        accept(Parameters(make_model("mlp")))
    with pytest.raises(ModelError, match=r"in head\.bias \(here bfloat16 \[\d+\], agreed on float32 \[\d+\]\); "):
        model = make_model("frozen backbone")
        model.head.bias = torch.nn.Parameter(model.head.bias.detach().to(torch.bfloat16))
        accept(Parameters(model))
    with pytest.raises(ModelError, match="'gaussian' here, not 'sphere'"):
        accept(Parameters(make_model("frozen backbone"), "sphere"))
    with pytest.raises(ModelError, match="rest digest"):
        model = make_model("frozen backbone")
        model.register_buffer("more", torch.zeros(2))
        accept(Parameters(model))


def test_replay_starts_from_w0_alone() -> None:
    parameters = Parameters(make_model("mlp"))
    header = header_of(parameters)
    record = Record(0, LR, decision(0).values, np.ones(4, np.bool_), np.zeros(4, np.int64))
    assert replay(header, parameters, []) == 0
    assert replay(header, parameters, [record]) == 1
    client = make()
    client.apply(decision(0))
    assert parameters.digest() == client.parameters.digest()
    with pytest.raises(LedgerError, match="not the ledger's starting point"):
        replay(header, parameters, [record])


@pytest.mark.parametrize(
    ("values", "lr"),
    [([1.0] * 3, 0.1), ([1.0] * 9, 0.1), ([np.nan] * 4, 0.1), ([np.inf] * 4, 0.1), ([1.0] * 4, np.nan),
     ([1.0] * 4, np.inf)],
)  # fmt: skip
def test_a_decision_that_no_federator_makes_moves_nothing(values: list[float], lr: float) -> None:
    client = Simulation(config("method.k=4"), task=Blobs()).client
    before = client.parameters.digest()
    with pytest.raises(ProtocolError, match="decision of round 0"):
        client.apply(Decision(0, lr, np.array(values, np.float32), bytes(32)))
    assert client.parameters.digest() == before and client.next_round == 0


@pytest.mark.parametrize("radius", [None, 1.0])
def test_only_the_steps_of_one_pass_are_in_memory_however_long_the_ledger_is(
    radius: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyber0.protocol.client.STEPS_PER_PASS", 16)
    made: weakref.WeakSet[Step] = weakref.WeakSet()
    most, drawn = [0], [0]
    monkeypatch.setattr(Step, "__hash__", object.__hash__)  # its coefficients have none

    made_by = Updates.step

    def counted(*arguments: Any) -> Step:
        step = made_by(*arguments)
        made.add(step)
        most[0] = max(most[0], len(made))
        return step

    def decisions() -> Iterator[Decision]:
        for t in range(100):
            drawn[0] += 1
            yield decision(t, abandoned=t % 5 == 3)

    monkeypatch.setattr(Updates, "step", counted)
    client, rest = make(projection_radius=radius), decisions()
    client.catch_up(itertools.islice(rest, 50))
    assert drawn == [50] and client.next_round == 50
    client.catch_up(rest)
    assert client.next_round == drawn[0] == 100
    parameters = Parameters(make_model("mlp"))
    nobody = np.zeros(len(SIZES), np.bool_), np.zeros(len(SIZES), np.int64)
    records = (Record(d.round, d.lr, d.values, *nobody) for d in decisions())
    assert replay(client.header, parameters, records) == 100
    assert parameters.digest() == client.parameters.digest()
    assert 0 < most[0] <= 2 * 16  # those of a pass, and of the one before until it is forgotten


def test_a_refused_decision_leaves_the_weights_after_the_last_whole_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cyber0.protocol.client.STEPS_PER_PASS", 4)
    client, expected = make(), make()
    with pytest.raises(ProtocolError, match="expected the decision of round 10, got that of 11"):
        client.catch_up(decision(t) for t in (*range(10), 11))
    expected.catch_up(decision(t) for t in range(8))
    assert (client.next_round, client.parameters.digest()) == (8, expected.parameters.digest())
    for one in (client, expected):
        one.catch_up(decision(t) for t in range(one.next_round, 12))
    assert client.parameters.digest() == expected.parameters.digest()


# A client needs what it is handed.

WITHOUT_TORCH = """
import contextlib, sys
import numpy as np
from cyber0.directions import DirectionSpace, definition
from cyber0.ledger import LayoutEntry, Header
from cyber0.ledger.record import Decision
from cyber0.protocol.client import Client
from cyber0.protocol.messages import Announcement


class Weights:
    layout, space = (LayoutEntry("w", (5,), "float32", 0),), DirectionSpace("gaussian", 5)
    w = np.zeros(5, np.float32)

    def digest(self):
        return "0" * 64

    rest_digest = digest

    def hold_vectors(self, starts):
        assert not starts

    def vectors_digest(self):
        return ""

    def replay(self, steps, radius):
        self.w = definition.apply(self.w, "float32", 0, steps, None, DirectionSpace("gaussian", 5))

    def commit(self, step):
        self.replay([step], None)

    @contextlib.contextmanager
    def excursion(self):
        before = self.w
        yield
        self.w = before


class Data:
    def groups(self, clients):
        return [clients]

    def drawn(self, clients, round):
        return clients, np.ones_like(clients)

    def batch(self, clients, round, epoch):
        return clients


class Slopes:  # of f_i(w) = i * sum(w)
    objective = None

    def estimate(self, batch, directions, steps):
        z = [definition.reference(directions.seed, directions.round, directions.first + r, 0, 5, "gaussian")
             for r in range(directions.k)]
        return np.array([[float(client * row.sum()) for row in z] for client in batch])


header = Header(seed=1, layout=Weights.layout, distribution="gaussian", k=2, local_epochs={epochs}, mu=1e-3,
                estimator="two_point", lr=0.1, lr_schedule="constant", projection_radius=None,
                weights_digest="0" * 64, rest_digest="0" * 64, clients=3)
weights = Weights()
client = Client(header, weights, Data(), Slopes(), lambda t: 0.1)
rows = client.measure(Announcement(0, np.zeros(1, np.int64)), [1, 2])
assert rows.shape == (2, 2 * {epochs}) and np.allclose(rows[1], 2 * rows[0]) and not weights.w.any()
client.apply(Decision(0, 0.1, rows[0].astype(np.float32), b""))
assert client.next_round == 1 and weights.w.any()
assert "torch" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_client_runs_on_whatever_has_the_methods_and_without_torch(epochs: int) -> None:
    code = WITHOUT_TORCH.replace("{epochs}", str(epochs))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
