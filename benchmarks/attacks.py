"""What each attack does to the plain mean and to the trimmed mean, on MNIST dealt by label.

    python benchmarks/attacks.py                                     some 20 minutes on two cores
    python benchmarks/attacks.py --only sign_flip --only alie        these, and nobody lying
    python benchmarks/attacks.py --json docs/results/attacks.json    the accuracies as a file too

What the file already holds is not measured again: a run that was stopped can be gone on with. Delete it to begin anew.

12 clients, 3 of them Byzantine, k = 64, 400 rounds, every attack at its own strength, some at others, the other
settings those of the default run. Accuracy in percent after the last round, mean and deviation over the seeds. The
literal reading depends on b, and the mean has none. Two things are judged:

    sign_flip, ipm, alie, gaussian, min_max and min_sum lower the plain mean's accuracy by more than two deviations (the
    larger one of the two compared);
    under the trimmed mean full_knowledge does more damage than the paper's other attacks, in both readings.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from cyber0.config.registry import ATTACKS

RULES = ("mean", "trimmed_mean")
READ_TWO_WAYS = ("full_knowledge", "always_small", "always_large", "random_choice")
# Other strengths: Byzantine clients that send nearly nothing, so that only their labels are missed; and those of ByzFL.
OTHER_STRENGTHS = (("ipm", 1e-9), ("ipm", 2.0), ("alie", 1.5))
OF_THE_PAPER = ("always_small", "always_large", "random_choice", "label_flip")
MUST_HURT_THE_MEAN = ("sign_flip", "ipm", "alie", "gaussian", "min_max", "min_sum")


@dataclass(frozen=True)
class Case:
    """An attack in one of its readings, against a rule."""

    attack: str
    reading: str
    rule: str
    strength: float = 0.0

    def overrides(self, seed: int, rounds: int) -> list[str]:
        """Return the settings of a run."""
        return [
            "federation.partition=by_label", f"federation.attack={self.attack}", f"rounds={rounds}", f"seed={seed}",
            f"federation.attack_reading={self.reading}", f"aggregation.rule={self.rule}",
            f"federation.attack_strength={self.strength}",
        ]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The accuracies of a case in percent, one a seed."""

    accuracies: list[float]

    @property
    def mean(self) -> float:
        return mean(self.accuracies)

    @property
    def deviation(self) -> float:
        return stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.deviation:.1f}"


def cases(names: list[str]) -> list[Case]:
    """Return what is measured: every attack against both rules, and what else is worth knowing against one."""
    every = [
        *(Case(name, "accepted", rule) for name in names for rule in RULES),
        *(Case(name, "literal", "trimmed_mean") for name in names if name in READ_TWO_WAYS),
        *(Case(name, "accepted", "mean", strength) for name, strength in OTHER_STRENGTHS if name in names),
    ]
    judged_by = {"mean": ("none", *MUST_HURT_THE_MEAN), "trimmed_mean": ("full_knowledge", *OF_THE_PAPER)}
    return sorted(every, key=lambda case: case.attack not in judged_by[case.rule] or case.strength > 0)


def accuracy(overrides: list[str]) -> float:
    """Run one federation and return its last accuracy in percent."""
    from cyber0 import Simulation
    from cyber0.config.files import load

    simulation = Simulation(load(None, overrides))
    while simulation.round < simulation.config.rounds:
        simulation.run_round()
    return 100 * simulation.evaluate().accuracy


