"""What local epochs do to training: the largest stable rate, and how a label is lost under attack.

    python benchmarks/local_epochs.py --json docs/results/local_epochs.json      some 15 minutes on one core
    python benchmarks/local_epochs.py --only stability                           one section; FILE keeps the others
    python benchmarks/local_epochs.py --tables docs/results/local_epochs.json    the tables of docs/measured

stability   A quadratic loss, plain mean, k = 1: the largest rate at which the distance to the optimum falls, measured
            by bisection, beside what `largest_rate` says. Clients take local steps and have unlike optima; or they
            measure all E directions at the round's w; or they take local steps and have unlike curvature.
labels      Logistic regression in which every client holds samples of one label and a constant feature is the steepest
            direction. 8 clients, 2 of them Byzantine (full_knowledge), trimmed mean, k = 1, 1,500 local steps in all,
            a rate that falls linearly: Table 6 in small. A run is lost if less than a tenth of a label's samples are
            classified correctly at the end. Attack, rule and optimizers are those of the package.
federation  The same with `cyber0.Simulation` and a small neural network that already knows something of the task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0 import aggregate, attacks, optimizers

Array = NDArray[np.float64]
Line = dict[str, Any]

EPOCHS = (1, 5, 20, 50, 100)
STEPS = 1500
CLIENTS, BYZANTINE = 8, 2


# Stability


def largest_rate(curvatures: Array, k: int = 1, measured_at_once: int = 1) -> float:
    """Return the rate below which E||w - w*||^2 falls on a quadratic, for Gaussian directions.

    A step w <- w - (lr / k) sum_j z_j (z_j . H (w - w*)) changes the second moments c_i of w - w*, along the
    eigenvectors of H with eigenvalues h_i, to

        c_i (1 - 2 lr h_i + lr^2 (k + 1) / k h_i^2) + lr^2 / k sum_j h_j^2 c_j

    and these vanish over many steps if, and only if, sum_j lr h_j / (2 k - lr (k + 1) h_j) < 1. Clients who take local
    steps, and whose curvature is the same, multiply w - w*_i by the same matrices, so that the mean of what they do is
    E such steps towards the mean of their optima: E does not matter. With `measured_at_once` = E, all E k slopes are
    measured at the same w, as in a step of length E lr with E k directions: (k + 1) becomes (E k + 1).
    """
    directions = measured_at_once * k
    low, high = 0.0, 2 * k / ((directions + 1) * float(curvatures.max()))
    for _ in range(60):
        rate = (low + high) / 2
        total = float((rate * curvatures / (2 * k - rate * (directions + 1) * curvatures)).sum())
        low, high = (rate, high) if total < 1 else (low, rate)
    return low


@dataclass(frozen=True)
class Quadratic:
    """Clients with a quadratic loss each: diagonal Hessians and optima, one row a client."""

    curvatures: Array
    optima: Array

    def distance(self, rate: float, epochs: int, steps: int, seeds: int, local: bool) -> float:
        """Return the mean squared distance to the mean optimum after some steps, over that at the start."""
        generator = np.random.default_rng(0)
        optimum = self.optima.mean(axis=0)
        start = generator.normal(size=(seeds, len(optimum)))
        w = optimum + start
        for _ in range(steps // epochs):
            moved = np.repeat(w[:, None], len(self.optima), axis=1)
            commit = np.zeros_like(w)
            for _ in range(epochs):
                z = generator.normal(size=w.shape)
                gradients = self.curvatures * (moved - self.optima)
                slopes = np.einsum("scd,sd->sc", gradients, z)
                if local:
                    moved -= rate * slopes[:, :, None] * z[:, None]
                commit -= rate * slopes.mean(axis=1)[:, None] * z
            w = w + commit
            if not np.isfinite(w).all() or np.abs(w).max() > 1e9:
                return np.inf
        return float(np.square(w - optimum).sum() / np.square(start).sum())

    def measured_rate(self, epochs: int, steps: int, seeds: int, local: bool, near: float) -> float:
        """Return the rate above which the distance grows, by bisection on a logarithmic scale."""
        low, high = near / 4, near * 4
        for _ in range(9):
            rate = float(np.sqrt(low * high))
            falls = self.distance(rate, epochs, steps, seeds, local) < 1
            low, high = (rate, high) if falls else (low, rate)
        return float(np.sqrt(low * high))


def stability(quick: bool) -> Iterator[Line]:
    """Yield measured and predicted rates for every number of local epochs."""
    dimension, clients, seeds, steps = (12, 2, 4, 40) if quick else (60, 4, 48, 1000)
    generator = np.random.default_rng(1)
    curvatures = np.geomspace(0.1, 1, dimension)
    optima = generator.normal(size=(clients, dimension))
    sharpness = np.where(np.arange(clients) % 2, 1.8, 0.2)[:, None]
    cases = {
        "local steps, unlike optima": (Quadratic(curvatures[None], optima), True),
        "all slopes measured at w": (Quadratic(curvatures[None], optima), False),
        "local steps, unlike curvature": (Quadratic(sharpness * curvatures, np.zeros_like(optima)), True),
    }
    for name, (quadratic, local) in cases.items():
        for epochs in (1, 5) if quick else EPOCHS:
            predicted: float | None = largest_rate(curvatures, measured_at_once=1 if local else epochs)
            if name.endswith("unlike curvature"):  # between that of the mean and that of the sharpest client
                predicted = predicted if epochs == 1 else None
            near = predicted or largest_rate(curvatures)
            measured = quadratic.measured_rate(epochs, steps, seeds, local, near)
            yield {"clients": name, "epochs": epochs, "measured": measured, "predicted": predicted}
    sharpest = largest_rate(1.8 * curvatures)
    yield {"clients": "the sharpest client alone", "epochs": None, "measured": None, "predicted": sharpest}


# Labels


@dataclass(frozen=True)
class Case:
    """Who holds which label, who lies and how the reports are combined."""

    rate: float
    epochs: int
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int = 1
    honest: tuple[int, int] = (2, 4)
    """Honest clients with label 0, and with label 1."""
    byzantine: int = BYZANTINE
    rule: str = "trimmed_mean"
    mixed: bool = False
    """Whether every client has samples of both labels."""
    seeds: int = 24
    steps: int = STEPS
    features: int = 50
    samples: int = 64
    constant: float = 10.0
    """The feature that is the same for all samples: the steepest direction, which favours a label."""


class Labels:
    """Federations under one case, one for each seed, side by side."""

    def __init__(self, case: Case) -> None:
        self.case, self.generator = case, np.random.default_rng(0)
        clients = sum(case.honest)
        labels = np.repeat(np.where(np.arange(clients) < case.honest[0], -1.0, 1.0)[:, None], case.samples, axis=1)
        if case.mixed:
            labels[:, ::2], labels[:, 1::2] = -1.0, 1.0
        self.labels = labels
        inputs = 0.7 * self.generator.normal(size=(case.seeds, clients, case.samples, case.features))
        inputs[..., 0] = case.constant
        inputs[..., 1] += labels
        self.signed = inputs * labels[None, :, :, None]
        self.w = np.zeros((case.seeds, case.features))
        self.w[:, 1] = 0.8  # what the model knows before it is trained
        self.optimizer = optimizers.make(case.optimizer, dict(case.options))
        self.states = [self.optimizer.start() for _ in range(case.seeds)]
        self.attack = attacks.make("full_knowledge", {})
        self.rule = aggregate.make(case.rule, BYZANTINE / CLIENTS)
        self.own_over_decided: list[Array] = []

    def margins(self, weights: Array) -> Array:
        return np.einsum("scnd,scd->scn", self.signed, weights)

    def slopes(self, weights: Array, z: Array) -> Array:
        """Return (seeds x clients x k) slopes at weights (seeds x clients x features)."""
        wrong = 0.5 * (1 - np.tanh(self.margins(weights) / 2))
        gradients = -np.einsum("scn,scnd->scd", wrong, self.signed) / self.case.samples
        return np.einsum("scd,skd->sck", gradients, z)

    def round(self, rate: float) -> None:
        """Measure, decide and commit."""
        case = self.case
        clients = self.signed.shape[1]
        moved = np.repeat(self.w[:, None], clients, axis=1)
        directions, measured = [], []
        for _ in range(case.epochs):
            z = self.generator.normal(size=(case.seeds, case.k, case.features))
            slopes = self.slopes(moved, z)
            directions.append(z)
            measured.append(slopes)
            moved = moved - rate / case.k * np.einsum("sck,skd->scd", self.local(slopes), z)
        decided = self.decide(np.concatenate(measured, axis=2))
        own = np.sqrt(np.square(measured).mean(axis=(0, 2, 3)))
        self.own_over_decided.append(own / np.sqrt(np.square(decided).mean(axis=1)))
        for s, row in enumerate(decided):
            decided[s], self.states[s] = self.optimizer.scaled(self.states[s], row)
        self.w = self.w - rate / case.k * np.einsum("se,sed->sd", decided, np.concatenate(directions, axis=1))

    def local(self, slopes: Array) -> Array:
        """Return what stands for the clients' own slopes in their local steps."""
        if self.case.optimizer == "sgd":
            return slopes
        own = zip(self.states, slopes, strict=True)
        return np.array([[self.optimizer.scaled(state, row)[0] for row in rows] for state, rows in own])

    def decide(self, honest: Array) -> Array:
        """Return (seeds x scalars) decisions; attack and rule treat every column alike, so seeds stand side by side."""
        seeds, clients, scalars = honest.shape
        rows = honest.transpose(1, 0, 2).reshape(clients, seeds * scalars)
        byzantine, invited = self.case.byzantine, clients + self.case.byzantine
        if byzantine:
            known = attacks.Knowledge(rows, np.zeros((0, rows.shape[1])), byzantine, invited, byzantine, round=0)
            rows = np.concatenate([rows, self.attack(known)])
        return np.array(self.rule(rows)).reshape(seeds, scalars)

    def run(self) -> Line:
        """Return how many seeds were lost, their losses, and how unlike the two labels were."""
        case, ratios = self.case, []
        rounds = case.steps // case.epochs
        for t in range(rounds):
            ratios.append(self.ratio())
            self.round(case.rate * (1 - t / rounds))
        margins = self.margins(np.repeat(self.w[:, None], self.signed.shape[1], axis=1))
        correct = [[(m[self.labels == label] > 0).mean() for m in margins] for label in (-1.0, 1.0)]
        lost = np.min(correct, axis=0) < 0.1
        losses = np.logaddexp(0, -margins).mean(axis=(1, 2))
        largest = np.max(ratios, axis=0)
        return {
            "lost": int(lost.sum()),
            "seeds": case.seeds,
            "median_loss": float(np.median(losses)),
            "median_loss_if_not_lost": float(np.median(losses[~lost])) if not lost.all() else None,
            "largest_ratio_if_not_lost": float(largest[~lost].max()) if not lost.all() else None,
            "median_imbalance_at_the_end": float(np.median(np.maximum(self.ratio(), 1 / self.ratio()))),
            "median_own_over_decided": float(np.median(self.own_over_decided)),
        }

    def ratio(self) -> Array:
        """Return the share of wrong probability of label 0 over that of label 1, in each seed."""
        wrong = 0.5 * (1 - np.tanh(self.margins(np.repeat(self.w[:, None], self.signed.shape[1], axis=1)) / 2))
        zero, one = (wrong[:, self.labels == label].mean(axis=1) for label in (-1.0, 1.0))
        return np.asarray(np.maximum(zero, 1e-300) / np.maximum(one, 1e-300))


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "both Byzantine clients hold one label": {},
    "one Byzantine client of each label": {"honest": (3, 3)},
    "nobody is Byzantine": {"honest": (4, 4), "byzantine": 0},
    "nobody is Byzantine, plain mean": {"honest": (4, 4), "byzantine": 0, "rule": "mean"},
    "two Byzantine clients, data are IID": {"mixed": True},
}
RATES = {"sgd": (0.015, 0.03, 0.06), "adaptive": (0.0003, 0.001, 0.003, 0.01), "normalized": (0.001, 0.003, 0.01)}
SCALARS = {"sgd": 1, "adaptive": 1, "normalized": 8}  # k; the deviation of two scalars would be a poor measure
VARIED_RATE = 0.06


