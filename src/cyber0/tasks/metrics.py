"""The schema of metrics: what an evaluation measures, and how each figure is stored and shown.

`MetricsRow` is one evaluation. Its fields declare the built-in columns; what else a task measures is in `metrics`, and
each entry becomes a column of its own. metrics.csv, reports, the live page and TensorBoard all iterate over `Column`s,
so that a new column is declared here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["", "share", "loss", "bytes"]
ROUND, SENT = "round", "uplink_bytes"
"""The columns that a report draws others over."""


@dataclass(frozen=True)
class Column:
    """One figure of an evaluation."""

    name: str
    """As in the header of metrics.csv."""
    kind: Callable[[str], Any]
    """Reads a cell: int or float."""
    label: str
    """As people read it."""
    tag: str = ""
    """As TensorBoard names it, with {set} for the set that was evaluated on; empty: it is not written there."""
    axes: tuple[str, ...] = ()
    """The columns that a report draws it over, each in a chart of its own."""
    unit: Unit = ""
    """A share is shown in percent."""
    measured: bool = False
    """Whether it is measured on the model, so that it may be anything; what is counted is finite."""
    optional: bool = False
    """Whether its cell may be empty: not measured."""
    missing: float | None = None
    """Its value where it was not measured."""

    @property
    def of_set(self) -> bool:
        """Whether it is a figure of the set that was evaluated on."""
        return "{set}" in self.tag

    def parse(self, text: str) -> Any:
        """Return the value in a cell.

        Raises:
            ValueError: it holds none.
        """
        if self.optional and not text:
            return self.missing
        value = self.kind(text)
        if not self.measured and not math.isfinite(value):
            raise ValueError(f"{self.name} = {text} is not a finite number")
        return value

    def has(self, value: Any) -> bool:
        """Return whether a value was measured; NaN may be a result, unless that is what stands for a missing one."""
        return value is not None and (self.missing is None or not math.isnan(value))


def metric(name: str) -> Column:
    """Return the column of a metric that a task brings."""
    return Column(name, float, name, f"{{set}}/{name}", (ROUND,), measured=True, optional=True)


def _column(kind: type, label: str, *, default: Any = dataclasses.MISSING, **about: Any) -> Any:
    """Declare a field of `MetricsRow` as a column."""
    return dataclasses.field(default=default, metadata={"column": {"kind": kind, "label": label, **about}})


@dataclass(frozen=True)
class MetricsRow:
    """One evaluation: after how many rounds, how good, at which price."""

    round: int = _column(int, "round")
    accuracy: float = _column(float, "accuracy", tag="{set}/accuracy", axes=(ROUND, SENT), unit="share", measured=True,
                              optional=True, missing=math.nan)  # fmt: skip
    """0 to 1; NaN where the task has none."""
    loss: float = _column(float, "loss", tag="{set}/loss", axes=(ROUND, SENT), unit="loss", measured=True)
    uplink_bytes: int = _column(int, "sent by each client", tag="traffic/sent_by_each_client", unit="bytes")
    downlink_bytes: int = _column(int, "received by each client", tag="traffic/received_by_each_client", unit="bytes")
    decided: int | None = _column(int, "rounds decided", tag="progress/decided_rounds", optional=True)
    """None where it was not counted: a follower evaluates, and a federator decides."""
    seconds: float = _column(float, "seconds", tag="progress/seconds")
    train_loss: float | None = _column(float, "train loss", default=None, tag="training/loss", axes=(ROUND,),
                                       unit="loss", measured=True, optional=True)  # fmt: skip
    """For a language model that learns from few samples; elsewhere measuring it would cost more than it tells."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What a task measures beside loss and accuracy."""

    def value(self, column: Column) -> Any:
        """Return a figure; the column's `missing` where it was not measured."""
        if column.name in BUILT_IN:
            return getattr(self, column.name)
        return self.metrics.get(column.name, column.missing)

    def figures(self) -> dict[str, float]:
        """Return what the task measures beside the loss, the accuracy first."""
        accuracy = {} if math.isnan(self.accuracy) else {"accuracy": self.accuracy}
        return {**accuracy, **self.metrics}

    def measured(self) -> dict[str, float]:
        """Return everything that was measured on the model, by name."""
        return {column.name: self.value(column) for column in columns_of([self]) if column.measured}

    def scalars(self, evaluated_on: str) -> dict[str, float]:
        """Return the figures by their TensorBoard tags."""
        return {c.tag.format(set=evaluated_on): self.value(c) for c in columns_of([self]) if c.tag}


COLUMNS: tuple[Column, ...] = tuple(
    Column(field.name, **field.metadata["column"]) for field in dataclasses.fields(MetricsRow) if field.metadata
)
BUILT_IN = tuple(column.name for column in COLUMNS)
RESERVED = tuple(name for name in BUILT_IN if name != "accuracy")
"""What a task may not call a metric; one that it calls accuracy is the accuracy."""


def metric_names(rows: Iterable[MetricsRow]) -> tuple[str, ...]:
    """Return the names of the metrics that any row has, in the order in which they come."""
    return tuple(dict.fromkeys(name for row in rows for name in row.metrics))


def columns_of(rows: Iterable[MetricsRow]) -> list[Column]:
    """Return the columns that have a value in any of the rows."""
    rows = list(rows)
    columns = [*COLUMNS, *map(metric, metric_names(rows))]
    return [column for column in columns if any(column.has(row.value(column)) for row in rows)]


def best_round(rows: Iterable[MetricsRow], name: str = "") -> int | None:
    """Return the round of the best evaluation, the first of several: the highest of a metric, of "-name" the lowest.

    Without a name it is that of the lowest loss. None where no evaluation gave a finite number.
    """
    sign = -1.0 if name.startswith("-") or name in ("", "loss") else 1.0
    name = name.removeprefix("-") or "loss"
    values = {row.round: sign * {"loss": row.loss, **row.figures()}.get(name, math.nan) for row in rows}
    finite = {round: value for round, value in sorted(values.items()) if math.isfinite(value)}
    return max(finite, key=lambda round: finite[round], default=None)


def final_figures(row: MetricsRow | None) -> dict[str, Any]:
    """Return what summary.json says of the last evaluation, if there is one."""
    if row is None:
        return {"final_accuracy": None, "final_loss": None, "metrics": {}}
    return {
        "final_accuracy": finite(row.accuracy),
        "final_loss": finite(row.loss),
        "metrics": {name: finite(value) for name, value in row.figures().items()},
    }


def finite(value: float) -> float | None:
    """Return a number as JSON can hold it: None in place of NaN and infinities."""
    return value if math.isfinite(value) else None
