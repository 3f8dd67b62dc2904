"""Rules that judge a client by all the rounds so far, not by one.

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

_SURE = 3.0  # standard deviations of an average cosine below which clients are taken to disagree
_PRIOR = 0.1  # how strongly weights are drawn to equal ones, in units of the rows' own lengths
_LEAST_WEIGHT = 0.2  # the weights of all rows together are not scaled up from less
_STEPS = 300  # of the search for weights, at most
_SMALL = 1 << 20  # products taken at once


@rule(history=True, pairwise=True)
def reputation(beta: float, *, margin: float = 1.5, doubt: float = 1.0, rounds: float = 50.0) -> Rule:
    """Average the clipped reports of the clients that all their reports so far speak for.

    Two things are remembered of every client: its implied loss, and the cosines of the angles between its reports and
    those of each other client, averaged over the rounds. Up to b = floor(beta * invited) clients sit a round out, first
    those of least implied loss, then those that agree least with others.

    **Implied loss.** A round that moves w by -(lr / k) sum_r v_r z_r changes the loss of client i by

        -(lr / k) <v, x_i>

    up to curvature, with its report x_i and the decision v; the sum over the rounds is L_i. Losses have a lower bound:
    an honest client that is content sends small slopes, and its L_i stops falling. A client whose slopes stay large, so
    as to drag the model along, implies a loss that falls without end. It sits out if

        L_i < margin * min(median L, 0) - doubt * sqrt(sum over the rounds of the median squared change of L)

    An honest client that sits out is one that has gained more than the others; it is back when they have caught up.

    **Agreement.** A client's support is the (b + 1)-th largest of its average cosines; the b largest are passed over,
    since the other Byzantine clients may send the same. Where the data are alike, so that the median client's support
    is surely positive (three standard deviations), a client whose support is surely negative sits out. Where they are
    not, honest clients contradict each other, and nobody sits out for that.

    **Collusion.** The rest are averaged, each row shortened to the median length, with weights

        1 / (1 + sum over the b - 1 largest c^2 of max(c^2 - a^2, 0))

    where c are the client's average cosines and a is the b-th largest of them, or 0 if that is negative. b clients that
    send the same row, or a row and its reverse, together count little more than one client. What at least b others
    agree with is no collusion, as one of them is honest, and costs no weight.

    On unlike data this is more accurate than trimming, as honest clients with rare data stay; see
    `docs/measured/worst_attack.md`.

    Ours; weights by similarity over the rounds are FoolsGold's idea (Fung et al., "The limitations of federated
    learning in sybil settings", RAID 2020). It assumes that the clients' losses start from similar values, as those of
    an untrained classifier do. With an optimizer other than sgd, rounds are weighted by lr and the decision, not by the
    step that was taken.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        margin: how many times the gain of the median client is still plausible; at least 1.
        doubt: how many standard deviations of L are left to chance.
        rounds: over about how many of the last rounds the cosines are averaged.

    Examples:
        Without a history hardly anybody is left out, and rows are shortened to the median length:

        >>> reputation(0.25)(np.array([[3.0, 4.0], [0.0, 5.0], [4.0, 3.0], [3000.0, 4000.0]]))
        array([2.5, 4. ])
    """
    if not (margin >= 1 and doubt >= 0 and rounds >= 1):
        raise ConfigError(
            f"margin = {margin!r}, doubt = {doubt!r}, rounds = {rounds!r} is impossible: use at least 1, 0 and 1"
        )
    return Rule("reputation", beta, remembers=lambda clients: Reputation(clients, margin, doubt, rounds))


@rule(history=True, pairwise=True, reference=True)
def fit_reference(beta: float, *, rounds: float = 10.0) -> Rule:
    """Weigh the reports so that together they come as near as possible to the report of a trusted client.

    Client 0 is trusted and holds a few clean samples (aggregation.reference). Its report y is no vote. The others, x_i,
    shortened to the median length, get the weights that minimise

        ||y - sum_i a_i x_i||^2 + 0.1 sum_i ||x_i||^2 (a_i - 1 / m)^2,   0 <= a_i <= 1 / (m - b)

    where inner products are averages over about the last `rounds` rounds, so that noise of batches cancels. A report
    that works against the trusted client's loss gets no weight. The weights are then scaled to a sum of 1, but by no
    more than 5, so that a round in which hardly any report fits the reference moves little.
    With few samples the reference alone over-fits; the others' reports, which it only weighs, do not. A round without
    the trusted client's report is abandoned.

    Ours, after FLTrust (Cao et al., NDSS 2021), which weighs each report by its own cosine with the trusted one: on
    unlike data, no single honest report resembles the reference, but together they do.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        rounds: over about how many of the last rounds inner products are averaged; 1: the round at hand alone.
    """
    if not rounds >= 1:
        raise ConfigError(f"rounds = {rounds!r} is impossible: it must be at least 1")
    return Rule("fit_reference", beta, needs=lambda b: majority(b) + 1, indispensable=(REFERENCE,),
                remembers=lambda clients: ReferenceFit(clients, rounds))  # fmt: skip


class Reputation:
    """The implied loss of every client, and how far each two of them agree."""

    def __init__(self, clients: int, margin: float, doubt: float, rounds: float) -> None:
        self.losses: Float64Array = np.zeros(clients)
        """How the loss of each client has changed so far, as its reports say."""
        self._reported = np.zeros(clients, np.bool_)
        self._chance = 0.0
        self._margin, self._doubt = margin, doubt
        self._cosines = _PairAverage(clients, rounds)

    @property
    def least_plausible(self) -> float:
        """The implied loss below which a client sits out."""
        known = self.losses[self._reported]  # who never reported would count as one that gains nothing
        gained = min(float(np.median(known)), 0.0) if len(known) else 0.0
        return self._margin * gained - self._doubt * float(np.sqrt(self._chance))

    def combine(self, rows: Matrix, clients: Clients, b: int, round: int) -> Outcome:
        losses, out = self.losses[clients], np.zeros(len(rows), np.bool_)
        least = np.argsort(losses, kind="stable")[:b]
        out[least] = losses[least] < self.least_plausible
        cosines, rounds = self._cosines.including(clients, _cosines(rows))
        support = _support(cosines * np.sqrt(rows.shape[1] * rounds), b)
        if np.median(support) > _SURE:
            places = np.count_nonzero(out)
            for row in np.argsort(support, kind="stable")[:b].tolist():
                if support[row] < -_SURE and not out[row] and places < b:
                    out[row] = True
                    places += 1
        weights = np.where(out, 0.0, _independence(cosines, b))
        values: Float64Array = np.add.reduce(_clipped(rows) * (weights / weights.sum())[:, None], axis=0)
        return Outcome(values, np.where(out, rows.shape[1], 0).astype(np.int64))

    def learn(self, rows: Matrix, clients: Clients, values: Matrix, lr: float) -> None:
        """Add a decided round; clients that did not report keep what they have."""
        changes = np.add.reduce(_clipped(rows) * values.astype(np.float64), axis=1) * (-lr / rows.shape[1])
        self.losses[clients] += changes
        self._reported[clients] = True
        self._chance += float(np.median(changes**2))
        self._cosines.add(clients, _cosines(rows))


class ReferenceFit:
    """The inner products of the reports with each other and with the reference, averaged over rounds."""

    def __init__(self, clients: int, rounds: float) -> None:
        self._products = _PairAverage(clients, rounds)

    def combine(self, rows: Matrix, clients: Clients, b: int, round: int) -> Outcome:
        if REFERENCE not in clients:
            raise AggregationError(f"the trusted client {REFERENCE} did not report, so there is no reference")
        wide, voters = _with_clipped_voters(rows, clients), clients != REFERENCE
        products, _ = self._products.including(clients, _in_units(wide))
        between, toward = products[np.ix_(voters, voters)], products[voters][:, ~voters][:, 0]
        weights = _fitted(between, toward, b)
        total = max(float(weights.sum()), _LEAST_WEIGHT)
        values: Float64Array = np.add.reduce(wide[voters] * (weights / total)[:, None], axis=0)
        excluded = np.zeros(len(rows), np.int64)
        excluded[voters] = np.where(weights > 0, 0, rows.shape[1])
        return Outcome(values, excluded)

    def learn(self, rows: Matrix, clients: Clients, values: Matrix, lr: float) -> None:
        """Add a decided round."""
        self._products.add(clients, _in_units(_with_clipped_voters(rows, clients)))


def _support(cosines: Float64Array, b: int) -> Float64Array:
    """Return the (b + 1)-th largest cosine of each row with another; zeros if all others may be Byzantine."""
    if len(cosines) <= b + 1:
        return np.zeros(len(cosines))
    others = cosines.copy()
    np.fill_diagonal(others, -np.inf)
    support: Float64Array = -np.partition(-others, b, axis=1)[:, b]
    return support


def _independence(cosines: Float64Array, b: int) -> Float64Array:
    """Return the weight of each row: the less, the more it resembles, or contradicts, a few others and nobody else."""
    if b < 2:
        return np.ones(len(cosines))  # a single Byzantine client has nobody to collude with
    others = cosines.copy()
    np.fill_diagonal(others, 0.0)
    agreed = np.partition(-others, b - 1, axis=1)[:, b - 1]
    shared = -np.sort(-(others**2), axis=1)[:, : b - 1] - np.minimum(agreed, 0.0)[:, None] ** 2
    weights: Float64Array = 1.0 / (1.0 + np.add.reduce(np.maximum(shared, 0.0), axis=1))
    return weights


class _PairAverage:
    """A number for each two clients, averaged over the rounds in which both reported, late rounds counting most."""

    def __init__(self, clients: int, rounds: float) -> None:
        self._sum, self._weight = np.zeros((clients, clients)), np.zeros((clients, clients))
        self._kept = 1.0 - 1.0 / rounds

    def including(self, clients: Clients, round: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return the averages if these clients' round counted, and over how many rounds each of them is taken."""
        here = np.ix_(clients, clients)
        weight = self._kept * self._weight[here] + 1.0
        return (self._kept * self._sum[here] + round) / weight, weight

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
    wide[voters] = _clipped(wide[voters])
    return wide


def _in_units(rows: Float64Array) -> Float64Array:
    """Return the rows' inner products in units of their median square, so that rounds of all sizes count alike."""
    products = _products(rows)
    unit = float(np.median(products.diagonal()))
    return products / unit if unit > 0 else products


def _cosines(rows: Matrix) -> Float64Array:
    wide = doubles(rows, slice(None))
    lengths = np.sqrt(np.add.reduce(wide * wide, axis=1))
    return _products(wide / np.where(lengths > 0, lengths, 1.0)[:, None])


def _clipped(rows: Matrix) -> Float64Array:
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
