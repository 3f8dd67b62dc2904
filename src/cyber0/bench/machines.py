"""Figures of named machines: those that come with the package, and one to compare with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyber0.bench.timing import Figure
from cyber0.runs import environment

OURS = Path(__file__).with_name("machines.json")
"""Written by benchmarks/machine.py on the machines of docs/RESULTS.md."""


@dataclass(frozen=True)
class Machine:
    """A machine with its figures by name."""

    name: str
    date: str
    device: str
    figures: dict[str, float] = field(default_factory=dict)
    about: dict[str, str | int] = field(default_factory=dict)
    """Versions and hardware, as a run's summary has them."""


def this_machine(device: str, figures: Iterable[Figure], name: str = "") -> Machine:
    """Return this machine as it was measured today; it is called by its processor or GPU unless a name is given."""
    values = {f.name: float(f"{f.value:.4g}") for f in figures if f.value is not None}
    about = environment.describe(device)
    if not name:
        name = f"{about['cpu']}, {about['cpu_count']} cores" if device == "cpu" else str(about["device"])
    return Machine(name, datetime.now(UTC).date().isoformat(), device, values, about)


def load(path: Path = OURS) -> list[Machine]:
    """Return the machines of a file."""
    return [Machine(**one) for one in json.loads(path.read_text(encoding="utf-8"))["machines"]]


def text_of(machines: Iterable[Machine]) -> str:
    """Return machines as the content of a file."""
    tables: dict[str, Any] = {"machines": [asdict(one) for one in machines]}
    return json.dumps(tables, indent=2) + "\n"


def replaced(machines: Iterable[Machine], new: Machine) -> list[Machine]:
    """Return the machines with a new measurement in the place of the one by the same name, or after all others."""
    known = list(machines)
    if new.name not in {one.name for one in known}:
        return [*known, new]
    return [new if one.name == new.name else one for one in known]
