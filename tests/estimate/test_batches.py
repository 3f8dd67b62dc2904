"""Batches: a function of (seed, client, round, local epoch) alone, uniform and without replacement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cyber0.directions import Stream, philox4x32
from cyber0.errors import DataError
from cyber0.estimate.batches import Samples

SIZES = [9, 1, 30, 4, 17]


def make(batch_size: int = 6, seed: int = 2**64 - 3, sizes: list[int] | None = None) -> Samples:
    sizes = SIZES if sizes is None else sizes
    total = sum(sizes)
    order = np.random.default_rng(0).permutation(total)
    shares = np.split(order, np.cumsum(sizes)[:-1])
    inputs = torch.arange(total, dtype=torch.float32)[:, None] * 10
    return Samples(inputs, torch.arange(total), shares, batch_size, seed)


def drawn(samples: Samples, client: int, round: int, epoch: int = 0) -> list[int]:
    numbers, counts = samples.drawn(np.array([client]), round, epoch)
    assert counts.tolist() == [len(numbers)]
    return numbers.tolist()


def plain_draw(seed: int, client: int, round: int, epoch: int, size: int, batch: int) -> list[int]:
    """Floyd's algorithm with words of Philox, in plain Python."""
    if batch >= size:
        return list(range(size))
    taken: list[int] = []
    for i in range(batch):
        counter = [i // 4, epoch, round, Stream.BATCHES << 24 | client]
        word = int(philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32])[i % 4])
        j = size - batch + i
        t = word * (j + 1) >> 32
        taken.append(j if t in taken else t)
    return taken


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("batch_size", [1, 3, 6, 8])
def test_the_draw_is_floyds_algorithm_on_philox_words(seed: int, batch_size: int) -> None:
    sizes = [9, 30, 17, 8]
    samples = make(batch_size, seed, sizes)
    order = np.random.default_rng(0).permutation(sum(sizes))
    starts = np.cumsum([0, *sizes])
    for round, epoch in ((0, 0), (5, 0), (5, 2), (2**32 - 1, 3)):
        for client, size in enumerate(sizes):
            expected = plain_draw(seed, client, round, epoch, size, batch_size)
            assert drawn(samples, client, round, epoch) == order[starts[client] + np.array(expected)].tolist()


def test_a_batch_does_not_depend_on_who_else_is_asked_nor_in_which_order() -> None:
    samples = make()
    alone = {client: drawn(samples, client, 4) for client in range(len(SIZES))}
    for clients in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 3, 1], [2, 4, 1, 0, 3]):
        numbers, counts = samples.drawn(np.array(clients), 4)
        parts = np.split(numbers, np.cumsum(counts)[:-1])
        assert [part.tolist() for part in parts] == [alone[client] for client in clients]
    assert {client: drawn(make(), client, 4) for client in reversed(range(len(SIZES)))} == alone


def test_a_batch_holds_the_clients_own_samples_each_at_most_once() -> None:
    samples = make()
    order = np.random.default_rng(0).permutation(sum(SIZES))
    shares = [set(share.tolist()) for share in np.split(order, np.cumsum(SIZES)[:-1])]
    for round in range(50):
        for client, share in enumerate(shares):
            numbers = drawn(samples, client, round)
            assert len(set(numbers)) == len(numbers) == min(6, SIZES[client])
            assert set(numbers) <= share


def test_a_client_with_fewer_samples_than_a_batch_uses_all_it_has() -> None:
    samples = make(batch_size=9)
    for client in (0, 1, 3):
        assert len(drawn(samples, client, 0)) == SIZES[client]
        assert drawn(samples, client, 0) == drawn(samples, client, 1)


