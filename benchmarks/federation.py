"""Whole rounds of a federation on the CPU: the default MNIST run against a plain loop, and thousands of clients.

python benchmarks/cpu.py --only mnist --only scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from kernels import threads
from measure import Figure, interleaved, seconds
from torch.nn.functional import cross_entropy

from cyber0 import aggregate
from cyber0.config.files import load
from cyber0.config.schema import Config
from cyber0.federation.simulation import Simulation
from cyber0.kernels.threads import thread_count
from cyber0.tasks import make as make_task

ROUNDS = 400  # of the default run; shorter measurements are scaled to it


class PlainLoop:
    """What one would write first: each client and each direction in turn, w perturbed in place.

    Everybody measures, and Byzantine scalars are replaced afterwards. Perturbing is done as the authors of MeZO
    do it (zo_perturb_parameters): seed torch's generator, draw each tensor's part of z with torch.normal, add it.
    """

    def __init__(self, simulation: Simulation) -> None:
        config, task = simulation.config, simulation.task
        self.method, self.byzantine = config.method, simulation.byzantine
        self.rule = aggregate.make(config.aggregation.rule, config.aggregation.beta)
        self.model = task.model(config.seed)
        self.weights = list(self.model.parameters())
        self.samples = [(task.prepare(task.train_inputs[s]), task.train_targets[s]) for s in simulation.shares]

    @torch.no_grad()
    def run_round(self) -> None:
        """Run one round: everybody measures, Byzantine clients send zeros instead, everybody moves."""
        method = self.method
        seeds = torch.randint(2**62, (method.k,)).tolist()
        rows = np.array([self.report(client, seeds) for client in self.clients()])
        rows = np.concatenate([rows[: (~self.byzantine).sum()], np.zeros((self.byzantine.sum(), method.k))])
        for seed, value in zip(seeds, self.rule(rows).tolist(), strict=True):
            self.move(seed, -method.lr * value / method.k)

    def clients(self) -> list[int]:
        return list(range(len(self.samples)))

    def report(self, client: int, seeds: list[int]) -> list[float]:
        inputs, targets = self.samples[client]
        drawn = torch.randint(len(targets), (self.method.batch_size,))
        return [self.slope(inputs[drawn], targets[drawn], seed) for seed in seeds]

    def slope(self, inputs: torch.Tensor, targets: torch.Tensor, seed: int) -> float:
        """Return (f(w + mu z) - f(w - mu z)) / 2 mu, leaving w where it was, or nearly."""
        mu = self.method.mu
        self.move(seed, mu)
        plus = cross_entropy(self.model(inputs), targets).item()
        self.move(seed, -2 * mu)
        minus = cross_entropy(self.model(inputs), targets).item()
        self.move(seed, mu)
        return (plus - minus) / (2 * mu)

    def move(self, seed: int, coefficient: float) -> None:
        torch.manual_seed(seed)
        for w in self.weights:
            z = torch.normal(mean=0, std=1, size=w.data.size(), device=w.data.device, dtype=w.data.dtype)
            w.data.add_(z, alpha=coefficient)


class TightLoop(PlainLoop):
    """The same by a careful person: Byzantine clients measure nothing, one generator, no temporary beyond z."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.generator = torch.Generator()

    def clients(self) -> list[int]:
        return np.flatnonzero(~self.byzantine).tolist()

    def move(self, seed: int, coefficient: float) -> None:
        self.generator.manual_seed(seed)
        for w in self.weights:
            w.add_(torch.randn(w.shape, generator=self.generator), alpha=coefficient)


def _rounds(run_round: Callable[[], Any], number: int, threads_used: int) -> Callable[[], None]:
    def run_rounds() -> None:
        with threads(threads_used):
            for _ in range(number):
                run_round()

    return run_rounds


def mnist(quick: bool) -> Iterator[Figure]:
    """The default run, two-point estimate: our three paths and two loops."""
    config = load(None)
    task = make_task(config.task)
    linear, vmap, streamed = (Simulation(config, task=task) for _ in range(3))
    vmap.client.evaluator.linear.possible = False
    streamed.client.evaluator._batched = False
    plain, tight = PlainLoop(linear), TightLoop(linear)
    # Small operations may be faster on one thread: every contestant gets what suits it.
    contestants = {
        "linear": (linear.run_round, 40 if quick else ROUNDS),
        "vmap": (vmap.run_round, 1 if quick else 8),
        "streamed": (streamed.run_round, 1 if quick else 4),
        "plain": (plain.run_round, 1 if quick else 2),
        "tight": (tight.run_round, 1 if quick else 2),
    }
    calls, used = {}, {}
    for name, (run_round, number) in contestants.items():
        run_round()
        trial = max(1, number // 10)
        trials = {n: seconds(_rounds(run_round, trial, n)) for n in sorted({1, thread_count()})}
        used[name] = min(trials, key=trials.__getitem__)
        calls[name] = _rounds(run_round, number, used[name])
    measured = interleaved(calls, 1 if quick else 3)
    run = {name: measured[name] * ROUNDS / number for name, (_, number) in contestants.items()}
    notes = {name: f"{used[name]} thread{'s' if used[name] > 1 else ''}" for name in contestants}
    scaled = {name: f"{notes[name]}; {number} of {ROUNDS} rounds" for name, (_, number) in contestants.items()}
    note = scaled["linear"] if quick else notes["linear"]
    yield Figure(f"{ROUNDS} rounds, linear path (X W and X Z)", run["linear"], "s", 5.0, note=note)
    yield Figure(f"{ROUNDS} rounds, general path (vmap)", run["vmap"], "s", note=scaled["vmap"])
    yield Figure(f"{ROUNDS} rounds, streamed path", run["streamed"], "s", note=scaled["streamed"])
    yield Figure(f"{ROUNDS} rounds, plain loop (MeZO's, 12 clients)", run["plain"], "s", note=scaled["plain"])
    yield Figure(f"{ROUNDS} rounds, tight loop (9 honest clients)", run["tight"], "s", note=scaled["tight"])
    yield Figure("plain loop / linear path", run["plain"] / run["linear"], "x", 100.0, at_least=True)
    yield Figure("tight loop / linear path", run["tight"] / run["linear"], "x")
    yield Figure("plain loop / general path", run["plain"] / run["vmap"], "x")
    yield Figure("plain loop / streamed path", run["plain"] / run["streamed"], "x")


def scale(quick: bool) -> Iterator[Figure]:
    """A round of up to 10,000 clients, a quarter of them Byzantine, k = 16, batch 8."""
    task: Any = make_task(Config().task)
    # MNIST has 6 samples for each of 10,000 clients; twice over, everybody can draw 8 and the rounds compare.
    task.labels = np.tile(task.labels, 2)
    task.train_inputs, task.train_targets = task.train_inputs.repeat(2, 1), task.train_targets.repeat(2)
    clients = [1_250, 10_000] if quick else [1_250, 2_500, 5_000, 10_000]
    calls = {}
    for m in clients:
        settings = [f"federation.clients={m}", f"federation.byzantine={m // 4}", "method.k=16", "method.batch_size=8"]
        calls[str(m)] = Simulation(load(None, settings), task=task).run_round
    times = interleaved(calls, 2 if quick else 7)
    for m in clients:
        yield Figure(f"one round, {m:,} clients", 1e3 * times[str(m)], "ms")
    exponent = np.polyfit(np.log(clients), np.log([times[str(m)] for m in clients]), 1)[0]
    yield Figure("exponent of the growth", float(exponent), "", 1.1, note="1 is linear")
