"""Who holds which samples, and which of them a client draws in a round.

A batch is a function of (seed, client, round, local epoch) alone, or, where it is narrowed by the candidates' losses
(candidates.py), of the weights of the round as well. So a run can be repeated and resumed. A deployed client keeps that
seed secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import uint64
from numpy.typing import NDArray

from cyber0.directions.backends import numba_kernels
from cyber0.directions.philox import INDEX_BITS, Stream, philox4x32
from cyber0.errors import ConfigError, DataError
from cyber0.kernels.compiled import kernel

SAMPLES_PER_PASS = 1 << 14  # bounds the memory of a pass when thousands of clients are measured together

_BATCHES = np.uint64(Stream.BATCHES << INDEX_BITS)
_NARROWING = 0xFFFFFFFF
"""The low word of the block that decides how candidates are narrowed; draws use those from 0 on."""
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@kernel
def _draw(key, round, epoch, clients, sizes, offsets, counts, taken, out):
    """Draw some of each client's samples without replacement (Floyd's algorithm), as positions.

    Word i of the client's stream decides draw i: t = floor(word * (j + 1) / 2^32). The block's high word is the epoch.
    """
    place = 0
    pairs = np.empty(2 * ((max(counts) + 3) // 4) if len(counts) else 0, np.uint64)
    words = pairs.view(np.uint32)
    for c in range(clients.shape[0]):
        n = sizes[c]
        m = counts[c]
        begin = place
        if m == n:
            for i in range(n):
                out[place] = offsets[c] + i
                place += 1
            continue
        numba_kernels.philox(pairs, uint64(epoch) << _32, uint64(round), _BATCHES | uint64(clients[c]), uint64(key))
        for i in range(m):
            j = n - m + i
            t = np.int64((uint64(words[i]) * uint64(j + 1)) >> _32)
            if taken[t]:
                t = j
            taken[t] = True
            out[place] = offsets[c] + t
            place += 1
        for i in range(begin, place):
            taken[out[i] - offsets[c]] = False
    return place


class Narrowing(NamedTuple):
    """How candidates become a batch."""

    counts: NDArray[np.int64]
    """How many samples each client keeps."""
    offsets: NDArray[np.float64]
    """A random number from [0, 1) for each client."""


@dataclass(frozen=True)
class Batch:
    """The samples of one or many clients, one client after the other; `counts` says how many each has.

    Inputs are a tensor, or what the objective takes, as long as it can be sliced.
    """

    inputs: Any
    targets: torch.Tensor
    counts: NDArray[np.int64]
    weights: torch.Tensor | None = None
    """What each loss is multiplied by before a client's mean is taken; None: nothing."""
    narrowing: Narrowing | None = None
    """If the samples are candidates: how those that are measured are chosen by their losses."""


