"""A trusted client whose report weighs those of the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cyber0 import Simulation, aggregate
from cyber0.aggregate import AggregationError, fit_reference
from cyber0.config import Config
from cyber0.errors import ConfigError, DataError
from cyber0.ledger import Ledger
from cyber0.runs.replay import check_decisions
from cyber0.storage import LEDGER

SETTINGS = {
    "rounds": 20, "task": {"name": "logistic"}, "method": {"k": 16, "lr": 0.1},
    "federation": {"clients": 13, "attack": "sign_flip"},
    "aggregation": {"rule": "fit_reference", "reference": 20},
}  # fmt: skip


def _with(**changes: dict[str, object]) -> Config:
    merged = {name: {**value, **changes.get(name, {})} if isinstance(value, dict) else value
              for name, value in SETTINGS.items()}  # fmt: skip
    return Config.from_dict(merged)


def _rows(honest: int, byzantine: int, scalars: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of clients of very unlike data, whose sum is the reference, and of others against it."""
    parts = np.random.default_rng(0).normal(size=(honest, scalars))
    reference = parts.mean(axis=0)
    return np.vstack([reference, parts, np.tile(-5 * reference, (byzantine, 1))]), reference


def test_unlike_reports_that_add_up_to_the_reference_are_kept_and_opposed_ones_get_no_weight() -> None:
    rows, reference = _rows(9, 3)
    outcome = fit_reference(0.25).decide(rows)
    assert outcome.excluded[-3:].tolist() == [32] * 3
    assert not outcome.excluded[:10].any()
    cosine = outcome.values @ reference / np.linalg.norm(outcome.values) / np.linalg.norm(reference)
    assert cosine > 0.99


def test_the_reference_has_no_vote() -> None:
    rows = np.vstack([np.full((1, 8), 7.0), np.tile(np.arange(8.0), (6, 1))])
    values = fit_reference(0.25)(rows)
    np.testing.assert_allclose(values / values[-1], np.arange(8.0) / 7)


def test_nobody_gets_more_than_an_equal_share_among_the_honest() -> None:
    rows, reference = _rows(9, 3)
    rows[-3:] = reference * np.linalg.norm(rows[1]) / np.linalg.norm(reference)  # they send nothing but the reference
    rows[1:10] = 0.0
    values = fit_reference(0.25)(rows)
    assert np.linalg.norm(values) <= 3 / 9 / 0.2 * np.linalg.norm(rows[-1]) + 1e-9


def test_a_round_without_the_reference_is_not_decided() -> None:
    rows, _ = _rows(9, 3)
    with pytest.raises(AggregationError, match="client 0 did not report"):
        fit_reference(0.25).decide(rows[1:], 13, clients=np.arange(1, 13))


def test_the_trusted_client_holds_training_samples_that_nobody_else_has_and_is_never_byzantine() -> None:
    for seed in range(5):
        simulation = Simulation(Config.from_dict(SETTINGS | {"seed": seed}))
        held = np.concatenate(simulation.shares)
        assert len(simulation.shares[0]) == 20
        assert len(simulation.shares) == 13
        assert sorted(held.tolist()) == list(range(len(simulation.task.train_inputs)))
        assert not simulation.byzantine[0]
        assert simulation.byzantine.sum() == 3


def test_the_trusted_client_can_measure_more_samples_than_the_others() -> None:
    simulation = Simulation(_with(method={"batch_size": 2}, aggregation={"reference_batch": 15}))
    few = Simulation(_with(method={"batch_size": 2}))
    everybody = np.arange(13)
    indices, counts = simulation.samples.drawn(everybody, 3)
    assert counts.tolist() == [15] + [2] * 12
    assert set(indices[:15]) <= set(simulation.shares[0].tolist())
    assert indices[15:].tolist() == few.samples.drawn(everybody, 3)[0][2:].tolist()
    assert simulation.run_round().values.tolist() != few.run_round().values.tolist()


def test_a_run_is_verified_decision_by_decision_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = Simulation(_with()), Simulation.create(_with(), tmp_path, lambda: None)
    expected = [whole.run_round().values.tolist() for _ in range(20)]
    found = [parts.run_round().values.tolist() for _ in range(12)]
    parts.close()
    resumed = Simulation.resume(_with(), tmp_path)
    resumed.catch_up()
    found += [resumed.run_round().values.tolist() for _ in range(8)]
    resumed.close()
    assert found == expected
    with Ledger.open(tmp_path / LEDGER) as ledger:
        assert check_decisions(tmp_path, ledger).rounds == 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"aggregation": {"reference": 0}}, "set aggregation.reference to the number of its samples"),
        ({"aggregation": {"rule": "median"}}, "has no use for"),
        ({"federation": {"participation": 0.5}}, "set federation.participation = 1"),
        ({"aggregation": {"reference": -1}}, "aggregation.reference"),
        ({"aggregation": {"reference_batch": -1}}, "aggregation.reference_batch"),
        ({"aggregation": {"reference_batch": 21}}, "set it to at most aggregation.reference, which is 20"),
        (
            {"aggregation": {"rule": "mean", "reference": 0, "reference_batch": 5}},
            "is for a trusted client, and there is none",
        ),
    ],
)
def test_a_reference_that_can_not_work_is_refused(changes: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _with(**changes)


def test_more_trusted_samples_than_the_others_can_spare_are_refused() -> None:
    with pytest.raises(DataError, match="lower it to at most"):
        Simulation(_with(aggregation={"reference": 10**6}))


def test_a_reference_is_listed_among_the_rules() -> None:
    assert aggregate.RULES.entry("fit_reference").traits["reference"]


def test_the_trusted_client_can_have_a_share_of_the_decision() -> None:
    rows, reference = _rows(9, 3)
    without = fit_reference(0.25)(rows)
    np.testing.assert_allclose(fit_reference(0.25, share=0.4)(rows), 0.6 * without + 0.4 * reference)


def test_a_share_teaches_what_only_the_trusted_samples_show() -> None:
    rows = np.zeros((13, 8))
    rows[0, 0], rows[1:, 1] = 1.0, 1.0  # the others know nothing of the first direction
    assert fit_reference(0.25)(rows)[0] == 0
    assert fit_reference(0.25, share=0.4)(rows)[0] == pytest.approx(0.4)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2, float("nan")])
def test_a_share_that_is_none_is_refused_by_its_value(share: float) -> None:
    with pytest.raises(ConfigError, match=rf"share = {share!r} .* in \[0, 1\)"):
        fit_reference(0.25, share=share)
