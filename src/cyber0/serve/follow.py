"""`cyber0 follow`: evaluates the model between rounds, saves snapshots, and sends the federator the evaluations."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from cyber0.estimate.evaluator import evaluating
from cyber0.protocol.messages import EvaluationMessage, encode_evaluation
from cyber0.serve.join import MakeHook
from cyber0.serve.operations import EventLog
from cyber0.serve.participant import CommitHook, Participant
from cyber0.serve.state import save_snapshot
from cyber0.storage import METRICS, naming
from cyber0.tasks import Task


def follow_hook(out: Path, evaluate_every: int, snapshot_every: int, log: EventLog) -> tuple[MakeHook, int]:
    """Return what a follower does after commits, and at which multiples of rounds it has to be called."""

    def make(participant: Participant, task: Task) -> CommitHook:
        def hook(round: int) -> None:
            if round % evaluate_every == 0 or round == participant.rounds:
                _evaluate(participant, task, round, out / METRICS, log)
            if snapshot_every and round % snapshot_every == 0:
                client = participant.client
                path = out / f"snapshot-{round}.safetensors"
                save_snapshot(path, client.parameters, participant.run, round, client.chain)

        return hook

    return make, math.gcd(evaluate_every, snapshot_every) if snapshot_every else evaluate_every


def _evaluate(participant: Participant, task: Task, round: int, path: Path, log: EventLog) -> None:
    with evaluating(participant.client.parameters):
        loss, accuracy, *more = task.evaluate(participant.client.parameters.model)
    metrics = more[0] if more else {}
    shown = metrics if math.isnan(accuracy) else {"accuracy": accuracy, **metrics}
    log("evaluated", round=round, **shown, loss=loss)
    _append_row(path, round, accuracy, loss, metrics)
    participant.outbox.append(encode_evaluation(EvaluationMessage(round, accuracy, loss, metrics)))


def _append_row(path: Path, round: int, accuracy: float, loss: float, metrics: Mapping[str, float]) -> None:
    """Add a round's row, unless it is there: a follower that was killed replays rounds it has already evaluated."""
    with naming(path):
        rows = path.read_text().splitlines() if path.exists() else []
        with path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not rows:
                writer.writerow(["round", "accuracy", "loss", *metrics])
            if not any(row.startswith(f"{round},") for row in rows):
                writer.writerow([round, "" if math.isnan(accuracy) else accuracy, loss, *metrics.values()])
