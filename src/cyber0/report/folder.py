"""A run's folder as a report shows it: with what was diagnosed, and what its ledger promised."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cyber0.diagnose import verdict
from cyber0.errors import Cyber0Error
from cyber0.runs import folder as folders
from cyber0.runs.folder import RunFolder
from cyber0.storage import DIAGNOSTICS, LEDGER


def read(path: Path) -> RunFolder:
    """Read a run's folder as far as possible; see `runs.folder.read`."""
    folder = folders.read(path)
    _check_diagnosis(folder)
    if (path / LEDGER).exists():
        _add_records(folder)
    return folder


def _check_diagnosis(folder: RunFolder) -> None:
    """Leave out a diagnosis that can't be shown."""
    if not folder.diagnosis:
        return
    try:
        verdict.verdict(folder.diagnosis), verdict.table(folder.diagnosis)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        folder.diagnosis = {}
        folder.notes.append(f"{DIAGNOSTICS} can't be read: {error!r}; make it again by cyber0 diagnose.")


def _add_records(folder: RunFolder) -> None:
    from cyber0.diagnose import records  # needs numpy

    byzantine = [row.client for row in folder.partition if row.byzantine]
    losses = [(row.round, row.loss) for row in folder.evaluations]
    with contextlib.suppress(Cyber0Error, OSError):  # `cyber0 verify` says what is wrong with a ledger
        folder.records = records.read(folder.path, losses, byzantine) or {}
