"""The paper's theorems as functions: step sizes, rates, errors (Section 5 and Appendix B of the paper).

    rate = theorem2(d=7850, k=64, strong_convexity=0.1, smoothness=1.0)
    rate.eta                                    # the learning rate, for sphere directions with the factor d
    rate.rounds_to(0.1, distance=5.0)           # rounds until E||w_T - w*|| <= 0.1
    delta(n=500, m=12, beta=0.25, v=7850, d=7850, diameter=10, lipschitz=1e6).value

The theorems are 1 (robustness error), 2 (convergence for mu = 0) and 3 (convergence for mu > 0). F is lambda-strongly
convex and L_F-smooth; lambda is `strong_convexity` and L_F is `smoothness` here. Misprints in the paper
are corrected from its proofs, and each function says so; docs/THEORY.md has the whole list. Where a proof gives a
tighter bound at no cost, that bound has a name of its own (`theorem3_independent`, `Rate.rms_contraction`,
`pointwise_delta`, `minimiser_shift`) and is marked as ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cyber0.config.tolerance import share_of
from cyber0.errors import ConfigError

Vector = NDArray[np.float64]
LossFunction = Callable[[Vector], float]

ROUND_OFF = 1e-12  # of the bound, when rounds are counted


@dataclass(frozen=True)
class Rate:
    """How fast and how far the distance to the minimiser falls (Theorems 2 and 3):

        E||w_T - w*|| <= contraction^T ||w_0 - w*|| + (2 / lambda) Delta + mu_bias

    with w*_mu, the minimiser of the smoothed loss, in place of w* where mu > 0.
    """

    tau: float
    """The mean squared length of the estimate over that of the gradient, or a bound on it."""
    eta: float
    """The learning rate of the theorem."""
    contraction: float
    """The factor by which the distance falls each round."""
    rms_contraction: float
    """The same for the root of the mean squared distance. Ours: the proof shows it before it uses
    sqrt(1 - x) <= 1 - x / 2, and it is never larger. On the isotropic quadratic (lambda = L_F) Theorem 2's is exact."""
    strong_convexity: float
    smoothness: float
    mu_bias: float = 0.0
    """What a finite probing step adds to the final distance."""

    def floor(self, delta: float = 0.0) -> float:
        """Return (2 / lambda) Delta + mu_bias, what remains after any number of rounds."""
        _not_negative(delta=delta)
        return 2.0 * delta / self.strong_convexity + self.mu_bias

    def recursion_floor(self, delta: float = 0.0) -> float:
        """Return (1 / lambda + 1 / L_F) Delta + mu_bias.

        This is what the recursion of the proofs sums to; 2 / lambda comes from lambda <= L_F. Equal if lambda = L_F.
        """
        _not_negative(delta=delta)
        return delta * (1 / self.strong_convexity + 1 / self.smoothness) + self.mu_bias

    def bound(self, rounds: float, distance: float, delta: float = 0.0) -> float:
        """Return the right-hand side of the theorem after a number of rounds, started at that distance."""
        _not_negative(rounds=rounds, distance=distance)
        return float(self.contraction**rounds) * distance + self.floor(delta)

    def rounds_to(self, error: float, distance: float, delta: float = 0.0) -> int:
        """Return the smallest T for which the bound is at most `error`."""
        _positive(error=error)
        _not_negative(distance=distance)
        floor = self.floor(delta)
        room = error - floor
        if distance <= room:
            return 0
        if room <= 0:
            raise ConfigError(
                f"error = {error:g} can't be reached: the bound stays above {floor:g} "
                f"({2 * delta / self.strong_convexity:.3g} from Delta, {self.mu_bias:.3g} from mu); "
                "ask for a larger error, or lower mu, or raise n"
            )
        return math.ceil(math.log(room / distance) / math.log(self.contraction) - ROUND_OFF)

    def rounds_until_floor(self, distance: float, delta: float) -> float:
        """Return T = log(||w_0 - w*|| / floor) / (1 - contraction), from which on the floor is at least half the bound.

        For Theorem 2 this is the paper's T >= tau (L_F + lambda) / lambda * log(lambda ||w_0 - w*|| / (2 Delta)), where
        the text after Theorem 2 prints ||w_T - w*|| in the logarithm.
        """
        _positive(distance=distance)
        floor = self.floor(delta)
        _positive(floor=floor)
        return max(0.0, math.log(distance / floor)) / (1 - self.contraction)


