"""Robust rules over the (clients x numbers) matrix of a round.

A rule turns the reports of a round, one row per client, into one number per column. Rules are made by small
factories and used like functions; a row may be k scalars or a gradient of millions of numbers:

    rule = trimmed_mean(0.25)
    values = rule(matrix)                      # float64, one per column
    outcome = rule.decide(matrix, invited=12)  # the same values, and how often each row was left out
    rule = nnm(krum(0.25))                     # a step before the rule

How many liars a rule guards against is fixed by how many clients were *invited*, never by how many answered:
otherwise liars could weaken the defence by making honest clients late. It is `tolerated(beta, invited)` for every rule.

What `excluded` counts: for rules that look at each column by itself, in how many columns a row was left out (rows with
the same number take turns, so that clients who send the same are counted alike); for
rules that select whole rows (krum, multi_krum, mda), every column of the rows not selected; for rules that only weigh
the rows (mean, geometric_median, centered_clipping), nothing. After nnm a row has the count of the mixture around it,
after bucketing that of its bucket.
"""

from __future__ import annotations

from collections.abc import Callable

from cyber0.aggregate.before import bucketing, nnm
from cyber0.aggregate.centres import centered_clipping, geometric_median
from cyber0.aggregate.columns import meamed, mean, median, trimmed_mean
from cyber0.aggregate.rule import AggregationError, Matrix, Outcome, Rule, Step, tolerated
from cyber0.aggregate.selection import krum, mda, multi_krum
from cyber0.counting import BUCKET_SIZE
from cyber0.settings import check_known

__all__ = [
    "BEFORE", "RULES", "AggregationError", "Matrix", "Outcome", "Rule", "Step", "bucketing", "centered_clipping",
    "geometric_median", "krum", "make", "mda", "meamed", "mean", "median", "multi_krum", "nnm", "tolerated",
    "trimmed_mean",
]  # fmt: skip

RULES: dict[str, Callable[[float], Rule]] = {
    "mean": lambda beta: mean(),
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "meamed": meamed,
    "centered_clipping": centered_clipping,
    "mda": mda,
}
"""Every rule that a configuration can name, made from beta."""

BEFORE: dict[str, Callable[[Rule, float, int], Rule]] = {
    "none": lambda rule, beta, seed: rule,
    "nnm": lambda rule, beta, seed: nnm(rule, beta),
    "bucketing": lambda rule, beta, seed: bucketing(rule, BUCKET_SIZE, seed),
}
"""Every step before a rule that a configuration can name, put before a rule for a share of liars, under a seed."""


def make(name: str, beta: float, *, before: str = "none", seed: int = 0) -> Rule:
    """Return the rule called `name`, guarding against a share `beta` of liars, after the step called `before`.

    Args:
        name: one of `RULES`.
        beta: the share of liars to guard against, in [0, 0.5).
        before: one of `BEFORE`.
        seed: what a step that draws lots draws by.
    """
    check_known("aggregation rule", name, RULES)
    check_known("step before a rule", before, BEFORE)
    tolerated(beta, 0)  # an impossible beta is refused also by a rule that makes no use of it
    return BEFORE[before](RULES[name](beta), beta, seed)
