"""Folders that look like those of runs, made without a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from cyber0.config.files import to_toml
from cyber0.config.schema import Config


def make_folder(
    path: Path, *, rounds: int = 50, clients: int = 12, rule: str = "trimmed_mean", data: str = "",
    environment: dict[str, Any] | None = None, slope: float = 1.0, every: int = 1, task: str = "mnist",
    more: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write the files of a run whose accuracy rises by `slope`, and whose clients 1, 2 and 3 lie.

    more is what its summary says beside what those of all tasks say.
    """
    path.mkdir(parents=True)
    overrides = [f"rounds={rounds}", f"federation.clients={clients}", f"aggregation.rule={rule}"]
    model = {} if task == "mnist" else {"model": "tiny"}
    config = Config.from_dict(
        {**{"rounds": rounds, "evaluate_every": every}, "task": {"name": task, "data": data} | model,
         "federation": {"clients": clients}, "aggregation": {"rule": rule}}
    )  # fmt: skip
    assert config.with_overrides(overrides) == config
    (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    rows = [_row(t, rounds, slope) for t in range(0, rounds + 1, every)]
    _table(path / "metrics.csv", "round,accuracy,loss,uplink_bytes,downlink_bytes,decided,seconds", rows)
    sent = 64 * rounds
    byzantine = [(i, int(1 <= i <= 3), sent, sent * (9 if 1 <= i <= 3 else 3 + i % 3) // 10) for i in range(clients)]
    _table(path / "clients.csv", "client,byzantine,sent,trimmed,share", [(*r, r[3] / r[2]) for r in byzantine])
    shares = [(i, int(1 <= i <= 3), *_share(i)) for i in range(clients)]
    _table(path / "partition.csv", "client,byzantine,samples," + ",".join(f"label_{j}" for j in range(10)), shares)
    summary = {
        "final_accuracy": rows[-1][1], "final_loss": rows[-1][2], "rounds": rounds, "abandoned_rounds": 0,
        "dimension": 7850, "wall_seconds": rows[-1][-1], "model_digest": "ab" * 32, "rejected_reports": {},
        "probability_of_too_many_liars": 0.0, "environment": environment or {"cyber0": "0.1.0", "python": "3.11"},
        **(more or {}),
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def _row(t: int, rounds: int, slope: float) -> tuple[Any, ...]:
    learned = 1 - math.exp(-5 * slope * t / rounds)
    wobble = 0.01 * math.sin(12.9898 * t)
    return t, 0.1 + 0.8 * learned + wobble, 2.3 - 1.9 * learned + wobble, 256 * t, 256 * t, t, 0.01 * t


def _share(client: int) -> list[int]:
    counts = [(client * 37 + label * 101) % 500 for label in range(10)]
    return [sum(counts), *counts]


def _table(path: Path, header: str, rows: list[tuple[Any, ...]]) -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
