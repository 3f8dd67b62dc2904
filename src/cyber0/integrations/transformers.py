"""A Trainer of Hugging Face's transformers that trains by zero-order steps.

    trainer = ZeroOrderTrainer(model=model, args=args, train_dataset=data, zero_order=dict(mu=1e-3, k=4, seed=0))
    trainer.train()

Data, collator, evaluation, logging, callbacks and checkpoints are the Trainer's. Its `training_step` measures the loss
along k directions and moves the weights; there is no backward pass, no gradient, and no optimizer state but the ledger.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cyber0.errors import ConfigError, LedgerError
from cyber0.estimate.differences import evaluations
from cyber0.zero_order import StepResult, ZeroOrder
from cyber0.zero_order.optimizer import NO_BATCH

try:
    from transformers import Trainer
except ImportError:
    raise ConfigError("ZeroOrderTrainer needs the package transformers: pip install 'cyber0[text]'") from None

CAPTURE = "capture"
_ELSEWHERE = {
    "model": "the Trainer passes its own",
    "lr": "set TrainingArguments(learning_rate=...)",
    "ledger": "it is in every checkpoint, and trainer.save_ledger(FILE) writes it",
}
"""What ZeroOrder takes, but a Trainer has another place for."""


class TrainerOptimizer(ZeroOrder):
    """A ZeroOrder as a Trainer uses it: the step has been taken when it calls `step`; the state holds the ledger."""

    def step(  # type: ignore[override]
        self, loss: Any = None, batch: Any = NO_BATCH, *, capture: bool = True
    ) -> StepResult | None:
        """Take a step if there is a loss; the Trainer's own call, without one, has no effect."""
        return None if loss is None else super().step(loss, batch, capture=capture)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after the first step with the checkpoint that `load_state_dict` resumes."""
        state = super().state_dict()
        return {**state, "checkpoint": self.checkpoint()} if self.round else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that was saved with the weights that the model now has."""
        if "checkpoint" in state_dict and not self.round:
            self.resume(state_dict["checkpoint"])
        super().load_state_dict(state_dict)


class ZeroOrderTrainer(Trainer):  # type: ignore[misc]  # its types are not read, so that it may be absent
    """A `transformers.Trainer` whose steps are those of `cyber0.ZeroOrder`.

    The learning rate and its schedule are those of TrainingArguments; `optim`, `max_grad_norm` and the Adam settings
    have no effect. The model is always in eval mode, so there is no dropout. Frozen weights, as of PEFT, stay as they
    are. A training that is resumed from a checkpoint ends with the same bits as one that was not interrupted.

    Args:
        model: As in Trainer, and so is everything that is not listed here.
        args: TrainingArguments. DeepSpeed, FSDP, several GPUs or processes, fp16=True, torch_compile and weight decay
            are refused.
        zero_order: Keyword arguments of `ZeroOrder` (mu, k, distribution, estimator, optimizer and so on). `seed` is
            that of TrainingArguments by default. "capture" says whether passes may be captured as CUDA graphs; by
            default they are if the loss is the model's own.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, zero_order: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        self.zero_order_settings = _checked_settings({} if zero_order is None else zero_order)
        if args is not None:
            _refuse_arguments(args)
        super().__init__(model, args, *rest, **more)
        _refuse_arguments(self.args)  # also those that Trainer fills in, and what `accelerate launch` has set
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("ZeroOrderTrainer can't use DeepSpeed or FSDP; start it with python, on one device")
        if self.optimizer is not None or self.lr_scheduler is not None or more.get("optimizer_cls_and_kwargs"):
            raise ConfigError(
                "ZeroOrderTrainer makes its optimizer itself: leave optimizers and optimizer_cls_and_kwargs out; "
                "set zero_order={'optimizer': ...}, learning_rate and lr_scheduler_type"
            )
        self.zero_order: TrainerOptimizer | None = None
        """The optimizer, from the beginning of `train` on."""
        self._micro_batches: list[Any] = []
        self._loss = _StepLoss(self)
        self._warned = False

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make a new ZeroOrder of the model as it is: every `train` starts its own ledger, or resumes one."""
        settings = {name: value for name, value in self.zero_order_settings.items() if name != CAPTURE}
        settings.setdefault("seed", self.args.seed)
        self.optimizer = self.zero_order = None  # the memory of an earlier one is free before the next is made
        self._micro_batches.clear()
        self.zero_order = TrainerOptimizer(model or self.model, lr=self.args.learning_rate, **settings)
        self.optimizer = self.zero_order
        return self.zero_order

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep the inputs; with the last ones of a step (gradient_accumulation_steps), take the step.

        Returns the loss of the whole step with its last inputs, and 0 before, so that their sum is the step's loss.
        """
        model.eval()
        self._micro_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._micro_batches = self._micro_batches, []
        assert self.zero_order is not None
        if self.zero_order.round != self.state.global_step:
            raise LedgerError(
                f"the Trainer is at step {self.state.global_step} and its ledger at step {self.zero_order.round}: the "
                "checkpoint holds no optimizer.pt of a ZeroOrderTrainer, so it can't be resumed; it was saved by "
                "another Trainer or with save_only_model=True. Load its model and start a new training"
            )
        if isinstance(num_items_in_batch, int):  # as a tensor, other numbers need no other graph
            num_items_in_batch = torch.tensor(num_items_in_batch, device=self.args.device)
        batch = {"batches": batches, "items": num_items_in_batch}
        self._loss.model = model
        result = self.zero_order.step(self._loss, batch, capture=self._captures)
        assert result is not None
        self._warn_of_coarse_losses()
        return torch.tensor(result.loss, dtype=torch.float32, device=self.args.device)

    def _warn_of_coarse_losses(self) -> None:
        """Warn once if the model returns its loss in 16 bits, whose rounding is most of what probes then measure."""
        kind = self._loss.dtype
        if self._warned or kind not in (torch.float16, torch.bfloat16):
            return
        self._warned = True
        warnings.warn(
            f"the loss is computed in {str(kind).removeprefix('torch.')}, in steps of {torch.finfo(kind).eps:.1g} of "
            "its size, and slopes are differences of losses: pass compute_loss_func=..., which computes it from "
            "outputs.logits.float()",
            RuntimeWarning,
            stacklevel=2,
        )

    @property
    def _captures(self) -> bool:
        """Whether the loss depends on nothing but the batch and the model: a graph repeats what was captured."""
        plain = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        return bool(self.zero_order_settings.get(CAPTURE, plain))

    def loss_of_step(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss of all inputs of a step, as the Trainer would weight their gradients."""
        batches, items = batch["batches"], batch["items"]
        total: Any = 0.0
        for inputs in batches:
            with self.compute_loss_context_manager():
                # compute_loss may take the labels out of its inputs
                total = total + self.compute_loss(model, dict(inputs), num_items_in_batch=items)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and items is not None)
        loss: torch.Tensor = total if scaled else total / len(batches)
        return loss

    def save_ledger(self, path: str | Path) -> None:
        """Write the steps of the last training to a file: with the starting weights, it gives the trained ones."""
        if self.zero_order is None:
            raise LedgerError("there is no ledger yet: call train() first")
        self.zero_order.save_ledger(path)

    def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        """Log what the Trainer does, without a norm of gradients: there are none."""
        logs.pop("grad_norm", None)
        super().log(logs, *rest, **more)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return those of a step's forward passes; the Trainer counts one, and a backward pass of twice its cost."""
        settings = self.zero_order_settings
        passes = evaluations(settings.get("estimator", "two_point"), settings.get("k", 1))
        return int(super().floating_point_ops(inputs)) * passes // 3


