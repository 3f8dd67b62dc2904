"""`cyber0 follow`: evaluates the model between rounds, saves snapshots, and sends the federator the evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from cyber0.estimate.torch_threads import evaluating
from cyber0.protocol.messages import EvaluationMessage, encode_evaluation
from cyber0.runs.folder import MetricsFile
from cyber0.serve.join import MakeHook
from cyber0.serve.operations import EventLog
from cyber0.serve.participant import CommitHook, Participant
from cyber0.serve.snapshots import save_snapshot
from cyber0.storage import METRICS
from cyber0.tasks import EngineTask
from cyber0.tasks.metrics import MetricsRow


def follow_hook(out: Path, evaluate_every: int, snapshot_every: int, log: EventLog) -> tuple[MakeHook, int]:
    """Return what a follower does after commits, and at which multiples of rounds it has to be called."""

    def make(participant: Participant, task: EngineTask) -> CommitHook:
        def hook(round: int) -> None:
            if round % evaluate_every == 0 or round == participant.rounds:
                _evaluate(participant, task, round, out / METRICS, log)
            if snapshot_every and round % snapshot_every == 0:
                save_snapshot(out / f"snapshot-{round}.safetensors", participant.client, participant.run)

        return hook

    return make, math.gcd(evaluate_every, snapshot_every) if snapshot_every else evaluate_every


def _evaluate(participant: Participant, task: EngineTask, round: int, path: Path, log: EventLog) -> None:
    with evaluating(participant.client.parameters):
        loss, accuracy, *more = task.evaluate(participant.client.parameters.model)
    metrics = more[0] if more else {}
    shown = metrics if math.isnan(accuracy) else {"accuracy": accuracy, **metrics}
    log("evaluated", round=round, **shown, loss=loss)
    _append_row(path, round, accuracy, loss, metrics)
    participant.outbox.append(encode_evaluation(EvaluationMessage(round, accuracy, loss, metrics)))


def _append_row(path: Path, round: int, accuracy: float, loss: float, metrics: Mapping[str, float]) -> None:
    """Add a round's row, unless it is there: a follower that was killed replays rounds it has already evaluated."""
    rows = path.read_text().splitlines() if path.exists() else []
    if not any(row.startswith(f"{round},") for row in rows):
        row = MetricsRow(round, accuracy, loss, 0, 0, None, 0.0, metrics=metrics)
        MetricsFile(path, ("round", "accuracy", "loss")).append(row)
