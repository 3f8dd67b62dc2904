"""What benchmarks/local_epochs.py says of local epochs: its formulas, its trap, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import local_epochs
import numpy as np
import pytest
from local_epochs import Case, Labels, Quadratic, largest_rate

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("dimension", "k"), [(1, 1), (40, 1), (40, 8)])
def test_on_an_isotropic_quadratic_the_largest_rate_is_that_of_the_closed_form(dimension: int, k: int) -> None:
    assert largest_rate(np.full(dimension, 0.5), k) == pytest.approx(2 * k / ((dimension + k + 1) * 0.5))


def test_slopes_that_are_all_measured_at_w_allow_only_a_smaller_rate() -> None:
    curvatures = np.geomspace(0.1, 1, 20)
    rates = [largest_rate(curvatures, measured_at_once=epochs) for epochs in (1, 10, 100)]
    assert rates[0] > rates[1] > rates[2]
    assert rates[2] == pytest.approx(2 / 101, rel=0.05)  # the curvature along the gradient alone


def test_local_steps_of_clients_with_unlike_optima_are_as_stable_as_rounds() -> None:
    optima = np.random.default_rng(0).normal(size=(3, 8))
    quadratic = Quadratic(np.geomspace(0.1, 1, 8)[None], optima)
    one, ten = (quadratic.distance(0.2, epochs, 40, 4, local=True) for epochs in (1, 10))
    assert ten == pytest.approx(one, rel=1e-9)  # the same directions, the same steps of the mean
    assert quadratic.distance(0.2, 10, 40, 4, local=False) != pytest.approx(one, rel=0.1)


@pytest.mark.parametrize(
    ("honest", "steepness", "decided"),
    [
        ((2, 4), (1.5, 1.0), (1.5 - 1.0) / 2),  # label 0 is heard
        ((2, 4), (2.5, 1.0), -1.0),  # past a ratio of 2 it is trimmed away
        ((2, 4), (99.0, 1.0), -1.0),
        ((3, 3), (2.5, 1.0), (2.5 - 3 * 1.0) / 4),
        ((3, 3), (4.0, 1.0), (4.0 - 3 * 1.0) / 4),  # with three honest clients it comes back from beyond 3
    ],
)
def test_a_label_of_no_more_honest_clients_than_are_trimmed_is_no_longer_heard_past_a_ratio(
    honest: tuple[int, int], steepness: tuple[float, float], decided: float
) -> None:
    labels = Labels(Case(0.1, 1, honest=honest, seeds=1, features=4, samples=2))
    slopes = np.array([steepness[0]] * honest[0] + [-steepness[1]] * honest[1])
    assert labels.decide(slopes[None, :, None]) == pytest.approx(decided)
    assert labels.decide(-slopes[None, :, None]) == pytest.approx(-decided)


@pytest.mark.slow
def test_every_section_runs_and_its_tables_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["local_epochs.py", "--quick", "--json", str(file)])
    local_epochs.main()
    assert set(json.loads(file.read_text())) == set(local_epochs.SECTIONS)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["local_epochs.py", "--tables", str(file)])
    local_epochs.main()
    assert capsys.readouterr().out.count("| E = 1 | E = 5 |") == 4


def test_the_tables_of_the_document_are_those_of_the_figures() -> None:
    document = (ROOT / "docs" / "measured" / "local_epochs.md").read_text().splitlines()
    found = json.loads((ROOT / "docs" / "results" / "local_epochs.json").read_text())
    assert [line for line in local_epochs.tables(found) if line not in document] == []
