"""The optimizer: its settings, its steps, and how it continues."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.config.schedules import AUTO, FREE
from cyber0.directions import Probe, Step
from cyber0.errors import LedgerError, ModelError
from cyber0.estimate.loss_identity import LossIdentity
from cyber0.estimate.loss_value import loss_value
from cyber0.ledger import Header, Record
from cyber0.ledger.header import check_rounding
from cyber0.model.eval_mode import Untouched
from cyber0.model.scalars import Scalar, not_negative, number_of, positive, whole
from cyber0.model.vector import CHECK_DISTANCE, Parameters
from cyber0.protocol.client import Updates, check_model, replay_from_start
from cyber0.storage import replacing
from cyber0.zero_order.batch_loss import BatchLoss, LossClosure, LossFunction, Passes, closures_of
from cyber0.zero_order.checkpoint import ledger_bytes, make_checkpoint, read_checkpoint
from cyber0.zero_order.guards import StepGuards, needs_argument
from cyber0.zero_order.ledger_optimizer import LedgerOptimizer
from cyber0.zero_order.settings import (
    check_estimator,
    check_optimizer,
    checked_mu,
    checked_rank,
    checked_seed,
    open_ledger,
    recorded_lr,
    warn_of_resolution,
)
from cyber0.zero_order.slopes import Slopes

if TYPE_CHECKING:
    from cyber0.diagnose.verdict import Diagnosis

NO_BATCH: Final = object()


class StepResult(NamedTuple):
    """What one step measured."""

    round: int
    loss: float
    """The loss at w with one_sided; else the mean of the losses that were measured (2k by two_point), close to it."""
    slopes: NDArray[np.float32]
    """The k estimates: (f(w + mu z) - f(w - mu z)) / 2 mu by two_point, (f(w + mu z) - f(w)) / mu by one_sided, or the
    derivatives along z; times d on the sphere."""


class ZeroOrder(LedgerOptimizer):
    """Zero-order optimizer for the trainable weights of `model`.

    Between steps the weights, and what is trained and what frozen, must stay as they are: a change from outside is
    refused at the next `step`, because the ledger would no longer give the model.

    Args:
        model: Any nn.Module (the model itself, not its parameters); it is evaluated in eval mode, and frozen weights
            stay as they are. If the loss calls torch.compile(model), that runs eagerly; to run it compiled, at the
            cost of a second copy of the weights, pass what torch.compile returned.
        lr: Learning rate of the first step; `optimizer.lr` or a scheduler of torch changes it. A resumed optimizer must
            be given the same, and continues with that of the ledger's last step. A scheduler continues if
            `optimizer.lr` is set to the first one again and `scheduler.step()` called `optimizer.round` times. "auto":
            the first `step` finds it (see `find_lr`), on its one batch; a resumed optimizer takes the ledger's.
        mu: Length of the probing step.
        k: Directions a step; 2k evaluations of the loss, k + 1 with one_sided.
        seed: Decides every direction.
        distribution: "gaussian", "rademacher", "sphere" or "low_rank".
        rank: Of every matrix of a low-rank direction; other distributions have none.
        estimator: "two_point"; "one_sided", whose directions share the loss at w: almost twice as many of them for the
            same evaluations, with slopes that are off by mu/2 z'Hz; or "forward": derivatives at w itself by
            forward-mode differentiation, for which mu is 0 and the loss must return a tensor.
        optimizer: How the slopes become a step: "sgd", or another that `cyber0 list` shows under method.optimizer.
        optimizer_options: What it takes, as {"beta": 0.98}.
        rounding: How steps of 16-bit weights are rounded: "stochastic", by 32 random bits a weight, or "stochastic16",
            by 16 of them, which is faster.
        projection_radius: Keep w in the ball of this radius around 0.
        ledger: A file for the steps. If it exists, it must belong to this model and these settings, and w is moved
            to where it ends. None keeps the steps in memory.

    Examples:
        >>> from cyber0 import ZeroOrder
        >>> torch.manual_seed(0)
        <torch._C.Generator object at ...>
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(batch):
        ...     return model(batch).square().mean()
        >>> batch = torch.randn(16, 3)
        >>> before = loss_fn(batch).item()
        >>> optimizer = ZeroOrder(model, lr=0.1, k=4, seed=0)
        >>> for _ in range(50):
        ...     result = optimizer.step(loss_fn, batch)
        >>> loss_fn(batch).item() < 0.1 * before
        True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lr: Scalar,
        mu: Scalar = 1e-3,
        k: Scalar = 1,
        seed: Scalar = 0,
        distribution: str = "gaussian",
        rank: Scalar = 1,
        estimator: str = "two_point",
        optimizer: str = "sgd",
        optimizer_options: Mapping[str, Any] | None = None,
        rounding: str = "stochastic",
        projection_radius: Scalar | None = None,
        ledger: str | Path | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"ZeroOrder takes the model itself, got {type(model).__name__}: ZeroOrder(model, lr=...). It replaces "
                "weights where the model uses them; freeze what is not to be trained by requires_grad_(False)"
            )
        rank = checked_rank(rank, distribution)
        check_estimator(estimator)
        self._path = None if ledger is None else Path(ledger)
        self._auto = isinstance(lr, str) and lr == AUTO
        lr = recorded_lr(self._path) if self._auto else positive("lr", lr)
        self._unknown_lr = lr is None
        """Whether the learning rate is to be found, which the header of the ledger needs: it is in memory till then."""
        k = whole("k", k)
        positive("k", k)
        seed = checked_seed(seed)
        mu = checked_mu(mu, estimator)
        check_optimizer(optimizer, optimizer_options or {}, k, self._unknown_lr)
        if projection_radius is not None:
            projection_radius = positive("projection_radius", projection_radius)
        self.parameters = Parameters(model, distribution, rank=rank)
        check_rounding(rounding, self.parameters.layout, "rounding")
        if estimator in PROBING_ESTIMATORS:
            warn_of_resolution(self.parameters, mu)
        header = Header(
            seed=seed,
            layout=self.parameters.layout,
            distribution=distribution,
            rank=rank,
            k=k,
            local_epochs=1,
            mu=mu,
            estimator=estimator,
            lr=1.0 if lr is None else lr,
            lr_schedule=FREE,  # whoever calls `step` sets it
            projection_radius=projection_radius,
            weights_digest=self.parameters.digest(),
            rest_digest=self.parameters.rest_digest(),
            clients=1,
            rounding=rounding,
            optimizer=optimizer,
            optimizer_options=dict(optimizer_options or {}),
        )
        self._mu = float(np.float32(mu))
        self._slopes = Slopes(self.parameters, seed, estimator, self._mu)
        self._identity = LossIdentity()
        self._checked: set[Hashable] = set()
        self._passes = Passes(self.parameters)
        super().__init__(self.parameters.tensors, {"lr": math.nan if lr is None else lr})
        # A ledger of other weights is refused, so they need not be hashed again.
        self.ledger = open_ledger(None if self._unknown_lr else self._path, header)
        self.updates = Updates(self.ledger.header)
        self._applied = replay_from_start(self.ledger.header, self.parameters, self.ledger, self.updates)
        self._untouched = Untouched(self.parameters)
        self._guards = StepGuards(self.parameters, self._untouched, estimator, self._mu)
        last = self.ledger.last
        if last is not None:  # a scheduler that continues (last_epoch = round - 1) asks for both
            self.param_groups[0].update(lr=last.lr, initial_lr=lr)

    @property
    def lr(self) -> float:
        """The learning rate of the next step: that of the only parameter group; NaN until "auto" has found one."""
        lr = number_of(self.param_groups[0]["lr"])
        if not self._auto or lr is None or not math.isnan(lr):
            return not_negative("lr", self.param_groups[0]["lr"])
        if self._unknown_lr:
            return lr
        raise ModelError(
            'lr is NaN: a scheduler was made before lr="auto" had found a number; call optimizer.find_lr(loss) before '
            "you make the scheduler"
        )

    @lr.setter
    def lr(self, value: Scalar) -> None:
        self.param_groups[0]["lr"] = not_negative("lr", value)

    def step(  # type: ignore[override]
        self, loss: LossFunction | LossClosure | None = None, batch: Any = NO_BATCH, *, capture: bool = True
    ) -> StepResult:
        """Measure the loss of a batch along k directions and move w.

            optimizer.step(loss_fn, batch)

        `loss_fn(batch)` returns the loss of the model as it then is: a number or a scalar tensor. The batch may be a
        tensor, or tensors in tuples, lists and dictionaries (a BatchEncoding of transformers too); `loss_fn` receives
        the same structure. It is called 2k times, k + 1 with one_sided. The first time that its code computes with a
        network, it is called a few times more, to check whether all its uses of the weights can be perturbed. If it
        raises, or is not finite, w stays as it is.

        On a GPU, passes are captured as CUDA graphs if the batch is there as well, and a model of up to 2^20 weights is
        evaluated at many directions at once, on any device. What `loss_fn` computes must then depend on nothing but
        the batch and the tensors of the model: a graph repeats what was done when it was captured. Another function, or
        other numbers and objects that the function refers to, are noticed, but not what a module keeps beside its
        tensors. `capture=False` calls `loss_fn` at every probe instead.

        Without a batch, `loss` takes no argument; it must see the same data each time and is called at every probe.

        Raises:
            ModelError: The loss can't be used, or the weights were changed from outside.
        """
        if loss is None or not callable(loss):
            raise TypeError(
                f"step needs the loss as a function, got {loss!r}: optimizer.step(loss_fn, batch), and loss_fn(batch) "
                "returns the loss of the model on that batch; there is no backward() here"
            )
        closure = cast(LossClosure, loss)
        if batch is not NO_BATCH:
            closure = BatchLoss(self._passes, cast(LossFunction, loss), batch, capture)
        try:
            return self._step(closure)
        except TypeError as error:
            if batch is NO_BATCH and needs_argument(loss):
                raise TypeError(
                    f"the loss takes an argument, and step got no batch ({error}): optimizer.step(loss_fn, batch), or "
                    "a loss without arguments"
                ) from error
            raise

    def _step(self, loss: LossClosure) -> StepResult:
        if self.ledger.closed:
            raise ModelError(
                "this ZeroOrder is closed: make another of the model; one that continues the same ledger starts from "
                "the weights that the ledger started from"
            )
        if self.ledger.header.estimator == "forward" and torch.is_inference_mode_enabled():
            raise ModelError(
                "estimator='forward' differentiates, which torch.inference_mode() prevents; call step outside of it "
                "(it needs no memory for gradients), or use the estimator 'two_point'"
            )
        self._catch_up()
        self._untouched.check_versions(self.round)  # their values are compared once a step, below
        if self._unknown_lr:
            self.find_lr(loss)
        lr = self.lr
        try:
            self._check_uses(loss)
            self._slopes.measure_ahead(loss, self.round, self.ledger.header.k)
            at_w = self.measure_at_w(loss)
            measured = self._measure_all(loss, at_w)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise ModelError(
                "the loss calls backward(), and there are no gradients here: return the loss alone, "
                "optimizer.step(loss_fn, batch)"
            ) from error
        slopes = np.array([slope for _, slope in measured]).astype(np.float32)
        losses = np.concatenate([losses for losses, _ in measured])
        self._guards.refuse_flat(losses, slopes, self.round, lambda r: self.measure(loss, self.round, r, at_w)[0])
        self._untouched.check_values(self.round)  # the loss itself may have written to them
        record = Record(self.round, lr, slopes, np.ones(1, np.bool_), np.zeros(1, np.int64))
        self.ledger.append(record)  # first the log, then the weights: what is lost can be replayed
        self._commit(record)
        self._guards.warn_if_saturated(record.round, lr)
        return StepResult(record.round, float(losses.mean()) if at_w is None else at_w, slopes)

    def find_lr(self, *losses: LossFunction | LossClosure, batches: Iterable[Any] | None = None) -> float:
        """Return the learning rate; with lr="auto", measure it first if that has not been done.

        Call it before making a scheduler, which multiplies the rate that it finds. Steps are tried with many rates, and
        half of the one by which the loss falls most is taken. Give a function and a few batches,
        `find_lr(loss_fn, batches=batches)`, or losses without an argument, each on a batch of its own; the loss of each
        batch is computed some hundred times. With several of them a step is judged on batches that it was not measured
        on; with a single one, as from `step`, on its own batch, so noise counts as progress: then use a large batch.

        Raises:
            ConfigError: The loss is flat or not finite, or no step lowers it.
        """
        closures = closures_of("find_lr", self._passes, losses, batches)
        if self._unknown_lr:
            if math.isnan(self.lr):
                for loss in closures:
                    self._check_uses(loss)
                from cyber0.diagnose.rate import measured_lr_of

                self.lr = measured_lr_of(self, closures)
            ledger = open_ledger(self._path, replace(self.ledger.header, lr=positive("lr", self.lr)))
            if ledger.next_round:
                ledger.close()
                raise LedgerError(
                    f"the ledger {self._path} was written to while this ZeroOrder measured its learning rate: make "
                    "another of the model at its starting weights, which continues that ledger, or choose another file"
                )
            self.ledger = ledger
            self._unknown_lr = False
        return self.lr

    def diagnose(
        self, *losses: LossFunction | LossClosure, batches: Iterable[Any] | None = None, trials: int = 8
    ) -> Diagnosis:  # fmt: skip
        """Measure whether lr and mu suit the model as it is, or whether something else is wrong; w stays as it is.

            print(optimizer.diagnose(loss_fn, batches=batches))

        The function is like that of `step`; or give losses without an argument, each on a batch of its own. What the
        batches agree on is signal, the rest is noise, and steps are judged on batches that they were not measured on.
        The loss of each batch is computed some hundred times.
        """
        closures = closures_of("diagnose", self._passes, losses, batches)
        self._catch_up()
        self._untouched.check(self.round)
        self.find_lr(*closures)
        for loss in closures:
            self._check_uses(loss)
        from cyber0.diagnose.closures import diagnose

        return diagnose(self, closures, trials)

    def _measure_all(self, loss: LossClosure, at_w: float | None) -> list[tuple[NDArray[np.float64], float]]:
        """Return what is measured along each direction of the next step; refuse what is not finite at once."""
        measured = []
        for r in range(self.ledger.header.k):
            losses, slope = self.measure(loss, self.round, r, at_w)
            self._guards.check_finite(losses, slope, self.round, r)
            measured.append((losses, slope))
        return measured

    def measure_at_w(self, loss: LossClosure) -> float | None:
        """Return the loss at w, which the directions of a one_sided step share; None for the other estimators."""
        return self._slopes.at_w(loss, self.round)

    def measure(
        self, loss: LossClosure, round: int, r: int, at_w: float | None
    ) -> tuple[NDArray[np.float64], float]:  # fmt: skip
        """Return the losses that are compared along direction r of a round, and the slope; w stays as it is.

        `at_w` is what `measure_at_w` returned for this loss.
        """
        return self._slopes.along(loss, round, r, at_w)

    def probe(self, loss: LossClosure, probe: Probe | None = None, steps: Sequence[Step] = ()) -> float:
        """Return the loss at (w after steps) + c z; w stays as it is."""
        return self._slopes.probe(loss, probe, steps)

    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set w to the ledger's starting weights, given by name, and move it through the ledger again.

        Use it after an interrupted commit, or after the weights were changed from outside.
        """
        self.parameters.load(weights)
        check_model(self.ledger.header, self.parameters)
        self.updates = Updates(self.ledger.header)
        self._applied = replay_from_start(self.ledger.header, self.parameters, self.ledger, self.updates)
        self._untouched.note()

    def checkpoint(self) -> dict[str, Any]:
        """Return what to save beside the model, by torch.save for example, so that `resume` can continue from there.

        It holds the ledger: a step adds some bytes to it, and 4 for each of its k slopes. The weights are not in it.
        """
        self._catch_up()
        self._untouched.check(self.round)
        return make_checkpoint(self)

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: same settings, a model that has the weights that were saved with it, no file.

        The starting weights are not needed, and the next step has the same bits as without the interruption.

        Raises:
            LedgerError: This optimizer has taken steps, has a ledger in a file, or has other settings.
            ModelError: The model's weights are not those that were saved with the checkpoint.
        """
        if self.round or self._path is not None or self._unknown_lr:
            raise LedgerError(
                "only a new ZeroOrder with the lr of the checkpoint and without ledger=FILE can resume it"
            )
        self.ledger, self.updates = read_checkpoint(self, checkpoint)
        self._applied = self.round
        if (last := self.ledger.last) is not None:
            self.param_groups[0].update(lr=last.lr, initial_lr=self.ledger.header.lr)

    def save_ledger(self, path: str | Path) -> None:
        """Write the steps so far to a file, which `ZeroOrder(..., ledger=path)` on the starting weights continues."""
        with replacing(Path(path)) as part:
            part.write_bytes(ledger_bytes(self.ledger))

    def close(self) -> None:
        """Force the ledger to disk and close it.

        Raises:
            ModelError: The weights were changed from outside since the last step. The ledger is closed all the same.
        """
        self.ledger.close()
        if self.parameters.attached:  # converting a model after training is allowed
            self._untouched.check(self.round)

    # Guards around a step.

    def _catch_up(self) -> None:
        """Commit the ledger's steps that w lacks; there are some only if a step was interrupted."""
        for record in self.ledger.records(self._applied):
            self._untouched.check(self._applied)
            self._commit(record)

    def _commit(self, record: Record) -> None:
        before = self.updates.state
        try:
            self.parameters.commit(self.updates.step(record, b""), self.ledger.header.projection_radius)
        except BaseException:  # an interrupt too: the state must stay that of the weights
            self.updates.state = before
            raise
        self._applied += 1
        if record.lr > 0:
            self._guards.watch_for_movement(record.lr)
        self._untouched.note()

    def _check_uses(self, loss: LossClosure) -> None:
        """Check whether all uses of w are met, once for each function and the networks that it computes with."""
        function = loss.function if isinstance(loss, BatchLoss) else loss
        if self._identity(function) in self._checked:
            return
        with torch.no_grad():
            probe = Probe(self.ledger.header.seed, self.round, 0, CHECK_DISTANCE)
            self.parameters.check_uses(lambda: loss_value(loss()), probe)
        self._checked.add(self._identity(function))  # with what its first call has made, such as a traced module
