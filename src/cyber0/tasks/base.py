"""Tasks: `cyber0.Task`, which a user derives from; what the engine needs of one; loading "mnist" or "pkg.mod:Class".

A task knows nothing of federations; `partition.py` deals its samples to clients. This file loads neither torch nor
data, so that a config can be refused quickly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, runtime_checkable

from cyber0.config import doors
from cyber0.config.choices import TEXT_TASKS
from cyber0.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cyber0.config.schema import TaskConfig


class Task:
    """A model, its data and its loss. Write `model` and `train_data`; everything else has a default.

    The library calls all of it in eval mode; `losses` may be called from several threads at once. Keyword arguments of
    the constructor are the settings in [task.options].

    Examples:
        >>> import cyber0, torch
        >>> class Sign(cyber0.Task):
        ...     def __init__(self, samples: int = 240):
        ...         self.samples = samples
        ...     def model(self):
        ...         return torch.nn.Linear(5, 2)
        ...     def train_data(self):
        ...         inputs = torch.randn(self.samples, 5)
        ...         return inputs, (inputs[:, 0] > 0).long()
        >>> summary = cyber0.run({"rounds": 40, "method": {"lr": 0.5}}, task=Sign(), out="runs/sign")
        >>> summary["final_accuracy"] > 0.9
        True
    """

    best = ""
    """The metric whose highest value marks the best round ("-name": the lowest); empty: the lowest loss."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The constructor's arguments, if all of them are plain values; see tasks/construct.py."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the constructor's arguments, so that a run can store them as task.options."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        self = super().__new__(cls)
        if all(map(is_plain, (*args, *kwargs.values()))):
            object.__setattr__(self, "_arguments", copy.deepcopy((args, kwargs)))
        return self

    def model(self) -> torch.nn.Module:
        """Return a new model, on the CPU; it is called with torch's generator seeded from the run's seed."""
        raise NotImplementedError(f"write {type(self).__name__}.model(self), which returns a torch.nn.Module")

    def train_data(self) -> Any:
        """Return (inputs, targets), inputs alone, a torch Dataset or DataLoader, or a Dataset of the package datasets.

        Inputs are a tensor, an array, or a dictionary of these, one row per sample. Targets are a tensor, an array, or
        None. A set is read once, completely; the order and the batches of a DataLoader are not used.
        """
        raise NotImplementedError(f"write {type(self).__name__}.train_data(self), which returns (inputs, targets)")

    def test_data(self) -> Any:
        """Return the samples to evaluate on, in the same form; None: evaluate on the training samples."""
        return None

    def outputs(self, model: torch.nn.Module, inputs: Any) -> Any:
        """Return the model's outputs, one row per sample; if the result has `logits`, as in transformers, those."""
        result = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return getattr(result, "logits", result)

    def losses(self, outputs: Any, targets: Any) -> Any:
        """Return one number per sample, differentiable or not; the default is the cross-entropy of classes."""
        if not are_classes(targets):
            found = "there are no targets" if targets is None else f"these are {_described(targets)}"
            raise ModelError(f"{type(self).__name__}: the default loss, cross-entropy, needs targets that are classes, "
                             f"one whole number per sample, and {found}; {_remedy(targets)}")  # fmt: skip
        return cross_entropy(outputs, targets)

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Return metrics by name, from the outputs for all evaluated samples; the default is accuracy."""
        if not are_classes(targets) or getattr(outputs, "ndim", 0) != 2 or outputs.shape[1] < 2:
            return {}
        return {"accuracy": (outputs.argmax(dim=1) == targets).double().mean()}

    @staticmethod
    def of(
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        train: Any,
        test: Any = None,
        losses: Callable[[Any, Any], Any] | None = None,
        metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None,
    ) -> Task:
        """Return a task made of the given parts.

        Args:
            model: A model, which is copied, or a function that returns one.
            train: What `train_data` returns.
            test: What `test_data` returns.
            losses: A function of outputs and targets.
            metrics: A function of outputs and targets.

        Examples:
            >>> import torch
            >>> inputs = torch.randn(200, 5)
            >>> def squared(outputs, targets):
            ...     return (outputs[:, 0] - targets).square()
            >>> task = Task.of(torch.nn.Linear(5, 1), (inputs, inputs.sum(1)), losses=squared)
            >>> task.losses(torch.zeros(2, 1), torch.tensor([1.0, 3.0]))
            tensor([1., 9.])
        """
        return _Given(model, train, test, losses, metrics)


class _Given(Task):
    """A task made of given parts."""

    def __init__(self, model: Any, train: Any, test: Any, losses: Any, metrics: Any) -> None:
        self._model, self._train, self._test = model, train, test
        if losses is not None:
            self.losses = losses  # type: ignore[method-assign]
        if metrics is not None:
            self.metrics = metrics  # type: ignore[method-assign]

    def model(self) -> torch.nn.Module:
        import torch

        made: torch.nn.Module
        made = copy.deepcopy(self._model) if isinstance(self._model, torch.nn.Module) else self._model()
        return made

    def train_data(self) -> Any:
        return self._train

    def test_data(self) -> Any:
        return self._test


def is_plain(value: Any) -> bool:
    """Return whether a config can hold a value; None stands for the default."""
    many = value if type(value) is list else [value]
    return value is None or all(type(one) in (bool, int, str) or (type(one) is float and isfinite(one)) for one in many)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each sample's cross entropy, in float32.

    Written out because torch's own copies class-major tensors, and is several times slower on them.
    """
    logits = outputs.float()
    highest = logits.amax(1, keepdim=True)
    total = (logits - highest).exp_().sum(1).log()
    return total + (highest - logits.gather(1, targets[:, None])).squeeze(1)


