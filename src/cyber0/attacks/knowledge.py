"""What the Byzantine clients know of a round, and what attacks have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cyber0.directions import Stream, words

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
Attack: TypeAlias = "Callable[[Knowledge], Matrix]"

# Indices of the attack stream; index 0 of round 0 says which clients are Byzantine.
COINS, NOISE, PLACES = 1, 2, 3

PAST = 50
"""How many decisions `Knowledge.past` goes back."""


@dataclass(frozen=True)
class Knowledge:
    """What the attack model lets Byzantine clients see: all that honest clients send in a round, and the rule in force.

    `generator` draws their coins and noise by the seed and the round.

    `rehearse(attack)` plays the last rounds again on a copy of what the rule remembers, with this attack, and returns
    how much the honest clients' mean loss would fall, to first order. It is there for attacks with the trait `plans`.
    """

    honest: Matrix  # (honest clients that were invited) x scalars
    own: Matrix  # what the Byzantine clients would send were they honest; no rows unless the attack needs it
    byzantine: int  # how many Byzantine clients were invited
    invited: int
    tolerated: int  # b = floor(beta * invited), how many Byzantine clients the rule is to withstand
    round: int
    seed: int = 0
    decide: Callable[[Matrix], Vector] | None = None  # the rule in force: honest rows, then Byzantine rows -> decision
    truth: Vector | None = None  # the honest scalars without the noise of batches, where the attack needs them
    past: Matrix | None = None  # the last decisions, oldest first; None where they are as long as the model
    rehearse: Callable[[Attack], float] | None = None  # see above; None: the rule has no history
    rehearsed: int = 0  # the round before which the rehearsal stands; 0: there is no round to play again yet
    step: Callable[[Vector], Vector] | None = None  # what the optimizer makes of a decision; None: takes it as it is

    @property
    def liars(self) -> int:
        """The former name of `byzantine`."""
        return self.byzantine

    def generator(self, index: int) -> np.random.Generator:
        """Return NumPy's generator, seeded by words of the attack stream in this round."""
        return np.random.default_rng(words(self.seed, Stream.ATTACKS, self.round, index, 0, 8).tolist())


def from_honest(craft: Callable[[Matrix, Knowledge], NDArray[np.float64]]) -> Attack:
    """Make an attack from a function of the finite honest rows that returns one row for each client, or one for all.

    Byzantine clients who see no honest row have nothing to hide behind, and send zeros.
    """

    def attack(known: Knowledge) -> Matrix:
        honest = np.asarray(known.honest, dtype=np.float64)
        honest = honest[np.isfinite(honest).all(axis=1)]
        shape = (known.byzantine, honest.shape[1])
        if len(honest) == 0 or known.byzantine == 0:
            return np.zeros(shape)
        with np.errstate(over="ignore", invalid="ignore"):  # honest scalars near the end of the range
            return np.array(np.broadcast_to(craft(honest, known), shape))

    return attack


def against(direction: Vector) -> Vector:
    """Return +1 where the direction is >= 0 and -1 elsewhere: what the Byzantine clients work against."""
    return np.where(direction >= 0, 1.0, -1.0)


def victims(honest: Matrix, count: int) -> Matrix:
    """Return so many rows, those of the same honest clients in every round, evenly spaced."""
    rows: Matrix = honest[np.arange(count) * len(honest) // max(count, 1)]
    return rows


def mean_of(rows: Matrix) -> Vector:
    """Return each column's mean."""
    means: Vector = rows.mean(axis=0)
    return means


def deviation_of(rows: Matrix) -> Vector:
    """Return each column's standard deviation."""
    deviations: Vector = rows.std(axis=0)
    return deviations
