"""What the language models' runs gave: accuracies by place in a table, and the files that show them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from cyber0.config.keys import Value
from cyber0.reproduce import Request
from cyber0.reproduce.cells import STUDY, plus_minus, rows_of
from cyber0.reproduce.outputs import UNFINISHED, Row, latex_table, markdown_table, write_csv
from cyber0.reproduce.text import (
    EVALUATED_SPLITS,
    PAPER_MODEL,
    RECORDED,
    STEPS,
    TITLES,
    MeanAndStd,
    of_task,
    seeds_of,
    steps_of,
)
from cyber0.runs.folder import load_summary
from cyber0.storage import CLIENTS, PARTITION
from cyber0.study import Cell, Result


def summary_of(request: Request, result: Result) -> dict[str, Any]:
    """Return a run's figures."""
    return load_summary(request.out / STUDY / result.folder)


class TextResults:
    """The results of the runs, by place in a table.

    Args:
        request: What to reproduce.
        results: The finished runs.
        cells: All runs, finished or not.
    """

    def __init__(self, request: Request, results: Sequence[Result], cells: Sequence[Cell]) -> None:
        self.request, self.done, self.cells = request, results, cells
        self._summaries = [summary_of(request, result) for result in results]

    @property
    def model(self) -> str:
        """The model's name for tables."""
        return model_title(self.cells[0].config.task.model)

    def figures(self, key: str, **axes: Value) -> list[float]:
        """Return a figure of the runs at a place, one per seed that has it."""
        rows = zip(self.done, self._summaries, strict=True)
        return [float(summary[key]) for result, summary in rows
                if summary.get(key) is not None and axes.items() <= result.cell.axes.items()]  # fmt: skip

    def accuracy(self, split: str, **axes: Value) -> list[float]:
        """Return the final accuracies at a place, one per seed, in percent."""
        return [100 * value for value in self.figures(f"{split}_accuracy", **axes)]

    def rows(self) -> list[Row]:
        """Return one row per run, for a CSV file."""
        return [self._row(*pair) for pair in zip(self.done, self._summaries, strict=True)]

    def _row(self, result: Result, summary: Mapping[str, Any]) -> Row:
        config = result.cell.config  # has as numbers what the axes have as text
        splits = {f"{split}_accuracy": summary.get(f"{split}_accuracy") for split in ("dev", "test")}
        return {
            **result.cell.axes, "seed": config.seed, "model": self.model, "method": config.method.name, **splits,
            "zero_shot_accuracy": summary.get("initial_accuracy"), "loss": summary["final_loss"],
            "rounds": summary["rounds"], "k": config.method.k, "local_epochs": config.method.local_epochs,
            "lr": config.method.lr, "clients": config.federation.clients, "byzantine": config.federation.byzantine,
            "partition": config.federation.partition, "uplink_bytes": summary["uplink_bytes_per_client"],
            "dimension": summary["dimension"], "seconds": round(summary["wall_seconds"], 1),
            "model_digest": summary["model_digest"],
        }  # fmt: skip

    def evaluations(self) -> list[Row]:
        """Return one row per evaluation of every run, for a CSV file."""
        rows: list[Row] = []
        for result in self.done:
            for row in rows_of(self.request, result):
                kept = {key: row[key] for key in ("round", "accuracy", "loss", "train_loss", "uplink_bytes")}
                rows.append({**result.cell.axes, "seed": result.cell.config.seed, "model": self.model, **kept})
        return rows

    def clients(self) -> list[Row]:
        """Return one row per client of every run under attack, for a CSV file."""
        rows: list[Row] = []
        for result in self.done:
            if not result.cell.config.federation.byzantine:
                continue
            files = (rows_of(self.request, result, name) for name in (PARTITION, CLIENTS))
            for holds, came in zip(*files, strict=True):
                rows.append({**result.cell.axes, "seed": result.cell.config.seed,
                             "share_trimmed": came["share"], **holds})  # fmt: skip
        return rows


