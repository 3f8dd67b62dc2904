"""ZeroOrder with estimator "forward": slopes at w itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn
from tuned_models import X, cross_entropy, in_a_thread, loss_of, make, sequential

from cyber0 import ZeroOrder
from cyber0.errors import LedgerError, ModelError

pytestmark = [  # still in use, so still tested; and what is traced need not hold for other inputs
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


# Slopes at w itself.


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "attention"])
def test_forward_slopes_are_the_gradient_along_the_directions(kind: str, distribution: str) -> None:
    model, optimizer = make(kind, estimator="forward", mu=0, distribution=distribution)
    z = optimizer.parameters.directions(3, 0, 0, 4)
    before = float(loss_of(model).detach())
    gradients = torch.autograd.grad(loss_of(model), optimizer.parameters.tensors)
    factor = optimizer.parameters.dimension if distribution == "sphere" else 1
    result = optimizer.step(lambda: loss_of(model))
    expected = factor * z @ torch.cat([g.reshape(-1) for g in gradients])
    np.testing.assert_allclose(result.slopes, expected, rtol=1e-3, atol=1e-4 * factor)
    assert result.loss == pytest.approx(before, rel=1e-5)
    assert (optimizer.ledger.header.mu, optimizer.ledger.header.estimator) == (0.0, "forward")


def test_forward_minimises_resumes_and_is_diagnosed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"estimator": "forward", "mu": 0, "ledger": tmp_path / "tuning.ledger", "k": 8}
    model, optimizer = make("linear", **options)
    before = float(loss_of(model).detach())
    for _ in range(40):
        optimizer.step(lambda: loss_of(model))
    assert float(loss_of(model)) < 0.7 * before
    optimizer.close()
    again_model, again = make("linear", **options)
    assert (again.round, again.parameters.digest()) == (40, optimizer.parameters.digest())
    batches = [lambda n=n: loss_of(again_model, n) for n in (32, 48, 64)]
    assert str(again.diagnose(*batches, trials=2))
    again.close()
    with pytest.raises(LedgerError, match="estimator"):
        make("linear", **{**options, "ledger": tmp_path / "tuning.ledger", "estimator": "two_point", "mu": 1e-3})


@pytest.mark.parametrize(
    ("loss", "message"),
    [(lambda m: float(loss_of(m)), "needs the loss as a tensor, got float"),
     (lambda m: loss_of(m).detach().clone() * 0 + 2.0, "no slope.*detached"),
     (lambda m: cross_entropy(torch.jit.trace(m, X)(X)), "can't carry forward-mode tangents")],
)  # fmt: skip
def test_a_loss_without_a_derivative_is_refused_in_words(loss: Callable[[nn.Module], Any], message: str) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    with pytest.raises(ModelError, match=message):
        optimizer.step(lambda: loss(model))
    assert optimizer.round == 0


def test_an_infinite_derivative_is_named() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    before = optimizer.parameters.digest()
    with pytest.raises(ModelError, match=r"the slope is -?(inf|nan) in step 0, direction 0.*left as they are.*at 0"):
        optimizer.step(lambda: (model(X).mean() - model(X).mean().detach()).abs().sqrt())
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 0)


@pytest.mark.parametrize("seed", range(12))
def test_dropout_is_no_reason_to_refuse_forward_derivatives(seed: int) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    torch.manual_seed(seed)
    optimizer.step(lambda: cross_entropy(nn.functional.dropout(model(X[:4]), 0.5, training=True).repeat(16, 1)))
    assert optimizer.round == 1


def test_a_loss_that_does_not_repeat_itself_is_refused_as_random() -> None:
    model, noise = sequential(), itertools.chain([0.0, 5.0, 0.0], itertools.cycle([0.01]))
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    with pytest.raises(ModelError, match=r"gives other values\. Likely it is random.*'two_point'"):
        optimizer.step(lambda: cross_entropy(model(X)) + next(noise))


def test_a_loss_in_a_thread_is_told_what_carries_derivatives() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    with pytest.raises(ModelError, match="traced, scripted or compiled, or runs in a thread") as refusal:
        optimizer.step(lambda: in_a_thread(lambda: cross_entropy(model(X))))
    assert "'two_point'" in str(refusal.value) and "gradient" not in str(refusal.value)
