"""What rules share that judge a client by all the rounds so far, and the rule that judges by a trusted client.

What such a rule remembers (a `Memory`) is a function of the reports and decisions of the rounds before, so a federator
that was killed rebuilds it from `reports.bin`, and `cyber0 verify --decisions` recomputes it. All sums are numpy's
pairwise ones, not BLAS's, whose order differs between machines: whoever recomputes a decision gets its bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.distances import Float64Array, doubles
from cyber0.aggregate.rule import AggregationError, Matrix, Outcome, Rule
from cyber0.config.registry import rule
from cyber0.config.tolerance import majority
from cyber0.errors import ConfigError

Clients = NDArray[np.int64]

REFERENCE = 0
"""The client whose report is the reference of `fit_reference`."""

_PRIOR = 0.1  # how strongly weights are drawn to equal ones, in units of the rows' own lengths
_LEAST_WEIGHT = 0.2  # the weights of all rows together are not scaled up from less
_STEPS = 300  # of the search for weights, at most
_SMALL = 1 << 20  # products taken at once


@rule(history=True, pairwise=True, reference=True)
def fit_reference(beta: float, *, rounds: float = 10.0, share: float = 0.0) -> Rule:
    """Weigh the reports so that together they come as near as possible to the report of a trusted client.

    Client 0 is trusted and holds a few clean samples (aggregation.reference). Its report y is no vote. The others, x_i,
    shortened to the median length, get the weights that minimise

        ||y - sum_i a_i x_i||^2 + 0.1 sum_i ||x_i||^2 (a_i - 1 / m)^2,   0 <= a_i <= 1 / (m - b)

    where inner products are averages over about the last `rounds` rounds, so that noise of batches cancels. A report
    that works against the trusted client's loss gets no weight. The weights are then scaled to a sum of 1, but by no
    more than 5, so that a round in which hardly any report fits the reference moves little.
    With few samples the reference alone over-fits; the others' reports, which it only weighs, do not. But what no other
    client's data shows, no weights can teach: with `share` s the decision is (1 - s) sum_i a_i x_i + s y. A round
    without the trusted client's report is abandoned.

    Ours, after FLTrust (Cao et al., NDSS 2021), which weighs each report by its own cosine with the trusted one: on
    unlike data, no single honest report resembles the reference, but together they do.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        rounds: over about how many of the last rounds inner products are averaged; 1: the round at hand alone.
        share: the trusted client's own share of the decision, in [0, 1). Above 0 where the honest clients may lack what
            its samples show, such as a class that only Byzantine clients hold; where their data are alike, it costs
            accuracy.
    """
    if not rounds >= 1:
        raise ConfigError(f"rounds = {rounds!r} is impossible: it must be at least 1")
    if not 0 <= share < 1:
        raise ConfigError(
            f"share = {share!r} is impossible: it must be in [0, 1), such as 0.4; to learn from the trusted samples "
            "alone, train on them without other clients"
        )
    return Rule("fit_reference", beta, needs=lambda b: majority(b) + 1, indispensable=(REFERENCE,),
                remembers=lambda clients: ReferenceFit(clients, rounds, share))  # fmt: skip


class ReferenceFit:
    """The inner products of the reports with each other and with the reference, averaged over rounds."""

    def __init__(self, clients: int, rounds: float, share: float) -> None:
        self._products, self._share = PairAverage(clients, rounds), share

    def combine(self, rows: Matrix, clients: Clients, b: int, round: int) -> Outcome:
        if REFERENCE not in clients:
            raise AggregationError(f"the trusted client {REFERENCE} did not report, so there is no reference")
        wide, voters = _with_clipped_voters(rows, clients), clients != REFERENCE
        products, _ = self._products.including(clients, _in_units(wide))
        between, toward = products[np.ix_(voters, voters)], products[voters][:, ~voters][:, 0]
        weights = _fitted(between, toward, b)
        total = max(float(weights.sum()), _LEAST_WEIGHT)
        values: Float64Array = np.add.reduce(wide[voters] * (weights / total)[:, None], axis=0)
        if self._share:
            values = (1.0 - self._share) * values + self._share * wide[~voters][0]
        excluded = np.zeros(len(rows), np.int64)
        excluded[voters] = np.where(weights > 0, 0, rows.shape[1])
        return Outcome(values, excluded)

    def learn(self, rows: Matrix, clients: Clients, values: Matrix, lr: float) -> None:
        """Add a decided round."""
        self._products.add(clients, _in_units(_with_clipped_voters(rows, clients)))


class PairAverage:
    """A number for each two clients, averaged over the rounds in which both reported, late rounds counting most."""

    def __init__(self, clients: int, rounds: float) -> None:
        self._sum, self._weight = np.zeros((clients, clients)), np.zeros((clients, clients))
        self._kept = 1.0 - 1.0 / rounds

    def including(self, clients: Clients, round: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return the averages if these clients' round counted, and over how many rounds each of them is taken."""
        here = np.ix_(clients, clients)
        weight = self._kept * self._weight[here] + 1.0
        return (self._kept * self._sum[here] + round) / weight, weight

    def among(self, clients: Clients) -> tuple[Float64Array, Float64Array]:
        """Return the averages of these clients, 0 where there is none, and over how many rounds each is taken."""
        here = np.ix_(clients, clients)
        weight = self._weight[here]
        return self._sum[here] / np.where(weight > 0, weight, 1.0), weight

    def add(self, clients: Clients, round: Float64Array) -> None:
        here = np.ix_(clients, clients)
        self._sum[here] = self._kept * self._sum[here] + round
        self._weight[here] = self._kept * self._weight[here] + 1.0


