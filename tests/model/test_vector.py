"""A model's weights as one vector: looking never changes them, and every use of a weight sees the look."""

from __future__ import annotations

import copy
import hashlib
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import make_model
from torch import Tensor, nn
from torch.nn import functional as F

from cyber0.directions import DISTRIBUTIONS, Probe, Step, definition
from cyber0.errors import ModelError
from cyber0.model import blocks as blocks_module
from cyber0.model import commit
from cyber0.model import vector as parameters
from cyber0.model.commit import squared_norm_units
from cyber0.model.segments import block_of
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested

SOME_PROBE = Probe(seed=2**63 + 1, round=9, index=4, coefficient=0.05)
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[1, 2, 3, 4], [4, 0, 2, 2]])
SEQUENCE = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))


def some_step(round: int, k: int = 3, size: float = 1e-2) -> Step:
    return Step(77, round, np.float32(np.random.default_rng(round).normal(size=k) * size))


def stored(p: Tensor) -> np.ndarray:
    """The parameter's values as definition.apply wants them."""
    flat = p.detach().contiguous().view(-1)
    return flat.numpy().copy() if p.dtype == torch.float32 else flat.view(torch.int16).numpy().view(np.uint16).copy()


def set_weights(
    model: nn.Module, layout: Any, steps: list[Step], probe: Probe | None, distribution: str = "gaussian"
) -> None:
    """Write (w after steps) + c z into a model by the definition, parameter by parameter."""
    named, d = dict(model.named_parameters()), sum(e.size for e in layout)
    for e in layout:
        p = named[e.name]
        new = definition.apply(stored(p), e.dtype, e.offset, steps, probe, distribution, dimension=d)
        p.data.copy_(torch.from_numpy(np.ascontiguousarray(new)).view(p.dtype).view(p.shape))


def bits(model: nn.Module) -> bytes:
    return b"".join(stored(p).tobytes() for p in model.parameters())


class Named(nn.Module):
    """A module whose forward is a function of itself."""

    def __init__(self, forward: Callable[..., Tensor], **members: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).to(dtype))


def tied_language_model() -> nn.Module:
    embedding, output = nn.Embedding(5, 8), nn.Linear(8, 5)
    output.weight = embedding.weight
    return Named(lambda m, t: m.output(torch.tanh(m.body(m.embedding(t)))),
                 embedding=embedding, body=nn.Linear(8, 8), output=output)  # fmt: skip


def frozen_bottom() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for _ in range(3):
        model(torch.randn(20, 6) * 3 + 1)
    return model


def mixed_dtypes() -> nn.Module:
    return Named(lambda m, x: m.last(m.norm(m.first(x.bfloat16()).float()).half()).float(),
                 first=nn.Linear(6, 8).bfloat16(), norm=nn.LayerNorm(8), last=nn.Linear(8, 3).half())  # fmt: skip


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.T * 2


def weights_in_containers() -> nn.Module:
    return Named(lambda m, x: x @ m.several[0] @ m.several[1] + m.named["bias"],
                 several=nn.ParameterList([weight(6, 4), weight(4, 3)]),
                 named=nn.ParameterDict({"bias": weight(3)}))  # fmt: skip


