"""What attackers that look ahead try: the last rounds once more, on a copy of what the rule remembers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cyber0 import attacks
from cyber0.protocol.decider import Decider, Rehearsal, Stage

AsSent = Callable[[attacks.Matrix], NDArray[np.float32]]


def rehearse(
    rehearsal: Rehearsal, attack: attacks.Attack, byzantine: NDArray[np.bool_], seed: int, sent: AsSent
) -> float:
    """Return how much the honest clients' mean loss falls, to first order, in the last rounds under an attack.

    What the Byzantine clients measured themselves is not stored, so they are given rows of honest clients as their own.

    Args:
        rehearsal: What the rule remembers, and the rounds.
        attack: What the Byzantine clients send in them; its round 0 is the first of these rounds.
        byzantine: Which clients are Byzantine.
        seed: The run's.
        sent: Rounds scalars to what travels.
    """
    decider, fallen = rehearsal.decider.fork(), 0.0
    for number, stage in enumerate(rehearsal.stages):
        here = byzantine[stage.clients]
        honest = stage.rows[~here].astype(np.float64)
        if not len(honest):
            continue
        known = attacks.Knowledge(
            honest=honest, own=attacks.victims(honest, int(here.sum())), byzantine=int(here.sum()),
            invited=decider.invited_count(stage.round), tolerated=decider.tolerated(stage.round), round=number,
            seed=seed, decide=partial(_decision, decider, stage, here, sent), step=decider.step,
        )  # fmt: skip
        rows = _in_order(stage, here, sent(attack(known)))
        values, _ = decider.decide(stage.round, rows, stage.clients)
        if values is not None:
            moved = decider.remember(stage._replace(rows=rows), values)
            fallen += stage.lr * float(moved @ honest.mean(axis=0)) / len(moved)
    return fallen


def _in_order(stage: Stage, here: NDArray[np.bool_], forged: NDArray[np.float32]) -> NDArray[np.float32]:
    rows = stage.rows.copy()
    rows[here] = forged
    return rows


def _decision(
    decider: Decider, stage: Stage, here: NDArray[np.bool_], sent: AsSent, rows: attacks.Matrix
) -> attacks.Vector:
    """Return the decision on the honest rows followed by the Byzantine ones; NaN if the round would be abandoned."""
    values, _ = decider.decide(stage.round, _in_order(stage, here, sent(rows[len(rows) - here.sum() :])), stage.clients)
    return np.full(rows.shape[1], np.nan) if values is None else values.astype(np.float64)
