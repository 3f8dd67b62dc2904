"""Robust rules over the (clients x numbers) matrix of a round.

A rule turns the reports of a round, one row per client, into one number per column. Rules are made by small
factories and used like functions:

    rule = trimmed_mean(0.25)
    values = rule(matrix)                      # float64, one per column
    outcome = rule.decide(matrix, invited=12)  # the same values, and how often each row was left out

How many liars a rule guards against is fixed by how many clients were *invited*, never by how many answered:
otherwise liars could weaken the defence by making honest clients late.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cyber0.counting import share_of
from cyber0.errors import ConfigError, Cyber0Error

Matrix: TypeAlias = NDArray[Any]
"""Rows are clients, columns are numbers; float32 or float64."""

# Columns copied at once into transposed order: 16 float32 are one cache line, so every line is read once.
_COLUMNS_PER_COPY = 16
# Elements worked on at once: temporaries stay in the cache, and a small matrix is a single block.
_ELEMENTS_PER_BLOCK = 1 << 18
# Rows copied, and checked for finiteness, at once.
_ROWS_PER_COPY = 1 << 12
_ROWS_PER_CHECK = 1 << 14


class AggregationError(Cyber0Error, ValueError):
    """A matrix can't be aggregated: it is not a matrix, or too few of its rows can be used."""


class Outcome(NamedTuple):
    """What a rule decided, and at whose expense."""

    values: NDArray[np.float64]
    """One number per column."""
    excluded: NDArray[np.int64]
    """Per row of the matrix, in how many columns its number was left out."""


