"""Whether a finished run has learned anything, judged by its figures: what is certain, and what only looks wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cyber0.diagnose.source import DIAGNOSABLE
from cyber0.tasks.metrics import MetricsRow

FALLEN = 0.05  # of accuracy (0 to 1) below the best evaluation: more than a test set of a thousand samples fluctuates
EXPLODED = 10.0  # times the loss at the start


class RunOutcome(NamedTuple):
    """The judgement of a finished run."""

    failure: str
    """Why it certainly learned nothing; empty if it may have."""
    doubts: list[str]
    """What looks wrong, and may have a good reason: an attack that the rule does not withstand, too few rounds."""


def judge(
    summary: Mapping[str, Any], evaluations: Sequence[MetricsRow], *, unchanged: bool, rule: str = ""
) -> RunOutcome:
    """Judge a finished run.

    Args:
        summary: Its summary.json.
        evaluations: In the order of the rounds.
        unchanged: Whether its weights are, bit for bit, those that it started with.
        rule: The aggregation rule, named in the message if it never decided a round.
    """
    rounds, abandoned = summary["rounds"], summary["abandoned_rounds"]
    if not rounds:  # it was only evaluated
        return RunOutcome("", [])
    if idle := all_abandoned(summary, rule):
        return RunOutcome(idle, [])
    if summary["final_loss"] is None:
        why = ", ".join(["the loss is not a finite number at the end", *_clamped(summary)])
        return RunOutcome(f"the run diverged: {why}", [])
    if unchanged:
        why = "the scalars are zero, or the steps are too small for the type of the weights"
        return RunOutcome(f"{rounds - abandoned:,} rounds were decided, and none of them changed a weight: {why}", [])
    return RunOutcome("", _clamped(summary) + _doubts(rounds, abandoned, evaluations))


def all_abandoned(summary: Mapping[str, Any], rule: str = "") -> str:
    """Return a message if a run, simulated or served, decided no round at all; else an empty text."""
    rounds = summary["rounds"]
    if not rounds or summary["abandoned_rounds"] < rounds:
        return ""
    rejected = ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in summary.get("rejected_reports", {}).items())
    unfit = f" (no report was rejected: aggregation.rule = {rule!r} gave no finite decision)" if rule else ""
    reasons = f" (reports rejected: {rejected})" if rejected else unfit
    return f"every one of the {rounds:,} rounds was abandoned, so the model never changed{reasons}"


def _clamped(summary: Mapping[str, Any]) -> list[str]:
    count = summary.get("saturated_weights", 0)
    return [f"{count:,} of {summary['dimension']:,} weights were clamped to the finite range"] if count else []


def _doubts(rounds: int, abandoned: int, evaluations: Sequence[MetricsRow]) -> list[str]:
    doubts = []
    if 2 * abandoned > rounds:
        doubts.append(f"{abandoned:,} of {rounds:,} rounds were abandoned")
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        best = max(evaluations, key=lambda e: -1.0 if math.isnan(e.accuracy) else e.accuracy)
        if first.round == 0 and not last.loss < first.loss:
            what = (
                "the run diverged, its loss rose" if last.loss > EXPLODED * abs(first.loss) else "the loss did not fall"
            )
            doubts.append(f"{what}: {first.loss:.4g} at the start, {last.loss:.4g} at the end")
        elif best.accuracy - last.accuracy > max(FALLEN, (best.accuracy - first.accuracy) / 2):
            doubts.append(f"accuracy fell from {best.accuracy:.2%} at round {best.round:,} to {last.accuracy:.2%}")
    return doubts


def remedy(method: str, folder: object) -> str:
    """Return how to find out why."""
    if method in DIAGNOSABLE:
        return f"`cyber0 diagnose {folder}` says whether it is the learning rate, mu, the data or the attack"
    return "try a lower method.lr"