def tau(d: int, k: int, *, smoothed: bool = False) -> float:
    """Return tau: (d + k - 1) / k for mu = 0 (Theorem 2), (2d + (k - 1)(1 + sqrt d)) / k for mu > 0 (Theorem 3).

    For mu = 0 it is the exact E||(1/k) sum_r g(w, z_r)||^2 / ||grad F||^2 (Lemma 4 of the proof of Theorem 2). For
    mu > 0 it bounds it, up to a term in mu; the lemma that says so prints "=" and proves "<=".
    """
    _whole(d=d, k=k)
    if smoothed:
        return (2 * d + (k - 1) * (1 + math.sqrt(d))) / k
    return (d + k - 1) / k


def eta(d: int, k: int, smoothness: float, *, smoothed: bool = False) -> float:
    """Return the learning rate: 1 / (tau L_F) for mu = 0 (Theorem 2), 1 / (2 tau L_F) for mu > 0 (Theorem 3)."""
    _positive(smoothness=smoothness)
    return 1 / ((2 if smoothed else 1) * tau(d, k, smoothed=smoothed) * smoothness)


def theorem2(d: int, k: int, strong_convexity: float, smoothness: float) -> Rate:
    """Return the rate for mu = 0 (Theorem 2).

        tau = (d + k - 1) / k    eta = 1 / (tau L_F)    contraction = 1 - lambda / (tau (L_F + lambda))

    The proof has E||w' - w*||^2 <= (1 - 2 lambda / (tau (L_F + lambda))) ||w - w*||^2, hence `rms_contraction`.
    """
    _curvatures(strong_convexity, smoothness)
    t = tau(d, k)
    fall = strong_convexity / (t * (smoothness + strong_convexity))
    return Rate(t, eta(d, k, smoothness), 1 - fall, _root(1 - 2 * fall), strong_convexity, smoothness)


def theorem3(d: int, k: int, strong_convexity: float, smoothness: float, mu: float) -> Rate:
    """Return the rate for mu > 0 (Theorem 3), as its proof gives it.

        tau = (2d + (k - 1)(1 + sqrt d)) / k    eta = 1 / (2 tau L_F)
        contraction = 1 - lambda / (2 tau (L_F + lambda))
        mu_bias = sqrt(2) (L_F + lambda) mu d / lambda * sqrt(1 + tau / 4)

    The statement prints "1F" for 1, leaves out the plus before (2 / lambda) Delta, and has 8 sqrt(2) mu d L_F / lambda
    * sqrt(1 + tau / 4) for the last term. The proof's recursion adds mu d / (sqrt(2) tau) sqrt(1 + tau / 4) a round,
    which over the rounds sums to the mu_bias above, at most a quarter of what is stated.
    """
    _curvatures(strong_convexity, smoothness)
    _positive(mu=mu)
    t = tau(d, k, smoothed=True)
    fall = strong_convexity / (2 * t * (smoothness + strong_convexity))
    bias = math.sqrt(2) * (smoothness + strong_convexity) * mu * d / strong_convexity * math.sqrt(1 + t / 4)
    rms = _root(1 - 2 * fall)
    return Rate(t, eta(d, k, smoothness, smoothed=True), 1 - fall, rms, strong_convexity, smoothness, bias)


def stated_mu_bias(d: int, k: int, strong_convexity: float, smoothness: float, mu: float) -> float:
    """Return 8 sqrt(2) mu d L_F / lambda * sqrt(1 + tau / 4), the term as Theorem 3 states it; see `theorem3`."""
    _curvatures(strong_convexity, smoothness)
    _not_negative(mu=mu)
    t = tau(d, k, smoothed=True)
    return 8 * math.sqrt(2) * mu * d * smoothness / strong_convexity * math.sqrt(1 + t / 4)


