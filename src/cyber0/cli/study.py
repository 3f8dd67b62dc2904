"""`cyber0 study`: run the grid of a file, and print each rule under its worst attack."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0.cli import display as screen
from cyber0.cli import options
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from cyber0.study import Result, Study, StudyPlan

MOST_SHOWN = 5  # errors, impossible combinations


@with_json
def study(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="Settings, and a table 'study' of those that vary.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the study. (default: runs/study-NAME)")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Parallel runs. (default: one per core; on a GPU 1)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and show what would run.")] = False,
    rerun: options.RerunOption = False,
    quiet: options.QuietOption = False,
) -> Reply:
    """Run a grid of settings, and judge each rule by its worst attack.

    The same command resumes an interrupted study, and runs again what failed. See examples/study.toml for a file.
    """
    from cyber0.study.display import StudyDisplay, duration
    from cyber0.study.engine import RESULTS, RUNS, Study
    from cyber0.study.grid import read_plan
    from cyber0.study.report import write_report

    console = screen.new_console(quiet)
    plan = read_plan(file)
    again = shlex.join(["cyber0", *sys.argv[1:]])
    out = out or Path("runs") / f"study-{plan.name}"
    cells = Study(plan.cells, out, workers, file.read_bytes(), rerun=rerun)
    _check_out(out)
    _announce(plan, cells, console, rerun=rerun)
    if dry_run:
        return Reply(_planned(plan, cells))
    before, started = cells.finished(), time.monotonic()
    try:
        with StudyDisplay(console) as show:
            results = cells.run(show)
    except KeyboardInterrupt:
        print(f"interrupted after {cells.finished()} of {len(plan.cells)} runs; resume with: {again}", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    files = write_report(results, plan.layout, out, plan.name)
    _conclude(results, plan, console)
    done = sum(result.status == "done" for result in results) - before
    if done:
        console.print(f"{done} run{'s' if done > 1 else ''} in {duration(time.monotonic() - started)}")
    console.print(f"{out}/: {', '.join(str(f.relative_to(out)) for f in [out / RESULTS, *files])}, {RUNS}/",
                  soft_wrap=True)  # fmt: skip
    failed = _name_failures(results, out, again)
    return Reply(_outcome(results, plan, out), code=ExitCode.FAULTS if failed else ExitCode.DONE)


def _check_out(out: Path) -> None:
    """Refuse a folder that holds something else."""
    from cyber0.study.engine import COPY

    if out.is_dir() and any(out.iterdir()) and not (out / COPY).exists():
        raise ConfigError(f"{out} is not empty and holds no study (it has no {COPY}); choose another --out")


def _announce(plan: StudyPlan, study: Study, console: Console, *, rerun: bool) -> None:
    from cyber0.study.display import notes

    cells, done = len(plan.cells), study.finished()
    console.print(f"{plan.name}: {plan.size}", style="bold", soft_wrap=True)
    parts = [f"{cells} run{'s' if cells > 1 else ''}", f"{min(study.workers, cells)} at a time", f"folder {study.out}"]
    parts += [f"{done} already done"] if done else []
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

    from cyber0.study.cells import measure_of
    from cyber0.study.judge import judge, scores
    from cyber0.study.report import percent

    what = measure_of(results).title
    shown = Table("rule", "worst attack", what, "without attack", title="Each rule by its worst attack")
    place = None
    for case in judge(scores(results, plan.layout)):
        if case.circumstances != place:
            place = case.circumstances
            if place:
                shown.add_section()
                shown.add_row(place, style="bold")
        attack = "–" if case.worst is None else case.worst.attack
        note = "" if case.complete else " (runs are missing)"
        shown.add_row(case.defence, attack + note, percent(case.worst), percent(case.unattacked))
    console.print(shown)


def _planned(plan: StudyPlan, study: Study) -> dict[str, Any]:
    """Return what would run, for --json."""
    return {
        "name": plan.name,
        "folder": study.out,
        "runs": [{**cell.axes, "seed": cell.config.seed} for cell in plan.cells],
        "already_done": study.finished(),
        "workers": study.workers,
        "skipped": plan.skipped,
        "impossible": plan.impossible,
    }


def _outcome(results: list[Result], plan: StudyPlan, out: Path) -> dict[str, Any]:
    """Return the runs and each rule's worst case, for --json."""
    from cyber0.study.cells import measure_of
    from cyber0.study.judge import Score, judge, scores

    def figures(score: Score | None) -> dict[str, Any] | None:
        if score is None:
            return None
        return {"attack": score.attack, "mean": score.mean, "deviation": score.deviation, "values": score.accuracies,
                "done": score.done, "runs": score.runs}  # fmt: skip

    worst_cases = [
        {"rule": case.defence, "circumstances": case.circumstances, "worst": figures(case.worst),
         "unattacked": figures(case.unattacked), "complete": case.complete}
        for case in judge(scores(results, plan.layout))
    ]  # fmt: skip
    return {"name": plan.name, "folder": out, "measure": measure_of(results).name, "worst_cases": worst_cases,
            "runs": [result.row() for result in results]}  # fmt: skip


def _name_failures(results: list[Result], out: Path, again: str) -> int:
    """Name the runs that failed on stderr, and return how many there are."""
    from cyber0.study.engine import LOG, RESULTS

    failed = [r for r in results if r.status == "failed"]
    if not failed:
        return 0
    for result in failed[:MOST_SHOWN]:
        print(f"failed: {result.cell.label}: {result.error}", file=sys.stderr)
    more = f" (and {len(failed) - MOST_SHOWN} more, see {out / RESULTS})" if len(failed) > MOST_SHOWN else ""
    log = f"; {out / LOG} has the details" if (out / LOG).exists() else ""
    print(
        f"error: {len(failed)} of {len(results)} runs failed{more}{log}; run them again with: {again}", file=sys.stderr
    )
    return len(failed)