def gradient_of_its_input() -> nn.Module:
    """A physics-informed net: its output holds derivatives by its input, taken inside vmap."""
    grad = torch.func.grad
    return Named(lambda m, x: torch.func.vmap(grad(lambda v: torch.tanh(m.layer(v)).sum()))(x), layer=nn.Linear(6, 4))


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    model.compile(backend="eager")
    return model


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], float]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (X,), 1e-6),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten()
        ),
        (X.view(1, 1, 5, 6),),
        1e-5,
    ),
    "tied embedding and output": (tied_language_model, (TOKENS,), 1e-6),
    "tied without a name": (lambda: (lambda a: nn.Sequential(a, nn.Tanh(), a))(nn.Linear(6, 6)), (X,), 1e-6),
    "functional use": (
        lambda: Named(lambda m, x: F.linear(x, m.a.weight[:3], m.a.bias[:3]) + m.a(x)[:, 3:], a=nn.Linear(6, 6)),
        (X,),
        1e-6,
    ),
    "functional embedding": (
        lambda: Named(lambda m, t: F.embedding(t, m.e.weight), e=nn.Embedding(5, 8)), (TOKENS,), 1e-6,
    ),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 8, mode="sum"), (TOKENS,), 1e-6),
    "embedding that renormalises itself": (lambda: nn.Embedding(5, 8, max_norm=0.5), (TOKENS,), 1e-6),
    "attention": (
        lambda: Named(lambda m, s: m.a(s, s, s, need_weights=False)[0],
                      a=nn.MultiheadAttention(8, 2, batch_first=True)),
        (SEQUENCE,),
        1e-5,
    ),
    "attention with other key sizes": (
        lambda: Named(lambda m, s: m.a(s, s[..., :3], s[..., :5])[0], a=nn.MultiheadAttention(8, 2, kdim=3, vdim=5)),
        (SEQUENCE,),
        1e-5,
    ),
    "transformer encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (SEQUENCE,), 1e-5),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (SEQUENCE,), 1e-5,
    ),
    "transformer": (
        lambda: Named(lambda m, s: m.t(s, s), t=nn.Transformer(8, 2, 1, 1, 16, batch_first=True)), (SEQUENCE,), 1e-5,
    ),
    "lstm": (
        lambda: Named(lambda m, s: m.r(s)[0], r=nn.LSTM(8, 5, num_layers=2, bidirectional=True)), (SEQUENCE,), 1e-5,
    ),
    "gru": (lambda: Named(lambda m, s: m.r(s)[0], r=nn.GRU(8, 5, batch_first=True)), (SEQUENCE,), 1e-5),
    "lstm cell": (lambda: Named(lambda m, x: m.r(x)[0], r=nn.LSTMCell(6, 5)), (X,), 1e-6),
    "transposed, viewed, indexed": (
        lambda: Named(lambda m, x: x @ m.w.T.reshape(6, 4) + m.w.view(-1)[:4] + m.w[0, 1] + m.w[..., None].mean(),
                      w=weight(4, 6)),
        (X,), 1e-6,
    ),
    "operators on both sides": (
        lambda: Named(lambda m, x: (2 - m.w) * (x / (1 + m.w**2)) @ m.w + (-m.w).abs().sum() + 1 / m.w[0], w=weight(6)),
        (X,), 1e-6,
    ),
    "parameters put together": (
        lambda: Named(lambda m, x: x @ torch.cat([m.a, m.b]) + torch.stack((m.c, m.c)).sum(0),
                      a=weight(2, 3), b=weight(4, 3), c=weight(3)),
        (X,), 1e-6,
    ),
    "by keyword": (
        lambda: Named(lambda m, x: F.linear(input=x, weight=m.w, bias=m.b) + torch.einsum("bi,oi->bo", x, m.w),
                      w=weight(3, 6), b=weight(3)),
        (X,), 1e-6,
    ),
    "iterated over": (lambda: Named(lambda m, x: sum(x @ row for row in m.w), w=weight(3, 6)), (X,), 1e-6),
    "through .data and detach": (
        lambda: Named(lambda m, x: x @ m.w.data.T + m.w.detach().sum(), w=weight(3, 6)), (X,), 1e-6,
    ),
    "written into another tensor": (
        lambda: Named(lambda m, x: torch.zeros(6, 3).copy_(m.w).add_(m.w) + x.sum(), w=weight(6, 3)), (X,), 1e-6,
    ),
    "containers": (weights_in_containers, (X,), 1e-6),
    "weight norm": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh()), (X,), 1e-6,
    ),
    "spectral norm": (lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), (X,), 1e-6),
    "custom autograd function": (lambda: Named(lambda m, x: Twice.apply(x, m.w), w=weight(3, 6)), (X,), 1e-6),
    "torch.ops": (lambda: Named(lambda m, x: torch.ops.aten.mm(x, m.w), w=weight(6, 3)), (X,), 1e-6),
    "functional call": (
        lambda: Named(lambda m, x: torch.func.functional_call(m.a, dict(m.a.named_parameters()), (x,)),
                      a=nn.Linear(6, 3)),
        (X,), 1e-6,
    ),
    "gradient of its input": (gradient_of_its_input, (X,), 1e-5),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))), (X,), 1e-6),
    "traced": (lambda: torch.jit.trace(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), X), (X,), 1e-6),
    "scripted inside": (lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 3))), (X,), 1e-6),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), backend="eager"), (X,), 1e-6),
    "compiled in place": (compiled_in_place, (X,), 1e-6),
    "mixed dtypes": (mixed_dtypes, (X,), 1e-6),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16(), (X.bfloat16(),), 1e-6),
    "float16": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).half(), (X.half(),), 1e-6),
    "frozen bottom": (frozen_bottom, (X,), 1e-6),
    "batch norm": (batch_norm, (X,), 1e-6),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), (X,), 1e-6),
    "not contiguous": (
        lambda: Named(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(3, 6).T)), (X,), 1e-6,
    ),
    "an empty parameter": (
        lambda: Named(lambda m, x: m.a(x), e=nn.Parameter(torch.empty(0)), a=nn.Linear(6, 3)), (X,), 1e-6,
    ),
}  # fmt: skip


