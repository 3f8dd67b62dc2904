"""The learning rate that is measured for `method.lr = "auto"`: a first guess at w0, then trial runs (trial_runs.py).

For the guess, steps of several rounds are tried at w0 with many lr (lr_scan.py), as decided: the rule and the attack
are those of the run, and so is the optimizer. On a quadratic loss the range of good lr is 0.29 to 1.71 times the lr
with which the loss of other samples falls most, so its middle is that lr, and is known better than the place of the
maximum.

**How much of it a run needs.** A first step meets large slopes. Later the slopes are small and noise stays, so the
longer a run is, the smaller is the rate with which it ends best. Let x be the length of the run, as a multiple of the
rounds that the loss would need to fall to 0 at the pace of the first step. By the experiments of
benchmarks/auto_rate.py, 1.2 x^(-1/3) of the measured rate, and all of it at most, is about the best. Each round counts
by the factor of its schedule, so a linear schedule halves the length of a run. Two cases differ:

- Clients whose batches are all their samples have no noise from batches: half of the measured rate, for any length.
- With an optimizer whose steps do not shrink with the slopes, the noise of the directions stays as well, and the length
  of the path is what matters: 0.8 x^(-0.6), divided by the mean factor of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cyber0.diagnose.closures import Closures, LossClosure, Optimizer
from cyber0.diagnose.lr_scan import promised_falls, scan_lr
from cyber0.diagnose.measure import first_look
from cyber0.diagnose.measurement import Subject
from cyber0.errors import ConfigError
from cyber0.federation.build import learning_rates

if TYPE_CHECKING:
    from cyber0.federation.simulation import Simulation

SCALARS, LEAST_TRIALS, MOST_TRIALS = 64, 8, 32
"""Rounds are tried until so many scalars are measured, within these limits."""
PART, POWER = 1.2, 1 / 3
SCALE_FREE_PART, SCALE_FREE_POWER = 0.8, 0.6
WITHOUT_NOISE = 0.5
"""Which part of the measured rate is used where batches do not differ from round to round."""
UNKNOWN_LENGTH = {False: 0.5, True: 0.25}
"""Which part is used where the number of steps is not known, with optimizers that are scale-free or not."""
LEAST_PART = 0.01
"""Which part is used at least: a loss that is about 0 at w0 by its units tells nothing of how far it will fall."""
DEFAULT_LENGTH = 1e-3
"""How long the first steps tried are along each direction, where there is no mu."""
DIGITS = 2  # of the rate: more would be noise


class BestStep(NamedTuple):
    """The step at w0 after which the loss is least."""

    lr: float
    fall: float
    """By how much it lowers the loss, by the slopes: half of what a straight line would."""
    loss: float
    """The loss at w0."""


def measured_lr(simulation: Simulation) -> float:
    """Return the learning rate for a run of a simulation that is at w0; what it tried is `simulation.lr_search`.

    Raises:
        ConfigError: no rate can be measured; the message says why, and what to do.
    """
    from cyber0.diagnose import trial_runs

    runs = trial_runs.TrialRuns(simulation, guessed_lr(simulation))
    found = trial_runs.search(runs.loss, runs.start)
    if not math.isfinite(found.losses[found.best]):
        raise _refused(
            f"all {len(found.losses)} trial runs of {runs.rounds} rounds diverge, the last with lr = "
            f"{rounded(runs.rate(found.best)):g}",
            "inspect the samples and the model",
        )
    simulation.lr_search = trial_runs.described(found, runs)
    return rounded(runs.rate(found.best))


def guessed_lr(simulation: Simulation) -> float:
    """Return the learning rate that steps at w0 suggest.

    Raises:
        ConfigError: no rate can be measured.
    """
    from cyber0.diagnose.federation import Clients

    config, method = simulation.config, simulation.config.method
    trials = trials_for(method.k)
    best = best_step(Clients(simulation, trials), trials)
    schedule = learning_rates(config, lr=1.0)
    factors = sum(map(schedule, range(config.rounds)))
    if simulation.client.updates.optimizer.scale_free:
        mean = factors / config.rounds if factors else 1.0
        part = SCALE_FREE_PART * part_for(best, method.local_epochs * config.rounds, SCALE_FREE_POWER) / mean
    elif (simulation.samples.sizes > simulation.samples.measured).any():
        part = min(1.0, PART * part_for(best, method.local_epochs * factors, POWER))
    else:
        part = WITHOUT_NOISE
    return rounded(part * best.lr / method.local_epochs)


def measured_lr_of(optimizer: Optimizer, losses: Sequence[LossClosure]) -> float:
    """Return the learning rate for a `ZeroOrder`, measured on these losses; how many steps it will take is not known.

    Raises:
        ConfigError: no rate can be measured.
    """
    trials = trials_for(optimizer.ledger.header.k)
    part = UNKNOWN_LENGTH[optimizer.updates.optimizer.scale_free]
    return rounded(part * best_step(Closures(optimizer, losses), trials).lr)


def trials_for(k: int) -> int:
    """Return how many rounds are tried."""
    return min(MOST_TRIALS, max(LEAST_TRIALS, math.ceil(SCALARS / k)))


def part_for(best: BestStep, rounds: float, power: float) -> float:
    """Return which part of the best first step's lr suits a run of so many rounds."""
    needed = abs(best.loss) / best.fall if best.fall else math.inf
    return 1.0 if rounds <= needed else max(LEAST_PART, float((needed / rounds) ** power))


def best_step(subject: Subject, trials: int) -> BestStep:
    """Try steps at the subject's w.

    Raises:
        ConfigError: the loss is not finite or flat, or no step lowers it.
    """
    look = first_look(subject, 0, trials)
    measurement = look.measurement
    if not math.isfinite(measurement.loss):
        raise _refused(f"the loss at the starting weights is {measurement.loss}", "inspect the samples and the model")
    if not math.isfinite(measurement.slope):
        raise _refused("the slopes measured at the starting weights are not finite", "lower mu")
    if measurement.slope == 0:
        raise _refused(
            f"the loss is flat: all slopes of {trials} rounds at the starting weights are 0",
            "raise mu, and check that the loss depends on the trained weights",
        )
    steps = [subject.scaled(values) for values in look.values]
    size = math.sqrt(float(np.mean([np.mean(step**2) for step in steps])))
    measurement.lr = (subject.mu or DEFAULT_LENGTH) * math.sqrt(len(steps[0])) / size
    per_lr = promised_falls(subject, look.rows, steps)
    scan_lr(measurement, look.counted, steps, per_lr)
    if measurement.lr_low is None or measurement.lr_high is None:
        raise _refused(
            f"no step of {trials} rounds at the starting weights lowers the loss of other samples",
            "raise the batch size or k, and look at what `cyber0 diagnose` (in Python, `diagnose`) says of mu",
        )
    lr = (measurement.lr_low + measurement.lr_high) / 2
    # The mean over the trials: their median falls, which the scan knows, are far below it when k is small.
    return BestStep(lr, lr * abs(float(np.mean(per_lr))) / 2, measurement.loss)


def _refused(reason: str, remedy: str) -> ConfigError:
    return ConfigError(f'lr = "auto" finds no learning rate: {reason}; {remedy}, or set lr to a number')


def rounded(lr: float) -> float:
    """Return a rate with as many digits as are known of it."""
    return float(f"{lr:.{DIGITS - 1}e}")
