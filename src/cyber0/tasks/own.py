"""A user's task (base.py) as the simulation and a client see one: samples and losses as tensors, checked."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cyber0.config import doors
from cyber0.directions import Stream, words
from cyber0.errors import ConfigError, DataError, ModelError
from cyber0.tasks import base
from cyber0.tasks.checks import as_losses, as_metrics, check_logits, check_method_names, warn_of_nonfinite
from cyber0.tasks.samples import Columns, TaskData, count_classes, shown_shapes, to_tensors, type_name, visible_targets

EVALUATED_AT_ONCE = 1024  # samples in one pass of an evaluation
DATA_SEED = 0  # of torch while data is read: a random split is the same in every run and every process


class OwnTask:
    """A user's task; its data is read when it is first needed.

    Args:
        task: The user's.
        name: Its name in messages.
        evaluated: Whether it is ever evaluated; otherwise its test data is not read.
    """

    def __init__(self, task: base.Task, name: str, *, evaluated: bool = True) -> None:
        check_method_names(task, name)
        self.task, self.name = task, name
        self.best = str(task.best)
        self._evaluated = evaluated
        self._device = torch.device("cpu")
        self._returned: weakref.ref[nn.Module] | None = None

    # The data.

    @cached_property
    def _train(self) -> TaskData:
        found = self._read("train_data", self.task.train_data)
        if found is None:
            raise DataError(f"{self.name}: train_data() returned None; return (inputs, targets)")
        return found

    @cached_property
    def _test(self) -> TaskData | None:
        return self._read("test_data", self.task.test_data) if self._evaluated else None

    def _read(self, what: str, read: Callable[[], Any]) -> TaskData | None:
        where = f"{self.name}: {what}()"
        with seeded(DATA_SEED):
            found = doors.called(where, read, DataError)
            if found is None:
                return None
            data = to_tensors(found, where)
        warn_of_nonfinite(data, where)
        return TaskData(data.inputs.to(self._device), data.targets.to(self._device))

    @property
    def evaluated_on(self) -> str:
        """Which set that is: "train" where the task has no test data."""
        return "train" if self._test is None else "test"

    @property
    def train_inputs(self) -> Any:
        return self._train.inputs

    @property
    def train_targets(self) -> torch.Tensor:
        return self._train.targets

    @property
    def test_inputs(self) -> Any:
        return (self._test or self._train).inputs

    @property
    def test_targets(self) -> torch.Tensor:
        return (self._test or self._train).targets

    @cached_property
    def classes(self) -> int:
        """How many classes the targets have; 0 if they are not classes. The default loss accepts no negative ones."""
        sets = {"train_data": self._train, "test_data": self._test}
        known = {what: data.targets for what, data in sets.items() if data is not None}
        for what, targets in known.items():
            if not self.own_losses and base.are_classes(visible_targets(targets)) and int(targets.min()) < 0:
                raise DataError(f"{self.name}: {what}(): targets hold {int(targets.min())}; classes are numbered "
                                "from 0. Renumber them, or write losses(self, outputs, targets)")  # fmt: skip
        counts = list(map(count_classes, known.values()))
        return 0 if 0 in counts else max(counts)

    @cached_property
    def labels(self) -> NDArray[Any]:
        """The classes of the training samples; zeros where there are none."""
        if not self.classes:
            return np.zeros(len(self.train_targets), np.int64)
        return self.train_targets.cpu().numpy()

    def keep(self, indices: NDArray[Any]) -> Self:
        """Return the same task with only these training samples."""
        result, index = copy.copy(self), indices.astype(np.int64)
        inputs, targets = self._train
        rows = inputs.take(index) if isinstance(inputs, Columns) else inputs[torch.from_numpy(index).to(inputs.device)]
        result.__dict__["_train"] = TaskData(rows, targets[torch.from_numpy(index).to(targets.device)])
        result.__dict__.pop("labels", None)
        return result

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        self._device = torch.device(device)
        for name in ("_train", "_test"):
            if (data := self.__dict__.get(name)) is not None:
                self.__dict__[name] = TaskData(data.inputs.to(device), data.targets.to(device))
        return self

    # The model.

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        """Return the model at its starting point, made with torch's generator seeded from the run's seed."""
        low, high = words(seed, Stream.INITIAL_WEIGHTS, 0, 0, 0, 2).tolist()
        with seeded(high << 32 | low):
            made = doors.called(f"{self.name}: model()", self.task.model, ModelError)
        if not isinstance(made, nn.Module):
            raise ModelError(f"{self.name}: model() returned {type_name(made)}, not a torch.nn.Module")
        if self._returned is not None and self._returned() is made:
            raise ModelError(f"{self.name}: model() returned the same module twice, which may be trained by then; "
                             "return a new one each time")  # fmt: skip
        self._returned = weakref.ref(made)
        return made.to(getattr(torch, dtype))

    def prepare(self, inputs: Any) -> Any:
        """Return the samples: they are stored as the model takes them."""
        return inputs

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs for stored samples; floating-point inputs get the type of its weights."""
        dtype = next(model.parameters()).dtype
        if isinstance(inputs, Columns):
            return self.task.outputs(model, {name: _as(tensor, dtype) for name, tensor in inputs.tensors.items()})
        return self.task.outputs(model, _as(inputs, dtype))

    def losses(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return one loss per sample, of at least 32 bits."""
        return as_losses(self.task.losses(outputs, visible_targets(targets)), targets, self.name)

    # What is measured.

    def evaluate(self, model: nn.Module) -> tuple[float, float, dict[str, float]]:
        """Return mean loss, accuracy (NaN if the task has none) and the other metrics, on the test samples if any."""
        return self._measure(model, self.test_inputs, self.test_targets)

    def _measure(self, model: nn.Module, inputs: Any, targets: torch.Tensor) -> tuple[float, float, dict[str, float]]:
        with torch.no_grad():
            outputs = self.all_outputs(model, inputs)
            loss = doors.called(
                f"{self.name}: losses()", lambda: float(self.losses(outputs, targets).double().mean()), ModelError
            )
            found = doors.called(
                f"{self.name}: metrics()", lambda: self.task.metrics(outputs, visible_targets(targets)), ModelError
            )
        metrics = as_metrics(found, self.name)
        return loss, metrics.pop("accuracy", math.nan), metrics

    def all_outputs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the outputs for many samples, computed in several passes."""
        parts = [self.outputs(model, inputs[begin : begin + EVALUATED_AT_ONCE])
                 for begin in range(0, len(inputs), EVALUATED_AT_ONCE)]  # fmt: skip
        return parts[0] if len(parts) == 1 else _joined(parts, self.name)

    @property
    def predicts_classes(self) -> bool:
        """Whether outputs are logits of classes: always with the default loss, otherwise by the targets."""
        return not self.own_losses or self.classes > 1

    def check(self, model: nn.Module, differentiable: str = "") -> None:
        """Try everything on two samples, so that errors show before anything is written.

        Args:
            model: In eval mode.
            differentiable: The setting that needs gradients of the loss, if any.
        """
        inputs, targets = self.train_inputs[:2], self.train_targets[:2]
        with torch.no_grad():
            outputs = doors.called(f"{self.name}: the model", lambda: self.outputs(model, inputs), ModelError)
            self._check_outputs(outputs, len(targets))
            doors.called(f"{self.name}: losses()", lambda: self.losses(outputs, targets), ModelError)
        if differentiable and not self._has_gradient(model, inputs, targets):
            raise ConfigError(f"{differentiable} needs gradients, and what losses() of {self.name} returns has none; "
                              'set method.name = "cyber0" and method.estimator = "two_point"')  # fmt: skip
        if self._evaluated:
            found = self._try_evaluation(model)
            best = self.best.removeprefix("-")
            if best and best not in (*found, "accuracy", "loss"):
                raise ModelError(f"{self.name}: best = {self.best!r} is none of its metrics, which are "
                                 f"{', '.join(found) or 'none'}")  # fmt: skip

    def _try_evaluation(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of two of the samples to evaluate on."""
        given, trained = (shown_shapes(inputs[:2]) for inputs in (self.test_inputs, self.train_inputs))
        hint = f" (train_data() gives {trained})" if given != trained else ""
        where = f"{self.name}: evaluating {given} of {self.evaluated_on}_data(){hint}"
        return doors.called(
            where, lambda: self._measure(model, self.test_inputs[:2], self.test_targets[:2])[2], ModelError
        )

    def _has_gradient(self, model: nn.Module, inputs: Any, targets: torch.Tensor) -> bool:
        with torch.enable_grad():
            try:
                return self.losses(self.outputs(model, inputs), targets).requires_grad
            except RuntimeError:  # a loss in NumPy
                return False

    def _check_outputs(self, outputs: Any, samples: int) -> None:
        """Refuse outputs that the default loss can't be computed from."""
        if (
            self.own_losses
            or not isinstance(outputs, torch.Tensor)
            or not base.are_classes(visible_targets(self.train_targets))
        ):
            return
        classes = max(2, *(int(targets.max()) + 1 for targets in (self.train_targets, self.test_targets)))
        check_logits(outputs, samples, classes, self.name)

    @property
    def own_losses(self) -> bool:
        """Whether the loss is the user's, so that nothing is known of its scale."""
        return getattr(self.task.losses, "__func__", None) is not base.Task.losses


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor


def _joined(parts: Sequence[Any], name: str) -> Any:
    """Concatenate the outputs of several passes."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts], name) for key in first}
    if isinstance(first, list | tuple):
        return tuple(_joined(column, name) for column in zip(*parts, strict=True))
    raise ModelError(
        f"{name}: outputs() returned {type_name(first)}; return a tensor, or a dictionary or tuple of tensors"
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within this context torch's CPU generator is seeded; its state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