def theorem3_independent(d: int, k: int, strong_convexity: float, smoothness: float, mu: float) -> Rate:
    """Return a rate for mu > 0 without the residual sqrt(d). Ours, by one change to the proof of Theorem 3.

        tau = (4d + k - 1) / k    eta = 1 / (tau L_F)    contraction = 1 - lambda / (tau (L_F + lambda))
        mu_bias = (L_F + lambda) mu / lambda * sqrt((4d + d^2 / 2) / k)

    The paper bounds E<g(w, z_1), g(w, z_2)> by (1 + sqrt d) ||grad F||^2 + 2 L_F^2 mu^2 d^2. But z_1 and z_2 are
    independent, so it *is* ||E g||^2 = ||grad F_mu||^2, and no sqrt(d) remains as k grows. With the paper's
    E||g||^2 <= 2d ||grad F||^2 + L_F^2 mu^2 d^2 / 2 and ||grad F - grad F_mu|| <= L_F mu E||u|| <= L_F mu (u in the
    ball, E||u|| = d / (d + 1); the paper's L_F mu d / 2 grows with d), it follows that ||grad F||^2 is at most
    2 ||grad F_mu||^2 + 2 L_F^2 mu^2, and so

        E||(1/k) sum g||^2 <= (4d + k - 1) / k ||grad F_mu||^2 + (4d + d^2 / 2) L_F^2 mu^2 / k,

    and the rest of the proof goes through with this tau and eta = 1 / (tau L_F). For k = 1 the contraction is that of
    Theorem 3.
    """
    _curvatures(strong_convexity, smoothness)
    _positive(mu=mu)
    _whole(d=d, k=k)
    t = (4 * d + k - 1) / k
    fall = strong_convexity / (t * (smoothness + strong_convexity))
    bias = (smoothness + strong_convexity) * mu / strong_convexity * math.sqrt((4 * d + d * d / 2) / k)
    rms = _root(1 - 2 * fall)
    return Rate(t, 1 / (t * smoothness), 1 - fall, rms, strong_convexity, smoothness, bias)


@dataclass(frozen=True)
class Robustness:
    """Delta of Theorem 1, in its parts, and how surely it holds."""

    sampling: float
    """From the honest clients' finite samples: t / (1 - 2 beta), which falls as 1 / sqrt(n m)."""
    trimming: float
    """From Byzantine clients and trimming: 3 beta s / (1 - 2 beta), which falls as beta / sqrt(n) and not with m."""
    covering: float
    """From holding for all w and z at once: 2 (1 + 3 beta) / ((1 - 2 beta) n m)."""
    log_failure: float
    """Natural logarithm of the probability that Delta does not hold, at most 0."""

    @property
    def value(self) -> float:
        """Delta."""
        return self.sampling + self.trimming + self.covering

    @property
    def probability(self) -> float:
        """With at least this probability over the data, Delta holds for all w and all directions at once."""
        return -math.expm1(self.log_failure)

    @property
    def dominant(self) -> str:
        """The largest of the three parts."""
        return max(("sampling", "trimming", "covering"), key=lambda name: float(getattr(self, name)))


