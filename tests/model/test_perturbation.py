"""A probe computes what a deep copy at those weights computes, in every architecture, and takes little memory."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SOME_PROBE, UNMET, X, bits, scripted_product, set_weights, some_step, weight
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cyber0.directions import DISTRIBUTIONS, Probe, Step, definition
from cyber0.model import blocks as blocks_module
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


def assert_truth(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    rtol: float,
    steps: list[Step] | None = None,
    distribution: str = "gaussian",
) -> None:
    """The test of truth: at w + c z the model computes what a deep copy with those weights computes."""
    twin = copy.deepcopy(model)
    p = Parameters(model, distribution)
    before, digest, rest = bits(model), p.digest(), p.rest_digest()
    set_weights(twin, p.layout, steps or [], SOME_PROBE, distribution)
    twin.eval()
    with torch.no_grad():
        expected = twin(*inputs)
        with p.perturbed(SOME_PROBE, steps or ()):
            got = model(*inputs)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
        with p.perturbed(None):
            plain = model(*inputs)
        assert not torch.allclose(plain.float(), got.float(), rtol=1e-4), "the probe made no difference"
    assert bits(model) == before and p.digest() == digest and p.rest_digest() == rest


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_probe_computes_what_a_deep_copy_at_those_weights_computes(name: str) -> None:
    torch.manual_seed(3)
    make, inputs, rtol = ARCHITECTURES[name]
    assert_truth(make(), inputs, rtol)


@pytest.mark.parametrize("name", UNMET)
def test_a_use_that_no_torch_function_shows_is_met_too(name: str) -> None:
    torch.manual_seed(3)
    assert_truth(UNMET[name](), (X,), 1e-6)


def test_a_use_that_no_torch_function_shows_is_met_at_every_probe() -> None:
    torch.manual_seed(3)
    model = UNMET["vmap over a parameter"]()
    p, outputs = Parameters(model), []
    for index in range(3):
        true = moved_copy(model, p, index)(X)
        with torch.no_grad(), p.perturbed(Probe(7, 0, index, 0.1)):
            outputs.append(model(X))
        torch.testing.assert_close(outputs[-1], true, rtol=1e-6, atol=1e-6)
    assert not p.substitutable and not torch.equal(outputs[1], outputs[2])


class CallsScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = weight(6)

    def forward(self, x: Tensor) -> Tensor:
        return scripted_product(x, self.w)


def test_a_scripted_function_is_met_at_every_probe() -> None:
    model = CallsScripted()
    p = Parameters(model)
    expected = [moved_copy(model, p, index)(X) for index in range(3)]
    with torch.no_grad():
        for index, true in enumerate(expected):
            with p.perturbed(Probe(7, 0, index, 0.1)):
                torch.testing.assert_close(model(X), true, rtol=1e-6, atol=1e-6)


def moved_copy(model: nn.Module, p: Parameters, index: int) -> nn.Module:
    twin = copy.deepcopy(model).requires_grad_(False)
    z = torch.from_numpy(definition.reference(7, 0, index, 0, p.dimension, "gaussian"))
    for entry, (_, w) in zip(p.layout, twin.named_parameters(), strict=True):
        w += 0.1 * z[entry.offset : entry.offset + w.numel()].view(w.shape)
    return twin


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["mlp", "tied embedding and output", "bfloat16", "mixed dtypes", "scripted"])
def test_a_probe_past_steps_computes_what_a_deep_copy_moved_by_them_computes(name: str, distribution: str) -> None:
    torch.manual_seed(3)
    make, inputs, rtol = ARCHITECTURES[name]
    assert_truth(make(), inputs, rtol, [some_step(1, size=0.1), some_step(2, size=0.1)], distribution)


def test_a_forward_compiled_by_assignment_is_perturbed_too() -> None:
    model = nn.Linear(6, 3)
    model.forward = torch.compile(model.forward, backend="eager")  # a deep copy of it would still call this very model
    p, twin = Parameters(model), nn.Linear(6, 3)
    twin.load_state_dict(model.state_dict())
    set_weights(twin, p.layout, [], SOME_PROBE)
    with torch.no_grad(), p.perturbed(SOME_PROBE):
        torch.testing.assert_close(model(X), twin(X))


def test_torch_compile_stays_eager_until_the_last_of_overlapping_threads_is_done() -> None:
    traced: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    p, q = Parameters(nn.Linear(6, 3)), Parameters(nn.Linear(6, 3))
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with p.perturbed(SOME_PROBE):
            entered.set()
            assert inside.wait(60)
        left.set()

    inside, thread = threading.Event(), threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    with q.perturbed(SOME_PROBE):
        inside.set()
        assert left.wait(60)
        compiled(X)
        assert not traced  # the other thread is done, and this one is not
    thread.join()
    compiled(X)
    assert len(traced) == 1


# Memory.


@pytest.mark.parametrize(("width", "blocks"), [(1100, 4), (400, 12), (64, 4)])
def test_stand_ins_never_take_more_than_the_largest_block_or_the_small_cache(
    width: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(blocks)])
    p = Parameters(model)
    live: dict[int, int] = {}
    peaks, made = [0], [0]
    original = blocks_module.perturbed

    def tracked(*args: Any) -> Tensor:
        """Return the stand-in in memory whose end is noticed: the storage holds the array."""
        array = original(*args).numpy().copy()
        live[id(array)] = array.nbytes
        weakref.finalize(array, live.pop, id(array))
        made[0] += 1
        peaks.append(sum(live.values()))
        return torch.from_numpy(array)

    monkeypatch.setattr(blocks_module, "perturbed", tracked)
    largest = max(s.buffer.nbytes for s in p.segments)
    assert len(p.segments) == blocks
    with torch.no_grad(), p.perturbed(SOME_PROBE):
        model(torch.randn(2, width))
        model(torch.randn(2, width))
    assert 0 < max(peaks) <= max(blocks_module.CACHE_BYTES, largest)
    assert not live, "stand-ins outlive the probe"
    if sum(s.buffer.nbytes for s in p.segments) <= blocks_module.CACHE_BYTES:
        assert made[0] == blocks, "a small model is perturbed once"


class Uses(TorchFunctionMode):
    """Notes of every weight that F.linear multiplies by whether it asks for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.asking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.asking.append(args[1].requires_grad)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("autocast", "asks"), [(False, True), (True, False)])
