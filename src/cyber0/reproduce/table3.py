"""Table 3: directions per step and number of clients, under attack on non-IID data; and k with a scaled lr."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyber0.config.keys import Value
from cyber0.config.schema import Config, FederationConfig
from cyber0.reproduce import Request
from cyber0.reproduce import text as lm
from cyber0.reproduce import text_results as tr
from cyber0.reproduce.outputs import markdown_table
from cyber0.reproduce.text import PAPER_MODEL, TITLES, MeanAndStd, Wanted
from cyber0.reproduce.text_results import TextResults

PAPER_BY_DIRECTIONS: Mapping[int, MeanAndStd] = {1: (92.7, 0.4), 2: (92.5, 0.3), 4: (92.8, 0.5), 8: (92.7, 0.5)}
PAPER_BY_CLIENTS: Mapping[int, MeanAndStd] = {1: (92.7, 0.4), 2: (92.5, 0.4), 4: (92.3, 0.6)}
"""By multiple of the default number of clients: 8, 16 and 32 for SST-2, a quarter of them Byzantine."""
PAPER_TASK = "sst2"


def reproduce(request: Request) -> Path:
    """Run both halves of the table."""
    tasks = lm.tasks_of(request, (PAPER_TASK,))
    wanted = [one for task in tasks for one in (*_by_directions(task, lr=False), *_by_clients(task))]
    cells = lm.make_cells(request, wanted)
    results = TextResults(request, lm.run(request, cells), cells)
    k_head, k_rows = _directions_table(results, tasks)
    m_head = ["set", "m", "Byzantine", f"paper, {PAPER_MODEL}", *_ours(results)]
    m_rows = [row for task in tasks for row in _client_rows(results, task)]
    tr.write_runs(results, "table3")
    tr.write_latex(results, "table3", (k_head, k_rows), (m_head, m_rows))
    return tr.finish(results, "table3", "Table 3: accuracy (%) under attack, non-IID, by k and by m", [
        "## Directions per step", "", markdown_table(k_head, k_rows), "",
        "The learning rate is the same for every k, as the paper's settings say; `table3_lr` scales it by k.", "",
        "## Clients", "", markdown_table(m_head, m_rows),
    ])  # fmt: skip


def scaled_lr(request: Request) -> Path:
    """Run the half of k with a learning rate k times as large, so that all steps together are as long as with k = 1."""
    tasks = lm.tasks_of(request, (PAPER_TASK,))
    cells = lm.make_cells(request, [one for task in tasks for one in _by_directions(task, lr=True)])
    results = TextResults(request, lm.run(request, cells), cells)
    head, rows = _directions_table(results, tasks)
    tr.write_runs(results, "table3_lr")
    tr.write_latex(results, "table3_lr", (head, rows))
    title = "Table 3 with the learning rate scaled by k: accuracy (%) under attack, non-IID"
    return tr.finish(results, "table3_lr", title, [markdown_table(head, rows)])


def _by_directions(task: str, *, lr: bool) -> list[Wanted]:
    return [
        lm.attacked(task, _place(task, k, 1), f"method.k={k}", share=1 / k, lr_factor=k if lr else 1)
        for k in PAPER_BY_DIRECTIONS
    ]


def _by_clients(task: str) -> list[Wanted]:
    usual = _usual(task)
    return [
        lm.attacked(task, _place(task, 1, times), f"federation.clients={times * usual.clients}",
                    f"federation.byzantine={times * usual.byzantine}")
        for times in PAPER_BY_CLIENTS if times > 1
    ]  # fmt: skip


def _usual(task: str) -> FederationConfig:
    return Config().with_overrides([f"task.name={task}"]).federation


def _place(task: str, k: int, times: int) -> dict[str, Value]:
    return {"task": TITLES[task], "k": f"k = {k}", "clients": f"{times * _usual(task).clients} clients"}


def _directions_table(results: TextResults, tasks: tuple[str, ...]) -> tuple[list[str], list[list[Any]]]:
    head = ["set", "k", "steps", "lr", f"paper, {PAPER_MODEL}", *_ours(results), "scalars sent by a client"]
    return head, [row for task in tasks for row in _direction_rows(results, task)]


def _ours(results: TextResults) -> list[str]:
    return [f"ours, {results.model}", "on the test set"]


def _direction_rows(results: TextResults, task: str) -> list[list[Any]]:
    rows = []
    for k, paper in PAPER_BY_DIRECTIONS.items():
        place = _place(task, k, 1)
        config = next(c.config for c in results.cells if c.axes == place)
        rows.append([TITLES[task], k, f"{config.rounds:,}", config.method.lr, _paper(task, paper),
                     *_accuracies(results, task, place), f"{config.rounds * k:,}"])  # fmt: skip
    return rows


def _client_rows(results: TextResults, task: str) -> list[list[Any]]:
    rows = []
    for times, paper in PAPER_BY_CLIENTS.items():
        place = _place(task, 1, times)
        federation = next(c.config for c in results.cells if c.axes == place).federation
        rows.append([TITLES[task], federation.clients, federation.byzantine, _paper(task, paper),
                     *_accuracies(results, task, place)])  # fmt: skip
    return rows


def _paper(task: str, paper: MeanAndStd) -> str:
    return tr.paper_cell(paper if task == PAPER_TASK else None)


def _accuracies(results: TextResults, task: str, place: Mapping[str, Any]) -> list[str]:
    return [tr.cell(results.accuracy(split, **place)) for split in (lm.EVALUATED_SPLITS[task][0], "test")]
