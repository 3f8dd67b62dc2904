"""What a `ZeroOrder` is given: checked values of its settings, and its ledger."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cyber0 import optimizers
from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.directions.definition import distribution_named
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger import Header, Ledger, read_opening
from cyber0.model.scalars import Scalar, not_negative, number_of, positive, whole
from cyber0.model.vector import Parameters

OPTIMIZER_ESTIMATORS = (*PROBING_ESTIMATORS, "forward")
LARGEST = float(np.finfo(np.float32).max)
_OLD_SCHEDULE = "constant"  # what ledgers of earlier versions say, whatever lr their users set


def checked_rank(rank: Scalar, distribution: str) -> int:
    """Return the rank of every matrix of a low-rank direction; other distributions have none."""
    found = whole("rank", rank)
    if found < 1 or (found > 1 and not distribution_named(distribution).shaped):
        raise ValueError(
            f"rank = {found} can't be used with distribution={distribution!r}; use 1, or a larger one with "
            'distribution="low_rank"'
        )
    return found


def checked_seed(seed: Scalar) -> int:
    """Return the seed of the directions, a word of 64 bits."""
    found = whole("seed", seed)
    if not 0 <= found < 1 << 64:
        raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, got {found}")
    return found


def check_estimator(estimator: str) -> None:
    """Refuse an estimator that a ZeroOrder does not have."""
    if estimator not in OPTIMIZER_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(OPTIMIZER_ESTIMATORS)}, got {estimator!r}")


def checked_mu(mu: Scalar, estimator: str) -> float:
    """Return the length of the probing step, 0 where derivatives are taken at w itself."""
    found = number_of(mu)
    if estimator == "forward":
        not_negative("mu", mu)
        return 0.0
    if found is not None and math.isfinite(found) and not np.float32(min(abs(found), LARGEST)) > 0:
        raise ValueError(
            f"mu must be a positive number, got {mu!r}: {estimator} divides by it; estimator='forward' is mu = 0"
        )
    if found is not None and math.isfinite(found) and found > LARGEST:
        raise ValueError(f"mu must be at most {LARGEST:.3g}, the largest float32, got {mu!r}; 1e-3 is usual")
    return positive("mu", mu)


def check_optimizer(name: str, options: Mapping[str, Any], k: int, unknown_lr: bool) -> None:
    """Refuse an optimizer that does not exist, or does not fit k or a learning rate that is to be measured."""
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise TypeError(
            f"optimizer must be a name and optimizer_options a dict, got {name!r} and {options!r}: "
            'ZeroOrder(model, lr=..., optimizer="adaptive", optimizer_options={"beta": 0.98})'
        )
    try:
        made = optimizers.make(name, options)
    except ConfigError as error:
        raise ValueError(str(error).replace("method.", "")) from None
    if k < made.least_scalars:
        raise ValueError(
            f"optimizer={name!r} compares the slopes of a step, so k must be at least {made.least_scalars}, got {k}"
        )
    if unknown_lr and not made.lr_measurable:
        raise ValueError(f'lr="auto" can\'t be used with optimizer={name!r}; set lr to a number, such as 1e-4')


def warn_of_resolution(parameters: Parameters, mu: float) -> None:
    """Warn where most weights are stored so coarsely that w + mu z is w again."""
    least = parameters.least_moving()
    if mu >= least:
        return
    types = ", ".join(sorted({entry.dtype for entry in parameters.layout}))
    warnings.warn(
        f"mu = {mu:g} is below the resolution of most weights, which are stored as {types}: w + mu z rounds to w "
        f"there. mu = {_rounded_up(2 * least):g} is above it",
        RuntimeWarning,
        stacklevel=3,
    )


def _rounded_up(value: float) -> float:
    unit = 10.0 ** math.floor(math.log10(value))
    return math.ceil(value / unit) * unit


def recorded_lr(path: Path | None) -> float | None:
    """Return the learning rate in the header of a ledger, None if there is none yet."""
    if path is None or not path.exists():
        return None
    with path.open("rb") as file:
        return read_opening(file, path)[0].lr


def open_ledger(path: Path | None, header: Header) -> Ledger:
    """Return a new ledger, or the existing one if it is of the same model and settings."""
    if path is None or not path.exists():
        return Ledger.create(path, header)
    ledger = Ledger.open(path, writable=True)
    odd = header.differences(ledger.header)
    if ledger.header.lr_schedule == _OLD_SCHEDULE:
        odd = [name for name in odd if name != "lr_schedule"]
    if odd:
        ledger.close()
        raise LedgerError(
            f"the ledger {path} belongs to another model or other settings (it differs in {', '.join(odd)}); "
            "start from the same weights and settings, or choose another file"
        )
    return ledger
