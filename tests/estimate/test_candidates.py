"""Candidates: samples of large loss are measured more often, and the slopes stay right on average."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cyber0 import Simulation
from cyber0.config.schema import Config
from cyber0.directions import Directions, Stream, philox4x32
from cyber0.errors import ConfigError
from cyber0.estimate.batches import Batch, Narrowing, Samples
from cyber0.estimate.candidates import EVENLY, as_many, narrowed, probabilities, systematic
from cyber0.estimate.evaluator import Evaluator
from cyber0.model.vector import Parameters

LOSSES = {
    "like": np.full(8, 0.3),
    "few": np.array([3.0, 0.0, 1e-6, 0.0, 2.0, 0.0, 0.0, 1e-9]),
    "none": np.zeros(5),
    "one": np.array([0.0, 0.0, 50.0, 0.0]),
    "negative": np.array([-5.0, -1.0, -4.9, 2.0]),
    "broken": np.array([0.1, np.nan, 0.2, np.inf]),
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_probabilities_add_up_and_none_is_above_1_or_far_below_an_even_one(
    losses: NDArray[np.float64], keep: int
) -> None:
    p = probabilities(losses, keep)
    assert p.sum() == pytest.approx(keep, abs=1e-12)
    assert p.max() <= 1.0
    assert p.min() >= EVENLY * keep / len(losses) * (1 - 1e-12)
    counted = np.where(np.isfinite(losses), losses, np.inf)
    assert (np.diff(p[np.argsort(counted)]) >= -1e-12).all()


@pytest.mark.parametrize("keep", range(1, 65))
def test_who_has_no_more_than_is_kept_keeps_all(keep: int) -> None:
    with np.errstate(all="raise"):
        assert probabilities(np.full(keep, 0.7), keep).tolist() == [1.0] * keep
        assert probabilities(np.full(keep + 1, 0.7), keep).sum() == pytest.approx(keep)
    assert systematic(np.ones(keep), keep, 0.999).tolist() == list(range(keep))


def test_candidates_with_large_losses_are_kept_nearly_always() -> None:
    p = probabilities(LOSSES["few"], 2)
    assert p[[0, 4]].min() > 0.8
    assert p[[1, 2, 3, 5, 6, 7]].max() < 0.1


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_weighted_mean_over_what_is_kept_is_that_over_all_candidates_on_average(
    losses: NDArray[np.float64], keep: int
) -> None:
    values = np.random.default_rng(keep).normal(size=len(losses))
    p, means = probabilities(losses, keep), []
    steps = 1 << 16
    for offset in (np.arange(steps) + 0.5) / steps:
        chosen = systematic(p, keep, float(offset))
        assert len(set(chosen.tolist())) == keep
        means.append((values[chosen] / p[chosen]).sum() / len(values))
    assert np.mean(means) == pytest.approx(values.mean(), abs=1e-3)


def samples_of(sizes: list[int], batch_size: int, candidates: int) -> Samples:
    total = sum(sizes)
    shares = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    return Samples(torch.arange(total)[:, None].float(), torch.arange(total), shares, batch_size, 7,
                   candidates=candidates)  # fmt: skip


def test_a_client_draws_candidates_and_a_random_number_from_its_stream() -> None:
    samples = samples_of([20, 3, 9], 2, 4)
    batch = samples.batch(np.array([2, 0, 1]), 5, epoch=3)
    assert batch.counts.tolist() == [8, 8, 3]
    assert batch.narrowing is not None and batch.narrowing.counts.tolist() == [2, 2, 2]
    words = [int(philox4x32([2**32 - 1, 3, 5, Stream.BATCHES << 24 | client], [7, 0])[0]) for client in (2, 0, 1)]
    assert batch.narrowing.offsets.tolist() == [word / 2**32 for word in words]


def test_clients_without_further_samples_measure_all_they_have() -> None:
    samples = samples_of([2, 1], 2, 4)
    assert samples.batch(np.array([0, 1]), 0).narrowing is None
    assert samples_of([20, 20], 2, 1).batch(np.array([0, 1]), 0).narrowing is None


def test_more_candidates_than_anybody_has_are_all_samples() -> None:
    assert samples_of([6, 5], 2, 10**18).batch(np.arange(2), 0).counts.tolist() == [6, 5]


def test_candidates_that_are_the_same_each_round_are_narrowed_differently() -> None:
    samples = samples_of([6, 6], 2, 4)
    first, second = (samples.batch(np.arange(2), round) for round in (0, 1))
    assert torch.equal(first.inputs, second.inputs)
    assert first.narrowing is not None and second.narrowing is not None
    assert first.narrowing.offsets.tolist() != second.narrowing.offsets.tolist()


def test_a_narrowed_batch_keeps_each_clients_samples_apart() -> None:
    batch = Batch(torch.arange(10), torch.arange(10), np.array([6, 4]),
                  narrowing=Narrowing(np.array([2, 1]), np.array([0.5, 0.25])))  # fmt: skip
    losses = torch.tensor([0.0, 9, 0, 0, 9, 0, 0, 0, 9, 0])
    found = narrowed(batch, losses)
    assert found.inputs.tolist() == found.targets.tolist() == [1, 4, 8]
    assert found.counts.tolist() == [2, 1] and found.narrowing is None
    p = np.concatenate([probabilities(losses[:6].double().numpy(), 2), probabilities(losses[6:].double().numpy(), 1)])
    assert as_many(batch).inputs.tolist() == [0, 1, 2] and as_many(batch).counts.tolist() == [2, 1]
    assert found.weights is not None
    assert found.weights.tolist() == pytest.approx([2 / (6 * p[1]), 2 / (6 * p[4]), 1 / (4 * p[8])])


class Squares:
    """A loss that is 0 for most samples."""

    def outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        found: Tensor = model(inputs)
        return found

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sum(1) - targets).clamp(min=0).square()


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


class Branching(nn.Module):
    """Which vmap can't batch, so that weights are streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if bool(y.sum() > 1e9) else y.tanh()


