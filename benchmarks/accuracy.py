"""Accuracy on MNIST beside the paper's: CyBeR-0's row of Table 1, and the ends of Figure 1b's curves.

python benchmarks/accuracy.py [--seeds 3] [--json FILE]      about 8 minutes on two cores

Each setting is what `cyber0 run --set ...` would run, over several seeds; mean and deviation of the last accuracy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from cyber0.config import Config, load
from cyber0.simulation import Simulation
from cyber0.tasks import make

FORTY = ["federation.clients=40"]
ALONE = ["federation.partition=by_label", "federation.byzantine=0", "aggregation.rule=mean"]
SETTINGS = [
    ("Table 1, alpha = beta = 0.125", [*FORTY, "federation.byzantine=5", "aggregation.beta=0.125"], "87.1 +- 0.8"),
    ("Table 1, alpha = beta = 0.25", [*FORTY, "federation.byzantine=10", "aggregation.beta=0.25"], "80.8 +- 1.0"),
    ("Table 1, alpha = beta = 0.375", [*FORTY, "federation.byzantine=15", "aggregation.beta=0.375"], "60.3 +- 2.9"),
    ("Figure 1b, k = 1, nobody lies", [*ALONE, "method.k=1"], "(curve only)"),
    ("Figure 1b, k = 64, nobody lies", ALONE, "(curve only)"),
    ("the default run", [], "(not in the paper)"),
]


def main() -> None:
    """Run every setting and show the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, task, rows = Console(), make(Config().task), []
    for name, overrides, paper in SETTINGS:
        accuracies = []
        for seed in range(arguments.seeds):
            simulation = Simulation(load(None, [*overrides, f"seed={seed}"]), task=task)
            while simulation.round < simulation.config.rounds:
                simulation.play_round()
            accuracies.append(100 * simulation.evaluate().accuracy)
        deviation = stdev(accuracies) if len(accuracies) > 1 else 0.0
        rows.append({"setting": name, "overrides": overrides, "paper": paper, "accuracies": accuracies,
                     "mean": mean(accuracies), "deviation": deviation})  # fmt: skip
        console.print(f"{name}: {mean(accuracies):.1f} +- {deviation:.1f}")
    table = Table(
        "setting", "paper", "ours", title=f"MNIST, accuracy in percent after 400 rounds, {arguments.seeds} seeds"
    )
    for row in rows:
        table.add_row(row["setting"], row["paper"], f"{row['mean']:.1f} +- {row['deviation']:.1f}")
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
