"""Is `method.lr = "auto"` as good as the best of a grid? MNIST, regressions and a ReLU network, simulated.

    python benchmarks/auto_rate.py --json docs/results/auto_rate.json    some 40 minutes on two cores
    python benchmarks/auto_rate.py --only "mnist, k = 1" --optimizer adaptive
    python benchmarks/auto_rate.py --grid docs/results/auto_rate.json    compares with the grid measured before

For each case, optimizer and schedule it trains with the rate that is measured, with the rate that a federator without
data takes (for optimizers that have one), and with 0.01 times powers of 2, from the one next to the measured rate
outward until the best is not at an end. Accuracies are means over the seeds of the case; of ridge regression, it is
the share of the variance that is explained. The constants of diagnose/rate.py were chosen with seed 0 and those of
diagnose/trial_runs.py with seeds 0, 6 and 7, so these are not used here.

A run with a rate that is given has the same bits each time, so with `--grid` those of an earlier output are not run
again, nor are those of the federator.
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

import cyber0
from cyber0.config.schema import Config
from cyber0.diagnose.rate import measured_lr
from cyber0.federation.build import lr_without_data, make_optimizer
from cyber0.federation.simulation import Simulation

SCHEDULES = ("constant", "linear")
OPTIMIZERS = ("sgd", "adaptive")


class Spam(cyber0.Task):
    """The task of docs/tutorials/own_task.md: a small ReLU network, whose loss is flat at the starting weights."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(57, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def train_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._samples()[0]

    def test_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._samples()[1]

    @staticmethod
    def _samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(0)
        words = torch.randn(57, generator=random)
        counts = [torch.randn(samples, 57, generator=random) for samples in (1200, 400)]
        return [(some, (some @ words > 0).long()) for some in counts]


class Case(NamedTuple):
    """Settings under which rates are compared."""

    settings: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2)
    task: type[cyber0.Task] | None = None


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
    "ReLU network, k = 64, 3 of 12 Byzantine": Case(("rounds=150",), seeds=(1, 2, 3, 4, 5), task=Spam),
    "ReLU network, k = 64": Case(("rounds=150", "federation.byzantine=0"), seeds=(1, 2, 3, 4, 5), task=Spam),
}


def main() -> None:
    """Compare, print a line per case, and write all of it as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path)
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--optimizer", choices=OPTIMIZERS, help="this one alone")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--grid", type=Path, help="an earlier output, whose runs with given rates are not repeated")
    given = options.parse_args()
    earlier = json.loads(given.grid.read_text())["cases"] if given.grid else []
    optimizers = (given.optimizer,) if given.optimizer else OPTIMIZERS
    wanted = [
        (name, optimizer, schedule, known(earlier, name, optimizer, schedule))
        for name in CASES
        for optimizer in optimizers
        for schedule in SCHEDULES
        if given.only in name
    ]
    about = {"torch": torch.__version__, "threads": 1}
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for row in pool.map(compared, *zip(*wanted, strict=True)):
            found.append(row)
            print(line(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")


def known(earlier: list[dict[str, Any]], name: str, optimizer: str, schedule: str) -> dict[float, float]:
    """Return the accuracies of a case by learning rate that an earlier output has, if its seeds were the same."""
    found = {}
    for row in earlier:
        if [row["case"], row["optimizer"], row["schedule"], row["seeds"]] == [
            name, optimizer, schedule, list(CASES[name].seeds),
        ]:  # fmt: skip
            found |= {
                point["lr"]: point["accuracy"] for point in [*row["grid"], *filter(None, [row.get("without data")])]
            }
    return found


def compared(name: str, optimizer: str, schedule: str, known: dict[float, float]) -> dict[str, Any]:
    """Return the accuracy with the measured rate, with that of a federator, and with those of the grid."""
    started, case = time.perf_counter(), CASES[name]
    settings = [*case.settings, f"method.optimizer={optimizer}", f"method.lr_schedule={schedule}"]
    configs = [Config().with_overrides([*settings, f"seed={seed}"]) for seed in case.seeds]
    auto = [trained(config.with_overrides(["method.lr=auto"]), case.task) for config in configs]

    def at(lr: float) -> float:
        """Return the mean accuracy with a learning rate."""
        if lr not in known:
            runs = [trained(config.with_overrides([f"method.lr={lr!r}"]), case.task) for config in configs]
            known[lr] = float(np.mean([run.accuracy for run in runs]))
        return known[lr]

    result: dict[str, Any] = {"case": name, "optimizer": optimizer, "schedule": schedule, "seeds": case.seeds}
    result["auto"] = {
        "lr": [run.lr for run in auto],
        "accuracy": float(np.mean([run.accuracy for run in auto])),
        "cost": float(np.mean([run.cost for run in auto])),
    }
    if make_optimizer(configs[0]).scale_free:
        lr = lr_without_data(configs[0])
        result["without data"] = {"lr": lr, "accuracy": at(lr)}
    grid: dict[int, float] = {}
    middle = round(math.log2(float(np.mean(result["auto"]["lr"])) / 0.01))
    earlier = [power for power in range(-20, 20) if 0.01 * 2.0**power in known]
    for power in {middle, middle - 1, middle + 1, *earlier}:
        grid[power] = at(0.01 * 2.0**power)
    while (best := max(grid, key=grid.__getitem__)) in (min(grid), max(grid)):
        power = best - 1 if best == min(grid) else best + 1
        grid[power] = at(0.01 * 2.0**power)
    result["grid"] = [{"lr": 0.01 * 2.0**power, "accuracy": grid[power]} for power in sorted(grid)]
    result["best"] = {"lr": 0.01 * 2.0**best, "accuracy": grid[best]}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


class Trained(NamedTuple):
    """What a run gave."""

    lr: float
    accuracy: float
    cost: float
    """Rounds of the trial runs behind the rate, as a multiple of those of the run."""


def trained(config: Config, task: type[cyber0.Task] | None) -> Trained:
    """Train, and return the learning rate and the final accuracy."""
    simulation = Simulation(config, measure_lr=measured_lr, task=None if task is None else task())
    for _ in range(config.rounds):
        simulation.run_round()
    search = simulation.lr_search
    cost = search["trials"] * search["rounds"] / config.rounds if search else 0.0
    return Trained(simulation.ledger.header.lr, simulation.evaluate().accuracy, cost)


def line(row: dict[str, Any]) -> str:
    """Return one result in words."""
    auto, best = row["auto"], row["best"]
    own = row.get("without data")
    federator = f", a federator's {own['lr']:g}: {own['accuracy']:.2%}" if own else ""
    return (
        f"{row['case']}, {row['optimizer']}, {row['schedule']}: auto {np.mean(auto['lr']):.3g}: "
        f"{auto['accuracy']:.2%} for {auto['cost']:.1f} runs{federator}; best of the grid {best['lr']:g}: "
        f"{best['accuracy']:.2%} ({100 * (auto['accuracy'] - best['accuracy']):+.2f})"
    )


if __name__ == "__main__":
    main()
