"""Many small federations at once, for the theorems: Algorithm 1 on losses that see w through inner products.

S replicas run side by side. They have their own directions, indices j = s k .. s k + k - 1 of each round of the shared
stream, and the rule and the attack see all their scalars as the columns of one matrix. Otherwise this is what
`cyber0.Simulation` does, in float64 and without a ledger; tests/reproduce/test_reproduce.py compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate import Rule, mean, tolerated
from cyber0.attacks import Attack, Knowledge
from cyber0.directions import Stream, words
from cyber0.estimate.differences import two_point
from cyber0.tasks.convex import sigmoid

Array = NDArray[np.float64]

PRODUCT_OF_GAUSSIANS = 2.4
"""v of (a b - E a b) for jointly Gaussian a and b of deviation 1, whatever their correlation: their moment generating
function is ((1 - t (1 + rho)) (1 + t (1 - rho)))^(-1/2), and log of it - rho t <= v^2 t^2 / 2 for |t| < 1 / v."""


@dataclass(frozen=True)
class Losses:
    """Mean losses of m honest clients with n samples each, shared by all replicas or one set for each.

    Attributes:
        inputs: (replicas or 1) x m x n x d.
        targets: (replicas or 1) x m x n.
        penalty: Weight of ||w||^2 / 2.
        logistic: log(1 + exp(-y x.w)) instead of (x.w - y)^2 / 2.
    """

    inputs: Array
    targets: Array
    penalty: float
    logistic: bool = False

    def slopes(self, w: Array, z: Array, mu: float = 0.0) -> Array:
        """Return the m x S x k scalars that clients measure: slopes for mu = 0, else central differences.

        Args:
            w: S x d weights.
            z: S x k x d directions.
            mu: The probing step.
        """
        penalty = self.penalty * np.einsum("sd,skd->sk", w, z)
        fitted = self._products(w[:, None])[..., 0]  # S x m x n
        if mu == 0:
            force = self._derivative(fitted, self.targets) / self.inputs.shape[2]
            return np.asarray(np.einsum("smd,skd->msk", self._combinations(force), z) + penalty)
        along, centre, y = mu * self._products(z), fitted[..., None], self.targets[..., None]
        rise = two_point(self._loss(centre + along, y), self._loss(centre - along, y), mu)
        return np.asarray(rise.mean(axis=2).transpose(1, 0, 2) + penalty)

    def _products(self, vectors: Array) -> Array:
        """Return x.v as S x m x n x k for the S x k x d vectors."""
        shared, clients, samples, d = self.inputs.shape
        count, k, _ = vectors.shape
        if shared == 1:  # one large product is faster than many small ones
            products = self.inputs.reshape(-1, d) @ vectors.reshape(-1, d).T
            return products.reshape(clients, samples, count, k).transpose(2, 0, 1, 3)
        products = self.inputs.reshape(count, -1, d) @ vectors.transpose(0, 2, 1)
        return products.reshape(count, clients, samples, k)

    def _combinations(self, factors: Array) -> Array:
        """Return the sums of a client's samples, weighted by its S x m x n factors: S x m x d."""
        if len(self.inputs) == 1:
            return np.stack([factors[:, i] @ rows for i, rows in enumerate(self.inputs[0])], axis=1)
        return (factors[:, :, None] @ self.inputs)[:, :, 0]

    def _loss(self, fitted: Array, targets: Array) -> Array:
        if self.logistic:
            return np.logaddexp(0.0, -targets * fitted)
        return np.asarray((fitted - targets) ** 2 / 2)

    def _derivative(self, fitted: Array, targets: Array) -> Array:
        if self.logistic:
            return -targets * sigmoid(-targets * fitted)
        return fitted - targets


@dataclass(frozen=True)
class FederationSetup:
    """The settings of a simulated federation.

    Attributes:
        rounds: T.
        k: Directions a round.
        lr: eta.
        mu: The probing step; 0: projected gradients.
        rule: How the federator aggregates the scalars.
        byzantine: How many Byzantine clients there are in addition to the honest ones.
        attack: What they send.
        radius: W is the ball of this radius around 0; None: all of R^d.
        seed: Decides the directions.
    """

    rounds: int
    k: int
    lr: float
    mu: float = 0.0
    rule: Rule | None = None
    byzantine: int = 0
    attack: Attack | None = None
    radius: float | None = None
    seed: int = 0


def sphere(seed: int, round: int, replicas: int, k: int, d: int) -> Array:
    """Return the S x k x d directions of one round."""
    import torch

    from cyber0.directions import DirectionSpace, engine

    out = torch.empty(replicas * k, d)
    engine.fill(out, 0, seed, round, 0, DirectionSpace("sphere", d))
    return out.numpy().astype(np.float64).reshape(replicas, k, d)


