"""Is `method.lr = "auto"` as good as the best of a grid? MNIST, ridge and logistic regression, simulated.

    python benchmarks/auto_rate.py --json docs/results/auto_rate.json    some 25 minutes on two cores
    python benchmarks/auto_rate.py --only "mnist, k = 1" --optimizer adaptive

For each case, optimizer and schedule it trains with the rate that is measured, with the rate that a federator without
data takes (for optimizers that have one), and with 0.01 times powers of 2, from the one next to the measured rate
outward until the best is not at an end. Accuracies are means over the seeds of the case; of ridge regression, it is
the share of the variance that is explained. The constants of diagnose/rate.py were chosen with seed 0, so that one is
not used here.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cyber0.config.schema import Config
from cyber0.diagnose.rate import measured_lr
from cyber0.federation.build import lr_without_data, make_optimizer
from cyber0.federation.simulation import Simulation

SCHEDULES = ("constant", "linear")
OPTIMIZERS = ("sgd", "adaptive")


class Case(NamedTuple):
    """Settings under which rates are compared."""

    settings: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2)


CASES = {
    "mnist, k = 64, 3 of 12 Byzantine": Case(("method.k=64", "rounds=400")),
    "mnist, k = 64": Case(("method.k=64", "rounds=400", "federation.byzantine=0")),
    "mnist, k = 4, 3 of 12 Byzantine": Case(("method.k=4", "rounds=600")),
    "mnist, k = 1": Case(("method.k=1", "rounds=1000", "federation.byzantine=0")),
    "mnist, k = 16, batches of 8": Case(("method.k=16", "rounds=400", "federation.byzantine=0", "method.batch_size=8")),
    "mnist, k = 16, 768 samples, full batches": Case(
        ("method.k=16", "rounds=400", "federation.byzantine=0", "task.samples=768")
    ),
    "ridge, k = 16, 3 of 12 Byzantine": Case(("task.name=ridge", "method.k=16", "rounds=300"), seeds=(1, 2, 3, 4, 5)),
    "logistic, k = 16, 3 of 12 Byzantine": Case(
        ("task.name=logistic", "method.k=16", "rounds=300"), seeds=(1, 2, 3, 4, 5)
    ),
}


def main() -> None:
    """Compare, print a line per case, and write all of it as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path)
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--optimizer", choices=OPTIMIZERS, help="this one alone")
    options.add_argument("--workers", type=int, default=2)
    given = options.parse_args()
    optimizers = (given.optimizer,) if given.optimizer else OPTIMIZERS
    wanted = [
        (name, optimizer, schedule)
        for name in CASES
        for optimizer in optimizers
        for schedule in SCHEDULES
        if given.only in name
    ]
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for row in pool.map(compared, *zip(*wanted, strict=True)):
            found.append(row)
            print(line(row), flush=True)
    if given.json:
        about = {"torch": torch.__version__, "threads": 1}
        given.json.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")


def compared(name: str, optimizer: str, schedule: str) -> dict[str, Any]:
    """Return the accuracy with the measured rate, with that of a federator, and with those of the grid."""
    started, case = time.perf_counter(), CASES[name]
    settings = [*case.settings, f"method.optimizer={optimizer}", f"method.lr_schedule={schedule}"]
    configs = [Config().with_overrides([*settings, f"seed={seed}"]) for seed in case.seeds]
    auto = [trained(config.with_overrides(["method.lr=auto"])) for config in configs]
    lrs, accuracies = zip(*auto, strict=True)
    result: dict[str, Any] = {"case": name, "optimizer": optimizer, "schedule": schedule, "seeds": case.seeds}
    result["auto"] = {"lr": lrs, "accuracy": float(np.mean(accuracies))}
    if make_optimizer(configs[0]).scale_free:
        lr = lr_without_data(configs[0])
        result["without data"] = {"lr": lr, "accuracy": at(lr, configs)}
    grid: dict[int, float] = {}
    middle = round(math.log2(float(np.mean(lrs)) / 0.01))
    for power in (middle, middle - 1, middle + 1):
        grid[power] = at(0.01 * 2.0**power, configs)
    while (best := max(grid, key=grid.__getitem__)) in (min(grid), max(grid)):
        power = best - 1 if best == min(grid) else best + 1
        grid[power] = at(0.01 * 2.0**power, configs)
    result["grid"] = [{"lr": 0.01 * 2.0**power, "accuracy": grid[power]} for power in sorted(grid)]
    result["best"] = {"lr": 0.01 * 2.0**best, "accuracy": grid[best]}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def at(lr: float, configs: list[Config]) -> float:
    """Return the mean accuracy with a learning rate."""
    return float(np.mean([trained(config.with_overrides([f"method.lr={lr!r}"]))[1] for config in configs]))


def trained(config: Config) -> tuple[float, float]:
    """Train, and return the learning rate and the final accuracy."""
    simulation = Simulation(config, measure_lr=measured_lr)
    for _ in range(config.rounds):
        simulation.run_round()
    return simulation.ledger.header.lr, simulation.evaluate().accuracy


def line(row: dict[str, Any]) -> str:
    """Return one result in words."""
    auto, best = row["auto"], row["best"]
    own = row.get("without data")
    federator = f", a federator's {own['lr']:g}: {own['accuracy']:.2%}" if own else ""
    return (
        f"{row['case']}, {row['optimizer']}, {row['schedule']}: auto {np.mean(auto['lr']):.3g}: "
        f"{auto['accuracy']:.2%}{federator}; best of the grid {best['lr']:g}: {best['accuracy']:.2%} "
        f"({100 * (auto['accuracy'] - best['accuracy']):+.2f})"
    )


if __name__ == "__main__":
    main()
