"""The theorems as functions: against independent computations, and the lemmas against our own directions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cyber0.errors import ConfigError
from cyber0.reproduce.federations import PRODUCT_OF_GAUSSIANS, exponent, rounds_until, sphere
from cyber0.tasks.convex import Logistic, Ridge, sigmoid
from cyber0.theory import theorems as theory

Array = NDArray[np.float64]

D = st.integers(1, 2000)
K = st.integers(1, 500)
CURVATURES = st.tuples(st.floats(1e-3, 1.0), st.floats(1.0, 1e3))
DELTA: dict[str, Any] = {"n": 200, "m": 20, "beta": 0.25, "v": 3.0, "d": 10, "diameter": 4.0, "lipschitz": 50.0}


# Rates.


@given(D, K, CURVATURES)
def test_the_learning_rate_of_theorem_2_is_the_best_when_curvature_is_the_same_all_over(
    d: int, k: int, curvatures: tuple[float, float]
) -> None:
    """With lambda = L_F the mean squared factor is 1 - 2 eta L + eta^2 tau L^2, whatever the direction of w - w*."""
    smoothness = curvatures[1]
    rate = theory.theorem2(d, k, smoothness, smoothness)
    etas = rate.eta * np.linspace(0.5, 1.5, 1001)
    squared = 1 - 2 * etas * smoothness + etas**2 * (d + k - 1) / k * smoothness**2
    assert etas[squared.argmin()] == pytest.approx(rate.eta)
    assert math.sqrt(max(0.0, squared.min())) == pytest.approx(rate.rms_contraction, abs=1e-7)


@given(D, K, CURVATURES)
def test_the_contraction_of_theorem_2_is_never_below_the_worst_quadratic(
    d: int, k: int, curvatures: tuple[float, float]
) -> None:
    strong, smooth = curvatures
    rate = theory.theorem2(d, k, strong, smooth)
    eigenvalues = np.linspace(strong, smooth, 101)
    squared = 1 - 2 * rate.eta * eigenvalues + rate.eta**2 * rate.tau * eigenvalues**2
    assert math.sqrt(max(0.0, squared.max())) <= rate.rms_contraction + 1e-12 <= rate.contraction + 2e-12


@given(D, K, CURVATURES, st.floats(1e-6, 1.0))
def test_summing_the_recursion_of_the_proof_gives_the_floor(
    d: int, k: int, curvatures: tuple[float, float], mu: float
) -> None:
    strong, smooth = curvatures
    rate, delta = theory.theorem3(d, k, strong, smooth, mu), 0.3
    per_round = rate.eta * delta + mu * d / (math.sqrt(2) * rate.tau) * math.sqrt(1 + rate.tau / 4)
    assert per_round / (1 - rate.contraction) == pytest.approx(rate.recursion_floor(delta), rel=1e-6)
    assert rate.recursion_floor(delta) <= rate.floor(delta) * (1 + 1e-9)
    assert rate.mu_bias <= theory.stated_mu_bias(d, k, strong, smooth, mu) / 4 * (1 + 1e-9)
    two = theory.theorem2(d, k, strong, smooth)
    assert two.eta * delta / (1 - two.contraction) == pytest.approx(two.recursion_floor(delta), rel=1e-6)


@given(D, K, CURVATURES, st.floats(1e-6, 1.0))
def test_independent_directions_lose_the_square_root_and_nothing_else(
    d: int, k: int, curvatures: tuple[float, float], mu: float
) -> None:
    paper, ours = (make(d, k, *curvatures, mu) for make in (theory.theorem3, theory.theorem3_independent))
    if k == 1:
        assert ours.contraction == pytest.approx(paper.contraction)
    assert ours.contraction <= paper.contraction + 1e-12
    many = theory.theorem3_independent(d, 10**9, *curvatures, mu)
    assert many.tau == pytest.approx(1, abs=1e-4)
    assert theory.theorem3(d, 10**9, *curvatures, mu).tau == pytest.approx(1 + math.sqrt(d), rel=1e-4)


@given(D, K, CURVATURES, st.floats(1e-3, 1e3), st.floats(1e-6, 0.5), st.sampled_from([0.0, 1e-9]))
def test_rounds_to_an_error_invert_the_bound(
    d: int, k: int, curvatures: tuple[float, float], distance: float, share: float, mu: float
) -> None:
    rate = theory.theorem3(d, k, *curvatures, mu) if mu else theory.theorem2(d, k, *curvatures)
    error = share * distance
    assume(error > 1.001 * rate.floor())
    rounds = rate.rounds_to(error, distance)
    assert rate.bound(rounds, distance) <= error * (1 + 1e-9)
    assert rate.bound(max(0, rounds - 1), distance) > error * (1 - 1e-9)


def test_after_the_papers_number_of_rounds_the_floor_is_half_the_bound_or_more() -> None:
    rate = theory.theorem2(100, 5, 0.1, 1.0)
    rounds = rate.rounds_until_floor(10.0, 0.01)
    assert rounds == pytest.approx(rate.tau * 1.1 / 0.1 * math.log(0.1 / 0.02 * 10.0))
    assert rate.bound(rounds, 10.0, 0.01) <= 2 * rate.floor(0.01)


@given(D, K, CURVATURES)
def test_more_directions_and_fewer_dimensions_never_slow_it_down(
    d: int, k: int, curvatures: tuple[float, float]
) -> None:
    for make in (
        lambda d, k: theory.theorem2(d, k, *curvatures),
        lambda d, k: theory.theorem3(d, k, *curvatures, 0.1),
        lambda d, k: theory.theorem3_independent(d, k, *curvatures, 0.1),
    ):
        assert make(d, k + 1).contraction <= make(d, k).contraction + 1e-15
        assert make(d + 1, k).contraction >= make(d, k).contraction - 1e-15
        assert make(d, k).rms_contraction <= make(d, k).contraction


# Delta.


def test_delta_is_what_its_proof_says_term_by_term() -> None:
    log_a = math.log((1 + 4000 * 50 * 4) * (1 + 2 * 4000 * 50))
    x, y = 80 / 4000 * log_a, 4 / 200 * (10 * log_a + math.log(20))
    found = theory.delta(**DELTA)
    assert x < 1 < y  # so that both branches are met
    assert found.sampling == pytest.approx(3 * math.sqrt(x) / 0.5)
    assert found.trimming == pytest.approx(3 * 0.25 * 3 * y / 0.5)
    assert found.covering == pytest.approx(2 * 1.75 / 0.5 / 4000)
    assert found.value == pytest.approx(found.sampling + found.trimming + found.covering)
    assert found.dominant == "trimming"
    assert found.log_failure == pytest.approx(math.log(4) - 10 * log_a)
    assert found.probability == 1.0


def test_for_many_samples_delta_with_epsilon_tends_to_the_papers_leading_term() -> None:
    setting = {**DELTA, "n": 10**9, "epsilon": 0.2}
    assert theory.delta(**setting).value == pytest.approx(theory.stated_delta(**setting), rel=0.01)
    assert theory.delta(**{**setting, "epsilon": None}).value < theory.delta(**setting).value


@given(st.integers(1, 10**6), st.integers(2, 500), st.floats(0, 0.45), st.integers(1, 1000), st.floats(0.1, 100))
def test_delta_falls_with_samples_and_rises_with_byzantine_clients_noise_and_dimension(
    n: int, m: int, beta: float, d: int, v: float
) -> None:
    setting = {**DELTA, "n": n, "m": m, "beta": beta, "d": d, "v": v}
    here = theory.delta(**setting)
    assert theory.delta(**{**setting, "n": 2 * n}).value < here.value
    assert theory.delta(**{**setting, "v": 2 * v}).value > here.value
    assert theory.delta(**{**setting, "d": d + 1}).value > here.value
    assert theory.delta(**{**setting, "beta": beta / 2}).value <= here.value
    assert theory.pointwise_delta(n=n, m=m, beta=beta, v=v) < here.value
    assert 0 <= here.probability <= 1


def test_what_is_trimmed_counts_not_what_is_asked_for() -> None:
    assert theory.delta(**{**DELTA, "beta": 0.049}) == theory.delta(**{**DELTA, "beta": 0.0})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.tau(0, 1), ["d = 0", "at least 1"]),
        (lambda: theory.tau(5, 1.5), ["k = 1.5", "whole number"]),  # type: ignore[arg-type]
        (lambda: theory.theorem2(5, 1, 2.0, 1.0), ["2.0", "1.0", "swap"]),
        (lambda: theory.theorem2(5, 1, 0.0, 1.0), ["strong_convexity = 0.0"]),
        (lambda: theory.theorem3(5, 1, 0.1, 1.0, 0.0), ["mu = 0.0", "above 0"]),
        (lambda: theory.theorem3(5, 1, 0.1, 1.0, math.nan), ["mu = nan"]),
        (lambda: theory.delta(**{**DELTA, "beta": 0.5}), ["beta = 0.5", "below 0.5"]),
        (lambda: theory.delta(**{**DELTA, "n": 0}), ["n = 0"]),
        (lambda: theory.delta(**DELTA, epsilon=0.3), ["epsilon = 0.3", "0.25"]),
        (lambda: theory.pointwise_delta(n=1, m=1, beta=0, v=1, failure=0), ["failure = 0"]),
        (lambda: theory.theorem3(5, 1, 0.1, 1, 1.0).rounds_to(0.1, 1.0), ["error = 0.1", "stays above", "lower mu"]),
    ],
)
def test_an_impossible_value_is_refused_by_name_with_the_remedy(call: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_product_of_two_gaussians_is_as_sub_exponential_as_we_say() -> None:
    v = PRODUCT_OF_GAUSSIANS
    t, rho = np.meshgrid(np.linspace(-1, 1, 4001) / v, np.linspace(-1, 1, 201))
    log_mgf = -0.5 * (np.log1p(-t * (1 + rho)) + np.log1p(t * (1 - rho))) - rho * t
    assert (log_mgf <= v * v * t * t / 2 + 1e-12).all()


# Smoothing.


def quartic(w: Array) -> float:
    return float((w**4).sum())


@pytest.mark.slow
def test_the_estimator_is_unbiased_for_the_ball_average_and_not_for_the_spheres() -> None:
    """For the quartic, d/dx E (x + mu u)^4 = 4 x^3 + 12 x mu^2 E u^2; in R^3 E u^2 is 1/5 in the ball, 1/3 on it."""
    mu, w, d = 1.5, np.array([0.5, -0.2, 0.3]), 3
    z = sphere(1, 0, 1, 40_000, d)[0]
    estimates = d * (((w + mu * z) ** 4).sum(1) - ((w - mu * z) ** 4).sum(1)) / (2 * mu) * z[:, 0]
    mean, error = estimates.mean(), estimates.std() / math.sqrt(len(z))
    ball, surface = (4 * w[0] ** 3 + 12 * w[0] * mu**2 * second for second in (1 / 5, 1 / 3))
    assert abs(mean - ball) < 5 * error
    assert abs(mean - surface) > 20 * error


def test_the_smoothed_loss_is_the_average_over_the_ball() -> None:
    """E(x + mu u)^4 summed: sum x^4 + 6 mu^2 x^2 E u^2 + mu^4 E u^4, with E u^2 = 1/(d+2), E u^4 = 3/((d+2)(d+4))."""
    mu, w, d = 0.8, np.array([0.5, -0.2, 0.3, 1.0]), 4
    exact = quartic(w) + 6 * mu**2 * float((w**2).sum()) / (d + 2) + 3 * d * mu**4 / ((d + 2) * (d + 4))
    # One term has a deviation of 1.2 here (of 20,000 numpy points): 1,000 are within 5 standard errors, 0.19.
    assert theory.smoothed_loss(quartic, w, mu, samples=1000) == pytest.approx(exact, abs=0.19)


@pytest.mark.parametrize("d", [1, 2, 3, 20, 1000])
def test_the_marginal_of_the_ball_has_its_moments(d: int) -> None:
    s, p = theory.ball_marginal(d)
    assert p.sum() == pytest.approx(1)
    assert p @ s**2 == pytest.approx(1 / (d + 2), rel=1e-6)
    assert p @ s**4 == pytest.approx(3 / ((d + 2) * (d + 4)), rel=1e-6)


def test_a_smoothed_quadratic_differs_by_the_gap_exactly_and_a_logistic_loss_by_less() -> None:
    d, mu = 6, 0.7
    w = np.ones(d)
    found = theory.smoothed_loss(lambda x: 1.5 * float((x - w) @ (x - w)), w, mu, samples=1000)
    # Around its minimum the deviation is that of 1.5 mu^2 |u|^2, below 0.2: 5 standard errors are 0.03.
    assert found == pytest.approx(theory.smoothing_gap(d, 3.0, mu), abs=0.03)
    task = Logistic(8, 100)
    nodes, weights = theory.ball_marginal(8)
    moved = task.smoothed_minimiser(mu * float(np.linalg.norm(task.inputs[0])) * nodes, weights)
    shift = float(np.linalg.norm(moved - task.minimiser))
    assert 0 < shift <= theory.minimiser_shift(8, task.strong_convexity, task.smoothness, mu)


# Lemmas, against our own directions. Tolerances are 5 standard errors of the very samples.


def check_mean(samples: Array, expected: float | Array) -> None:
    error = samples.std(axis=0) / math.sqrt(len(samples))
    assert (np.abs(samples.mean(axis=0) - expected) <= 5 * error + 1e-7).all()


@pytest.mark.slow
@pytest.mark.parametrize("d", [5, 30])
def test_the_second_moments_of_a_direction_are_the_identity_over_d(d: int) -> None:
    z = sphere(2, 0, 1, 10_000, d)[0]
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-4)
    check_mean((z[:, :, None] * z[:, None, :]).reshape(len(z), -1), np.eye(d).reshape(-1) / d)


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 6])
def test_the_mean_of_z1_z1t_z2_z2t_is_the_identity_over_d_or_d_squared(d: int) -> None:
    z = sphere(3, 0, 1, 20_000, d)[0]
    one, two = z[:10_000], z[10_000:]
    product = one[:, :, None] * (one * two).sum(axis=1)[:, None, None] * two[:, None, :]
    check_mean(product.reshape(len(one), -1), np.eye(d).reshape(-1) / d**2)
    same = one[:, :, None] * (one * one).sum(axis=1)[:, None, None] * one[:, None, :]
    check_mean(same.reshape(len(one), -1), np.eye(d).reshape(-1) / d)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "k"), [(5, 1), (20, 4), (20, 20), (10, 50)])
def test_the_squared_estimate_is_tau_times_the_squared_gradient(d: int, k: int) -> None:
    gradient = np.arange(1.0, d + 1)
    z = sphere(4, 0, 20_000 // k, k, d)
    estimate = d / k * np.einsum("skd,sk->sd", z, z @ gradient)
    check_mean(estimate, gradient)
    check_mean((estimate**2).sum(axis=1) / (gradient @ gradient), theory.tau(d, k))


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 10, 40])
def test_the_lemma_that_was_very_hard_to_prove(d: int) -> None:
    """E|z1.z2| (x.z1)^2 = ||x||^2 / d * Gamma(d/2) / (sqrt(pi) Gamma((d + 1) / 2)) <= ||x||^2 / d^(3/2)."""
    z = sphere(5, 0, 1, 20_000, d)[0]
    x = np.linspace(-1, 2, d)
    found = np.abs((z[:10_000] * z[10_000:]).sum(axis=1)) * (z[:10_000] @ x) ** 2 / (x @ x)
    exact = math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi) / d
    check_mean(found, exact)
    assert exact <= d**-1.5


def test_the_squared_two_point_estimate_stays_below_its_lemma() -> None:
    """E||g||^2 <= 2d ||grad F||^2 + L_F^2 mu^2 d^2 / 2, for a logistic loss and a step that feels its curvature."""
    task, mu, d = Logistic(10, 100), 1.0, 10
    w, z = np.full(d, 0.3), sphere(6, 0, 1, 5_000, d)[0]

    def loss(points: Array) -> Array:
        fit = np.logaddexp(0, -task.targets * (points @ task.inputs.T)).mean(axis=1)
        return np.asarray(fit + task.penalty / 2 * (points**2).sum(axis=1))

    squares = (d * (loss(w + mu * z) - loss(w - mu * z)) / (2 * mu)) ** 2
    signed = task.inputs * task.targets[:, None]
    gradient = -signed.T @ sigmoid(-signed @ w) / len(signed) + task.penalty * w
    bound = 2 * d * gradient @ gradient + (task.smoothness * mu * d) ** 2 / 2
    assert squares.mean() + 5 * squares.std() / math.sqrt(len(z)) < bound


# Tasks of which everything is known.


@pytest.mark.parametrize("task", [Ridge(12, 60), Ridge(12, 12, condition=1.0), Logistic(12, 60)])
def test_a_convex_task_knows_its_curvature_and_its_minimiser(task: Any) -> None:
    import torch

    model = task.model(0)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(task.minimiser))
    exact = model.double()

    def mean_loss(w: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(exact, {"weight": w}, torch.from_numpy(task.inputs))
        return (task._fit(outputs[:, 0], torch.from_numpy(task.targets)) + outputs[:, 1]).mean()

    at = torch.from_numpy(task.minimiser)
    assert torch.func.grad(mean_loss)(at).norm() < 1e-9
    curvatures = np.linalg.eigvalsh(torch.func.hessian(mean_loss)(at).numpy())
    assert task.strong_convexity <= curvatures[0] + 1e-9
    assert curvatures[-1] <= task.smoothness + 1e-9
    if task.name == "ridge":
        assert curvatures[[0, -1]] == pytest.approx([task.strong_convexity, task.smoothness])


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: Ridge(20, 10), "samples = 10"), (lambda: Ridge(condition=0.5), "condition = 0.5"),
     (lambda: Logistic(penalty=0), "penalty = 0")],
)  # fmt: skip
def test_an_impossible_convex_task_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_rounds_until_a_level_and_exponents_are_read_off_exactly() -> None:
    curve = 2.0 ** -np.arange(10.0)
    assert rounds_until(curve, 2.0**-3.5) == pytest.approx(3.5)
    assert rounds_until(curve, 2.0) == 0.0
    assert math.isnan(rounds_until(curve, 1e-9))
    assert exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
