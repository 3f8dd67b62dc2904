"""Each defence under its worst attack, beside what can be had without one: docs/measured/worst_attack.md.

    cyber0 study examples/worst_attack.toml                  likewise worst_attack_data, _rules, _network, _text, _heads
    python benchmarks/worst_attack.py runs/study-worst-attack* --json docs/results/worst_attack.json \\
        --csv docs/results/worst_attack.csv --page docs/measured/worst_attack.md

The tables show accuracy in percent, mean over the seeds: for each defence its worst attack and no attack, and how many
of the panel's attacks it has met with every seed, as a worse one may still be found. The CSV file has every attack.

The lines to beat: the mean over the honest clients alone, as if the federator knew who they are; and learning from the
trusted client's samples alone. Both have the study's seeds, rounds and settings, and are stored in --json. What that
file holds already is not measured again, and stays in the tables when its studies are not given. --page puts the tables
between the page's comments `tables` and `/tables`.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from cyber0 import Config, Simulation
from cyber0.attacks import Knowledge, Matrix
from cyber0.config.files import load
from cyber0.tasks.text import model_cache

GOALS = {"mnist, linear, iid": 87.5, "mnist, linear, by_label": 60.0}
"""What a rule without trusted samples is to reach under its worst attack, by panel."""
TRUSTED_GOALS = {"mnist, linear, by_label": 4.0}
"""How far a rule with trusted samples may then be below the mean over the honest clients alone, by panel."""

MODELS = {"network": "network", "text": "SmolLM2-135M", "heads": "head of SmolLM2-135M"}
"""What is trained in studies whose folders' names contain this; in others, a linear model."""


@dataclass
class Panel:
    """The results on one data set with one model and one partition."""

    data: str
    model: str
    partition: str
    accuracy: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """In percent, one a seed, by defence and attack."""
    runs: dict[tuple[bool, int], Path] = field(default_factory=dict)
    """A folder whose settings are those of the panel, by whether it has trusted samples and its seed."""

    @property
    def name(self) -> str:
        """What identifies the panel in the JSON file."""
        return f"{self.data}, {self.model}, {self.partition}"

    @property
    def attacks(self) -> set[str]:
        """The attacks that some defence has met."""
        return {attack for by_attack in self.accuracy.values() for attack in by_attack} - {"none"}

    @property
    def seeds(self) -> int:
        """How many seeds the panel has."""
        return max(len(found) for by_attack in self.accuracy.values() for found in by_attack.values())

    def worst(self, defence: str) -> str | None:
        """Return the attack under which the defence's mean is lowest."""
        met = {attack: found for attack, found in self.accuracy[defence].items() if found and attack != "none"}
        return min(met, key=lambda attack: mean(met[attack]), default=None)


def silent(known: Knowledge) -> Matrix:
    """Return reports that are refused: an attack that leaves the honest clients alone."""
    return np.full((known.byzantine, known.honest.shape[1]), np.nan)


def honest_alone(settings: Config) -> float:
    """Return the accuracy of the mean over the honest clients, whose number and shares are those of the study."""
    simulation = Simulation(settings.with_overrides(["aggregation.rule=mean", "aggregation.before=none"]))
    simulation._attack = silent
    return _trained(simulation)


def samples_alone(settings: Config) -> float:
    """Return the accuracy of the trusted client's samples alone, as many in a batch as all clients measure, or all."""
    trusting = Simulation(settings)
    samples = trusting.task.keep(trusting.shares[0])
    trusted, measured = settings.aggregation.reference, settings.federation.clients * settings.method.batch_size
    alone = settings.with_overrides([
        "federation.clients=1", "federation.byzantine=0", "federation.attack=none", "federation.partition=iid",
        "federation.partition_options={}", "aggregation.reference=0", "aggregation.reference_batch=0",
        "aggregation.rule=mean", "aggregation.beta=0", "aggregation.options={}",
        "task.samples=0", f"method.batch_size={min(trusted, measured)}",
    ])  # fmt: skip
    return _trained(Simulation(alone, task=samples))


def _trained(simulation: Simulation) -> float:
    for _ in range(simulation.config.rounds):
        simulation.run_round()
    return 100 * simulation.evaluate().accuracy


def studied(folders: Iterable[Path]) -> list[Panel]:
    """Return the panels of these studies, in the order in which their files list them."""
    panels: dict[str, Panel] = {}
    for folder in folders:
        rows = list(csv.DictReader((folder / "results.csv").open()))
        model = next((model for part, model in MODELS.items() if part in folder.name), "linear")
        for row in rows:
            found = Panel(row.get("data", "mnist"), model, row["partition"])
            panel = panels.setdefault(found.name, found)
            defence, attack = row["defence"], row["federation.attack"]
            if row["status"] != "done":
                continue
            panel.accuracy[defence][attack].append(100 * float(row["final_accuracy"]))
            panel.runs.setdefault(("fit_reference" in defence, int(row["seed"])), folder / row["folder"])
    return [panel for panel in panels.values() if panel.accuracy]


