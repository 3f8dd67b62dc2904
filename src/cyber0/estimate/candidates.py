"""Which of the candidates that a client has drawn are measured: those with large losses are more likely to be.

Once a model fits most samples, these have slopes near 0, and a small batch that is drawn evenly measures little else. A
loss takes one evaluation, the slopes along k directions k or more, so it pays to look at the losses of many candidates
first. Candidate i of n is kept with a probability p_i, and its loss weighs b / (n p_i) in the mean over the b that are
kept. So the expectation is the mean over the candidates, whatever the probabilities are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.estimate.batches import Batch, rows_of

EVENLY = 0.1
"""The part of the probability that does not depend on the losses: it keeps weights below 1 / EVENLY."""

Vector = NDArray[np.float64]


def narrowed(batch: Batch, losses: torch.Tensor) -> Batch:
    """Return the samples that are kept of a batch of candidates, given the candidates' losses at w."""
    narrowing, measured = batch.narrowing, losses.detach().double().cpu().numpy()
    if narrowing is None:
        return batch
    kept, weights, begin = [], [], 0
    for count, keep, offset in zip(batch.counts, narrowing.counts, narrowing.offsets, strict=True):
        p = probabilities(measured[begin : begin + count], int(keep))
        chosen = systematic(p, int(keep), float(offset))
        kept.append(begin + chosen)
        weights.append(keep / (count * p[chosen]))
        begin += int(count)
    indices = np.concatenate(kept)
    return replace(
        batch,
        inputs=rows_of(batch.inputs, indices),
        targets=rows_of(batch.targets, indices),
        counts=narrowing.counts,
        weights=torch.from_numpy(np.concatenate(weights)).to(losses.device, torch.float32),
        narrowing=None,
    )


def as_many(batch: Batch) -> Batch:
    """Return as many samples as are kept, whichever they are."""
    if batch.narrowing is None:
        return batch
    n = int(batch.narrowing.counts.sum())
    return Batch(batch.inputs[:n], batch.targets[:n], batch.narrowing.counts)


def probabilities(losses: Vector, keep: int) -> Vector:
    """Return the probability of each candidate to be kept; their sum is `keep`.

    They grow like 1 - exp(-loss), the probability of a wrong answer where losses are cross-entropies, which bounds how
    steep the loss is. Losses are counted from the least if that is negative; one that is not finite counts as large, so
    that it is not passed over in silence.
    """
    if keep >= len(losses):
        return np.ones(len(losses))
    finite = np.where(np.isfinite(losses), losses, np.inf)
    wrong = -np.expm1(-(finite - min(0.0, float(finite.min()))))
    wrong = np.where(np.isnan(wrong), 1.0, wrong)
    n, total = len(losses), float(wrong.sum())
    even = np.full(n, 1.0 / n)
    share = (1.0 - EVENLY) * wrong / total + EVENLY * even if total > 0 else even
    p: Vector = share * keep
    while (p > 1.0).any():  # who is sure to be kept leaves the rest to the others
        sure = p >= 1.0
        p = np.where(sure, 1.0, share * ((keep - np.count_nonzero(sure)) / share[~sure].sum()))
    return p


def systematic(p: Vector, keep: int, offset: float) -> NDArray[np.int64]:
    """Return `keep` places in ascending order, each chosen with its probability, by one random number from [0, 1)."""
    ends = np.cumsum(p)
    ends[-1] = keep
    return np.searchsorted(ends, offset + np.arange(keep), side="right").astype(np.int64)
