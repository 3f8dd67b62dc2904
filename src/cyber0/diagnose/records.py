"""What the records of a run show, without measuring anything again. Needs numpy, not torch.

A decided round moves w by -(lr / k) sum_r ghat_r z_r, so the linear model predicts that the loss falls by
(lr / k) sum_r ghat_r^2 (on the sphere a d-th of it). How much of that was realised on the test set shows whether steps
are too long or made of noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cyber0.diagnose.signal import of_reports
from cyber0.errors import LedgerError
from cyber0.ledger import Header, Ledger, Reports
from cyber0.storage import LEDGER, REPORTS

MOST_ROUNDS = 200  # of those whose reports were stored


def read(folder: Path, losses: Sequence[tuple[int, float]], byzantine: Sequence[int] = ()) -> dict[str, Any] | None:
    """Return the fall of the loss that a run's ledger predicted, and the real one; None without ledger or evaluations.

    Args:
        folder: The run's folder.
        losses: (round, test loss) of its evaluations, ascending.
        byzantine: Clients whose reports are left out of signal and noise, where these are known.
    """
    finite = [(round, loss) for round, loss in losses if math.isfinite(loss)]
    if not (folder / LEDGER).exists() or len(finite) < 2:
        return None
    with Ledger.open(folder / LEDGER) as ledger:
        return _read(folder, ledger, finite, set(byzantine))


def _read(folder: Path, ledger: Ledger, finite: list[tuple[int, float]], byzantine: set[int]) -> dict[str, Any] | None:
    header = ledger.header
    factor = header.space.factor
    promised = np.zeros(len(ledger) + 1)
    for record in ledger:
        if record.values is not None:
            squares = float(np.sum(record.values.astype(np.float64) ** 2))
            promised[record.round + 1] = record.lr * squares / (header.k * factor)
    total = np.cumsum(promised)
    (first, start), (last, end) = finite[0], finite[-1]
    if not first < last <= len(ledger):
        return None
    fall = float(total[last] - total[first])
    found = {"rounds": last - first, "promised": fall, "real": start - end, "lr": header.lr}
    return found | {"signal": _signal(folder, header, ledger, byzantine)}


def _signal(folder: Path, header: Header, ledger: Ledger, byzantine: set[int]) -> dict[str, Any] | None:
    if not (folder / REPORTS).exists():
        return None
    every = max(1, len(ledger) // MOST_ROUNDS)
    rounds = []
    try:
        for (number, rows), record in zip(Reports(folder / REPORTS, header.scalars), ledger, strict=False):
            who = np.flatnonzero(record.reported)
            if number % every == 0 and number == record.round and len(who) == len(rows):
                rounds.append(rows[~np.isin(who, list(byzantine))])
    except LedgerError:
        return None
    signal = of_reports(rounds)
    if signal is None:
        return None
    return {name: v if math.isfinite(v) else None for name, v in signal._asdict().items()}
