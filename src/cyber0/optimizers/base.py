"""What every optimizer has in common."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from cyber0.config.registry import OPTIMIZERS
from cyber0.directions.definition import Elementwise
from cyber0.directions.steps import coefficients

VANISHED = 2.0**-60
"""Smaller powers of beta are 0: correcting by them changes nothing, and denormals depend on the processor's mode."""

Scalars = npt.NDArray[np.float64]
State = tuple[float, ...]
"""The optimizer's numbers after some round: a function of the records up to there."""


class Update(NamedTuple):
    """What a decided round does to w, and the state after it."""

    coefficients: npt.NDArray[np.float32]
    """w <- w - sum_j coefficients[j] z_j."""
    state: State
    elementwise: Elementwise | None = None
    """What is done to that sum at each coordinate, with the vectors, before w moves by it; None: nothing."""


class Optimizer:
    """Turns the decided scalars of consecutive rounds into steps. It is immutable: its state is handed in and out."""

    least_scalars: ClassVar[int] = 1
    """How many scalars a step must have at least: k, also where a round has E k."""
    vectors: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """The float32 vectors of d numbers that it needs beside w, each with the value that all its numbers start with."""
    carries: ClassVar[bool] = False
    """Whether w moves by an average of this round's step and earlier ones."""
    lr_elementwise: ClassVar[bool] = False
    """Whether lr is one of the elementwise constants instead of a factor of the coefficients."""
    lr_measurable: ClassVar[bool] = True
    """Whether lr = "auto" is possible: steps along the directions that are tried have the lengths of real ones."""
    scale_free: ClassVar[bool] = False
    """Whether scalars twice as large give the same step, so that lr is the length of a step."""

    def start(self) -> State:
        """Return the state before the first round."""
        return ()

    def possible(self, state: State, least: Mapping[str, float]) -> bool:
        """Return whether rounds can lead to a state, and to vectors whose smallest numbers are these."""
        return all(0.0 <= number <= 1.0 for number in state)

    def scaled(self, state: State, values: Scalars) -> tuple[Scalars, State]:
        """Return what stands for the decided scalars in the step, and the state after the round."""
        return values, state

    def taken(self, state: State, values: npt.ArrayLike) -> Scalars:
        """Return what would stand for these decided scalars in the next step."""
        with np.errstate(over="ignore", under="ignore"):
            return self.scaled(state, np.asarray(values, dtype=np.float64))[0]

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
        factor = 1.0 if self.lr_elementwise else lr
        return Update(coefficients(factor, scaled, k), after, self.elementwise(lr, after))

    def elementwise(self, lr: float, state: State) -> Elementwise | None:
        """Return what a round does at each coordinate with the vectors; `state` is that after the round."""
        return None

    def reach(self, lr: float, values: npt.ArrayLike, k: int, furthest: float) -> float:
        """Return a bound on how far a round with these scalars moves any weight, whatever the state before it.

        No coordinate of a direction is further from 0 than `furthest`: see DirectionSpace.reach.

        If the optimizer carries, it is one on what the round adds: no weight moves further than the largest of all.
        """
        scaled, _ = self.scaled(self.start(), np.asarray(values, dtype=np.float64))
        return furthest * abs(lr) * float(np.abs(scaled).sum()) / k


def next_power(power: float, beta: float) -> float:
    """Return the power of beta after one more round; 0 once it has vanished."""
    return found if (found := power * beta) >= VANISHED else 0.0


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


def state_digest(weights: str, state: Sequence[float], vectors: str = "") -> str:
    """Return a digest of weights and vectors, given by theirs, and of an optimizer's state.

    That of the weights if the optimizer has neither state nor vectors; the digest of no vectors is "".
    """
    if not state and not vectors:
        return weights
    numbers = struct.pack(f"<{len(state)}d", *state)
    return hashlib.sha256(bytes.fromhex(weights) + numbers + bytes.fromhex(vectors)).hexdigest()
