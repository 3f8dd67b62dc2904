"""Table 6: local epochs, under attack on non-IID data; rounds are fewer by as much."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cyber0.config.keys import Value
from cyber0.reproduce import Order
from cyber0.reproduce import text as lm
from cyber0.reproduce.outputs import markdown_table
from cyber0.reproduce.text import PAPER_MODEL, TITLES, Measure, Table

EPOCHS: Mapping[int, Measure] = {1: (92.7, 0.4), 5: (92.6, 0.3), 50: (92.8, 0.5), 100: (92.4, 0.2)}
PAPER_TASK = "sst2"


def reproduce(order: Order) -> Path:
    """Play the table and set it beside the paper's."""
    tasks = lm.tasks_of(order, (PAPER_TASK,))
    cells = lm.make_cells(order, [
        lm.attacked(task, {"local_epochs": f"{epochs} local epochs"}, f"method.local_epochs={epochs}", share=1 / epochs)
        for task in tasks for epochs in EPOCHS
    ])  # fmt: skip
    table = Table(order, lm.run(order, cells), cells)
    head = ["set", "local epochs", "rounds", f"paper, {PAPER_MODEL}", f"ours, {table.model}", "on the test set",
            "numbers sent by a client"]  # fmt: skip
    rows = []
    for task in tasks:
        for epochs, paper in EPOCHS.items():
            place: dict[str, Value] = {"task": TITLES[task], "local_epochs": f"{epochs} local epochs"}
            config = next(c.config for c in cells if c.axes == place)
            ours = [lm.cell(table.accuracy(split, **place)) for split in (lm.SPLITS[task][0], "test")]
            rows.append([TITLES[task], epochs, f"{config.rounds:,}",
                         lm.paper_cell(paper if task == PAPER_TASK else None), *ours,
                         f"{config.rounds * epochs * config.method.k:,}"])  # fmt: skip
    lm.write_runs(table, "table6")
    lm.write_latex(table, "table6", (head, rows))
    title = "Table 6: accuracy (%) under attack, non-IID, by local epochs"
    return lm.finish(table, "table6", title, [markdown_table(head, rows)])
