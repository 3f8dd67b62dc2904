"""Is the loss straight over a probing step? Slopes of some directions, measured with many mu.

Where mu is too small they drown in rounding, where it is too large the loss bends; in between they do not depend on mu,
and the error of a mu is how far its slopes are from there. Beside it stands the share of the loss's change that is odd
in the step, odd^2 / (odd^2 + even^2), which is what a straight line explains.

The true slopes are found by central differences, whatever the estimator. Those of one_sided also contain what is even
in the step, mu/2 z'Hz, and twice the rounding: so the range of good mu is narrower at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cyber0.diagnose.measurement import STEP_RANGE, CountedLosses, Measurement, Probing, Vector

SLOPES = 6  # directions along which mu is varied
MU_STEP = math.sqrt(10.0)
MU_SIDE = 4  # steps of mu each way: two decades
MU_MORE = 10  # how far a good range of mu is followed upward: five decades
MU_ABOVE = 20  # steps from the least mu that changes the loss to where float32 has no digits left: ten decades
GOOD_ERROR = 0.1  # of slopes, below which a mu is worth suggesting
STRAIGHT = 0.5  # linear share of the loss's change above which slopes can be taken for the true ones
CLEAR = 0.9  # the same, where they certainly are: far out the loss may grow on one side alone, which gives a half

_Slopes = dict[int, tuple[Vector, float]]  # by power of MU_STEP: slopes, and the linear share of the loss's change


def scan_mu(measurement: Measurement, counted: CountedLosses, mu: float) -> None:
    """Measure slopes over two decades of mu to each side; if none of them is good, search for where they are."""
    scan = _Scan(measurement, counted, mu)
    for power in range(-MU_SIDE, MU_SIDE + 1):
        scan.probe(power)
    top, most = MU_SIDE, MU_MORE
    if not _has_plateau(scan.relevant, CLEAR):
        first = max(scan.first_change(), scan.first_moving)
        top = most = first + MU_ABOVE
        for power in range(first, most + 1):
            scan.probe(power)
            if _has_plateau(scan.relevant, CLEAR):
                top = power
                break
    while top < most and top in scan.found and scan.errors()[top] <= GOOD_ERROR:  # the plateau may continue above
        top += 1
        scan.probe(top)
    errors = scan.errors()
    measurement.probing = [
        Probing(scan.step(power), errors[power], scan.found[power][1]) for power in sorted(scan.found)
    ]
    measurement.mu_low, measurement.mu_high = _good_mu(measurement.probing)


class _Scan:
    """Slopes of some directions, measured with mu times powers of MU_STEP."""

    def __init__(self, measurement: Measurement, counted: CountedLosses, mu: float) -> None:
        k = counted.subject.directions(0).k
        self._places = [
            (j % measurement.trials, j // measurement.trials % k) for j in range(min(SLOPES, k * measurement.trials))
        ]
        self._one_sided = counted.subject.estimator == "one_sided"
        z = counted.subject.directions
        # The estimator's loss at w is that of a probe at distance 0.
        at_w = [z(trial).probe(r, 0.0) if self._one_sided else None for trial, r in self._places]
        self._start = np.array([counted.loss(t, probe) for (t, _), probe in zip(self._places, at_w, strict=True)])
        self._counted, self._mu, self._repeat = counted, mu, measurement.repeat
        self._lowest, self._highest = (round(math.log(end / mu, MU_STEP)) for end in STEP_RANGE)
        moving = max(counted.subject.parameters.least_moving(), STEP_RANGE[0])
        self.first_moving = math.ceil(math.log(moving / mu, MU_STEP) - 1e-6)
        self.found: _Slopes = {}
        self._estimated: dict[int, Vector] = {}
        """The slopes that the subject's estimator gives, by power."""
        self._changed: dict[int, bool] = {}

    def step(self, power: int) -> float:
        return float(np.float32(self._mu * MU_STEP**power))

    def probe(self, power: int) -> None:
        """Measure with one mu, unless that is done or outside the range of float32."""
        if power in self.found or (power and not self._lowest <= power <= self._highest):
            return
        step, start, z = self.step(power), self._start, self._counted.subject.directions
        both = np.array([[self._counted.loss(t, z(t).probe(r, c)) for c in (step, -step)] for t, r in self._places])
        self._changed[power] = not float(np.max(np.abs(both - start[:, None]))) <= self._repeat  # also if not finite
        with np.errstate(over="ignore", invalid="ignore"):
            odd, even = (both[:, 0] - both[:, 1]) / 2, (both[:, 0] + both[:, 1]) / 2 - start
            changed = float(np.sum(odd**2 + even**2))
            straight = float(np.sum(odd**2)) / changed if changed and math.isfinite(changed) else 0.0
            self._estimated[power] = (both[:, 0] - start if self._one_sided else odd) / step
        self.found[power] = odd / step, straight

    def first_change(self) -> int:
        """Return the least power that changes the loss, by bisection.

        Slopes are right from one or two decades above that, if they are anywhere. A step whose loss is not finite
        counts as a change: it is too long.
        """
        low, high = self._lowest - 1, self._highest
        for power, changed in self._changed.items():
            low, high = (low, min(high, power)) if changed else (max(low, power), high)
        while high - low > 1:
            middle = (low + high) // 2
            self.probe(middle)
            low, high = (low, middle) if self._changed[middle] else (middle, high)
        return high

    @property
    def relevant(self) -> _Slopes:
        """The slopes measured with steps that move most weights.

        In 16 bits shorter ones move only weights near 0; such slopes may agree perfectly and are not the loss's.
        """
        return {power: found for power, found in self.found.items() if power >= self.first_moving}

    def errors(self) -> dict[int, float]:
        """Return the error of the estimator's slopes for every mu."""
        by_mu = sorted(self.relevant)
        truth = true_slopes([self.found[p][0] for p in by_mu], [self.found[p][1] for p in by_mu])
        return {power: _error(slopes, truth) for power, slopes in self._estimated.items()}


