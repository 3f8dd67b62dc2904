"""A user's task (base.py) as the simulation and a client see one: samples as tensors, checked; losses as one tensor."""

from __future__ import annotations

import copy
import csv
import difflib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cyber0.config import doors
from cyber0.config.registry import Entry
from cyber0.config.schema import Config, TaskConfig
from cyber0.directions import Stream, words
from cyber0.errors import ConfigError, Cyber0Error, DataError, ModelError
from cyber0.tasks import base
from cyber0.tasks.metrics import RESERVED

EVALUATED_AT_ONCE = 1024  # samples in one pass of an evaluation
MOST_CLASSES = 1 << 16  # whole numbers from there on are no classes
HOOKS = ("model", "train_data", "test_data", "outputs", "losses", "metrics")  # what a task may write
DATA_SEED = 0  # of torch while data is read: a random split is the same in every run and every process


class Columns:
    """Samples that are a dictionary of tensors, one row of each a sample."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, part: slice) -> Columns:
        return Columns({name: tensor[part] for name, tensor in self.tensors.items()})

    def take(self, numbers: NDArray[np.int64]) -> Columns:
        """Return these samples."""
        index = torch.from_numpy(numbers).to(self.device, non_blocking=True)
        return Columns({name: tensor.index_select(0, index) for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> Columns:
        """Return the samples on a device."""
        return Columns({name: tensor.to(device) for name, tensor in self.tensors.items()})


class _Data(NamedTuple):
    """Samples, and their targets: a tensor of no columns where there are none."""

    inputs: torch.Tensor | Columns
    targets: torch.Tensor


class OwnTask:
    """A user's task; its data is read when it is first asked for.

    Args:
        task: The user's.
        name: How the run calls it.
        evaluated: Whether it is ever evaluated; otherwise its test data is not read.
    """

    def __init__(self, task: base.Task, name: str, *, evaluated: bool = True) -> None:
        _check_names(task, name)
        self.task, self.name = task, name
        self.best = str(task.best)
        self._evaluated = evaluated
        self._device = torch.device("cpu")
        self._returned: weakref.ref[nn.Module] | None = None

    # The data.

    @cached_property
    def _train(self) -> _Data:
        found = self._read("train_data", self.task.train_data)
        if found is None:
            raise DataError(f"{self.name}: train_data() returned None; return (inputs, targets)")
        return found

    @cached_property
    def _test(self) -> _Data | None:
        return self._read("test_data", self.task.test_data) if self._evaluated else None

    def _read(self, what: str, read: Callable[[], Any]) -> _Data | None:
        where = f"{self.name}: {what}()"
        with _seeded(DATA_SEED):
            found = doors.called(where, read, DataError)
            if found is None:
                return None
            data = _tensors(found, where)
        return _Data(data.inputs.to(self._device), data.targets.to(self._device))

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
        """How many classes the targets have; 0 where they are none. The default loss takes no other whole numbers."""
        sets = {"train_data": self._train, "test_data": self._test}
        known = {what: data.targets for what, data in sets.items() if data is not None}
        for what, targets in known.items():
            if not self.own_losses and base.are_classes(_given(targets)) and int(targets.min()) < 0:
                raise DataError(f"{self.name}: {what}(): targets hold {int(targets.min())}; classes are whole numbers "
                                "from 0. Number them so, or write losses(self, outputs, targets)")  # fmt: skip
        counts = list(map(_classes, known.values()))
        return 0 if 0 in counts else max(counts)

    @cached_property
    def labels(self) -> NDArray[Any]:
        """The classes of the training samples; zeros where there are none."""
        if not self.classes:
            return np.zeros(len(self.train_targets), np.int64)
        return self.train_targets.cpu().numpy()

    def keep(self, numbers: NDArray[Any]) -> Self:
        """Return the same task with some of the training samples alone."""
        result, index = copy.copy(self), numbers.astype(np.int64)
        inputs, targets = self._train
        rows = inputs.take(index) if isinstance(inputs, Columns) else inputs[torch.from_numpy(index).to(inputs.device)]
        result.__dict__["_train"] = _Data(rows, targets[torch.from_numpy(index).to(targets.device)])
        result.__dict__.pop("labels", None)
        return result

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        self._device = torch.device(device)
        for name in ("_train", "_test"):
            if (data := self.__dict__.get(name)) is not None:
                self.__dict__[name] = _Data(data.inputs.to(device), data.targets.to(device))
        return self

    # The model.

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        """Return the model at its starting point, made under a seed of torch that follows from the run's."""
        low, high = words(seed, Stream.INITIAL_WEIGHTS, 0, 0, 0, 2).tolist()
        with _seeded(high << 32 | low):
            made = doors.called(f"{self.name}: model()", self.task.model, ModelError)
        if not isinstance(made, nn.Module):
            raise ModelError(f"{self.name}: model() returned {_kind(made)}, not a torch.nn.Module")
        if self._returned is not None and self._returned() is made:
            raise ModelError(f"{self.name}: model() returned the same module twice, which may be trained by then; let "
                             "it make a new one each time")  # fmt: skip
        self._returned = weakref.ref(made)
        return made.to(getattr(torch, dtype))

    def prepare(self, inputs: Any) -> Any:
        """Return the samples: they are stored as the model takes them."""
        return inputs

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs for stored samples, those with fractions in the type of its weights."""
        dtype = next(model.parameters()).dtype
        if isinstance(inputs, Columns):
            return self.task.outputs(model, {name: _as(tensor, dtype) for name, tensor in inputs.tensors.items()})
        return self.task.outputs(model, _as(inputs, dtype))

    def losses(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return one loss per sample, of at least 32 bits."""
        found = self.task.losses(outputs, _given(targets))
        if found is None:
            raise ModelError(f"{self.name}: losses() returned None; return one number a sample")
        losses = found if isinstance(found, torch.Tensor) else torch.as_tensor(np.asarray(found), device=targets.device)
        if losses.shape != (len(targets),):
            count = losses.numel()
            what = f"shape {tuple(losses.shape)}" if losses.dim() > 1 else f"{count} number{'s' * (count != 1)}"
            raise ModelError(f"{self.name}: losses() returned {what} for {len(targets)} samples; return one number a "
                             "sample, as by reduction='none'")  # fmt: skip
        wide = losses.is_floating_point() and losses.dtype.itemsize >= 4
        return losses if wide else losses.float()

    # What is measured.

    def evaluate(self, model: nn.Module) -> tuple[float, float, dict[str, float]]:
        """Return mean loss, accuracy (NaN where there is none) and the other metrics, on the test samples if any."""
        return self._measure(model, self.test_inputs, self.test_targets)

    def _measure(self, model: nn.Module, inputs: Any, targets: torch.Tensor) -> tuple[float, float, dict[str, float]]:
        with torch.no_grad():
            outputs = self.all_outputs(model, inputs)
            loss = doors.called(
                f"{self.name}: losses()", lambda: float(self.losses(outputs, targets).double().mean()), ModelError
            )
            found = doors.called(
                f"{self.name}: metrics()", lambda: self.task.metrics(outputs, _given(targets)), ModelError
            )
        metrics = _figures(found, self.name)
        return loss, metrics.pop("accuracy", math.nan), metrics

    def all_outputs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the outputs for many samples, of which only some go through the model at a time."""
        parts = [self.outputs(model, inputs[begin : begin + EVALUATED_AT_ONCE])
                 for begin in range(0, len(inputs), EVALUATED_AT_ONCE)]  # fmt: skip
        return parts[0] if len(parts) == 1 else _joined(parts, self.name)

    @property
    def predicts_classes(self) -> bool:
        """Whether outputs are logits of classes: so it is by the default loss, else the targets say it."""
        return not self.own_losses or self.classes > 1

    def check(self, model: nn.Module, differentiable: str = "") -> None:
        """Try everything on a few samples, so that what can't work is refused before anything is written.

        Args:
            model: In eval mode.
            differentiable: The setting that needs gradients of the loss, if one does.
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
        """Return the metrics of a few samples that are evaluated on."""
        given, trained = (_shown_shapes(inputs[:2]) for inputs in (self.test_inputs, self.train_inputs))
        said = f" (train_data() gives {trained})" if given != trained else ""
        where = f"{self.name}: evaluating {given} of {self.evaluated_on}_data(){said}"
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
        """Refuse outputs that the default loss can't be had from."""
        if self.own_losses or not isinstance(outputs, torch.Tensor) or not base.are_classes(_given(self.train_targets)):
            return
        classes = max(2, *(int(targets.max()) + 1 for targets in (self.train_targets, self.test_targets)))
        if outputs.dim() != 2 or len(outputs) != samples or outputs.shape[1] < classes:
            raise ModelError(
                f"{self.name}: the model gives outputs of shape {tuple(outputs.shape)} for {samples} samples, and the "
                f"default loss needs ({samples}, {classes}), a logit for each of the targets' {classes} "
                "classes; change the model, or write losses(self, outputs, targets)"
            )

    @property
    def own_losses(self) -> bool:
        """Whether the loss is the user's, so that nothing is known of its scale."""
        return getattr(self.task.losses, "__func__", None) is not base.Task.losses


