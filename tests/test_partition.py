from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyber0 import choices
from cyber0.errors import ConfigError, DataError
from cyber0.tasks.partition import PARTITIONS, by_label, iid, make

LABELS = np.random.default_rng(3).integers(0, 10, 1003)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PARTITIONS)),
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_sample_is_dealt_once_and_sizes_differ_by_at_most_one(
    name: str, labels: list[int], share: float, seed: int
) -> None:
    clients = 1 + round(share * (len(labels) - 1))
    parts = make(name)(np.array(labels), clients, seed)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_iid_gives_every_client_every_label_as_evenly_as_possible() -> None:
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in iid()(LABELS, 12, 5)])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()


def test_by_label_gives_each_client_a_stretch_of_labels() -> None:
    parts = by_label()(LABELS, 12, 5)
    assert (np.diff(np.concatenate([LABELS[part] for part in parts])) >= 0).all()
    assert all(len(np.unique(LABELS[part])) <= 3 for part in parts)


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_the_same_seed_gives_the_same_deal_and_another_seed_another(name: str) -> None:
    first, again, other = (np.concatenate(make(name)(LABELS, 7, seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


def test_a_deal_is_the_same_on_every_machine() -> None:
    # Worked out by another implementation of Philox.
    parts = iid()(np.arange(12) % 3, 2, 42)
    assert [part.tolist() for part in parts] == [[6, 9, 10, 1, 2, 8], [0, 3, 7, 4, 5, 11]]


def test_samples_of_one_label_are_shuffled() -> None:
    (part,) = by_label()(np.zeros(1000, dtype=np.int64), 1, 0)
    assert abs(np.corrcoef(part, np.arange(1000))[0, 1]) < 0.15


def test_more_clients_than_samples_are_refused() -> None:
    for name in PARTITIONS:
        with pytest.raises(DataError, match=r"5 samples .* 6 clients"):
            make(name)(np.arange(5), 6, 0)


def test_every_partition_on_offer_exists_and_others_are_refused() -> None:
    assert set(PARTITIONS) == set(choices.PARTITIONS)
    with pytest.raises(ConfigError, match="by_label"):
        make("by_lable")
