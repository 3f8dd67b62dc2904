"""`cyber0 study`: what it shows on the screen."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cyber0.errors import ConfigError
from cyber0.study.cells import Result, measure_of
from cyber0.study.display import StudyDisplay, duration, notes
from cyber0.study.engine import COPY, LOG, RESULTS, RUNS, Study
from cyber0.study.grid import StudyPlan, read_plan
from cyber0.study.judge import judge, scores
from cyber0.study.report import percent, write_report

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 5  # errors, impossible combinations


def run(
    file: Path, out: Path | None, workers: int | None, console: Console, *, dry_run: bool, rerun: bool = False
) -> None:
    """Run the study that the file describes; exits with 1 if a run failed, with 130 if it was interrupted."""
    plan = read_plan(file)
    again = shlex.join(["cyber0", *sys.argv[1:]])
    out = out or Path("runs") / f"study-{plan.name}"
    study = Study(plan.cells, out, workers, file.read_bytes(), rerun=rerun)
    _check_out(out)
    _announce(plan, study, console, rerun=rerun)
    if dry_run:
        return
    before, started = study.finished(), time.monotonic()
    try:
        with StudyDisplay(console) as show:
            results = study.run(show)
    except KeyboardInterrupt:
        print(f"interrupted after {study.finished()} of {len(plan.cells)} runs; go on with: {again}", file=sys.stderr)
        sys.exit(130)
    files = write_report(results, plan.layout, out, plan.name)
    _conclude(results, plan, console)
    played = sum(result.status == "done" for result in results) - before
    if played:
        console.print(f"{played} run{'s' if played > 1 else ''} in {duration(time.monotonic() - started)}")
    console.print(f"{out}/: {', '.join(str(f.relative_to(out)) for f in [out / RESULTS, *files])}, {RUNS}/",
                  soft_wrap=True)  # fmt: skip
    _name_failures(results, out, again)


def _check_out(out: Path) -> None:
    """Refuse a folder that holds something else."""
    if out.is_dir() and any(out.iterdir()) and not (out / COPY).exists():
        raise ConfigError(f"{out} is not empty and holds no study (it has no {COPY}); choose another --out")


def _announce(plan: StudyPlan, study: Study, console: Console, *, rerun: bool) -> None:
    cells, done = len(plan.cells), study.finished()
    console.print(f"{plan.name}: {plan.size}", style="bold", soft_wrap=True)
    parts = [f"{cells} run{'s' if cells > 1 else ''}", f"{min(study.workers, cells)} at a time", f"folder {study.out}"]
    parts += [f"{done} done already"] if done else []
    parts += [f"{plan.skipped} combinations skipped"] if plan.skipped else []
    parts += [f"{len(plan.impossible)} impossible ones left out"] if plan.impossible else []
    console.print(", ".join(parts), soft_wrap=True)
    for note in [*plan.notes, *notes(study, rerun=rerun)]:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    for line in plan.impossible[:MOST_SHOWN]:
        console.print(f"left out: {line}", style="yellow", soft_wrap=True, markup=False)
    if len(plan.impossible) > MOST_SHOWN:
        console.print(f"and {len(plan.impossible) - MOST_SHOWN} more", style="yellow")


def _conclude(results: list[Result], plan: StudyPlan, console: Console) -> None:
    from rich.table import Table

    table = scores(results, plan.layout)
    what = measure_of(results).title
    shown = Table("rule", "worst attack", what, "without attack", title="Each rule by its worst attack")
    place = None
    for worst_case in judge(table):
        if worst_case.circumstances != place:
            place = worst_case.circumstances
            if place:
                shown.add_section()
                shown.add_row(place, style="bold")
        attack = "–" if worst_case.worst is None else worst_case.worst.attack
        note = "" if worst_case.complete else " (runs are missing)"
        shown.add_row(worst_case.defence, attack + note, percent(worst_case.worst), percent(worst_case.unattacked))
    console.print(shown)


def _name_failures(results: list[Result], out: Path, again: str) -> None:
    failed = [r for r in results if r.status == "failed"]
    if not failed:
        return
    for result in failed[:MOST_SHOWN]:
        print(f"failed: {result.cell.label}: {result.error}", file=sys.stderr)
    more = f" (and {len(failed) - MOST_SHOWN} more, see {out / RESULTS})" if len(failed) > MOST_SHOWN else ""
    log = f"; {out / LOG} has the details" if (out / LOG).exists() else ""
    print(
        f"error: {len(failed)} of {len(results)} runs failed{more}{log}; run them again with: {again}", file=sys.stderr
    )
    sys.exit(1)