def labels(quick: bool) -> Iterator[Line]:
    """Yield how many runs are lost, by rate and local epochs, then by who is Byzantine, then by optimizer."""
    small: dict[str, Any] = {"seeds": 2, "steps": 20, "features": 6, "samples": 8} if quick else {}
    epochs = (1, 5) if quick else EPOCHS
    base = Case(VARIED_RATE, 1, **small)
    for name, changes in VARIANTS.items():
        for e in epochs:
            yield {"part": "variant", "variant": name, "rate": base.rate, "epochs": e,
                   **Labels(replace(base, epochs=e, **changes)).run()}  # fmt: skip
    for name, rates in RATES.items():
        for rate in rates[:1] if quick else rates:
            for e in epochs:
                case = replace(base, rate=rate, epochs=e, optimizer=name, k=SCALARS[name])
                yield {"part": "optimizer", "optimizer": name, "k": case.k, "rate": rate, "epochs": e,
                       **Labels(case).run()}  # fmt: skip


# A federation of the package


def federation(quick: bool) -> Iterator[Line]:
    """Yield the losses of both labels after runs of a small network."""
    import torch

    from cyber0.federation.population import byzantine_clients

    torch.set_num_threads(1)  # the tensors are tiny
    steps, seeds = (20, (0,)) if quick else (STEPS, (0, 1, 6, 2, 3, 5))
    trained = (("sgd", 0.1),) if quick else (("sgd", 0.03), ("sgd", 0.1), ("adaptive", 0.003))
    for optimizer, rate in trained:
        for epochs in (1, 5) if quick else (1, 50):
            for seed in seeds:
                holders = np.flatnonzero(byzantine_clients(seed, CLIENTS, BYZANTINE)) // (CLIENTS // 2)
                yield {"optimizer": optimizer, "rate": rate, "epochs": epochs, "seed": seed,
                       "one_label": bool(holders[0] == holders[1]),
                       **_run_network(optimizer, rate, epochs, seed, steps)}  # fmt: skip