def delta(
    *,
    n: int,
    m: int,
    beta: float,
    v: float,
    d: int,
    diameter: float,
    lipschitz: float,
    epsilon: float | None = None,
) -> Robustness:
    """Return Delta, the robustness error of Theorem 1, with every constant of its proof.

        Delta = (t + 3 beta s) / (1 - 2 beta) + 2 (1 + 3 beta) / ((1 - 2 beta) n m)
        t = v max(x, sqrt x),  x = (8 d / (n m)) log A
        s = v max(y, sqrt y),  y = (4 / n) (d log A + log m)
        A = (1 + n m L^ D)(1 + 2 n m L^);  it fails with probability at most 4 A^-d

    The statement has the leading term with 1 / (1 - 2 beta) < 1 / (2 epsilon), and the rest in O~: pass `epsilon` for
    that factor. beta counts as floor(beta m) / m, which is what is trimmed. Delta does not depend on k.

    Args:
        n: Samples of each client.
        m: Clients.
        beta: The share trimmed at each end, no less than the share of Byzantine clients.
        v: The sub-exponential parameter of one sample's scalar, factor d included: for a slope with Gaussian noise of
            deviation sigma on the sphere it is d sigma.
        d: Dimension.
        diameter: D, of the set W that w is kept in.
        lipschitz: L^_mu = L_{w,mu} + L_{z,mu}, how fast a sample's scalar changes with w and with z. Only its logarithm
            matters.
        epsilon: How far beta is below 1/2 at least; None: take 1 / (1 - 2 beta) itself.
    """
    _whole(n=n, m=m, d=d)
    _positive(v=v, diameter=diameter, lipschitz=lipschitz)
    share = _share(beta, m)
    if epsilon is not None and not 0 < epsilon <= 0.5 - beta:
        raise ConfigError(
            f"epsilon = {epsilon!r} is impossible with beta = {beta!r}: it must be above 0 and at most "
            f"1/2 - beta = {0.5 - beta:g}"
        )
    gain = 1 / (1 - 2 * share) if epsilon is None else 1 / (2 * epsilon)
    log_a = math.log1p(n * m * lipschitz * diameter) + math.log1p(2 * n * m * lipschitz)
    x, y = 8 * d * log_a / (n * m), 4 * (d * log_a + math.log(m)) / n
    return Robustness(
        sampling=gain * v * max(x, math.sqrt(x)),
        trimming=gain * 3 * share * v * max(y, math.sqrt(y)),
        covering=gain * 2 * (1 + 3 * share) / (n * m),
        log_failure=min(0.0, math.log(4) - d * log_a),
    )


def pointwise_delta(*, n: int, m: int, beta: float, v: float, failure: float = 0.01) -> float:
    """Return a bound on the error at one w and z fixed in advance, which fails for a share `failure` of the data.

        (t + 3 beta s) / (1 - 2 beta),  t = v max(x, sqrt x),  x = 2 log(4 / failure) / ((1 - beta) n m),
                                        s = v max(y, sqrt y),  y = 2 log(4 (1 - beta) m / failure) / n

    Ours: the lemma behind Theorem 1 (Yin et al., Lemma 3) as it is, each of its two events allowed half of `failure`.
    It lacks the term d log A, the price that Delta pays for holding at all w and z at once.
    """
    _whole(n=n, m=m)
    _positive(v=v)
    share = _share(beta, m)
    if not 0 < failure < 1:
        raise ConfigError(f"failure = {failure!r} is impossible: it must be a probability above 0 and below 1")
    x = 2 * math.log(4 / failure) / ((1 - share) * n * m)
    y = 2 * math.log(4 * (1 - share) * m / failure) / n
    return v * (max(x, math.sqrt(x)) + 3 * share * max(y, math.sqrt(y))) / (1 - 2 * share)


def stated_delta(
    *, n: int, m: int, beta: float, v: float, d: int, diameter: float, lipschitz: float, epsilon: float
) -> float:
    """Return the leading term of Delta as Theorem 1 states it, without its O~(beta / n + 1 / (m n)).

    sqrt(log(1 + n m L^ D) + log(1 + 2 n m L^) + log(m) / d)
    * v sqrt(d) / epsilon * (3 beta / sqrt(n) + sqrt(2) / sqrt(n m))
    """
    delta(n=n, m=m, beta=beta, v=v, d=d, diameter=diameter, lipschitz=lipschitz, epsilon=epsilon)  # the checks
    logs = math.log1p(n * m * lipschitz * diameter) + math.log1p(2 * n * m * lipschitz) + math.log(m) / d
    return math.sqrt(logs) * v * math.sqrt(d) / epsilon * (3 * beta / math.sqrt(n) + math.sqrt(2 / (n * m)))


