"""Checks of a user's task: the names of its methods, and what they return."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch

from cyber0.config.suggestions import closest
from cyber0.errors import ConfigError, ModelError
from cyber0.tasks import base
from cyber0.tasks.metrics import RESERVED
from cyber0.tasks.samples import Columns, TaskData, type_name

log = logging.getLogger("cyber0")

TASK_METHODS = (
    "model",
    "train_data",
    "test_data",
    "outputs",
    "losses",
    "metrics",
)  # which a task may define


def check_method_names(task: base.Task, name: str) -> None:
    """Refuse a method whose name looks like a misspelt one of `cyber0.Task` that the class does not define."""
    kinds = [kind for kind in type(task).__mro__ if kind is not object and kind.__module__ != base.__name__]
    used = {word for kind in kinds for found in vars(kind).values() for word in _names_in(found)}
    written = {key for kind in kinds for key in vars(kind)} | vars(task).keys()
    unwritten = [hook for hook in TASK_METHODS if hook not in written]
    for kind in kinds:
        for key in (key for key, found in vars(kind).items() if inspect.isfunction(found)):
            near = closest(key, unwritten, cutoff=0.8)
            if near and key not in used and not hasattr(base.Task, key):
                raise ConfigError(f"{name}: nothing calls {key}() of {kind.__name__}; did you mean {near!r}? "
                                  "(if it is a helper, start its name with _)")  # fmt: skip


def _names_in(found: Any) -> Iterator[str]:
    """Yield the attributes and names that the code of a class attribute uses, inner functions included."""
    codes = [getattr(part, "__code__", None) for part in (
        found, getattr(found, "__func__", None), getattr(found, "func", None), getattr(found, "fget", None),
        getattr(found, "__wrapped__", None),
    )]  # fmt: skip
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes += code.co_consts


def warn_of_nonfinite(data: TaskData, where: str) -> None:
    """Warn of samples with numbers that are not finite: a model may know what to do with them, and most don't."""
    tensors = data.inputs.tensors if isinstance(data.inputs, Columns) else {"inputs": data.inputs}
    for name, tensor in {**tensors, "targets": data.targets}.items():
        if not tensor.is_floating_point():
            continue
        bad = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(dim=1).nonzero().flatten().tolist()
        if bad:
            log.warning("%s: %d of %d samples have %s that are NaN or infinite, the first is sample %d (counted from "
                        "0)", where, len(bad), len(tensor), name, bad[0])  # fmt: skip


def as_losses(returned: Any, targets: torch.Tensor, name: str) -> torch.Tensor:
    """Return the result of `losses` as a tensor of one number per sample, of at least 32 bits."""
    if returned is None:
        raise ModelError(f"{name}: losses() returned None; return one number per sample")
    tensor = isinstance(returned, torch.Tensor)
    losses = returned if tensor else torch.as_tensor(np.asarray(returned), device=targets.device)
    if losses.shape != (len(targets),):
        count = losses.numel()
        what = f"shape {tuple(losses.shape)}" if losses.dim() > 1 else f"{count} number{'s' * (count != 1)}"
        raise ModelError(f"{name}: losses() returned {what} for {len(targets)} samples; return one number per sample, "
                         "as with reduction='none'")  # fmt: skip
    wide = losses.is_floating_point() and losses.dtype.itemsize >= 4
    return losses if wide else losses.float()


def check_logits(outputs: torch.Tensor, samples: int, classes: int, name: str) -> None:
    """Refuse outputs that the default loss can't be computed from."""
    if outputs.dim() != 2 or len(outputs) != samples or outputs.shape[1] < classes:
        raise ModelError(
            f"{name}: the model gives outputs of shape {tuple(outputs.shape)} for {samples} samples, and the default "
            f"loss needs ({samples}, {classes}), a logit for each of the targets' {classes} classes; change the model, "
            "or write losses(self, outputs, targets)"
        )


def as_metrics(returned: Any, name: str) -> dict[str, float]:
    """Return the result of `metrics` as floats by name."""
    if not isinstance(returned, Mapping):
        raise ModelError(f"{name}: metrics() returned {type_name(returned)}; return a dictionary of names and numbers")
    figures: dict[str, float] = {}
    for key, value in returned.items():
        if not isinstance(key, str) or not key.isprintable() or key in ("", *RESERVED):
            raise ModelError(f"{name}: metrics() can't use {key!r} as the name of a metric; choose another")
        try:
            figures[key] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ModelError(f"{name}: metric {key!r} is {type_name(value)}; make it one number") from None
    return figures
