"""Table 2: SST-2, TREC and SNLI, IID and not, with and without Byzantine clients, next to central MeZO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from cyber0.reproduce import Request
from cyber0.reproduce import text as lm
from cyber0.reproduce import text_results as tr
from cyber0.reproduce.outputs import markdown_table
from cyber0.reproduce.text import NO_BYZANTINE, NON_IID, PAPER_MODEL, TITLES, MeanAndStd, Wanted
from cyber0.reproduce.text_results import TextResults

ZERO_SHOT, CENTRAL = "zero-shot", "central MeZO"
FEDERATED: Mapping[str, tuple[str, ...]] = {
    "IID": NO_BYZANTINE,
    "non-IID": (*NO_BYZANTINE, NON_IID),
    "Byzantine, IID": (),
    "Byzantine, non-IID": (NON_IID,),
}
PAPER: Mapping[str, tuple[MeanAndStd, ...]] = {
    "sst2": ((93.3, 0.7), (93.1, 0.3), (93.1, 0.2), (92.9, 0.4), (92.7, 0.4)),
    "trec": ((94.3, 1.3), (95.4, 0.3), (95.8, 0.4), (92.1, 1.5), (78.2, 0.7)),
    "snli": ((83.0, 1.0), (84.8, 0.3), (84.6, 0.7), (80.0, 0.4), (60.1, 4.9)),
}
"""Central MeZO, then as FEDERATED."""
SETTING_NAMES = (CENTRAL, *FEDERATED)


def wanted(task: str) -> list[Wanted]:
    """Return the runs of one data set, the untrained one first."""
    central = ("method.name=mezo", "federation.byzantine=0")
    return [
        Wanted(_place(task, ZERO_SHOT), task, NO_BYZANTINE, share=0, seeds=1),
        Wanted(_place(task, CENTRAL), task, central),
        *federated(task),
    ]


def federated(task: str) -> list[Wanted]:
    """Return the four federations of one data set; Figures 2 and 3 show the same runs."""
    return [Wanted(_place(task, name), task, settings) for name, settings in FEDERATED.items()]


def reproduce(request: Request) -> Path:
    """Run the table and compare it with the paper's."""
    tasks = lm.tasks_of(request, tuple(TITLES))
    cells = lm.make_cells(request, [one for task in tasks for one in wanted(task)])
    results = TextResults(request, lm.run(request, cells), cells)
    head = ["set", ZERO_SHOT, CENTRAL, *(f"CyBeR-0, {name}" for name in FEDERATED)]
    rows = [[title, *(tr.cell(results.accuracy(split, **_place(task, name))) for name in (ZERO_SHOT, *SETTING_NAMES))]
            for task in tasks for split, title in tr.split_titles(task).items()]  # fmt: skip
    beside = [_beside(results, task, name, paper) for task in tasks for name, paper in zip(SETTING_NAMES, PAPER[task],
                                                                                        strict=True)]  # fmt: skip
    tr.write_runs(results, "table2")
    tr.write_latex(results, "table2", (head, rows))
    return tr.finish(results, "table2", "Table 2: accuracy (%) with and without Byzantine clients", [
        markdown_table(head, rows), "",
        "## Beside the paper", "",
        markdown_table(["set", "setting", f"paper, {PAPER_MODEL}", f"ours, {results.model}", "difference"], beside), "",
        "The paper quotes central MeZO from Malladi et al. Ours has the same samples and steps as the federation, and "
        "one batch per step where the federation has one per client. Without Byzantine clients, and if a batch is all "
        "that a client has, the mean over the clients is that over all samples, however they were partitioned.", "",
        "## What the attack costs, in points of accuracy", "",
        markdown_table(["set", "data", f"paper, {PAPER_MODEL}", f"ours, {results.model}"],
                       [row for task in tasks for row in _costs(results, task)]),
    ])  # fmt: skip


def _place(task: str, setting: str) -> dict[str, str]:
    return {"task": TITLES[task], "setting": setting}


def _beside(results: TextResults, task: str, setting: str, paper: MeanAndStd) -> Sequence[str]:
    split, title = next(iter(tr.split_titles(task).items()))
    ours = results.accuracy(split, **_place(task, setting))
    return [title, setting, tr.paper_cell(paper), tr.cell(ours), tr.difference(ours, paper)]


def _costs(results: TextResults, task: str) -> list[list[str]]:
    """Return what the attack costs the paper and us on each kind of data."""
    split, title = next(iter(tr.split_titles(task).items()))
    paper = dict(zip(SETTING_NAMES, (mean for mean, _ in PAPER[task]), strict=True))
    rows = []
    for data in ("IID", "non-IID"):
        pair = (data, f"Byzantine, {data}")
        unattacked, attacked = (results.accuracy(split, **_place(task, name)) for name in pair)
        ours = f"{fmean(unattacked) - fmean(attacked):.1f}" if unattacked and attacked else "–"
        rows.append([title, data, f"{paper[pair[0]] - paper[pair[1]]:.1f}", ours])
    return rows