def make(config: TaskConfig, *, evaluated: bool = True) -> OwnTask:
    """Import the task that a config names by its path, with its options."""
    if config.name == doors.OWN:
        raise ConfigError(f'task.name = "{doors.OWN}" stands for a task that was given in Python; give it again by '
                          'task=..., or name a path such as "my_task.py:Name"')  # fmt: skip
    name = doors.short(config.name)
    found = doors.load(config.name, "task.name")
    if isinstance(found, base.Task) and not config.options:
        return OwnTask(found, name, evaluated=evaluated)
    if isinstance(found, base.Task):
        raise ConfigError(f"task.options = {config.options!r}: {name} is made already and takes none; leave them out")
    if not (isinstance(found, type) and issubclass(found, base.Task)):
        what = f"the class {found.__name__}" if isinstance(found, type) else _kind(found)
        raise ConfigError(f"task.name = {name!r} is {what}, not a class derived from cyber0.Task")
    return OwnTask(_constructed(found, config.options), name, evaluated=evaluated)


def check_options(kind: type[base.Task], options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor does not take or that have another type, and the lack of one it needs."""
    made_by = _no_options if kind.__init__ is object.__init__ else kind.__init__
    Entry(kind.__name__, made_by, {}, frozenset({"self"})).check(options, "task.options")


def _no_options() -> None:
    """Stand for the constructor of a class that has none."""


def options_of(task: base.Task) -> dict[str, Any] | None:
    """Return what a task given in Python was made with, as task.options; None where that can't be told or written."""
    options = _given_to(task)
    if options is None:
        return None
    try:
        again = _constructed(type(task), options)
    except Cyber0Error:
        return None
    return options if _alike(task, again) else None


def _alike(task: base.Task, other: base.Task) -> bool:
    """Tell whether two tasks have the same attributes, as far as can be told; what begins with _ may be a cache."""
    mine, theirs = (
        {key: value for key, value in vars(one).items()
         if not key.startswith("_") and not isinstance(getattr(type(one), key, None), cached_property)}
        for one in (task, other)
    )  # fmt: skip
    return mine.keys() == theirs.keys() and all(_equal(mine[key], theirs[key]) for key in mine)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other) if isinstance(one, (bool, int, float, str, bytes, Path)) else True


