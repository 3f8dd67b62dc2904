"""Table 6: local epochs, under attack on non-IID data; rounds are fewer by the same factor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cyber0.config.keys import Value
from cyber0.reproduce import Request
from cyber0.reproduce import text as lm
from cyber0.reproduce import text_results as tr
from cyber0.reproduce.outputs import markdown_table
from cyber0.reproduce.text import PAPER_MODEL, TITLES, MeanAndStd
from cyber0.reproduce.text_results import TextResults

EPOCHS: Mapping[int, MeanAndStd] = {1: (92.7, 0.4), 5: (92.6, 0.3), 50: (92.8, 0.5), 100: (92.4, 0.2)}
PAPER_TASK = "sst2"


def reproduce(request: Request) -> Path:
    """Run the table and compare it with the paper's."""
    tasks = lm.tasks_of(request, (PAPER_TASK,))
    cells = lm.make_cells(request, [
        lm.attacked(task, {"local_epochs": f"{epochs} local epochs"}, f"method.local_epochs={epochs}", share=1 / epochs)
        for task in tasks for epochs in EPOCHS
    ])  # fmt: skip
    results = TextResults(request, lm.run(request, cells), cells)
    head = ["set", "local epochs", "rounds", f"paper, {PAPER_MODEL}", f"ours, {results.model}", "on the test set",
            "scalars sent by a client"]  # fmt: skip
    rows = []
    for task in tasks:
        for epochs, paper in EPOCHS.items():
            place: dict[str, Value] = {"task": TITLES[task], "local_epochs": f"{epochs} local epochs"}
            config = next(c.config for c in cells if c.axes == place)
            ours = [tr.cell(results.accuracy(split, **place)) for split in (lm.EVALUATED_SPLITS[task][0], "test")]
            rows.append([TITLES[task], epochs, f"{config.rounds:,}",
                         tr.paper_cell(paper if task == PAPER_TASK else None), *ours,
                         f"{config.rounds * epochs * config.method.k:,}"])  # fmt: skip
    tr.write_runs(results, "table6")
    tr.write_latex(results, "table6", (head, rows))
    title = "Table 6: accuracy (%) under attack, non-IID, by local epochs"
    return tr.finish(results, "table6", title, [markdown_table(head, rows)])
