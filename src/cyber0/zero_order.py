"""Zero-order fine-tuning of one torch model on one machine.

    optimizer = ZeroOrder(model, lr=1e-6, mu=1e-3, k=4, seed=0, ledger="tuning.ledger")
    for batch in batches:
        optimizer.step(lambda: loss(model, batch))

Each step measures the loss at w + mu z and w - mu z for k directions and moves w against them. There is no gradient
and no backpropagation: memory is that of inference. With a ledger, every step is on disk as k numbers; the same call
on the same starting weights continues where the file ends.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.client import commit_step, replay
from cyber0.directions import DISTRIBUTIONS, Perturbation, Step
from cyber0.errors import LedgerError, ModelError
from cyber0.ledger import Header, Ledger, Record
from cyber0.parameters import Parameters

if TYPE_CHECKING:
    from cyber0.diagnostics.words import Diagnosis

Loss = Callable[[], "torch.Tensor | float"]


class StepResult(NamedTuple):
    """What one step saw."""

    round: int
    loss: float
    """Mean of the 2k losses that were measured, close to the loss at w."""
    slopes: NDArray[np.float32]
    """The k estimates (f(w + mu z) - f(w - mu z)) / 2 mu, times d on the sphere."""


class ZeroOrder:
    """Zero-order optimizer for the trainable weights of `model`.

    Args:
        model: Any nn.Module; it is evaluated in eval mode, and frozen weights stay as they are.
        lr: Learning rate.
        mu: Length of the probing step.
        k: Directions a step; 2k evaluations of the loss.
        seed: Decides every direction.
        distribution: "gaussian", "rademacher" or "sphere".
        projection_radius: Keep w in the ball of this radius around 0.
        ledger: A file for the steps. If it exists, it must belong to this model and these settings, and w is moved
            to where it ends. None keeps the steps in memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lr: float,
        mu: float = 1e-3,
        k: int = 1,
        seed: int = 0,
        distribution: str = "gaussian",
        projection_radius: float | None = None,
        ledger: str | Path | None = None,
    ) -> None:
        _check_positive(lr=lr, mu=float(np.float32(mu)) if isinstance(mu, float) else mu, k=k)
        if not isinstance(k, int) or isinstance(k, bool):
            raise ValueError(f"k must be a whole number, got {k!r}")
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
        if projection_radius is not None:
            _check_positive(projection_radius=projection_radius)
        self.parameters = Parameters(model, distribution)
        header = Header(
            seed=seed,
            dimension=self.parameters.dimension,
            layout=self.parameters.layout,
            distribution=distribution,
            k=k,
            local_epochs=1,
            mu=mu,
            estimator="two_point",
            lr=lr,
            lr_schedule="constant",
            projection_radius=projection_radius,
            weights_digest=self.parameters.digest(),
            rest_digest=self.parameters.rest_digest(),
            clients=1,
        )
        self.lr = lr
        self._mu = float(np.float32(mu))
        self._factor = float(self.parameters.dimension) if distribution == "sphere" else 1.0
        self.ledger = _open(ledger, header)
        self._applied = replay(self.ledger.header, self.parameters, self.ledger)
        self._warned_of_saturation = False

    @property
    def round(self) -> int:
        """How many steps w has behind it; the number of the next one."""
        return self.ledger.next_round

    def step(self, loss: Loss) -> StepResult:
        """Measure `loss` along k directions and move w.

        `loss` takes no argument and returns the loss of the model as it then is: a number or a scalar tensor. It is
        called 2k times and must see the same data each time. If it raises, or is not finite, w stays as it is.
        """
        self._catch_up()
        header = self.ledger.header
        losses = np.array([[self._measure(loss, r, c) for c in (self._mu, -self._mu)] for r in range(header.k)])
        slopes = (self._factor * (losses[:, 0] - losses[:, 1]) / (2 * self._mu)).astype(np.float32)
        record = Record(self.round, self.lr, slopes, np.ones(1, np.bool_), np.zeros(1, np.int64))
        self.ledger.append(record)  # first the log, then the weights: what is lost can be replayed
        self._catch_up()
        self._warn_if_saturated()
        return StepResult(record.round, float(losses.mean()), slopes)

    def diagnose(self, *losses: Loss, trials: int = 8) -> Diagnosis:
        """Say whether lr and mu suit the model as it is, or whether something else is wrong; w stays as it is.

            print(optimizer.diagnose(*(lambda b=b: loss(model, b) for b in batches)))

        Each loss is like that of `step`, on a batch of its own: signal is told from noise by what batches agree on, and
        steps are judged on batches that they were not measured on. Every loss is called some hundred times.
        """
        if not losses:
            raise ValueError("diagnose needs at least one loss, better several on different batches")
        self._catch_up()
        from cyber0.diagnostics.closures import diagnose

        return diagnose(self, losses, trials)

    def _catch_up(self) -> None:
        """Move w through what the ledger holds beyond it; more than one step only if one was interrupted."""
        for record in self.ledger.records(self._applied):
            self.parameters.commit(commit_step(self.ledger.header, record, b""), self.ledger.header.projection_radius)
            self._applied += 1

    def _warn_if_saturated(self) -> None:
        count = 0 if self._warned_of_saturation else self.parameters.saturated()
        if count:
            self._warned_of_saturation = True
            warnings.warn(
                f"step {self.round - 1}: {count} of {self.parameters.dimension} weights were clamped at the largest "
                f"value that their type can hold: the steps are too long; lower lr = {self.lr:g} "
                "(`diagnose` measures which values work)",
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Force the ledger to disk and close it."""
        self.ledger.close()

    def look(self, loss: Loss, look: Perturbation | None = None, steps: Sequence[Step] = ()) -> float:
        """Return the loss at (w after steps) + c z; w stays as it is."""
        with torch.no_grad(), self.parameters.at(look, steps):
            return _scalar(loss())

    def _measure(self, loss: Loss, r: int, c: float) -> float:
        header = self.ledger.header
        value = self.look(loss, Perturbation(header.seed, self.round, r, c))
        if not math.isfinite(value):
            raise ModelError(
                f"the loss is {value} in step {self.round}, direction {r}: the weights were left as they are; "
                "lower lr or mu, or look at this batch"
            )
        return value


def _scalar(result: torch.Tensor | float) -> float:
    if isinstance(result, torch.Tensor):
        if result.numel() != 1:
            raise ModelError(f"the loss must be one number, got a tensor of shape {tuple(result.shape)}: take its mean")
        return float(result.item())
    return float(result)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")


def _open(path: str | Path | None, header: Header) -> Ledger:
    if path is None or not Path(path).exists():
        return Ledger.create(None if path is None else Path(path), header)
    ledger = Ledger.open(Path(path), writable=True)
    odd = header.differences(ledger.header)
    if odd:
        ledger.close()
        raise LedgerError(
            f"the ledger {path} belongs to another model or other settings (it differs in {', '.join(odd)}); "
            "start from the same weights and settings, or choose another file"
        )
    return ledger
