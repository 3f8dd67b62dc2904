"""`cyber0 diagnose`: measure, print, and leave diagnostics.json and a new report in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.diagnose import verdict as words
from cyber0.diagnose.source import settings_of
from cyber0.storage import DIAGNOSTICS, REPORT, write_text

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {words.GOOD: "green", words.NOTE: "yellow", words.BAD: "red"}


def run(
    source: Path, round: int | None, trials: int, device: str | None, overrides: Sequence[str], console: Console,
    task: str = "",
) -> None:  # fmt: skip
    """Diagnose a run's folder or a config; `task` is where the user's copy of its task is."""
    overrides = [*overrides, *([f"task.name={task}"] if task else [])]
    settings_of(source, overrides)
    from cyber0.diagnose.federation import diagnose

    found = diagnose(source, round=round, trials=trials, device=device, overrides=overrides, tell=console.print)
    show(found, console)
    if source.is_dir():
        from cyber0.report import page

        text = json.dumps(found, indent=2, allow_nan=False) + "\n"
        write_text(source / DIAGNOSTICS, text)
        page.write([source], source / REPORT)
        console.print(f"{source}/: {DIAGNOSTICS}, {REPORT}")


def show(diagnosis: dict[str, Any], console: Console) -> None:
    """Print a diagnosis: what was measured, what was found, what to choose."""
    from rich.table import Table

    head, rows = words.table(diagnosis)
    table = Table(*head, title=f"d = {diagnosis['dimension']:,}, k = {diagnosis['k']}, {diagnosis['dtype']}")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    verdict = words.verdict(diagnosis)
    console.print(verdict.headline, style=f"bold {STYLES[verdict.level]}")
    for finding in verdict.findings:
        console.print(f"- {finding.text}", style=STYLES[finding.level] if finding.level != words.GOOD else None,
                      soft_wrap=True, markup=False)  # fmt: skip
    for line in verdict.suggestions:
        console.print(f"suggested: {line}", soft_wrap=True, markup=False)
