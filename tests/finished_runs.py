"""A finished run of a few rounds, and what tests compare with it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from synthetic import OTHER_BLOBS, OWN_BLOBS, After, one_thread  # noqa: F401

SETTINGS = ("rounds=23", "evaluate_every=5", "method.lr_schedule=cosine")


DUE = [0, 5, 10, 15, 20, 23]


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    return to


def summary_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def results_of(folder: Path) -> list[tuple[str, ...]]:
    """Return what must not depend on whether a run was interrupted: all but the seconds."""
    return [tuple(v for name, v in row.items() if name != "seconds") for row in rows_of(folder)]