def measure(chosen: list[Case], seeds: int, rounds: int, processes: int, file: Path | None) -> dict[Case, Measured]:
    """Run every case with every seed, a few processes at a time with one thread each."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CYBER0_THREADS": "1"}
    console, found = Console(stderr=True), _read(file, seeds, rounds)
    missing = [case for case in chosen if case not in found]
    runs = [case.overrides(seed, rounds) for case in missing for seed in range(seeds)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        accuracies = pool.map(accuracy, runs)
        for case in missing:
            found[case] = Measured([next(accuracies) for _ in range(seeds)])
            console.print(f"[dim]{case.attack} ({case.reading}, {case.strength:g}), {case.rule}: {found[case]}[/]")
            _write(file, seeds, rounds, found)
    return {case: found[case] for case in chosen}


def _read(file: Path | None, seeds: int, rounds: int) -> dict[Case, Measured]:
    """Return what a file holds of measurements with as many seeds and rounds."""
    if file is None or not file.exists():
        return {}
    held = json.loads(file.read_text())
    if (held["seeds"], held["rounds"]) != (seeds, rounds):
        raise SystemExit(
            f"{file} was measured with {held['seeds']} seeds and {held['rounds']} rounds: name another file"
        )
    return {Case(**line["case"]): Measured(line["accuracies"]) for line in held["measured"]}


def _write(file: Path | None, seeds: int, rounds: int, found: dict[Case, Measured]) -> None:
    if file is not None:
        measured = [
            {"case": asdict(case), "accuracies": value.accuracies, "mean": value.mean, "deviation": value.deviation}
            for case, value in found.items()
        ]
        verdicts = [{"claim": text, "holds": holds} for text, holds in judged(found)]
        content = {"seeds": seeds, "rounds": rounds, "measured": measured, "judged": verdicts}
        file.write_text(json.dumps(content, indent=1) + "\n")


def judged(found: dict[Case, Measured]) -> Iterator[tuple[str, bool]]:
    """Yield what was to be shown, with the figures, and whether it was."""
    for name in MUST_HURT_THE_MEAN:
        attacked, quiet = found.get(Case(name, "accepted", "mean")), found.get(Case("none", "accepted", "mean"))
        if attacked and quiet:
            drop, deviation = quiet.mean - attacked.mean, max(quiet.deviation, attacked.deviation)
            text = f"{name} lowers the mean's accuracy by {drop:.1f}, more than twice the deviation of {deviation:.1f}"
            yield text, drop > 2 * deviation
    for reading in ("accepted", "literal"):
        worst = found.get(Case("full_knowledge", reading, "trimmed_mean"))
        others = {
            name: found[case].mean
            for name in OF_THE_PAPER
            if (case := Case(name, reading if name in READ_TWO_WAYS else "accepted", "trimmed_mean")) in found
        }
        if worst and len(others) == len(OF_THE_PAPER):
            text = f"full_knowledge ({reading}) leaves the trimmed mean {worst.mean:.1f}, less than "
            text += ", ".join(f"{name} {value:.1f}" for name, value in others.items())
            yield text, worst.mean < min(others.values())


def table_of(found: dict[Case, Measured], title: str) -> Table:
    """Return one line an attack and reading, one column a rule."""
    table = Table("attack", "reading or strength", *RULES, title=title)
    lines = dict.fromkeys((case.attack, case.reading, case.strength) for case in found)
    for name, reading, strength in sorted(lines, key=lambda line: list(ATTACKS).index(line[0])):
        shown = reading if name in READ_TWO_WAYS else f"{strength:g}" if strength else ""
        table.add_row(name, shown, *(str(found.get(Case(name, reading, rule, strength), "")) for rule in RULES))
    return table


def main() -> None:
    """Measure, show the table and the judgements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=ATTACKS, action="append", help="one attack; may be repeated")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the accuracies to FILE")
    arguments = parser.parse_args()
    chosen = cases([name for name in ATTACKS if name == "none" or name in (arguments.only or ATTACKS)])
    found = measure(chosen, arguments.seeds, arguments.rounds, arguments.processes, arguments.json)
    title = f"MNIST by label, accuracy in percent after {arguments.rounds} rounds, {arguments.seeds} seeds"
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(table_of(found, title))
    for text, holds in judged(found):
        console.print(f"{'[green]holds[/]' if holds else '[red]fails[/]'}  {text}", highlight=False)


if __name__ == "__main__":
    main()
