from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic import Blobs, config, one_thread  # noqa: F401

from cyber0 import Simulation
from cyber0.cli.display import partition_table
from cyber0.errors import ConfigError, DataError
from cyber0.tasks.partition import PARTITIONS, by_label, dirichlet, gamma, iid, label_counts, make, shards

LABELS = np.random.default_rng(3).integers(0, 10, 1003)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PARTITIONS)),
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_sample_is_dealt_once_and_nobody_goes_without(
    name: str, labels: list[int], share: float, seed: int
) -> None:
    most = len(labels) // 2 if name == "shards" and len(labels) > 1 else len(labels)
    if name == "shards" and len(labels) < 2:
        return
    clients = 1 + round(share * (most - 1))
    parts = make(name)(np.array(labels), clients, seed)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1
    if name != "dirichlet":
        assert max(sizes) - min(sizes) <= (2 if name == "shards" else 1)


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


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.5, 1e6, 1e9])
@pytest.mark.parametrize("clients", [1, 7, 300, 1003])
def test_dirichlet_ends_and_leaves_nobody_empty_whatever_alpha(alpha: float, clients: int) -> None:
    parts = dirichlet(alpha)(LABELS, clients, 11)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    assert min(len(part) for part in parts) >= 1


def test_small_alpha_gives_few_labels_a_client_and_large_alpha_is_nearly_iid() -> None:
    counts = {a: label_counts(LABELS, dirichlet(a)(LABELS, 10, 5), 10) for a in (1e-3, 0.5, 1e6)}
    labels_each = {a: (c > 0).sum(axis=1).mean() for a, c in counts.items()}
    assert labels_each[1e-3] < 2.5 < labels_each[0.5] < labels_each[1e6] == 10
    assert (counts[1e6].max(axis=0) - counts[1e6].min(axis=0) <= 2).all()


def test_dirichlet_proportions_have_the_variance_that_alpha_says() -> None:
    """Var p = (1/m)(1 - 1/m) / (m alpha + 1) for each client's share of a label."""
    labels, clients, alpha = np.arange(40_000) % 200, 8, 0.5
    shares = label_counts(labels, dirichlet(alpha)(labels, clients, 1), 200) / 200
    assert shares.var() == pytest.approx((1 / 8) * (7 / 8) / (8 * alpha + 1), rel=0.15)


def test_the_one_who_has_most_gives_to_the_empty() -> None:
    labels = np.zeros(100, dtype=np.int64)
    parts = dirichlet(1e-6)(labels, 5, 0)  # one client takes the whole label
    assert sorted(len(part) for part in parts) == [1, 1, 1, 1, 96]


@pytest.mark.parametrize("per_client", [1, 2, 5])
def test_shards_are_stretches_of_the_labels_in_order(per_client: int) -> None:
    clients = 20
    parts = shards(per_client)(LABELS, clients, 5)
    length = len(LABELS) / (clients * per_client)
    assert all(abs(len(part) - per_client * length) <= per_client for part in parts)
    # A shard is shorter than a label here, so it holds at most two.
    assert all(len(np.unique(LABELS[part])) <= 2 * per_client for part in parts)


def test_shards_are_dealt_at_random() -> None:
    first = [int(LABELS[part].min()) for part in shards(1)(LABELS, 20, 5)]
    assert first != sorted(first)


def test_more_shards_than_samples_are_refused_with_what_is_possible() -> None:
    with pytest.raises(DataError, match=r"10 samples .* 3 shards .* 4 clients.*federation\.shards to at most 2"):
        shards(3)(np.arange(10) % 2, 4, 0)


def test_gamma_is_by_label_at_zero_and_iid_at_one() -> None:
    for similarity, same in ((0.0, by_label()), (1.0, iid())):
        found, expected = gamma(similarity)(LABELS, 12, 5), same(LABELS, 12, 5)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gamma_deals_that_share_evenly() -> None:
    labels = np.arange(10_000) % 10
    counts = label_counts(labels, gamma(0.3)(labels, 10, 2), 10)
    # 300 of 1000 samples are dealt evenly, about 30 of each label; the other 700 are almost all of one label.
    assert (counts.sum(axis=1) == 1000).all()
    assert (counts.min(axis=1) >= 20).all() and (counts.min(axis=1) <= 40).all()
    assert (counts.max(axis=1) >= 600).all()


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_there_may_be_more_clients_than_labels_and_labels_that_nobody_has(name: str) -> None:
    labels = np.repeat([2, 7], 40)
    counts = label_counts(labels, make(name)(labels, 30, 0), 10)
    assert counts.shape == (30, 10)
    assert counts.sum(axis=0).tolist() == [0, 0, 40, 0, 0, 0, 0, 40, 0, 0]
    assert (counts.sum(axis=1) >= 1).all()


def test_impossible_settings_are_refused() -> None:
    for make_one in (
        lambda: dirichlet(0.0),
        lambda: dirichlet(float("nan")),
        lambda: dirichlet(float("inf")),
        lambda: shards(0),
        lambda: gamma(1.5),
        lambda: gamma(float("nan")),
    ):
        with pytest.raises(ConfigError, match="is impossible"):
            make_one()


def test_samples_of_one_label_are_shuffled() -> None:
    (part,) = by_label()(np.zeros(1000, dtype=np.int64), 1, 0)
    assert abs(np.corrcoef(part, np.arange(1000))[0, 1]) < 0.15


def test_more_clients_than_samples_are_refused() -> None:
    for name in PARTITIONS:
        with pytest.raises(DataError, match=r"5 samples .* 6 clients"):
            make(name)(np.arange(5), 6, 0)


def shown(*overrides: str) -> str:
    simulation = Simulation(config(*overrides), task=Blobs())
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(partition_table(simulation, simulation.config.federation.partition_title))
    return console.export_text()


def test_the_partition_is_shown_as_a_table_of_clients_and_labels() -> None:
    text = shown("federation.partition=gamma", "federation.similarity=0")
    assert "gamma (similarity = 0)" in text
    assert text.count("40 │") == 12 + 12  # three clients a label, 40 samples each: the label's column and the sum
    assert text.count("*") == 3 + 1  # the Byzantine clients and the legend


def test_of_many_clients_a_summary_is_shown() -> None:
    text = shown("federation.partition=dirichlet", "federation.alpha=0.1", "federation.clients=40")
    assert "each of 40 clients has" in text and "median" in text and "samples" in text and "labels" in text


def test_every_partition_on_offer_exists_and_others_are_refused() -> None:
    assert list(PARTITIONS) == ["iid", "by_label", "dirichlet", "shards", "gamma"]
    with pytest.raises(ConfigError, match="by_label"):
        make("by_lable")
