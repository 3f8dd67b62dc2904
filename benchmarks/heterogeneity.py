"""What unlike data costs any rule that has no trusted samples: two lower bounds, computed on the study's federations.

    python benchmarks/heterogeneity.py --json docs/results/heterogeneity.json --page docs/measured/worst_attack.md
    python benchmarks/heterogeneity.py --data data/fashion-mnist --name Fashion-MNIST --rules trimmed_mean

**Two worlds.** b Byzantine clients hold copies of the images of b honest clients, G, with other labels, and follow the
protocol. In world A the labels of G are right. In world B the clients that lie are G, and the labels of the copies are
right. Every client sends the same in both, so a rule that sees only reports learns the same model. Of class c let r be
the samples that the other honest clients hold and g those of G, and let v be its part of the accuracy that the mean
over the honest clients reaches. A model that follows G on a share p of the class loses v (1 - p) in world A, and v p d
in world B, where d = max(g - r, 0) / (g + r): there, an image of the class has the other label with probability
g / (g + r). The bound is the least loss in the worse of both worlds, over all p of all classes; G is the group with the
largest. It assumes that no class is learned better than by the mean over the honest clients. Then rules are trained in
these worlds, and their model's accuracy is measured in both.

**Gradients.** m - 2b clients have the gradient 0, b have x and b have -x; one of the last two groups is Byzantine. A
rule decides the same in both cases, so in one of them it misses the honest mean, b x / (m - b) or its reverse, by at
least that length. Its squared error then is at least b / (m - 2b) times zeta^2, the mean squared distance of honest
gradients from their mean. No rule guarantees less for all data of this zeta (Karimireddy, He and Jaggi, ICLR 2022;
Allouah et al., AISTATS 2023). Where the squared gradient of the honest clients is smaller than that, no rule can
guarantee progress for all such data. The table's `blind` is the share of rounds, among those looked at along the
training by the mean over the honest clients, where that is so.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from worst_attack import put, silent

from cyber0 import Config, Simulation
from cyber0.estimate.torch_threads import evaluating
from cyber0.federation.build import make_samples

PARTITIONS = {
    "by_label": ["federation.partition=by_label"],
    "iid": ["federation.partition=iid"],
    "dirichlet 0.1": ["federation.partition=dirichlet", "federation.partition_options={alpha=0.1}"],
    "dirichlet 0.5": ["federation.partition=dirichlet", "federation.partition_options={alpha=0.5}"],
}


@dataclass(frozen=True)
class Dispute:
    """Whose labels are in dispute, and what that costs any rule in the worse of both worlds."""

    group: tuple[int, ...]
    other: NDArray[np.float64]
    """Of each class, with which probability its images have the other label in world B: g / (g + r)."""
    cost: float


def disputes(counts: NDArray[np.int64], honest: NDArray[np.int64], b: int, parts: NDArray[np.float64]) -> Dispute:
    """Return the group of b honest clients for which the bound is largest.

    Args:
        counts: How many samples of each class each client has.
        honest: The honest clients.
        b: How many clients are Byzantine.
        parts: v, each class's part of the accuracy that can be reached, 0 to 1.
    """
    total = counts[honest].sum(axis=0)
    found = []
    for group in combinations(honest.tolist(), b):
        other = counts[list(group)].sum(axis=0) / np.maximum(total, 1)
        found.append(Dispute(group, other, least_loss(parts, np.maximum(2.0 * other - 1.0, 0.0))))
    return max(found, key=lambda dispute: dispute.cost)


def least_loss(v: NDArray[np.float64], d: NDArray[np.float64]) -> float:
    """Return min over 0 <= p <= 1 of max(sum v (1 - p), sum v d p).

    By duality it is the maximum over 0 <= s <= 1 of sum v min(s, (1 - s) d), which is linear between the points where
    s = (1 - s) d.
    """
    return max(float(np.add.reduce(v * np.minimum(s, (1.0 - s) * d))) for s in d / (1.0 + d))


def relabelled(disputed: NDArray[np.intp], classes: int) -> NDArray[np.int64]:
    """Return the other label of every class: the next one in dispute; of a single one, the next class."""
    other = np.arange(classes)
    other[disputed] = np.roll(disputed, -1) if len(disputed) > 1 else (disputed + 1) % classes
    return other


def start(settings: list[str], *overrides: str, task: Any = None) -> Simulation:
    """Return a simulation with these settings."""
    return Simulation(Config().with_overrides([*settings, *overrides]), task=task)


def predicted(simulation: Simulation) -> NDArray[np.int64]:
    """Return the model's class of every test sample."""
    task, found = simulation.task, []
    with evaluating(simulation.parameters), torch.no_grad():
        for begin in range(0, len(task.test_targets), 1000):
            outputs = task.outputs(simulation.parameters.model, task.test_inputs[begin : begin + 1000])
            found.append(outputs.argmax(dim=1).numpy())
    return np.concatenate(found)


