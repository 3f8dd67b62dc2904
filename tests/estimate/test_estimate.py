"""Estimates: three paths, four estimators, one result, and w is never touched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import (
    CLASSES,
    FEATURES,
    MODELS,
    Blobs,
    direction,
    make_model,
    moved,
    plain_one_sided,
    plain_slopes,
    plain_two_point,
    split,
)
from synthetic import one_thread as one_thread
from torch import nn

from cyber0.config.choices import ESTIMATORS
from cyber0.directions import Directions, Step
from cyber0.errors import ModelError
from cyber0.estimate import batched, gradients, linear
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.objective import client_means
from cyber0.model.vector import Parameters

DIRECTIONS = Directions(seed=2**63 + 5, round=3, k=5, first=10)
COUNTS = (7, 1, 20, 7)
MU = 1e-2  # large enough that float32 losses say something about their difference
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
DISTRIBUTIONS = ("gaussian", "rademacher", "sphere", "low_rank")
PLAIN = {"two_point": plain_two_point, "one_sided": plain_one_sided}


def make(kind: str, estimator: str = "two_point", distribution: str = "gaussian", **options: Any) -> Evaluator:
    dtype = options.pop("dtype", "float32")
    parameters = Parameters(make_model(kind, dtype=dtype), distribution)
    return Evaluator(parameters, Blobs(kind), estimator, options.pop("mu", MU))


def streamed(evaluator: Evaluator) -> Evaluator:
    evaluator._batched = False
    return evaluator


def paths_of(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that the paths write their names to as they are taken."""
    taken: list[str] = []
    places = [(evaluator.linear, "_along", "linear"), (batched, "difference_slopes", "batched"),
              (evaluator.streamed, "losses", "streamed")]  # fmt: skip
    for place, name, label in places:
        original = getattr(place, name)

        def note(*args: Any, original: Any = original, label: str = label) -> Any:
            taken.append(label)
            return original(*args)

        monkeypatch.setattr(place, name, note)
    return taken


@pytest.mark.parametrize("estimator", PLAIN)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_differences_equal_a_loop_over_deep_copies(kind: str, distribution: str, estimator: str) -> None:
    evaluator = make(kind, estimator, distribution)
    model, batch = evaluator.parameters.model, Blobs().batch(*COUNTS)
    before = evaluator.parameters.digest()
    expected = PLAIN[estimator](model, Blobs(), batch, DIRECTIONS, MU, distribution)
    d = evaluator.parameters.dimension if distribution == "sphere" else 1
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(evaluator.estimate(batch, DIRECTIONS), expected, rtol=1e-3, atol=1e-4 * d)
    assert evaluator.parameters.digest() == before


