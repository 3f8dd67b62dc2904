"""Table 2: SST-2, TREC and SNLI, IID and not, with and without Byzantine clients, next to central MeZO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from cyber0.reproduce import Order
from cyber0.reproduce import text as lm
from cyber0.reproduce.outputs import markdown_table
from cyber0.reproduce.text import NOBODY_LIES, NON_IID, PAPER_MODEL, TITLES, Measure, Table, Wanted

ZERO_SHOT, CENTRAL = "zero-shot", "central MeZO"
FEDERATED: Mapping[str, tuple[str, ...]] = {
    "IID": NOBODY_LIES,
    "non-IID": (*NOBODY_LIES, NON_IID),
    "Byzantine, IID": (),
    "Byzantine, non-IID": (NON_IID,),
}
PAPER: Mapping[str, tuple[Measure, ...]] = {
    "sst2": ((93.3, 0.7), (93.1, 0.3), (93.1, 0.2), (92.9, 0.4), (92.7, 0.4)),
    "trec": ((94.3, 1.3), (95.4, 0.3), (95.8, 0.4), (92.1, 1.5), (78.2, 0.7)),
    "snli": ((83.0, 1.0), (84.8, 0.3), (84.6, 0.7), (80.0, 0.4), (60.1, 4.9)),
}
"""Central MeZO, then as FEDERATED."""
SETTINGS = (CENTRAL, *FEDERATED)


def wanted(task: str) -> list[Wanted]:
    """Return the runs of one set, the one that learns nothing first."""
    central = ("method.name=mezo", "federation.byzantine=0")
    return [
        Wanted(_place(task, ZERO_SHOT), task, NOBODY_LIES, share=0, seeds=1),
        Wanted(_place(task, CENTRAL), task, central),
        *federated(task),
    ]


def federated(task: str) -> list[Wanted]:
    """Return the four federations of one set; Figures 2 and 3 show the same runs."""
    return [Wanted(_place(task, name), task, settings) for name, settings in FEDERATED.items()]


def reproduce(order: Order) -> Path:
    """Play the table and set it beside the paper's."""
    tasks = lm.tasks_of(order, tuple(TITLES))
    cells = lm.make_cells(order, [one for task in tasks for one in wanted(task)])
    table = Table(order, lm.run(order, cells), cells)
    head = ["set", ZERO_SHOT, CENTRAL, *(f"CyBeR-0, {name}" for name in FEDERATED)]
    rows = [[title, *(lm.cell(table.accuracy(split, **_place(task, name))) for name in (ZERO_SHOT, *SETTINGS))]
            for task in tasks for split, title in lm.split_titles(task).items()]  # fmt: skip
    beside = [_beside(table, task, name, paper) for task in tasks for name, paper in zip(SETTINGS, PAPER[task],
                                                                                        strict=True)]  # fmt: skip
    lm.write_runs(table, "table2")
    lm.write_latex(table, "table2", (head, rows))
    return lm.finish(table, "table2", "Table 2: accuracy (%) with and without Byzantine clients", [
        markdown_table(head, rows), "",
        "## Beside the paper", "",
        markdown_table(["set", "setting", f"paper, {PAPER_MODEL}", f"ours, {table.model}", "difference"], beside), "",
        "The paper quotes central MeZO from Malladi et al. Ours has the same samples and steps as the federation, and "
        "one batch a step where the federation has one a client. Where nobody lies and a batch is all that a client "
        "has, the mean over the clients is that over all samples, however they were dealt.", "",
        "## What the attack costs, in points of accuracy", "",
        markdown_table(["set", "data", f"paper, {PAPER_MODEL}", f"ours, {table.model}"],
                       [row for task in tasks for row in _costs(table, task)]),
    ])  # fmt: skip


def _place(task: str, setting: str) -> dict[str, str]:
    return {"task": TITLES[task], "setting": setting}


def _beside(table: Table, task: str, setting: str, paper: Measure) -> Sequence[str]:
    split, title = next(iter(lm.split_titles(task).items()))
    ours = table.accuracy(split, **_place(task, setting))
    return [title, setting, lm.paper_cell(paper), lm.cell(ours), lm.difference(ours, paper)]


def _costs(table: Table, task: str) -> list[list[str]]:
    """Return what the paper and we lose to the liars on each kind of data."""
    split, title = next(iter(lm.split_titles(task).items()))
    paper = dict(zip(SETTINGS, (mean for mean, _ in PAPER[task]), strict=True))
    rows = []
    for data in ("IID", "non-IID"):
        pair = (data, f"Byzantine, {data}")
        honest, lied_to = (table.accuracy(split, **_place(task, name)) for name in pair)
        ours = f"{fmean(honest) - fmean(lied_to):.1f}" if honest and lied_to else "–"
        rows.append([title, data, f"{paper[pair[0]] - paper[pair[1]]:.1f}", ours])
    return rows