def _run_network(optimizer: str, rate: float, epochs: int, seed: int, steps: int) -> Line:
    from cyber0 import Simulation
    from cyber0.config.files import load

    overrides = [
        f"federation.clients={CLIENTS}", f"federation.byzantine={BYZANTINE}", "federation.attack=full_knowledge",
        "federation.partition=by_label", "aggregation.rule=trimmed_mean", "aggregation.beta=0.25", "method.k=1",
        "method.batch_size=64", "method.lr_schedule=linear", f"method.lr={rate}", f"method.local_epochs={epochs}",
        f"rounds={steps // epochs}", f"seed={seed}", f"method.optimizer={optimizer}",
    ]  # fmt: skip
    simulation = Simulation(load(None, overrides), task=_make_task())
    before = simulation.evaluate()
    while simulation.round < simulation.config.rounds:
        simulation.run_round()
    after = simulation.evaluate()
    simulation.close()
    return {"accuracy_before": before.accuracy, "accuracy": after.accuracy, **after.metrics}


def _make_task() -> Any:
    import torch
    from torch import nn

    import cyber0

    def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.arange(count) % 2
        signs = 2.0 * targets - 1
        inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
        inputs[:, 0] += signs
        inputs[:, 1] += 0.7 * signs * inputs[:, 2].sign()
        return inputs, targets

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 2, bias=False))
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.body(x) + 5 * self.bias  # steep: the bias favours a label
            return logits

    class TwoLabels(cyber0.Task):
        """Two labels and a network that was trained a little beforehand."""

        def model(self) -> nn.Module:
            network, (inputs, targets) = Network(), draw(400, 7)
            adam = torch.optim.Adam(network.body.parameters(), 0.01)
            for _ in range(25):
                adam.zero_grad()
                nn.functional.cross_entropy(network(inputs), targets).backward()
                adam.step()
            return network

        def train_data(self) -> object:
            return draw(512, 1)

        def test_data(self) -> object:
            return draw(1000, 2)

        def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, object]:
            losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
            correct = (outputs.argmax(1) == targets).float()
            means = {f"loss_{label}": losses[targets == label].mean() for label in (0, 1)}
            return {"accuracy": correct.mean(), **means}

    return TwoLabels()


