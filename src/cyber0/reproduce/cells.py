"""Reproductions that are made of runs: how these are executed, resumed and read.

A cell is an ordinary run, and all cells of a reproduction form one study: they run in worker processes, can be resumed,
and cells with the same settings in several reproductions that share a folder run only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from cyber0.errors import ConfigError, Cyber0Error
from cyber0.reproduce import Request
from cyber0.reproduce.outputs import Row, drawn_from
from cyber0.runs.folder import read_table
from cyber0.storage import METRICS
from cyber0.study import Cell, Result, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STUDY = "study"  # the folder of the runs


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its runs, one per seed, evaluated after the same rounds."""

    name: str
    rounds: list[int]
    accuracy: list[list[float]]
    """In percent, one list per seed."""
    uplink: list[int]
    """Bytes sent by a client so far."""
    downlink: list[int]

    @property
    def mean(self) -> list[float]:
        return [fmean(column) for column in zip(*self.accuracy, strict=True)]

    @property
    def deviation(self) -> list[float]:
        return [deviation(column) for column in zip(*self.accuracy, strict=True)]

    def reached(self, target: float) -> int | None:
        """Return the index of the first evaluation at which the mean accuracy reaches the target, if any."""
        return next((place for place, accuracy in enumerate(self.mean) if accuracy >= target), None)


def check_overrides(request: Request) -> None:
    """Refuse a setting that would make all repetitions the same."""
    if any(setting.partition("=")[0].strip() == "seed" for setting in request.overrides):
        raise ConfigError("--set seed=... would make all repetitions the same run; set their number with --seeds")


def run_cells(request: Request, cells: list[Cell], *, workers: int | None = None, threads: int = 1) -> list[Result]:
    """Run the cells that are not done yet, and return the results of all."""
    from rich.console import Console

    from cyber0.study.display import StudyDisplay

    study = Study(cells, request.out / STUDY, workers, threads=threads, rerun=request.rerun)
    print_notes(request, study)
    with StudyDisplay(Console()) as show:
        results = study.results() if request.redraw else study.run(show)
    missing = [result for result in results if result.status != "done"]
    if missing and request.redraw:
        raise ConfigError(f"--redraw: {request.out} lacks {len(missing)} of these {len(cells)} runs, such as "
                          f"{missing[0].cell.label}; repeat the options it was made with, or run them without "
                          "--redraw")  # fmt: skip
    for result in missing:
        raise Cyber0Error(f"the run {result.cell.label} failed: {result.error}")
    drawn_from(request, len(results), len(cells))
    return results


def done(request: Request, cells: list[Cell]) -> list[Result]:
    """Return the results of the finished cells, without running any."""
    study = Study(cells, request.out / STUDY)
    if request.redraw:
        print_notes(request, study)
    return [result for result in study.results() if result.status == "done"]


def print_notes(request: Request, study: Study) -> None:
    """Say which finished runs this code, model and data might not reproduce."""
    from cyber0.study.display import notes

    for note in notes(study, rerun=request.rerun):
        request.progress(f"note: {note}")


def rows_of(request: Request, result: Result, name: str = METRICS) -> list[dict[str, str]]:
    """Return the rows of one of a run's CSV files, by default its evaluations."""
    return read_table(request.out / STUDY / result.folder / name)


def curves(request: Request, results: Sequence[Result], axis: str) -> list[Curve]:
    """Return a curve for each value of an axis, in order of appearance."""
    found = []
    for name in dict.fromkeys(str(result.cell.axes[axis]) for result in results):
        runs = [rows_of(request, result) for result in results if str(result.cell.axes[axis]) == name]
        found.append(Curve(
            name,
            [int(row["round"]) for row in runs[0]],
            [[100 * float(row["accuracy"]) for row in run] for run in runs],
            [int(row["uplink_bytes"]) for row in runs[0]],
            [int(row["downlink_bytes"]) for row in runs[0]],
        ))  # fmt: skip
    return found


def tidy(request: Request, results: Sequence[Result]) -> list[Row]:
    """Return one row per evaluation of every run."""
    rows: list[Row] = []
    for result in results:
        for row in rows_of(request, result):
            rows.append({**result.cell.axes, "seed": result.cell.config.seed, "round": row["round"],
                         "accuracy": row["accuracy"], "loss": row["loss"], "scalars_up": int(row["uplink_bytes"]) // 4,
                         "uplink_bytes": row["uplink_bytes"], "downlink_bytes": row["downlink_bytes"]})  # fmt: skip
    return rows


def deviation(values: Sequence[float]) -> float:
    """Return the sample deviation; 0 for one value."""
    return stdev(values) if len(values) > 1 else 0.0


def plus_minus(values: Sequence[float]) -> str:
    """Format mean and deviation in percent."""
    return f"{fmean(values):.1f} ± {deviation(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def band(axes: Axes, x: Sequence[float], mean: Sequence[float], spread: Sequence[float], **style: Any) -> None:
    """Plot a curve with a band of one deviation; x may lack the first points."""
    skip = len(mean) - len(x)
    mean, spread = mean[skip:], spread[skip:]
    (line,) = axes.plot(x, mean, **style)
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