@torch.jit.script
def scripted_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w)


UNMET = {
    "vmap over a parameter": lambda: Named(lambda m, x: torch.vmap(lambda w: x @ w)(m.w), w=weight(3, 6)),
    "a scripted function": lambda: Named(lambda m, x: scripted_product(x, m.w), w=weight(6)),
}


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
        assert not torch.allclose(plain.float(), got.float(), rtol=1e-4), "the look made no difference"
    assert bits(model) == before and p.digest() == digest and p.rest_digest() == rest


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_look_computes_what_a_deep_copy_at_those_weights_computes(name: str) -> None:
    torch.manual_seed(3)
    make, inputs, rtol = ARCHITECTURES[name]
    assert_truth(make(), inputs, rtol)


@pytest.mark.parametrize("name", UNMET)
def test_a_use_that_no_torch_function_shows_is_met_too(name: str) -> None:
    torch.manual_seed(3)
    assert_truth(UNMET[name](), (X,), 1e-6)


def test_a_use_that_no_torch_function_shows_is_met_at_every_look() -> None:
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


def test_a_scripted_function_is_met_at_every_look() -> None:
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
def test_a_look_past_steps_computes_what_a_deep_copy_moved_by_them_computes(name: str, distribution: str) -> None:
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


# Whether all uses are met is seen once.


@pytest.mark.parametrize("name", [*ARCHITECTURES, *UNMET])
def test_models_whose_uses_are_met_keep_streaming_and_the_others_are_copied(name: str) -> None:
    torch.manual_seed(3)
    make, inputs, rtol = ARCHITECTURES.get(name, (UNMET.get(name), (X,), 1e-6))
    model = make()
    twin, p = copy.deepcopy(model), Parameters(model)
    before, state = bits(model), torch.get_rng_state()
    plain = p.substitutable
    with torch.no_grad():
        p.check_uses(lambda: model(*inputs).float().square().mean(), SOME_PROBE)
        assert p.substitutable == (plain and name not in UNMET)
        with p.perturbed(SOME_PROBE):
            got = model(*inputs)
        set_weights(twin, p.layout, [], SOME_PROBE)
        torch.testing.assert_close(got, twin.eval()(*inputs), rtol=rtol, atol=rtol)
    assert bits(model) == before and torch.equal(torch.get_rng_state(), state)


def test_seeing_whether_uses_are_met_takes_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(12)])
    p, made, largest = Parameters(model), [0], 400 * 401 * 4
    original = torch.Tensor.to

    def to(t: Tensor, *arguments: Any, **named: Any) -> Tensor:
        result = original(t, *arguments, **named)
        made[0] = max(made[0], result.untyped_storage().nbytes())
        return result

    monkeypatch.setattr(p, "copied", lambda *_: pytest.fail("a second copy was made"))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(blocks_module, "CACHE_BYTES", largest)
    x = torch.randn(2, 400)
    with torch.no_grad():
        p.check_uses(lambda: model(x).square().mean(), SOME_PROBE)
    assert p.substitutable and 0 < made[0] <= 400 * 4  # the decoys of a layer: one number a row


def test_a_loss_that_differs_from_call_to_call_is_not_taken_for_one_that_is_not_met() -> None:
    model, noise = nn.Linear(6, 3), np.random.default_rng(0)
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: float(model(X).square().mean()) + 0.01 * noise.normal(), SOME_PROBE)
    assert p.substitutable


def test_a_random_loss_that_happens_to_repeat_itself_once_is_not_taken_for_one_that_is_not_met() -> None:
    model = nn.Linear(6, 3)
    noise = iter([0.0, 1.0, 0.0, 1e-4, 0.5, 1.0, 0.2, 0.3, 0.4])
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: float(model(X).square().mean()) + next(noise), SOME_PROBE)
    assert p.substitutable


