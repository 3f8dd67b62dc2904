"""Parameters that hold nothing, and steps too small for 16-bit weights."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn
from tuned_models import TASK, X, cross_entropy, make, sequential

from cyber0 import ZeroOrder
from cyber0.directions import Probe
from cyber0.errors import ModelError
from cyber0.model.blocks import perturbed
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


# Parameters that hold nothing.


class HoldsNothing(nn.Module):
    """A linear layer beside parameters of size 0."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, where: str, layer: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        empty = nn.Parameter(torch.empty(shape, dtype=dtype))
        if where == "before":
            self.first = nn.ParameterList([empty])
        self.layer = nn.Linear(X.shape[1], TASK.classes, dtype=layer)
        if where == "beside":
            self.layer.register_parameter("none", empty)
        if where == "after":
            self.last = nn.ParameterList([empty])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).float()


@pytest.mark.parametrize("estimator", ["two_point", "forward"])
@pytest.mark.parametrize("where", ["before", "beside", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_a_parameter_that_holds_nothing_changes_nothing(
    shape: tuple[int, ...], dtype: torch.dtype, where: str, estimator: str
) -> None:
    results = []
    for model in (
        HoldsNothing(shape, dtype, where, torch.float32),
        HoldsNothing(shape, dtype, "nowhere", torch.float32),
    ):
        optimizer = ZeroOrder(model, lr=0.05, mu=0.01, k=2, estimator=estimator)
        slopes = [optimizer.step(lambda: cross_entropy(model(X))).slopes.tolist() for _ in range(2)]  # noqa: B023
        parameters = optimizer.parameters
        results.append((slopes, parameters.digest(), parameters.saturated(), parameters.least_moving()))
    assert results[0] == results[1]


def test_a_model_of_16_bits_with_a_block_that_holds_nothing_is_diagnosed() -> None:
    model = HoldsNothing((0,), torch.bfloat16, "after", torch.bfloat16)
    optimizer = ZeroOrder(model, lr=0.01, mu=0.05)
    losses = [lambda n=n: cross_entropy(model(X)) * n for n in (1.0, 1.1)]
    assert str(optimizer.diagnose(*losses, trials=2))
    optimizer.parameters.set_vector(torch.full((optimizer.parameters.dimension,), math.inf))
    assert optimizer.parameters.saturated() == optimizer.parameters.dimension


def test_a_model_that_holds_nothing_at_all_is_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.empty(0))])
    with pytest.raises(ModelError, match="hold no weight at all"):
        ZeroOrder(model, lr=0.05)


# 16 bits.


def lost(parameters: Parameters, mu: float) -> float:
    """Return the share of the weights that a probe of length mu leaves as they are."""
    before = parameters.vector()
    plan = parameters.weight_pass(Probe(1, 0, 0, mu))
    after = torch.cat([perturbed(s, plan).float() for s in parameters.segments])
    return float((before == after).float().mean())


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
@pytest.mark.parametrize(("dtype", "mu"), [("bfloat16", 1e-5), ("float16", 1e-6)])
def test_a_mu_below_the_resolution_of_16_bit_weights_is_warned_of_with_one_that_works(
    dtype: str, mu: float, distribution: str
) -> None:
    with pytest.warns(RuntimeWarning, match=r"mu = .* is below the resolution of most weights") as caught:
        optimizer = make(dtype=dtype, mu=mu, distribution=distribution)[1]
    better = float(str(caught[0].message).rsplit("mu = ", 1)[1].split()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(dtype=dtype, mu=better, distribution=distribution)
        make(dtype="float32", mu=mu, distribution=distribution)
    assert lost(optimizer.parameters, mu) > 0.5 > lost(optimizer.parameters, better)


@pytest.mark.parametrize(("lr", "told"), [(1e-14, 1), (0.05, 0)])
def test_an_lr_that_moves_no_weight_is_told_once(lr: float, told: int) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=lr, mu=1e-2)
    before = optimizer.parameters.digest()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            optimizer.step(lambda: cross_entropy(model(X)))
    said = [w for w in caught if "changed no weight" in str(w.message)]
    assert len(said) == told and (optimizer.parameters.digest() == before) == bool(told)
    assert all(w.filename == __file__ for w in said)
