"""Probing never changes w, nor the mode and the buffers of the model."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, SOME_PROBE, Named, X, batch_norm, bits
from torch import Tensor, nn

from cyber0.directions import Probe
from cyber0.errors import ModelError
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


# Probing never changes w.


@pytest.mark.parametrize("name", ["mlp", "scripted", "bfloat16"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_exception_in_the_middle_of_a_forward_leaves_every_bit(name: str, error: type[BaseException]) -> None:
    make, inputs, _ = ARCHITECTURES[name]
    model = make()
    p = Parameters(model)
    model.train()
    before, digest = bits(model), p.digest()

    with pytest.raises(error), p.perturbed(SOME_PROBE):
        model(*inputs)
        raise error("in the middle")
    assert bits(model) == before and p.digest() == digest
    assert all(m.training for m in model.modules())
    addresses = [q.data_ptr() for q in p.tensors]
    assert addresses == [s.buffer.data_ptr() + o * s.buffer.element_size() for s in p.segments for _, _, o in s.members]
    with torch.no_grad(), p.perturbed(None):  # and the substitution is over
        assert torch.equal(model(*inputs), model(*inputs))


def test_an_exception_inside_a_block_leaves_every_bit() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(6, 6), Failing(), nn.Linear(6, 3))
    p = Parameters(model)
    before = bits(model)
    with pytest.raises(KeyboardInterrupt), p.perturbed(SOME_PROBE):
        model(X)
    assert bits(model) == before
    model[1] = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(model(X), model[2](model[0](X)), rtol=0, atol=0)


def test_many_probes_leave_every_bit_in_16_bits_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).bfloat16()
    p = Parameters(model)
    before = bits(model)
    for t in range(40):
        with torch.no_grad(), p.perturbed(Probe(1, t, 0, 0.01 * (-1) ** t)):
            model(X.bfloat16())
    assert bits(model) == before


def test_batched_probes_agree_with_single_ones_and_leave_every_bit() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    p = Parameters(model)
    before = bits(model)
    rows = p.vector() + SOME_PROBE.coefficient * p.directions(SOME_PROBE.seed, SOME_PROBE.round, 2, 4)

    def outputs(*tensors: Tensor) -> Tensor:
        with p.holding(tensors):
            return model(X)

    with torch.no_grad():
        batched = torch.vmap(outputs)(*p.unflatten(rows))
        for r in range(4):
            with p.perturbed(Probe(SOME_PROBE.seed, SOME_PROBE.round, 2 + r, SOME_PROBE.coefficient)):
                torch.testing.assert_close(batched[r], model(X), rtol=1e-5, atol=1e-6)
    assert bits(model) == before


@pytest.mark.parametrize(
    "name", ["mlp", "tied embedding and output", "lstm cell", "embedding that renormalises itself"]
)
def test_the_tangent_along_a_direction_is_the_gradient_times_it(name: str) -> None:
    torch.manual_seed(3)
    make, inputs, _ = ARCHITECTURES[name]
    model = make()
    p = Parameters(model)
    before = bits(model)
    with p.perturbed(None):
        gradients = torch.autograd.grad(model(*inputs).square().sum(), p.tensors)
    z = p.unflatten(p.directions(5, 6, 7, 1)[0])
    expected = sum((g * t).sum() for g, t in zip(gradients, z, strict=True))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), p.along(5, 6, 7):
        tangent = forward_ad.unpack_dual(model(*inputs).square().sum()).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-4)
    assert bits(model) == before


def test_dropout_is_off_in_a_probe_and_train_mode_comes_back_where_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    p = Parameters(model)
    model.train()
    model[2].eval()
    with torch.no_grad(), p.perturbed(SOME_PROBE):
        assert not any(m.training for m in model.modules())
        assert torch.equal(model(X), model(X))
    assert [m.training for m in model] == [True, True, False] and model.training


def test_a_module_that_refuses_eval_mode_is_refused_by_name() -> None:
    class Stubborn(nn.Linear):
        def train(self, mode: bool = True) -> Stubborn:
            return self

    model = nn.ModuleDict({"first": nn.Linear(6, 6), "head": Stubborn(6, 3)})
    model.train()
    with pytest.raises(ModelError, match="'head' stays in train mode"), Parameters(model).perturbed(SOME_PROBE):
        raise AssertionError("must not be reached")
    assert model["first"].training


BUFFER_CHANGES = {
    "in place": lambda m, x: (m.seen.add_(1), m.a(x))[1],
    "by assignment": lambda m, x: (setattr(m, "seen", m.seen + 1), m.a(x))[1],
    "behind autograd's back": lambda m, x: (m.seen.data.add_(1), m.a(x))[1],
}


@pytest.mark.parametrize("how", BUFFER_CHANGES)
def test_a_buffer_that_a_forward_changes_is_refused_by_name_and_put_back(how: str) -> None:
    inner = Named(BUFFER_CHANGES[how], a=nn.Linear(6, 3), seen=torch.zeros(2))
    model = nn.Sequential(inner)
    p = Parameters(model)
    rest = p.rest_digest()
    with pytest.raises(ModelError, match=r"buffer '0\.seen' was changed"), p.perturbed(SOME_PROBE):
        model(X)
    assert inner.seen.tolist() == [0, 0] and p.rest_digest() == rest


@pytest.mark.parametrize("how", ["in place", "by assignment"])
def test_a_buffer_that_changes_at_a_later_probe_is_refused_too(how: str) -> None:
    quiet = [True]
    change = BUFFER_CHANGES[how]
    model = Named(lambda m, x: m.a(x) if quiet[0] else change(m, x), a=nn.Linear(6, 3), seen=torch.zeros(2))
    p = Parameters(model)
    for _ in range(2):
        with p.perturbed(SOME_PROBE):
            model(X)
    quiet[0] = False
    with pytest.raises(ModelError, match="buffer 'seen' was changed"), p.perturbed(SOME_PROBE):
        model(X)


def test_batch_norm_statistics_do_not_move_in_a_probe() -> None:
    model = batch_norm()
    p = Parameters(model)
    model.train()
    kept = [b.clone() for b in model.buffers()]
    for probe in (SOME_PROBE, None):
        with torch.no_grad(), p.perturbed(probe):
            model(X)
    assert all(torch.equal(a, b) for a, b in zip(kept, model.buffers(), strict=True))
