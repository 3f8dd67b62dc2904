"""Figures 2 (SST-2) and 3 (TREC, SNLI): the training loss over steps, with and without Byzantine clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from cyber0.errors import ConfigError
from cyber0.reproduce import Request, table2
from cyber0.reproduce import text as lm
from cyber0.reproduce import text_results as tr
from cyber0.reproduce.cells import band, deviation, rows_of
from cyber0.reproduce.outputs import markdown_table, write_csv, write_figure
from cyber0.reproduce.text import TITLES
from cyber0.reproduce.text_results import TextResults

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LossCurve:
    """The training loss of one setting: the steps, and one list of losses per seed."""

    name: str
    steps: list[float]
    loss: list[list[float]]

    @property
    def mean(self) -> list[float]:
        return [fmean(column) for column in zip(*self.loss, strict=True)]

    @property
    def deviation(self) -> list[float]:
        return [deviation(column) for column in zip(*self.loss, strict=True)]

    @property
    def end(self) -> str:
        spread = f" ± {self.deviation[-1]:.3f}" if len(self.loss) > 1 else ""
        return f"{self.mean[-1]:.3f}{spread}"


def on_sst2(request: Request) -> Path:
    """Figure 2."""
    return _reproduce(request, "fig2", ("sst2",))


def on_trec_and_snli(request: Request) -> Path:
    """Figure 3."""
    return _reproduce(request, "fig3", ("trec", "snli"))


def _reproduce(request: Request, name: str, shown: Sequence[str]) -> Path:
    tasks = [task for task in lm.tasks_of(request, shown) if task in shown]
    cells = lm.make_cells(request, [one for task in tasks for one in table2.federated(task)])
    results = TextResults(request, lm.run(request, cells), cells)
    panels = {task: _lines(results, task) for task in tasks}
    write_csv(request.out / f"{name}.csv", results.evaluations())
    write_figure(request.out, name, _figure(results, panels))
    rows = [[TITLES[task], line.name, f"{line.mean[0]:.3f}", line.end]
            for task, lines in panels.items() for line in lines]  # fmt: skip
    claims = [row for task, lines in panels.items() for row in _claims(task, lines)]
    return tr.finish(results, name, f"Figure {name[-1]}: training loss over steps", [
        markdown_table(["set", "setting", "loss at the start", "at the end"], rows), "",
        markdown_table(["the paper says", "set", "data", "here"], claims), "",
        "The paper shows curves without numbers. The loss is over all training samples.",
    ])  # fmt: skip


def _lines(results: TextResults, task: str) -> list[LossCurve]:
    lines = []
    for name in table2.FEDERATED:
        place = {"task": TITLES[task], "setting": name}
        runs = [rows_of(results.request, result) for result in results.done if result.cell.axes == place]
        if runs:
            if not runs[0][0]["train_loss"]:
                raise ConfigError(f"{TITLES[task]}: the training loss is not measured for so many samples; lower "
                                  "task.samples (the paper has 512)")  # fmt: skip
            steps = [float(row["round"]) for row in runs[0]]
            lines.append(LossCurve(name, steps, [[float(row["train_loss"]) for row in run] for run in runs]))
    return lines


def _claims(task: str, lines: Sequence[LossCurve]) -> list[list[str]]:
    ends = {line.name: line.mean[-1] for line in lines}
    rows = []
    for data in ("IID", "non-IID"):
        unattacked, attacked = ends.get(data), ends.get(f"Byzantine, {data}")
        if unattacked is not None and attacked is not None:
            alike = f"{attacked:.3f}" == f"{unattacked:.3f}"  # as after a few steps, before anything is learned
            claim = "undecided" if alike else "yes" if attacked > unattacked else "**no**"
            here = f"{claim}: {attacked:.3f} at the end, without them {unattacked:.3f}"
            rows.append(["Byzantine clients slow it down", TITLES[task], data, here])
    return rows


def _figure(results: TextResults, panels: dict[str, list[LossCurve]]) -> Figure:
    from cyber0.report.plots import COLOURS, new_figure, plain

    figure = new_figure(results.model, width=1.2 + 5.2 * len(panels), height=4.2)
    colours = dict(zip(table2.FEDERATED, COLOURS, strict=False))
    for axes, (task, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for line in lines:
            style = {"color": colours[line.name], "linestyle": "--" if "Byzantine" in line.name else "-"}
            band(axes, line.steps, line.mean, line.deviation, label=line.name, **style)
        axes.set_title(TITLES[task])
        axes.set_xlabel("Steps")
        axes.set_ylabel("Training loss")
        axes.legend(frameon=False)
        plain(axes)
    return figure
