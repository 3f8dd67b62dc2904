"""What Byzantine clients send.

An attack is a function made by a factory: `full_knowledge(reading)` returns one that maps what the liars know of a
round (`Knowledge`) to the numbers they send, one row a liar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import ConfigError
from cyber0.settings import closest

Matrix = NDArray[np.float64]
Attack = Callable[["Knowledge"], Matrix]
READINGS = ("accepted", "literal")


@dataclass(frozen=True)
class Knowledge:
    """What the attack model lets the liars see: all that honest clients send in this round, and the rule in force."""

    honest: Matrix  # (honest clients that were invited) x numbers
    own: Matrix  # what the liars would have sent had they been honest; empty rows unless the attack asks for it
    liars: int  # how many liars were invited
    invited: int
    tolerated: int  # b, how many the rule trims at each end
    round: int


def none() -> Attack:
    """Byzantine clients that act honestly."""
    return lambda known: known.own


def full_knowledge(reading: str = "accepted") -> Attack:
    """Push every number against the honest mean (the paper's Algorithm 3).

    For each direction, with the honest mean >= 0 the liars all send a small honest value, otherwise a large one:

        literal   the floor(beta m)-th smallest (largest) honest value, as the algorithm says
        accepted  the smallest (largest): the most extreme value of which copies still survive the trimming
    """
    if reading not in READINGS:
        raise ConfigError(f"attack_reading = {reading!r} must be one of {', '.join(READINGS)}")

    def attack(known: Knowledge) -> Matrix:
        honest = known.honest[np.isfinite(known.honest).all(axis=1)]
        if len(honest) == 0:  # nothing to hide behind
            return np.zeros((known.liars, known.honest.shape[1]))
        ordered = np.sort(honest, axis=0)
        place = 0 if reading == "accepted" else min(max(known.tolerated, 1), len(ordered)) - 1
        sent = np.where(honest.mean(axis=0) >= 0, ordered[place], ordered[-1 - place])
        return np.tile(sent, (known.liars, 1))

    return attack


# Attacks that need the liars' own honest numbers; the others save the work of computing them.
NEED_OWN = frozenset({"none"})
ATTACKS: dict[str, Callable[[str], Attack]] = {
    "none": lambda reading: none(),
    "full_knowledge": full_knowledge,
}


def make(name: str, reading: str = "accepted") -> Attack:
    """Return the attack of that name."""
    if name not in ATTACKS:
        near = closest(name, ATTACKS)
        remedy = f"did you mean {near!r}?" if near else f"possible are {', '.join(ATTACKS)}"
        raise ConfigError(f"unknown attack {name!r}; {remedy}")
    return ATTACKS[name](reading)
