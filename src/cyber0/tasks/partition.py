"""How the training samples are dealt to the clients.

A partition is made by a factory and maps (labels, clients, seed) to one array of sample indices for each client:

    parts = by_label()(labels, clients=12, seed=0)

Every sample goes to exactly one client, sizes differ by at most one, and the same seed gives the same deal on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cyber0.directions import Stream, permutation
from cyber0.errors import ConfigError, DataError

Indices: TypeAlias = NDArray[np.int64]
Partition: TypeAlias = Callable[[NDArray[Any], int, int], list[Indices]]


def iid() -> Partition:
    """Deal every label to all clients as evenly as possible.

    The paper: "data labels are uniformly distributed across all clients". Samples ordered by label are dealt one by
    one, like cards, so that two clients' counts of any label differ by at most one.
    """

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        order = _ordered_by_label(labels, clients, seed)
        return [order[client::clients] for client in range(clients)]

    return deal


def by_label() -> Partition:
    """Cut the samples, ordered by label, into equal pieces: few labels for each client (the paper's non-IID)."""

    def deal(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
        return np.array_split(_ordered_by_label(labels, clients, seed), clients)

    return deal


PARTITIONS: dict[str, Callable[[], Partition]] = {"iid": iid, "by_label": by_label}


def make(name: str) -> Partition:
    """Build the partition of that name."""
    if name not in PARTITIONS:
        raise ConfigError(f"there is no partition {name!r}; possible are {', '.join(PARTITIONS)}")
    return PARTITIONS[name]()


def _ordered_by_label(labels: NDArray[Any], clients: int, seed: int) -> Indices:
    """Return the samples' indices in the order of their labels, shuffled within each label."""
    samples = len(labels)
    if clients < 1:
        raise DataError(f"samples can't be dealt to {clients} clients; there must be at least one")
    if clients > samples:
        raise DataError(
            f"{samples} samples can't be dealt to {clients} clients; set federation.clients to at most {samples}"
        )
    shuffled = permutation(seed, Stream.PARTITION, 0, 0, samples)
    return shuffled[np.argsort(labels[shuffled], kind="stable")]