def tolerated(beta: float, invited: int) -> int:
    """Return b = floor(beta * invited), the number of liars that a rule guards against.

    Args:
        beta: the share of liars to guard against, in [0, 0.5).
        invited: how many clients were asked.
    """
    if not 0.0 <= beta < 0.5:  # also refuses NaN
        raise ConfigError(f"beta = {beta!r} is impossible: nobody can outvote half of the clients; use 0 <= beta < 0.5")
    if invited < 0:
        raise ConfigError(f"{invited} clients can't be invited: use a number that is not negative")
    b = share_of(beta, invited)
    return min(b, max(0, (invited - 1) // 2))


@dataclass(frozen=True)
class Rule:
    """A robust rule: a name, the share of liars it guards against, and how it combines finite rows.

    `combine(rows, b)` gets a matrix of finite numbers with more than 2 b rows and returns their `Outcome`; all that is
    common to the rules (checking, dropping rows that are not finite, counting the absent) is done here.
    """

    name: str
    beta: float
    combine: Callable[[Matrix, int], Outcome]

    def __post_init__(self) -> None:
        tolerated(self.beta, 0)  # refuses an impossible beta

    def __call__(self, matrix: ArrayLike, invited: int | None = None) -> NDArray[np.float64]:
        """Return one number per column; see `decide`."""
        return self.decide(matrix, invited).values

    def decide(self, matrix: ArrayLike, invited: int | None = None) -> Outcome:
        """Combine the rows, column by column.

        Rows that hold a number that is not finite are dropped before anything else, count as absent, and are
        excluded in every column.

        Args:
            matrix: one row per client that answered.
            invited: how many clients were asked; as many as there are rows unless given.

        Raises:
            AggregationError: no more than 2 b usable rows are left.
        """
        rows = _as_matrix(matrix)
        count, columns = rows.shape
        invited = count if invited is None else invited
        if invited < count:
            raise AggregationError(f"{count} rows but only {invited} invited: a client that was not asked has no row")
        b = tolerated(self.beta, invited)
        finite = _finite_rows(rows)
        usable = count if finite is None else int(np.count_nonzero(finite))
        if usable <= 2 * b:
            raise AggregationError(
                f"{self.name} has {usable} usable rows of {invited} invited clients, and needs at least {2 * b + 1} "
                f"to withstand {b} liars (beta = {self.beta:g}): wait for more reports or abandon the round"
            )
        if finite is None:
            return self.combine(rows, b)
        kept = self.combine(rows[finite], b)
        excluded = np.full(count, columns, np.int64)
        excluded[finite] = kept.excluded
        return Outcome(kept.values, excluded)


def mean() -> Rule:
    """Average each column. One liar suffices to move it anywhere: for comparison, not for use among liars."""
    return Rule("mean", 0.0, _mean)


def median(beta: float = 0.0) -> Rule:
    """Take the median of each column; the mean of the two middle numbers if there are an even number.

    Args:
        beta: the share of liars among the invited to guard against. It does not change the median, only how many rows
            it insists on, 2 floor(beta * invited) + 1, below which liars could be the majority.
    """
    return Rule("median", beta, _median)


def trimmed_mean(beta: float) -> Rule:
    """Average each column without its b smallest and b largest numbers, b = floor(beta * invited).

    Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018. Of equal numbers
    at the lower end those of the first rows are left out, at the upper end those of the last, as in a stable sort.

    Args:
        beta: the share of liars to guard against, in [0, 0.5).
    """
    return Rule("trimmed_mean", beta, _trim)


RULES: dict[str, Callable[[float], Rule]] = {
    "mean": lambda beta: mean(),
    "median": median,
    "trimmed_mean": trimmed_mean,
}
"""Every rule that a configuration can name, made from beta."""


def make(name: str, beta: float) -> Rule:
    """Return the rule called `name`, guarding against a share `beta` of liars."""
    if name not in RULES:
        near = difflib.get_close_matches(str(name), RULES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no aggregation rule is called {name!r}; did you mean {near!r}? (known: {', '.join(RULES)})")
    tolerated(beta, 0)  # an impossible beta is refused also by a rule that makes no use of it
    return RULES[name](beta)


def _as_matrix(matrix: ArrayLike) -> Matrix:
    rows = np.asarray(matrix)
    if rows.ndim != 2:
        raise AggregationError(f"expected a matrix of clients x numbers, got an array of shape {rows.shape}")
    if rows.dtype.kind not in "fiu":
        raise AggregationError(f"expected a matrix of real numbers, got dtype {rows.dtype}")
    if rows.dtype.isnative and rows.dtype in (np.float32, np.float64):
        return rows
    return rows.astype(np.float64)


def _finite_rows(rows: Matrix) -> NDArray[np.bool_] | None:
    """Return which rows are finite, or None if all are (the usual case, and the cheap one)."""
    finite: NDArray[np.bool_] | None = None
    for start in range(0, len(rows), _ROWS_PER_CHECK):
        part = np.isfinite(rows[start : start + _ROWS_PER_CHECK])
        if not part.all():
            finite = np.ones(len(rows), np.bool_) if finite is None else finite
            finite[start : start + _ROWS_PER_CHECK] = part.all(axis=1)
    return finite


def _mean(rows: Matrix, b: int) -> Outcome:
    return _trim(rows, 0)


def _median(rows: Matrix, b: int) -> Outcome:
    # Trimming as much as can be trimmed leaves the middle one or two.
    return _trim(rows, (len(rows) - 1) // 2)


def _trim(rows: Matrix, b: int) -> Outcome:
    """Average every column without its b smallest and b largest numbers."""
    count, columns = rows.shape
    values = np.empty(columns, np.float64)
    kept = np.zeros(count, np.int64)
    height = max(1, _ELEMENTS_PER_BLOCK // count)
    width = max(height, _COLUMNS_PER_COPY)
    for start in range(0, columns, width):
        turned = _transpose(rows[:, start : start + width])
        for first in range(0, len(turned), height):
            block = turned[first : first + height]
            values[start + first : start + first + len(block)] = _trim_block(block, b, kept)
    return Outcome(values, columns - kept)


def _transpose(rows: Matrix) -> Matrix:
    """Copy into column order, a few rows at a time: four times faster than in one go if there are many."""
    if len(rows) <= _ROWS_PER_COPY:
        return np.ascontiguousarray(rows.T)
    turned = np.empty(rows.shape[::-1], rows.dtype)
    for start in range(0, len(rows), _ROWS_PER_COPY):
        turned[:, start : start + _ROWS_PER_COPY] = rows[start : start + _ROWS_PER_COPY].T
    return turned


def _trim_block(block: Matrix, b: int, kept: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the trimmed means of the rows of `block`, which are columns of the matrix; count in `kept` what stays."""
    count = block.shape[1]
    left = count - 2 * b
    if b == 0:
        kept += len(block)
        return _row_means(block.astype(np.float64), left)
    # Only the two thresholds come from the selection. What is kept is found by comparison and summed in the order of
    # the clients, so that no bit of the result depends on how the selection permutes. (Two selections of one position
    # each: NumPy has a vectorised kernel for that, and none for two positions at once.)
    selected = np.partition(block, b, axis=1)
    low = selected[:, b, None]
    high = np.partition(selected[:, b:], left - 1, axis=1)[:, left - 1, None]
    keep = (block >= low) & (block <= high)
    if np.count_nonzero(keep) != len(block) * left:
        _drop_ties(block, keep, low, high, b)
    kept += keep[0] if len(block) == 1 else np.add.reduce(keep, axis=0, dtype=np.int64)
    return _row_means(np.multiply(block, keep, dtype=np.float64), left)


def _drop_ties(block: Matrix, keep: NDArray[np.bool_], low: Matrix, high: Matrix, b: int) -> None:
    """Clear in `keep` the numbers equal to a threshold that are surplus, so that b go at each end, as a sort would."""
    surplus = b - np.add.reduce(block < low, axis=1, dtype=np.int64, keepdims=True)
    if surplus.any():
        equal = block == low
        rank = np.cumsum(equal, axis=1, dtype=np.int32)
        keep &= ~(equal & (rank <= surplus))
    surplus = b - np.add.reduce(block > high, axis=1, dtype=np.int64, keepdims=True)
    if surplus.any():
        equal = block == high
        rank = np.cumsum(equal, axis=1, dtype=np.int32)
        keep &= ~(equal & (rank > rank[:, -1:] - surplus))


def _row_means(block: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    # Numbers near the end of float64 may overflow to infinity; whoever decides sees it, so a warning adds nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        means: NDArray[np.float64] = np.add.reduce(block, axis=1) / count
    return means
