"""What Byzantine clients know in tests of attacks, and small federations under attack."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from synthetic import Blobs, config

from cyber0 import Simulation, aggregate
from cyber0.attacks import Knowledge


def knowledge(honest: NDArray[np.float64], byzantine: int, tolerated: int) -> Knowledge:
    own = np.zeros((0, honest.shape[1]))
    return Knowledge(honest, own, byzantine, invited=len(honest) + byzantine, tolerated=tolerated, round=0)


def made(honest: NDArray[np.float64], byzantine: int, round: int = 0, rule: Any = None) -> Knowledge:
    """What Byzantine clients know when b is their number, at most a minority, and the rule a trimmed mean."""
    invited = len(honest) + byzantine
    b = min(byzantine, (invited - 1) // 2)
    rule = rule or aggregate.trimmed_mean(b / invited)
    own = np.random.default_rng(1).normal(size=(byzantine, honest.shape[1]))
    return Knowledge(honest, own, byzantine, invited, b, round, seed=7, decide=rule)


def finished(*overrides: str) -> Simulation:
    simulation = Simulation(config("rounds=30", *overrides), task=Blobs())
    while simulation.round < simulation.config.rounds:
        simulation.run_round()
    return simulation
