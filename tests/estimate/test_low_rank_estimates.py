"""Estimates along low-rank directions: many probes in a pass give the slopes of copies with moved weights."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from low_rank_models import (
    BATCHED,
    IMAGES,
    ONE_BY_ONE,
    SEQUENCE,
    TOKENS,
    WRONG_WHEN_BATCHED,
    X,
    low_rank_parameters,
    moved_copy,
)
from torch import Tensor, nn

from cyber0.directions import Directions, Step
from cyber0.directions.moments import CURVATURE
from cyber0.estimate import batched
from cyber0.estimate import low_rank as low_rank_path
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.objective import Matrix
from cyber0.model.low_rank_probes import LowRankProbes
from cyber0.model.vector import Parameters
from cyber0.tasks.samples import Columns

DIRECTIONS = Directions(seed=2**63 + 5, round=3, k=5, first=10)
COUNTS = np.array([3, 1, 2])
MU = 1e-2
ESTIMATORS = ("two_point", "one_sided")


SOME = ("mlp", "2d convolutions with norms", "transformer encoder", "class token", "adapter beside a frozen layer",
        "tied embedding, positions without samples")  # fmt: skip


class SumOfSquares:
    """A loss of any outputs."""

    def outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        found: Tensor = model(**inputs.tensors) if isinstance(inputs, Columns) else model(inputs)
        return found

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.reshape(len(targets), -1) - targets[:, None]).square().mean(1)


def batch_of(x: Any) -> Batch:
    if isinstance(x, Columns):
        return Batch(x.take(np.arange(6) % 3), torch.linspace(-1, 1, 6), COUNTS)
    return Batch(torch.cat([x, x.flip(0)])[:6] if len(x) == 3 else x.repeat(3, 1), torch.linspace(-1, 1, 6), COUNTS)


def evaluator_of(make: Any, estimator: str = "two_point", rank: int = 1, **options: Any) -> Evaluator:
    torch.manual_seed(3)
    return Evaluator(low_rank_parameters(make().eval(), rank), SumOfSquares(), estimator, MU, **options)


@torch.no_grad()
def by_copies(model: nn.Module, batch: Batch, estimator: str, rank: int) -> Matrix:
    """The slopes by a loop over copies, in float64 from the losses on."""

    def means(at: nn.Module) -> Any:
        task = SumOfSquares()
        losses = task.losses(task.outputs(at, batch.inputs), batch.targets).double().numpy()
        return np.array([part.mean() for part in np.split(losses, np.cumsum(COUNTS)[:-1])])

    mu, columns = float(np.float32(MU)), []
    for r in range(DIRECTIONS.k):
        above = means(moved_copy(model, rank, DIRECTIONS, r, mu))
        if estimator == "two_point":
            columns.append((above - means(moved_copy(model, rank, DIRECTIONS, r, -mu))) / (2 * mu))
        else:
            columns.append((above - means(moved_copy(model, rank, DIRECTIONS, r, 0.0))) / mu)
    return np.stack(columns, axis=1)


def assert_close(found: Matrix, right: Matrix) -> None:
    assert found.shape == right.shape == (len(COUNTS), DIRECTIONS.k)
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3 * np.abs(right).max())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", SOME)
def test_slopes_are_those_of_copies_with_moved_weights(name: str, estimator: str) -> None:
    make, x = BATCHED[name]
    evaluator, batch = evaluator_of(make, estimator, rank=2), batch_of(x)
    before = evaluator.parameters.digest()
    assert_close(evaluator.estimate(batch, DIRECTIONS), by_copies(evaluator.parameters.model, batch, estimator, 2))
    assert evaluator.low_rank.possible
    assert evaluator.parameters.digest() == before


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", [*ONE_BY_ONE, *WRONG_WHEN_BATCHED])
def test_where_probes_cant_share_a_pass_they_are_taken_one_at_a_time(
    name: str, estimator: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batched, "BATCHED_DIMENSION", 0)
    make, x = (ONE_BY_ONE | WRONG_WHEN_BATCHED)[name]
    evaluator, batch = evaluator_of(make, estimator), batch_of(x)
    with caplog.at_level(logging.INFO, logger="cyber0"):
        found = evaluator.estimate(batch, DIRECTIONS)
    assert_close(found, by_copies(evaluator.parameters.model, batch, estimator, 1))
    assert not evaluator.low_rank.possible
    assert "probes along low-rank directions are taken one at a time" in caplog.text
    assert_close(evaluator.estimate(batch, DIRECTIONS), found)


def test_a_dictionary_of_inputs_is_repeated() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.layer = nn.Embedding(5, 8), nn.Linear(8, 8)

        def forward(self, sequence: Tensor, tokens: Tensor) -> Tensor:
            return torch.tanh(self.layer(sequence + self.tokens(tokens)))

    evaluator, batch = evaluator_of(TwoInputs), batch_of(Columns({"sequence": SEQUENCE, "tokens": TOKENS}))
    assert_close(evaluator.estimate(batch, DIRECTIONS), by_copies(evaluator.parameters.model, batch, "two_point", 1))
    assert evaluator.low_rank.possible


def rows_of_passes(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that the passes write their numbers of rows to."""
    rows: list[int] = []
    original = evaluator.objective.outputs

    def outputs(model: nn.Module, inputs: Any) -> Tensor:
        rows.append(len(inputs))
        return original(model, inputs)

    monkeypatch.setattr(evaluator.objective, "outputs", outputs)
    return rows


