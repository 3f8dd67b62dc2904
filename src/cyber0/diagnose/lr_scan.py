"""How far should a step go? The steps of several rounds, tried with many lr.

Each step is judged on samples that it was not measured on. The range of lr is where the loss falls by at least half of
the most that it can fall. On a quadratic loss that is 0.29 to 1.71 times the best lr, and from 2 times on the loss
rises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from cyber0.diagnose.measurement import STEP_RANGE, CountedLosses, Matrix, Measurement, Stepping, Subject, Vector

LR_STEP = 4.0
LR_SIDE, LR_MORE = 2, 10  # steps of lr each way: 16 times, and about a million times if necessary
LR_ABOVE = 17  # steps of lr from the least that changes the loss: ten decades
MOST_OF_PROMISE = 3.0  # times the fall that slopes predict for a short step: more than that is rounding


def promised_falls(subject: Subject, rows: Sequence[Matrix], values: Sequence[Vector]) -> Vector:
    """Return how much the loss falls per lr in a short step of each trial, by the slopes.

    `values` are what the optimizer makes of the decided scalars, x_r. The step is lr / k sum_r x_r z_r, and the loss
    has the slope mean_i g_i,r along z_r (on the sphere a d-th of it).
    """
    factor = subject.parameters.factor
    return np.array([float(np.mean(v * row.mean(axis=0))) / factor for row, v in zip(rows, values, strict=True)])


def compare_with_promise(
    measurement: Measurement,
    counted: CountedLosses,
    per_lr: Vector,
    values: Sequence[Vector],
    losses: Sequence[float],
) -> None:
    """Compare the fall of the loss in a step with what the slopes predict, on the samples that gave the slopes."""
    real = [losses[t] - counted.loss(t, steps=counted.step(t, v, measurement.lr)) for t, v in enumerate(values)]
    measurement.promised, measurement.real = measurement.lr * float(np.median(per_lr)), _median(real)


def scan_lr(measurement: Measurement, counted: CountedLosses, values: Sequence[Vector], per_lr: Vector) -> None:
    """Try steps from lr / 16 to 16 lr, and beyond until the loss rises above and falls by little below.

    If all of that is rounding, or the loss only rises, search the least lr that changes the loss and try the ten
    decades above it.
    """
    trial = _Trials(measurement, counted, values, float(np.median(np.abs(per_lr))))
    falls = trial.falls
    for power in range(-LR_SIDE, LR_SIDE + 1):
        trial.attempt(power)
    while (best := max(falls.values())) <= 0 or falls[min(falls)] >= best / 2:
        if min(falls) <= -LR_MORE or not trial.changed[min(falls)]:
            break
        trial.attempt(min(falls) - 1)
    while falls[max(falls)] > 0 and (max(falls) < LR_MORE or trial.may_fall_further()):
        trial.attempt(max(falls) + 1)
    if not trial.descends():
        first = max(trial.first_change(), trial.first_moving)
        for power in range(first, first + LR_ABOVE + 1):
            trial.attempt(power)
    trial.refine()
    measurement.stepping = [Stepping(trial.lr(power), falls[power]) for power in sorted(falls)]
    if trial.descends():
        _read_range(measurement)


class _Trials:
    """Falls of the loss in the trials' steps, with lr times powers of LR_STEP."""

    def __init__(
        self, measurement: Measurement, counted: CountedLosses, values: Sequence[Vector], per_lr: float
    ) -> None:
        self._counted, self._values, self._per_lr, self._repeat = counted, values, per_lr, measurement.repeat
        self._start = [counted.loss(t, fresh=True) for t in range(measurement.trials)]
        size = math.sqrt(float(np.mean([np.mean(v**2) for v in values])))
        unit = math.sqrt(len(values[0])) / size  # with this lr, a step is about as long as one direction
        moving = max(counted.subject.parameters.least_moving(), STEP_RANGE[0]) * unit
        self._lr = measurement.lr or moving  # a schedule may have ended at 0
        here = math.log(self._lr, LR_STEP)
        self._lowest, self._highest = (round(math.log(end * unit, LR_STEP) - here) for end in STEP_RANGE)
        self.first_moving = math.ceil(math.log(moving, LR_STEP) - here - 1e-6)
        self.falls: dict[float, float] = {}
        self.changed: dict[float, bool] = {}

    def lr(self, power: float) -> float:
        half = LR_STEP ** (power / 2)  # the whole factor may overflow
        return min(float(self._lr * half * half), sys.float_info.max)

    def attempt(self, power: float) -> None:
        """Try the steps with one lr, unless that is done."""
        if power in self.falls:
            return
        falls = [
            self._start[t] - self._counted.loss(t, steps=self._counted.step(t, v, self.lr(power)), fresh=True)
            for t, v in enumerate(self._values)
        ]
        self.falls[power] = _median(falls)
        self.changed[power] = not all(abs(fall) <= self._repeat for fall in falls)  # also if not finite

    def descends(self) -> bool:
        """Return whether there is a range of lr in which the loss falls as the slopes predict, unlike rounding."""
        right = {p for p, fall in self.falls.items() if 0 < fall <= MOST_OF_PROMISE * self._per_lr * self.lr(p)}
        return any(power + 1 in right for power in right)

    def may_fall_further(self) -> bool:
        """Return whether the longest or next longest steps do best, and longer ones are possible."""
        *_, last, top = sorted(self.falls)
        return top < self._highest and max(self.falls[last], self.falls[top]) == max(self.falls.values())

    def first_change(self) -> int:
        """Return the least power that changes the loss, by bisection."""
        changed = [int(power) for power, did in self.changed.items() if did]
        low, high = self._lowest - 1, min([self._highest, *changed])
        while high - low > 1:
            middle = (low + high) // 2
            self.attempt(middle)
            low, high = (low, middle) if self.changed[middle] else (middle, high)
        return high

    def refine(self) -> None:
        """Halve the spacing of lr around where the loss falls most."""
        best = max(self.falls.values())
        if best <= 0:
            return
        near = [p for p, fall in self.falls.items() if fall >= best / 2]
        for power in np.arange(min(near) - 1, max(near) + 1):
            if power in self.falls and power + 1 in self.falls:
                self.attempt(float(power) + 0.5)


def _read_range(measurement: Measurement) -> None:
    points = measurement.stepping
    best = max(range(len(points)), key=lambda i: points[i].fall)
    most = points[best].fall
    if not most > 0:
        return
    measurement.lr_best = points[best].lr
    low = next((i for i in range(best, -1, -1) if points[i].fall < most / 2), None)
    high = next((i for i in range(best, len(points)) if points[i].fall < most / 2), None)
    rise = next((i for i in range(best, len(points)) if points[i].fall <= 0), None)
    measurement.lr_low = points[0].lr if low is None else _crossing(points[low], points[low + 1], most / 2)
    measurement.lr_high = points[-1].lr if high is None else _crossing(points[high], points[high - 1], most / 2)
    measurement.lr_rise = None if rise is None else _crossing(points[rise], points[rise - 1], 0.0)


def _crossing(below: Stepping, above: Stepping, level: float) -> float:
    """Return the lr between two at which the fall crosses a level, interpolated linearly in log lr."""
    if not math.isfinite(below.fall):
        return math.sqrt(below.lr * above.lr)
    share = (above.fall - level) / (above.fall - below.fall)
    return float(above.lr * (below.lr / above.lr) ** share)


def _median(falls: Sequence[float]) -> float:
    return float(np.median([fall if math.isfinite(fall) else -math.inf for fall in falls]))