def smoothed_loss(loss: LossFunction, w: Vector, mu: float, *, seed: int = 0, samples: int = 10_000) -> float:
    """Estimate F_mu(w) = E F(w + mu u), u uniform in the unit **ball**, from `samples` points.

    The paper's Definition (Smoothed Version of F) draws u from the sphere. Then Lemma "smooth-f", grad F_mu(w) =
    E[(d / mu) F(w + mu z) z] with z on the sphere, would be wrong: by the divergence theorem it is the average over the
    ball whose gradient that is (Gao et al., Lemma 4.1).
    """
    _positive(mu=mu)
    _whole(samples=samples)
    points = _ball(len(w), seed, samples)
    return float(np.mean([loss(w + mu * u) for u in points]))


def ball_marginal(d: int, nodes: int = 200) -> tuple[Vector, Vector]:
    """Return nodes s_i and weights p_i with E h(<a, u>) = sum_i p_i h(||a|| s_i), u uniform in the unit ball of R^d.

    Along any line the ball has the density (1 - s^2)^((d - 1) / 2), so that a loss which sees w through inner products
    alone (ridge, logistic) can be smoothed exactly: Gauss-Legendre over the range that holds the mass.
    """
    _whole(d=d, nodes=nodes)
    reach = min(1.0, 12 / math.sqrt(d + 1))  # beyond it lies less than e^-70 of the mass
    s, p = np.polynomial.legendre.leggauss(nodes)
    s = reach * s
    p = p * np.exp((d - 1) / 2 * np.log1p(-s * s))
    return s, p / p.sum()


def smoothing_gap(d: int, smoothness: float, mu: float) -> float:
    """Return a bound on |F_mu(w) - F(w)|: L_F mu^2 / 2 * d / (d + 2), where E||u||^2 = d / (d + 2) in the ball.

    The paper quotes L mu^2 / 2 (Gao et al., Lemma 4.1 b), with F's constant L_F written L.
    """
    _whole(d=d)
    _positive(smoothness=smoothness)
    _not_negative(mu=mu)
    return smoothness * mu * mu / 2 * d / (d + 2)


def minimiser_shift(d: int, strong_convexity: float, smoothness: float, mu: float) -> float:
    """Return a bound on ||w*_mu - w*||, how far smoothing moves the minimiser: mu sqrt(L_F / lambda * d / (d + 2)).

    Ours. F <= F_mu by convexity, so F(w*_mu) <= F_mu(w*_mu) <= F_mu(w*) <= F(w*) + gap with `smoothing_gap`, and strong
    convexity turns the gap into a distance. Add it to Theorem 3's bound for the distance to w* itself.
    """
    _curvatures(strong_convexity, smoothness)
    return math.sqrt(2 * smoothing_gap(d, smoothness, mu) / strong_convexity)


def _ball(d: int, seed: int, samples: int) -> Vector:
    """Return points drawn uniformly from the unit ball: directions on the sphere, radii U^(1/d)."""
    from cyber0.directions import Stream, reference, words

    z = np.stack([reference(seed, 0, j, 0, d, "sphere", dimension=d) for j in range(samples)]).astype(np.float64)
    uniform = (words(seed, Stream.DATA, 0, 0, 0, samples).astype(np.float64) + 0.5) * 2.0**-32
    points: Vector = z * uniform[:, None] ** (1 / d)
    return points


def _share(beta: float, m: int) -> float:
    """Return floor(beta m) / m, the share that is trimmed at each end."""
    if not 0 <= beta < 0.5:
        raise ConfigError(f"beta = {beta!r} is impossible: trim a share of at least 0 and below 0.5 at each end")
    return share_of(beta, m) / m


def _root(x: float) -> float:
    return math.sqrt(max(0.0, x))


def _whole(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} = {value!r} is impossible: it must be a whole number of at least 1")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} = {value!r} is impossible: it must be a finite number above 0")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} = {value!r} is impossible: it must be a finite number of at least 0")


def _curvatures(strong_convexity: float, smoothness: float) -> None:
    _positive(strong_convexity=strong_convexity, smoothness=smoothness)
    if strong_convexity > smoothness:
        raise ConfigError(
            f"strong_convexity (lambda) = {strong_convexity!r} is above smoothness (L_F) = {smoothness!r}: the least "
            "curvature can't exceed the largest; swap them or raise smoothness"
        )
