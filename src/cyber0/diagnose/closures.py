"""Diagnoses one torch model with losses of the user's own (`ZeroOrder.diagnose`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cyber0 import __version__
from cyber0.diagnose.measure import measure
from cyber0.diagnose.measurement import DIAGNOSIS_FORMAT, Matrix, Vector, check_judgeable, plain
from cyber0.diagnose.verdict import Diagnosis
from cyber0.directions import Directions, Probe, Step
from cyber0.ledger import Ledger
from cyber0.model.vector import Parameters
from cyber0.protocol.client import Updates

LossClosure = Callable[[], Any]


class Optimizer(Protocol):
    """What is needed of `ZeroOrder`, which is defined in a higher layer."""

    ledger: Ledger
    parameters: Parameters
    updates: Updates

    @property
    def lr(self) -> float: ...

    @property
    def round(self) -> int: ...

    def measure_at_w(self, loss: LossClosure) -> float | None: ...

    def measure(self, loss: LossClosure, round: int, r: int, at_w: float | None) -> tuple[Vector, float]: ...

    def probe(self, loss: LossClosure, probe: Probe | None, steps: Sequence[Step] = ()) -> float: ...


class Closures:
    """Losses on different batches, which take the place of clients; the step of a trial is measured on one of them."""

    clients = 1

    def __init__(self, optimizer: Optimizer, losses: Sequence[LossClosure]) -> None:
        check_judgeable(optimizer.updates)
        self._optimizer, self._losses = optimizer, losses
        self.parameters, self.lr = optimizer.parameters, optimizer.lr
        self.mu = float(np.float32(optimizer.ledger.header.mu)) or None
        self.estimator = optimizer.ledger.header.estimator

    def directions(self, trial: int) -> Directions:
        header = self._optimizer.ledger.header
        return Directions(header.seed, self._optimizer.round + trial, header.k)

    def slopes(self, trial: int) -> Matrix:
        return np.array([self._row(loss, self.directions(trial)) for loss in self._losses])

    def _row(self, loss: LossClosure, z: Directions) -> list[float]:
        at_w = self._optimizer.measure_at_w(loss)
        return [self._optimizer.measure(loss, z.round, r, at_w)[1] for r in range(z.k)]

    def decide(self, rows: Matrix, trial: int) -> Vector:
        row: Vector = rows[trial % len(rows)]
        return row

    def scaled(self, values: Vector) -> Vector:
        updates = self._optimizer.updates
        return updates.optimizer.scaled(updates.state, values)[0]

    def losses(
        self, trial: int, probe: Probe | None = None, steps: Sequence[Step] = (), *, fresh: bool = False
    ) -> Vector:
        """Return one loss per batch; if fresh, without the batch of the trial's step, unless it is the only one."""
        own = trial % len(self._losses)
        chosen = [loss for i, loss in enumerate(self._losses) if not fresh or i != own or len(self._losses) == 1]
        return np.array([self._optimizer.probe(loss, probe, steps) for loss in chosen])


def diagnose(optimizer: Optimizer, losses: Sequence[LossClosure], trials: int) -> Diagnosis:
    """Measure at the optimizer's w."""
    subject = Closures(optimizer, losses)
    found = plain(measure(subject, optimizer.round, trials))
    broken = [i for i, loss in enumerate(subject.losses(0)) if not np.isfinite(loss)]
    found["broken"] = f"loss {broken[0]} of those given" if broken else ""
    header, dtypes = optimizer.ledger.header, sorted({e.dtype for e in optimizer.parameters.layout})
    return Diagnosis({
        "format": DIAGNOSIS_FORMAT, "cyber0": __version__, "k": header.k, "lr": optimizer.lr, "lr_schedule": "constant",
        "estimator": subject.estimator, "mu": subject.mu, "dtype": " and ".join(dtypes), "local_epochs": 1,
        "dimension": header.dimension, "clients": len(losses), "guessing": None, "unit": "batch",
        "stations": [found],
    })  # fmt: skip
