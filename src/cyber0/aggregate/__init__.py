"""Robust rules over the (clients x scalars) matrix of a round.

A rule turns the reports of a round, one row per client, into one number per column. Rules are made by small
factories and used like functions; a row may be k scalars or a gradient of millions of coordinates:

    rule = trimmed_mean(0.25)
    values = rule(matrix)                      # float64, one per column
    outcome = rule.decide(matrix, invited=12)  # the same values, and how often each row was left out
    rule = nnm(krum(0.25))                     # a pre-aggregation before the rule

How many Byzantine clients a rule guards against is fixed by how many clients were *invited*, never by how many
answered: otherwise Byzantine clients could weaken the defence by making honest clients late. It is `tolerated(beta,
invited)` for every rule.

A rule with a history (history.py) judges clients by the rounds before, which it is handed as a `Memory`:

    memory = rule.memory(clients=12)
    outcome = rule.decide(matrix, memory=memory)
    memory.learn(matrix, np.arange(12), outcome.values, lr=0.01)

What `excluded` counts: for coordinate-wise rules, in how many columns a row was left out (rows with
the same number take turns, so that clients who send the same are counted alike); for
rules that select whole rows (krum, multi_krum, mda), every column of the rows not selected; for rules that only weigh
the rows (mean, geometric_median, centered_clipping), nothing. After nnm a row has the count of the mixture around it,
after bucketing that of its bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.centres import centered_clipping, geometric_median
from cyber0.aggregate.columns import meamed, mean, median, trimmed_mean
from cyber0.aggregate.history import fit_reference
from cyber0.aggregate.pre_aggregation import bucketing, nnm
from cyber0.aggregate.reputation import reputation
from cyber0.aggregate.rule import AggregationError, Guilt, Judge, Matrix, Memory, Outcome, PreAggregation, Rule
from cyber0.aggregate.selection import krum, mda, multi_krum
from cyber0.config import doors
from cyber0.config.registry import PRE_AGGREGATIONS, RULES, import_modules
from cyber0.config.tolerance import tolerated
from cyber0.errors import ConfigError

__all__ = [
    "PRE_AGGREGATIONS",
    "RULES",
    "AggregationError",
    "Guilt",
    "Judge",
    "Matrix",
    "Memory",
    "Outcome",
    "PreAggregation",
    "Rule",
    "bucketing",
    "centered_clipping",
    "fit_reference",
    "geometric_median",
    "krum",
    "make",
    "mda",
    "meamed",
    "mean",
    "median",
    "multi_krum",
    "nnm",
    "reputation",
    "tolerated",
    "trimmed_mean",
]  # fmt: skip


import_modules(__name__, __path__, but=("kernels",))  # which loads numba


def make(
    name: str, beta: float, *, before: str = "none", seed: int = 0, options: Mapping[str, Any] | None = None
) -> Rule:
    """Return the rule called `name`, for a share `beta` of Byzantine clients, after the pre-aggregation `before`.

    A factory may return a plain function of a (clients x scalars) matrix that gives one row: it becomes a `Rule` that
    drops rows that are not finite and needs 2 floor(beta m) + 1 others, like any rule.

    Args:
        name: one of `RULES`, or the path of a factory, as my_rules.py:clipped, which is imported.
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        before: one of `PRE_AGGREGATIONS`.
        seed: what a pre-aggregation that draws at random draws by.
        options: what the rule's factory takes.
    """
    tolerated(beta, 0)  # an impossible beta is refused also by a rule that makes no use of it
    made = RULES.make(name, options, beta=beta)
    if not isinstance(made, Rule):
        made = _wrapped(doors.short(name), beta, made)
    return PRE_AGGREGATIONS.make(before, rule=made, beta=beta, seed=seed)  # type: ignore[no-any-return]


def _wrapped(name: str, beta: float, function: Any) -> Rule:
    """Return a plain function of a matrix as a rule."""
    if not callable(function):
        raise ConfigError(
            f"aggregation.rule = {name!r} returns {type(function).__name__}, and must return a function of a "
            "(clients x scalars) matrix that gives one row"
        )

    def combine(rows: Matrix, b: int, round: int) -> Outcome:
        found = np.asarray(function(rows.astype(np.float64)))  # a copy, which it may change
        if found.shape != rows.shape[1:] or found.dtype.kind not in "fiu":
            raise ConfigError(
                f"aggregation.rule = {name!r} returned an array of shape {found.shape} and type {found.dtype} for a "
                f"matrix of shape {rows.shape}; it must return {rows.shape[1]} numbers, one for each column"
            )
        values: NDArray[np.float64] = found.astype(np.float64)
        return Outcome(values, np.zeros(len(rows), np.int64))

    return Rule(name, beta, combine)
