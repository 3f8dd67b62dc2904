"""A direction that is kept in memory gives the bits of one that is drawn anew, and is drawn once a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cyber0 import ZeroOrder
from cyber0.directions import Probe, Step
from cyber0.directions.backends.cpu import CpuBackend
from cyber0.model import commit
from cyber0.model.drawn import DrawnPass
from cyber0.model.vector import Parameters


def parameters(distribution: str = "gaussian", **options: Any) -> Parameters:
    torch.manual_seed(0)
    return Parameters(nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 7)), distribution, **options)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make Parameters that keep no direction."""

    def make(*arguments: Any, **options: Any) -> Parameters:
        with monkeypatch.context() as small:
            small.setattr(commit, "KEPT_BYTES", 0)
            return parameters(*arguments, **options)

    return make


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
def test_probes_and_the_commit_give_the_bits_of_directions_drawn_anew(
    distribution: str, compute: torch.dtype | None, anew: Any
) -> None:
    kept, other = parameters(distribution, compute=compute), anew(distribution, compute=compute)
    with torch.no_grad():  # what is not finite, and what is not normal
        for p in (kept, other):
            p.segments[0].buffer[:4] = torch.tensor([3.4e38, -3.4e38, 1e-42, 0.0])
    for round, index, c in [(0, 0, 0.05), (0, 0, -0.05), (0, 1, 3e38), (1, 0, 1e-42), (0, 0, 0.05)]:
        probe = Probe(5, round, index, c)
        passes = [p.weight_pass(probe) for p in (kept, other)]
        assert [isinstance(one, DrawnPass) for one in passes] == [True, False]
        for i in (1, 0):  # in any order
            rows = [p.blocks(one)[i] for p, one in zip((kept, other), passes, strict=True)]
            assert torch.equal(rows[0].view(torch.int16), rows[1].view(torch.int16))
        for p in (kept, other):
            p.commit(Step(5, round, np.float32([0.1]), first=index))
        assert kept.digest() == other.digest()


@pytest.mark.parametrize(
    "step",
    [
        Step(6, 0, np.float32([0.1])),
        Step(5, 1, np.float32([0.1])),
        Step(5, 0, np.float32([0.1]), first=1),
        Step(5, 0, np.float32([0.1, 0.2])),
    ],
)
def test_a_step_along_another_direction_does_not_take_the_one_that_is_kept(step: Step, anew: Any) -> None:
    kept, other = parameters(), anew()
    kept.blocks(kept.weight_pass(Probe(5, 0, 0, 0.05)))[0]
    for p in (kept, other):
        p.commit(step)
    assert kept.digest() == other.digest()


def test_a_direction_that_was_drawn_in_part_is_drawn_to_its_end(anew: Any) -> None:
    kept, other = parameters(), anew()
    kept.blocks(kept.weight_pass(Probe(5, 0, 0, 0.05)))[1]
    for p in (kept, other):
        p.commit(Step(5, 0, np.float32([0.1])))
    assert kept.digest() == other.digest()


def test_a_step_draws_its_direction_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    for name in ("fill", "apply"):
        original = getattr(CpuBackend, name)

        def counted(self: Any, tensor: torch.Tensor, *more: Any, original: Any = original) -> Any:
            drawn.append(tensor.numel())
            return original(self, tensor, *more)

        monkeypatch.setattr(CpuBackend, name, counted)
    model, x = parameters().model, torch.randn(8, 40)
    optimizer = ZeroOrder(model, lr=0.01, k=1)
    optimizer.step(lambda: model(x).square().mean())
    drawn.clear()
    optimizer.step(lambda: model(x).square().mean())
    assert sum(drawn) == optimizer.parameters.dimension


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_large_model_and_one_of_16_bits_keep_no_direction(dtype: torch.dtype, anew: Any) -> None:
    found = anew() if dtype == torch.float32 else Parameters(nn.Linear(4, 4).half())
    assert not isinstance(found.weight_pass(Probe(5, 0, 0, 0.05)), DrawnPass)
