"""The only reader and writer of the files in a run's folder:

    config.toml        the whole config; `cyber0 run config.toml` repeats the run
    w0.safetensors     the starting weights; a named language model is loaded again, and its digest compared
    ledger.bin         every decision; with w0 it is the model
    state.safetensors  for methods whose clients send d values, instead of a ledger: the weights and counters at some
                       round
    partition.csv      how many samples every client has, by label where there are classes
    metrics.csv        one row an evaluation; tasks/metrics.py declares its columns
    clients.csv        how often each client's scalars were trimmed
    summary.json       the figures at the end
    model.safetensors  the trained model, unless --no-export; for a language model the folder model/ instead, which
                       from_pretrained (or PEFT) loads
    sources.json       the SHA-256 of each of the user's files that the config names, if any
    reports.bin        every report, if serve.keep_reports
    served.json        what a federator counted on the network
    diagnostics.json   what `cyber0 diagnose` measured, if it was run
    report.html        all of it as one page
    plots/*.png        pictures

The ledger, or the state, alone determines how far a run has come. Everything else is derived from it, so a run may be
killed at any moment. The names are in storage; ledger, reports and weights have modules of their own. No torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cyber0.config import doors, toml
from cyber0.config.paths import with_paths
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, Cyber0Error, DataError
from cyber0.storage import (
    CLIENTS,
    CONFIG,
    DIAGNOSTICS,
    LEDGER,
    METRICS,
    PARTITION,
    SERVED,
    SUMMARY,
    naming,
    write_text,
)
from cyber0.tasks import SETS, evaluated_by_name, evaluated_on
from cyber0.tasks.metrics import BUILT_IN, COLUMNS, MetricsRow, metric, metric_names

COUNTS = ("reports", "misses", "payload_in", "payload_out", "message_in", "message_out", "wire_in", "wire_out")
"""What a federator counts of each client: "in" is what the client sent."""


# metrics.csv


class MetricsFile:
    """metrics.csv while it is being written, one row at a time.

    Args:
        path: The file.
        columns: The built-in columns to write; those of metrics follow them.
    """

    def __init__(self, path: Path, columns: Sequence[str] = BUILT_IN) -> None:
        self._path, self._columns = path, tuple(columns)
        self._header: tuple[str, ...] = ()  # once written by this object: before, the last line may be cut off

    def fits(self, row: MetricsRow) -> bool:
        """Return whether the file has been written here, with a column for each of the row's metrics."""
        return bool(self._header) and set(row.metrics) <= set(self._header)

    def rewrite(self, rows: Sequence[MetricsRow]) -> None:
        """Write all rows, in whole or not at all, with a column for each metric that one of them has."""
        self._header = (*self._columns, *metric_names(rows))
        _write_csv(self._path, self._header, [_cells(row, self._header) for row in rows])

    def append(self, row: MetricsRow) -> None:
        """Add a row to the file under the columns that it has; a metric without a column is left out."""
        with naming(self._path), self._path.open("a+", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if not self._header and file.tell():
                file.seek(0)
                self._header = tuple(next(csv.reader(file), ()))
            elif not self._header:
                self._header = (*self._columns, *metric_names([row]))
                writer.writerow(self._header)
            writer.writerow(_cells(row, self._header))


def _cells(row: MetricsRow, header: Iterable[str]) -> list[Any]:
    """Return a row as the columns of a file; what was not measured is left empty."""
    columns = {column.name: column for column in (*COLUMNS, *map(metric, row.metrics))}
    values = {name: row.value(column) for name, column in columns.items()}
    return [values[name] if name in columns and columns[name].has(values[name]) else "" for name in header]


def read_metrics(path: Path) -> tuple[list[MetricsRow], str]:
    """Return the rows of a metrics file up to the first one that is cut off or damaged, and what is wrong with that.

    The fault is empty where there is none.

    Raises:
        OSError: the file can't be read.
    """
    rows: list[MetricsRow] = []
    try:
        lines = _lines(path)
        places = {name: place for place, name in enumerate(next(lines))}
        for column in COLUMNS:
            if not column.optional and column.name not in places:
                raise ValueError(f"it has no column {column.name!r}")
        built_in = [(column, places.pop(column.name)) for column in COLUMNS if column.name in places]
        absent = {column.name: column.missing for column in COLUMNS}
        for line in lines:
            known: dict[str, Any] = absent | {column.name: column.parse(line[place]) for column, place in built_in}
            more = {name: float(line[place]) for name, place in places.items() if line[place]}
            rows.append(MetricsRow(**known, metrics=more))
    except (ValueError, csv.Error) as error:
        return rows, str(error)
    return rows, ""


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of one of a run's CSV files as text.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is cut off.
    """
    lines = _lines(path)
    header = next(lines)
    return [dict(zip(header, line, strict=True)) for line in lines]


def _lines(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a CSV file, the header first; one that is cut off, even in its last cell, is a ValueError."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]
    lines = csv.reader(io.StringIO(whole, newline=""))
    header = next(lines, None)
    if not header:
        raise ValueError("it is empty")
    yield header
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"line {lines.line_num} has more or fewer cells than the header")
        yield line
    if len(whole) < len(text):
        raise ValueError("its last line is cut off")


# clients.csv and partition.csv


class ClientRow(NamedTuple):
    """A row of clients.csv; only a simulation knows whether a client is Byzantine."""

    client: int
    byzantine: bool | None
    sent: int
    trimmed: int

    @property
    def share(self) -> float:
        """The share of its scalars that were trimmed."""
        return self.trimmed / self.sent if self.sent else 0.0


class PartitionRow(NamedTuple):
    """A row of partition.csv: a client's samples, by label."""

    client: int
    byzantine: bool | None
    counts: list[int]


def write_clients(folder: Path, rows: Iterable[ClientRow]) -> None:
    """Write clients.csv."""
    cells = [(row.client, _flag(row.byzantine), row.sent, row.trimmed, row.share) for row in rows]
    _write_csv(folder / CLIENTS, ("client", "byzantine", "sent", "trimmed", "share"), cells)


def write_partition(folder: Path, rows: Iterable[PartitionRow], labels: int) -> None:
    """Write partition.csv; `labels` is 0 where the samples have no classes."""
    header = ("client", "byzantine", "samples", *(f"label_{label}" for label in range(labels)))
    cells = [(row.client, _flag(row.byzantine), sum(row.counts), *row.counts[:labels]) for row in rows]
    _write_csv(folder / PARTITION, header, cells)


def _flag(byzantine: bool | None) -> int | str:
    return "" if byzantine is None else int(byzantine)


def _write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())


