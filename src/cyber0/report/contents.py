"""What a report shows, as plain data: the page's script draws it, and the live page polls it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyber0 import __version__
from cyber0.config.keys import describe
from cyber0.diagnose import verdict as verdicts
from cyber0.report.headline import command, figures, sentence, settings_of
from cyber0.report.thin import thin
from cyber0.runs.folder import COUNTS, RunFolder
from cyber0.tasks.metrics import COLUMNS, ROUND, SENT, Column, MetricsRow, columns_of, finite

MOST_POINTS = 2_000  # of a curve: more than a screen has pixels
ALL_POINTS = 40_000  # of all curves of a report, so that a hundred runs still make a small file
FEWEST_POINTS = 100
MOST_SHOWN_CLIENTS = 300  # rows of the table of clients; clients.csv has all
MOST_SHARES, MOST_LABELS = 60, 60  # rows and columns of the partition; partition.csv has all
PAGE_FORMAT = 1


def contents(runs: Sequence[RunFolder], *, live: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return everything that the page shows.

    Args:
        runs: The runs, in the order to be shown.
        live: How far a live run has come; None for a report that does not change.
    """
    points = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, len(runs))))
    names = _names([folder.path for folder in runs])
    columns = _charted_columns(runs)
    return {
        "format": PAGE_FORMAT,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cyber0": __version__,
        "live": live,
        "charts": [chart for column in columns for chart in _charts(column)],
        "runs": [_run(folder, name, columns, points) for folder, name in zip(runs, names, strict=True)],
    }


