"""Each defence under its worst attack, beside what can be had without one: docs/measured/worst_attack.md.

    cyber0 study examples/worst_attack.toml                  some 20 minutes on two cores
    python benchmarks/worst_attack.py runs/study-worst-attack --json docs/results/worst_attack.json

The lines to beat: the mean over the honest clients alone, as if the federator knew who they are; and learning from the
trusted client's 100 samples alone. Both have the study's seeds, rounds and settings.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import numpy as np

from cyber0 import Config, Simulation
from cyber0.attacks import Knowledge, Matrix

SAMPLES = 100


def honest_alone(partition: str, seed: int, rounds: int) -> float:
    """Return the accuracy of the mean over the honest clients, whose number and shares are those of the study."""
    simulation = Simulation(Config().with_overrides([
        f"federation.partition={partition}", f"seed={seed}", f"rounds={rounds}", "aggregation.rule=mean",
    ]))  # fmt: skip
    simulation._attack = _silent
    return _trained(simulation, rounds)


def samples_alone(seed: int, rounds: int) -> float:
    """Return the accuracy of the trusted client's samples alone, all of them in every batch."""
    trusting = Simulation(Config().with_overrides([
        f"seed={seed}", "federation.clients=13", "aggregation.rule=fit_reference", f"aggregation.reference={SAMPLES}",
    ]))  # fmt: skip
    alone = Config().with_overrides([
        f"seed={seed}", f"rounds={rounds}", "federation.clients=1", "federation.byzantine=0", "aggregation.rule=mean",
        "aggregation.beta=0", f"method.batch_size={SAMPLES}",
    ])  # fmt: skip
    return _trained(Simulation(alone, task=trusting.task.keep(trusting.shares[0])), rounds)


def _silent(known: Knowledge) -> Matrix:
    return np.full((known.byzantine, known.honest.shape[1]), np.nan)  # refused at the door


def _trained(simulation: Simulation, rounds: int) -> float:
    for _ in range(rounds):
        simulation.run_round()
    return 100 * simulation.evaluate().accuracy


def studied(folder: Path) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the accuracies of a study in percent, one a seed, by partition, defence and attack."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with (folder / "results.csv").open() as file:
        for row in csv.DictReader(file):
            place = found[row["federation.partition"]][row["defence"]]
            place[row["federation.attack"]].append(100 * float(row["final_accuracy"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    seeds, found = range(given.seeds), studied(given.study)
    honest = {p: [honest_alone(p, seed, given.rounds) for seed in seeds] for p in found}
    alone = [samples_alone(seed, given.rounds) for seed in seeds]
    for partition, defences in found.items():
        attacks = sorted({attack for defence in defences.values() for attack in defence} - {"none"})
        lines = f"honest clients alone {mean(honest[partition]):.1f}, {SAMPLES} samples alone {mean(alone):.1f}"
        print(f"\n{partition}: {lines}\n")
        print("| defence | worst | " + " | ".join(["none", *attacks]) + " |")
        print("|---" * (len(attacks) + 3) + "|")
        for name, by_attack in defences.items():
            worst = min(attacks, key=lambda attack: mean(by_attack[attack]))
            figures = [f"{mean(by_attack[attack]):.1f}" for attack in ("none", *attacks)]
            print(f"| {name} | **{mean(by_attack[worst]):.1f}** ({worst}) | " + " | ".join(figures) + " |")
    if given.json:
        given.json.write_text(json.dumps(
            {"rounds": given.rounds, "honest_alone": honest, "samples_alone": alone, "accuracy": found}, indent=1,
        ) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