class _StepLoss(torch.nn.Module):
    """The loss of a step as a module: what is captured belongs to it, whatever else of its Trainer changes."""

    def __init__(self, trainer: ZeroOrderTrainer) -> None:
        super().__init__()
        self._trainer = trainer
        self.model: torch.nn.Module
        self.dtype: torch.dtype | None = None
        """Of the loss that was last computed."""

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        loss = self._trainer.loss_of_step(self.model, batch)
        self.dtype = loss.dtype
        return loss


def _checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of ZeroOrder; what it does not take, or a Trainer has another place for, is refused."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"zero_order = {given!r} must be a dictionary: zero_order=dict(mu=1e-3, k=4, seed=0)")
    known = [*inspect.signature(ZeroOrder).parameters, CAPTURE]
    for name in given:
        if name in _ELSEWHERE:
            raise ConfigError(f"zero_order={{{name!r}: ...}} can't be set: {_ELSEWHERE[name]}")
        if name not in known:
            choices = ", ".join(name for name in known if name not in _ELSEWHERE)
            raise ConfigError(f"zero_order={{{name!r}: ...}} is not a setting; use {choices}")
    return dict(given)


def _refuse_arguments(args: Any) -> None:
    """Refuse TrainingArguments that can't work without gradients or with weights in several places."""
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        raise ConfigError("ZeroOrderTrainer keeps the whole model on one device: leave deepspeed and fsdp out")
    if args.world_size > 1 or args.n_gpu > 1:
        raise ConfigError(f"ZeroOrderTrainer uses one device, and there are {max(args.world_size, args.n_gpu)}: start "
                          "one process, with one GPU visible (CUDA_VISIBLE_DEVICES=0)")  # fmt: skip
    if args.fp16:
        raise ConfigError("fp16=True scales losses for a backward pass, and there is none: load the model in float16 "
                          "(from_pretrained(..., dtype=torch.float16)), or set bf16=True")  # fmt: skip
    if args.torch_compile:
        raise ConfigError("torch_compile=True has no effect on weights that are replaced at every probe: leave it out; "
                          "on a GPU, passes are captured as CUDA graphs instead")  # fmt: skip
    if args.weight_decay:
        raise ConfigError(f"weight_decay = {args.weight_decay:g} can't be used: set it to 0; zero_order="
                          "{'projection_radius': R} keeps the weights in a ball")  # fmt: skip
    if not (math.isfinite(args.learning_rate) and args.learning_rate > 0):
        raise ConfigError(f"learning_rate = {args.learning_rate:g} must be above 0; 1e-6 is usual for whole models")
    for name, why in (
        ("gradient_checkpointing", "no activations are kept"),
        ("neftune_noise_alpha", "it needs train mode"),
    ):
        if getattr(args, name, None):
            warnings.warn(f"{name} has no effect in zero-order training: {why}", RuntimeWarning, stacklevel=3)
