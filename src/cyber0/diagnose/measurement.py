"""What is measured, and the result: weights, directions and losses in; one Measurement per point w out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cyber0.diagnose import signal
from cyber0.directions import Directions, Probe, Step
from cyber0.directions.steps import coefficients
from cyber0.errors import ConfigError
from cyber0.model.vector import Parameters
from cyber0.protocol.client import Updates

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

DIAGNOSIS_FORMAT = 1  # of diagnostics.json
TRIALS = 8  # rounds that are tried
STEP_RANGE = (2.0**-126, 2.0**127)  # the range of float32, in which a good mu or lr is searched when none is nearby


class Subject(Protocol):
    """What is measured: weights, directions, and the losses of clients (or of one client's batches)."""

    @property
    def parameters(self) -> Parameters: ...

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        ...

    @property
    def estimator(self) -> str:
        """How slopes are measured."""
        ...

    @property
    def mu(self) -> float | None:
        """The probing step; None where slopes are measured without one."""
        ...

    @property
    def clients(self) -> int | None:
        """How many clients a decision averages over; None: as many as `slopes` has rows."""
        ...

    def directions(self, trial: int) -> Directions:
        """Return the directions of a trial."""
        ...

    def slopes(self, trial: int) -> Matrix:
        """Return what the clients would report in a trial, one row each."""
        ...

    def decide(self, rows: Matrix, trial: int) -> Vector:
        """Return the scalars that would be decided in the trial."""
        ...

    def scaled(self, values: Vector) -> Vector:
        """Return what the optimizer makes of decided scalars, before lr."""
        ...

    def losses(
        self, trial: int, probe: Probe | None = None, steps: Sequence[Step] = (), *, fresh: bool = False
    ) -> Vector:
        """Return every client's loss at (w after steps) + c z, on a trial's samples or on others."""
        ...


class Probing(NamedTuple):
    """How good slopes are that were measured with this mu."""

    mu: float
    error: float
    """Root mean square distance from the slopes that do not depend on mu, relative to those."""
    straight: float
    """Share of the loss's change that a straight line explains."""


class Stepping(NamedTuple):
    """The effect of a step with this learning rate on the loss of samples that it was not measured on."""

    lr: float
    fall: float
    """Median over the trials; -inf where the loss is not finite."""


@dataclass
class Measurement:
    """Everything measured at one point w."""

    round: int
    loss: float
    lr: float
    mu: float | None
    trials: int
    repeat: float = 0.0
    """The largest difference between two measurements of the loss at the same weights."""
    slope: float = 0.0
    """Root mean square of the decided scalars."""
    signal: signal.Signal | None = None
    kept: float = 1.0
    """How much of the honest clients' mean is left in the decision: the attack and the rule take some."""
    directions_ratio: float = 0.0
    """Signal to noise of a step across its directions: the length of its part along the gradient, over the rest."""
    probing: list[Probing] = field(default_factory=list)
    mu_low: float | None = None
    mu_high: float | None = None
    stepping: list[Stepping] = field(default_factory=list)
    lr_low: float | None = None
    lr_best: float | None = None
    lr_high: float | None = None
    lr_rise: float | None = None
    """The lr from which on a step raises the loss."""
    promised: float = 0.0
    """How much the loss should fall in one step with lr by the linear model, on the step's own samples."""
    real: float = 0.0
    """How much it actually falls there."""
    evaluations: int = 0


class CountedLosses:
    """A subject's losses as means over its clients, with the number of evaluations."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.calls = subject, 0

    def loss(self, trial: int, probe: Probe | None = None, steps: Sequence[Step] = (), *, fresh: bool = False) -> float:
        self.calls += 1
        return float(np.mean(self.subject.losses(trial, probe, steps, fresh=fresh)))

    def step(self, trial: int, values: Vector, lr: float) -> list[Step]:
        z = self.subject.directions(trial)
        return [Step(z.seed, z.round, coefficients(lr, values, z.k), first=z.first)]


def check_judgeable(updates: Updates) -> None:
    """Refuse an optimizer whose steps along the tried directions do not have the lengths of real ones."""
    if not updates.optimizer.lr_measurable:
        name = updates.header.optimizer
        raise ConfigError(
            f"a diagnosis can't judge the learning rate of optimizer = {name!r}, whose steps have the length lr in "
            'every coordinate, whatever the slopes are; for mu and the noise, diagnose with optimizer = "sgd"'
        )


def plain(value: Any) -> Any:
    """Return a measurement, or a part of it, as JSON types; a number that is not finite becomes None."""
    if isinstance(value, Measurement):
        return {name: plain(part) for name, part in vars(value).items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
