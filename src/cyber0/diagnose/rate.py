"""The learning rate that is measured for `method.lr = "auto"`.

Steps of several rounds are tried at w0 with many lr (lr_scan.py), as decided: the rule and the attack are those of the
run. On a quadratic loss the range of good lr is 0.29 to 1.71 times the lr with which the loss of other samples falls
most, so its middle is that lr, and is known better than the place of the maximum.

**How much of it to use.** A first step meets large slopes. Later the slopes are small and the noise of the batches
stays, so a run of many rounds needs a smaller rate: the lr at which a constant rate is best for T rounds falls about as
(rounds that the loss would need at the first step's pace / T)^(1/3) in our experiments (benchmarks/auto_rate.py). T
counts each round by its schedule, so a linear one counts half. Clients whose batches are all their samples have no
noise of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cyber0.diagnose.closures import Closures, LossClosure, Optimizer
from cyber0.diagnose.lr_scan import compare_with_promise, scan_lr
from cyber0.diagnose.measure import first_look
from cyber0.diagnose.measurement import Subject
from cyber0.errors import ConfigError
from cyber0.federation.build import learning_rates

if TYPE_CHECKING:
    from cyber0.federation.simulation import Simulation

SCALARS, LEAST_TRIALS, MOST_TRIALS = 64, 8, 32
"""Rounds are tried until so many scalars are measured, within these limits."""
HORIZON = 1 / 3
"""The power with which the rate falls with the length of the run."""
WITHOUT_NOISE = 0.5
"""Which part of the measured rate is used where batches do not differ from round to round, or T is not known."""
DEFAULT_LENGTH = 1e-3
"""How long the first steps tried are along each direction, where there is no mu."""
DIGITS = 2  # of the rate: more would be noise


class BestStep(NamedTuple):
    """The step at w0 after which the loss is least."""

    lr: float
    fall: float
    """By how much it lowers the loss of samples that it was not measured on."""
    loss: float
    """The loss at w0."""


def measured_lr(simulation: Simulation) -> float:
    """Return the learning rate for a run of a simulation that is at w0.

    Raises:
        ConfigError: no rate can be measured; the message says why, and what to do.
    """
    from cyber0.diagnose.federation import Clients

    config, method = simulation.config, simulation.config.method
    trials = trials_for(method.k)
    best = best_step(Clients(simulation, trials), trials)
    part = WITHOUT_NOISE
    if (simulation.samples.sizes > method.batch_size).any():
        schedule = learning_rates(config, lr=1.0)
        rounds = method.local_epochs * sum(map(schedule, range(config.rounds)))
        part = part_for(best, rounds)
    return rounded(part * best.lr / method.local_epochs)


def measured_lr_of(optimizer: Optimizer, losses: Sequence[LossClosure]) -> float:
    """Return the learning rate for a `ZeroOrder`, measured on these losses; how many steps it will take is not known.

    Raises:
        ConfigError: no rate can be measured.
    """
    trials = trials_for(optimizer.ledger.header.k)
    return rounded(WITHOUT_NOISE * best_step(Closures(optimizer, losses), trials).lr)


def trials_for(k: int) -> int:
    """Return how many rounds are tried."""
    return min(MOST_TRIALS, max(LEAST_TRIALS, math.ceil(SCALARS / k)))


def part_for(best: BestStep, rounds: float) -> float:
    """Return which part of the best first step's lr suits a run of so many rounds, each counted by its schedule."""
    needed = abs(best.loss) / best.fall
    return 1.0 if rounds <= needed else (needed / rounds) ** HORIZON


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
    k = subject.directions(0).k
    measurement.lr = (subject.mu or DEFAULT_LENGTH) * math.sqrt(k) / measurement.slope
    per_lr = compare_with_promise(measurement, look.counted, look.rows, look.values, look.losses)
    scan_lr(measurement, look.counted, look.values, per_lr)
    if measurement.lr_low is None or measurement.lr_high is None:
        raise _refused(
            f"no step of {trials} rounds at the starting weights lowers the loss of other samples",
            "raise the batch size or k, and look at what `cyber0 diagnose` (in Python, `diagnose`) says of mu",
        )
    most = max(step.fall for step in measurement.stepping)
    return BestStep((measurement.lr_low + measurement.lr_high) / 2, most, measurement.loss)


def _refused(reason: str, remedy: str) -> ConfigError:
    return ConfigError(f'lr = "auto" finds no learning rate: {reason}; {remedy}, or set lr to a number')


def rounded(lr: float) -> float:
    """Return a rate with as many digits as are known of it."""
    return float(f"{lr:.{DIGITS - 1}e}")
