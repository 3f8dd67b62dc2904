"""`cyber0.Task`: one's own model and data. torch is loaded when it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

from cyber0.errors import ModelError

if TYPE_CHECKING:
    import torch


class Task:
    """A model, its data and its loss. Write `model` and `train_data`; everything else has a default.

        class Spam(cyber0.Task):
            def __init__(self, width: int = 32): ...          # keyword arguments are [task.options]
            def model(self): return nn.Sequential(...)
            def train_data(self): return inputs, targets
            def test_data(self): return inputs, targets

    The library calls all of it in eval mode; `losses` may be called from several threads at once.
    """

    best = ""
    """The metric whose highest value marks the best round, of "-name" the lowest; empty: the lowest loss."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What the constructor was called with, where all of it is plain values; see tasks/own.py."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's arguments, so that a run can record them as task.options."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        self = super().__new__(cls)
        if all(map(is_plain, (*args, *kwargs.values()))):
            object.__setattr__(self, "_arguments", copy.deepcopy((args, kwargs)))
        return self

    def model(self) -> torch.nn.Module:
        """Return a new model, on the CPU; torch's generator is seeded by the run's seed meanwhile."""
        raise NotImplementedError(f"write {type(self).__name__}.model(self), which returns a torch.nn.Module")

    def train_data(self) -> Any:
        """Return (inputs, targets), inputs alone, or a torch Dataset.

        Inputs are a tensor, an array, or a dictionary of these, one row a sample. Targets are a tensor or an array,
        None where there are none. A Dataset is read once, whole.
        """
        raise NotImplementedError(f"write {type(self).__name__}.train_data(self), which returns (inputs, targets)")

    def test_data(self) -> Any:
        """Return the samples to evaluate on, in the same form; None: the training samples are evaluated on."""
        return None

    def outputs(self, model: torch.nn.Module, inputs: Any) -> Any:
        """Return the model's outputs, one row a sample; of a result with `logits`, as in transformers, those."""
        result = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return getattr(result, "logits", result)

    def losses(self, outputs: Any, targets: Any) -> Any:
        """Return one number a sample, differentiable or not; the default is the cross-entropy of classes."""
        if not are_classes(targets):
            found = "there are no targets" if targets is None else f"these are {_described(targets)}"
            raise ModelError(f"the default loss, cross-entropy, needs targets that are classes, one whole number a "
                             f"sample, and {found}; write losses(self, outputs, targets)")  # fmt: skip
        return cross_entropy(outputs, targets)

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Return figures by name from the outputs for all samples that are evaluated on; the default is accuracy."""
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
        """Return a task from what is at hand.

        Args:
            model: A model, of which a copy is trained, or a function that makes one.
            train: What `train_data` returns.
            test: What `test_data` returns.
            losses: A function of outputs and targets.
            metrics: The same.
        """
        return _Given(model, train, test, losses, metrics)


class _Given(Task):
    """A task whose parts were given."""

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
    """Tell whether a config can hold a value, or its default is to stay: None."""
    many = value if type(value) is list else [value]
    return value is None or all(type(one) in (bool, int, str) or (type(one) is float and isfinite(one)) for one in many)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each sample's cross entropy, in float32.

    Written out because torch's own copies what is laid out class by class, and is several times slower on it.
    """
    logits = outputs.float()
    highest = logits.amax(1, keepdim=True)
    total = (logits - highest).exp_().sum(1).log()
    return total + (highest - logits.gather(1, targets[:, None])).squeeze(1)


def are_classes(targets: Any) -> bool:
    """Tell whether targets are of the form of classes: one whole number a sample."""
    return targets is not None and targets.dim() == 1 and not targets.is_floating_point() and not targets.is_complex()


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