class Samples:
    """Every client's share of a data set.

    Args:
        inputs: All training samples: a tensor, or anything with `take(indices)`, `device` and slices.
        targets: Their targets.
        shares: For each client the indices of its samples.
        batch_size: How many each client draws each step, or one number for all; all it has when it has fewer.
        seed: Decides the draws.
        flipped: Which clients have poisoned data: their target l becomes classes - 1 - l. None: nobody.
        classes: How many targets there are; only flipping uses it.
        everybody: Whether all clients are invited each time, so that the same clients are measured together again.
        candidates: How many times batch_size a client draws, to keep batch_size of them by their losses.
    """

    def __init__(
        self,
        inputs: Any,
        targets: torch.Tensor,
        shares: Sequence[NDArray[Any]],
        batch_size: int | NDArray[np.int64],
        seed: int,
        *,
        flipped: NDArray[np.bool_] | None = None,
        classes: int = 0,
        everybody: bool = True,
        candidates: int = 1,
    ) -> None:
        if flipped is not None and classes < 2:
            raise ConfigError(
                f"labels can't be flipped where there are {classes} classes: label_flip turns class l into C - 1 - l; "
                "choose another federation.attack"
            )
        empty = [i for i, share in enumerate(shares) if len(share) == 0]
        if empty:
            raise DataError(f"client {empty[0]} has no samples: every client needs at least one")
        self.inputs, self.targets = inputs, targets
        self.seed = seed
        self._flipped, self._classes, self._everybody = flipped, classes, everybody
        self.sizes = np.array([len(share) for share in shares], dtype=np.int64)
        self.measured = np.minimum(self.sizes, batch_size)
        """How many samples each client measures at a time."""
        self._draws = np.minimum(self.sizes, np.asarray(batch_size) * candidates)
        self._order = np.concatenate(shares).astype(np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)
        self._taken = np.zeros(int(self.sizes.max()), dtype=np.bool_)
        self._kept: tuple[NDArray[np.int64], Batch] | None = None

    def counts(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples each of these clients draws at a time, candidates included."""
        drawn: NDArray[np.int64] = self._draws[clients]
        return drawn

    def groups(self, clients: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Split clients into groups whose samples are measured in one pass; one group unless there are very many."""
        passed = np.cumsum(self.counts(clients)) // SAMPLES_PER_PASS
        return np.split(clients, np.flatnonzero(np.diff(passed)) + 1)

    def drawn(self, clients: NDArray[np.int64], round: int, epoch: int = 0) -> tuple[Any, Any]:
        """Return the indices of the samples that these clients draw, and how many each does."""
        counts = self.counts(clients)
        out = np.empty(int(counts.sum()), dtype=np.int64)
        key, sizes, offsets = np.uint64(self.seed), self.sizes[clients], self._offsets[clients]
        _draw(key, round, epoch, clients, sizes, offsets, counts, self._taken, out)
        return self._order[out], counts

    def batch(self, clients: NDArray[np.int64], round: int, epoch: int = 0) -> Batch:
        """Return the samples that these clients draw in this round and local epoch."""
        batch, kept = self._drawn_batch(clients, round, epoch), self.measured[clients]
        if np.array_equal(kept, batch.counts):
            return batch
        return replace(batch, narrowing=Narrowing(kept, self._offsets_of(clients, round, epoch)))

    def _offsets_of(self, clients: NDArray[np.int64], round: int, epoch: int) -> NDArray[np.float64]:
        counters = np.empty((len(clients), 4), np.uint32)
        counters[:] = (_NARROWING, epoch, round, 0)
        counters[:, 3] = np.uint32(Stream.BATCHES << INDEX_BITS) | clients.astype(np.uint32)
        key = np.array([self.seed & 0xFFFFFFFF, self.seed >> 32], np.uint32)
        return philox4x32(counters, key)[:, 0].astype(np.float64) / 2.0**32

    def _drawn_batch(self, clients: NDArray[np.int64], round: int, epoch: int) -> Batch:
        everything = bool((self.sizes[clients] == self._draws[clients]).all())
        if everything and self._kept is not None and np.array_equal(self._kept[0], clients):
            return self._kept[1]  # clients that draw all they have draw the same each time
        batch = self._batch(clients, round, epoch)
        if everything and (self._everybody or len(clients) == 1) and hasattr(batch.inputs, "coming_again"):
            batch = replace(batch, inputs=batch.inputs.coming_again())
        self._kept = (clients.copy(), batch) if everything else None
        return batch

    def _batch(self, clients: NDArray[np.int64], round: int, epoch: int) -> Batch:
        indices, counts = self.drawn(clients, round, epoch)
        targets = rows_of(self.targets, indices)
        if self._flipped is not None and self._flipped[clients].any():
            poisoned = torch.from_numpy(np.repeat(self._flipped[clients], counts)).to(targets.device)
            targets = torch.where(poisoned, self._classes - 1 - targets, targets)
        return Batch(rows_of(self.inputs, indices), targets, counts)


def rows_of(data: Any, indices: NDArray[np.int64]) -> Any:
    """Return some of the samples."""
    if isinstance(data, torch.Tensor):
        return data.index_select(0, torch.from_numpy(indices).to(data.device, non_blocking=True))
    return data.take(indices)