@pytest.mark.parametrize("distribution", ["gaussian", "low_rank"])
@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
@pytest.mark.parametrize("make", [linear, deep, Branching])
def test_slopes_are_weighted_means_of_those_of_single_samples(make: Any, estimator: str, distribution: str) -> None:
    torch.manual_seed(1)
    evaluator = Evaluator(Parameters(make().eval(), distribution), Squares(), estimator, 1e-2)
    x, directions = torch.randn(12, 3), Directions(5, 2, 4)
    y = torch.linspace(-2, 2, 12)
    whole = Batch(x, y, np.array([8, 4]))
    candidates = Batch(x, y, whole.counts, narrowing=Narrowing(np.array([3, 2]), np.array([0.7, 0.1])))
    with torch.no_grad():
        chosen = narrowed(candidates, evaluator.losses(whole, None))
    each = evaluator.estimate(Batch(chosen.inputs, chosen.targets, np.ones(5, np.int64)), directions)
    assert chosen.weights is not None
    weighted = each * chosen.weights.double().numpy()[:, None]
    expected = np.stack([weighted[:3].mean(0), weighted[3:].mean(0)])
    assert evaluator.estimate(candidates, directions) == pytest.approx(expected, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        ["method.estimator=gradient"],
        ["method.estimator=forward"],
        ["method.name=fedavg"],
    ],
)
def test_what_takes_gradients_refuses_candidates(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"method.candidates = 4 can't be used with .* set method.candidates = 1"):
        Config().with_overrides(["method.candidates=4", *settings])


RIDGE = ["task.name=ridge", "federation.clients=6", "federation.byzantine=1", "aggregation.beta=0.2", "method.k=6",
         "method.batch_size=4", "method.lr=0.02", "rounds=6"]  # fmt: skip


@pytest.mark.parametrize("more", [[], ["method.local_epochs=2"], ["method.local_epochs=2",
                                                                 "method.local_memory=regenerate"]])  # fmt: skip
def test_a_run_with_candidates_can_be_repeated_and_differs_from_one_without(more: list[str]) -> None:
    def digest(*settings: str) -> str:
        simulation = Simulation(Config().with_overrides([*RIDGE, *more, *settings]))
        for _ in range(6):
            simulation.run_round()
        return simulation.parameters.digest()

    assert digest("method.candidates=5") == digest("method.candidates=5") != digest()


def test_candidates_bring_the_training_loss_of_few_samples_down_further_at_equal_cost() -> None:
    k, batch, passes = 16, 4, 1200

    def end(candidates: int) -> float:
        torch.manual_seed(0)
        model, data = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(96, 20)
        labels = data[:, :4].argmax(1)
        samples = Samples(data, labels, [np.arange(96)], batch, 1, candidates=candidates)
        evaluator = Evaluator(Parameters(model.eval(), "gaussian"), Classes(), "one_sided", 1e-3)
        weights, cost = evaluator.parameters, k + 1 + (candidates if candidates > 1 else 0)
        rounds = passes * 96 // (batch * cost)
        w = weights.vector()
        for t in range(rounds):
            directions = Directions(1, t, k)
            row = evaluator.estimate(samples.batch(np.array([0]), t), directions)[0]
            row -= row.mean()
            rate = 0.25 * (1 - t / rounds) / (k * float(np.sqrt(np.mean(row**2)) + 1e-9))
            w = w - torch.from_numpy(rate * row).float() @ weights.directions(1, t, 0, k)
            weights.set_vector(w)
        with torch.no_grad():
            return float(evaluator.losses(Batch(data, labels, np.array([96])), None).mean())

    assert end(candidates=6) < 0.5 * end(candidates=1)


class Classes:
    """Cross-entropy."""

    def outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        found: Tensor = model(inputs)
        return found

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
