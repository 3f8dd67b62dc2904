"""Optimizers with float32 vectors beside w, one number a weight: 4 bytes a weight each.

What they do at each coordinate is in directions/moments.py, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy.typing as npt

from cyber0.config.registry import optimizer
from cyber0.directions.definition import Elementwise
from cyber0.directions.moments import RULES
from cyber0.directions.steps import coefficients
from cyber0.errors import ConfigError
from cyber0.optimizers.base import Optimizer, Scalars, State, next_power

LARGEST_BETA = 0.999999  # a longer running mean in float32 would lose what it takes in
LEAST_NU = 1e-6
LEAST_EPS = 1e-12  # far above where squares underflow in float32


def _elementwise(rule: str, *constants: float) -> Elementwise:
    """Return a rule with its constants, rounded to float32."""
    return Elementwise(rule, coefficients(1.0, constants, 1))


@dataclass(frozen=True)
class _Momentum(Optimizer):
    beta: float

    vectors = RULES["momentum"].starts
    carries = True

    def elementwise(self, lr: float, state: State) -> Elementwise:
        return _elementwise("momentum", self.beta, 1.0 - self.beta)


@dataclass(frozen=True)
class _Adam(Optimizer):
    beta1: float
    beta2: float
    eps: float

    vectors = RULES["adam"].starts
    lr_elementwise, lr_measurable = True, False

    def start(self) -> State:
        return (1.0, 1.0)

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        return values, (next_power(state[0], self.beta1), next_power(state[1], self.beta2))

    def possible(self, state: State, least: Mapping[str, float]) -> bool:
        return super().possible(state, least) and least.get("v", 0.0) >= 0.0

    def elementwise(self, lr: float, state: State) -> Elementwise:
        corrections = 1.0 / (1.0 - state[0]), 1.0 / (1.0 - state[1])
        means = self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2
        return _elementwise("adam", *means, *corrections, lr, self.eps)

    def reach(self, lr: float, values: npt.ArrayLike, k: int, furthest: float) -> float:
        # Let p and q be the weights of the two means, of sum 1 each. As beta1 <= beta2, no p / q is above
        # r = (1 - beta1) / (1 - beta2), so |mean of u|^2 <= sum p u^2 <= r sum q u^2.
        # The margin is for float32: its roundings, and squares that underflow.
        margin = 1.0 + 2.0**-10 + 2.0**-21 / (1.0 - self.beta2) + 2.0**-50 / self.eps
        return abs(lr) * math.sqrt((1.0 - self.beta1) / (1.0 - self.beta2)) * margin


@dataclass(frozen=True)
class _Hessian(Optimizer):
    nu: float
    floor: float

    vectors = RULES["hessian"].starts
    lr_elementwise = True

    def possible(self, state: State, least: Mapping[str, float]) -> bool:
        return least.get("h", 1.0) >= self.floor / 2  # a mean of numbers that are at least the floor, in float32

    def elementwise(self, lr: float, state: State) -> Elementwise:
        return _elementwise("hessian", 1.0 - self.nu, self.nu, self.floor, lr)

    def reach(self, lr: float, values: npt.ArrayLike, k: int, furthest: float) -> float:
        # h starts at 1, and a mean of numbers that are at least 1 or the floor is never below them, but for rounding.
        margin = 1.0 + 2.0**-10 + 2.0**-21 / self.nu
        return super().reach(lr, values, k, furthest) / math.sqrt(self.floor) * margin


@optimizer
def momentum(*, beta: float = 0.9) -> Optimizer:
    """Step by a running mean of the steps that sgd would take; 4 bytes a weight."""
    return _Momentum(_fraction("beta", beta))


@optimizer
def adam(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam on the estimated gradient, the mean of g_j z_j; 8 bytes a weight."""
    if beta1 > beta2:
        raise ConfigError(f"beta1 = {beta1!r} must be at most beta2 = {beta2!r}: otherwise steps have no limit")
    if not LEAST_EPS <= eps <= 1:
        raise ConfigError(f"eps = {eps!r} must be at least {LEAST_EPS:g} and at most 1")
    return _Adam(_fraction("beta1", beta1), _fraction("beta2", beta2), float(eps))


@optimizer
def hessian(*, nu: float = 0.01, floor: float = 0.01) -> Optimizer:
    """Divide directions by the root of a diagonal h, in probes too (HiSo); 4 bytes a weight.

    h starts at 1 and follows the squared update D, the mean of g_j z_j / sqrt(h), as HiSo has it: after each decided
    round h = (1 - nu) h + nu (D^2 + floor). What differs from HiSo: a client takes one step a round, slopes are those
    of the run's estimator, and D is formed of the decided scalars, which a robust rule made of the reports. HiZOO's
    estimate of the curvature, which needs a third loss for each direction, is not used.
    """
    if not LEAST_NU <= nu <= 1:
        raise ConfigError(f"nu = {nu!r} must be at least {LEAST_NU:g} and at most 1")
    if not LEAST_EPS <= floor <= 1:
        raise ConfigError(f"floor = {floor!r} must be at least {LEAST_EPS:g} and at most 1")
    return _Hessian(float(nu), float(floor))


def _fraction(name: str, value: float) -> float:
    if not 0 <= value <= LARGEST_BETA:
        raise ConfigError(f"{name} = {value!r} must be at least 0 and at most {LARGEST_BETA}")
    return float(value)
