"""Models that use their weights in many ways, and copies of them with low-rank perturbations written into them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from architectures import Named, tied_language_model, weight
from torch import Tensor, nn
from torch.nn import functional as F

from cyber0.directions import Directions
from cyber0.model.vector import Parameters

_DRAWN = torch.Generator().manual_seed(5)
X = torch.randn(3, 6, generator=_DRAWN)
SEQUENCE = torch.randn(3, 4, 8, generator=_DRAWN)
TOKENS = torch.tensor([[1, 2, 3, 4], [4, 0, 2, 2], [3, 3, 1, 0]])
IMAGES = torch.randn(3, 2, 8, 8, generator=_DRAWN)
WIDE = torch.randn(2, 1 << 10, generator=_DRAWN)
SIGNALS = torch.randn(3, 2, 16, generator=_DRAWN)

Made = Callable[[], nn.Module]


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, groups=4),
        nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, groups=16, padding="same", dilation=2), nn.Flatten(),
        nn.Linear(144, 7),
    )  # fmt: skip


def positions_that_number_as_many_as_rows() -> nn.Module:
    """Of a batch of 3 samples at 6 probes there are 18 rows, and the positions are 18 as well."""
    return Named(lambda m, s: m.out(s + m.positions(torch.arange(18, device=s.device))[:4]),
                 positions=nn.Embedding(18, 8), out=nn.Linear(8, 8))  # fmt: skip


def tied_with_positions() -> nn.Module:
    def forward(m: Any, t: Tensor) -> Tensor:
        positions = m.positions(torch.arange(4, device=t.device))
        return F.linear(torch.tanh(m.body(m.tokens(t) + positions)), m.tokens.weight)

    return Named(forward, tokens=nn.Embedding(9, 8), positions=nn.Embedding(7, 8), body=nn.Linear(8, 8))


def some_rows() -> nn.Module:
    def forward(m: Any, s: Tensor) -> Tensor:
        index = 4 - 3 * torch.arange(2, device=s.device)  # made on the device: a copy to it can't be captured
        return F.linear(s, m.w.index_select(0, index).float(), m.b[:2]) + F.linear(s, m.w[3:5])

    return Named(forward, w=weight(9, 8), b=weight(4))


def class_token() -> nn.Module:
    return Named(
        lambda m, s: m.out(torch.cat([m.token.expand(len(s), -1, -1), m.first(s)], 1) + m.positions[:, :5]),
        token=weight(1, 1, 8), positions=weight(1, 6, 8), first=nn.Linear(8, 8), out=nn.Linear(8, 3),
    )  # fmt: skip


def trained_biases() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    return model


def low_rank_adapter() -> nn.Module:
    """A frozen layer with two thin trained matrices beside it."""
    frozen = nn.Linear(8, 8)
    frozen.requires_grad_(False)
    return Named(lambda m, s: m.frozen(s) + 2 * m.up(m.down(s)), frozen=frozen, down=nn.Linear(8, 4, bias=False),
                 up=nn.Linear(4, 8, bias=False))  # fmt: skip


def attention() -> nn.Module:
    """Over samples that come second, as nn.MultiheadAttention has them by default."""
    return Named(lambda m, s: m.a(*[s.transpose(0, 1)] * 3)[0].transpose(0, 1), a=nn.MultiheadAttention(8, 2))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


BATCHED: dict[str, tuple[Made, Tensor]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 30)), X),
    "2d convolutions with norms": (convolutions, IMAGES),
    "1d convolutions with a norm": (
        lambda: nn.Sequential(nn.Conv1d(2, 12, 5, padding=2, padding_mode="circular"),
                              nn.InstanceNorm1d(12, affine=True), nn.ReLU(), nn.Conv1d(12, 4, 3)),
        SIGNALS,
    ),
    "3d convolution": (lambda: nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 12, 2), nn.Flatten()), IMAGES),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)), X),
    "transformer encoder": (encoder, SEQUENCE),
    "attention over samples that come second": (attention, SEQUENCE),
    "attention to something else": (
        lambda: Named(lambda m, s: m.a(s, s[:, :2], s[:, :2])[0],
                      a=nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)),
        SEQUENCE,
    ),
    "tied embedding and output": (tied_language_model, TOKENS),
    "tied embedding, positions without samples": (tied_with_positions, TOKENS),
    "as many positions as rows": (positions_that_number_as_many_as_rows, SEQUENCE),
    "class token": (class_token, SEQUENCE),
    "norm that is written out": (
        lambda: Named(lambda m, s: m.out(s * (1 + m.scale.float())) + m.shift,
                      scale=weight(8), shift=weight(9), out=nn.Linear(8, 9)),
        SEQUENCE,
    ),
    "norms": (
        lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 16), nn.LayerNorm(16), nn.LayerNorm((4, 16)),
                              nn.LayerNorm(16, bias=False)),
        SEQUENCE,
    ),
    "one layer fed by weights alone": (
        lambda: Named(lambda m, s: (s @ m.second(torch.tanh(m.first(torch.arange(4, device=s.device)))).T).sum(1),
                      first=nn.Embedding(4, 9), second=nn.Linear(9, 8)),
        SEQUENCE,
    ),
    "addmm": (
        lambda: Named(lambda m, s: torch.addmm(m.b, s.view(-1, 8), m.w).view(*s.shape[:2], 9), w=weight(8, 9),
                      b=weight(9)),
        SEQUENCE,
    ),
    "transposes": (
        lambda: Named(lambda m, s: s @ m.w.T @ m.w.t().T @ m.w.transpose(0, 1) @ m.w @ m.w.mT, w=weight(9, 8)),
        SEQUENCE,
    ),
    "some rows of a weight": (some_rows, SEQUENCE),
    "bias alone": (trained_biases, SEQUENCE),
    "adapter beside a frozen layer": (low_rank_adapter, SEQUENCE),
    "table of positions that is added": (
        lambda: Named(lambda m, s: m.out(s + m.table[:4]), table=weight(9, 8), out=nn.Linear(8, 9)), SEQUENCE,
    ),
    "einsum": (lambda: Named(lambda m, x: torch.einsum("bi,oi->bo", x, m.w), w=weight(9, 6)), X),
    "time first, merged with samples": (
        lambda: Named(lambda m, s: m.a(s.transpose(0, 1).reshape(-1, 8)).view(4, -1, 8).transpose(0, 1),
                      a=nn.Linear(8, 8)),
        SEQUENCE,
    ),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 12, 3), IMAGES),
    "norm of a matrix": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 9)), X),
    "penalty on a bias": (
        lambda: Named(lambda m, s: m.a(s).sum((1, 2)) + (m.a.bias**2).sum(), a=nn.Linear(8, 8)), SEQUENCE,
    ),
}  # fmt: skip
"""Models that compute many probes at once."""

ONE_BY_ONE: dict[str, tuple[Made, Tensor]] = {
    "lstm": (lambda: Named(lambda m, s: m.r(s)[0], r=nn.LSTM(8, 9, batch_first=True)), SEQUENCE),
    "matrix that is built": (lambda: Named(lambda m, x: x @ torch.cat([m.w, m.w]).T, w=weight(1 << 10, 1 << 10)), WIDE),
    "embedding that renormalises itself": (lambda: nn.Embedding(9, 8, max_norm=0.5), TOKENS),
    "gradient of its input": (
        lambda: Named(lambda m, x: torch.func.vmap(torch.func.grad(lambda v: torch.tanh(m.a(v)).sum()))(x),
                      a=nn.Linear(6, 9)),
        X,
    ),
    "an exception that the model catches": (lambda: Named(_caught, w=weight(1 << 10, 1 << 10)), WIDE),
}  # fmt: skip
"""Models that compute one probe at a time."""

WRONG_WHEN_BATCHED: dict[str, tuple[Made, Tensor]] = {
    "samples that are compared with each other": (
        lambda: Named(lambda m, x: m.a(x) - m.a(x).mean(0), a=nn.Linear(6, 9)), X,
    ),
    "samples in both orders": (
        lambda: Named(lambda m, s: m.b(m.a(s.transpose(0, 1).reshape(-1, 8)).view(4, -1, 8).transpose(0, 1)
                                       .reshape(-1, 8)).view(-1, 4, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        SEQUENCE,
    ),
}  # fmt: skip
"""Models in which rows of different probes meet, so that a batch of several probes gives something else."""


def _caught(module: Any, x: Tensor) -> Tensor:
    try:
        return x @ torch.cat([module.w, module.w]).T
    except Exception:
        return x.repeat(1, 2)


def _scaled_in_place(module: Any, x: Tensor) -> Tensor:
    w = module.w.clone()
    w.mul_(2.0)
    w[0] = 1.0
    return x @ w.T


WRITING: dict[str, tuple[Made, Tensor]] = {
    "a copy of a weight that is written to": (lambda: Named(_scaled_in_place, w=weight(9, 6)), X),
    "a weight that is written to": (lambda: Named(lambda m, x: x @ m.w.data.mul_(2.0).T, w=weight(9, 6)), X),
}  # fmt: skip
"""Models that write to weights, or to what they compute from them: they need perturbed weights."""


def moved_copy(model: nn.Module, rank: int, directions: Directions, index: int, distance: float) -> nn.Module:
    """A copy of the model with w + c z written into it, z by the definition."""
    laid_out = low_rank_parameters(copy.deepcopy(model), rank)
    d, place = directions, laid_out.space.coordinates
    z = torch.from_numpy(place(d.seed, d.round, d.first + index, 0, laid_out.dimension))
    laid_out.set_vector(laid_out.vector() + distance * z)
    return laid_out.model.eval()


def low_rank_parameters(model: nn.Module, rank: int = 1, **options: Any) -> Parameters:
    """The weights of a model that is probed along low-rank directions."""
    return Parameters(model, "low_rank", rank=rank, **options)