def _has_plateau(found: _Slopes, straight: float) -> bool:
    by_mu = [found[power] for power in sorted(found)]
    return any(
        min(s, t) >= straight and _distance(a, b) <= GOOD_ERROR for (a, s), (b, t) in pairwise(by_mu)
    )  # fmt: skip


def true_slopes(by_mu: Sequence[Vector], straight: Sequence[float]) -> Vector | None:
    """Return the slopes where they do not depend on mu, given slopes for ascending mu; None if there is no such range.

    Neighbouring mu are compared. Far out, where a loss grows in proportion to the step, they agree as well, but on
    something else: so most of the loss's change must be linear, if it is anywhere, and the first such range counts.
    """
    apart = [_distance(a, b) for a, b in pairwise(by_mu)]
    if not apart:
        return None
    usable = [i for i in range(len(apart)) if min(straight[i], straight[i + 1]) >= STRAIGHT] or range(len(apart))
    limit = max(GOOD_ERROR, 2 * min(apart[i] for i in usable))
    if limit > 1:
        return None
    first = next(i for i in usable if apart[i] <= limit)
    last = next((i for i in range(first, len(apart)) if apart[i] > limit or i not in usable), len(apart))
    best = min(range(first, last), key=lambda i: apart[i])
    return (by_mu[best] + by_mu[best + 1]) / 2


def _distance(a: Vector, b: Vector) -> float:
    """Return the distance between slopes, relative to the larger; infinite if both are 0."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    largest = max(float(np.sum(a**2)), float(np.sum(b**2)))
    return math.sqrt(float(np.sum((a - b) ** 2)) / largest) if largest > 0 else math.inf


def _error(slopes: Vector, truth: Vector | None) -> float:
    """Return the distance of slopes from the true ones, relative to those."""
    if truth is None or not np.isfinite(slopes).all():
        return math.inf
    return math.sqrt(float(np.sum((slopes - truth) ** 2) / np.sum(truth**2)))


def _good_mu(probing: Sequence[Probing]) -> tuple[float | None, float | None]:
    """Return the range of mu around the best in which slopes are good, or not much worse than the best."""
    best = min(range(len(probing)), key=lambda i: probing[i].error)
    limit = max(GOOD_ERROR, 2 * probing[best].error)
    if limit > 1:
        return None, None
    low = high = best
    while low > 0 and probing[low - 1].error <= limit:
        low -= 1
    while high + 1 < len(probing) and probing[high + 1].error <= limit:
        high += 1
    return probing[low].mu, probing[high].mu
