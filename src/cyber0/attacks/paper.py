"""The attacks of the paper: values of honest clients, sent where they hurt; and flipped labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cyber0.attacks.knowledge import COINS, Attack, Knowledge, Matrix, from_honest, mean_of
from cyber0.config.registry import attack
from cyber0.directions import Stream, words
from cyber0.errors import ConfigError

READINGS = ("accepted", "literal")


@attack
def none() -> Attack:
    """Act honestly."""
    return lambda known: known.own


@attack(needs_own=False)
def full_knowledge(reading: str = "accepted") -> Attack:
    """Push every scalar against the honest mean (the paper's Algorithm 3).

    For each direction, with the honest mean >= 0 the Byzantine clients all send a small honest value, otherwise a large
    one:

        literal   the floor(beta m)-th smallest (largest) honest value, as in the algorithm
        accepted  the smallest (largest): the most extreme value of which copies still survive the trimming

    Examples:
        Three honest clients agree that the loss rises along the direction; the Byzantine one sends the least of it:

        >>> from cyber0.attacks import Knowledge, full_knowledge
        >>> honest = np.array([[0.5], [0.7], [0.9]])
        >>> known = Knowledge(honest, own=np.empty((0, 1)), byzantine=1, invited=4, tolerated=1, round=0)
        >>> full_knowledge()(known)
        array([[0.5]])
    """
    return _small_or_large(reading, lambda honest, known: mean_of(honest) >= 0)


@attack(needs_own=False)
def always_small(reading: str = "accepted") -> Attack:
    """Send a small honest value for every direction; `reading` as in `full_knowledge` (the paper, Section 6)."""
    return _small_or_large(reading, lambda honest, known: np.ones(honest.shape[1], dtype=np.bool_))


@attack(needs_own=False)
def always_large(reading: str = "accepted") -> Attack:
    """Send a large honest value for every direction; `reading` as in `full_knowledge` (the paper, Section 6)."""
    return _small_or_large(reading, lambda honest, known: np.zeros(honest.shape[1], dtype=np.bool_))


@attack(needs_own=False)
def random_choice(reading: str = "accepted") -> Attack:
    """Send a small or a large honest value, by one coin for each direction (the paper, Section 6).

    All Byzantine clients act on the same coin: the lowest bit of a word of the attack stream.
    """

    def coins(honest: Matrix, known: Knowledge) -> NDArray[np.bool_]:
        drawn = words(known.seed, Stream.ATTACKS, known.round, COINS, 0, honest.shape[1])
        return np.asarray(drawn & np.uint32(1) == 0)

    return _small_or_large(reading, coins)


@attack(flips_labels=True)
def label_flip() -> Attack:
    """Measure honestly on poisoned data: label l becomes C - 1 - l, for MNIST 9 - l (the paper, Section 6).

    The simulation flips the labels of the Byzantine clients' batches, so that `own` holds the poisoned scalars.
    """
    return lambda known: known.own


def _small_or_large(reading: str, small: Callable[[Matrix, Knowledge], NDArray[np.bool_]]) -> Attack:
    """Send a small honest value where `small` says so and a large one elsewhere."""
    if reading not in READINGS:
        raise ConfigError(f"reading = {reading!r} must be one of {', '.join(READINGS)}")

    def craft(honest: Matrix, known: Knowledge) -> Matrix:
        ordered = np.sort(honest, axis=0)
        place = 0 if reading == "accepted" else min(max(known.tolerated, 1), len(ordered)) - 1
        return np.asarray(np.where(small(honest, known), ordered[place], ordered[-1 - place]))

    return from_honest(craft)
