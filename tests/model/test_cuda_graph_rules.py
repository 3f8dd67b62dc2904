"""When passes are recorded and when graphs are used: with a stand-in for CUDA graphs, so on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cyber0.directions import Directions, Probe
from cyber0.estimate.batches import Batch
from cyber0.estimate.streamed import StreamedPath
from cyber0.model import cuda_graphs
from cyber0.model.cuda_graphs import CapturedGraphs
from cyber0.model.vector import Parameters

SOME_PROBE = Probe(7, 0, 0, 0.05)


class Graph:
    """Like a CUDA graph: reads what is not trained where it lay when it was recorded."""

    made = 0

    def __init__(self, model: nn.Module, call: Callable[[], Tensor], error: Callable[[Tensor], float]) -> None:
        Graph.made += 1
        self._call, self._error = call, error
        held = [d for m in model.modules() for d in (m._parameters, m._buffers)]
        rest = [(d, name, t) for d in held for name, t in d.items() if t is not None and not t.requires_grad]
        self._lay = [(d, name, t, t.data) for d, name, t in rest]
        self.output = call().clone()

    def replay(self) -> None:
        now = [(d, name, d[name], d[name].data) for d, name, _, _ in self._lay]
        _put(self._lay)
        found = self._call()
        _put(now)
        self.output.copy_(found + self._error(found))


def _put(tensors: list[Any]) -> None:
    for held, name, t, data in tensors:
        held[name], t.data = t, data


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.frozen(x) + self.shift))
        return result


@pytest.fixture
def parameters() -> Parameters:
    torch.manual_seed(3)
    return Parameters(Net().eval())


@pytest.fixture
def make(parameters: Parameters, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CapturedGraphs]]:
    def graphs(error: Callable[[Tensor], float] = lambda _: 0.0, reference: Any = None) -> CapturedGraphs:
        def capture(call: Callable[[], Tensor], device: torch.device, pool: Any = None) -> tuple[Graph, Tensor]:
            graph = Graph(parameters.model, call, error)
            return graph, graph.output

        monkeypatch.setattr(cuda_graphs, "capture", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        result = CapturedGraphs(parameters, parameters.model, reference)
        result._able = True
        return result

    Graph.made = 0
    yield graphs


def rows(count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32))


@torch.no_grad()
def test_a_replay_gives_what_a_plain_pass_gives(parameters: Parameters, make: Callable[..., CapturedGraphs]) -> None:
    graphs = make()
    for probe in (SOME_PROBE, None, Probe(7, 1, 2, -0.05), None):
        with parameters.perturbed(probe):
            expected = parameters.model(rows(5))
        assert torch.equal(graphs((rows(5),), probe), expected)
    assert Graph.made == 2


class FirstOutput:
    """The loss of a sample is its first output."""

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        result: Tensor = model(inputs)
        return result

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]


@pytest.mark.parametrize("error", [0.0, 1e-3])
@torch.no_grad()
def test_one_sided_slopes_take_one_graph_in_which_what_capturing_changes_cancels(
    error: float, parameters: Parameters, make: Callable[..., CapturedGraphs]
) -> None:
    make(lambda _: error)
    batch, directions = Batch(rows(5), torch.zeros(5), np.array([2, 3])), Directions(7, 0, 4)
    plain, captured = (StreamedPath(parameters, FirstOutput()) for _ in range(2))
    captured.graphs._able = True
    expected = plain.one_sided(batch, directions, 0.05, ())
    for _ in range(2):
        found = captured.one_sided(batch, directions, 0.05, ())
        np.testing.assert_allclose(found, expected, rtol=0 if error == 0 else 1e-4, atol=0 if error == 0 else 1e-5)
    assert Graph.made == 1


@pytest.mark.parametrize("what", ["frozen weight", "buffer moved", "buffer replaced"])
@torch.no_grad()
def test_what_is_not_trained_may_move_between_passes(
    what: str, parameters: Parameters, make: Callable[..., CapturedGraphs]
) -> None:
    graphs, model = make(), parameters.model
    before = [graphs((rows(5),), SOME_PROBE) for _ in range(3)][-1]
    if what == "frozen weight":
        model.frozen.weight.data = model.frozen.weight.data + 1  # type: ignore[union-attr,operator]
    elif what == "buffer moved":
        model.shift.data = torch.ones(4)  # type: ignore[assignment]
    else:
        model.shift = torch.ones(4)
    for _ in range(2):
        with parameters.perturbed(SOME_PROBE):
            expected = model(rows(5))
        assert not torch.equal(before, expected)
        assert torch.equal(graphs((rows(5),), SOME_PROBE), expected)


def test_a_pass_that_is_to_be_differentiated_is_not_recorded(
    parameters: Parameters, make: Callable[..., CapturedGraphs]
) -> None:
    graphs = make()
    for _ in range(3):
        graphs((rows(5),), None).sum().backward()
    assert Graph.made == 0
    assert parameters.model.head.bias.grad.tolist() == [15.0, 15.0, 15.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("reference", [4, 5])
@torch.no_grad()
def test_the_bits_do_not_depend_on_which_shape_comes_first(reference: int, make: Callable[..., CapturedGraphs]) -> None:
    def outputs(sizes: list[int]) -> dict[int, set[bytes]]:
        # Recorded passes differ in their last bits for one of two shapes.
        graphs = make(lambda found: 1e-5 if len(found) == 4 else 0.0, lambda: (rows(reference),))
        found: dict[int, set[bytes]] = {size: set() for size in sizes}
        for size in sizes:
            found[size].add(graphs((rows(size),), SOME_PROBE).numpy().tobytes())
        return found

    whole, resumed = outputs([5, 4, 4, 4, 5]), outputs([4, 4, 5, 5, 4])
    assert whole == resumed
    assert all(len(bits) == 1 for bits in whole.values())


@torch.no_grad()
def test_captured_graphs_are_dropped_when_capturing_is_given_up(make: Callable[..., CapturedGraphs]) -> None:
    graphs = make(lambda found: 1.0 if len(found) == 4 else 0.0)
    graphs((rows(5),), SOME_PROBE)
    assert len(graphs._captured) == 1
    for _ in range(2):
        graphs((rows(4),), SOME_PROBE)
    assert not graphs._captured and not graphs._able


@torch.no_grad()
def test_any_way_to_set_the_precision_of_products_is_seen(make: Callable[..., CapturedGraphs]) -> None:
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        pytest.skip("this torch has one way only")
    graphs, before = make(), products.fp32_precision
    graphs((rows(5),), SOME_PROBE)
    try:
        products.fp32_precision = "ieee" if before == "tf32" else "tf32"  # now the older settings can't be read
        for _ in range(2):
            graphs((rows(5),), SOME_PROBE)
    finally:
        products.fp32_precision = before
    assert Graph.made == 2


def test_a_capture_that_fails_leaves_stream_allocator_and_generator_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, capturing = [], []

    class Stream:
        device_index = 0

    class Capture:
        """Like torch.cuda.graph when the end of a capture fails: its stream stays the current one."""

        def __init__(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> None:
            self.pool = pool

        def __enter__(self) -> None:
            current.append(Stream())
            capturing.append(self.pool)

        def __exit__(self, *args: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    class Generator:
        """Like torch's while a capture is under way; a copy of its state knows nothing of that."""

        state = "capturing"

        def clone_state(self) -> str:
            return "ready"

        def graphsafe_set_state(self, state: str) -> None:
            self.state = state

    def ask() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    own, generator = Stream(), Generator()
    current.append(own)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(cuda_graphs, "_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: capturing.remove(pool), raising=False)
    assert cuda_graphs.capture(ask, torch.device("cpu")) is None
    assert current[-1] is own
    assert not capturing and generator.state == "ready"
