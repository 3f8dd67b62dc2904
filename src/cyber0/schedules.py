"""The learning rate of each round."""

from __future__ import annotations

import math
from collections.abc import Callable

from cyber0.choices import LR_SCHEDULES
from cyber0.errors import ConfigError


def learning_rate(lr: float, schedule: str, rounds: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the round, over a run of that many rounds.

    The federator records what it used, so a replay never calls this.
    """
    if schedule == "constant":
        return lambda t: lr
    if schedule == "linear":
        return lambda t: lr * max(0.0, 1.0 - t / rounds)
    if schedule == "cosine":
        return lambda t: lr * 0.5 * (1.0 + math.cos(math.pi * min(t / rounds, 1.0)))
    raise ConfigError(f"lr_schedule = {schedule!r} must be one of {', '.join(LR_SCHEDULES)}")