def _given_to(task: base.Task) -> dict[str, Any] | None:
    """Return the arguments of a task's constructor by name; None where they can't be told or written."""
    kind = type(task)
    if task._arguments is None or kind.__module__ == base.__name__ or kind.__new__ is not base.Task.__new__:
        return None
    if kind.__init__ is object.__init__:
        return {}
    args, kwargs = task._arguments
    try:
        bound = inspect.signature(kind.__init__).bind(task, *args, **kwargs)
    except (TypeError, ValueError):
        return None
    options: dict[str, Any] = {}
    for parameter in list(bound.signature.parameters.values())[1:]:
        value = bound.arguments.get(parameter.name, parameter.default)
        if parameter.name not in bound.arguments or (value is None and parameter.default is None):
            continue
        more = value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value}
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL) or None in more.values():
            return None
        options |= more
    return options


def _constructed(kind: type[base.Task], options: Mapping[str, Any]) -> base.Task:
    check_options(kind, options)
    with _seeded(DATA_SEED):
        return doors.called(f"{kind.__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})",
                              lambda: kind(**options))  # fmt: skip


def adopted(config: Config, task: Any, *, resumed: bool = False) -> tuple[Config, Any]:
    """Return a task that was given in Python as the library sees one, and the config with its name and options.

    Where its options can't be recorded it is called "own", so that nobody makes another in its place. Of a run that is
    resumed, the config has its name.
    """
    from dataclasses import replace

    if isinstance(task, type) and issubclass(task, base.Task):
        raise ConfigError(f"task={task.__name__} is a class; give an instance: task={task.__name__}()")
    if isinstance(task, base.Task):
        named, options = config.task.name, options_of(task)
        if not (resumed and doors.is_own(named)):
            kept = doors.is_path(named) and named.rpartition(":")[2] == type(task).__name__
            named = doors.OWN if options is None else named if kept else doors.name_of(type(task))
        options = {} if named == doors.OWN else config.task.options if options is None else options
        task = OwnTask(task, doors.short(named))
        config = replace(config, task=replace(config.task, name=named, options=options))
    if task is not None and not hasattr(task, "evaluate"):  # what the library needs of its own tasks
        raise ConfigError(f"task={task!r} is {_kind(task)}; give an instance of a class derived from cyber0.Task, or "
                          "cyber0.Task.of(model, train, test)")  # fmt: skip
    return config, task


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


