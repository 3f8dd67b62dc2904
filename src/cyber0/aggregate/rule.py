"""What a rule is: the part that all robust rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cyber0.config.tolerance import majority, rows_before_buckets, tolerated
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.kernels.threads import run_in_threads, split_rows

Matrix: TypeAlias = NDArray[Any]
"""Rows are clients, columns are scalars; float32 or float64."""

# Numbers checked for finiteness at once: what is found of them stays in the cache.
_ELEMENTS_PER_CHECK = 1 << 17


class AggregationError(Cyber0Error, ValueError):
    """A matrix can't be aggregated: it is not a matrix, or too few of its rows can be used."""


class Outcome(NamedTuple):
    """What a rule decided, and at whose expense."""

    values: NDArray[np.float64]
    """One number per column."""
    excluded: NDArray[np.int64]
    """Per row of the matrix, in how many columns its number was left out."""


class Memory(Protocol):
    """What a rule with a history knows of the rounds before; a function of their reports and decisions alone."""

    def combine(self, rows: Matrix, clients: NDArray[np.int64], b: int, round: int) -> Outcome:
        """Combine finite rows, each of the client of that number, and change nothing."""

    def learn(self, rows: Matrix, clients: NDArray[np.int64], values: Matrix, lr: float) -> None:
        """Remember a decided round: its rows, whose they were, the scalars of its step and the learning rate.

        The scalars are what the optimizer made of the decision; with sgd, momentum, adam and hessian, the decision.
        """


class Guilt(NamedTuple):
    """Why a client is guilty beyond doubt."""

    client: int
    text: str
    """The evidence in words, with its numbers."""
    numbers: Mapping[str, float]
    """The numbers, and the limits that they are beyond."""


class Judge(Memory, Protocol):
    """A memory that can also say who is guilty; federation.expel needs one."""

    def guilty(self, clients: NDArray[np.int64], b: int) -> list[Guilt]:
        """Return which of these clients, of which at most b are Byzantine, surely are; the most certain first."""


@dataclass(frozen=True)
class PreAggregation:
    """Something done to the rows before a rule sees them.

    `apply(rows, b, round)` returns the new rows, in the type of the old ones, and per old row the new one it went into.
    """

    name: str
    apply: Callable[[Matrix, int, int], tuple[Matrix, NDArray[np.int64]]]
    size: int = 1
    """How many rows become one."""


