"""A set of samples that other libraries define, read once and completely: torch's Dataset and DataLoader, `datasets`.

The package datasets is not imported: its objects are known by what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from cyber0.config import doors
from cyber0.errors import DataError

LABELS = ("labels", "label")
"""The columns that hold targets, by the usage of transformers and datasets; the first that there is counts."""


def whole_set(found: Any, where: str) -> Any:
    """Return a set of samples as inputs, or inputs and targets, of all of them; anything else as it is."""
    if isinstance(found, DataLoader):
        return _of_loader(found, where)
    if _has_columns(found):
        return _of_columns(found, where)
    if isinstance(found, Dataset):
        return collated(found, where)
    if isinstance(found, Mapping) and found and all(map(_has_columns, found.values())):
        names = ", ".join(map(repr, found))
        raise DataError(f"{where} returned several sets ({names}); return one of them, as sets[{next(iter(found))!r}]")
    return found


def collated(data: Any, where: str, collate: Callable[[list[Any]], Any] = default_collate) -> Any:
    """Return all samples of a torch Dataset as one batch."""
    if isinstance(data, TensorDataset) and collate is default_collate:
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
        batch = collate(samples)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        raise DataError(f"{where}: the Dataset's samples can't be put into one tensor: {str(error).splitlines()[0]}; "
                        "give all of them the same shape, and let a transform make them tensors") from None  # fmt: skip
    return tuple(batch) if isinstance(batch, Sequence) else batch


def _of_loader(loader: DataLoader[Any], where: str) -> Any:
    """Return all samples of a DataLoader's dataset as its collate_fn joins them; order and batch size do not count."""
    batched = loader.batch_size is not None or loader.batch_sampler is not None
    batch = collated(loader.dataset, where, loader.collate_fn if batched else default_collate)
    return _split(batch) if isinstance(batch, Mapping) else batch


def _has_columns(value: Any) -> bool:
    """Return whether a value is a data set of the package datasets."""
    return hasattr(value, "column_names") and hasattr(value, "with_format")


def _of_columns(data: Any, where: str) -> Any:
    """Return the columns of a data set of the package datasets, those of its format if it has one."""
    if not hasattr(data, "__len__"):
        raise DataError(f"{where} returned a streamed set, which has no length; load it without streaming=True")
    if len(data) == 0:
        raise DataError(f"{where} holds no samples; there must be at least one")
    chosen = (getattr(data, "format", None) or {}).get("columns") or data.column_names
    arrays = doors.called(where, lambda: data.with_format("numpy", columns=list(chosen))[:], DataError)
    columns = {name: _column(arrays[name], name, where) for name in chosen}
    if set(columns) <= set(LABELS):
        raise DataError(f"{where}: the set has the columns {', '.join(chosen)} and no inputs; keep what the model "
                        "takes")  # fmt: skip
    return _split(columns)


def _column(values: Any, name: str, where: str) -> torch.Tensor:
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(array))
    if array.dtype.kind == "O" and len(array) and isinstance(array[0], np.ndarray):
        raise DataError(f"{where}: the rows of the column {name!r} have unlike shapes; pad them, as with "
                        "tokenizer(..., padding='max_length')")  # fmt: skip
    raise DataError(f"{where}: the column {name!r} holds {type(array.reshape(-1)[0]).__name__}, not numbers; take it "
                    f"out: set.remove_columns([{name!r}])")  # fmt: skip


def _split(columns: Mapping[str, Any]) -> Any:
    """Return inputs and targets if a column is named as one of targets, and inputs alone otherwise."""
    name = next((name for name in LABELS if name in columns), None)
    if name is None:
        return dict(columns)
    return {other: values for other, values in columns.items() if other != name}, columns[name]
