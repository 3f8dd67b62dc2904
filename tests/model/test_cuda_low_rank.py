"""Low-rank probes on a GPU: captured passes, the same factors as on a CPU, the same slopes up to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from low_rank_models import BATCHED, ONE_BY_ONE, low_rank_parameters
from perturbed_norms import perturbed_norm
from torch import Tensor, nn

from cyber0.directions import Directions
from cyber0.directions.backends import backend_of
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.objective import Matrix
from cyber0.model.factors import Factors, LowRank, ProbeBatch

pytestmark = pytest.mark.cuda

DIRECTIONS = Directions(2**63 + 1, 9, 5, 4)
COUNTS = np.array([3, 1, 2])
MU = 1e-2
LARGE = ("mlp", "2d convolutions with norms", "transformer encoder", "tied embedding, positions without samples",
         "class token", "norms", "addmm", "some rows of a weight")  # fmt: skip


class SumOfSquares:
    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        found: Tensor = model(inputs)
        return found

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float().reshape(len(targets), -1) - targets[:, None]).square().mean(1)


def evaluator_of(name: str, device: str, estimator: str, dtype: torch.dtype = torch.float32) -> tuple[Evaluator, Batch]:
    make, x = (BATCHED | ONE_BY_ONE)[name]
    torch.manual_seed(3)
    model = make().eval().to(device, dtype)
    x = torch.cat([x, x, x])[:6].to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    batch = Batch(x, torch.linspace(-1, 1, 6).to(device), COUNTS)
    return Evaluator(low_rank_parameters(model, 2), SumOfSquares(), estimator, MU), batch


def assert_close(found: Matrix, right: Matrix, tolerance: float) -> None:
    np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance * np.abs(right).max())


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """No TF32, which torch allows in convolutions."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
@pytest.mark.parametrize("name", LARGE)
def test_captured_slopes_are_those_of_the_cpu(name: str, estimator: str) -> None:
    there, batch = evaluator_of(name, "cuda", estimator)
    here, same = evaluator_of(name, "cpu", estimator)
    for round in (9, 10, 11, 9):  # the first passes are plain, later ones captured
        directions = Directions(DIRECTIONS.seed, round, DIRECTIONS.k, 4)
        assert_close(there.estimate(batch, directions), here.estimate(same, directions), 2e-3)
    assert there.low_rank.possible
    assert len(there.low_rank._graphs._captured) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LARGE[:-1])
def test_captured_passes_in_sixteen_bits_give_what_plain_ones_give(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, batch = evaluator_of(name, "cuda", "two_point", dtype)
    monkeypatch.setenv("CYBER0_CUDA_GRAPHS", "0")
    plain, same = evaluator_of(name, "cuda", "two_point", dtype)
    for round in (9, 10, 9):
        directions = Directions(DIRECTIONS.seed, round, DIRECTIONS.k, 4)
        found, right = captured.estimate(batch, directions), plain.estimate(same, directions)
        assert_close(found, right, 0.2)
    assert captured.low_rank.possible and plain.low_rank.possible
    assert captured.low_rank._graphs._captured and not plain.low_rank._graphs._captured


def test_rows_in_flight_give_at_most_two_graphs() -> None:
    evaluator, batch = evaluator_of("mlp", "cuda", "two_point")
    evaluator.low_rank._rows_in_flight = 30
    for round in range(4):
        evaluator.estimate(batch, Directions(1, round, 5))
    assert len(evaluator.low_rank._graphs._captured) == 2


def test_a_weight_that_is_used_otherwise_takes_one_probe_at_a_time_on_a_gpu() -> None:
    there, batch = evaluator_of("lstm", "cuda", "two_point")
    here, same = evaluator_of("lstm", "cpu", "two_point")
    assert_close(there.estimate(batch, DIRECTIONS), here.estimate(same, DIRECTIONS), 2e-3)
    assert not there.low_rank.possible


@pytest.mark.parametrize("rank", [1, 3])
def test_factors_have_the_bits_of_the_cpu_at_aligned_places(rank: int) -> None:
    make, _ = BATCHED["tied embedding, positions without samples"]
    batch, found = ProbeBatch(DIRECTIONS, (MU, -MU)), {}
    for device in ("cpu", "cuda"):
        parameters = low_rank_parameters(make().to(device), rank)
        assert parameters.space.layout is not None
        shapes = [entry.shape for entry in parameters.layout]
        found[device] = Factors(parameters.space.layout, shapes, [torch.float32], batch, torch.device(device))
    for number in range(len(shapes)):
        here, there = (found[device].of(number, torch.float32) for device in ("cpu", "cuda"))
        if isinstance(here, LowRank) and isinstance(there, LowRank):
            assert torch.equal(here.left, there.left.cpu()) and torch.equal(here.right, there.right.cpu())
            assert there.left.data_ptr() % 256 == there.right.data_ptr() % 256 == 0
        else:
            assert isinstance(here, Tensor) and isinstance(there, Tensor) and torch.equal(here, there.cpu())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("distances", "rows", "width"), [(1, 3, 70), (2, 5, 576), (2, 1, 5000)])
def test_a_norm_has_the_weight_of_each_group(
    distances: int, rows: int, width: int, centred: bool, dtype: torch.dtype, tolerance: float
) -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda")

    x, weight = (3 * drawn(3 * distances * rows, 2, width)).to(dtype), drawn(width).to(dtype)
    z = drawn(3, width + 9).to(dtype)[:, 4:-5]
    c = torch.linspace(-0.1, 0.2, 3 * distances, device="cuda").view(3, distances)
    bias = (drawn(width).to(dtype), drawn(3, width).to(dtype)) if centred else None
    found = backend_of(x.device).norm(x, (weight, z), bias, c, 1e-3, centred=centred)
    right = perturbed_norm(x, (weight, z), bias, c, 1e-3, centred=centred)
    assert found is not None and found.dtype == dtype
    torch.testing.assert_close(found.double(), right.view(x.shape), rtol=tolerance, atol=tolerance)
