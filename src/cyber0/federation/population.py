"""Who takes part: the samples that are learned from, who holds which of them, and which clients are Byzantine."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0.config.registry import PARTITIONS
from cyber0.config.schema import Config
from cyber0.directions import Stream, permutation
from cyber0.errors import ConfigError, DataError
from cyber0.tasks import EngineTask, HoldsOut, partition

_REFERENCE = 4  # the index, in the partition stream, of the trusted client's draw; 0 to 3 are in tasks/partition.py


class Population(NamedTuple):
    """The clients of a simulated federation."""

    task: EngineTask
    """What they learn, with the samples that they learn from."""
    shares: list[NDArray[np.int64]]
    """Which of these samples each client holds."""
    byzantine: NDArray[np.bool_]
    """Which clients are Byzantine."""


def populate(task: EngineTask, config: Config, byzantine: Collection[int] | None = None) -> Population:
    """Return the clients that a config describes; `byzantine` says who is Byzantine, by default the seed."""
    federation = config.federation
    if byzantine is None:
        trusted = min(config.aggregation.reference, 1)
        marks = byzantine_clients(config.seed, federation.clients, federation.byzantine, trusted)
    else:
        marks = _marked(byzantine, federation.clients, federation.byzantine)
        if config.aggregation.reference and marks[0]:
            raise ConfigError(f"byzantine = {sorted(byzantine)} names client 0, which aggregation.reference trusts")
    return Population(*dealt(task, config), marks)


def dealt(task: EngineTask, config: Config) -> tuple[EngineTask, list[NDArray[np.int64]]]:
    """Return the task with the samples that are learned from, and which of them each client holds."""
    check_partition(task, config)
    task, f = learned_from(task, config), config.federation
    deal = partition.make(f.partition, f.partition_arguments)
    if not config.aggregation.reference:
        return task, deal(task.labels, f.clients, config.seed)
    trusted, rest = set_apart(task.labels, config.aggregation.reference, f.clients, config.seed)
    return task, [trusted, *(rest[share] for share in deal(task.labels[rest], f.clients - 1, config.seed))]


def learned_from(task: EngineTask, config: Config) -> EngineTask:
    """Return the task with the training samples that are learned from, all of them unless task.samples says less."""
    samples, validation, seed = config.task.samples, config.task.validation, config.seed
    if not samples:
        return task
    learned = partition.few_shot(task.labels, samples, seed)
    if validation and isinstance(task, HoldsOut):
        left = np.setdiff1d(np.arange(len(task.labels)), learned)
        if validation > len(left):
            raise DataError(
                f"task.validation = {validation}, and task.samples = {samples} leaves {len(left)} of the training "
                f"samples; set task.validation to at most {len(left)}"
            )
        task = task.hold_out(left[partition.few_shot(task.labels[left], validation, seed)])
    return task.keep(learned)


def check_partition(task: EngineTask, config: Config) -> None:
    """Refuse a partition by labels where there are none."""
    name = config.federation.partition
    if not task.classes and name != "iid" and not PARTITIONS.entry(name).own:
        raise ConfigError(
            f"federation.partition = {name!r} deals samples by their classes, and the targets of {task.name} are not "
            'classes, whole numbers from 0; set federation.partition = "iid"'
        )


def set_apart(
    labels: NDArray[np.int64], samples: int, clients: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the trusted client's training samples, drawn by the seed, and those of all others."""
    if samples > len(labels) - clients + 1:
        raise DataError(
            f"aggregation.reference = {samples} of {len(labels)} training samples leaves too few for the other "
            f"{clients - 1} clients; lower it to at most {max(len(labels) - clients + 1, 0)}"
        )
    order = permutation(seed, Stream.PARTITION, 0, _REFERENCE, len(labels))
    return np.sort(order[:samples]), np.sort(order[samples:])


def byzantine_clients(seed: int, clients: int, count: int, trusted: int = 0) -> NDArray[np.bool_]:
    """Return which clients are Byzantine: fixed for the run, drawn by the seed; the first `trusted` never are."""
    byzantine = np.zeros(clients, dtype=np.bool_)
    byzantine[trusted + permutation(seed, Stream.ATTACKS, 0, 0, clients - trusted)[:count]] = True
    return byzantine


def _marked(byzantine: Collection[int], clients: int, count: int) -> NDArray[np.bool_]:
    """Return the clients that are named as Byzantine, which must be as many as the config says."""
    strangers = sorted(i for i in byzantine if not 0 <= i < clients)
    if strangers or len(set(byzantine)) != count:
        raise ConfigError(
            f"byzantine = {sorted(byzantine)} must name federation.byzantine = {count} different clients from 0 to "
            f"{clients - 1}; change one of the two"
        )
    marks = np.zeros(clients, dtype=np.bool_)
    marks[sorted(byzantine)] = True
    return marks
