"""Diagnoses a run's folder or a config: its clients, their batches, the model after some rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0 import __version__
from cyber0.aggregate.rule import AggregationError
from cyber0.config import doors
from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.config.schedules import AUTO
from cyber0.config.schema import WITHOUT_CLASSES, Config
from cyber0.config.tolerance import tolerated
from cyber0.diagnose.measure import measure
from cyber0.diagnose.measurement import DIAGNOSIS_FORMAT, TRIALS, Matrix, Measurement, Vector, check_judgeable, plain
from cyber0.diagnose.rate import measured_lr
from cyber0.diagnose.source import settings_of
from cyber0.directions import Directions, Probe, Step
from cyber0.errors import LedgerError
from cyber0.estimate.batches import Batch
from cyber0.estimate.objective import checked_losses
from cyber0.estimate.torch_threads import own_threads
from cyber0.federation.agreement import different
from cyber0.federation.build import with_lr
from cyber0.federation.methods import FEDERATIONS
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger, Record, Reports, first_chain
from cyber0.runs.weights import with_stored_start
from cyber0.storage import CONFIG, LEDGER, REPORTS

MOST_MEASURED_CLIENTS = 50  # that are measured; enough to know the noise
PARTS = 8  # batches of a single client, which take the place of clients


class Clients:
    """The clients of a simulation at its present w: the honest ones are measured, the others attack as in the run.

    A trial is a round: trial j draws the batches and directions of round `simulation.round + j`. A single client takes
    the place of several, with as many of its batches.
    """

    def __init__(self, simulation: Simulation, trials: int) -> None:
        check_judgeable(simulation.client.updates)
        self._simulation, self._trials = simulation, trials
        config, total = simulation.config, simulation.config.federation.clients
        chosen = np.linspace(0, total - 1, min(total, MOST_MEASURED_CLIENTS)).round().astype(np.int64)
        expelled = [one.client for one in simulation.federator.expulsions]
        staying = np.setdiff1d(chosen, expelled)
        b = tolerated(simulation.federator.rule.beta, len(chosen))
        self._b, chosen = max(b - (len(chosen) - len(staying)), 0), staying
        byzantine = simulation.byzantine[chosen]
        self._honest, self._byzantine = chosen[~byzantine], chosen[byzantine]
        self._alone = total == 1
        self.parameters = simulation.parameters
        self.estimator, self.mu = config.method.estimator, _probing_step(config)
        invited = config.federation.invited - len(expelled)
        self.clients = 1 if self._alone else round(invited * float(np.mean(~byzantine)))
        self.lr = float(simulation.lr_at(min(simulation.round, max(0, config.rounds - 1))))

    def directions(self, trial: int) -> Directions:
        client = self._simulation.client
        return Directions(client.key, client.next_round + trial, client.header.k)

    def slopes(self, trial: int) -> Matrix:
        return self._measured(self._honest, trial)

    def _measured(self, clients: NDArray[np.int64], trial: int) -> Matrix:
        evaluator, directions = self._simulation.client.evaluator, self.directions(trial)
        return np.concatenate([evaluator.estimate(b, directions) for b in self._batches(clients, self._draws(trial))])

    def decide(self, rows: Matrix, trial: int) -> Vector:
        """Return the rule's decision on the honest scalars and the attack on them; NaN if too few rows are finite."""
        simulation, round = self._simulation, self.directions(trial).round
        if self._alone:
            return np.asarray(rows[0])
        honest = rows.astype(np.float32)
        sent, senders = honest, self._honest
        if len(self._byzantine):
            own = np.zeros((0, rows.shape[1]), np.float32)
            if simulation.needs_own:
                own = self._measured(self._byzantine, trial).astype(np.float32)
            attacked = simulation.byzantine_reports(self._honest, self._byzantine, honest, own, round)
            senders = np.concatenate([self._honest, self._byzantine])
            order = np.argsort(senders)
            sent, senders = np.concatenate([honest, attacked])[order], senders[order]
        rule, memory = simulation.federator.rule, simulation.federator.decider.memory
        try:
            return rule.decide(sent, round=round, memory=memory, clients=senders, b=self._b).values
        except AggregationError:  # losses that are not finite, as with a far too large mu: the scan of mu reports it
            return np.full(rows.shape[1], np.nan)

    def scaled(self, values: Vector) -> Vector:
        updates = self._simulation.client.updates
        return updates.optimizer.scaled(updates.state, values)[0]

    def losses(
        self, trial: int, probe: Probe | None = None, steps: Sequence[Step] = (), *, fresh: bool = False
    ) -> Vector:
        """Return one loss per client; fresh ones on the batches of rounds after all trials."""
        draws = self._draws(trial)
        later = self._trials * (PARTS if self._alone else 1)
        if fresh:
            draws = [round + later for round in draws]
        if probe is None and not steps and self.parameters.compute is not None:
            probe = self.directions(trial).probe(0, 0.0)  # rounded like the losses that it is compared with
        means = []
        with torch.no_grad(), own_threads(self.parameters), self.parameters.perturbed(probe, steps):
            for batch in self._batches(self._honest, draws):
                task = self._simulation.task
                outputs = task.outputs(self.parameters.model, batch.inputs)
                losses = checked_losses(task.losses(outputs, batch.targets), int(batch.counts.sum()))
                starts = np.cumsum(batch.counts) - batch.counts
                means.append(np.add.reduceat(losses.double().cpu().numpy(), starts) / batch.counts)
        return np.concatenate(means)

    def _draws(self, trial: int) -> list[int]:
        """Return the rounds whose batches a trial draws: one, or several for a single client."""
        first = self._simulation.client.next_round
        return [first + trial + part * self._trials for part in range(PARTS)] if self._alone else [first + trial]

    def _batches(self, clients: NDArray[np.int64], draws: Sequence[int]) -> Iterator[Batch]:
        samples = self._simulation.samples
        return (samples.batch(group, round) for round in draws for group in samples.groups(clients))

    def broken(self, trials: int) -> str:
        """Return a description of the first batch whose loss is not finite; empty if there is none."""
        for trial in range(trials):
            batches = [(round, client) for round in self._draws(trial) for client in self._honest.tolist()]
            for (round, client), loss in zip(batches, self.losses(trial), strict=True):
                if not np.isfinite(loss):
                    indices, _ = self._simulation.samples.drawn(np.array([client]), round)
                    some = ", ".join(map(str, indices[:8].tolist())) + (", ..." if len(indices) > 8 else "")
                    return f"the loss of client {client} on its batch of round {round} (training samples {some})"
        return ""