def test_a_model_that_is_distrusted_within_its_first_look_stays_so() -> None:
    model = nn.Linear(6, 3)
    p = Parameters(model)
    with torch.no_grad(), p.perturbed(SOME_PROBE):
        p.distrust()
        model(X)
    assert not p.substitutable


def test_w_itself_is_computed_without_a_substitution_where_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 3)
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: model(X).square().mean(), SOME_PROBE)
    monkeypatch.setattr(parameters, "Substitution", lambda *_: pytest.fail("torch.compile would run eagerly"))
    with p.perturbed(None):
        model(X)


def test_a_thread_that_computes_a_renormalising_embedding_leaves_w_alone() -> None:
    model = nn.Embedding(5, 8, max_norm=0.5)
    p = Parameters(model)
    before, versions = bits(model), p.versions()
    with p.perturbed(None):
        thread = threading.Thread(target=lambda: model(TOKENS))
        thread.start()
        thread.join()
    assert bits(model) == before and p.versions() == versions


def test_what_a_first_call_keeps_is_made_of_the_weights_themselves() -> None:
    model, kept = nn.Linear(6, 3), []
    p = Parameters(model)

    def loss() -> Tensor:
        if not kept:
            kept.append(model.weight.clone())
        return (model.weight - kept[0]).square().sum()

    with torch.no_grad():
        p.check_uses(loss, SOME_PROBE)
    assert torch.equal(kept[0], model.weight) and p.substitutable


@pytest.mark.parametrize("rest", [0.0, 1.0])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("scripted", [False, True])
def test_a_view_of_a_weight_that_was_kept_from_before_is_refused_by_name(
    made: str, rest: float, scripted: bool
) -> None:
    views: list[Tensor] = []
    layer: nn.Module = nn.Linear(6, 3)
    model = nn.Sequential(torch.jit.script(layer) if scripted else layer)
    views += [layer.weight.detach()[1:]] if made == "before" else []
    p = Parameters(model)
    views += [layer.weight.T[2:]] if made == "after" else []
    before = bits(model)
    with torch.no_grad(), pytest.raises(ModelError, match=r"'0\.weight' is also read through a view"):
        p.check_uses(lambda: views[0].square().sum() + rest * model(X).square().sum(), SOME_PROBE)
    assert bits(model) == before


def test_a_copy_of_the_starting_weights_may_be_read() -> None:
    model = nn.Linear(6, 3)
    kept = model.state_dict()  # holds the old memory, and is not read
    start = model.weight.detach().clone()
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: model(X).square().sum() + (model.weight - start).square().sum(), SOME_PROBE)
    assert p.substitutable and torch.equal(kept["weight"], start)


def test_a_loss_that_raises_is_not_taken_for_one_that_is_not_met() -> None:
    model, calls = nn.Linear(6, 3), [0]
    p = Parameters(model)

    def loss() -> Tensor:
        calls[0] += 1
        if calls[0] > 1:
            raise RuntimeError("no memory")
        return model(X).sum()

    with torch.no_grad(), pytest.raises(RuntimeError, match="no memory"):
        p.check_uses(loss, SOME_PROBE)
    assert p.substitutable and p.attached


def test_a_second_copy_of_a_large_model_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UNMET["vmap over a parameter"]()
    p = Parameters(model)
    monkeypatch.setattr(parameters, "COPY_UNTOLD_BYTES", 10)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="a second copy of them"):
        p.check_uses(lambda: model(X).square().mean(), SOME_PROBE)


def test_autocast_does_not_keep_the_weights_of_another_look() -> None:
    model = nn.Linear(6, 3)
    p = Parameters(model)
    p.distrust()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(X)
        outputs = []
        for index in range(2):
            with p.perturbed(Probe(7, 0, index, 0.5)):
                outputs.append(model(X))
        assert torch.equal(model(X), plain)
    assert not torch.equal(outputs[0], plain) and not torch.equal(outputs[0], outputs[1])


# Looking never changes.


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


def test_many_looks_leave_every_bit_in_16_bits_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).bfloat16()
    p = Parameters(model)
    before = bits(model)
    for t in range(40):
        with torch.no_grad(), p.perturbed(Probe(1, t, 0, 0.01 * (-1) ** t)):
            model(X.bfloat16())
    assert bits(model) == before


def test_batched_looks_agree_with_single_ones_and_leave_every_bit() -> None:
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


