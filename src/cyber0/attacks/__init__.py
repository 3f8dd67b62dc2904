"""What Byzantine clients send.

An attack is a function made by a factory: `full_knowledge(reading)` returns one that maps what the liars know of a
round (`Knowledge`) to the numbers they send, one row a liar. Numbers may be the k scalars of a round or the d
coordinates of a gradient: no attack cares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    "TAKE_SIGN",
    "Attack",
    "Knowledge",
    "Matrix",
    "Options",
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
# Attacks that can work against the sign of the truth, which then has to be computed for them.
TAKE_SIGN = frozenset({"fang_trimmed_mean", "fang_krum"})


class Options(NamedTuple):
    """Settings of attacks; each takes those that it has."""

    reading: str = "accepted"
    sign: str = "honest"


ATTACKS: dict[str, Callable[[Options], Attack]] = {
    "none": lambda options: none(),
    "full_knowledge": lambda options: full_knowledge(options.reading),
    "always_small": lambda options: always_small(options.reading),
    "always_large": lambda options: always_large(options.reading),
    "random_choice": lambda options: random_choice(options.reading),
    "label_flip": lambda options: label_flip(),
    "sign_flip": lambda options: sign_flip(),
    "ipm": lambda options: ipm(),
    "alie": lambda options: alie(),
    "mimic": lambda options: mimic(),
    "gaussian": lambda options: gaussian(),
    "nonfinite": lambda options: nonfinite(),
    "min_max": lambda options: min_max(),
    "min_sum": lambda options: min_sum(),
    "fang_trimmed_mean": lambda options: fang_trimmed_mean(sign_from=options.sign),
    "fang_krum": lambda options: fang_krum(sign_from=options.sign),
    "best_response": lambda options: best_response(),
}


OF_STRENGTH: dict[str, Callable[[float, Options], Attack]] = {
    "sign_flip": lambda strength, options: sign_flip(strength),
    "ipm": lambda strength, options: ipm(strength),
    "alie": lambda strength, options: alie(strength),
    "gaussian": lambda strength, options: gaussian(strength),
    "fang_trimmed_mean": lambda strength, options: fang_trimmed_mean(strength, options.sign),
    "best_response": lambda strength, options: best_response(strength),
}
"""The attacks whose strength can be set, made from it."""


def make(name: str, reading: str = "accepted", sign: str = "honest", *, strength: float = 0.0) -> Attack:
    """Return the attack of that name.

    Args:
        name: one of `ATTACKS`.
        reading: how the paper's attacks are read, one of `READINGS`.
        sign: whose sign Fang et al.'s attacks work against, "honest" or "truth".
        strength: the number that the factory of the attack takes; 0 leaves it at its default.
    """
    check_known("attack", name, ATTACKS)
    options = Options(reading, sign)
    if strength == 0:
        return ATTACKS[name](options)
    if name not in OF_STRENGTH:
        raise ConfigError(
            f"strength = {strength!r}: {name} has none to set; those that have are {', '.join(OF_STRENGTH)}"
        )
    return OF_STRENGTH[name](strength, options)