def test_a_stand_in_asks_for_a_gradient_like_its_parameter_unless_autocast_would_keep_it(
    autocast: bool, asks: bool
) -> None:
    parameters = Parameters(nn.Linear(4, 3))
    with Uses() as uses, torch.no_grad(), torch.autocast("cpu", enabled=autocast), parameters.perturbed(SOME_PROBE):
        assert not parameters.model(torch.ones(2, 4)).requires_grad
    assert uses.asking == [asks]


def test_no_gradient_is_recorded_for_a_stand_in() -> None:
    parameters = Parameters(nn.Linear(4, 3))
    with torch.no_grad(), parameters.perturbed(SOME_PROBE), torch.enable_grad():
        assert not parameters.model(torch.ones(2, 4)).requires_grad


def test_attention_over_a_strided_batch_gives_the_bits_of_a_copy_at_those_weights() -> None:
    torch.manual_seed(3)
    model, x = nn.MultiheadAttention(32, 2, batch_first=True), torch.randn(6, 7, 32)
    twin, p = copy.deepcopy(model), Parameters(model)
    set_weights(twin, p.layout, [], SOME_PROBE, "gaussian")
    with torch.no_grad():
        expected = twin.eval()(x, x, x)[0]
        with p.perturbed(SOME_PROBE):
            assert torch.equal(model(x, x, x)[0], expected)