def diagnose(
    source: Path,
    *,
    round: int | None = None,
    trials: int = TRIALS,
    device: str | None = None,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure a run at its start, middle and end (or after one round), a config at its start; return plain data.

    Args:
        source: A run's folder, or a config file.
        round: Where to measure, instead of at the three points.
        trials: Steps to try at each point.
        device: Where to compute, if not where the config says.
        overrides: Settings to override; those of a run can't change, except where its code is.
        tell: Called with a line of progress before each point.
    """
    simulation, ledger = open_source(source, device, overrides)
    last = len(ledger)
    if round is not None and not 0 <= round <= last:
        raise LedgerError(f"there is no round {round}: this run has {last} rounds; use 0 to {last}")
    measurements, remembered = [], _Remembered(simulation, ledger, source, tell)
    for place in sorted({0, last // 2, last}) if round is None else [round]:
        tell(f"measuring after {place:,} of {last:,} rounds" if last else "measuring at the start")
        simulation.client.catch_up(map(remembered.learned, ledger.records(simulation.round, place)))
        measurements.append(measured(simulation, trials))
    return {"format": DIAGNOSIS_FORMAT, "cyber0": __version__, **facts(simulation), "stations": measurements}


class _Remembered:
    """Lets a rule with a history remember the rounds of a run, from the first one on, as its federator did."""

    def __init__(self, simulation: Simulation, ledger: Ledger, source: Path, tell: Callable[[str], None]) -> None:
        self._decider = simulation.federator.decider
        self._reports: Iterator[tuple[int, NDArray[np.float32]]] | None = None
        if self._decider.memory is None or not len(ledger):
            return
        if (source / REPORTS).exists():
            self._reports = iter(Reports(source / REPORTS, ledger.header.scalars))
        else:
            tell(f"{source / REPORTS} is missing: the rule {self._decider.rule.name} decides without its history")

    def learned(self, record: Record) -> Record:
        """Remember the next round of the ledger, and return it."""
        if self._reports is not None:
            self._decider.rebuild([record], [next(self._reports, (-1, np.zeros((0, 0), np.float32)))])
        return record


def facts(simulation: Simulation) -> dict[str, Any]:
    """Return the settings that a diagnosis refers to."""
    config = simulation.config
    guessing = None
    own_losses = getattr(simulation.task, "own_losses", False)
    if config.task.name not in WITHOUT_CLASSES and not own_losses and simulation.task.classes > 1:
        guessing = float(np.log(simulation.task.classes))
    return {
        "k": config.method.k, "lr": config.method.lr, "lr_schedule": config.method.lr_schedule,
        "estimator": config.method.estimator, "mu": _probing_step(config), "dtype": config.task.dtype,
        "local_epochs": config.method.local_epochs, "dimension": simulation.parameters.dimension,
        "clients": int((~simulation.byzantine).sum()), "guessing": guessing,
        "unit": "client" if config.federation.clients > 1 else "batch",
    }  # fmt: skip


def _probing_step(config: Config) -> float | None:
    return config.method.mu if config.method.estimator in PROBING_ESTIMATORS else None


def measured(simulation: Simulation, trials: int) -> dict[str, Any]:
    """Measure at the simulation's w, and return plain data."""
    clients = Clients(simulation, trials)
    found: Measurement = measure(clients, simulation.round, trials)
    result: dict[str, Any] = plain(found)
    return result | {"broken": "" if np.isfinite(found.loss) else clients.broken(trials)}


def open_source(source: Path, device: str | None, overrides: Sequence[str]) -> tuple[Simulation, Ledger]:
    """Return the simulation of a run's folder, at w0, and its ledger; for a config, an empty ledger."""
    config = with_stored_start(settings_of(source, overrides), source)
    ledger = Ledger.open(source / LEDGER) if source.is_dir() else None
    if ledger is not None and config.method.lr == AUTO:
        config = with_lr(config, ledger.header.lr)
    kind = FEDERATIONS[config.method.name]
    assert issubclass(kind, Simulation)
    simulation = kind(replace(config, device=device) if device else config, measure_lr=measured_lr)
    if ledger is None:
        return simulation, simulation.ledger
    odd = different(simulation.ledger.header, ledger.header)
    # The device may differ, and so may the place of the task's code, whose weights are compared.
    apart = ("device ", *(["task.name "] if doors.is_path(config.task.name) else []))
    odd = [name for name in odd if not name.startswith(apart)]
    if odd:
        raise LedgerError(f"{source / LEDGER} does not belong to {source / CONFIG}: it differs in {', '.join(odd)}")
    simulation.client.chain = first_chain(ledger.header)
    return simulation, ledger