# summary.json


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, the last of a run's own files: where it is, the run is complete."""
    write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def load_summary(folder: Path) -> dict[str, Any]:
    """Return summary.json.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    if not isinstance(summary, dict):
        raise ValueError("it is no table")
    return summary


def read_summary(folder: Path | None) -> dict[str, Any] | None:
    """Return summary.json; None if it is missing or damaged."""
    try:
        return None if folder is None else load_summary(folder)
    except (OSError, ValueError):
        return None


# The whole folder


@dataclass
class RunFolder:
    """What a run's folder holds, as far as it can be read; `notes` says what is missing or damaged."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    evaluations: list[MetricsRow] = field(default_factory=list)
    clients: list[ClientRow] = field(default_factory=list)
    partition: list[PartitionRow] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    """What `cyber0 diagnose` measured."""
    records: dict[str, Any] = field(default_factory=dict)
    """What the ledger promised and what came of it; report/folder.py adds it."""
    served: dict[str, Any] = field(default_factory=dict)
    """What a federator counted on the network; empty for a simulation."""
    notes: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end; its summary then holds the number of rounds."""
        return "rounds" in self.summary

    @property
    def evaluated_on(self) -> str | None:
        """The set that the evaluations are of: dev, test or train; None if the folder does not record it.

        A finished run records it; for one of an older version it follows from the figures in its summary.
        """
        recorded, table = self.summary.get("evaluated_on"), self.config.get("task")
        if recorded in (*SETS, "train"):
            return str(recorded)
        settings = table if isinstance(table, dict) else {}
        task = settings.get("name", self.summary.get("task"))
        if not isinstance(task, str):
            return None
        measured = [name for name in SETS if f"{name}_accuracy" in self.summary]
        return evaluated_on(task, measured) if measured else evaluated_by_name(task, str(settings.get("data", "")))

    @property
    def checked_config(self) -> Config | None:
        """The config, if this version of cyber0 could run it."""
        try:
            return Config.recorded(self.config) if self.config else None
        except ConfigError:
            return None


def read(path: Path, *, running: bool = False) -> RunFolder:
    """Read a run's folder as far as possible.

    Args:
        path: The folder.
        running: Whether this process is running the run; its last files are then not missed.

    Raises:
        DataError: the folder holds no run at all.
    """
    _check(path)
    folder = RunFolder(path)
    _read_config(folder)
    served = (path / SERVED).exists()
    if served:
        _read_served(folder)
    if not served or (path / METRICS).exists():  # followers evaluate a deployment, if there are any
        _read_metrics(folder)
    if not served:  # in a deployment only the clients know who holds what
        _read_rows(folder, PARTITION, _take_partition)
    _read_summary(folder, running)
    if (path / CLIENTS).exists():
        _read_rows(folder, CLIENTS, _take_clients)
    elif not running:
        _count_trims(folder)
    if not running:
        _read_diagnosis(folder)
    return folder


def _check(path: Path) -> None:
    if not path.exists():
        raise DataError(f"there is no folder {path}; give the folder of a run, as `cyber0 run` prints it")
    if not path.is_dir():
        raise DataError(f"{path} is a file; give the folder of the run")
    if any((path / name).is_file() for name in (CONFIG, METRICS, SUMMARY)):
        return
    inside = sorted(child for child in path.iterdir() if (child / CONFIG).is_file())
    if inside:
        some = ", ".join(map(str, inside[:3])) + (", ..." if len(inside) > 3 else "")
        raise DataError(f"{path} holds no run itself, but {len(inside)} of its folders do: give those ({some})")
    raise DataError(f"{path} holds no run: it has no {CONFIG}, {METRICS} or {SUMMARY}")


def _read_config(folder: RunFolder) -> None:
    try:
        tables = toml.parse((folder.path / CONFIG).read_text(encoding="utf-8-sig"))
        folder.config = with_paths(tables, doors.short)  # a report is read elsewhere
    except FileNotFoundError:
        folder.notes.append(f"{CONFIG} is missing: the settings are not known.")
    except (OSError, UnicodeDecodeError) as error:
        folder.notes.append(f"{CONFIG} can't be read: {error}.")
    except ConfigError as error:
        folder.notes.append(f"{CONFIG} {error}.")


def _read_summary(folder: RunFolder, running: bool) -> None:
    try:
        folder.summary = load_summary(folder.path)
    except FileNotFoundError:
        if not running:
            folder.notes.append(f"{SUMMARY} is missing: the run has not ended, or was cut off.")
    except (OSError, ValueError) as error:
        folder.notes.append(f"{SUMMARY} can't be read: {error}.")


def _read_served(folder: RunFolder) -> None:
    try:
        served = json.loads((folder.path / SERVED).read_text(encoding="utf-8"))
        columns = served["clients"]
        if not all(isinstance(n, int) for column in columns.values() for n in column):
            raise ValueError("its counts are not numbers")
        if {len(columns[name]) for name in COUNTS} != {len(columns["reports"])}:
            raise ValueError("its columns are not equally long")
        folder.served = served
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        folder.notes.append(f"{SERVED} can't be read: {error!r}.")


def _read_diagnosis(folder: RunFolder) -> None:
    try:
        diagnosis = json.loads((folder.path / DIAGNOSTICS).read_text(encoding="utf-8"))
        if not isinstance(diagnosis, dict) or not diagnosis:
            raise ValueError("it is no table, or an empty one")
        folder.diagnosis = diagnosis
    except FileNotFoundError:
        pass  # not every run was diagnosed
    except (OSError, ValueError) as error:
        folder.notes.append(f"{DIAGNOSTICS} can't be read: {error!r}; make it again by cyber0 diagnose.")


def _read_metrics(folder: RunFolder) -> None:
    try:
        folder.evaluations, fault = read_metrics(folder.path / METRICS)
    except FileNotFoundError:
        folder.notes.append(f"{METRICS} is missing.")
        return
    except OSError as error:
        fault = str(error)
    if fault:
        folder.notes.append(f"{METRICS} can be read only in part: {fault}.")
    elif not folder.evaluations:
        folder.notes.append(f"{METRICS} has no evaluation yet.")


def _read_rows(folder: RunFolder, name: str, take: Callable[[RunFolder, dict[str, str]], None]) -> None:
    """Read a CSV file up to the first line that makes no sense: a run may be killed at any moment."""
    try:
        lines = _lines(folder.path / name)
        header = next(lines)
        for line in lines:
            take(folder, dict(zip(header, line, strict=True)))
    except FileNotFoundError:
        folder.notes.append(f"{name} is missing.")
    except KeyError as error:
        folder.notes.append(f"{name} can be read only in part: it has no column {error}.")
    except (OSError, ValueError, csv.Error) as error:
        folder.notes.append(f"{name} can be read only in part: {error}.")


def _take_clients(folder: RunFolder, line: dict[str, str]) -> None:
    folder.clients.append(ClientRow(int(line["client"]), _truth(line), int(line["sent"]), int(line["trimmed"])))


def _take_partition(folder: RunFolder, line: dict[str, str]) -> None:
    labels = [name for name in line if name.startswith("label_")]
    if not labels and "samples" in line:  # no classes
        labels = ["samples"]
    folder.labels = [name.removeprefix("label_") for name in labels]
    folder.partition.append(PartitionRow(int(line["client"]), _truth(line), [int(line[name]) for name in labels]))


def _truth(line: Mapping[str, str]) -> bool | None:
    text = line.get("byzantine", "")
    return bool(int(text)) if text else None


def _count_trims(folder: RunFolder) -> None:
    """Count in the ledger who was trimmed so far, for a run that has not ended."""
    if not (folder.path / LEDGER).exists():
        folder.notes.append(f"{CLIENTS} is missing: who was trimmed is not known.")
        return
    from cyber0.ledger import Ledger, trim_counts

    try:
        trimmed, sent = (column.tolist() for column in trim_counts(Ledger.open(folder.path / LEDGER)))
    except (Cyber0Error, OSError) as error:
        folder.notes.append(f"{CLIENTS} is missing, and {LEDGER} can't be read: {error}.")
        return
    known = {row.client: row.byzantine for row in folder.partition}
    folder.clients = [ClientRow(i, known.get(i), s, t) for i, (s, t) in enumerate(zip(sent, trimmed, strict=True))]
