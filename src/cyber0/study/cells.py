"""One run of a study: its place in the grid, its folder, and its result."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cyber0.config.files import load
from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.runs import environment
from cyber0.runs.folder import load_summary, read_metrics
from cyber0.storage import CONFIG, METRICS, write_text
from cyber0.study import identity

NAME_LENGTH = 100  # of the readable part of a folder's name

Status = Literal["done", "failed", "open"]
BEST = "best_metric"
"""The figure that names the task's own measure of the best round; it is not a column of results.csv."""
FIGURES = ("final_accuracy", "final_loss", "best_accuracy", "rounds", "uplink_bytes", "downlink_bytes", "seconds",
           "model_digest", "code")  # fmt: skip
RESULT_COLUMNS = ("seed", "status", *FIGURES, "error", "folder")
"""The columns of results.csv that follow the axes of the grid."""


@dataclass(frozen=True)
class Cell:
    """One run: its value on each axis, and its settings."""

    axes: Mapping[str, Value]
    config: Config

    @property
    def label(self) -> str:
        """The cell as people read it."""
        return ", ".join([*map(shown, self.axes.values()), f"seed {self.config.seed}"])

    @cached_property
    def digest(self) -> str:
        """Identifies the run: equal settings, model and data give an equal digest."""
        return identity.digest(self.config)

    @property
    def folder_name(self) -> str:
        """A readable name, made unique by the digest."""
        words = [*map(shown, self.axes.values()), f"s{self.config.seed}"]
        readable = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", word) for word in words)
        return f"{readable[:NAME_LENGTH].lstrip('.')}-{self.digest}"


@dataclass(frozen=True)
class Measure:
    """What runs are compared by: one of their final figures, and whether higher is better."""

    name: str = "accuracy"
    higher: bool = True

    @property
    def in_percent(self) -> bool:
        """Whether it is a fraction, which is shown in percent."""
        return self.name == "accuracy"

    @property
    def title(self) -> str:
        """Its name with its unit."""
        return f"{self.name} (%)" if self.in_percent else self.name

    def goodness(self, value: float) -> float:
        """Return a number that is larger for better values."""
        return value if self.higher else -value


ACCURACY = Measure()


def measure_of(results: Iterable[Result]) -> Measure:
    """Return what to compare results by: the measure their task names as `best`, else the accuracy, else the loss."""
    done = [result for result in results if result.status == "done"]
    named = {str(result.figures.get(BEST, "")) for result in done}
    best = named.pop() if len(named) == 1 else ""
    if best:
        return Measure(best.removeprefix("-"), higher=not best.startswith("-") and best != "loss")
    return ACCURACY if not done or any(r.accuracy is not None for r in done) else Measure("loss", higher=False)


@dataclass(frozen=True)
class Result:
    """The result of a cell. `figures` is empty unless it is done; then it has all of FIGURES, and the task's metrics.

    What the task does not measure is "".
    """

    cell: Cell
    status: Status
    folder: str
    figures: Mapping[str, Any]
    error: str = ""

    @property
    def outdated(self) -> bool:
        """Whether another version of the code produced it."""
        return self.status == "done" and self.figures["code"] != environment.code()

    @property
    def accuracy(self) -> float | None:
        """The final accuracy (0 to 1), if the run finished and its task has one."""
        found = self.figures["final_accuracy"] if self.status == "done" else ""
        return None if found == "" else float(found)

    def value(self, measure: Measure) -> float | None:
        """Return the figure that runs are compared by; one that is not finite counts as the worst possible."""
        if measure == ACCURACY:
            return self.accuracy
        found = self.figures.get(f"final_{measure.name}")
        return None if found is None else -measure.goodness(math.inf) if found == "" else float(found)

    def row(self) -> dict[str, Any]:
        """Return the line of results.csv."""
        rest = {"seed": self.cell.config.seed, "status": self.status, "error": self.error, "folder": self.folder}
        rest |= {name: self.figures.get(name, "") for name in FIGURES}
        return {
            **{name: shown(value) for name, value in self.cell.axes.items()},
            **{name: rest[name] for name in RESULT_COLUMNS},
            **{name: value for name, value in self.figures.items() if name not in (*FIGURES, BEST)},
        }


