"""What a federator leaves in its folder for people to read, and what it shows them while it runs. No torch.

served.json   bytes, missed rounds and refusals, by client: every few seconds, so that a federator that was killed
              continues counting from there
metrics.csv   the evaluations of followers
summary.json, clients.csv   after the last round, as after a simulation
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from cyber0.ledger import Ledger
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import EvaluationMessage, payload_bytes
from cyber0.report.headline import rate_text
from cyber0.runs import environment
from cyber0.runs.folder import (
    COUNTS,
    ClientRow,
    MetricsFile,
    RunFolder,
    read,
    read_metrics,
    write_clients,
    write_summary,
)
from cyber0.serve.figures import Figures, Traffic
from cyber0.serve.hub import Hub
from cyber0.storage import METRICS, SERVED, write_text
from cyber0.storage.disk import Clock
from cyber0.tasks.metrics import BUILT_IN, MetricsRow, final_figures

_COLUMNS = ("round", "accuracy", "loss", "uplink_bytes", "downlink_bytes", "seconds")
_SNAPSHOT_SECONDS = 10.0  # that a visitor of the live page waits for the loop


class ServerStats:
    """Stores a hub's figures in a folder, from where a resumed federator continues them."""

    def __init__(self, hub: Hub, folder: Path, clock: Clock) -> None:
        self._hub, self._folder, self._clock = hub, folder, clock
        self._metrics_file = MetricsFile(folder / METRICS, _COLUMNS)
        self._started, self._first = clock(), len(hub.ledger)
        self._seconds_before = 0.0
        self._last: tuple[RunFolder, dict[str, Any]] | None = None
        self._loop = asyncio.get_running_loop()
        self._restore()

    @property
    def seconds(self) -> float:
        """How long the run has been served, by this process and those before it."""
        return self._seconds_before + self._clock() - self._started

    @property
    def speed(self) -> float:
        """Rounds per second since this process started."""
        return (len(self._hub.ledger) - self._first) / max(self._clock() - self._started, 1e-9)

    def _restore(self) -> None:
        """Continue with what was counted before; counts that can't be read are not worth stopping for."""
        hub = self._hub
        try:
            stored = json.loads((self._folder / SERVED).read_text(encoding="utf-8"))
            clients = [Traffic(**row) for row in _rows(stored["clients"])]
            if len(clients) == hub.federator.clients:
                hub.figures.clients[:] = clients
                hub.figures.refused = Counter(stored["refused"])
                hub.figures.alarms = int(stored["digest_alarms"])
                self._seconds_before = float(stored["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        hub.evaluated = max((e.round for e in self._evaluations()), default=-1)

    def add_evaluation(self, evaluation: EvaluationMessage) -> None:
        """Add a follower's evaluation to metrics.csv."""
        federator = self._hub.federator
        sent = round(payload_bytes(federator.scalars, federator.codec) * evaluation.round * federator.participation)
        named = {name: value for name, value in evaluation.metrics.items() if name not in BUILT_IN}
        self._metrics_file.append(
            MetricsRow(
                evaluation.round,
                evaluation.accuracy,
                evaluation.loss,
                sent,
                sent,
                None,
                round(self.seconds, 3),
                metrics=named,
            )
        )

    def counted(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        figures = self._hub.figures
        return {
            "round": len(self._hub.ledger),
            "seconds": round(self.seconds, 3),
            "refused": dict(figures.refused),
            "digest_alarms": figures.alarms,
            "clients": {name: [getattr(client, name) for client in figures.clients] for name in COUNTS},
        }

    def save(self) -> None:
        """Write served.json."""
        self._hub.count_wire()
        write_text(self._folder / SERVED, json.dumps(self.counted()) + "\n", durable=False)

    def finish(self) -> None:
        """Write what a run's folder holds at the end."""
        hub = self._hub
        self.save()
        if len(hub.ledger) < hub.rounds:
            return
        evaluations = self._evaluations()
        last = evaluations[-1] if evaluations else None
        write_results(self._folder, hub.ledger, hub.federator, hub.figures, self.seconds, last)

    def summary_lines(self) -> list[str]:
        """Return a few lines that say how many rounds were run and what they cost."""
        hub, figures = self._hub, self._hub.figures
        refused = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in sorted(figures.refused.items()))
        lines = [
            f"{len(hub.ledger):,} of {hub.rounds:,} rounds in the ledger; here {figures.decided:,} decided, "
            f"{figures.abandoned:,} abandoned" + (f", {speed}" if (speed := rate_text(self.speed)) else ""),
            f"reports missed {figures.deadline_misses:,}; refused: {refused or 'nothing'}",
        ]
        costs = {kind: figures.a_round(kind) for kind in ("payload", "message", "wire")}
        known = [f"{kind} {cost[0]:.1f} / {cost[1]:.1f}" for kind, cost in costs.items() if cost is not None]
        return [*lines, f"bytes a client and round, up / down: {', '.join(known)}"] if known else lines

    def live_view(self) -> tuple[RunFolder, dict[str, Any]]:
        """Return the run as it stands, for the live page; called by its threads."""
        try:
            counted = asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop).result(_SNAPSHOT_SECONDS)
        except (RuntimeError, TimeoutError):  # the federator has stopped, or is too busy for visitors
            if self._last is None:
                raise
            return self._last
        found = read(self._folder, running=True)
        found.served, found.clients = counted["served"], counted["clients"]
        found.summary = {"environment": environment.describe("cpu"), **counted["summary"], **found.summary}
        self._last = found, counted["live"]
        return self._last

    async def _snapshot(self) -> dict[str, Any]:
        """Gather, in the loop, whatever changes there."""
        hub = self._hub
        hub.count_wire()
        states = [hub.state_of(client) for client in range(hub.federator.clients)]
        return {
            "served": {**self.counted(), "states": states, "connected": hub.connected, "current": hub.current},
            "clients": _client_rows(hub.federator),
            "summary": {"dimension": hub.ledger.header.dimension, "rejected_reports": dict(hub.figures.refused),
                        "abandoned_rounds": hub.figures.abandoned},
            "live": {"round": len(hub.ledger), "rounds": hub.rounds, "speed": rate_text(self.speed)},
        }  # fmt: skip

    def _evaluations(self) -> list[MetricsRow]:
        path = self._folder / METRICS
        return read_metrics(path)[0] if path.exists() else []


def write_results(
    folder: Path, ledger: Ledger, federator: Federator, figures: Figures, seconds: float, last: MetricsRow | None = None
) -> None:
    """Write clients.csv and summary.json of a federator whose last round has been decided.

    Args:
        folder: The run's.
        ledger: Its ledger.
        federator: Who decided.
        figures: What was counted; bytes on the wire only where they were.
        seconds: How long it took.
        last: The last evaluation, if there was one.
    """
    write_clients(folder, _client_rows(federator))
    config, count = ledger.header.config, federator.clients
    directions = {"uplink": "in", "downlink": "out"}
    bytes_sent = {f"{way}_bytes_per_client": figures.total(f"payload_{end}") / count for way, end in directions.items()}
    if figures.total("wire_in"):
        bytes_sent |= {f"wire_{way}_bytes_per_client": figures.total(f"wire_{end}") / count
                       for way, end in directions.items()}  # fmt: skip
    summary = {
        "task": config["task"]["name"],
        "method": config["method"]["name"],
        **final_figures(last),
        "rounds": len(ledger),
        "abandoned_rounds": sum(record.values is None for record in ledger),
        "dimension": ledger.header.dimension,
        **bytes_sent,
        "deadline_misses": figures.deadline_misses,
        "wall_seconds": seconds,
        "rounds_per_second": len(ledger) / seconds if seconds > 0 else 0.0,
        "rejected_reports": dict(figures.refused),
        "chain": ledger.chain.hex(),
        "environment": environment.describe("cpu"),
    }
    if config["federation"].get("expel"):
        summary["expelled"] = [one.as_dict() for one in federator.expulsions]
    write_summary(folder, summary)


def _client_rows(federator: Federator) -> list[ClientRow]:
    columns = zip(federator.sent.tolist(), federator.trimmed.tolist(), strict=True)
    return [ClientRow(i, None, sent, trimmed) for i, (sent, trimmed) in enumerate(columns)]


def _rows(columns: dict[str, list[int]]) -> list[dict[str, int]]:
    """Turn columns by name into rows."""
    return [{name: int(value) for name, value in zip(columns, row, strict=True)}
            for row in zip(*columns.values(), strict=True)]  # fmt: skip