def are_classes(targets: Any) -> bool:
    """Return whether targets can be classes: one whole number per sample."""
    return targets is not None and targets.dim() == 1 and not targets.is_floating_point() and not targets.is_complex()


def _remedy(targets: Any) -> str:
    """Return what to do about targets that are no classes, by what they look like."""
    write = "write losses(self, outputs, targets)"
    if targets is None:
        return write
    if targets.ndim == 2 and targets.shape[1] == 1:
        return f"if they are classes, return one number per sample: targets.squeeze(1); otherwise {write}"
    if targets.ndim == 1 and targets.is_floating_point() and bool((targets == targets.round()).all()):
        return f"if they are classes, return whole numbers (targets.long(), targets.astype(int)); otherwise {write}"
    return write


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


class EngineTask(Protocol):
    """What a simulation or a client needs of a task, whether built in or a user's (own.py adapts those)."""

    name: str

    @property
    def classes(self) -> int:
        """How many classes the targets have; 0 if they are not classes, or there are none."""
        ...

    @property
    def labels(self) -> NDArray[Any]:
        """Labels of the training samples, for the partitions."""
        ...

    @property
    def train_inputs(self) -> Any:
        """Stored samples: a tensor, or another type that can be sliced, has `take(indices)`, and `outputs` accepts."""
        ...

    @property
    def train_targets(self) -> torch.Tensor: ...

    @property
    def test_inputs(self) -> Any: ...

    @property
    def test_targets(self) -> torch.Tensor: ...

    def model(self, seed: int, dtype: str = "float32") -> torch.nn.Module:
        """Return the model at its starting point w0, a function of the seed with the same bits on every machine."""
        ...

    def prepare(self, inputs: Any) -> Any:
        """Turn stored samples into what the model takes."""
        ...

    def outputs(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """Return the model's outputs for stored samples."""
        ...

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one float32 loss per sample."""
        ...

    def evaluate(self, model: torch.nn.Module) -> tuple[float, float] | tuple[float, float, dict[str, float]]:
        """Return mean loss and accuracy (0 to 1) on the test samples, or on the set that `evaluated_on` names.

        Further metrics come third, as a dictionary. Accuracy is NaN where the task has none.
        """
        ...

    def keep(self, indices: NDArray[Any]) -> Self:
        """Return the same task with only these training samples."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        ...


@runtime_checkable
class HoldsOut(Protocol):
    """A task that can also measure on some of its training samples, as task.validation asks for."""

    def hold_out(self, indices: NDArray[Any]) -> Any:
        """Return the same task that also measures on these training samples; call it before `keep`."""
        ...


AnyTask: TypeAlias = EngineTask | Task
"""A task as the engine takes it, or as a user writes it."""


def own_task(task: TaskConfig, given: str) -> TaskConfig:
    """Return a header's task with the path given on the command line; only that one is imported."""
    if doors.is_own(task.name):
        if not given:
            raise ConfigError(f"the run's task is {task.name}, which is not built in, and a header never makes "
                              "cyber0 import code; name your copy of it with --task FILE.py:NAME")  # fmt: skip
        return replace(task, name=doors.located(given, Path.cwd()))
    if given:
        raise ConfigError(f"--task {given} is for tasks that are not built in, and this run's is {task.name}: remove "
                          "--task")  # fmt: skip
    return task


def starting_model(config: TaskConfig, seed: int, device: str = "cpu") -> torch.nn.Module:
    """Return the model that a run of this config starts with; a language model needs no data for it."""
    from cyber0.tasks import starting

    if config.name in TEXT_TASKS:
        from cyber0.tasks.text import task as text

        model = text.starting_model(config, seed, device)
    else:
        model = make(config).model(seed, config.dtype)
    starting.place(model, config)
    return model.to(device)


def make(config: TaskConfig, *, evaluated: bool = True) -> EngineTask:
    """Build the task that a config names; its data is fetched if it is not cached.

    If it is never evaluated, as a client's, a folder of sentences needs no test file.
    """
    if doors.is_own(config.name):
        from cyber0.tasks import construct

        return construct.make(config, evaluated=evaluated)
    from cyber0.tasks.convex import Logistic, Ridge
    from cyber0.tasks.mnist import Mnist

    if config.name in TEXT_TASKS:
        from cyber0.tasks import text

        return text.make(config, evaluated=evaluated)
    tasks: dict[str, Callable[[], EngineTask]] = {
        "mnist": lambda: Mnist(config.data or None),
        "ridge": Ridge,
        "logistic": Logistic,
    }
    return tasks[config.name]()
