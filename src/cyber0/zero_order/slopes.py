"""What a step measures: the loss at the probes of its directions, and the slopes along them. w stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.directions import Probe, Step
from cyber0.estimate.differences import one_sided, two_point
from cyber0.estimate.forward import slope_at_w
from cyber0.estimate.loss_value import loss_tensor, loss_value
from cyber0.model.vector import Parameters
from cyber0.zero_order.batch_loss import BatchLoss, LossClosure


class Slopes:
    """Measures slopes of losses along directions that follow from a seed.

    Args:
        parameters: The weights that are perturbed.
        seed: Decides the directions.
        estimator: How a slope is measured.
        mu: Length of the probing step, in float32.
    """

    def __init__(self, parameters: Parameters, seed: int, estimator: str, mu: float) -> None:
        self._parameters, self._seed, self._estimator, self._mu = parameters, seed, estimator, mu

    def measure_ahead(self, loss: LossClosure, round: int, k: int) -> None:
        """Measure the loss of a batch at all probes of a round at once, for `at_w` and `along`."""
        if not isinstance(loss, BatchLoss) or self._estimator not in PROBING_ESTIMATORS:
            return
        both = self._estimator == "two_point"
        probes = [] if both else [Probe(self._seed, round, 0, 0.0)]
        probes += [Probe(self._seed, round, r, c) for r in range(k) for c in (self._mu, -self._mu)[: 1 + both]]
        with torch.no_grad():
            loss.measure_ahead(probes)

    def at_w(self, loss: LossClosure, round: int) -> float | None:
        """Return the loss at w, which the directions of a one_sided step share; None for the other estimators.

        It is that of a probe at distance 0, by the same operations as the others: a model computes a little differently
        without a probe (torch's fused attention, say), and that would be in all slopes, divided by mu.
        """
        return self.probe(loss, Probe(self._seed, round, 0, 0.0)) if self._estimator == "one_sided" else None

    def along(self, loss: LossClosure, round: int, r: int, at_w: float | None) -> tuple[NDArray[np.float64], float]:
        """Return the losses that are compared along direction r of a round, and the slope.

        `at_w` is what the method of that name returned for this loss.
        """
        factor = self._parameters.factor
        if at_w is not None:
            above = self.probe(loss, Probe(self._seed, round, r, self._mu))
            return np.array([at_w, above]), one_sided(above, at_w, self._mu, factor)
        if self._estimator == "two_point":
            ends = [self.probe(loss, Probe(self._seed, round, r, c)) for c in (self._mu, -self._mu)]
            return np.array(ends), two_point(ends[0], ends[1], self._mu, factor)
        with torch.no_grad():
            value, slope = slope_at_w(self._parameters, lambda: loss_tensor(loss()), Probe(self._seed, round, r, 0.0))
        return np.array([value.item()]), factor * slope.item()

    def probe(self, loss: LossClosure, probe: Probe | None = None, steps: Sequence[Step] = ()) -> float:
        """Return the loss at (w after steps) + c z."""
        if isinstance(loss, BatchLoss) and probe is not None and not steps:
            with torch.no_grad():
                return loss.at(probe)
        with torch.no_grad(), self._parameters.perturbed(probe, steps):
            return loss_value(loss())