def joined(known: dict[str, Any], found: Iterable[Panel]) -> list[Panel]:
    """Return the panels of the JSON file, with what has been found since."""
    panels = {name: Panel(*name.split(", ", 2)) for name in known}
    for name, stored in known.items():
        for defence, by_attack in stored["accuracy"].items():
            panels[name].accuracy[defence].update(by_attack)
    for panel in found:
        whole = panels.setdefault(panel.name, panel)
        whole.runs |= panel.runs
        for defence, by_attack in panel.accuracy.items():
            whole.accuracy[defence].update(by_attack)
    return list(panels.values())


def lines_to_beat(panel: Panel, known: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what can be had without a rule, one accuracy a seed; `known` is what an earlier call returned."""
    found = {}
    for what, trusted, measure in (("honest_alone", False, honest_alone), ("samples_alone", True, samples_alone)):
        folders = [folder for (has, _), folder in sorted(panel.runs.items()) if has == trusted]
        if len(known.get(what, [])) >= len(folders):
            found[what] = known.get(what, [])
        else:
            found[what] = [measure(load(folder / "config.toml")) for folder in folders]
    return found


def table(panel: Panel, beside: dict[str, list[float]]) -> str:
    """Return the panel as Markdown: each defence by its worst attack, the best first."""
    by_worst = {
        defence: mean(panel.accuracy[defence][worst])
        for defence in panel.accuracy
        if (worst := panel.worst(defence)) is not None
    }
    written = {"honest_alone": "mean over the honest clients alone", "samples_alone": "trusted samples alone"}
    above = [f"{text} {mean(beside[key]):.1f}" for key, text in written.items() if beside.get(key)]
    if panel.name in GOALS:
        above.append(f"goal without trusted samples {GOALS[panel.name]:.1f}")
    if panel.name in TRUSTED_GOALS and beside.get("honest_alone"):
        above.append(f"with them {mean(beside['honest_alone']) - TRUSTED_GOALS[panel.name]:.1f}")
    rows = [f"### {panel.name}", "", "; ".join(above) + ".", ""]
    rows += ["| defence | worst case | by | no attack | attacks met |", "|---|---|---|---|---|"]
    for defence in sorted(by_worst, key=by_worst.__getitem__, reverse=True):
        met = panel.accuracy[defence]
        whole = sum(len(found) == panel.seeds for attack, found in met.items() if attack != "none")
        calm = f"{mean(met['none']):.1f}" if met.get("none") else ""
        rows.append(
            f"| {defence} | **{by_worst[defence]:.1f}** | {panel.worst(defence)} | {calm} | "
            f"{whole} of {len(panel.attacks)} |"
        )
    return "\n".join(rows) + "\n"


def put(page: Path, name: str, text: str) -> None:
    """Replace what a page has between the comments `name` and `/name`."""
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(first)
    _, ended, after = rest.partition(last)
    if not (found and ended):
        raise SystemExit(f"{page} has no comments {first.strip()} and {last}: add them where the tables belong")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")


def write_matrix(path: Path, panels: Iterable[Panel]) -> None:
    """Write every defence under every attack, a row each."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["data", "model", "partition", "defence", "attack", "mean", "lowest", "highest", "seeds"])
        for panel in panels:
            for defence, by_attack in panel.accuracy.items():
                for attack, found in by_attack.items():
                    figures = [f"{value:.2f}" for value in (mean(found), min(found), max(found))]
                    writer.writerow([panel.data, panel.model, panel.partition, defence, attack, *figures, len(found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    model_cache.MODELS.enable()  # a language model is loaded, and reads the test set, once
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    panels = joined(known, studied(given.studies))
    tables = []
    for panel in panels:
        beside = lines_to_beat(panel, known.get(panel.name, {}))
        tables.append(table(panel, beside))
        print(tables[-1], flush=True)
        known[panel.name] = {**beside, "accuracy": panel.accuracy}
        if given.json:  # after each: what takes minutes to measure is not lost if the rest is interrupted
            given.json.write_text(json.dumps(known, indent=1) + "\n")
    if given.page:
        put(given.page, "tables", "\n".join(tables))
    if given.csv:
        write_matrix(given.csv, panels)


if __name__ == "__main__":
    main()
