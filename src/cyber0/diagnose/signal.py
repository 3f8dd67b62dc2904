"""Signal and noise in what clients measured: how far their scalars agree beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]

INDEPENDENT = 8  # directions of a round that count as independent, since all share its batches
DEVIATIONS = 3.0  # by which the clients' agreement must exceed chance


class Signal(NamedTuple):
    """What the clients' scalars have in common, and how much they differ."""

    size: float
    """Root mean square of a direction's slope in the mean over clients, minus the noise."""
    noise: float
    """Deviation of one client's scalar from that."""
    ratio: float
    """size / noise, for one client's scalar."""
    decided_ratio: float
    """The same for the mean over all clients."""
    agreement: float
    """How often a client's scalar has the sign of the mean of the others; 0.5 is chance."""
    present: bool
    """Whether the scalars agree more than by chance."""


def of_reports(rounds: Sequence[Matrix], clients: int | None = None) -> Signal | None:
    """Return signal and noise of (clients x scalars) matrices, one per round; None with fewer than two clients.

    With g_i,r of m clients, mean g_r and variance s_r^2 between the clients: E[g_r^2] = signal^2 + s_r^2 / m, so
    signal^2 is the mean over r of g_r^2 - s_r^2 / m. Without a signal m g_r^2 / s_r^2 is 1 in the mean.

    Args:
        rounds: What clients sent or would send, one row each; rows that are not finite are left out.
        clients: How many clients a decision averages over, if these are only some of them.
    """
    rows = [finite for finite in (m[np.isfinite(m).all(axis=1)].astype(np.float64) for m in rounds) if len(finite) > 1]
    if not rows:
        return None
    m = float(np.mean([len(r) for r in rows]))
    squares = float(np.mean([np.mean(r.mean(axis=0) ** 2) for r in rows]))
    variance = float(np.mean([np.mean(r.var(axis=0, ddof=1)) for r in rows]))
    size = math.sqrt(max(0.0, squares - variance / m))
    ratio = size / math.sqrt(variance) if variance else math.inf if size else 0.0
    independent = sum(min(r.shape[1], INDEPENDENT) for r in rows)
    present = squares > 0 and m * squares >= variance * (1 + DEVIATIONS * math.sqrt(2 / independent))
    agreement = float(np.mean([_agreement(r) for r in rows]))
    return Signal(size, math.sqrt(variance), ratio, ratio * math.sqrt(clients or m), agreement, present)


def _agreement(rows: Matrix) -> float:
    others = rows.sum(axis=0) - rows
    return float(np.mean(rows * others > 0))
