"""Models on CUDA: the same bits as on the CPU, probes that are true, and little memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_bits import DEVICE, DTYPES, SOME_PROBE, assert_same_bits, bits, some_step, transformers
from torch import nn

from cyber0 import ZeroOrder, optimizers
from cyber0.directions import DISTRIBUTIONS, Probe, Step, definition, reference
from cyber0.directions.backends.cuda import CudaBackend
from cyber0.directions.moments import RULES
from cyber0.errors import ModelError
from cyber0.model.blocks import perturbed
from cyber0.model.digests import PIECE_BYTES, digest_of
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.cuda


TOKENS = torch.arange(24).view(2, 12) % 50


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
def test_a_model_is_committed_replayed_and_perturbed_to_the_same_bits(storage: str, distribution: str) -> None:
    here, there = (Parameters(m, distribution) for m in transformers(DTYPES[storage]))
    assert here.digest() == there.digest() and here.rest_digest() == there.rest_digest()
    actions: list[Callable[[Parameters], None]] = [
        lambda p: p.commit(some_step(1, k=5)),
        lambda p: p.replay([some_step(t, k=3) for t in range(2, 12)]),
        lambda p: p.commit(some_step(12), radius=3.0),
        lambda p: p.replay([some_step(t) for t in range(13, 16)], radius=2.0),
        lambda p: p.project(1.5),
    ]
    digests = {here.digest()}
    for act in actions:
        act(here)
        act(there)
        assert here.digest() == there.digest()
        digests.add(here.digest())
    assert len(digests) == len(actions) + 1
    for a, b in zip(here.segments, there.segments, strict=True):
        steps = [some_step(1)]
        assert_same_bits(
            perturbed(b, there.weight_pass(SOME_PROBE, steps)), perturbed(a, here.weight_pass(SOME_PROBE, steps))
        )
    assert_same_bits(there.directions(1, 2, 3, 4), here.directions(1, 2, 3, 4))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_an_optimizers_vectors_and_the_weights_have_the_same_bits(
    name: str, storage: str, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "chunk", 1 << 12)  # several chunks, whose borders are not those of the segments
    here, there = (Parameters(m, distribution) for m in transformers(DTYPES[storage]))
    optimizer, rng = optimizers.make(name), np.random.default_rng(1)
    state, steps = optimizer.start(), []
    for t, size in enumerate([1.0, 1e-3, 1e6, 1e-30, 3e38, 1.0, 0.0, 1e-38]):
        update = optimizer.step(state, 1e-2, np.float32(rng.normal(size=5) / 8 * size), 5)
        steps.append(Step(2**64 - 3, 2**31 + t, update.coefficients, elementwise=update.elementwise))
        state = update.state
    for p in (here, there):
        p.hold_vectors(optimizer.vectors)
        for step in steps[:2]:
            p.commit(step)
        p.replay(steps[2:4])
    assert all(len(vector.unique()) > 1 for vector in there.moments.vectors.values())  # 3e38 makes adam's all the same
    for p in (here, there):
        p.replay(steps[4:6])
        p.replay(steps[6:], radius=2.0)
    assert here.digest() == there.digest() and here.vectors_digest() == there.vectors_digest()
    assert all(torch.isfinite(vector).all() for vector in there.moments.vectors.values())
    assert here.carried() == there.carried()


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16])
def test_weights_are_rounded_for_computing_as_on_the_cpu(compute: torch.dtype) -> None:
    here, there = (Parameters(m, "gaussian", compute) for m in transformers(torch.float32))
    for steps in ([], [some_step(1)]):
        for a, b in zip(here.segments, there.segments, strict=True):
            rounded = [perturbed(s, p.weight_pass(SOME_PROBE, steps), compute) for s, p in ((a, here), (b, there))]
            exact = perturbed(a, here.weight_pass(SOME_PROBE, steps))
            assert_same_bits(rounded[1], rounded[0])
            assert torch.equal(rounded[0], exact.to(compute))


@pytest.mark.parametrize("storage", DTYPES)
def test_a_probe_computes_what_a_deep_copy_at_those_weights_computes(storage: str) -> None:
    model = transformers(DTYPES[storage])[1]
    twin = copy.deepcopy(model).eval()
    p = Parameters(model)
    digest, probe, named = p.digest(), Probe(1, 2, 3, 0.05), dict(twin.named_parameters())
    for e in p.layout:
        q = named[e.name]
        w = bits(q).reshape(-1)
        w = w.view(np.float32) if storage == "float32" else w
        new = definition.apply(w, storage, e.offset, [], probe, p.space)
        q.data.copy_(torch.from_numpy(np.ascontiguousarray(new)).view(q.dtype).view(q.shape))
    tokens = TOKENS.to(DEVICE)
    model.train()
    with torch.no_grad():
        expected = twin(tokens).float()
        with p.perturbed(probe):
            got = model(tokens).float()
        with p.perturbed(None):
            plain = model(tokens).float()
    # The copy may take PyTorch's fused path for attention, which rounds differently.
    tolerance = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[storage]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert (plain - expected).abs().max() > 3 * (got - expected).abs().max()
    assert p.digest() == digest


def test_an_exception_in_the_middle_of_a_probe_leaves_every_bit() -> None:
    model = transformers(torch.bfloat16)[1]
    p = Parameters(model)
    digest = p.digest()
    with pytest.raises(KeyboardInterrupt), p.perturbed(SOME_PROBE):
        model(TOKENS.to(DEVICE))
        raise KeyboardInterrupt
    assert p.digest() == digest


def test_recurrent_layers_are_perturbed_through_cudnn_too() -> None:
    torch.manual_seed(6)
    model = nn.LSTM(8, 16, num_layers=2, batch_first=True).to(DEVICE)
    twin = copy.deepcopy(model).eval()
    p = Parameters(model)
    named = dict(twin.named_parameters())
    for e in p.layout:
        q = named[e.name]
        z = torch.from_numpy(reference(1, 2, 3, e.offset, e.size, "gaussian")).view(e.shape).to(DEVICE)
        q.data.copy_(q + np.float32(0.05) * z)
    x = torch.randn(3, 5, 8, device=DEVICE)
    with torch.no_grad(), p.perturbed(Probe(1, 2, 3, 0.05)):
        got = model(x)[0]
    torch.testing.assert_close(got, twin(x)[0], rtol=1e-3, atol=1e-4)


def test_stand_ins_take_no_more_memory_than_the_largest_block() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(DEVICE)
    p = Parameters(model)
    x = torch.randn(4, 2048, device=DEVICE)
    largest = max(s.buffer.nbytes for s in p.segments)

    def peak(probe: Probe | None) -> int:
        with torch.no_grad(), p.perturbed(probe):
            model(x)  # warm up: workspaces and compiled kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), p.perturbed(probe):
            model(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(SOME_PROBE) - peak(None) <= 1.1 * largest


def test_the_first_step_of_an_optimizer_needs_no_second_copy_either() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(DEVICE)
    optimizer, x = ZeroOrder(model, lr=1e-6, mu=1e-3), torch.randn(4, 2048, device=DEVICE)
    largest = max(s.buffer.nbytes for s in optimizer.parameters.segments)
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(lambda: model(x).square().mean())
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * largest  # of 8 blocks
    assert optimizer.parameters.substitutable


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_optimizer_meets_a_traced_model_and_notices_changes_from_outside(dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).to(DEVICE, DTYPES[dtype])
    twin, x = copy.deepcopy(model), torch.randn(32, 64, device=DEVICE, dtype=DTYPES[dtype])
    mine, plain = (ZeroOrder(m, lr=0.01, mu=0.05, k=3) for m in (model, twin))
    traced = torch.jit.trace(model, x)
    for _ in range(2):
        found = mine.step(lambda: traced(x).float().square().mean())
        expected = plain.step(lambda: twin(x).float().square().mean())
        np.testing.assert_allclose(found.slopes, expected.slopes, rtol=5e-2, atol=5e-2)
    model[2].weight.data.mul_(0.9)
    with pytest.raises(ModelError, match=r"through \.data"):
        mine.step(lambda: traced(x).float().square().mean())


# Rounding by 16 bits, and digests.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_captured_steps_are_rounded_by_as_many_bits_as_each_says(dtype: torch.dtype) -> None:
    here, there = (Parameters(m) for m in transformers(dtype))
    for t in range(8):  # captured at the second step of each kind
        step = some_step(t, k=1, bits=16 if t % 2 else 32)
        here.commit(step)
        there.commit(step)
        assert here.digest() == there.digest(), t
    steps = [some_step(t, k=2, bits=16) for t in range(8, 30)]
    here.replay(steps)
    there.replay(steps)
    assert here.digest() == there.digest()


@pytest.mark.parametrize("rule", RULES)
def test_weights_beside_vectors_are_rounded_by_16_bits_as_on_the_cpu(rule: str) -> None:
    pair = [Parameters(m) for m in transformers(torch.bfloat16)]
    for parameters in pair:
        optimizer = optimizers.make(rule)
        parameters.hold_vectors(optimizer.vectors)
        state = optimizer.start()
        for t in range(4):
            update = optimizer.step(state, 1e-2, np.float32([1.0, -0.5]), 2)
            state = update.state
            parameters.commit(Step(7, t, update.coefficients, elementwise=update.elementwise, bits=16))
    assert pair[0].digest() == pair[1].digest() and pair[0].vectors_digest() == pair[1].vectors_digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_on_a_gpu_has_the_digest_that_it_has_on_the_host(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    w = (torch.randn(3 * PIECE_BYTES // dtype.itemsize + 777) * 9).to(dtype)
    there = w.to("cuda")
    assert digest_of([there[:5], there, b"x", there[7:100]]) == digest_of([w[:5], w, b"x", w[7:100]])


def test_a_digest_is_that_after_the_steps_before_it_though_they_are_still_running() -> None:
    """The copy waits in the stream behind what was launched, and the next launch may not overtake it."""
    w = torch.zeros(1 << 24, device="cuda")
    for n in range(1, 40):
        w.add_(1.0)
        if n % 13 == 0:
            assert digest_of([w]) == digest_of([torch.full((1 << 24,), float(n))])
