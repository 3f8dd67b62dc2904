"""Optimizers with float32 vectors beside w, one number a weight: 4 bytes a weight each.

What they do at each coordinate is in directions/moments.py, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from cyber0.config.registry import optimizer
from cyber0.directions.definition import Elementwise
from cyber0.directions.moments import RULES
from cyber0.directions.steps import coefficients
from cyber0.errors import ConfigError
from cyber0.optimizers.base import Optimizer, State


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


@optimizer
def momentum(*, beta: float = 0.9) -> Optimizer:
    """Step by a running mean of the steps that sgd would take; 4 bytes a weight."""
    return _Momentum(_fraction("beta", beta))


def _fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} = {value!r} must be at least 0 and below 1")
    return float(value)
