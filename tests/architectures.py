"""Models of many architectures with inputs for them, and w + c z written into a model by the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyber0.directions import DirectionSpace, Probe, Step, definition

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
    named, space = dict(model.named_parameters()), DirectionSpace.of(distribution, [e.shape for e in layout])
    for e in layout:
        p = named[e.name]
        new = definition.apply(stored(p), e.dtype, e.offset, steps, probe, space)
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