def gradients(simulation: Simulation, b: int) -> tuple[float, float]:
    """Return the squared gradient of the honest clients at w, and the squared error that any rule may have there."""
    task, found = simulation.task, []
    for client in np.flatnonzero(~simulation.byzantine).tolist():
        share = torch.from_numpy(simulation.shares[client])
        even = torch.full((len(share),), 1.0 / len(share))
        inputs, targets = task.train_inputs[share], task.train_targets[share]
        found.append(simulation.gradients.of_all(inputs, targets, even).double().numpy())
    clients = np.stack(found)
    middle = clients.mean(axis=0)
    zeta2 = float(np.mean(np.add.reduce((clients - middle) ** 2, axis=1)))
    return float(middle @ middle), b / (len(simulation.shares) - 2 * b) * zeta2


def along_the_mean(settings: list[str], rounds: int, every: int) -> tuple[Simulation, list[dict[str, float]]]:
    """Train by the mean over the honest clients, and return what gradients are like on the way."""
    simulation = start(settings, "aggregation.rule=mean", f"rounds={rounds}")
    simulation._attack = silent
    b, rows = int(simulation.byzantine.sum()), []
    for round in range(rounds + 1):
        if round % every == 0 or round == rounds:
            square, error = gradients(simulation, b)
            accuracy = 100 * simulation.evaluate().accuracy
            rows.append({"round": round, "accuracy": accuracy, "gradient": square, "error": error})
        if round < rounds:
            simulation.run_round()
    return simulation, rows


def in_both_worlds(
    settings: list[str], rule: list[str], rounds: int, dispute: Dispute, right: NDArray[np.int64]
) -> tuple[float, float]:
    """Train a rule where the labels of a group are in dispute, and return the percentages right in worlds A and B."""
    made = start(settings, *rule, "federation.attack=none", f"rounds={rounds}")
    task, other = made.task, relabelled(np.flatnonzero(dispute.other > 0.5), made.task.classes)
    shares, inputs, targets = list(made.shares), [task.train_inputs], [task.train_targets]
    for liar, client in zip(np.flatnonzero(made.byzantine).tolist(), dispute.group, strict=True):
        share, first = torch.from_numpy(made.shares[client]), sum(map(len, targets))
        shares[liar] = np.arange(first, first + len(share))
        inputs.append(task.train_inputs[share])
        targets.append(torch.from_numpy(other)[task.train_targets[share]])
    task.train_inputs, task.train_targets = torch.cat(inputs), torch.cat(targets)
    vars(made.samples).update(vars(make_samples(task, shares, made.config, made.config.seed)))
    for _ in range(rounds):
        made.run_round()
    found = predicted(made)
    a, so = found == right, dispute.other[right]
    b = np.where(other[right] == right, a, (1.0 - so) * a + so * (found == other[right]))
    return 100 * float(a.mean()), 100 * float(b.mean())


def measured(settings: list[str], rules: list[str], rounds: int, every: int) -> dict[str, Any]:
    """Return both bounds for one federation, and how rules do in both worlds."""
    simulation, path = along_the_mean(settings, rounds, every)
    right = simulation.task.test_targets.numpy()
    hits = predicted(simulation) == right
    parts = np.array([np.mean(hits & (right == c)) for c in range(simulation.task.classes)])
    honest = np.flatnonzero(~simulation.byzantine)
    dispute = disputes(simulation.label_counts(), honest, int(simulation.byzantine.sum()), parts)
    reached = 100 * float(hits.mean())
    worlds = {
        rule: in_both_worlds(settings, [f"aggregation.rule={rule}"], rounds, dispute, right) if dispute.cost else None
        for rule in rules
    }
    return {
        "honest_alone": reached, "bound": reached - 100 * dispute.cost, "group": dispute.group,
        "in_dispute": np.flatnonzero(dispute.other > 0.5).tolist(), "worlds": worlds, "gradients": path,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="folder with idx files like MNIST's; empty: MNIST")
    parser.add_argument("--partitions", default=",".join(PARTITIONS))
    parser.add_argument("--rules", default="trimmed_mean,reputation")
    parser.add_argument("--set", nargs="*", default=[], help="further settings")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--every", type=int, default=25, help="rounds between two looks at gradients")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="put the table between the comments `bound NAME` of this page")
    parser.add_argument("--name", default="MNIST", help="of the data")
    given = parser.parse_args()
    rules, found = given.rules.split(","), {}
    heads = ["partition", "honest alone", "bound", "blind", *(f"{rule}: {x}" for rule in rules for x in "AB")]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in given.partitions.split(","):
        runs = found[name] = [
            measured(
                [f"task.data={given.data}", f"seed={seed}", *PARTITIONS[name], *given.set],
                rules, given.rounds, given.every,
            )
            for seed in range(given.seeds)
        ]  # fmt: skip
        blind = [row["gradient"] < row["error"] for run in runs for row in run["gradients"]]
        cells = [f"{mean(run[key] for run in runs):.1f}" for key in ("honest_alone", "bound")]
        cells.append(f"{mean(blind):.0%}")
        for rule in rules:
            pairs = [run["worlds"][rule] for run in runs if run["worlds"][rule]]
            cells += [f"{mean(pair[i] for pair in pairs):.1f}" if pairs else "" for i in (0, 1)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.page:
        put(given.page, f"bound {given.name}", "\n".join(lines) + "\n")
    if given.json:
        stored = json.loads(given.json.read_text()) if given.json.exists() else {}
        stored[given.name] = {"rounds": given.rounds, "found": found}
        given.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