class Results:
    """The results of the cells so far. Cells with the same settings are one run."""

    def __init__(
        self, cells: Sequence[Cell], folders: Mapping[str, Path], out: Path,
        figures_of: Callable[[Cell, Path], dict[str, Any] | None],
    ) -> None:  # fmt: skip
        self.cells: list[Cell] = []
        self.folders, self._out, self._figures_of = dict(folders), out, figures_of
        self.figures: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.open: deque[Cell] = deque()
        self.add(cells, {})
        self.found = self.count(self.figures)

    def add(self, cells: Sequence[Cell], folders: Mapping[str, Path]) -> None:
        """Add cells; those that are not done become open."""
        known = {cell.digest for cell in self.cells}
        self.cells += cells
        self.folders |= folders
        for cell in cells:
            if cell.digest in known:
                continue
            known.add(cell.digest)
            figures = self._figures_of(cell, self.folders[cell.digest])
            if figures is None:
                self.open.append(cell)
            else:
                self.figures[cell.digest] = figures

    def count(self, digests: Mapping[str, Any]) -> int:
        """Return how many cells belong to these runs."""
        return sum(cell.digest in digests for cell in self.cells)

    def of(self, cell: Cell) -> Result:
        """Return the result of a cell so far."""
        folder = self.folders[cell.digest].relative_to(self._out).as_posix()
        if cell.digest in self.figures:
            return Result(cell, "done", folder, self.figures[cell.digest])
        if cell.digest in self.errors:
            return Result(cell, "failed", folder, {}, self.errors[cell.digest])
        return Result(cell, "open", folder, {})

    def listed(self) -> list[Result]:
        """Return the results of all cells, in their order."""
        return [self.of(cell) for cell in self.cells]


def shown(value: Value) -> str:
    """Format a value of an axis for files and the screen."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def short(name: str) -> str:
    """Return the short name of an axis: attack for federation.attack, method for method.name."""
    section, _, key = name.rpartition(".")
    return section if key == "name" and section else key


def check_folder(cell: Cell, folder: Path) -> None:
    """Refuse a folder that holds a run other than the cell's."""
    if not (folder / CONFIG).exists():
        return
    try:
        same = has_settings(folder, cell)
        rounds = load(folder / CONFIG).rounds
    except ConfigError as error:
        raise ConfigError(
            f"{folder / CONFIG} is damaged ({error}); restore it by `cyber0 repair {folder}`, or remove {folder}"
        ) from error
    wanted = cell.config.rounds
    if not same and rounds > wanted and has_settings(folder, replace(cell, config=replace(cell.config, rounds=rounds))):
        raise ConfigError(
            f"the run in {folder} was lengthened to {rounds} rounds, and this study's runs have {wanted}: move the "
            f"folder out of {folder.parent} to keep it; the same command then runs this one again with {wanted}"
        )
    if not same:
        raise ConfigError(
            f"{folder / CONFIG} was changed: it no longer has the settings of this run; move {folder} elsewhere"
        )


def has_settings(folder: Path, cell: Cell) -> bool:
    """Return whether a run's folder has the cell's settings; its model and data may have been moved or renamed."""
    recorded = load(folder / CONFIG)
    if identity.portable(recorded) == identity.portable(cell.config):
        return True
    return bool(identity.same_run(folder.name.rpartition("-")[2], recorded, cell.config))


def read_figures(cell: Cell, folder: Path) -> dict[str, Any] | None:
    """Return the figures of a finished run, or None if it is not finished, or is another run."""
    try:
        if not has_settings(folder, cell):
            return None
        summary, (rows, _) = load_summary(folder), read_metrics(folder / METRICS)
        best = max((row.accuracy for row in rows if not math.isnan(row.accuracy)), default="")
        metrics = {f"final_{name}": value for name, value in summary.get("metrics", {}).items() if name != "accuracy"}
        return {
            "final_accuracy": "" if summary["final_accuracy"] is None else float(summary["final_accuracy"]),
            "final_loss": "" if summary["final_loss"] is None else float(summary["final_loss"]),
            "best_accuracy": best,
            "rounds": int(summary["rounds"]),
            "uplink_bytes": int(summary["uplink_bytes_per_client"]),
            "downlink_bytes": int(summary["downlink_bytes_per_client"]),
            "seconds": round(float(summary["wall_seconds"]), 3),
            "model_digest": str(summary["model_digest"]),
            "code": environment.code_of(summary),
            BEST: str(summary.get("best_metric", "")),
            **{name: "" if value is None else float(value) for name, value in metrics.items()},
        }
    except (OSError, ConfigError, ValueError, KeyError, TypeError):
        return None  # resuming the run repairs it, or reports what is wrong


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows atomically."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return path
