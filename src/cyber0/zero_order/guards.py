"""Guards around a step: what is refused because it would teach nothing, and what the user is told once."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.errors import ModelError
from cyber0.estimate.differences import evaluations
from cyber0.model.eval_mode import Untouched
from cyber0.model.vector import Parameters
from cyber0.zero_order.settings import LARGEST

STILL_STEPS = 10  # without a changed weight before the user is told
FLAT_DIRECTIONS = 8  # a loss that does not change along so many directions has no slope at this mu


def needs_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function can't be called without arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


class StepGuards:
    """Refuses losses and slopes that no step can be made of, and warns of steps that are too long or too short.

    Args:
        parameters: The weights that are stepped.
        untouched: Tells whether somebody else wrote to them, which is then the reason that is given.
        estimator: How slopes are measured.
        mu: Length of the probing step; 0 if there is none.
    """

    def __init__(self, parameters: Parameters, untouched: Untouched, estimator: str, mu: float) -> None:
        self._parameters, self._untouched, self._estimator, self._mu = parameters, untouched, estimator, mu
        self._warned_of_saturation = False
        self._moved, self._still = False, 0

    def check_finite(self, losses: NDArray[np.float64], slope: float, round: int, r: int) -> None:
        """Refuse losses and a slope along direction r that are not finite in float32."""
        where = f"in step {round}, direction {r}: the weights were left as they are"
        for value in losses[~np.isfinite(losses)].tolist():
            self._untouched.check_values(round)  # this may be why
            raise ModelError(f"the loss is {value} {where}; lower lr or mu, or inspect this batch")
        if not abs(slope) <= LARGEST:
            self._untouched.check_values(round)
            raise ModelError(
                f"the slope is {slope:g} {where}. A slope must be finite in float32: look for an operation whose "
                "derivative is not (a square root or norm at 0, say), scale the loss down"
                + ("" if self._mu == 0 else ", or raise mu")
            )

    def refuse_flat(
        self,
        losses: NDArray[np.float64],
        slopes: NDArray[np.float32],
        round: int,
        measure: Callable[[int], NDArray[np.float64]],
    ) -> None:
        """Refuse a step whose slopes are all 0: a loss that depends on the weights does not do that.

        With few directions equal losses may be chance (one step in 10,000 at k = 1 and slopes of 1, more for a loss of
        16 bits), so `measure` is asked for the losses along a few more directions first.
        """
        if slopes.any():
            return
        directions = len(slopes)
        if self._estimator in PROBING_ESTIMATORS:
            directions = max(directions, FLAT_DIRECTIONS)
        losses = np.concatenate([losses, *(measure(r) for r in range(len(slopes), directions))])
        if (losses != losses[0]).any():
            return
        self._untouched.check_values(round)  # this may be why
        count = evaluations(self._estimator, directions)
        raise ModelError(
            f"the loss is {losses[0]} at all {count} probes of step {round}, so it has no slope; the "
            "weights were left as they are. Likely causes: it does not use the model that ZeroOrder was given, but a "
            "copy or an earlier result; it is detached from it; it has steps, like an accuracy: raise mu or take more "
            f"samples; mu = {self._mu:g} is too small for its precision: raise mu or return it in float32; training "
            f"has diverged: start again with a smaller lr; or it has reached its minimum: stop here"
        )

    def watch_for_movement(self, lr: float) -> None:
        """Warn once if the first steps change no weight; once one has changed, stop checking."""
        if self._moved:
            return
        self._moved = self._untouched.moved()
        self._still += not self._moved
        if self._still == STILL_STEPS:
            self._moved = True
            types = ", ".join(sorted({entry.dtype for entry in self._parameters.layout}))
            warnings.warn(
                f"{STILL_STEPS} steps with lr = {lr:g} changed no weight: they are too small for {types}; "
                "raise lr (`diagnose` measures which values work)",
                RuntimeWarning,
                stacklevel=6,  # past _commit, _step, step and torch's wrapper of it
            )

    def warn_if_saturated(self, round: int, lr: float) -> None:
        """Warn once that the step of a round has clamped weights."""
        count = 0 if self._warned_of_saturation else self._parameters.saturated()
        if count:
            self._warned_of_saturation = True
            warnings.warn(
                f"step {round}: {count} of {self._parameters.dimension} weights were clamped at the largest "
                f"value that their type can hold: the steps are too long; lower lr = {lr:g} "
                "(`diagnose` measures which values work)",
                RuntimeWarning,
                stacklevel=5,  # past _step, step and torch's wrapper of it
            )
