"""ZeroOrder with estimator "one_sided": all directions of a step share the loss at w."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import one_thread, plain_one_sided  # noqa: F401
from tuned_models import TASK, loss_of, make, steps

from cyber0.directions import Directions
from cyber0.errors import LedgerError, ModelError


@pytest.mark.parametrize("distribution", ["gaussian", "sphere"])
def test_slopes_are_the_one_sided_estimates_and_the_step_goes_against_them(distribution: str) -> None:
    model, optimizer = make(distribution=distribution, estimator="one_sided")
    start, loss = optimizer.parameters.vector(), float(loss_of(model))
    expected = plain_one_sided(model, TASK, TASK.batch(64), Directions(3, 0, 4), 1e-2, distribution)[0]
    result = optimizer.step(lambda: loss_of(model))
    np.testing.assert_allclose(result.slopes, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    assert result.loss == pytest.approx(loss, rel=1e-6)  # not a mean over the probes, but the loss at w
    z = optimizer.parameters.directions(3, 0, 0, 4)
    wanted = start - 0.05 / 4 * torch.from_numpy(result.slopes) @ z
    assert torch.allclose(optimizer.parameters.vector(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [1, 5])
def test_a_step_evaluates_the_loss_once_a_direction_and_once_at_w(k: int) -> None:
    model, optimizer = make(k=k, estimator="one_sided")
    calls: list[int] = []
    made = []
    for _ in range(3):
        optimizer.step(lambda: (calls.append(1), loss_of(model))[1])
        made.append(len(calls))
    assert [made[1] - made[0], made[2] - made[1]] == [k + 1, k + 1]


def test_it_minimises_resumes_to_the_same_bits_and_is_diagnosed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"estimator": "one_sided", "k": 8}
    uninterrupted = steps("linear", 40, **options)
    path = tmp_path / "tuning.ledger"
    model, optimizer = make("linear", ledger=path, **options)
    before = float(loss_of(model))
    for _ in range(25):
        optimizer.step(lambda: loss_of(model))
    optimizer.close()
    model, optimizer = make("linear", ledger=path, **options)
    assert optimizer.round == 25
    for _ in range(15):
        optimizer.step(lambda: loss_of(model))
    assert optimizer.parameters.digest() == uninterrupted
    assert float(loss_of(model)) < 0.7 * before
    found = optimizer.diagnose(*(lambda n=n: loss_of(model, n) for n in (32, 48, 64)), trials=2)
    assert found.data["estimator"] == "one_sided" and "good mu" in str(found)
    optimizer.close()
    with pytest.raises(LedgerError, match="estimator"):
        make("linear", ledger=path, k=8)


@pytest.mark.parametrize("k", [1, 12])
def test_a_loss_that_never_changes_is_refused(k: int) -> None:
    _, optimizer = make(k=k, estimator="one_sided")
    before = optimizer.parameters.digest()
    with pytest.raises(ModelError, match=rf"at all {max(k, 8) + 1} probes .*no slope"):
        optimizer.step(lambda: 1.0)
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 0)


def test_a_loss_that_is_not_finite_at_w_is_named_as_such() -> None:
    model, optimizer = make(k=2, estimator="one_sided")
    scales = itertools.repeat(1.0)

    def loss() -> torch.Tensor:
        return loss_of(model) * next(scales)

    optimizer.step(loss)
    scales = itertools.chain([float("inf")], itertools.repeat(1.0))
    with pytest.raises(ModelError, match="the loss is inf in step 1"):
        optimizer.step(loss)
    assert optimizer.round == 1


def test_it_works_under_inference_mode() -> None:
    model, optimizer = make(estimator="one_sided")
    with torch.inference_mode():
        assert optimizer.step(lambda: loss_of(model)).slopes.any()


def test_mu_must_be_positive() -> None:
    with pytest.raises(ValueError, match="mu must be a positive number, got 0: one_sided divides by it"):
        make(estimator="one_sided", mu=0)


def test_the_loss_at_w_is_computed_as_those_at_the_probes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch fuses attention unless somebody looks into the model, as a probe does, and the fused one rounds otherwise.
    model, optimizer = make("layer", estimator="one_sided", k=2)

    def loss() -> torch.Tensor:
        return loss_of(model)

    optimizer.step(loss)
    probes, at = [], optimizer.parameters.perturbed
    monkeypatch.setattr(optimizer.parameters, "perturbed", lambda *where: (probes.append(where[0]), at(*where))[1])
    with torch.no_grad(), optimizer.parameters.holding([p.detach().clone() for p in optimizer.parameters.tensors]):
        expected = float(loss_of(model))
    assert optimizer.step(loss).loss == expected
    assert [probe.coefficient for probe in probes] == [0.0, optimizer._mu, optimizer._mu]
