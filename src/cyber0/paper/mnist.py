"""The experiments on MNIST (Section 4.2 and Appendix A.2): what they have in common.

Logistic regression, 400 steps, learning rate 0.01, batches of 64, mu 0.001: the defaults of a config. A cell is an
ordinary run; all cells of a reproduction lie in one study, so that it is played over the cores and resumed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from cyber0.config import Config
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.paper import Order
from cyber0.paper.outputs import Row
from cyber0.settings import Value
from cyber0.study import Cell, Result, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDS, QUICK_ROUNDS = 400, 40
SEEDS, QUICK_SEEDS = 3, 1
STUDY = "study"  # the folder of the runs


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its runs, one a seed, evaluated after the same rounds."""

    name: str
    rounds: list[int]
    accuracy: list[list[float]]
    """In percent, one list a seed."""
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
        """Return the place of the first evaluation at which the mean accuracy is at the target, if it is ever."""
        return next((place for place, accuracy in enumerate(self.mean) if accuracy >= target), None)


def seeds_of(order: Order) -> int:
    """Return how many seeds are wanted."""
    return order.seeds or (QUICK_SEEDS if order.quick else SEEDS)


def make_cells(order: Order, wanted: Iterable[tuple[Mapping[str, Value], Sequence[str]]]) -> list[Cell]:
    """Return a cell for each seed of each (place on the axes, settings); `--set` has the last word."""
    if any(setting.partition("=")[0].strip() == "seed" for setting in order.overrides):
        raise ConfigError("--set seed=... would make all repetitions the same run; say how many by --seeds")
    length = f"rounds={QUICK_ROUNDS if order.quick else ROUNDS}"
    return [
        Cell(axes, Config().with_overrides([length, f"seed={seed}", *settings, *order.overrides]))
        for axes, settings in wanted
        for seed in range(seeds_of(order))
    ]


def play(order: Order, cells: list[Cell]) -> list[Result]:
    """Play the cells, those that are done already excepted."""
    from rich.console import Console

    from cyber0.study.command import Display

    with Display(Console()) as show:
        results = Study(cells, order.out / STUDY).play(show)
    for result in results:
        if result.status != "done":
            raise Cyber0Error(f"the run {result.cell.label} failed: {result.error or 'it was not played'}")
    return results


def rows_of(order: Order, result: Result) -> list[dict[str, str]]:
    """Return the evaluations of a run."""
    with (order.out / STUDY / result.folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curves(order: Order, results: Sequence[Result], axis: str) -> list[Curve]:
    """Return a curve for each value of an axis, in the order in which they come."""
    found = []
    for name in dict.fromkeys(str(result.cell.axes[axis]) for result in results):
        runs = [rows_of(order, result) for result in results if str(result.cell.axes[axis]) == name]
        found.append(Curve(
            name,
            [int(row["round"]) for row in runs[0]],
            [[100 * float(row["accuracy"]) for row in run] for run in runs],
            [int(row["uplink_bytes"]) for row in runs[0]],
            [int(row["downlink_bytes"]) for row in runs[0]],
        ))  # fmt: skip
    return found


def tidy(order: Order, results: Sequence[Result]) -> list[Row]:
    """Return one row an evaluation of every run."""
    rows: list[Row] = []
    for result in results:
        for row in rows_of(order, result):
            rows.append({**result.cell.axes, "seed": result.cell.config.seed, "round": row["round"],
                         "accuracy": row["accuracy"], "loss": row["loss"], "scalars_up": int(row["uplink_bytes"]) // 4,
                         "uplink_bytes": row["uplink_bytes"], "downlink_bytes": row["downlink_bytes"]})  # fmt: skip
    return rows


def deviation(values: Sequence[float]) -> float:
    """Return the sample deviation; 0 for one value."""
    return stdev(values) if len(values) > 1 else 0.0


def plus_minus(values: Sequence[float]) -> str:
    """Write mean and deviation in percent."""
    return f"{fmean(values):.1f} ± {deviation(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def band(axes: Axes, x: Sequence[float], curve: Curve, **style: Any) -> None:
    """Draw a curve with a band of one deviation; x may lack the first points."""
    skip = len(curve.mean) - len(x)
    mean, spread = curve.mean[skip:], curve.deviation[skip:]
    (line,) = axes.plot(x, mean, label=curve.name, **style)
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def settings_line(order: Order) -> str:
    """Say how it was made, for the end of a comparison."""
    rounds = QUICK_ROUNDS if order.quick else ROUNDS
    changed = f"; changed by --set: {', '.join(order.overrides)}" if order.overrides else ""
    return f"{seeds_of(order)} seed(s), {rounds} steps{changed}. Means ± sample deviation over seeds."


def finish(order: Order, name: str, lines: Sequence[str]) -> Path:
    """Write the comparison; a quick one says first that it is none."""
    title, *rest = lines
    warning = (
        ["", f"**A quick look at {QUICK_ROUNDS} steps: not to be compared with the paper.**"] if order.quick else []
    )
    path = order.out / f"{name}.md"
    path.write_text("\n".join([title, *warning, *rest]) + "\n", encoding="utf-8")
    return path