@dataclass(frozen=True)
class Rule:
    """A robust rule: a name, the share of Byzantine clients it guards against, and how it combines finite rows.

    `combine(rows, b, round)` gets a matrix of finite numbers with at least `needs(b)` rows and returns their `Outcome`;
    all that is common to the rules (checking, dropping rows that are not finite, counting the absent) is done here.
    """

    name: str
    beta: float
    combine: Callable[[Matrix, int, int], Outcome] | None = None
    """None: a rule with a history, whose memory combines."""
    needs: Callable[[int], int] = majority
    """How many rows are needed to withstand b Byzantine clients."""
    pre_aggregations: tuple[PreAggregation, ...] = ()
    """What is done to the rows before, in this order."""
    spreads: bool = False
    """Whether a non-finite scalar always makes a value non-finite: rows are searched for one only then."""
    indispensable: tuple[int, ...] = ()
    """The clients without whose reports nothing is decided."""
    remembers: Callable[[int], Memory] | None = None
    """Makes the empty memory of a federation of so many clients, for a rule with a history."""

    def __post_init__(self) -> None:
        tolerated(self.beta, 0)  # refuses an impossible beta

    def __call__(self, matrix: ArrayLike, invited: int | None = None, round: int = 0) -> NDArray[np.float64]:
        """Return one number per column; see `decide`."""
        return self.decide(matrix, invited, round).values

    def after(self, pre_aggregation: PreAggregation) -> Rule:
        """Return this rule with a pre-aggregation done before anything it does itself."""
        if self.remembers is not None:
            raise ConfigError(
                f"{self.name} judges every client by its own reports, and {pre_aggregation.name} mixes them; set "
                'aggregation.before = "none"'
            )
        return replace(
            self,
            name=f"{self.name} after {pre_aggregation.name}",
            pre_aggregations=(pre_aggregation, *self.pre_aggregations),
        )

    def required(self, b: int) -> int:
        """Return how many finite rows must come in to withstand b Byzantine clients, pre-aggregations included.

        Raises:
            ConfigError: no number of rows would do.
        """
        rows = self.needs(b)
        for pre_aggregation in reversed(self.pre_aggregations):
            rows = rows_before_buckets(rows, pre_aggregation.size)
        return rows

    def memory(self, clients: int) -> Memory | None:
        """Return an empty memory for a federation of so many clients; None for a rule without a history."""
        return None if self.remembers is None else self.remembers(clients)

    def decide(
        self, matrix: ArrayLike, invited: int | None = None, round: int = 0, *, memory: Memory | None = None,
        clients: NDArray[np.int64] | None = None, b: int | None = None,
    ) -> Outcome:  # fmt: skip
        """Combine the rows into one number per column.

        Rows that hold a number that is not finite are dropped before anything else, count as absent, and are
        excluded in every column.

        Args:
            matrix: one row per client that answered.
            invited: how many clients were invited; as many as there are rows unless given.
            round: which round it is; pre-aggregations draw by it, and equal values take turns in being left out.
            memory: what a rule with a history remembers of the rounds before; nothing unless given.
            clients: whose rows they are, for the memory; clients 0, 1, 2, ... unless given.
            b: how many of the invited may be Byzantine; floor(beta * invited) unless given.

        Raises:
            AggregationError: fewer usable rows are left than the rule needs.
        """
        rows = _as_matrix(matrix)
        count, columns = rows.shape
        invited = count if invited is None else invited
        if invited < count:
            raise AggregationError(f"{count} rows but only {invited} invited: a client that was not invited has no row")
        b = tolerated(self.beta, invited) if b is None else b
        if self.spreads and not self.pre_aggregations and count >= self.required(b):
            outcome = self._combine(rows, b, round)
            if np.isfinite(outcome.values).all():
                return outcome
        finite = _finite_rows(rows)
        usable = count if finite is None else int(np.count_nonzero(finite))
        if usable < self.required(b):
            raise AggregationError(
                f"{self.name} has {usable} usable rows of {invited} invited clients, and needs at least "
                f"{self.required(b)} to withstand {b} Byzantine clients (beta = {self.beta:g}): wait for more reports "
                "or abandon the round"
            )
        if self.remembers is not None:
            who = np.arange(count) if clients is None else clients
            known = self.remembers(int(who.max(initial=-1)) + 1) if memory is None else memory
            used = slice(None) if finite is None else finite
            kept = known.combine(rows[used], who[used], b, round)
        else:
            kept = self._combine(rows if finite is None else rows[finite], b, round)
        if finite is None:
            return kept
        excluded = np.full(count, columns, np.int64)
        excluded[finite] = kept.excluded
        return Outcome(kept.values, excluded)

    def _combine(self, rows: Matrix, b: int, round: int) -> Outcome:
        went_into = np.arange(len(rows))
        for pre_aggregation in self.pre_aggregations:
            rows, places = pre_aggregation.apply(rows, b, round)
            went_into = places[went_into]
        assert self.combine is not None
        outcome = self.combine(rows, b, round)
        return Outcome(outcome.values, outcome.excluded[went_into]) if self.pre_aggregations else outcome


def _as_matrix(matrix: ArrayLike) -> Matrix:
    rows = np.asarray(matrix)
    if rows.ndim != 2:
        raise AggregationError(f"expected a matrix of clients x scalars, got an array of shape {rows.shape}")
    if rows.dtype.kind not in "fiu":
        raise AggregationError(f"expected a matrix of real numbers, got dtype {rows.dtype}")
    if rows.dtype.isnative and rows.dtype in (np.float32, np.float64):
        return rows
    return rows.astype(np.float64)


def _finite_rows(rows: Matrix) -> NDArray[np.bool_] | None:
    """Return which rows are finite, or None if all are (the usual case, and the cheap one)."""
    if rows.size <= _ELEMENTS_PER_CHECK:
        good = np.isfinite(rows)
        return None if good.all() else np.logical_and.reduce(good, axis=1)
    finite = np.ones(len(rows), np.bool_)
    height = max(1, _ELEMENTS_PER_CHECK // rows.shape[1])

    def check(low: int, high: int) -> None:
        for start in range(low, high, height):
            stop = min(start + height, high)
            for first in range(0, rows.shape[1], _ELEMENTS_PER_CHECK):
                part = np.isfinite(rows[start:stop, first : first + _ELEMENTS_PER_CHECK])
                if not part.all():
                    finite[start:stop] &= np.logical_and.reduce(part, axis=1)

    run_in_threads(check, split_rows(len(rows), rows.size))
    return None if finite.all() else finite