@pytest.mark.parametrize("estimator", PLAIN)
@pytest.mark.parametrize("kind", MODELS)
def test_the_streamed_path_has_the_very_bits_of_deep_copies(kind: str, estimator: str) -> None:
    evaluator, batch = streamed(make(kind, estimator)), Blobs().batch(*COUNTS)
    expected = PLAIN[estimator](evaluator.parameters.model, Blobs(), batch, DIRECTIONS, MU)
    # Attention has a fused form that torch takes only for a model that nobody looks into.
    tolerance = 1e-4 if kind in ("attention", "layer") else 1e-12
    np.testing.assert_allclose(evaluator.estimate(batch, DIRECTIONS), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "expected"), [("linear", "linear"), ("no bias", "linear"), ("frozen backbone", "linear"),
                           ("mlp", "batched"), ("conv", "batched"), ("attention", "batched"), ("tied", "batched"),
                           ("inplace", "batched"), ("half used", "batched")],
)  # fmt: skip
def test_each_model_takes_the_first_path_that_fits(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = make(kind)
    taken = paths_of(evaluator, monkeypatch)
    evaluator.estimate(Blobs().batch(*COUNTS), DIRECTIONS)
    assert set(taken) == {expected}


@pytest.mark.parametrize(
    ("estimator", "evaluations"), [("two_point", 2 * DIRECTIONS.k), ("one_sided", DIRECTIONS.k + 1)]
)
def test_a_large_model_is_streamed(estimator: str, evaluations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "BATCHED_DIMENSION", 10)
    evaluator = make("linear", estimator)
    taken = paths_of(evaluator, monkeypatch)
    evaluator.estimate(Blobs().batch(4), DIRECTIONS)
    assert taken == ["streamed"] * evaluations


@pytest.mark.parametrize("estimator", PLAIN)
def test_all_three_paths_agree_on_a_linear_model(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Blobs().batch(*COUNTS)
    by_products = make("linear", estimator).estimate(batch, DIRECTIONS)
    other = make("linear", estimator)
    other.linear.possible = False
    taken = paths_of(other, monkeypatch)
    by_vmap = other.estimate(batch, DIRECTIONS)
    assert taken == ["batched"]
    stream = streamed(make("linear", estimator)).estimate(batch, DIRECTIONS)
    np.testing.assert_allclose(by_products, stream, **CLOSE)
    np.testing.assert_allclose(by_vmap, stream, **CLOSE)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_linear_path_gives_the_same_in_pieces_and_in_threads(
    estimator: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Blobs().batch(*COUNTS)
    whole = make("linear", estimator).estimate(batch, DIRECTIONS)
    monkeypatch.setattr(linear, "LINEAR_OUTPUTS", 60)
    monkeypatch.setenv("CYBER0_THREADS", str(threads))
    for _ in range(5):
        found = make("linear", estimator).estimate(batch, DIRECTIONS)
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", PLAIN)
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_the_batched_path_gives_the_same_a_few_directions_at_a_time(
    kind: str, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, whole_evaluator = Blobs().batch(*COUNTS), make(kind, estimator)
    whole = whole_evaluator.estimate(batch, DIRECTIONS)
    for rows in (4, 1):  # one row: a direction at a time, though that takes two
        monkeypatch.setattr(batched, "BATCHED_WEIGHTS", rows * whole_evaluator.parameters.dimension)
        np.testing.assert_allclose(make(kind, estimator).estimate(batch, DIRECTIONS), whole, **CLOSE)


class Counting(Blobs):
    """Counts the samples whose losses are evaluated, in all directions."""

    samples = 0

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inner = torch._C._functorch.get_unwrapped(outputs) if torch._C._functorch.is_batchedtensor(outputs) else outputs
        self.samples += inner.shape[:-1].numel()
        return super().losses(outputs, targets)


@pytest.mark.parametrize("rows", [2, 1 << 10])
@pytest.mark.parametrize(("kind", "stream"), [("linear", False), ("mlp", False), ("linear", True), ("mlp", True)])
@pytest.mark.parametrize(
    ("estimator", "evaluations"), [("two_point", 2 * DIRECTIONS.k), ("one_sided", DIRECTIONS.k + 1)]
)
def test_the_loss_is_evaluated_no_more_often_than_the_estimator_needs(
    kind: str, stream: bool, estimator: str, evaluations: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, batch = Counting(kind), Blobs().batch(*COUNTS)
    evaluator = Evaluator(Parameters(make_model(kind)), task, estimator, MU)
    if stream:
        streamed(evaluator)
    evaluator.estimate(batch, DIRECTIONS)  # the first time it also checks how the model uses its weights
    if kind == "mlp":
        monkeypatch.setattr(batched, "BATCHED_WEIGHTS", rows * evaluator.parameters.dimension)
    task.samples = 0
    evaluator.estimate(batch, DIRECTIONS)
    watched = 1 if kind == "linear" and not stream else 0  # to see that the model is still linear
    assert task.samples == evaluations * sum(COUNTS) + watched


@pytest.mark.parametrize("path", ["linear", "batched", "streamed"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_on_a_quadratic_one_sided_slopes_are_off_by_half_mu_times_the_curvature(distribution: str, path: str) -> None:
    # Linear regression: z'Hz is the mean of 2/c |Z x|^2 over the samples, for c outputs.
    model, inputs, mu = make_model("linear"), Blobs().train_inputs[:12], 0.5
    batch = Batch(inputs, inputs[:, :4] ** 2, np.array([5, 7]))
    found = {}
    for estimator in PLAIN:
        evaluator = Evaluator(Parameters(make_model("linear"), distribution), Regression(), estimator, mu)
        evaluator.linear.possible = path == "linear"
        evaluator._batched = path != "streamed"
        found[estimator] = evaluator.estimate(batch, DIRECTIONS)
    weight, bias = Parameters(model, distribution).direction_tensors(
        DIRECTIONS.seed, DIRECTIONS.round, DIRECTIONS.first, DIRECTIONS.k
    )
    squares = (torch.einsum("kcf,nf->knc", weight, inputs) + bias[:, None]).square().mean(2)
    curvature = 2 * torch.stack([squares[:, :5].mean(1), squares[:, 5:].mean(1)]).numpy()
    factor = evaluator.parameters.factor
    bias_of_slopes = factor * mu / 2 * curvature
    assert np.abs(bias_of_slopes).max() > 0.05
    off = found["one_sided"] - found["two_point"]
    np.testing.assert_allclose(off, bias_of_slopes, rtol=2e-3, atol=1e-4 * factor)


def test_one_sided_slopes_are_measured_after_local_steps_too() -> None:
    batch, step = Blobs().batch(*COUNTS), Step(5, 1, np.float32([0.05, -0.02]))
    found = make("mlp", "one_sided").estimate(batch, DIRECTIONS, [step])
    there = make("mlp", "one_sided")
    there.parameters.commit(step)
    np.testing.assert_allclose(found, streamed(there).estimate(batch, DIRECTIONS), rtol=1e-9, atol=1e-9)


def test_the_loss_at_w_is_computed_as_those_at_the_probes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's fused attention rounds otherwise than the plain one, which is taken under a probe: an error in f(w) would
    # be in all slopes.
    evaluator, batch = streamed(make("layer", "one_sided")), Blobs().batch(*COUNTS)
    seen: list[tuple[Any, torch.Tensor]] = []
    losses = evaluator.streamed.losses

    def noted(batch: Batch, probe: Any, steps: Any = ()) -> torch.Tensor:
        seen.append((probe, losses(batch, probe, steps)))
        return seen[-1][1]

    monkeypatch.setattr(evaluator.streamed, "losses", noted)
    evaluator.estimate(batch, DIRECTIONS)
    (first, at_w), *_ = seen
    with torch.no_grad(), evaluator.parameters.holding([p.detach().clone() for p in evaluator.parameters.tensors]):
        assert torch.equal(at_w, evaluator.streamed.plain_losses(batch))
    assert first.coefficient == 0


def test_a_gradient_is_projected_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Blobs().batch(*COUNTS)
    whole = make("mlp", "gradient").estimate(batch, DIRECTIONS)
    monkeypatch.setattr(gradients, "PROJECTION_CHUNK", 7 * DIRECTIONS.k)
    np.testing.assert_allclose(make("mlp", "gradient").estimate(batch, DIRECTIONS), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_client_gets_the_mean_over_its_own_samples_however_many_it_has(kind: str, estimator: str) -> None:
    evaluator, batch = make(kind, estimator), Blobs().batch(3, 17, 1, 9)
    together = evaluator.estimate(batch, DIRECTIONS)
    alone = np.concatenate([evaluator.estimate(part, DIRECTIONS) for part in split(batch)])
    assert together.shape == (4, DIRECTIONS.k)
    np.testing.assert_allclose(together, alone, **CLOSE)


def test_client_means_are_exact_for_equal_and_unequal_counts() -> None:
    values = torch.arange(12, dtype=torch.float32).view(2, 6) * 0.1
    for counts in ([2, 2, 2], [1, 3, 2], [6]):
        means = client_means(values, np.array(counts))
        ends = np.cumsum(counts)
        expected = [[row[e - n : e].double().mean() for row in values] for e, n in zip(ends, counts, strict=True)]
        np.testing.assert_allclose(means, expected, rtol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "inplace"])
def test_gradient_and_forward_are_the_exact_slopes(kind: str, distribution: str) -> None:
    batch = Blobs().batch(*COUNTS)
    expected = plain_slopes(make_model(kind), Blobs(), batch, DIRECTIONS, distribution)
    scale = np.abs(expected).max()
    for estimator in ("gradient", "forward"):
        evaluator = make(kind, estimator, distribution)
        before = evaluator.parameters.digest()
        found = evaluator.estimate(batch, DIRECTIONS)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * scale, err_msg=estimator)
        assert evaluator.parameters.digest() == before
        assert all(p.grad is None for p in evaluator.parameters.tensors)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", ["linear", "mlp", "conv", "attention", "layer"])
def test_two_point_tends_to_the_exact_slope(kind: str, distribution: str) -> None:
    batch = Blobs().batch(*COUNTS)
    exact = plain_slopes(make_model(kind), Blobs(), batch, DIRECTIONS, distribution)
    scale = np.abs(exact).max()
    mu = 3e-3 * (100 if distribution == "sphere" else 1) ** 0.5  # sphere directions are shorter
    near = make(kind, "two_point", distribution, mu=mu).estimate(batch, DIRECTIONS)
    kinks = 10 if kind == "layer" else 1  # its ReLU turns between w - mu z and w + mu z for some samples
    np.testing.assert_allclose(near, exact, rtol=5e-3 * kinks, atol=2e-3 * scale * kinks)


def test_the_sphere_carries_the_factor_d_and_the_others_none() -> None:
    batch = Blobs().batch(20)
    gaussian = make("linear", "gradient", "gaussian").estimate(batch, DIRECTIONS)
    sphere_evaluator = make("linear", "gradient", "sphere")
    d = sphere_evaluator.parameters.dimension
    z = sphere_evaluator.parameters.directions(DIRECTIONS.seed, DIRECTIONS.round, DIRECTIONS.first, DIRECTIONS.k)
    assert torch.allclose(z.norm(dim=1), torch.ones(DIRECTIONS.k), atol=1e-5)
    norms = make("linear").parameters.directions(DIRECTIONS.seed, DIRECTIONS.round, DIRECTIONS.first, DIRECTIONS.k)
    expected = d * gaussian / norms.norm(dim=1).numpy()
    np.testing.assert_allclose(sphere_evaluator.estimate(batch, DIRECTIONS), expected, rtol=1e-4)


def test_a_model_that_branches_on_its_values_is_streamed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, batch = make("branching"), Blobs().batch(*COUNTS)
    expected = plain_two_point(evaluator.parameters.model, Blobs(), batch, DIRECTIONS, MU)
    taken = paths_of(evaluator, monkeypatch)
    np.testing.assert_allclose(evaluator.estimate(batch, DIRECTIONS), expected, **CLOSE)
    assert taken == ["batched"] + ["streamed"] * (2 * DIRECTIONS.k)
    taken.clear()
    evaluator.estimate(batch, DIRECTIONS)
    assert "batched" not in taken


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_perturbed_too() -> None:
    plain = make_model("mlp")
    scripted = torch.jit.script(make_model("mlp"))
    batch = Blobs().batch(*COUNTS)
    expected = plain_two_point(plain, Blobs(), batch, DIRECTIONS, MU)
    found = Evaluator(Parameters(scripted), Blobs(), mu=MU).estimate(batch, DIRECTIONS)
    np.testing.assert_allclose(found, expected, **CLOSE)
    with pytest.raises(ModelError, match="scripted or compiled"):
        Evaluator(Parameters(scripted), Blobs(), "forward").estimate(batch, DIRECTIONS)


def test_outputs_that_were_changed_in_place_are_not_taken_for_a_linear_map() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mul_(2)

    torch.manual_seed(0)
    model, batch = Doubling(16, 4), Blobs().batch(*COUNTS)
    expected = plain_two_point(model, Blobs(), batch, DIRECTIONS, MU)
    found = Evaluator(Parameters(model), Blobs(), mu=MU).estimate(batch, DIRECTIONS)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_a_frozen_backbone_is_evaluated_once_for_all_directions() -> None:
    evaluator, batch = make("frozen backbone"), Blobs().batch(*COUNTS)
    expected = plain_two_point(make_model("frozen backbone"), Blobs(), batch, DIRECTIONS, MU)
    evaluator.estimate(batch, DIRECTIONS)
    before = evaluator.parameters.model.calls
    found = evaluator.estimate(batch, DIRECTIONS)
    assert evaluator.parameters.model.calls == before + 1
    np.testing.assert_allclose(found, expected, **CLOSE)


class MeanLoss(Blobs):
    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_losses_that_are_not_one_a_sample_are_refused(kind: str, estimator: str) -> None:
    evaluator = Evaluator(Parameters(make_model(kind)), MeanLoss(), estimator, MU)
    with pytest.raises(ModelError, match=r"one number a sample .* got shape \(\): use reduction='none'"):
        evaluator.estimate(Blobs().batch(5), DIRECTIONS)
    with pytest.raises(ModelError, match="one number a sample"):
        streamed(evaluator).estimate(Blobs().batch(5), DIRECTIONS)


class Penalised(Blobs):
    """A loss that uses the weights itself."""

    model_: nn.Module

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().losses(outputs, targets) + self.model_.weight.square().sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_penalty_on_the_weights_is_seen(estimator: str) -> None:
    task, model, batch = Penalised(), make_model("linear"), Blobs().batch(*COUNTS)
    task.model_ = model
    found = Evaluator(Parameters(model), task, estimator, MU).estimate(batch, DIRECTIONS)
    one_sided = estimator == "one_sided"
    if one_sided:
        bare = plain_one_sided(model, Blobs(), batch, DIRECTIONS, MU)
    else:
        bare = plain_slopes(model, Blobs(), batch, DIRECTIONS)
    z = Parameters(make_model("linear")).direction_tensors(
        DIRECTIONS.seed, DIRECTIONS.round, DIRECTIONS.first, DIRECTIONS.k
    )
    penalty = (z[0] * (2 * model.weight.detach() + (MU * z[0] if one_sided else 0))).sum((1, 2)).numpy()
    np.testing.assert_allclose(found, bare + penalty, rtol=5e-3, atol=5e-3)


class Regression(Blobs):
    """Several targets a sample."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean(1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_targets_may_be_vectors(estimator: str) -> None:
    inputs = Blobs().train_inputs[:12]
    batch = Batch(inputs, inputs[:, :4] ** 2, np.array([5, 7]))
    linear = Evaluator(Parameters(make_model("linear")), Regression(), estimator, MU)
    difference = estimator if estimator in PLAIN else "two_point"
    expected = streamed(Evaluator(Parameters(make_model("linear")), Regression(), difference, MU))
    np.testing.assert_allclose(
        linear.estimate(batch, DIRECTIONS), expected.estimate(batch, DIRECTIONS), rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize("path", ["first that fits", "streamed"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_models_are_seen_at_weights_rounded_to_nearest(kind: str, dtype: str, path: str) -> None:
    evaluator, batch, mu = make(kind, dtype=dtype, mu=0.1), Blobs().batch(*COUNTS), 0.1
    if path == "streamed":
        streamed(evaluator)
    before = evaluator.parameters.digest()
    found = evaluator.estimate(batch, DIRECTIONS)
    expected = plain_two_point(evaluator.parameters.model, Blobs(), batch, DIRECTIONS, mu)
    tolerance = 1e-9 if path == "streamed" else 0.05  # vmap multiplies 16-bit matrices in another order
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert evaluator.parameters.digest() == before


@pytest.mark.parametrize("estimator", ["gradient", "forward"])
def test_16_bit_models_have_slopes_too(estimator: str) -> None:
    batch = Blobs().batch(*COUNTS)
    exact = plain_slopes(make_model("mlp"), Blobs(), batch, DIRECTIONS)
    found = make("mlp", estimator, dtype="bfloat16").estimate(batch, DIRECTIONS)
    np.testing.assert_allclose(found, exact, rtol=0.1, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["linear", "mlp", "conv"])
def test_probing_changes_nothing_even_if_the_loss_raises(kind: str, estimator: str) -> None:
    class Failing(Blobs):
        def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room")

    for path in (lambda e: e, streamed):
        evaluator = path(Evaluator(Parameters(make_model(kind)), Failing(), estimator, MU))
        before = evaluator.parameters.digest()
        with pytest.raises(MemoryError, match="no room"):
            evaluator.estimate(Blobs().batch(5), DIRECTIONS)
        assert evaluator.parameters.digest() == before
        assert [p.data_ptr() for p in evaluator.parameters.tensors] == [
            p.data_ptr() for p in evaluator.parameters.model.parameters()
        ]


@pytest.mark.parametrize("estimator", PLAIN)
def test_mu_0_is_refused_for_differences_and_so_is_what_float32_makes_0(estimator: str) -> None:
    for mu in (0.0, -1.0, 1e-60, float("nan")):
        with pytest.raises(ValueError, match=f"{estimator} divides by mu"):
            make("linear", estimator, mu=mu)
    with pytest.raises(ValueError, match="estimator"):
        make("linear", "three_point")


def test_directions_follow_seed_round_and_first_index() -> None:
    evaluator, batch = make("mlp"), Blobs().batch(9)
    whole = evaluator.estimate(batch, Directions(1, 2, 6))
    late = evaluator.estimate(batch, Directions(1, 2, 3, first=3))
    np.testing.assert_allclose(late, whole[:, 3:], **CLOSE)
    for other in (Directions(2, 2, 6), Directions(1, 3, 6), Directions(1, 2, 6, first=6)):
        assert np.abs(evaluator.estimate(batch, other) - whole).max() > 0.1


@torch.jit.script
def scripted_penalty(w: torch.Tensor) -> torch.Tensor:
    return w.square().sum()


class ScriptedPenalty(Penalised):
    """A loss whose use of the weights no torch function shows."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return Blobs.losses(self, outputs, targets) + scripted_penalty(self.model_.weight)


class Threaded(nn.Module):
    """A model that computes in a thread of its own, where no function mode reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._compute, x).result()

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.linear(x)


def test_a_penalty_that_escapes_the_substitution_is_found_out() -> None:
    task = ScriptedPenalty()
    task.model_ = make_model("linear")
    evaluator, batch = Evaluator(Parameters(task.model_), task, "two_point", MU), task.batch(5)
    twin = make_model("linear")
    other = ScriptedPenalty()

    def true_loss(c: float, r: int) -> float:
        other.model_ = moved(twin, c * direction(twin, DIRECTIONS, r, "gaussian"))
        outputs = other.outputs(other.model_, batch.inputs)
        return float(other.losses(outputs, batch.targets).detach().double().mean())

    expected = [(true_loss(MU, r) - true_loss(-MU, r)) / (2 * MU) for r in range(DIRECTIONS.k)]
    np.testing.assert_allclose(evaluator.estimate(batch, DIRECTIONS)[0], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("large", [False, True])
def test_a_model_that_computes_in_a_thread_of_its_own_is_found_out(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(batched, "BATCHED_DIMENSION", 1)
    model, batch = Threaded(), Blobs().batch(5)
    plain = make_model("linear")
    plain.load_state_dict(model.linear.state_dict())
    evaluator = Evaluator(Parameters(model), Blobs(), "two_point", MU)
    expected = Evaluator(Parameters(plain), Blobs(), "two_point", MU).estimate(batch, DIRECTIONS)
    np.testing.assert_allclose(evaluator.estimate(batch, DIRECTIONS), expected, rtol=2e-2, atol=2e-2)


# Threads: torch's own may differ from one process to the next, so a small model is kept to one of them.


@pytest.mark.parametrize("kind", MODELS)
def test_a_small_model_is_measured_by_one_torch_thread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, seen = make(kind), set()
    outputs = evaluator.objective.outputs

    def noted(model: nn.Module, inputs: Any) -> Any:
        seen.add(torch.get_num_threads())
        return outputs(model, inputs)

    monkeypatch.setattr(evaluator.objective, "outputs", noted)
    torch.set_num_threads(2)
    evaluator.estimate(Blobs(kind).batch(*COUNTS), DIRECTIONS)
    assert seen == {1}
    assert torch.get_num_threads() == 2
