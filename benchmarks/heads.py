"""The tables of docs/measured/heads.md, from the results of two studies.

    cyber0 study examples/head_rates.toml
    cyber0 study examples/head_optimizers.toml
    python benchmarks/heads.py runs/study-head-rates/results.csv runs/study-head-optimizers/results.csv

A rate is chosen by the accuracy on held-out training samples (in the second study, its mean over the seeds), and what
is shown is the accuracy on the test set (of SST-2, the dev set).
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """What a run reached, in percent."""

    held_out: float
    test: float


def runs_by(path: Path, *columns: str) -> dict[tuple[str, ...], list[Run]]:
    """Return the finished runs of a study by the values of some columns."""
    found: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row["status"] == "done":
                run = Run(100 * float(row["final_validation_accuracy"]), 100 * float(row["final_accuracy"]))
                found[tuple(row[column] for column in columns)].append(run)
    return found


def mean(values: list[float]) -> str:
    """Write a mean with the sample deviation."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def rates(path: Path) -> list[str]:
    """Return a table of every optimizer's best rate, beside the rate "auto"."""
    studied = runs_by(path, "data", "method.optimizer", "method.lr")
    lines = ['| set | optimizer | best rate | held out | test | lr = "auto" | best of the grid by test |',
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for data, optimizer in dict.fromkeys(key[:2] for key in studied):
        grid = {lr: runs[0] for (d, o, lr), runs in studied.items() if (d, o) == (data, optimizer) and lr != "auto"}
        best = max(grid, key=lambda lr: grid[lr].held_out)
        auto = studied.get((data, optimizer, "auto"))
        top = max(grid, key=lambda lr: grid[lr].test)
        lines.append(
            f"| {data} | {optimizer} | {best} | {grid[best].held_out:.1f} | {grid[best].test:.1f} | "
            f"{f'{auto[0].test:.1f}' if auto else '–'} | {grid[top].test:.1f} ({top}) |"
        )
    return lines


def optimizers(path: Path) -> list[str]:
    """Return a table of the optimizers, each with the better of its rates, by what the clients do."""
    studied = runs_by(path, "data", "clients", "optimizer")
    situations = list(dict.fromkeys(clients for _, clients, _ in studied))
    lines = [f"| set | optimizer | {' | '.join(situations)} |", "|---|---|" + "---|" * len(situations)]
    for data in dict.fromkeys(key[0] for key in studied):
        best: dict[str, dict[str, str]] = defaultdict(dict)
        for name in dict.fromkeys(label.split()[0] for d, _, label in studied if d == data):
            labels = [label for d, _, label in studied if d == data and label.split()[0] == name]
            chosen = max(labels, key=lambda one: _held_out(studied[data, situations[0], one]))
            for clients in situations:
                if runs := studied.get((data, clients, chosen)):
                    best[chosen][clients] = mean([run.test for run in runs])
        for label in sorted(best, key=lambda one: -_held_out(studied[data, situations[0], one])):
            cells = " | ".join(best[label].get(clients, "") for clients in situations)
            lines.append(f"| {data} | {label.replace(' ', ', ')} | {cells} |")
    return lines


def _held_out(runs: list[Run]) -> float:
    return statistics.fmean(run.held_out for run in runs)


if __name__ == "__main__":
    print("\n".join([*rates(Path(sys.argv[1])), "", *optimizers(Path(sys.argv[2]))]))
