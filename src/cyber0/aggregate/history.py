"""Rules that judge a client by all the rounds so far, not by one.

What such a rule remembers (a `Memory`) is a function of the reports and decisions of the rounds before, so a federator
that was killed rebuilds it from `reports.bin`, and `cyber0 verify --decisions` recomputes it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.distances import Float64Array, doubles
from cyber0.aggregate.rule import Matrix, Outcome, Rule
from cyber0.config.registry import rule
from cyber0.errors import ConfigError


@rule(history=True)
def implied_loss(beta: float, *, margin: float = 1.5, doubt: float = 3.0) -> Rule:
    """Average the clipped reports of the clients whose implied losses are plausible.

    The reports of a client say how its loss has changed so far: a round that moves w by -(lr / k) sum_r v_r z_r changes
    the loss of client i by

        -(lr / k) <v, x_i>

    up to curvature, with its report x_i and the decision v. The sum over the rounds, L_i, is its *implied loss*. Losses
    have a lower bound, so an honest client that is content sends small slopes, and its L_i stops falling. A client
    whose slopes stay large in whatever direction the model goes, in order to drag it there, implies a loss that falls
    without end. Up to b = floor(beta * invited) clients, those of least L_i, sit a round out if

        L_i < margin * min(median L, 0) - doubt * sqrt(sum over the rounds of the median squared change of L)

    An honest client that sits out is one that has gained more than the others, and it is back as soon as they have
    caught up. So unlike data cost nothing by themselves: the others are averaged, each row shortened to the median
    length, so that no client counts for more than another.

    Ours. It assumes that the clients' losses start from similar values, as those of an untrained classifier do. With an
    optimizer other than sgd, rounds are weighted by lr and the decision, not by the step that was taken.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        margin: how many times the gain of the median client is still plausible; at least 1.
        doubt: how many standard deviations of L are left to chance.

    Examples:
        Without a history nobody is left out; rows are shortened to the median length:

        >>> implied_loss(0.25)(np.array([[3.0, 4.0], [0.0, 5.0], [4.0, 3.0], [-300.0, -400.0]]))
        array([1., 2.])
    """
    if not (margin >= 1 and doubt >= 0):
        raise ConfigError(f"margin = {margin!r} with doubt = {doubt!r} is impossible: use at least 1 and at least 0")
    return Rule("implied_loss", beta, remembers=lambda clients: ImpliedLosses(clients, margin, doubt))


class ImpliedLosses:
    """The implied loss of every client, and the part of it that may be chance."""

    def __init__(self, clients: int, margin: float, doubt: float) -> None:
        self.losses: Float64Array = np.zeros(clients)
        """How the loss of each client has changed so far, as its reports say."""
        self._chance = 0.0
        self._margin, self._doubt = margin, doubt

    @property
    def least_plausible(self) -> float:
        """The implied loss below which a client sits out."""
        gained = min(float(np.median(self.losses)), 0.0)
        return self._margin * gained - self._doubt * float(np.sqrt(self._chance))

    def combine(self, rows: Matrix, clients: NDArray[np.int64], b: int, round: int) -> Outcome:
        losses = self.losses[clients]
        least = np.argsort(losses, kind="stable")[:b]
        out = np.zeros(len(rows), np.bool_)
        out[least] = losses[least] < self.least_plausible
        values: Float64Array = _clipped(rows)[~out].mean(axis=0)
        return Outcome(values, np.where(out, rows.shape[1], 0).astype(np.int64))

    def learn(self, rows: Matrix, clients: NDArray[np.int64], values: Matrix, lr: float) -> None:
        """Add what a decided round changes; clients that did not report keep what they have."""
        changes = _products(_clipped(rows), values.astype(np.float64)) * (-lr / rows.shape[1])
        self.losses[clients] += changes
        self._chance += float(np.median(changes**2))


def _clipped(rows: Matrix) -> Float64Array:
    """Return the rows, those longer than the median shortened to its length."""
    wide = doubles(rows, slice(None))
    lengths = np.sqrt(_products(wide, wide))
    limit = np.median(lengths)
    return wide * np.where(lengths > limit, limit / np.where(lengths > 0, lengths, 1.0), 1.0)[:, None]


def _products(rows: Float64Array, others: Float64Array) -> Float64Array:
    """Return the inner product of each row with another; by numpy's pairwise sums, not BLAS, whose order varies."""
    return np.asarray(np.add.reduce(rows * others, axis=1), np.float64)
