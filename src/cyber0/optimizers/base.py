"""What every optimizer has in common."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from cyber0.config.registry import OPTIMIZERS
from cyber0.directions.steps import coefficients

Scalars = npt.NDArray[np.float64]
State = tuple[float, ...]
"""The optimizer's numbers after some round: a function of the records up to there."""


class Update(NamedTuple):
    """What a decided round does to w, and the state after it."""

    coefficients: npt.NDArray[np.float32]
    """w <- w - sum_j coefficients[j] z_j."""
    state: State


class Optimizer:
    """Turns the decided scalars of consecutive rounds into steps. It is immutable: its state is handed in and out."""

    least_scalars: ClassVar[int] = 1
    """How many scalars a step must have at least: k, also where a round has E k."""
    scale_free: ClassVar[bool] = False
    """Whether scalars twice as large give the same step, so that lr is the length of a step."""

    def start(self) -> State:
        """Return the state before the first round."""
        return ()

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        """Return what stands for the decided scalars in the step, and the state after the round."""
        return values, state

    def step(self, state: State, lr: float, values: npt.ArrayLike, k: int) -> Update:
        """Return the update of a round with these decided scalars.

        A local step of a client is the same, with its own estimates and the state before the round; the state after it
        is dropped.
        """
        given = np.asarray(values, dtype=np.float64)
        if not np.isfinite(given).all():  # only a client's own estimates can be so: there is nothing to scale by
            return Update(coefficients(lr, given, k), state)
        with np.errstate(over="ignore", under="ignore"):
            scaled, after = self.scaled(state, given)
        return Update(coefficients(lr, scaled, k), after)

    def reach(self, lr: float, values: npt.ArrayLike, k: int) -> float:
        """Return a bound on sum_j |coefficients[j]| of a round with these scalars, whatever the state before it."""
        scaled, _ = self.scaled(self.start(), np.asarray(values, dtype=np.float64))
        return abs(lr) * float(np.abs(scaled).sum()) / k


def make(name: str, options: Mapping[str, Any] | None = None) -> Optimizer:
    """Return the optimizer of that name with these options; those left out have their defaults.

    Raises:
        ConfigError: there is no such optimizer, or it does not take these options.
    """
    made: Optimizer = OPTIMIZERS.make(name, options)
    return made


def full_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of an optimizer, those left out with their defaults: a header states every one.

    Raises:
        ConfigError: as `make`.
    """
    make(name, options)
    arguments = OPTIMIZERS.entry(name).arguments
    full = {option: argument.default for option, argument in arguments.items()} | dict(options)
    return {option: float(v) if isinstance(arguments[option].default, float) else v for option, v in full.items()}


def state_digest(weights: str, state: Sequence[float]) -> str:
    """Return a digest of weights, given by theirs, and of an optimizer's state; that of the weights if it has none."""
    if not state:
        return weights
    return hashlib.sha256(bytes.fromhex(weights) + struct.pack(f"<{len(state)}d", *state)).hexdigest()
