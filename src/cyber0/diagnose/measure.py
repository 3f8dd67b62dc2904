"""What can be learned about lr and mu at one point w by looking: nothing here changes a bit of w.

Three questions, each answered by losses on batches like those that the training draws:

1. Do clients' numbers agree beyond chance (signal.py)?
2. Is the loss straight over a probing step? The slopes of some directions are measured with many mu. Where mu is too
   small they drown in rounding, where it is too large the loss bends; in between they do not depend on mu, and the
   error of a mu is how far its slopes lie from there. Beside it stands the share of the loss's change that is odd in
   the step, odd^2 / (odd^2 + even^2), which is what a straight line explains.
3. How far should a step go? The steps of several rounds are tried with many lr, and each is judged on samples that it
   was not measured on. The range of lr is where the loss falls by at least half of the most that it can fall. On a
   quadratic loss that is 0.29 to 1.71 times the best lr, and from 2 times on the loss rises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cyber0.diagnose import signal
from cyber0.directions import Directions, Probe, Step
from cyber0.directions.steps import coefficients
from cyber0.model.vector import Parameters
from cyber0.theory import theorems as theory

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

FORMAT = 1  # of diagnostics.json
TRIALS = 8  # rounds that are tried
SLOPES = 6  # directions along which mu is varied
MU_STEP = math.sqrt(10.0)
MU_SIDE = 4  # steps of mu each way: two decades
MU_MORE = 10  # as far as a good range of mu is followed above: five decades
MU_RANGE = (2.0**-126, 2.0**127)  # what float32 has, and so where a good mu is searched when there is none nearby
MU_ABOVE = 20  # steps from the least mu that changes the loss to where float32 has no digits left: ten decades
GOOD_ERROR = 0.1  # of slopes, from which on a mu is worth suggesting
STRAIGHT = 0.5  # linear share of the loss's change, where slopes can be taken for the true ones
CLEAR = 0.9  # the same, where they surely are: far out the loss may grow on one side alone, which gives a half
LR_STEP = 4.0
LR_SIDE, LR_MORE = 2, 10  # steps of lr each way: 16 times, and about a million times where need be
LR_ABOVE = 17  # steps of lr from the least that changes the loss: ten decades
MOST_OF_PROMISE = 3.0  # times the fall that slopes promise for a short step: what is more is rounding


class Subject(Protocol):
    """What is measured: weights, directions, and the losses of clients (or of one client's batches)."""

    @property
    def parameters(self) -> Parameters: ...

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        ...

    @property
    def mu(self) -> float | None:
        """The probing step; None where slopes are had without one."""
        ...

    @property
    def clients(self) -> int | None:
        """Over how many a decision is taken; None: as many as `slopes` has rows."""
        ...

    def directions(self, trial: int) -> Directions:
        """Return the directions of a trial."""
        ...

    def slopes(self, trial: int) -> Matrix:
        """Return what the clients would report in a trial, one row each."""
        ...

    def decide(self, rows: Matrix, trial: int) -> Vector:
        """Return the numbers that the trial's step would be made of."""
        ...

    def losses(
        self, trial: int, probe: Probe | None = None, steps: Sequence[Step] = (), *, fresh: bool = False
    ) -> Vector:
        """Return every client's loss at (w after steps) + c z, on a trial's samples or on others."""
        ...


class Probing(NamedTuple):
    """What slopes are worth that were measured with this mu."""

    mu: float
    error: float
    """Root mean square distance from the slopes that do not depend on mu, relative to those."""
    straight: float
    """Share of the loss's change that a straight line explains."""


class Stepping(NamedTuple):
    """What a step with this learning rate does to the loss on samples that it was not measured on."""

    lr: float
    fall: float
    """Median over the trials; -inf where the loss is not finite."""


@dataclass
class Station:
    """All that was measured at one point."""

    round: int
    loss: float
    lr: float
    mu: float | None
    trials: int
    repeat: float = 0.0
    """How much the loss differs at most when it is measured twice at the same weights."""
    slope: float = 0.0
    """Root mean square of what would be decided."""
    signal: signal.Signal | None = None
    kept: float = 1.0
    """How much of what honest clients measure in the mean is in what would be decided: liars and rules take some."""
    directions_ratio: float = 0.0
    """Signal to noise of a step across its directions: length of the gradient's part to that of the rest."""
    probing: list[Probing] = field(default_factory=list)
    mu_low: float | None = None
    mu_high: float | None = None
    stepping: list[Stepping] = field(default_factory=list)
    lr_low: float | None = None
    lr_best: float | None = None
    lr_high: float | None = None
    lr_rise: float | None = None
    """From where on a step raises the loss."""
    promised: float = 0.0
    """How much the linear model lets the loss fall in one step with lr, on the step's own samples."""
    real: float = 0.0
    """How much it does fall there."""
    evaluations: int = 0


def measure(subject: Subject, round: int, trials: int = TRIALS) -> Station:
    """Measure at the subject's w; `round` is only noted. A loss that is not finite ends it: the loss says so."""
    counted = _Counted(subject)
    losses = [counted.loss(t) for t in range(trials)]
    station = Station(round, float(np.mean(losses)), subject.lr, subject.mu, trials, evaluations=counted.calls)
    if not math.isfinite(station.loss):
        return station
    station.repeat = max(abs(counted.loss(t) - loss) for t, loss in enumerate(losses))
    rows = [subject.slopes(t) for t in range(trials)]
    station.signal = signal.of_reports(rows, subject.clients)
    values = [subject.decide(r, t) for t, r in enumerate(rows)]
    station.slope = math.sqrt(float(np.mean([np.mean(v**2) for v in values])))
    station.kept = _kept(rows, values)
    k, d = subject.directions(0).k, subject.parameters.dimension
    station.directions_ratio = math.sqrt(1 / (theory.tau(d, k) - 1)) if d > 1 else math.inf
    station.evaluations += 2 * k * trials
    if subject.mu is not None:
        _vary_mu(station, counted, subject.mu)
    if station.slope and math.isfinite(station.slope):
        per_lr = _compare_with_promise(station, counted, rows, values, losses)
        _vary_lr(station, counted, values, per_lr)
    station.evaluations += counted.calls
    return station


def _kept(rows: Sequence[Matrix], values: Sequence[Vector]) -> float:
    means = [r.mean(axis=0) for r in rows]
    honest = sum(float(np.sum(m**2)) for m in means)
    return sum(float(m @ v) for m, v in zip(means, values, strict=True)) / honest if honest else 1.0


class _Counted:
    """A subject's losses as means over its clients, counted."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.calls = subject, 0

    def loss(self, trial: int, probe: Probe | None = None, steps: Sequence[Step] = (), *, fresh: bool = False) -> float:
        self.calls += 1
        return float(np.mean(self.subject.losses(trial, probe, steps, fresh=fresh)))

    def step(self, trial: int, values: Vector, lr: float) -> list[Step]:
        z = self.subject.directions(trial)
        return [Step(z.seed, z.round, coefficients(lr, values, z.k), first=z.first)]


# The probing step.

_Slopes = dict[int, tuple[Vector, float]]  # by power of MU_STEP: slopes, and the linear share of the loss's change


def _vary_mu(station: Station, counted: _Counted, mu: float) -> None:
    """Measure slopes over two decades of mu to each side; where none of them is any good, find where they are."""
    scan = _Scan(station, counted, mu)
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
    while top < most and top in scan.found and scan.errors()[top] <= GOOD_ERROR:  # the plateau may go on above
        top += 1
        scan.probe(top)
    errors = scan.errors()
    station.probing = [Probing(scan.step(power), errors[power], scan.found[power][1]) for power in sorted(scan.found)]
    station.mu_low, station.mu_high = _good_mu(station.probing)


class _Scan:
    """Slopes of some directions, measured with mu times powers of MU_STEP."""

    def __init__(self, station: Station, counted: _Counted, mu: float) -> None:
        k = counted.subject.directions(0).k
        self._places = [(j % station.trials, j // station.trials % k) for j in range(min(SLOPES, k * station.trials))]
        self._start = np.array([counted.loss(trial) for trial, _ in self._places])
        self._counted, self._mu, self._repeat = counted, mu, station.repeat
        self._lowest, self._highest = (round(math.log(end / mu, MU_STEP)) for end in MU_RANGE)
        moving = max(counted.subject.parameters.least_moving(), MU_RANGE[0])
        self.first_moving = math.ceil(math.log(moving / mu, MU_STEP) - 1e-6)
        self.found: _Slopes = {}
        self._changed: dict[int, bool] = {}

    def step(self, power: int) -> float:
        return float(np.float32(self._mu * MU_STEP**power))

    def probe(self, power: int) -> None:
        """Measure with a mu, unless that is done or float32 has no such mu."""
        if power in self.found or (power and not self._lowest <= power <= self._highest):
            return
        step, start, z = self.step(power), self._start, self._counted.subject.directions
        both = np.array([[self._counted.loss(t, z(t).probe(r, c)) for c in (step, -step)] for t, r in self._places])
        self._changed[power] = not float(np.max(np.abs(both - start[:, None]))) <= self._repeat  # also if not finite
        with np.errstate(over="ignore", invalid="ignore"):
            odd, even = (both[:, 0] - both[:, 1]) / 2, (both[:, 0] + both[:, 1]) / 2 - start
            changed = float(np.sum(odd**2 + even**2))
            straight = float(np.sum(odd**2)) / changed if changed and math.isfinite(changed) else 0.0
        self.found[power] = odd / step, straight

    def first_change(self) -> int:
        """Return the least power that was found to change the loss, halving the range in which it must lie.

        Slopes are right from one or two decades above that on, if they are anywhere. A step of which the loss is no
        number counts as a change: it is too long.
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
        """What was found with steps that move most weights.

        In 16 bits shorter ones move only those near 0, whose slopes may look as right as can be and are not the loss's.
        """
        return {power: found for power, found in self.found.items() if power >= self.first_moving}

    def errors(self) -> dict[int, float]:
        """Return how far the slopes of every mu are from the true ones."""
        by_mu = sorted(self.relevant)
        truth = true_slopes([self.found[p][0] for p in by_mu], [self.found[p][1] for p in by_mu])
        return {power: _error(slopes, truth) for power, (slopes, _) in self.found.items()}


def _has_plateau(found: _Slopes, straight: float) -> bool:
    by_mu = [found[power] for power in sorted(found)]
    return any(
        min(s, t) >= straight and _distance(a, b) <= GOOD_ERROR for (a, s), (b, t) in pairwise(by_mu)
    )  # fmt: skip


def true_slopes(by_mu: Sequence[Vector], straight: Sequence[float]) -> Vector | None:
    """Return the slopes where they do not depend on mu, given slopes for ascending mu; None if there is no such place.

    Neighbouring mu are compared. Where a loss grows in proportion to the step, far out, they agree as well, but on
    something else: so most of the loss's change must be linear, if it is anywhere, and the first such place counts.
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
    """Return how far slopes are apart, relative to the larger; those that are 0 are nothing to agree on."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    largest = max(float(np.sum(a**2)), float(np.sum(b**2)))
    return math.sqrt(float(np.sum((a - b) ** 2)) / largest) if largest > 0 else math.inf


def _error(slopes: Vector, truth: Vector | None) -> float:
    """Return how far slopes are from the true ones, relative to those."""
    if truth is None or not np.isfinite(slopes).all():
        return math.inf
    return math.sqrt(float(np.sum((slopes - truth) ** 2) / np.sum(truth**2)))


def _good_mu(probing: Sequence[Probing]) -> tuple[float | None, float | None]:
    """Return the range of mu around the best whose slopes are good, or not much worse than the best."""
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


# The step.


def _compare_with_promise(
    station: Station, counted: _Counted, rows: Sequence[Matrix], values: Sequence[Vector], losses: Sequence[float]
) -> float:
    """Compare the fall of the loss in a step with what the slopes promise, on the samples that gave the slopes.

    The step is lr / k sum_r ghat_r z_r, and the loss has the slope mean_i g_i,r along z_r (on the sphere a d-th of it).
    Return how much the loss changes per lr in a short step, as the slopes have it.
    """
    subject = counted.subject
    factor = subject.parameters.factor
    per_lr = [float(np.mean(v * row.mean(axis=0))) / factor for row, v in zip(rows, values, strict=True)]
    real = [losses[t] - counted.loss(t, steps=counted.step(t, v, station.lr)) for t, v in enumerate(values)]
    station.promised, station.real = station.lr * float(np.median(per_lr)), _median(real)
    return float(np.median(np.abs(per_lr)))


def _vary_lr(station: Station, counted: _Counted, values: Sequence[Vector], per_lr: float) -> None:
    """Try steps with lr to 16 times lr each way, and on until the loss rises above and falls by little below.

    Where all of that is rounding, or the loss only rises, the lr from which on steps change the loss is searched, and
    ten decades from there on are tried.
    """
    trial = _Trials(station, counted, values, per_lr)
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
    station.stepping = [Stepping(trial.lr(power), falls[power]) for power in sorted(falls)]
    if trial.descends():
        _read_range(station)


class _Trials:
    """Falls of the loss in the trials' steps, with lr times powers of LR_STEP."""

    def __init__(self, station: Station, counted: _Counted, values: Sequence[Vector], per_lr: float) -> None:
        self._counted, self._values, self._per_lr, self._repeat = counted, values, per_lr, station.repeat
        self._start = [counted.loss(t, fresh=True) for t in range(station.trials)]
        unit = math.sqrt(len(values[0])) / station.slope  # with this lr a step is about as long as one direction
        moving = max(counted.subject.parameters.least_moving(), MU_RANGE[0]) * unit
        self._lr = station.lr or moving  # a scheduler may have ended at 0
        here = math.log(self._lr, LR_STEP)
        self._lowest, self._highest = (round(math.log(end * unit, LR_STEP) - here) for end in MU_RANGE)
        self.first_moving = math.ceil(math.log(moving, LR_STEP) - here - 1e-6)
        self.falls: dict[float, float] = {}
        self.changed: dict[float, bool] = {}

    def lr(self, power: float) -> float:
        half = LR_STEP ** (power / 2)  # the whole factor may be more than a float has
        return min(float(self._lr * half * half), sys.float_info.max)

    def attempt(self, power: float) -> None:
        """Take the steps with an lr, unless that is done."""
        if power in self.falls:
            return
        falls = [
            self._start[t] - self._counted.loss(t, steps=self._counted.step(t, v, self.lr(power)), fresh=True)
            for t, v in enumerate(self._values)
        ]
        self.falls[power] = _median(falls)
        self.changed[power] = not all(abs(fall) <= self._repeat for fall in falls)  # also if not finite

    def descends(self) -> bool:
        """Tell whether there is a range of lr where the loss falls as slopes have it, which rounding does not do."""
        right = {p for p, fall in self.falls.items() if 0 < fall <= MOST_OF_PROMISE * self._per_lr * self.lr(p)}
        return any(power + 1 in right for power in right)

    def may_fall_further(self) -> bool:
        """Tell whether the longest steps do best, or nearly the longest, and longer ones are possible."""
        *_, last, top = sorted(self.falls)
        return top < self._highest and max(self.falls[last], self.falls[top]) == max(self.falls.values())

    def first_change(self) -> int:
        """Return the least power that was found to change the loss, halving the range in which it must lie."""
        changed = [int(power) for power, did in self.changed.items() if did]
        low, high = self._lowest - 1, min([self._highest, *changed])
        while high - low > 1:
            middle = (low + high) // 2
            self.attempt(middle)
            low, high = (low, middle) if self.changed[middle] else (middle, high)
        return high

    def refine(self) -> None:
        """Halve the steps of lr about where the loss falls most."""
        best = max(self.falls.values())
        if best <= 0:
            return
        near = [p for p, fall in self.falls.items() if fall >= best / 2]
        for power in np.arange(min(near) - 1, max(near) + 1):
            if power in self.falls and power + 1 in self.falls:
                self.attempt(float(power) + 0.5)


def _read_range(station: Station) -> None:
    points = station.stepping
    best = max(range(len(points)), key=lambda i: points[i].fall)
    most = points[best].fall
    if not most > 0:
        return
    station.lr_best = points[best].lr
    low = next((i for i in range(best, -1, -1) if points[i].fall < most / 2), None)
    high = next((i for i in range(best, len(points)) if points[i].fall < most / 2), None)
    rise = next((i for i in range(best, len(points)) if points[i].fall <= 0), None)
    station.lr_low = points[0].lr if low is None else _crossing(points[low], points[low + 1], most / 2)
    station.lr_high = points[-1].lr if high is None else _crossing(points[high], points[high - 1], most / 2)
    station.lr_rise = None if rise is None else _crossing(points[rise], points[rise - 1], 0.0)


def _crossing(below: Stepping, above: Stepping, level: float) -> float:
    """Return the lr between two at which the fall passes a level, straight over log lr."""
    if not math.isfinite(below.fall):
        return math.sqrt(below.lr * above.lr)
    share = (above.fall - level) / (above.fall - below.fall)
    return float(above.lr * (below.lr / above.lr) ** share)


def _median(falls: Sequence[float]) -> float:
    return float(np.median([fall if math.isfinite(fall) else -math.inf for fall in falls]))


def plain(value: Any) -> Any:
    """Return a station, or a part of it, as what JSON has; a number that is not finite becomes None."""
    if isinstance(value, Station):
        return {name: plain(part) for name, part in vars(value).items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