def _fitted(between: Float64Array, toward: Float64Array, b: int) -> Float64Array:
    """Return the weights of `fit_reference`, by accelerated projected gradient steps (Nesterov's)."""
    count = len(between)
    prior = _PRIOR * between.diagonal()
    curvature, pull = between + np.diag(prior), toward + prior / count
    step = 1.0 / max(float(np.add.reduce(np.abs(curvature), axis=1).max()), np.finfo(np.float64).tiny)
    most = 1.0 / (count - b)
    weights = ahead = np.full(count, 1.0 / count)
    momentum = 1.0
    for _ in range(_STEPS):
        gradient = np.add.reduce(curvature * ahead, axis=1) - pull
        moved = np.clip(ahead - step * gradient, 0.0, most)
        later = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        ahead = moved + (momentum - 1.0) / later * (moved - weights)
        close = np.abs(moved - weights).max() <= 1e-9
        weights, momentum = moved, later
        if close:
            break
    return weights


def _with_clipped_voters(rows: Matrix, clients: Clients) -> Float64Array:
    wide = doubles(rows, slice(None)).copy()
    voters = clients != REFERENCE
    wide[voters] = clipped(wide[voters])
    return wide


def _in_units(rows: Float64Array) -> Float64Array:
    """Return the rows' inner products in units of their median square, so that rounds of all sizes count alike."""
    products = _products(rows)
    unit = float(np.median(products.diagonal()))
    return products / unit if unit > 0 else products


def cosines_of(rows: Matrix) -> Float64Array:
    wide = doubles(rows, slice(None))
    lengths = np.sqrt(np.add.reduce(wide * wide, axis=1))
    return _products(wide / np.where(lengths > 0, lengths, 1.0)[:, None])


def clipped(rows: Matrix) -> Float64Array:
    """Return the rows, those longer than the median shortened to its length."""
    wide = doubles(rows, slice(None))
    lengths = np.sqrt(np.add.reduce(wide * wide, axis=1))
    limit = np.median(lengths)
    return wide * np.where(lengths > limit, limit / np.where(lengths > 0, lengths, 1.0), 1.0)[:, None]


def _products(rows: Float64Array) -> Float64Array:
    """Return the inner product of each two rows."""
    if len(rows) * rows.size <= _SMALL:
        return np.asarray(np.add.reduce(rows[:, None, :] * rows[None, :, :], axis=2), np.float64)
    return np.stack([np.add.reduce(rows * row, axis=1) for row in rows])
