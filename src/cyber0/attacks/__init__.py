"""What Byzantine clients send.

An attack is a function made by a factory: `full_knowledge(reading)` returns one that maps what the Byzantine clients
know of a round (`Knowledge`) to the scalars they send, one row a client. A row may be the k scalars of a round or the d
coordinates of a gradient: no attack cares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# In the order in which they are listed: the paper's, the field's, ours.
from cyber0.attacks.paper import READINGS, always_large, always_small, full_knowledge, label_flip, none, random_choice

from cyber0.attacks.field import alie, alie_strength, gaussian, ipm, mimic, nonfinite, sign_flip, sleeper  # isort: skip
from cyber0.attacks.optimised import fang_krum, fang_trimmed_mean, min_max, min_sum  # isort: skip
from cyber0.attacks.unlike import decorrelated_ipm, mirror  # isort: skip
from cyber0.attacks.alone import xfed  # isort: skip
from cyber0.attacks.best_response import best_response  # isort: skip
from cyber0.attacks.knowledge import PAST, Attack, Knowledge, Matrix, Vector, victims
from cyber0.config.registry import ATTACKS, import_modules
from cyber0.errors import ConfigError

__all__ = [
    "ATTACKS",
    "PAST",
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
    "decorrelated_ipm",
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
    "mirror",
    "needs_truth",
    "none",
    "nonfinite",
    "random_choice",
    "sign_flip",
    "sleeper",
    "victims",
    "xfed",
]


import_modules(__name__, __path__)


def make(name: str, options: Mapping[str, Any] | None = None) -> Attack:
    """Return the attack of that name, one of `ATTACKS`, or the one that a path names, which is imported.

    Args:
        name: as in federation.attack.
        options: what its factory takes, as in federation.attack_options.
    """
    made, entry = ATTACKS.make(name, options), ATTACKS.entry(name)
    return _checked(entry.name, made) if entry.own else made


def needs_truth(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether the attack of that name, with these options, looks at `Knowledge.truth`."""
    needs = ATTACKS.entry(name).traits["needs_truth"]
    return bool(needs(options) if callable(needs) else needs)


def _checked(name: str, made: Any) -> Attack:
    """Return a user's attack, whose rows are checked."""
    if not callable(made):
        raise ConfigError(
            f"{ATTACKS.key} = {name!r} returns {type(made).__name__}, and must return a function of a Knowledge that "
            "gives one row for each Byzantine client"
        )

    def send(known: Knowledge) -> Matrix:
        rows, shape = np.asarray(made(known)), (known.byzantine, known.honest.shape[1])
        if rows.shape != shape or rows.dtype.kind not in "fiu":
            raise ConfigError(
                f"{ATTACKS.key} = {name!r} returned an array of shape {rows.shape} and type {rows.dtype} in round "
                f"{known.round}; it must return numbers of shape {shape}, one row for each Byzantine client"
            )
        return rows.astype(np.float64)

    return send
