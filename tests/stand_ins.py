"""Stand-ins for objects of packages that need not be installed: datasets, wandb, trackio."""

from __future__ import annotations

from typing import Any

import numpy as np


class DataSet:
    """As much of datasets.Dataset as is used: columns by name, and a format that makes arrays of them."""

    def __init__(self, columns: dict[str, list[Any]], kind: str | None = None, chosen: list[str] | None = None) -> None:
        self._columns, self._kind = columns, kind
        self.column_names = list(columns)
        self.format = {"type": kind, "columns": chosen or self.column_names}

    def __len__(self) -> int:
        return len(self._columns[self.column_names[0]])

    def with_format(self, kind: str | None, columns: list[str] | None = None) -> DataSet:
        return DataSet(self._columns, kind, columns)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        chosen = {name: self._columns[name][key] for name in self.format["columns"] or ()}
        if not isinstance(key, slice) or self._kind != "numpy":
            return chosen
        return {name: self._array(values) for name, values in chosen.items()}

    def _array(self, values: list[Any]) -> Any:
        rows = [np.asarray(value) for value in values]
        if len({row.shape for row in rows}) == 1:
            return np.stack(rows)
        array = np.empty(len(rows), object)
        array[:] = rows
        return array


class Logged:
    """A run as wandb.init and trackio.init return it."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.entries: dict[int, dict[str, float]] = {}
        self.summary: dict[str, Any] = {}
        self.ended: dict[str, Any] | None = None

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None and step > max(self.entries, default=-1) and self.ended is None
        self.entries[step] = metrics

    def finish(self, **how: Any) -> None:
        assert self.ended is None
        self.ended = how
