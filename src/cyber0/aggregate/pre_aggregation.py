"""Pre-aggregation: nearest-neighbour mixing and bucketing, before a rule. They make honest rows more alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.distances import blocks, doubles, mix, squared_distances
from cyber0.aggregate.rule import Matrix, PreAggregation, Rule
from cyber0.config.registry import pre_aggregation
from cyber0.config.tolerance import BUCKET_SIZE
from cyber0.directions import Stream, permutation
from cyber0.errors import ConfigError

_BUCKETS = 1
"""The index, in the stream of client sampling, of the draw that deals clients to buckets; 0 draws who is invited."""


@pre_aggregation
def none(rule: Rule) -> Rule:
    """Let the rule see the reports as they are."""
    return rule


@pre_aggregation(pairwise=True)
def nnm(rule: Rule, beta: float | None = None) -> Rule:
    """Replace each row by the mean of the m - b rows nearest to it, then apply the rule.

        y_i = sum_{j in N_i} x_j / (m - b)

    N_i are the m - b rows nearest to x_i, itself included. Where rows equally near compete for the last places they
    share them, so that the order of the clients does not matter. Allouah et al., "Fixing by mixing: a recipe for
    optimal Byzantine ML under heterogeneity", AISTATS 2023. On reports of k scalars this is the transformed mixing of
    Egger, Bakshi and Bitar (arXiv 2502.00193).

    Args:
        rule: what is applied to the mixtures.
        beta: the share of Byzantine clients to guard against; None: that of the rule. The plain mean has none of its
            own, and mixing all rows would do nothing.
    """
    return (rule if beta is None else replace(rule, beta=beta)).after(PreAggregation("nnm", _mix_nearest))


@pre_aggregation
def bucketing(rule: Rule, size: int = BUCKET_SIZE, seed: int = 0) -> Rule:
    """Average the rows in random groups of `size`, then apply the rule to the means.

        y_j = mean of x_p(i), i = (j - 1) size + 1 .. j size, for a random permutation p

    Karimireddy, He and Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022. The last
    group may be smaller. The groups are drawn anew in every round, by the seed. b Byzantine clients can spoil b
    groups, so the rule needs as many groups as it would need rows.

    Args:
        rule: what is applied to the means.
        size: how many rows make a group.
        seed: what the groups are drawn by.
    """
    if size < 1:
        raise ConfigError(f"size = {size} is impossible: a bucket holds at least 1 row")

    def apply(rows: Matrix, b: int, round: int) -> tuple[Matrix, NDArray[np.int64]]:
        order = permutation(seed, Stream.SAMPLING, round, _BUCKETS, len(rows))
        went_into = np.empty(len(rows), np.int64)
        went_into[order] = np.arange(len(rows)) // size
        return _average_groups(rows, order, size), went_into

    return rule.after(PreAggregation("bucketing", apply, size))


def _mix_nearest(rows: Matrix, b: int, round: int) -> tuple[Matrix, NDArray[np.int64]]:
    count, squares = len(rows), squared_distances(rows)
    farthest = np.partition(squares, count - b - 1, axis=1)[:, count - b - 1, None]
    nearer, last = squares < farthest, squares == farthest
    places = count - b - np.count_nonzero(nearer, axis=1, keepdims=True)
    weights = (nearer + last * (places / np.count_nonzero(last, axis=1, keepdims=True))) / (count - b)
    return mix(rows, weights), np.arange(count)


def _average_groups(rows: Matrix, order: NDArray[np.int64], size: int) -> Matrix:
    starts = np.arange(0, len(rows), size)
    counts = np.diff(starts, append=len(rows))[:, None]
    means = np.empty((len(starts), rows.shape[1]), rows.dtype)
    for columns in blocks(rows):
        means[:, columns] = np.add.reduceat(doubles(rows, columns)[order], starts, axis=0) / counts
    return means
