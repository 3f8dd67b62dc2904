"""Probes along low-rank directions, one or many at a time, give what copies with moved weights give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fake_triton
import numpy as np
import pytest
import torch
from low_rank_models import BATCHED, ONE_BY_ONE, TOKENS, WRITING, WRONG_WHEN_BATCHED, low_rank_parameters, moved_copy
from torch import Tensor, nn
from torch.nn import functional

from cyber0.directions import Directions, DirectionSpace
from cyber0.directions.backends import backend_of
from cyber0.model import low_rank_layers
from cyber0.model.factors import ProbeBatch
from cyber0.model.low_rank import Ungroupable
from cyber0.model.low_rank_probes import LowRankProbes

DIRECTIONS = Directions(2**63 + 1, 9, 3, 4)
DISTANCES = (0.1, -0.1)
ROUNDING = 2e-6
RANKS = (1, pytest.param(3, marks=pytest.mark.slow))

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def probed(make: Any, rank: int) -> tuple[nn.Module, LowRankProbes]:
    torch.manual_seed(3)
    model = make().eval()
    probes = low_rank_parameters(model, rank).low_rank
    assert probes is not None
    return model, probes


def expected(model: nn.Module, rank: int) -> Callable[[Tensor], Tensor]:
    """Return what gives the outputs at all probes, in the order of their groups."""
    copies = [moved_copy(model, rank, DIRECTIONS, r, c) for r in range(DIRECTIONS.k) for c in DISTANCES]
    return lambda x: torch.stack([moved(x) for moved in copies])


def far(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


def batched(model: nn.Module, probes: LowRankProbes, x: Tensor, rows_inside: bool) -> Tensor:
    batch = ProbeBatch(DIRECTIONS, DISTANCES)
    return probes.learn(lambda times: model(torch.cat([x] * times)), len(x), batch, rows_inside=rows_inside)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", BATCHED | ONE_BY_ONE | WRONG_WHEN_BATCHED)
def test_a_probe_gives_what_a_copy_with_moved_weights_gives(name: str, rank: int) -> None:
    make, x = (BATCHED | ONE_BY_ONE | WRONG_WHEN_BATCHED)[name]
    model, probes = probed(make, rank)
    right = expected(model, rank)(x)
    for g, (r, c) in enumerate((r, c) for r in range(DIRECTIONS.k) for c in DISTANCES):
        single = Directions(DIRECTIONS.seed, DIRECTIONS.round, 1, DIRECTIONS.first + r)
        with probes.at(ProbeBatch(single, (c,))):
            found = model(x)
        assert far(found, right[g]) < ROUNDING
    assert far(right[0], right[1]) > 1e-3, "the probe made no difference"


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", BATCHED)
def test_probes_at_once_give_what_copies_with_moved_weights_give(name: str, rank: int) -> None:
    make, x = BATCHED[name]
    model, probes = probed(make, rank)
    at_probes = expected(model, rank)
    right, errors = at_probes(x), []
    for rows_inside in (False, True):
        errors.append(far(batched(model, probes, x, rows_inside).view(right.shape), right))
    assert min(errors) < ROUNDING
    # Another batch, of other samples, by what was learned.
    rows_inside = errors[1] < errors[0]
    batched(model, probes, x, rows_inside)
    y = torch.cat([x[1:], x])
    right = at_probes(y)
    batch = ProbeBatch(DIRECTIONS, DISTANCES)
    with probes.at(batch, len(y) * batch.groups):
        assert far(model(torch.cat([y] * batch.groups)).view(right.shape), right) < ROUNDING


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_weight_that_is_used_otherwise_is_refused_for_probes_at_once(name: str) -> None:
    make, x = ONE_BY_ONE[name]
    model, probes = probed(make, 1)
    with pytest.raises(Ungroupable):
        batched(model, probes, x, False)


@pytest.mark.parametrize("name", WRONG_WHEN_BATCHED)
def test_rows_that_meet_show_in_the_result(name: str) -> None:
    make, x = WRONG_WHEN_BATCHED[name]
    model, probes = probed(make, 1)
    right = expected(model, 1)(x)
    for rows_inside in (False, True):
        assert far(batched(model, probes, x, rows_inside).view(right.shape), right) > 1e-3


def test_a_pass_that_differs_from_the_one_that_was_learned_is_refused() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.both = nn.Linear(6, 9), nn.Linear(6, 9), False

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) if self.both else self.a(x)

    model, probes = probed(Sometimes, 1)
    x, batch = torch.randn(3, 6), ProbeBatch(DIRECTIONS, DISTANCES)
    batched(model, probes, x, False)
    model.both = True
    with pytest.raises(Ungroupable), probes.at(batch, 18):
        model(torch.cat([x] * 6))


def test_w_itself_can_be_one_of_the_groups() -> None:
    make, x = BATCHED["mlp"]
    model, probes = probed(make, 2)
    batch = ProbeBatch(DIRECTIONS, (0.1,), with_w=True)
    found = probes.learn(lambda times: model(torch.cat([x] * times)), len(x), batch).view(4, len(x), -1)
    assert far(found[0], model(x)) < ROUNDING
    for r in range(3):
        assert far(found[1 + r], moved_copy(model, 2, DIRECTIONS, r, 0.1)(x)) < ROUNDING


def test_factors_are_drawn_again_in_the_same_places() -> None:
    _, probes = probed(lambda: nn.Linear(6, 9), 1)
    batch = ProbeBatch(DIRECTIONS, DISTANCES)
    before = probes.factors(batch)
    left = before.of(0, torch.float32).left  # type: ignore[union-attr]
    values, address = left.clone(), left.data_ptr()
    other = ProbeBatch(Directions(1, 2, 3), (0.2, -0.2))
    assert probes.factors(other) is before
    assert left.data_ptr() == address and not torch.equal(left, values)
    assert before.distances[0].tolist() == pytest.approx([0.2, -0.2])
    probes.factors(batch)
    assert torch.equal(left, values)


@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("rank", RANKS)
def test_factors_lie_at_aligned_places_with_the_same_values(
    alignment: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyber0.model.factors.ALIGNMENT", alignment)
    make, x = BATCHED["tied embedding, positions without samples"]
    model, probes = probed(make, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cyber0.model.factors.aligned", lambda _: True)
        right = expected(model, rank)(x)
        assert far(batched(model, probes, x, False).view(right.shape), right) < ROUNDING
    found = probes.factors(ProbeBatch(DIRECTIONS, DISTANCES)).of(0, torch.float32)
    assert found.left[0, 0].storage_offset() % alignment == 0  # type: ignore[union-attr]
    assert found.right[1, rank - 1].storage_offset() % alignment == 0  # type: ignore[union-attr]


def test_a_bias_in_sixteen_bits_moves_by_the_distance_itself() -> None:
    """Rounded to bfloat16, 0.001 is 0.00099945; over many entries only their own rounding may show."""
    model, probes = probed(lambda: nn.Linear(2, 1 << 14).bfloat16(), 1)
    with torch.no_grad():
        model.bias.zero_()
        model.weight.zero_()
    batch = ProbeBatch(DIRECTIONS, (1e-3, -1e-3))
    x = torch.zeros(2, 2, dtype=torch.bfloat16)
    found = probes.learn(lambda times: model(torch.cat([x] * times)), 2, batch).view(3, 2, 2, -1).double()
    space, d, n = DirectionSpace.of("low_rank", [(1 << 14, 2), (1 << 14,)]), DIRECTIONS, 1 << 14
    each = [space.coordinates(d.seed, d.round, d.first + r, 2 * n, n) for r in range(d.k)]
    z = torch.from_numpy(np.stack(each)).double()
    moved = (found[:, 0, 0] * z).sum() / (z * z).sum()
    assert abs(float(moved) / 1e-3 - 1) < 1e-4
    assert torch.equal(found[:, 0], -found[:, 1])


class DetachedNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach()  # a parameter that is stored in another type is read in that of the computation
        assert weight.dtype == x.dtype and self.eps is not None
        return functional.rms_norm(x, weight.shape, weight, self.eps)


class WideScale(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.weight.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("stored", "compute", "tolerance"),
    [
        (torch.float32, None, 1e-5), (torch.bfloat16, None, 3e-2), (torch.float32, torch.float16, 3e-3),
        (torch.float32, torch.bfloat16, 3e-2),
    ],
)  # fmt: skip
def test_a_norm_is_perturbed_in_one_pass_where_the_device_has_a_kernel_for_it(
    stored: torch.dtype, compute: torch.dtype | None, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    norms = DetachedNorm(16, eps=1e-3), nn.RMSNorm(16, eps=1e-3), WideScale(16), nn.RMSNorm(16), nn.LayerNorm(16)
    model = nn.Sequential(nn.Embedding(9, 16), *norms, nn.Linear(16, 9)).to(stored)
    probes = low_rank_parameters(model, 1, compute=compute).low_rank
    right = expected(copy.deepcopy(model).float(), 1)(TOKENS)
    called: list[torch.dtype] = []
    assert probes is not None
    with fake_triton.kernels() as (*_, layers, _), monkeypatch.context() as patch:

        def norm(_: Any, *args: Any, centred: bool) -> Tensor | None:
            called.append(args[0].dtype)
            found: Tensor | None = layers.norm(*args, centred=centred)
            return found

        patch.setattr(type(backend_of(torch.device("cpu"))), "norm", norm)
        found = batched(model, probes, TOKENS, False)
    assert called == 3 * [compute or stored]  # another type, and a norm that leaves eps to torch, are torch's
    assert found.dtype == (compute or stored)
    assert far(found.float().view(right.shape), right) < tolerance < far(right[0], right[1]) / 2


@pytest.mark.parametrize("name", WRITING)
def test_a_model_that_writes_to_weights_gets_perturbed_ones(name: str) -> None:
    make, x = WRITING[name]
    torch.manual_seed(3)
    model = make().eval()
    parameters = low_rank_parameters(model)
    before, right = parameters.digest(), expected(model, 1)(x)
    probes = parameters.low_rank
    assert probes is not None
    with pytest.raises(Ungroupable), probes.at(ProbeBatch(Directions(1, 2, 1), (0.1,))):
        model(x)
    assert parameters.digest() == before
    if name == "a copy of a weight that is written to":  # the other writes to w itself when nobody probes it
        parameters.check_uses(lambda: model(x).sum(1), DIRECTIONS.probe(0, 0.1))
        assert parameters.low_rank is None and parameters.substitutable
        with parameters.perturbed(DIRECTIONS.probe(0, 0.1)):
            assert far(model(x), right[0]) < ROUNDING
        assert parameters.digest() == before


def test_a_model_that_computes_something_else_gets_perturbed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: the check compares with perturbed weights."""
    make, x = BATCHED["mlp"]
    torch.manual_seed(3)
    model = make().eval()
    good = low_rank_parameters(model)
    good.check_uses(lambda: model(x).sum(1), DIRECTIONS.probe(0, 0.1))
    assert good.low_rank is not None
    product = low_rank_layers.add_product
    monkeypatch.setattr(low_rank_layers, "add_product", lambda y, *more: product(y.clone(), *more) * 1.05)
    bad = low_rank_parameters(make().eval())
    bad.check_uses(lambda: bad.model(x).sum(1), DIRECTIONS.probe(0, 0.1))
    assert bad.low_rank is None and bad.substitutable
