"""What a report shows, as plain data: the page's script draws it, a watched run sends it anew."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyber0 import __version__
from cyber0.config.keys import describe
from cyber0.diagnose import verdict as words
from cyber0.report.folder import COUNTS, Evaluation, RunFolder
from cyber0.report.headline import command, figures, sentence, settings_of
from cyber0.report.thin import thin

MOST_POINTS = 2_000  # of a curve: more than a screen has pixels
ALL_POINTS = 40_000  # of all curves of a report, so that a hundred runs still make a small file
FEWEST_POINTS = 100
MOST_CLIENTS = 300  # rows of the table of suspects; the whole is in clients.csv
MOST_SHARES, MOST_LABELS = 60, 60  # rows and columns of the partition; the whole is in partition.csv
FORMAT = 1


def contents(runs: Sequence[RunFolder], *, live: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return everything that the page shows.

    Args:
        runs: The runs, in the order to be shown.
        live: How far a run that is being watched has come; None for a report that stands still.
    """
    points = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, len(runs))))
    names = _names([found.path for found in runs])
    return {
        "format": FORMAT,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cyber0": __version__,
        "live": live,
        "runs": [_run(found, name, points) for found, name in zip(runs, names, strict=True)],
    }


def _run(found: RunFolder, name: str, points: int) -> dict[str, Any]:
    return {
        "name": name,
        "ended": found.ended,
        "sentence": sentence(found),
        "notes": [*found.notes, *_odd_losses(found.evaluations)],
        "figures": [f._asdict() | {"value": _finite(f.value)} for f in figures(found)],
        "digest": str(found.summary.get("model_digest", "")),
        "set": found.evaluated_on,
        "curve": _curve(found.evaluations, points),
        "diagnostics": _diagnostics(found),
        "clients": _clients(found),
        "network": _network(found),
        "partition": _partition(found),
        "config": _config(found),
        "environment": _environment(found),
        "command": command(found) if found.config else "",
    }


def _curve(evaluations: Sequence[Evaluation], points: int) -> dict[str, Any]:
    accuracy, loss = [e.accuracy for e in evaluations], [e.loss for e in evaluations]
    names = dict.fromkeys(name for e in evaluations for name in e.metrics)
    metrics = {name: [e.metrics.get(name, math.nan) for e in evaluations] for name in names}
    kept = thin([accuracy, loss, *metrics.values()], points) if evaluations else []
    return {
        "evaluations": len(evaluations),
        "round": [evaluations[i].round for i in kept],
        "sent": [evaluations[i].uplink_bytes for i in kept],
        "accuracy": [_short(accuracy[i]) for i in kept],
        "loss": [_short(loss[i]) for i in kept],
        "metrics": {name: [_short(values[i]) for i in kept] for name, values in metrics.items()},
    }


def _odd_losses(evaluations: Sequence[Evaluation]) -> list[str]:
    odd = [e.round for e in evaluations if not math.isfinite(e.loss)]
    return [f"The loss is not a finite number at {len(odd):,} evaluations, first at round {odd[0]:,}."] if odd else []


def _diagnostics(found: RunFolder) -> dict[str, Any]:
    """Return what was found about lr, mu, signal and noise."""
    records = words.of_records(found.records, found.evaluated_on) if found.records else []
    result: dict[str, Any] = {"records": [finding._asdict() for finding in records]}
    if not found.diagnosis:
        return result
    verdict = words.verdict(found.diagnosis)
    head, rows = words.table(found.diagnosis)
    return result | {
        "level": verdict.level, "headline": verdict.headline, "findings": [f._asdict() for f in verdict.findings],
        "suggestions": verdict.suggestions, "head": head, "rows": rows, "lr": found.diagnosis["lr"],
        "mu": found.diagnosis["mu"],
        "stations": [{name: s[name] for name in ("round", "stepping", "probing")} for s in found.diagnosis["stations"]],
    }  # fmt: skip


def _clients(found: RunFolder) -> dict[str, Any]:
    """Return who was trimmed how often, the most trimmed first."""
    config = found.checked_config
    expected = None
    if config is not None and config.aggregation.rule == "trimmed_mean" and config.method.name == "cyber0":
        expected = 2 * config.borne / config.federation.invited
    rows = sorted(found.clients, key=lambda row: -(row.trimmed / row.sent if row.sent else 0.0))
    return {"total": len(rows), "expected": expected, "rows": rows[:MOST_CLIENTS]}


def _network(found: RunFolder) -> dict[str, Any] | None:
    """Return what each client of a deployment has cost, and how it stands while it is watched; None: a simulation."""
    if not found.served:
        return None
    counts = found.served["clients"]
    rows = [list(row) for row in zip(*(counts[name] for name in COUNTS), strict=True)]
    states = found.served.get("states") or [None] * len(rows)
    kept = [[client, state, *row] for client, (state, row) in enumerate(zip(states, rows, strict=True))]
    kept.sort(key=lambda row: (row[1] in ("current", None), -row[3]))  # who is not well, then who was waited for most
    return {"total": len(kept), "columns": ["client", "state", *COUNTS], "rows": kept[:MOST_CLIENTS]}


def _partition(found: RunFolder) -> dict[str, Any]:
    rows = found.partition
    shown: Sequence[int] = range(len(rows))
    if len(rows) > MOST_SHARES:  # evenly spread: neighbours in the order of the clients look alike
        shown = [place * (len(rows) - 1) // (MOST_SHARES - 1) for place in range(MOST_SHARES)]
    config = found.checked_config
    return {
        "title": config.federation.partition_title if config else "",
        "total": len(rows),
        "labels": found.labels[:MOST_LABELS],
        "all_labels": len(found.labels),
        "rows": [
            [rows[i].client, rows[i].byzantine, sum(rows[i].counts), *rows[i].counts[:MOST_LABELS]] for i in shown
        ],
    }


def _config(found: RunFolder) -> list[dict[str, Any]]:
    known = {key.name: key for key in describe()}
    result = []
    for name, value in settings_of(found):
        key = known.get(name)
        text = key.text + (f" ({key.limits})" if key.limits else "") if key else "this version has no such setting"
        changed = key is None or value != key.default
        result.append({"name": name, "value": _plain(value), "changed": changed, "text": text})
    return result


def _environment(found: RunFolder) -> list[tuple[str, str]]:
    recorded = found.summary.get("environment")
    return [(str(name), _plain(value)) for name, value in recorded.items()] if isinstance(recorded, dict) else []


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by as much of the end of its path as tells it from the others."""
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _short(value: float) -> float | None:
    """Return a number with the digits that a screen can show; JSON has none that is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
