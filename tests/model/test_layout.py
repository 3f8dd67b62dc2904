"""Which models can be trained, and where their weights lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, SOME_PROBE, Named, frozen_bottom, mixed_dtypes, some_step, tied_language_model
from synthetic import make_model
from torch import nn

from cyber0.directions import Step
from cyber0.errors import ModelError
from cyber0.model.segments import block_of
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


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