def decide(rule: Rule, honest: Array, byzantine: int, attack: Attack | None, round: int = 0) -> Array:
    """Return the decision on honest scalars (m x anything) and on what Byzantine clients send who know these."""
    matrix = honest.reshape(len(honest), -1)
    if byzantine and attack is not None:
        invited = len(honest) + byzantine
        known = Knowledge(
            matrix, np.zeros((0, matrix.shape[1])), byzantine, invited, tolerated(rule.beta, invited), round
        )
        matrix = np.concatenate([matrix, attack(known)])
    return rule(matrix, len(matrix)).reshape(honest.shape[1:])


class RoundState(NamedTuple):
    """All replicas in one round: their weights, their directions, and the decided scalars."""

    w: Array
    z: Array
    decided: Array


def simulate(losses: Losses, w0: Array, setup: FederationSetup) -> Iterator[RoundState]:
    """Run Algorithm 1 from w0 (S x d): yield the state of each round, and at last the final weights."""
    w, rule = w0.astype(np.float64), setup.rule or mean()
    replicas, d = w.shape
    for t in range(setup.rounds):
        z = sphere(setup.seed, t, replicas, setup.k, d)
        decided = decide(rule, d * losses.slopes(w, z, setup.mu), setup.byzantine, setup.attack, t)
        yield RoundState(w, z, decided)
        w = w - setup.lr / setup.k * np.einsum("sk,skd->sd", decided, z)
        if setup.radius is not None:
            norms = np.linalg.norm(w, axis=1, keepdims=True)
            w = w * np.minimum(1.0, setup.radius / np.maximum(norms, 1e-300))
    yield RoundState(w, np.zeros((replicas, 0, d)), np.zeros((replicas, 0)))


def distances(states: Iterable[RoundState], point: Array) -> Array:
    """Return each replica's distance from the point before the first round and after each: (T + 1) x S."""
    return np.stack([np.linalg.norm(state.w - point, axis=1) for state in states])


def rounds_until(means: Array, level: float) -> float:
    """Return when a falling curve reaches the level, in rounds, interpolated by its logarithm; nan: never."""
    below = np.flatnonzero(means <= level)
    if len(below) == 0:
        return float("nan")
    last = int(below[0])
    if last == 0:
        return 0.0
    before, after = np.log(means[last - 1 : last + 1] / level)
    return float(last - 1 + before / (before - after))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return a in y ~ x^a, by least squares on the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def starts(seed: int, replicas: int, centre: Array, distance: float) -> Array:
    """Return one starting point for each replica, at that distance from the centre in a random direction."""
    drawn = generator(seed, 0).standard_normal((replicas, len(centre)))
    return np.asarray(centre + distance * drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def generator(seed: int, index: int) -> np.random.Generator:
    """Return NumPy's generator, seeded by words of the stream of data."""
    return np.random.default_rng(words(seed, Stream.DATA, 1, index, 0, 8).tolist())


@dataclass(frozen=True)
class GaussianRidge:
    """A population for ridge regression, x ~ N(0, diag(spectrum)), y = x.truth + noise, with known constants.

    F(w) = ((w - truth)' Sigma (w - truth) + noise^2) / 2 + (penalty / 2) ||w||^2
    """

    spectrum: Array
    truth: Array
    noise: float = 0.5
    penalty: float = 0.1
    radius: float = 2.0
    """Of W, a ball around 0 that contains the minimiser."""

    @property
    def d(self) -> int:
        return len(self.truth)

    @property
    def strong_convexity(self) -> float:
        return float(self.spectrum.min()) + self.penalty

    @property
    def smoothness(self) -> float:
        return float(self.spectrum.max()) + self.penalty

    @property
    def minimiser(self) -> Array:
        return self.spectrum * self.truth / (self.spectrum + self.penalty)

    @property
    def v(self) -> float:
        """The sub-exponential parameter of d <grad f(w), z>, for all w in W and z on the sphere.

        <grad f, z> less a constant is the product of x.z and x.(w - truth) - noise, both Gaussian.
        """
        farthest = self.radius + float(np.linalg.norm(self.truth))
        largest = float(self.spectrum.max())
        return PRODUCT_OF_GAUSSIANS * self.d * float(np.sqrt(largest * (largest * farthest**2 + self.noise**2)))

    @property
    def lipschitz(self) -> float:
        """L_w + L_z for samples within 6 deviations, all but one in 10^8 of them; only its logarithm matters."""
        length2 = 36 * float(self.spectrum.sum())
        farthest = self.radius + float(np.linalg.norm(self.truth))
        steepest = np.sqrt(length2) * (np.sqrt(length2) * farthest + 6 * self.noise) + self.penalty * self.radius
        return float(self.d * (length2 + self.penalty) + self.d * steepest)

    def gradient(self, w: Array) -> Array:
        """Return grad F at S x d weights."""
        return np.asarray(self.spectrum * (w - self.truth) + self.penalty * w)

    def draw(self, rng: np.random.Generator, replicas: int, clients: int, samples: int) -> Losses:
        """Return the losses of clients with fresh samples, different ones for each replica."""
        inputs = rng.standard_normal((replicas, clients, samples, self.d)) * np.sqrt(self.spectrum)
        targets = inputs @ self.truth + self.noise * rng.standard_normal((replicas, clients, samples))
        return Losses(inputs, targets, self.penalty)
