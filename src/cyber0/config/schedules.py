"""The learning rate of each round.

A schedule is made by a factory and maps (round, rounds of the run) to the factor that method.lr is multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from cyber0.config.registry import SCHEDULES, schedule
from cyber0.errors import ConfigError

Schedule = Callable[[int, int], float]

AUTO = "auto"
"""What method.lr says where the learning rate is found, not given."""
FREE = "free"
"""In the header of a `ZeroOrder`: its user sets the learning rate of each step. No config can choose it."""


@schedule
def constant() -> Schedule:
    """Keep lr in every round."""
    return lambda t, rounds: 1.0


@schedule
def linear() -> Schedule:
    """Lower lr to 0 over the run, by the same step in each round."""
    return lambda t, rounds: max(0.0, 1.0 - t / max(rounds, 1))


@schedule
def cosine() -> Schedule:
    """Lower lr to 0 over the run, along half a cosine."""
    return lambda t, rounds: 0.5 * (1.0 + math.cos(math.pi * min(t / max(rounds, 1), 1.0)))


def learning_rate(
    lr: float, schedule: str, rounds: int, options: Mapping[str, Any] | None = None
) -> Callable[[int], float]:
    """Return the learning rate as a function of the round, over a run of that many rounds.

    The federator records what it used, so a replay never calls this. `schedule` is one of `SCHEDULES`, or the path of a
    factory, which is imported.
    """
    factor = SCHEDULES.make(schedule, options)
    if not callable(factor):
        raise ConfigError(
            f"{SCHEDULES.key} = {schedule!r} returns {type(factor).__name__}, and must return a function of the round "
            "and the number of rounds that gives the factor of method.lr"
        )

    def lr_at(t: int) -> float:
        found = factor(t, rounds)
        if not isinstance(found, Real) or not 0 <= float(found) < math.inf:
            raise ConfigError(
                f"{SCHEDULES.key} = {schedule!r} gives {found!r} in round {t} of {rounds}; it must give a finite "
                "factor of method.lr, at least 0"
            )
        return lr * float(found)

    return lr_at
