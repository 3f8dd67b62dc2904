"""A study's progress on the screen."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from cyber0.runs import environment
from cyber0.study.engine import EARLIER, Study
from cyber0.study.worker_pool import StudyProgress

if TYPE_CHECKING:
    from rich.console import Console


def notes(study: Study, *, rerun: bool) -> list[str]:
    """Describe the finished runs that this code, model and data might not reproduce."""
    lines, results = [], study.results()
    outdated = [result for result in results if result.outdated]
    if outdated:
        made = Counter(str(result.figures["code"]) or "an unknown version" for result in outdated)
        versions = ", ".join(f"{count} by {code}" for code, count in made.items())
        remedy = (f"they are run again, and the old ones moved to {study.out / EARLIER}" if rerun
                  else "they are reused; --rerun runs them again")  # fmt: skip
        lines.append(f"{len(outdated)} of the finished runs were made by another version than this one, "
                     f"{environment.code()} ({versions}); {remedy}")  # fmt: skip
    named = [result for result in results if result.status == "done" and result.cell.digest in study.by_name]
    if named:
        lines.append(
            f"{len(named)} of the finished runs used a model or data of the same name in another place, whose content "
            f"can't be compared; they are reused (if it was a different one, remove {named[0].folder} and the like)"
        )
    return lines


class StudyDisplay:
    """A bar and a line for each worker on a terminal; a line for each finished run elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Any = None
        self._drawn = 0.0

    def __enter__(self) -> StudyDisplay:
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
    """Format a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