def _charted_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return the columns to draw: those that any run has a value in; before any evaluation, accuracy and loss."""
    rows = [row for folder in runs for row in folder.evaluations]
    columns = columns_of(rows) if rows else [column for column in COLUMNS if column.measured and column.of_set]
    return [column for column in columns if column.axes]


def _charts(column: Column) -> list[dict[str, Any]]:
    """Return the charts of a column: what is drawn over what, and how it is written."""
    over = {ROUND: "rounds", SENT: "bytes sent by each client"}
    return [
        {"title": f"{column.label} over {over[x]}", "x": x, "y": column.name, "unit": column.unit,
         "of_set": column.of_set}
        for x in column.axes
    ]  # fmt: skip


def _run(folder: RunFolder, name: str, columns: Sequence[Column], points: int) -> dict[str, Any]:
    return {
        "name": name,
        "ended": folder.ended,
        "sentence": sentence(folder),
        "notes": [*folder.notes, *_odd_losses(folder.evaluations), *_expulsions(folder)],
        "figures": [f._asdict() | {"value": None if f.value is None else finite(f.value)} for f in figures(folder)],
        "digest": str(folder.summary.get("model_digest", "")),
        "set": folder.evaluated_on,
        "curve": _curve(folder.evaluations, columns, points),
        "diagnostics": _diagnostics(folder),
        "clients": _clients(folder),
        "network": _network(folder),
        "partition": _partition(folder),
        "config": _config(folder),
        "environment": _environment(folder),
        "command": command(folder) if folder.config else "",
    }


def _curve(rows: Sequence[MetricsRow], columns: Sequence[Column], points: int) -> dict[str, Any]:
    """Return the charted columns, thinned, and what they are drawn over."""
    present = [column for column in columns_of(rows) if column in columns]
    drawn = {column.name: [_number(row.value(column)) for row in rows] for column in present}
    kept = thin(list(drawn.values()), points) if rows else []
    axes = {column.name: [rows[i].value(column) for i in kept] for column in COLUMNS if column.name in (ROUND, SENT)}
    values = {name: [_short(values[i]) for i in kept] for name, values in drawn.items()}
    return {"evaluations": len(rows), "columns": axes | values}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _odd_losses(rows: Sequence[MetricsRow]) -> list[str]:
    odd = [row.round for row in rows if not math.isfinite(row.loss)]
    return [f"The loss is not a finite number at {len(odd):,} evaluations, first at round {odd[0]:,}."] if odd else []


def _expulsions(folder: RunFolder) -> list[str]:
    """Return who was expelled and why, as summary.json has it; it may have been edited."""
    listed = folder.summary.get("expelled")
    return [f"{one['text']}." for one in listed if isinstance(one, dict) and isinstance(one.get("text"), str)
            ] if isinstance(listed, list) else []  # fmt: skip


def _diagnostics(folder: RunFolder) -> dict[str, Any]:
    """Return what is known about lr, mu, signal and noise."""
    records = verdicts.of_records(folder.records, folder.evaluated_on) if folder.records else []
    result: dict[str, Any] = {"records": [finding._asdict() for finding in records]}
    if not folder.diagnosis:
        return result
    verdict = verdicts.verdict(folder.diagnosis)
    head, rows = verdicts.table(folder.diagnosis)
    return result | {
        "level": verdict.level, "headline": verdict.headline, "findings": [f._asdict() for f in verdict.findings],
        "suggestions": verdict.suggestions, "head": head, "rows": rows, "lr": folder.diagnosis["lr"],
        "mu": folder.diagnosis["mu"],
        "stations": [{name: station[name] for name in ("round", "stepping", "probing")}
                     for station in folder.diagnosis["stations"]],
    }  # fmt: skip


def _clients(folder: RunFolder) -> dict[str, Any]:
    """Return how often each client was trimmed, the most trimmed first."""
    config = folder.checked_config
    expected = None
    if config is not None and config.aggregation.rule == "trimmed_mean" and config.method.name == "cyber0":
        expected = 2 * config.borne / config.federation.invited
    rows = sorted(folder.clients, key=lambda row: -row.share)
    return {"total": len(rows), "expected": expected, "rows": rows[:MOST_SHOWN_CLIENTS]}


def _network(folder: RunFolder) -> dict[str, Any] | None:
    """Return the traffic of each client of a deployment, and its state on the live page; None for a simulation."""
    if not folder.served:
        return None
    counts = folder.served["clients"]
    rows = [list(row) for row in zip(*(counts[name] for name in COUNTS), strict=True)]
    states = folder.served.get("states") or [None] * len(rows)
    clients = [[client, state, *row] for client, (state, row) in enumerate(zip(states, rows, strict=True))]
    clients.sort(key=lambda row: (row[1] in ("current", None), -row[3]))  # not current first, then by reports missed
    return {"total": len(clients), "columns": ["client", "state", *COUNTS], "rows": clients[:MOST_SHOWN_CLIENTS]}


def _partition(folder: RunFolder) -> dict[str, Any]:
    rows = folder.partition
    shown: Sequence[int] = range(len(rows))
    if len(rows) > MOST_SHARES:  # evenly spread: neighbouring clients are alike
        shown = [place * (len(rows) - 1) // (MOST_SHARES - 1) for place in range(MOST_SHARES)]
    config = folder.checked_config
    return {
        "title": config.federation.partition_title if config else "",
        "total": len(rows),
        "labels": folder.labels[:MOST_LABELS],
        "all_labels": len(folder.labels),
        "rows": [
            [rows[i].client, rows[i].byzantine, sum(rows[i].counts), *rows[i].counts[:MOST_LABELS]] for i in shown
        ],
    }


def _config(folder: RunFolder) -> list[dict[str, Any]]:
    known = {key.name: key for key in describe()}
    result = []
    for name, value in settings_of(folder):
        key = known.get(name)
        text = key.text + (f" ({key.limits})" if key.limits else "") if key else "this version has no such setting"
        changed = key is None or value != key.default
        result.append({"name": name, "value": _plain(value), "changed": changed, "text": text})
    return result


def _environment(folder: RunFolder) -> list[tuple[str, str]]:
    recorded = folder.summary.get("environment")
    return [(str(name), _plain(value)) for name, value in recorded.items()] if isinstance(recorded, dict) else []


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by the shortest end of its path that tells it from the others."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    depth = [1] * len(parts)
    while True:
        names = ["/".join(p[-d:]) for p, d in zip(parts, depth, strict=True)]
        longer = [names.count(name) > 1 and d < len(p) for name, p, d in zip(names, parts, depth, strict=True)]
        if not any(longer):
            return names
        depth = [d + more for d, more in zip(depth, longer, strict=True)]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _short(value: float) -> float | None:
    """Return a number with the digits that a screen can show; None if it is not finite, which JSON can't hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
