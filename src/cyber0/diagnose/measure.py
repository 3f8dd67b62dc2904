"""What can be learned about lr and mu at one point w by probing: nothing here changes a bit of w.

Three questions, each answered by losses on batches like those of the training:

1. Do the clients' scalars agree beyond chance (signal.py)?
2. Is the loss straight over a probing step (mu_scan.py)?
3. How far should a step go (lr_scan.py)?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cyber0.diagnose import signal
from cyber0.diagnose.lr_scan import compare_with_promise, promised_falls, scan_lr
from cyber0.diagnose.measurement import TRIALS, CountedLosses, Matrix, Measurement, Subject, Vector
from cyber0.diagnose.mu_scan import scan_mu
from cyber0.estimate.differences import evaluations
from cyber0.theory import theorems as theory


class FirstLook(NamedTuple):
    """The losses and slopes of some trials; nothing but losses where one is not finite."""

    measurement: Measurement
    counted: CountedLosses
    losses: list[float]
    rows: list[Matrix]
    values: list[Vector]


def first_look(subject: Subject, round: int, trials: int) -> FirstLook:
    """Measure losses and slopes at the subject's w; `round` is only recorded."""
    counted = CountedLosses(subject)
    losses = [counted.loss(t) for t in range(trials)]
    measurement = Measurement(round, float(np.mean(losses)), subject.lr, subject.mu, trials, evaluations=counted.calls)
    if not math.isfinite(measurement.loss):
        return FirstLook(measurement, counted, losses, [], [])
    measurement.repeat = max(abs(counted.loss(t) - loss) for t, loss in enumerate(losses))
    rows = [subject.slopes(t) for t in range(trials)]
    values = [subject.decide(r, t) for t, r in enumerate(rows)]
    measurement.slope = math.sqrt(float(np.mean([np.mean(v**2) for v in values])))
    return FirstLook(measurement, counted, losses, rows, values)


def measure(subject: Subject, round: int, trials: int = TRIALS) -> Measurement:
    """Measure at the subject's w; `round` is only recorded. If the loss is not finite, nothing else is measured."""
    measurement, counted, losses, rows, values = first_look(subject, round, trials)
    if not math.isfinite(measurement.loss):
        return measurement
    measurement.signal = signal.of_reports(rows, subject.clients)
    measurement.kept = _kept(rows, values)
    k, d = subject.directions(0).k, subject.parameters.dimension
    measurement.directions_ratio = math.sqrt(1 / (theory.tau(d, k) - 1)) if d > 1 else math.inf
    if subject.mu is not None:
        scan_mu(measurement, counted, subject.mu)
    if measurement.slope and math.isfinite(measurement.slope):
        steps = [subject.scaled(v) for v in values]
        per_lr = promised_falls(subject, rows, steps)
        compare_with_promise(measurement, counted, per_lr, steps, losses)
        scan_lr(measurement, counted, steps, per_lr)
    measurement.evaluations = counted.calls + evaluations(subject.estimator, k) * trials
    return measurement


def _kept(rows: Sequence[Matrix], values: Sequence[Vector]) -> float:
    means = [r.mean(axis=0) for r in rows]
    honest = sum(float(np.sum(m**2)) for m in means)
    return sum(float(m @ v) for m, v in zip(means, values, strict=True)) / honest if honest else 1.0