def _check_names(task: base.Task, name: str) -> None:
    """Refuse a method that looks like a misspelt one of `cyber0.Task`, which is not written and would be a default."""
    kinds = [kind for kind in type(task).__mro__ if kind is not object and kind.__module__ != base.__name__]
    used = {word for kind in kinds for found in vars(kind).values() for word in _names_in(found)}
    written = {key for kind in kinds for key in vars(kind)} | vars(task).keys()
    unwritten = [hook for hook in HOOKS if hook not in written]
    for kind in kinds:
        for key in (key for key, found in vars(kind).items() if inspect.isfunction(found)):
            near = difflib.get_close_matches(key, unwritten, n=1, cutoff=0.8)
            if near and key not in used and not hasattr(base.Task, key):
                raise ConfigError(f"{name}: nothing calls {key}() of {kind.__name__}; did you mean {near[0]!r}? (a "
                                  "helper's name may begin with _)")  # fmt: skip


# Samples as tensors.


def read_inputs(path: Path) -> torch.Tensor | Columns:
    """Return the inputs in a file: .npy, .csv, or a dictionary of tensors as .npz or .safetensors.

    A single array called inputs, or arr_0 as NumPy calls what has no name, is no dictionary.
    """
    try:
        found: Any
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                found = dict(stored)
        elif path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        elif path.suffix == ".csv":
            found = _read_csv(path)
        else:
            raise DataError(f"{path}: inputs must be a file .npy, .npz, .csv or .safetensors, one row a sample")
    except DataError:
        raise
    except Exception as error:  # safetensors' own error type is not public in every version
        said = " ".join(str(error).split())
        raise DataError(f"{path} can't be read: {said}; write inputs as .npy, .npz, .csv or .safetensors") from None
    if isinstance(found, dict) and len(found) == 1 and set(found) <= {"inputs", "arr_0"}:
        (found,) = found.values()
    return _tensors(found, str(path)).inputs


def _read_csv(path: Path) -> NDArray[np.float32]:
    """Read rows of numbers; a first row that holds none is their names."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    if rows and not any(_number(cell) is not None for cell in rows[0][1]):
        rows = rows[1:]
    if not rows:
        raise DataError(f"{path} holds no row of numbers")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise DataError(f"{path}, line {line} holds {len(row)} values, and line {rows[0][0]} holds {width}: give "
                            "every row as many, separated by commas")  # fmt: skip
        for column, cell in enumerate(row, 1):
            if _number(cell) is None:
                raise DataError(f"{path}, line {line}, column {column}: {cell!r} is not a number; give rows of numbers "
                                "separated by commas, with at most one line of names before them")  # fmt: skip
    return np.array([list(map(_number, row)) for _, row in rows], np.float32)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _tensors(found: Any, where: str) -> _Data:
    """Return what a user's method gave as tensors, checked."""
    if isinstance(found, torch.utils.data.Dataset):
        found = _collated(found, where)
    if isinstance(found, torch.utils.data.DataLoader):
        raise DataError(f"{where} returned a DataLoader; return its dataset, as loader.dataset")
    if isinstance(found, list | tuple):
        if len(found) != 2:
            raise DataError(
                f"{where} returned {len(found)} things; return inputs, (inputs, targets) or a torch Dataset"
            )
        given, targets = found
    else:
        given, targets = found, None
    inputs: torch.Tensor | Columns
    if isinstance(given, Mapping):
        if not given:
            raise DataError(
                f"{where}: the dictionary of inputs is empty; give it one tensor for each argument of the model"
            )
        columns = {str(name): _tensor(value, f"{where}: {name!r}") for name, value in given.items()}
        lengths = {name: len(tensor) for name, tensor in columns.items()}
        if len(set(lengths.values())) > 1:
            some = ", ".join(f"{length} of {name!r}" for name, length in lengths.items())
            raise DataError(f"{where}: the inputs have different lengths: {some}")
        inputs = Columns({name: _single(tensor) for name, tensor in columns.items()})
    else:
        inputs = _single(_tensor(given, f"{where}: the inputs"))
    if len(inputs) == 0:
        raise DataError(f"{where} holds no samples; there must be at least one")
    if targets is None:
        return _Data(inputs, torch.empty(len(inputs), 0))
    kept = _tensor(targets, f"{where}: the targets")
    if len(kept) != len(inputs):
        raise DataError(f"{where}: there are {len(inputs)} inputs and {len(kept)} targets; there must be as many")
    whole = not kept.is_floating_point() and not kept.is_complex()
    return _Data(inputs, kept.long() if whole else kept)


