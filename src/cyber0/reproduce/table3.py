"""Table 3: directions a step and number of clients, under attack on non-IID data; and k with a scaled learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyber0.config.keys import Value
from cyber0.config.schema import Config, FederationConfig
from cyber0.reproduce import Order
from cyber0.reproduce import text as lm
from cyber0.reproduce.outputs import markdown_table
from cyber0.reproduce.text import PAPER_MODEL, TITLES, Measure, Table, Wanted

DIRECTIONS: Mapping[int, Measure] = {1: (92.7, 0.4), 2: (92.5, 0.3), 4: (92.8, 0.5), 8: (92.7, 0.5)}
CLIENTS: Mapping[int, Measure] = {1: (92.7, 0.4), 2: (92.5, 0.4), 4: (92.3, 0.6)}
"""By how often the usual number of clients: 8, 16 and 32 of SST-2, a quarter of whom lies."""
PAPER_TASK = "sst2"


def reproduce(order: Order) -> Path:
    """Play both halves of the table."""
    tasks = lm.tasks_of(order, (PAPER_TASK,))
    wanted = [one for task in tasks for one in (*_by_directions(task, lr=False), *_by_clients(task))]
    cells = lm.make_cells(order, wanted)
    table = Table(order, lm.run(order, cells), cells)
    k_head, k_rows = _directions_table(table, tasks)
    m_head = ["set", "m", "Byzantine", f"paper, {PAPER_MODEL}", *_ours(table)]
    m_rows = [row for task in tasks for row in _client_rows(table, task)]
    lm.write_runs(table, "table3")
    lm.write_latex(table, "table3", (k_head, k_rows), (m_head, m_rows))
    return lm.finish(table, "table3", "Table 3: accuracy (%) under attack, non-IID, by k and by m", [
        "## Directions a step", "", markdown_table(k_head, k_rows), "",
        "The learning rate is the same for every k, as the paper's settings say; `table3_lr` scales it by k.", "",
        "## Clients", "", markdown_table(m_head, m_rows),
    ])  # fmt: skip


def scaled_lr(order: Order) -> Path:
    """Play the half of k with a learning rate that is k times as large: as far in all as with k = 1."""
    tasks = lm.tasks_of(order, (PAPER_TASK,))
    cells = lm.make_cells(order, [one for task in tasks for one in _by_directions(task, lr=True)])
    table = Table(order, lm.run(order, cells), cells)
    head, rows = _directions_table(table, tasks)
    lm.write_runs(table, "table3_lr")
    lm.write_latex(table, "table3_lr", (head, rows))
    title = "Table 3 with the learning rate scaled by k: accuracy (%) under attack, non-IID"
    return lm.finish(table, "table3_lr", title, [markdown_table(head, rows)])


def _by_directions(task: str, *, lr: bool) -> list[Wanted]:
    return [
        lm.attacked(task, _place(task, k, 1), f"method.k={k}", share=1 / k, lr_factor=k if lr else 1)
        for k in DIRECTIONS
    ]


def _by_clients(task: str) -> list[Wanted]:
    usual = _usual(task)
    return [
        lm.attacked(task, _place(task, 1, times), f"federation.clients={times * usual.clients}",
                    f"federation.byzantine={times * usual.byzantine}")
        for times in CLIENTS if times > 1
    ]  # fmt: skip


def _usual(task: str) -> FederationConfig:
    return Config().with_overrides([f"task.name={task}"]).federation


def _place(task: str, k: int, times: int) -> dict[str, Value]:
    return {"task": TITLES[task], "k": f"k = {k}", "clients": f"{times * _usual(task).clients} clients"}


def _directions_table(table: Table, tasks: tuple[str, ...]) -> tuple[list[str], list[list[Any]]]:
    head = ["set", "k", "steps", "lr", f"paper, {PAPER_MODEL}", *_ours(table), "numbers sent by a client"]
    return head, [row for task in tasks for row in _direction_rows(table, task)]


def _ours(table: Table) -> list[str]:
    return [f"ours, {table.model}", "on the test set"]


def _direction_rows(table: Table, task: str) -> list[list[Any]]:
    rows = []
    for k, paper in DIRECTIONS.items():
        place = _place(task, k, 1)
        config = next(c.config for c in table.cells if c.axes == place)
        rows.append([TITLES[task], k, f"{config.rounds:,}", config.method.lr, _paper(task, paper),
                     *_accuracies(table, task, place), f"{config.rounds * k:,}"])  # fmt: skip
    return rows


def _client_rows(table: Table, task: str) -> list[list[Any]]:
    rows = []
    for times, paper in CLIENTS.items():
        place = _place(task, 1, times)
        federation = next(c.config for c in table.cells if c.axes == place).federation
        rows.append([TITLES[task], federation.clients, federation.byzantine, _paper(task, paper),
                     *_accuracies(table, task, place)])  # fmt: skip
    return rows


def _paper(task: str, paper: Measure) -> str:
    return lm.paper_cell(paper if task == PAPER_TASK else None)


def _accuracies(table: Table, task: str, place: Mapping[str, Any]) -> list[str]:
    return [lm.cell(table.accuracy(split, **place)) for split in (lm.SPLITS[task][0], "test")]
