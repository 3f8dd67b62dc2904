"""A user's samples as tensors, checked: what `train_data` and `test_data` return, and what a file of inputs holds."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.errors import DataError
from cyber0.tasks.collate import whole_set

MOST_CLASSES = 1 << 16  # larger whole numbers are not classes


class Columns:
    """Samples as a dictionary of tensors, each with one row per sample."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, part: slice) -> Columns:
        return Columns({name: tensor[part] for name, tensor in self.tensors.items()})

    def take(self, indices: NDArray[np.int64]) -> Columns:
        """Return these samples."""
        index = torch.from_numpy(indices).to(self.device, non_blocking=True)
        return Columns({name: tensor.index_select(0, index) for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> Columns:
        """Return the samples on a device."""
        return Columns({name: tensor.to(device) for name, tensor in self.tensors.items()})


class TaskData(NamedTuple):
    """Samples and their targets; without targets, a tensor of no columns."""

    inputs: torch.Tensor | Columns
    targets: torch.Tensor


def to_tensors(found: Any, where: str) -> TaskData:
    """Return the data that a user's method returned as tensors, checked."""
    found = whole_set(found, where)
    if isinstance(found, list | tuple):
        if len(found) != 2:
            raise DataError(
                f"{where} returned {len(found)} values; return inputs, (inputs, targets) or a torch Dataset"
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
        return TaskData(inputs, torch.empty(len(inputs), 0))
    kept = _tensor(targets, f"{where}: the targets")
    if len(kept) != len(inputs):
        raise DataError(f"{where}: there are {len(inputs)} inputs and {len(kept)} targets; return one target per input")
    whole = not kept.is_floating_point() and not kept.is_complex()
    return TaskData(inputs, kept.long() if whole else kept)


def _tensor(value: Any, what: str) -> torch.Tensor:
    try:
        if isinstance(value, torch.Tensor):
            tensor = value.detach()
        else:
            array = np.asarray(value)
            tensor = torch.tensor(array) if not array.flags.writeable else torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} can't be made a tensor: they are {type_name(value)} ({str(error).splitlines()[0]}); "
                        "give a tensor or an array of numbers") from None  # fmt: skip
    if tensor.dim() == 0:
        raise DataError(f"{what} are a single number; give one row per sample")
    return tensor


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """Return inputs in float32 where NumPy made them float64."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def count_classes(targets: torch.Tensor) -> int:
    """Return how many classes targets have; 0 if they are not classes."""
    if targets.dim() != 1 or targets.dtype != torch.int64:
        return 0
    low, high = int(targets.min()), int(targets.max())
    return max(2, high + 1) if low >= 0 and high < MOST_CLASSES else 0


def visible_targets(targets: torch.Tensor) -> torch.Tensor | None:
    """Return targets as the user gave them."""
    return None if targets.dim() == 2 and targets.shape[1] == 0 else targets


def shown_shapes(inputs: torch.Tensor | Columns) -> str:
    tensors = inputs.tensors if isinstance(inputs, Columns) else {"inputs": inputs}
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def read_inputs(path: Path) -> torch.Tensor | Columns:
    """Return the inputs in a file: .npy, .csv, or a dictionary of tensors as .npz or .safetensors.

    A single array called inputs, or arr_0 (NumPy's default name), is not a dictionary.
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
            raise DataError(f"{path}: inputs must be a file .npy, .npz, .csv or .safetensors, one row per sample")
    except DataError:
        raise
    except Exception as error:  # safetensors' own error type is not public in every version
        said = " ".join(str(error).split())
        raise DataError(f"{path} can't be read: {said}; write inputs as .npy, .npz, .csv or .safetensors") from None
    if isinstance(found, dict) and len(found) == 1 and set(found) <= {"inputs", "arr_0"}:
        (found,) = found.values()
    return to_tensors(found, str(path)).inputs


def _read_csv(path: Path) -> NDArray[np.float32]:
    """Read rows of numbers; a first row without any number is a header."""
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


def type_name(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
