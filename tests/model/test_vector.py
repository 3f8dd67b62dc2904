"""Changing w: commits, replay, the ball, excursions and loading; and the digests."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Named, bits, mixed_dtypes, set_weights, some_step
from torch import Tensor, nn

from cyber0.directions import DISTRIBUTIONS
from cyber0.errors import ModelError
from cyber0.model import commit
from cyber0.model.commit import squared_norm_units
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


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
