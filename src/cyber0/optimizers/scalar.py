"""Optimizers that scale the decided scalars of a round: they need no memory beside w.

Sums are exactly rounded (math.fsum), so that they don't depend on an order; all else is one float64 operation at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cyber0.config.registry import optimizer
from cyber0.errors import ConfigError
from cyber0.optimizers.base import Optimizer, Scalars, State, next_power

_RANK_SCALE = math.sqrt(3.0)  # the ranks of many scalars then have the mean square 1


@dataclass(frozen=True)
class _Adaptive(Optimizer):
    scale_free = True
    beta: float

    def start(self) -> State:
        return (0.0, 1.0)

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        moment, power = state
        moment = self.beta * moment + (1.0 - self.beta) * mean_square(values)
        power = next_power(power, self.beta)
        return _over(values, math.sqrt(moment / (1.0 - power))), (moment, power)

    def possible(self, state: State, least: Mapping[str, float]) -> bool:
        moment, power = state
        return moment >= 0.0 and 0.0 <= power <= 1.0

    def reach(self, lr: float, values: npt.ArrayLike, k: int, furthest: float) -> float:
        n = np.size(values)  # the running mean is at least 1 - beta times the mean square, and sum |g| <= n rms(g)
        return furthest * abs(lr) * n / k / math.sqrt(1.0 - self.beta) * (1.0 + 2.0**-20)


class _Normalized(Optimizer):
    least_scalars, scale_free = 2, True

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        n = len(values)
        deviation = math.sqrt(math.fsum(np.square(values - _mean(values))) / (n - 1))
        return _over(values, deviation), state


class _ZScore(Optimizer):
    least_scalars, scale_free = 2, True

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        centred = values - _mean(values)
        return _over(centred, math.sqrt(mean_square(centred))), state


class _Rank(Optimizer):
    least_scalars, scale_free = 2, True

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        ordered, n = np.sort(values), len(values)
        lower, higher = np.searchsorted(ordered, values, "left"), n - np.searchsorted(ordered, values, "right")
        return _RANK_SCALE * ((lower - higher) / float(n)), state


@optimizer
def sgd() -> Optimizer:
    """Step by the decided scalars themselves, as the paper does."""
    return Optimizer()


@optimizer
def adaptive(*, beta: float = 0.98) -> Optimizer:
    """Divide by the root of one running mean of the squared scalars (MEAZO): lr is the length of a step."""
    if not 0 <= beta < 1:
        raise ConfigError(f"beta = {beta!r} must be at least 0 and below 1")
    return _Adaptive(float(beta))


@optimizer
def normalized() -> Optimizer:
    """Divide by the standard deviation of the round's k scalars (FZOO); for k of at least 2."""
    return _Normalized()


@optimizer
def zscore() -> Optimizer:
    """Step by the z-scores of the round's k scalars: mean 0, variance 1; for k of at least 2."""
    return _ZScore()


@optimizer
def rank() -> Optimizer:
    """Step by the ranks of the round's k scalars, so that an outlier counts no more than the next; for k >= 2."""
    return _Rank()


def mean_square(values: Scalars) -> float:
    return math.fsum(np.square(values)) / len(values)


def _mean(values: Scalars) -> float:
    return math.fsum(values) / len(values)


def _over(values: Scalars, divisor: float) -> Scalars:
    """Return scalars divided by a number, and zeros where that is 0."""
    return values / divisor if divisor > 0 else np.zeros_like(values)