@pytest.mark.parametrize(("estimator", "rows_in_flight", "expected"), [
    ("two_point", 1024, [60]), ("two_point", 60, [60]), ("two_point", 59, [24, 36]), ("two_point", 12, [12] * 5),
    ("two_point", 11, [6] * 10), ("one_sided", 36, [36]), ("one_sided", 35, [18, 24]), ("one_sided", 11, [6] * 6),
])  # fmt: skip
def test_rows_in_flight_are_bounded(
    estimator: str, rows_in_flight: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "BATCHED_DIMENSION", 0)
    make, x = BATCHED["mlp"]
    evaluator = evaluator_of(make, estimator, rows_in_flight=rows_in_flight)
    batch = batch_of(x)
    evaluator.estimate(batch, DIRECTIONS)  # which checks
    rows = rows_of_passes(evaluator, monkeypatch)
    found = evaluator.estimate(batch, DIRECTIONS)
    assert rows == expected
    assert_close(found, by_copies(evaluator.parameters.model, batch, estimator, 1))


def test_local_steps_and_scaled_directions_perturb_stand_ins() -> None:
    make, x = BATCHED["mlp"]
    evaluator = evaluator_of(make)
    evaluator.estimate(batch_of(x), DIRECTIONS, [Step(7, 1, np.zeros(3, np.float32))])
    assert not evaluator.low_rank._checked
    evaluator.parameters.hold_vectors({CURVATURE: 1.0})
    assert evaluator.parameters.low_rank is None
    evaluator.estimate(batch_of(x), DIRECTIONS)
    assert not evaluator.low_rank._checked


def test_other_distributions_never_take_this_path() -> None:
    torch.manual_seed(3)
    make, x = BATCHED["mlp"]
    evaluator = Evaluator(Parameters(make()), SumOfSquares(), "two_point", MU)
    evaluator.estimate(batch_of(x), DIRECTIONS)
    assert evaluator.parameters.low_rank is None and not evaluator.low_rank._checked


def test_the_check_leaves_torchs_random_numbers_where_they_were() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 9)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return torch.tanh(self.layer(x))

    evaluator = evaluator_of(Noisy)
    state = torch.get_rng_state()
    evaluator.low_rank._check(batch_of(X))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_share_passes_too(dtype: torch.dtype) -> None:
    make, _ = BATCHED["2d convolutions with norms"]
    torch.manual_seed(3)
    model = make().eval().to(dtype)
    evaluator = Evaluator(low_rank_parameters(model), SumOfSquares(), "two_point", 0.05)
    wide = Evaluator(low_rank_parameters(make().eval()), SumOfSquares(), "two_point", 0.05)
    wide.parameters.set_vector(evaluator.parameters.vector())
    found = evaluator.estimate(batch_of(IMAGES.to(dtype)), DIRECTIONS)
    right = wide.estimate(batch_of(IMAGES), DIRECTIONS)
    assert evaluator.low_rank.possible
    np.testing.assert_allclose(found, right, atol=0.2 * np.abs(right).max())


def test_weights_in_float32_compute_in_sixteen_bits() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(5, 32), nn.Tanh(), nn.Linear(32, 30), nn.LayerNorm(30))
    parameters = low_rank_parameters(model, compute=torch.bfloat16)
    seen = set()
    model[2].register_forward_hook(lambda _, __, out: seen.add((len(out), out.dtype)))
    batch = batch_of(TOKENS)
    narrow = Evaluator(parameters, SumOfSquares(), "two_point", 0.05)
    found = narrow.estimate(batch, DIRECTIONS)
    assert (60, torch.bfloat16) in seen and narrow.low_rank.possible
    right = Evaluator(low_rank_parameters(model), SumOfSquares(), "two_point", 0.05).estimate(batch, DIRECTIONS)
    np.testing.assert_allclose(found, right, atol=0.2 * np.abs(right).max())


def test_what_is_prepared_once_serves_later_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured pass does: it is entered once, and only factors and distances change afterwards."""
    make, x = BATCHED["norms"]
    evaluator, batch = evaluator_of(make), batch_of(x)
    evaluator.estimate(batch, DIRECTIONS)
    kept: dict[Any, Any] = {}
    prepare = LowRankProbes.prepare

    def prepared(probes: LowRankProbes, batch: Any, rows: int = 0) -> Any:
        if (batch.shape, rows) not in kept:
            kept[batch.shape, rows] = prepare(probes, batch, rows)
        kept[batch.shape, rows].renew(batch)
        return kept[batch.shape, rows]

    monkeypatch.setattr(LowRankProbes, "prepare", prepared)
    evaluator.estimate(batch, Directions(1, 2, DIRECTIONS.k))
    found = evaluator.estimate(batch, DIRECTIONS)
    assert len(kept) == 1
    assert_close(found, by_copies(evaluator.parameters.model, batch, "two_point", 1))


def test_results_agree_up_to_rounding_and_no_further() -> None:
    right = torch.tensor([[1.0, 2.0], [1.1, 2.2]])
    wide, narrow = [torch.float32], [torch.float32, torch.bfloat16]
    assert low_rank_path._agree(right * (1 + 1e-6), right, wide)
    assert not low_rank_path._agree(right + 0.002, right, wide)
    assert low_rank_path._agree(right + 0.002, right, narrow)
    assert not low_rank_path._agree(right.flip(0), right, narrow)