def test_dropout_is_off_in_a_look_and_train_mode_comes_back_where_it_was() -> None:
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
def test_a_buffer_that_changes_at_a_later_look_is_refused_too(how: str) -> None:
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


def test_batch_norm_statistics_do_not_move_in_a_look() -> None:
    model = batch_norm()
    p = Parameters(model)
    model.train()
    kept = [b.clone() for b in model.buffers()]
    for probe in (SOME_PROBE, None):
        with torch.no_grad(), p.perturbed(probe):
            model(X)
    assert all(torch.equal(a, b) for a, b in zip(kept, model.buffers(), strict=True))


# What can't be trained is refused.


def overlapping() -> nn.Module:
    base = torch.randn(10)
    return Named(lambda m: m.a, a=nn.Parameter(base[:6]), b=nn.Parameter(base[3:9]))


def same_storage() -> nn.Module:
    base = torch.randn(4)
    return Named(lambda m: m.a, a=nn.Parameter(base), b=nn.Parameter(base))


def view_in_a_buffer() -> nn.Module:
    layer = nn.Linear(6, 3)
    return Named(lambda m, x: m.layer(x), layer=layer, shown=layer.weight.detach()[1])


def frozen_in_the_same_memory() -> nn.Module:
    base = torch.randn(4, 6)
    return Named(lambda m: m.a, a=nn.Parameter(base), b=nn.Parameter(base[:, ::2], requires_grad=False))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "NaN": (lambda: Named(lambda m: m.w, w=nn.Parameter(torch.tensor([1.0, math.nan]))), "'w'.*not finite"),
    "infinity": (lambda: Named(lambda m: m.w, w=nn.Parameter(torch.tensor([math.inf]))), "'w'.*not finite"),
    "nothing trainable": (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
    "no parameter at all": (lambda: nn.ReLU(), "no trainable parameter"),
    "one storage, two parameters": (same_storage, "'a' and 'b' share memory"),
    "a buffer in the memory of a weight": (view_in_a_buffer, "'shown'.*shares memory with.*'layer.weight'"),
    "a frozen weight in that of a trained one": (frozen_in_the_same_memory, "'b'.*shares memory with.*'a'"),
    "overlapping views": (overlapping, "'a' and 'b' share memory"),
    "float64": (lambda: nn.Linear(2, 2).double(), "float64"),
    "lazy": (lambda: nn.LazyLinear(2), "not initialised"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight'.*ordinary tensor"),
    "sparse": (lambda: Named(lambda m: m.w, w=nn.Parameter(torch.eye(2).to_sparse())), "'w'.*ordinary tensor"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_can_not_be_trained_is_refused_with_the_reason(why: str) -> None:
    make, message = REFUSED[why]
    with pytest.raises(ModelError, match=message):
        Parameters(make())


def test_neighbouring_views_of_one_storage_are_no_shared_memory() -> None:
    base = torch.randn(10)
    model = Named(lambda m: m.a.sum() + m.b.sum(), b=nn.Parameter(base[6:]), a=nn.Parameter(base[:6]))
    assert Parameters(model).dimension == 10
    assert Parameters(model).dimension == 10  # nor are the segments of an earlier Parameters


def test_a_frozen_weight_in_the_gaps_of_a_trained_one_shares_no_memory_with_it() -> None:
    base = torch.randn(4, 6)
    model = Named(lambda m: m.a, a=nn.Parameter(base[:, :3]), b=nn.Parameter(base[:, 3:], requires_grad=False),
                  c=base[2:, 3:])  # fmt: skip
    assert Parameters(model).dimension == 12
    model.c = base[2:, 2:4]
    model.a.data = base[:, :3]
    with pytest.raises(ModelError, match=r"'c'.*shares memory with.*'a'"):
        Parameters(model)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "type": lambda m: m.half(),
    "storage": lambda m: setattr(m[1].weight, "data", m[1].weight.data.clone()),
    "a second Parameters": Parameters,
}


@pytest.mark.parametrize("move", MOVES)
def test_a_parameter_that_was_moved_afterwards_is_refused_by_name(move: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    p = Parameters(model)
    MOVES[move](model)
    name = "1.weight" if move == "storage" else "0.weight"
    for act in (
        p.digest,
        lambda: p.commit(some_step(1)),
        lambda: p.load(p.state()),
        lambda: p.perturbed(SOME_PROBE).__enter__(),
    ):
        with pytest.raises(ModelError, match=f"'{name}' was moved or converted|do not fit"):
            act()


# Layout.


def test_the_layout_counts_coordinates_in_named_parameters_order_and_ties_once() -> None:
    model = tied_language_model()
    entries = [(e.name, e.shape, e.dtype, e.offset) for e in Parameters(model).layout]
    assert entries == [
        ("embedding.weight", (5, 8), "float32", 0),
        ("body.weight", (8, 8), "float32", 40),
        ("body.bias", (8,), "float32", 104),
        ("output.bias", (5,), "float32", 112),
    ]
    assert Parameters(model).dimension == 117


def test_frozen_parameters_stay_out_and_types_may_be_mixed() -> None:
    assert [e.name for e in Parameters(frozen_bottom()).layout] == ["2.weight", "2.bias"]
    p = Parameters(mixed_dtypes())
    assert [(e.dtype, e.offset) for e in p.layout] == [
        ("bfloat16", 0), ("bfloat16", 48), ("float32", 56), ("float32", 64), ("float16", 72), ("float16", 96)
    ]  # fmt: skip
    assert p.dimension == p.vector().numel() == 99


def test_taking_a_model_over_changes_neither_its_values_nor_its_parameter_objects() -> None:
    model = ARCHITECTURES["not contiguous"][0]()
    objects, values = list(model.parameters()), [q.detach().clone() for q in model.parameters()]
    p = Parameters(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    assert torch.equal(p.vector(), torch.cat([v.reshape(-1) for v in values]))


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("encoder.layer.3.attention.query.weight", "encoder.layer.3"),
        ("embedding.weight", "embedding"),
        ("w", ""),
        ("0.weight", "0"),
    ],
)
def test_a_block_ends_at_the_first_number_of_the_path(name: str, block: str) -> None:
    assert block_of(name) == block


def test_direction_tensors_are_the_rows_cut_to_shapes() -> None:
    p = Parameters(ARCHITECTURES["mlp"][0](), "sphere")
    rows = p.unflatten(p.directions(1, 2, 3, 4))
    for a, b in zip(p.direction_tensors(1, 2, 3, 4), rows, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
@pytest.mark.parametrize("step", [
    Step(1, 2, np.linspace(-1, 1, 4).astype(np.float32), first=3),  # the directions that are still in memory
    Step(1, 2, np.linspace(-1, 1, 4).astype(np.float32), first=4),
    Step(1, 5, np.linspace(-1, 1, 4).astype(np.float32), first=3),
    Step(6, 2, np.linspace(-1, 1, 4).astype(np.float32), first=3),  # another key
    Step(1, 2, np.linspace(-1, 1, 3).astype(np.float32), first=3),
])  # fmt: skip
def test_a_commit_by_directions_still_in_memory_has_the_same_bits(step: Step, distribution: str) -> None:
    fresh, drawn = (Parameters(make_model("mlp"), distribution) for _ in range(2))
    drawn.direction_tensors(1, 2, 3, 4)
    for p in (fresh, drawn):
        p.commit(step)
        p.commit(step)  # a second time they are drawn anew
    assert fresh.digest() == drawn.digest()


def test_directions_in_memory_do_not_serve_sixteen_bits_or_large_models() -> None:
    step = Step(1, 2, np.ones(4, dtype=np.float32), first=0)
    for dtype in ("float16", "bfloat16"):
        fresh, drawn = (Parameters(make_model("mlp", dtype=dtype)) for _ in range(2))
        drawn.direction_tensors(1, 2, 0, 4)
        fresh.commit(step)
        drawn.commit(step)
        assert fresh.digest() == drawn.digest()
    large = Parameters(nn.Linear(1100, 1000))
    large.direction_tensors(1, 2, 0, 1)
    assert large._drawn is None


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
    assert not live, "stand-ins outlive the look"
    if sum(s.buffer.nbytes for s in p.segments) <= blocks_module.CACHE_BYTES:
        assert made[0] == blocks, "a small model is perturbed once"


# Committing.


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "name", ["mlp", "tied embedding and output", "mixed dtypes", "bfloat16", "float16", "scripted"]
)
def test_a_commit_is_the_defined_one_at_every_coordinate(name: str, distribution: str) -> None:
    torch.manual_seed(4)
    model = ARCHITECTURES[name][0]()
    twin = copy.deepcopy(model)
    p = Parameters(model, distribution)
    set_weights(twin, p.layout, [some_step(3)], None, distribution)
    before = bits(model)
    p.commit(some_step(3))
    assert bits(model) == bits(twin) != before


@pytest.mark.parametrize("radius", [None, 3.0])
@pytest.mark.parametrize("name", ["mlp", "mixed dtypes", "bfloat16"])
def test_replaying_many_rounds_is_committing_them_one_by_one(
    name: str, radius: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "STEPS_PER_PASS", 7)
    model = ARCHITECTURES[name][0]()
    twin = copy.deepcopy(model)
    p, q = Parameters(model), Parameters(twin)
    steps = [some_step(t) for t in range(20)]
    p.replay(steps, radius)
    for step in steps:
        q.commit(step, radius)
    assert p.digest() == q.digest() and bits(model) == bits(twin)
    p.replay([])
    assert p.digest() == q.digest()


def test_a_commit_does_not_depend_on_how_the_model_is_cut() -> None:
    """The same vector as one parameter and as many in different blocks: the same bits after the same steps."""
    flat = torch.randn(3000) * 0.1
    one = Named(lambda m: m.w, w=nn.Parameter(flat.clone()))
    cuts = (1, 1023, 1000, 500, 476)
    many = nn.ModuleList([Named(lambda m: m.w, w=nn.Parameter(part.clone())) for part in flat.split(cuts)])
    p, q = Parameters(one), Parameters(many)
    assert len(p.segments) == 1 and len(q.segments) == 5
    for radius in (None, 2.0):
        for params in (p, q):
            params.replay([some_step(t) for t in range(3)], radius)
        assert torch.equal(p.vector(), q.vector()) and p.digest() == q.digest()


def test_the_digest_is_sha_256_of_the_little_endian_bytes_in_layout_order() -> None:
    model = mixed_dtypes()
    p = Parameters(model)
    data = b"".join(q.detach().contiguous().view(torch.uint8).numpy().tobytes() for q in model.parameters())
    assert len(data) == 2 * 56 + 4 * 16 + 2 * 27
    assert p.digest() == hashlib.sha256(data).hexdigest()
    with torch.no_grad():
        model.norm.bias[3] = -model.norm.bias[3]  # 0 becomes -0: other bits
    assert p.digest() != hashlib.sha256(data).hexdigest()


def test_the_rest_digest_follows_frozen_weights_and_buffers_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    p = Parameters(model)
    rest, digest = p.rest_digest(), p.digest()
    p.commit(some_step(1))
    model.scratch += 1
    assert p.rest_digest() == rest and p.digest() != digest
    digest = p.digest()
    seen = {rest}
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias, model[1].running_mean, model[1].num_batches_tracked):
            tensor += 1
            seen.add(p.rest_digest())
    assert len(seen) == 5 and p.digest() == digest


# The ball.


def norm(p: Parameters) -> float:
    return float(p.vector().double().norm())


@pytest.mark.parametrize("name", ["mlp", "tied embedding and output", "scripted"])
@pytest.mark.parametrize("radius", [1e-3, 0.5, 1.0])
def test_projection_puts_w_into_the_ball_along_its_own_line(name: str, radius: float) -> None:
    p = Parameters(ARCHITECTURES[name][0]())
    before = p.vector().double()
    p.project(radius)
    assert radius * (1 - 1e-5) < norm(p) <= radius * (1 + 1e-5)
    torch.testing.assert_close(p.vector().double() / radius, before / before.norm(), rtol=1e-5, atol=1e-7)
    once = p.vector()
    p.project(radius)
    torch.testing.assert_close(p.vector(), once, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("name", "ulp"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_projection_of_16_bit_weights_is_right_within_half_a_unit_in_the_last_place(name: str, ulp: float) -> None:
    p = Parameters(ARCHITECTURES[name][0]())
    p.project(0.5)
    assert abs(norm(p) - 0.5) <= 0.5 * ulp


@pytest.mark.parametrize("name", ["mlp", "mixed dtypes"])
def test_inside_the_ball_projection_leaves_every_bit(name: str) -> None:
    model = ARCHITECTURES[name][0]()
    p = Parameters(model)
    before = bits(model)
    p.project(norm(p) * 1.001)
    assert bits(model) == before


def test_many_small_weights_count_towards_the_norm() -> None:
    p = Parameters(Named(lambda m: m.w, w=nn.Parameter(torch.full((1_000_000,), 5e-4))))
    p.project(0.1)
    assert norm(p) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("other", [1.0, 0.0])  # alone, the huge one counts for exactly the most that is counted
def test_a_huge_weight_is_put_into_the_ball_at_once(other: float) -> None:
    p = Parameters(Named(lambda m: m.w, w=nn.Parameter(torch.tensor([1e6, other]))))
    p.project(1.0)
    assert norm(p) <= 1 + 1e-5


def test_projection_does_not_depend_on_how_the_model_is_cut() -> None:
    flat = torch.randn(20_000)
    one = Parameters(Named(lambda m: m.w, w=nn.Parameter(flat.clone())))
    parts = flat.split([1, 4095, 904, 10_000, 5000])
    many = Parameters(nn.ModuleList([Named(lambda m: m.w, w=nn.Parameter(q.clone())) for q in parts]))
    reverse = Parameters(Named(lambda m: m.w, w=nn.Parameter(flat.flip(0))))
    for p in (one, many, reverse):
        p.project(7.0)
    assert torch.equal(one.vector(), many.vector()) and torch.equal(one.vector(), reverse.vector().flip(0))
    assert not torch.equal(one.vector(), flat)


# Excursions and loading.


@pytest.mark.parametrize("name", ["mlp", "mixed dtypes", "bfloat16"])
def test_an_excursion_puts_every_bit_back_also_after_an_exception(name: str) -> None:
    model = ARCHITECTURES[name][0]()
    p = Parameters(model)
    before = bits(model)
    with p.excursion():
        p.commit(some_step(1))
        assert bits(model) != before
    assert bits(model) == before
    with pytest.raises(KeyboardInterrupt), p.excursion():
        p.commit(some_step(1))
        raise KeyboardInterrupt
    assert bits(model) == before


@pytest.mark.parametrize("name", ["mlp", "tied embedding and output", "mixed dtypes", "scripted"])
def test_what_one_model_saves_another_loads(name: str) -> None:
    p, q = (Parameters(ARCHITECTURES[name][0]()) for _ in range(2))
    assert p.digest() != q.digest()
    q.load(p.state())
    assert p.digest() == q.digest()
    with q.perturbed(None):  # and the model's own parameters hold it
        assert bits(q.model) == bits(p.model)


WRONG: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "one missing": lambda s: s.pop("0.bias"),
    "one too many": lambda s: s.update(extra=torch.zeros(2)),
    "another name": lambda s: s.update(bias=s.pop("0.bias")),
    "another shape": lambda s: s.update({"0.bias": torch.zeros(4)}),
    "transposed": lambda s: s.update({"0.weight": s["0.weight"].T}),
    "another type": lambda s: s.update({"0.bias": s["0.bias"].half()}),
    "float64": lambda s: s.update({"0.bias": s["0.bias"].double()}),
}


@pytest.mark.parametrize("how", WRONG)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(how: str) -> None:
    p = Parameters(ARCHITECTURES["mlp"][0]())
    digest, state = p.digest(), {name: t + 1 for name, t in p.state().items()}
    WRONG[how](state)
    with pytest.raises(
        ModelError, match=r"float64" if how == "float64" else r"do not fit.*(0\.bias|0\.weight|extra|bias)"
    ):
        p.load(state)
    assert p.digest() == digest


def test_a_frozen_weight_or_buffer_that_moves_in_memory_is_seen_by_its_address() -> None:
    """What was captured with the old address must not be used again."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].requires_grad_(False)
    parameters = Parameters(model)
    before = parameters.rest_addresses()
    assert parameters.rest_addresses() == before
    model[0].weight.data = model[0].weight.data.clone()
    moved = parameters.rest_addresses()
    assert moved != before
    model[1].running_mean = model[1].running_mean.clone()  # type: ignore[union-attr]
    assert parameters.rest_addresses() not in (before, moved)


def test_the_norm_of_the_ball_is_counted_in_whole_units_each_rounded_to_nearest() -> None:
    w, grid = torch.tensor([0.5, -0.25, 3e-7, 1e9]), 2**40
    small = round(float(torch.tensor(3e-7)) ** 2 * grid)  # 0.0989...: rounds to 0
    assert small == 0
    assert squared_norm_units(w, 1.0) == grid // 4 + grid // 16 + small + grid * 2**12  # the last one is limited
    assert squared_norm_units(torch.tensor([1e-6]), 1.0) == 1  # 1.0995: rounds to 1