def finish(results: TextResults, name: str, title: str, lines: Sequence[str]) -> Path:
    """Write NAME.md: the given lines, and the settings of the runs."""
    request, path = results.request, results.request.out / f"{name}.md"
    steps = steps_of(request)
    scale = f" where the paper took {STEPS:,}, other lengths in proportion" if steps != STEPS else ""
    seeds = seeds_of(request)
    spread = f"{seeds} seeds, means ± sample deviation" if seeds > 1 else "one seed"
    tasks = {"", *(cell.config.task.name for cell in results.cells)}
    changes = "; ".join(f"`{o}`" for o in request.overrides if of_task(o)[0] in tasks).replace("\n", "\\n")
    changed = f" Changed by --set: {changes}." if changes else ""
    head = [f"# {title}", "", f"**Model: {results.model}.** The paper's is {PAPER_MODEL}. {steps:,} steps{scale}; "
            f"{spread}.{changed}"]  # fmt: skip
    if request.quick:
        head += ["", "**A preview: not comparable with the paper.**"]
    missing = len(results.cells) - len(results.done)
    if missing:
        head += ["", f"**{missing} of {len(results.cells)} {UNFINISHED}: means are over the finished seeds.**"]
    text = "\n".join([*head, "", *lines, "", "## Settings", "", settings_table(results.cells)])
    path.write_text(text + "\n", encoding="utf-8")
    return path


def write_latex(results: TextResults, name: str, *tables: tuple[Sequence[str], Sequence[Sequence[Any]]]) -> None:
    """Write NAME.tex: the tables, under a comment that names the model."""
    parts = [latex_table(head, rows) for head, rows in tables]
    text = f"% {results.model}, {steps_of(results.request):,} steps, {seeds_of(results.request)} seed(s)\n" + "\n".join(
        parts
    )
    (results.request.out / f"{name}.tex").write_text(text, encoding="utf-8")


def write_runs(results: TextResults, name: str) -> None:
    """Write NAME.csv, one row per run; who was Byzantine, had which labels and was trimmed; and every evaluation."""
    write_csv(results.request.out / f"{name}.csv", results.rows())
    write_csv(results.request.out / f"{name}.clients.csv", results.clients())
    write_csv(results.request.out / f"{name}.evaluations.csv", results.evaluations())


def settings_table(cells: Sequence[Cell]) -> str:
    """Return the settings of the runs for each data set; where runs differ, all their values."""
    tasks = dict.fromkeys(cell.config.task.name for cell in cells)
    trained = [cell.config for cell in cells if cell.config.rounds]
    rows = []
    for key in RECORDED:
        section, _, name = key.rpartition(".")
        values: list[list[Value]] = []
        for task in tasks:
            tables = [asdict(config) for config in trained if config.task.name == task]
            values.append(list(dict.fromkeys((t[section] if section else t)[name] for t in tables)))
        if any(value != "" for found in values for value in found):
            rows.append([f"`{key}`", *(", ".join(map(_shown, found)) for found in values)])
    return markdown_table(["setting", *(TITLES[task] for task in tasks)], rows)


def _shown(value: Value) -> str:
    if value == "":
        return "the task's own"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", "\\n").replace("|", "\\|")


def model_title(name: str) -> str:
    """Return a model's name for tables; for a .gguf file, with what it was dequantised from."""
    path = Path(name)
    if path.suffix == ".gguf":
        found = re.fullmatch(r"(.+)[.-]i?q(\d)(?:[_a-z0-9]*)", path.stem, re.IGNORECASE)
        return f"{found[1]}, dequantised from {found[2]} bit" if found else path.stem
    return path.name if path.is_absolute() else name


def paper_cell(measure: MeanAndStd | None) -> str:
    """Format the paper's value, if there is one."""
    return "–" if measure is None else f"{measure[0]:.1f} ± {measure[1]:.1f}"


def cell(values: Sequence[float]) -> str:
    """Format mean and deviation, or a dash if there is no run yet."""
    return plus_minus(values) if values else "–"


def difference(values: Sequence[float], paper: MeanAndStd | None) -> str:
    """Format by how much our mean is above the paper's."""
    return f"{fmean(values) - paper[0]:+.1f}" if values and paper else "–"


def split_titles(task: str) -> dict[str, str]:
    """Return the titles of the sets that a task's accuracy is reported on."""
    splits = EVALUATED_SPLITS[task]
    return {split: TITLES[task] if len(splits) == 1 else f"{TITLES[task]} ({split})" for split in splits}