def _tensor(value: Any, what: str) -> torch.Tensor:
    try:
        if isinstance(value, torch.Tensor):
            tensor = value.detach()
        else:
            array = np.asarray(value)
            tensor = torch.tensor(array) if not array.flags.writeable else torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} can't be made a tensor: they are {_kind(value)} ({str(error).splitlines()[0]}); give "
                        "a tensor or an array of numbers") from None  # fmt: skip
    if tensor.dim() == 0:
        raise DataError(f"{what} are a single number; give one row a sample")
    return tensor


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """Return inputs as models take them: NumPy's 64 bits are 32 there."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _collated(data: Any, where: str) -> Any:
    """Read a Dataset once, whole."""
    from torch.utils.data import IterableDataset, TensorDataset, default_collate

    if isinstance(data, TensorDataset):
        return data.tensors
    if not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
        raise DataError(f"{where}: the Dataset has no length; give it __len__, or derive it from IterableDataset")
    samples = doors.called(
        where, lambda: list(data) if isinstance(data, IterableDataset) else [data[i] for i in range(len(data))],
        DataError,
    )  # fmt: skip
    if not samples:
        raise DataError(f"{where} holds no samples; there must be at least one")
    try:
        collated = default_collate(samples)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        raise DataError(f"{where}: the Dataset's samples can't be put into one tensor: {str(error).splitlines()[0]}; "
                        "give all of them the same shape, and let a transform make them tensors") from None  # fmt: skip
    return tuple(collated) if isinstance(collated, Sequence) else collated


def _classes(targets: torch.Tensor) -> int:
    """Return how many classes targets are of; 0 where they are something else."""
    if targets.dim() != 1 or targets.dtype != torch.int64:
        return 0
    low, high = int(targets.min()), int(targets.max())
    return max(2, high + 1) if low >= 0 and high < MOST_CLASSES else 0


def _shown_shapes(inputs: torch.Tensor | Columns) -> str:
    tensors = inputs.tensors if isinstance(inputs, Columns) else {"inputs": inputs}
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def _given(targets: torch.Tensor) -> torch.Tensor | None:
    """Return targets as the user knows them."""
    return None if targets.dim() == 2 and targets.shape[1] == 0 else targets


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor


def _joined(parts: Sequence[Any], name: str) -> Any:
    """Return the outputs of several passes as those of one."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts], name) for key in first}
    if isinstance(first, list | tuple):
        return tuple(_joined(column, name) for column in zip(*parts, strict=True))
    raise ModelError(f"{name}: outputs() returned {_kind(first)}; return a tensor, or a dictionary or tuple of tensors")


def _figures(found: Any, name: str) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise ModelError(f"{name}: metrics() returned {_kind(found)}; return a dictionary of names and numbers")
    figures: dict[str, float] = {}
    for key, value in found.items():
        if not isinstance(key, str) or not key.isprintable() or key in ("", *RESERVED):
            raise ModelError(f"{name}: metrics() can't call a metric {key!r}; choose another name")
        try:
            figures[key] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ModelError(f"{name}: metric {key!r} is {_kind(value)}; make it one number") from None
    return figures


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU for a while; what it was is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
