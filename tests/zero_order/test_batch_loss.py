"""step(loss_fn, batch): the slopes of the closure, all structures of batches, and no graph that is out of date."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tuned_models import TASK, in_a_thread, loss_of, make

from cyber0 import ZeroOrder
from cyber0.directions.backends import backend_of
from cyber0.model import cuda_graphs
from cyber0.zero_order import batch_loss

Pair = namedtuple("Pair", ["x", "y"])
X, Y = TASK.train_inputs, TASK.train_targets


def pair(begin: int = 0, count: int = 64) -> tuple[Tensor, Tensor]:
    return X[begin : begin + count], Y[begin : begin + count]


def loss_fn_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: TASK.losses(TASK.outputs(model, batch[0]), batch[1]).mean()


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_loss, "BATCHED_FROM", 10**9)
    monkeypatch.setattr(batch_loss, "LAUNCHED_FROM", 10**9)


class Graph:
    """In place of a CUDA graph: repeats the call, on the tensors that it was captured with."""

    made = 0

    def __init__(self, call: Callable[[], Tensor]) -> None:
        Graph.made += 1
        self._call, self.output = call, call().clone()

    def replay(self) -> None:
        self.output.copy_(self._call())


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, one_by_one: None) -> Iterator[type[Graph]]:
    """Capture on any machine; what is computed in Python during a capture is frozen by the test itself."""

    def capture(call: Callable[[], Tensor], device: torch.device, pool: Any = None) -> tuple[Graph, Tensor]:
        graph = Graph(call)
        return graph, graph.output

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(type(backend_of(torch.device("cpu"))), "captures", True)
    monkeypatch.setattr("cyber0.model.commit.CapturedMove.__call__", _move_plainly)
    Graph.made = 0
    yield Graph


def _move_plainly(self: Any, steps: Any) -> None:
    self._pass.renew(steps, None)
    self._move()


@pytest.mark.parametrize("estimator", ["two_point", "one_sided", "forward"])
def test_a_batch_apart_gives_the_bits_of_a_closure(estimator: str, one_by_one: None) -> None:
    (model, by_closure), (twin, by_batch) = make(estimator=estimator), make(estimator=estimator)
    for begin in (0, 64, 128):
        expected = by_closure.step(lambda: loss_fn_of(model)(pair(begin)))  # noqa: B023
        got = by_batch.step(loss_fn_of(twin), pair(begin))
        assert got.loss == expected.loss and np.array_equal(got.slopes, expected.slopes)
    assert by_batch.parameters.digest() == by_closure.parameters.digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "hessian"])
@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
def test_many_directions_at_once_give_the_slopes_of_a_closure(estimator: str, optimizer: str, dtype: str) -> None:
    options = {"estimator": estimator, "optimizer": optimizer, "lr": 1e-3, "mu": 0.1, "k": 6}
    (model, by_closure), (twin, by_batch) = make(dtype=dtype, **options), make(dtype=dtype, **options)
    expected = by_closure.step(lambda: loss_fn_of(model)(pair()))
    calls: list[int] = []

    def loss_fn(batch: Any) -> Tensor:
        calls.append(1)
        return loss_fn_of(twin)(batch)

    got = by_batch.step(loss_fn, pair())
    scale = np.abs(expected.slopes).max()
    assert got.loss == pytest.approx(expected.loss, rel=1e-2 if dtype == "bfloat16" else 1e-5)
    np.testing.assert_allclose(got.slopes, expected.slopes, atol=scale * (0.2 if dtype == "bfloat16" else 1e-3))
    before = len(calls)
    by_batch.step(loss_fn, pair())
    assert len(calls) == before + 1  # one call for all directions


@pytest.mark.parametrize(
    "unbatchable",
    [
        lambda value: value.item(),
        lambda value: value if value > 0 else -value,
        lambda value: in_a_thread(lambda: value + 0.0),
        lambda value: np.float64(value.numpy()),
    ],
)
def test_a_loss_that_can_t_be_evaluated_at_many_directions_at_once_is_called_at_each(unbatchable: Any) -> None:
    (model, by_closure), (twin, by_batch) = make(), make()
    expected = by_closure.step(lambda: unbatchable(loss_fn_of(model)(pair())))
    got = by_batch.step(lambda batch: unbatchable(loss_fn_of(twin)(batch)), pair())
    assert np.array_equal(got.slopes, expected.slopes)


def test_many_directions_are_split_where_they_do_not_fit_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = make(k=8)[1], make(k=8)[1]
    expected = whole.step(loss_fn_of(whole.parameters.model), pair())
    monkeypatch.setattr(batch_loss, "BATCHED_ROWS", 64 * 5)
    calls: list[int] = []
    plain = loss_fn_of(split.parameters.model)
    for _ in range(2):
        calls.clear()
        got = split.step(lambda b: (calls.append(1), plain(b))[1], pair())
        if split.round == 1:
            np.testing.assert_allclose(got.slopes, expected.slopes, rtol=1e-3, atol=1e-4)
    assert len(calls) == 4  # 16 probes, 5 at once


BATCHES = [
    X[:8],
    (X[:8], Y[:8]),
    [X[:8], (Y[:8], None, 3)],
    Pair(X[:8], Y[:8]),
    {"x": X[:8], "more": [Y[:8], "name"]},
    OrderedDict(x=X[:8]),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize("mode", ["captured", "plain"])
def test_the_function_receives_the_structure_that_was_given(
    batch: Any, mode: str, captured: type[Graph]
) -> None:  # fmt: skip
    model, optimizer = make()
    given: list[Any] = []

    def loss_fn(got: Any) -> Tensor:
        given.append(got)
        return loss_of(model)

    optimizer.step(loss_fn, batch, capture=mode == "captured")
    assert bool(captured.made) == (mode == "captured")
    for got in given:
        assert type(got) is type(batch)
        assert batch_loss._structure(got, mine := []) == batch_loss._structure(batch, theirs := [])
        assert mine and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_batch_encoding_keeps_its_class_and_its_methods(captured: type[Graph]) -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding({"x": X[:8], "y": Y[:8]})
    model, optimizer = make()
    optimizer.step(
        lambda b: TASK.losses(TASK.outputs(model, b.x), b["y"]).mean() * (1.0 if b.keys() else 2.0), encoding
    )
    assert captured.made == 1 and encoding["x"] is encoding.x and torch.equal(encoding.x, X[:8])


def test_a_captured_pass_gives_the_bits_of_a_plain_one_and_sees_each_batch(captured: type[Graph]) -> None:
    (model, one), (twin, other) = make(), make()
    functions = loss_fn_of(model), loss_fn_of(twin)
    losses = set()
    for begin in (0, 64, 128):
        got, expected = one.step(functions[0], pair(begin)), other.step(functions[1], pair(begin), capture=False)
        assert got.loss == expected.loss and np.array_equal(got.slopes, expected.slopes)
        losses.add(got.loss)
    assert captured.made == 1 and len(losses) == 3
    assert one.parameters.digest() == other.parameters.digest()


def test_a_function_made_anew_for_every_step_is_captured_once(captured: type[Graph]) -> None:
    model, optimizer = make()
    for begin in (0, 64, 128):
        optimizer.step(lambda batch: TASK.losses(TASK.outputs(model, batch[0]), batch[1]).mean(), pair(begin))
    assert captured.made == 1


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a number": lambda state: state.update(scale=3.0),
    "a tensor": lambda state: state.update(weight=torch.tensor(3.0)),
    "a function": lambda state: state.update(shape=torch.square),
    "a tensor's memory": lambda state: setattr(state["weight"], "data", torch.tensor(3.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_function_that_computes_with_something_else_is_not_served_by_an_old_graph(
    what: str, captured: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    state: dict[str, Any] = {"scale": 1.0, "weight": torch.tensor(1.0), "shape": torch.abs}

    def loss_fn(batch: Any) -> Tensor:
        return state["shape"](loss_fn_of(model)(batch)) * state["scale"] * state["weight"]

    for _ in range(2):
        optimizer.step(loss_fn, pair())
    assert captured.made == 1
    CHANGES[what](state)
    optimizer.step(loss_fn, pair())
    assert captured.made == 2


def test_another_function_and_another_value_in_the_batch_have_graphs_of_their_own(captured: type[Graph]) -> None:
    model, optimizer = make()
    once, twice = loss_fn_of(model), lambda b: 2 * loss_fn_of(model)(b)
    for _ in range(2):
        for loss_fn, value in ((once, 1), (once, 2), (twice, 1)):
            got = optimizer.step(loss_fn, (*pair(), value))
            assert got.loss == pytest.approx(float(loss_fn(pair()).detach()), rel=0.1)
    assert captured.made == 3


def test_a_function_whose_numbers_change_all_the_time_is_no_longer_captured(captured: type[Graph]) -> None:
    model, optimizer = make(k=1)
    plain = loss_fn_of(model)
    for count in range(2 * batch_loss.MOST_VERSIONS):
        got = optimizer.step(lambda b: plain(b) + count, pair())  # noqa: B023
        assert got.loss == pytest.approx(count + got.loss % 1, abs=3)
    assert captured.made == batch_loss.MOST_VERSIONS - 1 and not optimizer._passes._graphs


def test_a_model_that_reads_values_back_is_launched_plainly(
    captured: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda_graphs, "capture", lambda *_: None)
    (model, one), (twin, other) = make(), make()
    got = [one.step(loss_fn_of(model), pair(begin)).slopes for begin in (0, 64)]
    expected = [other.step(lambda: loss_fn_of(twin)(pair(begin))).slopes for begin in (0, 64)]  # noqa: B023
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    "batch", [{"x": object()}, (np.ones(3),), "text", ()], ids=["an object", "an array", "a text", "nothing"]
)
def test_a_batch_that_is_not_made_of_tensors_is_given_as_it_is(batch: Any, captured: type[Graph]) -> None:
    model, optimizer = make()
    seen: list[Any] = []
    optimizer.step(lambda b: (seen.append(b), loss_of(model))[1], batch)
    assert all(b is batch for b in seen) and captured.made == 0


def test_none_is_a_batch_too() -> None:
    model, optimizer = make()
    assert optimizer.step(lambda b: loss_of(model) + (0.0 if b is None else 1.0), None).round == 0


@pytest.mark.slow
def test_the_rate_is_found_and_diagnosed_on_batches() -> None:
    model, optimizer = make(lr="auto")
    batches = [pair(begin) for begin in (0, 64, 128)]
    found = optimizer.find_lr(loss_fn_of(model), batches=batches)
    twin, other = make(lr="auto")
    assert other.find_lr(*(lambda b=b: loss_fn_of(twin)(b) for b in batches)) == found
    assert optimizer.diagnose(loss_fn_of(model), batches=batches, trials=2) is not None
    assert optimizer.step(loss_fn_of(model), batches[0]).round == 0


def test_batches_belong_to_one_function() -> None:
    model, optimizer = make(lr="auto")
    with pytest.raises(ValueError, match=r"find_lr takes one function with batches, got 2: find_lr\(loss_fn"):
        optimizer.find_lr(loss_fn_of(model), loss_fn_of(model), batches=[pair()])
    with pytest.raises(ValueError, match="at least one loss"):
        optimizer.diagnose(loss_fn_of(model), batches=[])


@pytest.mark.parametrize("bad", ["raise", "nan"])
def test_a_function_that_fails_leaves_w_as_it_was(bad: str) -> None:
    model, optimizer = make()
    optimizer.step(loss_fn_of(model), pair())
    before = optimizer.parameters.digest()

    def failing(batch: Any) -> Tensor:
        if bad == "raise":
            raise RuntimeError("out of memory")
        return loss_fn_of(model)(batch) * float("nan")

    with pytest.raises(Exception, match="out of memory" if bad == "raise" else "the loss is nan in step 1"):
        optimizer.step(failing, pair())
    assert optimizer.parameters.digest() == before and optimizer.round == 1


def test_dropout_is_off_and_train_mode_returns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(X.shape[1], 8), nn.Dropout(0.9), nn.Linear(8, TASK.classes)).train()
    optimizer = ZeroOrder(model, lr=1e-9, mu=1e-2, k=4, seed=3)
    results = [optimizer.step(loss_fn_of(model), pair(), capture=capture) for capture in (True, False)]
    assert model.training and results[0].loss == pytest.approx(results[1].loss, rel=1e-2)
