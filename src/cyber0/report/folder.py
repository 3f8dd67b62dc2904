"""What a run's folder says, as far as it goes: read leniently, with a note for all that is missing or broken."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cyber0.config import doors
from cyber0.config.paths import with_paths
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, Cyber0Error, DataError
from cyber0.storage import CLIENTS, CONFIG, DIAGNOSTICS, LEDGER, METRICS, PARTITION, SERVED, SUMMARY
from cyber0.tasks import SETS, evaluated_by_name, evaluated_on
from cyber0.tasks.base import RESERVED

COUNTS = ("reports", "misses", "payload_in", "payload_out", "message_in", "message_out", "wire_in", "wire_out")
"""What a federator counts of each client: in is what the client sent."""


class Evaluation(NamedTuple):
    """A row of metrics.csv, or as much of it as a report shows."""

    round: int
    accuracy: float
    loss: float
    uplink_bytes: int
    downlink_bytes: int
    seconds: float
    metrics: Mapping[str, float] = MappingProxyType({})
    """What a task of the user's own measures beside loss and accuracy."""


class ClientRow(NamedTuple):
    """A row of clients.csv; whether a client lies is known to a simulation alone."""

    client: int
    byzantine: bool | None
    sent: int
    trimmed: int


class Share(NamedTuple):
    """A row of partition.csv."""

    client: int
    byzantine: bool | None
    counts: list[int]