SECTIONS: Mapping[str, Callable[[bool], Iterable[Line]]] = {
    "stability": stability,
    "labels": labels,
    "federation": federation,
}


# Tables


def tables(found: Mapping[str, list[Line]]) -> Iterator[str]:
    """Yield the lines of the Markdown tables."""
    yield from _table("largest stable rate, measured (predicted)", _grouped(found["stability"], _stable, "clients"))
    variants = [line for line in found["labels"] if line["part"] == "variant"]
    optimizers = [line for line in found["labels"] if line["part"] == "optimizer"]
    yield from _table(f"runs of {variants[0]['seeds']} that lose a label", _grouped(variants, _lost, "variant"))
    columns = ("optimizer", "k", "rate")
    yield from _table(
        "runs that lose a label; median loss of the others", _grouped(optimizers, _lost_and_loss, *columns)
    )
    rows = _grouped(found["federation"], _both_losses, "optimizer", "rate", "one_label")
    yield from _table("losses of the two labels after runs of a network, three seeds each", rows)


def _grouped(lines: list[Line], shown: Callable[[Line], str], *columns: str) -> dict[str, dict[int, str]]:
    """Return what is shown of the lines, by the values of the columns and by local epochs."""
    rows: dict[str, dict[int, str]] = {}
    for line in lines:
        if line["epochs"] is not None:
            name = ", ".join(_named(column, line[column]) for column in columns)
            row = rows.setdefault(name, {})
            row[line["epochs"]] = ", ".join([*filter(None, [row.get(line["epochs"])]), shown(line)])
    return rows


