"""How the training samples are distributed to the clients.

A partition is made by a factory and maps (labels, clients, seed) to one array of sample indices for each client:

    parts = dirichlet(alpha=0.5)(labels, clients=12, seed=0)

Every sample goes to exactly one client, every client gets at least one, and the same seed gives the same partition on
every machine. (`dirichlet` takes its gamma variates from a NumPy generator seeded by the partition stream: its result
is the same for the same version of NumPy.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cyber0.config import doors
from cyber0.config.registry import PARTITIONS, partition
from cyber0.directions import Stream, permutation, words
from cyber0.errors import ConfigError, Cyber0Error, DataError

Indices: TypeAlias = NDArray[np.int64]
Partition: TypeAlias = Callable[[NDArray[Any], int, int], list[Indices]]

# Indices of the partition stream: the shuffle of the samples, the draw of proportions, the deal of the shards, which
# samples take part at all.
_SHUFFLE, _PROPORTIONS, _SHARDS, _FEW_SHOT = 0, 1, 2, 3


@partition
def iid() -> Partition:
    """Deal every label to all clients as evenly as possible.

    The paper: "data labels are uniformly distributed across all clients". Samples ordered by label are dealt one by
    one, like cards, so that two clients' counts of any label differ by at most one.
    """

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        order = _ordered_by_label(labels, _shuffled(labels, clients, seed))
        return [order[client::clients] for client in range(clients)]

    return deal


@partition
def by_label() -> Partition:
    """Cut the samples, ordered by label, into equal pieces: few labels for each client (the paper's non-IID)."""

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        return np.array_split(_ordered_by_label(labels, _shuffled(labels, clients, seed)), clients)

    return deal


@partition
def dirichlet(alpha: float = 0.5) -> Partition:
    """Split each label over the clients in random proportions p ~ Dirichlet(alpha, ..., alpha).

    Small alpha: few clients share a label, and sizes differ widely. Large alpha: nearly iid. It always ends: a client
    that came away empty gets one sample, picked at random, from the client that then has the most.

    Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019; Hsu et al., "Measuring
    the effects of non-identical data distribution for federated visual classification", 2019.
    """
    if not (math.isfinite(alpha) and 1e-6 <= alpha <= 1e9):
        raise ConfigError(f"alpha = {alpha!r} is impossible; it must be 1e-6 to 1e9")

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        shuffled = _shuffled(labels, clients, seed)
        generator = np.random.default_rng(words(seed, Stream.PARTITION, 0, _PROPORTIONS, 0, 8).tolist())
        owner = np.empty(len(labels), dtype=np.int64)
        shuffled_labels = labels[shuffled]
        for label in np.unique(labels):
            mine = shuffled[shuffled_labels == label]
            ends = np.cumsum(generator.dirichlet(np.full(clients, alpha)))
            # Cut k is where a share ends[k] of the samples lies before: the client of a sample is the cuts it passed.
            cuts = np.rint(ends[:-1] * len(mine))
            owner[mine] = np.searchsorted(cuts, np.arange(len(mine)), side="right")
        by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
        parts = np.split(by_owner, np.cumsum(np.bincount(owner, minlength=clients))[:-1])
        return _without_empty(parts)

    return deal


@partition
def shards(per_client: int = 2) -> Partition:
    """Cut the samples, ordered by label, into clients * per_client shards and deal each client that many at random.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017 (there 2).
    """
    if per_client < 1:
        raise ConfigError(f"per_client = {per_client!r} is impossible; every client needs at least 1")

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        shuffled, count = _shuffled(labels, clients, seed), clients * per_client
        if count > len(labels):
            raise DataError(
                f"{len(labels)} samples can't be cut into {per_client} shards for each of {clients} clients; lower "
                f"federation.shards to at most {len(labels) // clients}"
            )
        pieces = np.array_split(_ordered_by_label(labels, shuffled), count)
        hands = permutation(seed, Stream.PARTITION, 0, _SHARDS, count).reshape(clients, per_client)
        return [np.concatenate([pieces[shard] for shard in hand]) for hand in hands]

    return deal


@partition
def gamma(similarity: float = 0.5) -> Partition:
    """Deal a share of the samples as `iid` does and the rest as `by_label` does: 1 is iid, 0 is by label.

    Karimireddy et al., "SCAFFOLD", ICML 2020 (there "s % similar"), after Hsu et al. 2019; ByzFL's gamma similarity.
    """
    if not 0 <= similarity <= 1:
        raise ConfigError(f"similarity = {similarity!r} is impossible; it must be 0 to 1")

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        shuffled = _shuffled(labels, clients, seed)
        alike = round(similarity * len(labels))
        cards, rest = (_ordered_by_label(labels, part) for part in (shuffled[:alike], shuffled[alike:]))
        dealt = [cards[client::clients] for client in range(clients)]
        # Each client's stretch of the rest fills it up to an equal part of the whole.
        full = [len(part) for part in np.array_split(shuffled, clients)]
        cuts = np.cumsum([size - len(hand) for size, hand in zip(full, dealt, strict=True)])[:-1]
        stretches = np.split(rest, cuts)
        return [np.concatenate([hand, stretch]) for hand, stretch in zip(dealt, stretches, strict=True)]

    return deal


def make(name: str, options: Mapping[str, Any] | None = None) -> Partition:
    """Return the partition of that name, one of `PARTITIONS`, or the one that a path names, which is imported.

    What a user's own partition deals is checked.
    """
    made, entry = PARTITIONS.make(name, options), PARTITIONS.entry(name)
    if not entry.own:
        return made  # type: ignore[no-any-return]
    if not callable(made):
        raise ConfigError(
            f"{PARTITIONS.key} = {name!r} returns {type(made).__name__}, and must return a function of the labels, the "
            "number of clients and the seed that gives each client's sample indices"
        )

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        try:
            dealt = made(labels.copy(), clients, seed)
        except Cyber0Error:
            raise
        except Exception as error:  # a user's code may raise anything
            said = doors.described(error)
            raise DataError(f"{PARTITIONS.key} = {entry.name!r} failed: {said}") from error
        return _checked_deal(entry.name, dealt, len(labels), clients)

    return deal


def _checked_deal(name: str, dealt: Any, samples: int, clients: int) -> list[Indices]:
    """Return the result of a user's partition, or refuse it."""
    what = f"{PARTITIONS.key} = {name!r}"
    try:
        parts = [np.asarray(part) for part in dealt]
    except (TypeError, ValueError):
        raise DataError(
            f"{what} returned {type(dealt).__name__}; it must return one array of indices a client"
        ) from None
    if len(parts) != clients:
        raise DataError(f"{what} returned {len(parts)} arrays for {clients} clients; it must return one for each")
    for client, part in enumerate(parts):
        if part.ndim != 1 or part.dtype.kind not in "iu" or len(part) == 0:
            raise DataError(
                f"{what} gives client {client} an array of shape {part.shape} and type {part.dtype}; it must be the "
                "indices of at least 1 sample"
            )
    every = np.concatenate(parts).astype(np.int64)
    outside = every[(every < 0) | (every >= samples)]
    if len(outside):
        raise DataError(f"{what} deals sample {outside[0]}, but the samples are 0 to {samples - 1}")
    times = np.bincount(every, minlength=samples)
    if (times != 1).any():
        sample = int(np.argmax(times != 1))
        raise DataError(f"{what} deals sample {sample} {times[sample]} times; each sample must be dealt exactly once")
    return [part.astype(np.int64) for part in parts]


def few_shot(labels: NDArray[Any], samples: int, seed: int) -> Indices:
    """Return the indices of `samples` samples, as equal as possible per class, drawn by the seed.

    Classes that have fewer than their share contribute all they have, and the others make up for them.
    """
    if samples > len(labels):
        raise DataError(f"task.samples = {samples}, but the training set has {len(labels)}; lower it or set it to 0")
    order = permutation(seed, Stream.PARTITION, 0, _FEW_SHOT, len(labels))
    members = [order[labels[order] == label] for label in np.unique(labels)]
    due, left = [0] * len(members), samples
    while left:
        open_classes = [c for c, member in enumerate(members) if due[c] < len(member)]
        each = max(1, min(left // len(open_classes), *(len(members[c]) - due[c] for c in open_classes)))
        for c in open_classes[: left // each]:
            due[c] += each
            left -= each
    chosen = np.concatenate([member[:count] for member, count in zip(members, due, strict=True)])
    return np.sort(chosen)


def label_counts(labels: NDArray[Any], parts: Sequence[Indices], classes: int) -> NDArray[np.int64]:
    """Return how many samples of each label each client has, as a (clients x classes) matrix."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.int64)


def _shuffled(labels: NDArray[Any], clients: int, seed: int) -> Indices:
    """Return the samples' indices in random order; refuse more clients than samples."""
    samples = len(labels)
    if clients < 1:
        raise DataError(f"samples can't be dealt to {clients} clients; there must be at least one")
    if clients > samples:
        raise DataError(
            f"{samples} samples can't be dealt to {clients} clients; set federation.clients to at most {samples}"
        )
    return permutation(seed, Stream.PARTITION, 0, _SHUFFLE, samples)


def _ordered_by_label(labels: NDArray[Any], indices: Indices) -> Indices:
    """Return these indices in the order of their labels; within a label they stay in the order they are in."""
    return indices[np.argsort(labels[indices], kind="stable")]


def _without_empty(parts: list[Indices]) -> list[Indices]:
    """Give every empty client the last sample of the client that has the most at that moment."""
    largest = [(-len(part), client) for client, part in enumerate(parts)]
    heapq.heapify(largest)
    for client, part in enumerate(parts):
        if len(part) == 0:
            size, giver = largest[0]
            parts[client], parts[giver] = parts[giver][-1:], parts[giver][:-1]
            heapq.heapreplace(largest, (size + 1, giver))
    return parts
