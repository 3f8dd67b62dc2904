"""What Byzantine clients send.

An attack is a function made by a factory: `full_knowledge(reading)` returns one that maps what the liars know of a
round (`Knowledge`) to the numbers they send, one row a liar. Numbers may be the k scalars of a round or the d
coordinates of a gradient: no attack cares.
"""

from __future__ import annotations

from collections.abc import Callable

from cyber0.attacks.best_response import best_response
from cyber0.attacks.field import alie, alie_strength, gaussian, ipm, mimic, nonfinite, sign_flip
from cyber0.attacks.knowledge import Attack, Knowledge, Matrix, Vector
from cyber0.attacks.optimised import fang_krum, fang_trimmed_mean, min_max, min_sum
from cyber0.attacks.paper import (
    READINGS,
    always_large,
    always_small,
    full_knowledge,
    label_flip,
    none,
    random_choice,
)
from cyber0.errors import ConfigError
from cyber0.settings import check_known

__all__ = [
    "ATTACKS",
    "FLIP_LABELS",
    "NEED_OWN",
    "OF_STRENGTH",
    "READINGS",
    "Attack",
    "Knowledge",
    "Matrix",
    "Vector",
    "alie",
    "alie_strength",
    "always_large",
    "always_small",
    "best_response",
    "fang_krum",
    "fang_trimmed_mean",
    "full_knowledge",
    "gaussian",
    "ipm",
    "label_flip",
    "make",
    "mimic",
    "min_max",
    "min_sum",
    "none",
    "nonfinite",
    "random_choice",
    "sign_flip",
]

# Attacks that need what the liars measure themselves; the others save the work of computing it.
NEED_OWN = frozenset({"none", "label_flip", "sign_flip"})
# Attacks on the liars' data: they measure on flipped labels.
FLIP_LABELS = frozenset({"label_flip"})
ATTACKS: dict[str, Callable[[str], Attack]] = {
    "none": lambda reading: none(),
    "full_knowledge": full_knowledge,
    "always_small": always_small,
    "always_large": always_large,
    "random_choice": random_choice,
    "label_flip": lambda reading: label_flip(),
    "sign_flip": lambda reading: sign_flip(),
    "ipm": lambda reading: ipm(),
    "alie": lambda reading: alie(),
    "mimic": lambda reading: mimic(),
    "gaussian": lambda reading: gaussian(),
    "nonfinite": lambda reading: nonfinite(),
    "min_max": lambda reading: min_max(),
    "min_sum": lambda reading: min_sum(),
    "fang_trimmed_mean": lambda reading: fang_trimmed_mean(),
    "fang_krum": lambda reading: fang_krum(),
    "best_response": lambda reading: best_response(),
}


OF_STRENGTH: dict[str, Callable[[float], Attack]] = {
    "sign_flip": sign_flip,
    "ipm": ipm,
    "alie": alie,
    "gaussian": gaussian,
    "fang_trimmed_mean": fang_trimmed_mean,
    "best_response": best_response,
}
"""The attacks whose strength can be set, made from it."""


def make(name: str, reading: str = "accepted", *, strength: float = 0.0) -> Attack:
    """Return the attack of that name.

    Args:
        name: one of `ATTACKS`.
        reading: how the paper's attacks are read, one of `READINGS`.
        strength: the number that the factory of the attack takes; 0 leaves it at its default.
    """
    check_known("attack", name, ATTACKS)
    if strength == 0:
        return ATTACKS[name](reading)
    if name not in OF_STRENGTH:
        raise ConfigError(
            f"strength = {strength!r}: {name} has none to set; those that have are {', '.join(OF_STRENGTH)}"
        )
    return OF_STRENGTH[name](strength)