def _table(title: str, rows: Mapping[str, Mapping[int, str]]) -> Iterator[str]:
    epochs = list(dict.fromkeys(e for row in rows.values() for e in row))
    yield f"| {title} | " + " | ".join(f"E = {e}" for e in epochs) + " |"
    yield "|---" * (len(epochs) + 1) + "|"
    for name, row in rows.items():
        yield f"| {name} | " + " | ".join(row.get(e, "") for e in epochs) + " |"
    yield ""


def _named(column: str, value: Any) -> str:
    if column == "one_label":
        return "Byzantine clients of one label" if value else "Byzantine clients of both labels"
    return f"{column} = {value:g}" if column in ("rate", "k") else str(value)


def _stable(line: Line) -> str:
    predicted = "" if line["predicted"] is None else f" ({line['predicted']:.4f})"
    return f"{line['measured']:.4f}{predicted}"


def _lost(line: Line) -> str:
    return str(line["lost"])


def _lost_and_loss(line: Line) -> str:
    loss = line["median_loss_if_not_lost"]
    return f"{line['lost']}; –" if loss is None else f"{line['lost']}; {loss:.3f}"


def _both_losses(line: Line) -> str:
    return f"{line['loss_0']:.2f} / {line['loss_1']:.2f}"


def main() -> None:
    """Run the sections, print every line and write the file after each section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run whose figures mean little")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; may be repeated")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures to FILE")
    parser.add_argument("--tables", metavar="FILE", type=Path, help="print the tables of a file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.tables:
        print("\n".join(tables(json.loads(arguments.tables.read_text()))))
        return
    file: Path | None = arguments.json
    found: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() and arguments.only else {}
    for name in arguments.only or SECTIONS:
        found[name] = []
        for line in SECTIONS[name](arguments.quick):
            found[name].append(line)
            print(name, " ".join(f"{key}={_shown(value)}" for key, value in line.items()), flush=True)
        if file:
            file.write_text(json.dumps(found, indent=1) + "\n")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