def test_draws_differ_between_clients_rounds_epochs_and_seeds() -> None:
    sizes = [1000, 1000]
    samples = make(8, 1, sizes)
    place = {number: i for i, number in enumerate(np.random.default_rng(0).permutation(2000).tolist())}

    def positions(samples: Samples, *where: int) -> tuple[int, ...]:
        return tuple(place[number] % 1000 for number in drawn(samples, *where))

    seen = [positions(samples, 0, 0, 0), positions(samples, 1, 0, 0), positions(samples, 0, 1, 0)]
    seen += [positions(samples, 0, 0, 1), positions(make(8, 2, sizes), 0, 0, 0), positions(samples, 0, 1, 1)]
    seen += [positions(make(8, 1 + 2**32, sizes), 0, 0, 0)]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(("size", "batch"), [(10, 3), (7, 6), (50, 1)])
def test_every_sample_and_every_pair_is_drawn_equally_often(size: int, batch: int) -> None:
    rounds = 4000
    samples = Samples(torch.zeros(size, 1), torch.zeros(size), [np.arange(size)], batch, 11)
    counts, pairs = np.zeros(size), np.zeros((size, size))
    for round in range(rounds):
        numbers = drawn(samples, 0, round)
        counts[numbers] += 1
        pairs[np.ix_(numbers, numbers)] += 1
    expected = rounds * batch / size
    # Without replacement the counts are less spread than a multinomial's: the statistic is (n - b) / (n - 1) of it.
    chi_square = ((counts - expected) ** 2 / expected).sum() * (size - 1) / (size - batch)
    assert chi_square < size - 1 + 5 * np.sqrt(2 * (size - 1))
    if batch > 1:
        together = rounds * batch * (batch - 1) / (size * (size - 1))
        apart = pairs[~np.eye(size, dtype=bool)]
        assert np.abs(apart - together).max() < 5.5 * np.sqrt(together)


def test_the_order_of_a_batch_belongs_to_inputs_and_targets_alike() -> None:
    batch = make().batch(np.array([2, 0]), 3)
    assert batch.counts.tolist() == [6, 6]
    assert torch.equal(batch.inputs[:, 0], batch.targets * 10)
    assert batch.targets.tolist() == drawn(make(), 2, 3) + drawn(make(), 0, 3)


def test_many_clients_draw_at_once_what_they_draw_one_by_one() -> None:
    sizes = [3 + i % 5 for i in range(400)]
    samples = make(4, 5, sizes)
    numbers, counts = samples.drawn(np.arange(400), 2)
    ends: Any = np.cumsum(counts)
    for client in range(0, 400, 37):
        assert numbers[ends[client] - counts[client] : ends[client]].tolist() == drawn(samples, client, 2)


def test_a_client_without_samples_is_refused_by_number() -> None:
    with pytest.raises(DataError, match="client 2 has no samples"):
        make(sizes=[3, 1, 0, 2])


class Rows:
    """Samples that can be told that they come again."""

    def __init__(self, numbers: NDArray[np.int64], again: bool = False) -> None:
        self.numbers, self.again = numbers, again

    def take(self, numbers: NDArray[np.int64]) -> Rows:
        return Rows(self.numbers[numbers])

    def coming_again(self) -> Rows:
        return Rows(self.numbers, True)


@pytest.mark.parametrize(
    ("everybody", "batch_size", "clients", "again"),
    [(True, 9, [0, 1], True), (True, 3, [0, 1], False), (False, 9, [0, 1], False), (False, 9, [1], True)],
)
def test_a_batch_comes_again_where_its_clients_do_with_all_they_have(
    everybody: bool, batch_size: int, clients: list[int], again: bool
) -> None:
    shares = [np.arange(4), np.arange(4, 9), np.arange(9, 12)]
    samples = Samples(Rows(np.arange(12)), torch.arange(12), shares, batch_size, 5, everybody=everybody)
    assert samples.batch(np.array(clients), 0).inputs.again == again


def test_a_batch_that_is_kept_does_not_follow_the_callers_array() -> None:
    samples, clients = make(batch_size=99, sizes=[3, 3]), np.array([0])
    first = samples.batch(clients, 0)
    clients[0] = 1
    assert not torch.equal(samples.batch(clients, 1).targets, first.targets)
