"""`cyber0 diagnose`: measure, print, and leave diagnostics.json and a new report in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0.cli import display as screen
from cyber0.cli import options
from cyber0.cli.deploy import OwnTaskOption
from cyber0.cli.output import Reply, with_json
from cyber0.storage import DIAGNOSTICS, REPORT, write_text

if TYPE_CHECKING:
    from rich.console import Console


@with_json
def diagnose(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|CONFIG.toml|TASK|FILE.py:NAME", help="A run's folder, settings, a task, or one of your own."
        ),
    ],
    round: Annotated[
        int | None,
        typer.Option(
            metavar="T", help="Measure after this many rounds. (default: at the start, the middle and the end)", min=0
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="How many rounds' steps to try at each point.", min=1)] = 8,
    device: Annotated[
        str | None,
        options.device_option("Where to compute. (default: as set)"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        options.set_option(
            "Override one setting of a config; for a run's folder, name your copy of its code. May be repeated."
        ),
    ] = None,
    task: OwnTaskOption = "",
) -> Reply:
    """Is it the learning rate or a bug? Measure how good the estimates are, and suggest lr and mu.

    Takes as long as a few dozen steps, changes nothing in the run, and adds a section to its report. Code of your own
    is imported from where the run's config.toml says: for a folder that you received from somebody else, use --task,
    and --set for a rule, attack, partition or schedule.
    """
    from cyber0.diagnose.source import settings_of
    from cyber0.kernels.memory import keep_freed_memory

    keep_freed_memory()
    overrides = [*(set_ or ()), *([f"task.name={task}"] if task else [])]
    settings_of(source, overrides)
    from cyber0.diagnose import verdict as verdicts
    from cyber0.diagnose.federation import diagnose

    console = screen.new_console()
    found = diagnose(source, round=round, trials=rounds, device=device, overrides=overrides, tell=console.print)
    if source.is_dir():
        from cyber0.report import page

        write_text(source / DIAGNOSTICS, json.dumps(found, indent=2, allow_nan=False) + "\n")
        page.write([source], source / REPORT)
    return Reply(found | {"verdict": verdicts.verdict(found)}, lambda: show(found, console, source))


def show(diagnosis: dict[str, Any], console: Console, source: Path) -> None:
    """Print a diagnosis: what was measured, what it means, what to choose, and which files have it."""
    from rich.table import Table

    from cyber0.diagnose import verdict as verdicts

    styles = {verdicts.GOOD: "green", verdicts.NOTE: "yellow", verdicts.BAD: "red"}
    head, rows = verdicts.table(diagnosis)
    table = Table(*head, title=f"d = {diagnosis['dimension']:,}, k = {diagnosis['k']}, {diagnosis['dtype']}")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    verdict = verdicts.verdict(diagnosis)
    console.print(verdict.headline, style=f"bold {styles[verdict.level]}")
    for finding in verdict.findings:
        console.print(f"- {finding.text}", style=styles[finding.level] if finding.level != verdicts.GOOD else None,
                      soft_wrap=True, markup=False)  # fmt: skip
    for line in verdict.suggestions:
        console.print(f"suggested: {line}", soft_wrap=True, markup=False)
    if source.is_dir():
        console.print(f"{source}/: {DIAGNOSTICS}, {REPORT}")
