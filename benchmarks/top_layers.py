"""The tables of docs/measured/top_layers.md, from docs/results/top_layers.csv, or from the folders of studies.

python benchmarks/top_layers.py
python benchmarks/top_layers.py runs/study-top-layers* --csv docs/results/top_layers.csv
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cyber0.config.files import load
from cyber0.config.schema import Config

RESULTS = Path(__file__).parent.parent / "docs/results/top_layers.csv"
SAMPLES = 512
BEFORE = {"trec": (85.8, 6000), "sst2": (85.2, 3000)}  # where plain SGD ends in Table 2, and its forward passes
MEASURED = ("accuracy", "loss", "train_loss", "validation_loss", "validation_accuracy")
Row = dict[str, Any]


def evaluations(folder: Path) -> Iterator[Row]:
    """Yield the evaluations of all runs of a study that are over."""
    for path in sorted((folder / "runs").iterdir()):
        if not (path / "summary.json").exists():
            continue
        config = load(path / "config.toml")
        with (path / "metrics.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                yield _described(config) | _passes(config, int(row["round"])) | {name: row[name] for name in MEASURED}


def _described(config: Config) -> Row:
    task, federation = config.task, config.federation
    return {
        "set": task.name, "after_layer": task.layer if task.adapter == "top" else 0, "lr": f"{config.method.lr:g}",
        "optimizer": config.method.optimizer, "partition": federation.partition, "clients": federation.clients,
        "byzantine": federation.byzantine, "attack": federation.attack if federation.byzantine else "none",
        "rule": config.aggregation.rule, "rounds": config.rounds, "held_out": task.validation, "seed": config.seed,
    }  # fmt: skip


def _passes(config: Config, rounds: int) -> Row:
    """Return the round and how often all training samples have been computed until then."""
    samples = (config.method.k + 1) * config.method.batch_size * config.federation.clients
    return {"round": rounds, "passes": round(rounds * samples / SAMPLES)}


class Setting(NamedTuple):
    """What the runs of several seeds have in common."""

    set: str
    after_layer: str
    optimizer: str
    lr: str
    partition: str
    clients: str
    byzantine: str
    attack: str
    rule: str
    rounds: str

    @property
    def layers(self) -> str:
        return "all" if self.after_layer == "0" else f"after {self.after_layer}"

    @property
    def by_label(self) -> bool:
        """Whether it is about clients with few labels: those runs, and the trusted samples alone."""
        return self.partition == "by_label" or self.clients == "1"


def runs_of(rows: Iterable[Row]) -> dict[Setting, list[list[Row]]]:
    """Return the evaluations of each run, by its settings: a list of one run for each seed."""
    found: dict[Setting, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:  # a run that is in two studies counts once
        key = Setting(*(str(row[name]) for name in Setting._fields))
        known = found[key][str(row["seed"])].setdefault(int(row["round"]), row)
        if any(str(known[name]) != str(row[name]) for name in ("held_out", *MEASURED)):
            raise SystemExit(f"two runs with other settings or results have these in common: {key}, seed {row['seed']}")
    return {key: [list(run.values()) for _, run in sorted(seeds.items())] for key, seeds in found.items()}


def percent(values: Iterable[float]) -> str:
    """Return mean and sample deviation in percent."""
    found = 100 * np.array(list(values))
    return f"{found.mean():.1f}" + (f" ± {found.std(ddof=1):.1f}" if len(found) > 1 else "")


def first_at(run: list[Row], accuracy: float) -> int | None:
    """Return the forward passes until the first evaluation with that accuracy, in percent."""
    return next((int(row["passes"]) for row in run if 100 * float(row["accuracy"]) >= accuracy - 1e-9), None)


def table(head: Iterable[str], lines: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield a Markdown table."""
    names = list(head)
    for cells in (names, ["---"] * len(names), *lines):
        yield f"| {' | '.join(map(str, cells))} |".replace("| --- ", "|---").replace("--- |", "---|")


def chosen(run: list[Row]) -> float:
    """Return the accuracy at the evaluation that is best on the samples that are held out; the first of equal ones."""
    return float(max(run, key=lambda row: float(row["validation_accuracy"]))["accuracy"])


def searched(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table of depths and rates: seed 0, nobody lies."""
    lines = []
    for key, seeds in runs_of(rows).items():
        first = [run for run in seeds if run[0]["seed"] in (0, "0")]
        if key.byzantine == "0" and not key.by_label and first:
            last = first[0][-1]
            kept = [float(row["validation_accuracy"]) for row in first[0][-max(1, len(first[0]) // 4) :]]
            lines.append((key.set, key.layers, key.optimizer, key.lr, key.rule, int(last["passes"]),
                          f"{float(last['train_loss']):.3f}", percent([float(np.mean(kept))]),
                          percent([float(last["accuracy"])])))  # fmt: skip
    head = ("set", "trained layers", "optimizer", "lr", "rule", "passes", "training loss", "held out", "accuracy")
    order = sorted(lines, key=lambda line: (line[0] != "trec", line[1], line[2], float(line[3]), *line[4:6]))
    yield from table(head, order)


def compared(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table of three seeds with and without Byzantine clients."""
    lines = []
    for key, seeds in runs_of(rows).items():
        if len(seeds) < 3 or key.by_label:
            continue
        target, _ = BEFORE[key.set]
        until = [first_at(run, target) for run in seeds]
        shown = ", ".join("never" if n is None else f"{n:,}" for n in until)
        who = f"{key.byzantine} of {key.clients}" if key.byzantine != "0" else "none"
        ends, best = percent(float(run[-1]["accuracy"]) for run in seeds), percent(chosen(run) for run in seeds)
        lines.append((key.set, who, key.rule, key.lr, f"{seeds[0][-1]['passes']}", ends, best, shown))
    head = ("set", "Byzantine", "rule", "lr", "passes", "at the end", "chosen", "plain SGD's end after")
    order = sorted(lines, key=lambda line: (line[0] != "trec", line[1] != "none", line[2], -float(line[3])))
    yield from table(head, order)


def with_few_labels(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table of clients with one or two labels each, and of the trusted samples alone."""
    lines = []
    for key, seeds in runs_of(rows).items():
        if key.by_label:
            alone = key.clients == "1"
            ends = [float(run[-1]["accuracy"]) for run in seeds]
            each, mean = ", ".join(percent([end]) for end in ends), percent([float(np.mean(ends))])
            lines.append(("the trusted samples alone" if alone else key.rule, "" if alone else key.attack, each, mean))
    yield from table(("rule", "attack", "accuracy by seed", "mean"), sorted(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of studies; none: the stored results")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the evaluations")
    options = parser.parse_args()
    rows = [row for folder in options.folders for row in evaluations(folder)]
    if not options.folders:
        with RESULTS.open(newline="") as file:
            rows = list(csv.DictReader(file))
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(*searched(rows), "", *compared(rows), "", *with_few_labels(rows), sep="\n")


if __name__ == "__main__":
    main()
