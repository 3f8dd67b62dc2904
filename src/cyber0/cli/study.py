"""`cyber0 study`: what it shows on the screen."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.errors import ConfigError
from cyber0.runs import environment
from cyber0.study.cells import Result, measure_of
from cyber0.study.engine import COPY, EARLIER, LOG, RESULTS, RUNS, Study
from cyber0.study.grid import Plan, read_plan
from cyber0.study.judge import judge, scores
from cyber0.study.report import percent, write_report
from cyber0.study.worker_pool import StudyProgress

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
        with Display(console) as show:
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


def notes(study: Study, *, rerun: bool) -> list[str]:
    """Say which of the finished runs may not be what this code, this model and this data would give."""
    said, results = [], study.results()
    outdated = [result for result in results if result.outdated]
    if outdated:
        made = Counter(str(result.figures["code"]) or "an unknown version" for result in outdated)
        versions = ", ".join(f"{count} by {code}" for code, count in made.items())
        remedy = (f"they are run again, and kept in {study.out / EARLIER}" if rerun
                  else "they are used as they are; --rerun runs them again")  # fmt: skip
        said.append(f"{len(outdated)} of the finished runs were made by other code than this, {environment.code()} "
                    f"({versions}); {remedy}")  # fmt: skip
    named = [result for result in results if result.status == "done" and result.cell.digest in study.by_name]
    if named:
        said.append(
            f"{len(named)} of the finished runs had a model or data of the same name in another place, which can't be "
            f"compared; they are used (if it was another, remove {named[0].folder} and the like)"
        )
    return said


def _announce(plan: Plan, study: Study, console: Console, *, rerun: bool) -> None:
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


class Display:
    """A bar and a line for each worker on a terminal; a line for each finished run elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Any = None
        self._drawn = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._console.quiet:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, p: StudyProgress) -> None:
        if p.ended is not None:
            self._console.print(_ended_line(p), soft_wrap=True, markup=False,
                                style="red" if p.ended.status == "failed" else None)  # fmt: skip
        if self._live is not None and (p.ended is not None or time.monotonic() - self._drawn > 0.1):
            self._drawn = time.monotonic()
            self._live.update(_picture(p), refresh=True)


def _ended_line(p: StudyProgress) -> str:
    ended = p.ended
    assert ended is not None
    loss = ended.figures.get("final_loss", "")
    what = f"loss {float(loss):.4f}" if loss not in ("", None) else "loss not finite"
    if ended.status == "failed":
        what = f"failed: {ended.error}"
    if ended.accuracy is not None:
        what = f"accuracy {ended.accuracy:.4f}"
    left = "" if p.seconds_left is None or not (p.cells - p.done - p.failed) else f"  ({duration(p.seconds_left)} left)"
    return f"{p.done + p.failed}/{p.cells}  {ended.cell.label}  {what}{left}"


def _picture(p: StudyProgress) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, overflow="ellipsis")
    left = "" if p.seconds_left is None else f"{duration(p.seconds_left)} left"
    failed = f", {p.failed} failed" if p.failed else ""
    ended = p.done + p.failed + sum(r.round / max(r.rounds, 1) for r in p.running)
    table.add_row(f"{p.done}/{p.cells} done{failed}", ProgressBar(p.cells, ended, width=30), left)
    for r in p.running:
        accuracy = "starting" if r.accuracy is None else f"accuracy {r.accuracy:.3f}"
        table.add_row(f"  {r.cell.label}", ProgressBar(max(r.rounds, 1), r.round, width=30), accuracy)
    return table


def duration(seconds: float) -> str:
    """Write a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _conclude(results: list[Result], plan: Plan, console: Console) -> None:
    from rich.table import Table

    table = scores(results, plan.layout)
    what = measure_of(results).title
    shown = Table("rule", "worst attack", what, "without attack", title="Each rule by its worst attack")
    place = None
    for verdict in judge(table):
        if verdict.circumstances != place:
            place = verdict.circumstances
            if place:
                shown.add_section()
                shown.add_row(place, style="bold")
        attack = "–" if verdict.worst is None else verdict.worst.attack
        note = "" if verdict.complete else " (runs are missing)"
        shown.add_row(verdict.defence, attack + note, percent(verdict.worst), percent(verdict.unattacked))
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