@dataclass
class RunFolder:
    """A run's folder as it was found."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    clients: list[ClientRow] = field(default_factory=list)
    partition: list[Share] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    """What `cyber0 diagnose` measured."""
    records: dict[str, Any] = field(default_factory=dict)
    """What the ledger promised, and what came of it."""
    served: dict[str, Any] = field(default_factory=dict)
    """What a federator counted on the network; empty for a simulation."""
    notes: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end: it then says after how many rounds."""
        return "rounds" in self.summary

    @property
    def evaluated_on(self) -> str | None:
        """The set that the evaluations are of, dev or test; None where the folder does not say.

        A run that has ended says so; if it was played by an older version, its figures of either set do.
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
    """Read a run's folder; one that holds no run at all is refused.

    Args:
        path: The folder.
        running: The run is being played by this process: that its last files are not there yet goes without saying.
    """
    _check(path)
    found = RunFolder(path)
    _read_config(found)
    served = (path / SERVED).exists()
    if served:
        _read_served(found)
    if not served or (path / METRICS).exists():  # a deployment is evaluated by followers, if there are any
        _read_table(found, METRICS, _take_metrics)
    if not served:  # in a deployment nobody but the clients knows who holds what
        _read_table(found, PARTITION, _take_partition)
    _read_summary(found, running)
    if (path / CLIENTS).exists():
        _read_table(found, CLIENTS, _take_clients)
    elif not running:
        _count_trims(found)
    if not running:
        _read_diagnosis(found)
        _read_records(found)
    return found


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


def _read_config(found: RunFolder) -> None:
    try:
        tables = tomllib.loads((found.path / CONFIG).read_text(encoding="utf-8-sig"))
        found.config = with_paths(tables, doors.short)  # a report is read elsewhere
    except FileNotFoundError:
        found.notes.append(f"{CONFIG} is not there: the settings are not known.")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        found.notes.append(f"{CONFIG} can't be read: {error}.")


def _read_summary(found: RunFolder, running: bool) -> None:
    try:
        summary = json.loads((found.path / SUMMARY).read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("it is no table")
        found.summary = summary
    except FileNotFoundError:
        if not running:
            found.notes.append(f"{SUMMARY} is not there: the run has not ended, or was cut off.")
    except (OSError, ValueError) as error:
        found.notes.append(f"{SUMMARY} can't be read: {error}.")


def _read_served(found: RunFolder) -> None:
    try:
        served = json.loads((found.path / SERVED).read_text(encoding="utf-8"))
        columns = served["clients"]
        if not all(isinstance(n, int) for column in columns.values() for n in column):
            raise ValueError("its counts are no numbers")
        if {len(columns[name]) for name in COUNTS} != {len(columns["reports"])}:
            raise ValueError("its columns are not equally long")
        found.served = served
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found.notes.append(f"{SERVED} can't be read: {error!r}.")


def _read_table(found: RunFolder, name: str, take: Callable[[RunFolder, list[str], Iterator[list[str]]], None]) -> None:
    """Read a CSV file up to the first line that makes no sense; a run may be killed at any moment."""
    try:
        with (found.path / name).open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            take(found, next(lines, []), lines)
    except FileNotFoundError:
        found.notes.append(f"{name} is not there.")
    except (OSError, ValueError, IndexError, csv.Error) as error:
        found.notes.append(f"{name} can be read only in part: {error}.")


def _take_metrics(found: RunFolder, header: list[str], lines: Iterator[list[str]]) -> None:
    places = [_place(header, name) for name in Evaluation._fields[:-1]]
    more = {name: place for place, name in enumerate(header) if name not in ("accuracy", *RESERVED)}
    for line in lines:
        values = [float(line[place] or "nan") for place in places]
        metrics = {name: float(line[place]) for name, place in more.items() if line[place]}
        t, accuracy, loss, up, down, seconds = values
        if not all(map(math.isfinite, (t, up, down, seconds))):
            raise ValueError(f"round {line[places[0]]!r} has counts that are no numbers")
        found.evaluations.append(Evaluation(int(t), accuracy, loss, int(up), int(down), seconds, metrics))
    if not found.evaluations:
        found.notes.append(f"{METRICS} has no evaluation yet.")


def _take_clients(found: RunFolder, header: list[str], lines: Iterator[list[str]]) -> None:
    client, sent, trimmed = (_place(header, name) for name in ("client", "sent", "trimmed"))
    for line in lines:
        found.clients.append(ClientRow(int(line[client]), _truth(header, line), int(line[sent]), int(line[trimmed])))


def _take_partition(found: RunFolder, header: list[str], lines: Iterator[list[str]]) -> None:
    client = _place(header, "client")
    labels = [place for place, name in enumerate(header) if name.startswith("label_")]
    if not labels and "samples" in header:  # no classes
        labels = [header.index("samples")]
    found.labels = [header[place].removeprefix("label_") for place in labels]
    for line in lines:
        counts = [int(line[place]) for place in labels]
        found.partition.append(Share(int(line[client]), _truth(header, line), counts))


def _count_trims(found: RunFolder) -> None:
    """Find out from the ledger who was trimmed so far, in a run that has not come to its end."""
    if not (found.path / LEDGER).exists():
        found.notes.append(f"{CLIENTS} is not there: who was trimmed is not known.")
        return
    from cyber0.ledger import Ledger, trim_counts

    try:
        trimmed, sent = (column.tolist() for column in trim_counts(Ledger.open(found.path / LEDGER)))
    except (Cyber0Error, OSError) as error:
        found.notes.append(f"{CLIENTS} is not there, and {LEDGER} can't be read: {error}.")
        return
    lies = {share.client: share.byzantine for share in found.partition}
    found.clients = [ClientRow(i, lies.get(i), s, t) for i, (s, t) in enumerate(zip(sent, trimmed, strict=True))]


def _read_diagnosis(found: RunFolder) -> None:
    from cyber0.diagnose import verdict as words

    try:
        diagnosis = json.loads((found.path / DIAGNOSTICS).read_text(encoding="utf-8"))
        words.verdict(diagnosis), words.table(diagnosis)  # what can't be judged can't be shown
        found.diagnosis = diagnosis
    except FileNotFoundError:
        pass  # not every run was diagnosed
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found.notes.append(f"{DIAGNOSTICS} can't be read: {error!r}; make it again by cyber0 diagnose.")


def _read_records(found: RunFolder) -> None:
    if not (found.path / LEDGER).exists():
        return
    from cyber0.diagnose import records

    byzantine = [share.client for share in found.partition if share.byzantine]
    with contextlib.suppress(Cyber0Error, OSError):  # `cyber0 verify` says what is wrong with a ledger
        found.records = records.read(found.path, [(e.round, e.loss) for e in found.evaluations], byzantine) or {}


def _place(header: list[str], name: str) -> int:
    if name not in header:
        raise ValueError(f"it has no column {name!r}")
    return header.index(name)


def _truth(header: list[str], line: list[str]) -> bool | None:
    text = line[header.index("byzantine")] if "byzantine" in header else ""
    return bool(int(text)) if text else None
