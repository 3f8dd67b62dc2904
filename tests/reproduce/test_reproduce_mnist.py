"""`cyber0 reproduce` for MNIST: the runs are the paper's, and what is said of them is what they gave."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from cyber0 import reproduce as paper
from cyber0.cli.main import app
from cyber0.errors import ConfigError
from cyber0.reproduce import communication, fig1, mnist, table1
from cyber0.reproduce.cells import STUDY
from cyber0.study import Cell, Result

ROUNDS = (0, 200, 400)


class FakeRuns:
    """Stands in for the study: runs end at the accuracy that `accuracy` gives for a cell."""

    def __init__(self, accuracy: Any) -> None:
        self.cells: list[Cell] = []
        self._accuracy = accuracy

    def __call__(self, request: paper.Request, cells: list[Cell]) -> list[Result]:
        self.cells = cells
        return [self._result(request.out, number, cell) for number, cell in enumerate(cells)]

    def _result(self, out: Path, number: int, cell: Cell) -> Result:
        folder = out / STUDY / str(number)
        folder.mkdir(parents=True)
        end = self._accuracy(cell)
        k = 7850 if cell.config.method.name != "cyber0" else cell.config.method.k
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["round", "accuracy", "loss", "uplink_bytes", "downlink_bytes"])
            for round in ROUNDS:
                writer.writerow([round, end * round / 400, 1.0, 4 * k * round, 4 * k * round])
        figures = {"final_accuracy": end, "final_loss": 1.0, "uplink_bytes": 1600 * k, "model_digest": "0"}
        return Result(cell, "done", str(number), figures)


def fake_runs(monkeypatch: pytest.MonkeyPatch, module: Any, accuracy: Any) -> FakeRuns:
    stand_in = FakeRuns(accuracy)
    monkeypatch.setattr(module, "run_cells", stand_in)
    return stand_in


@pytest.mark.slow
def test_figure_1a_and_1b_compare_k_with_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {1: 0.6, 4: 0.8, 16: 0.88, 64: 0.89}
    runs = fake_runs(monkeypatch, fig1, lambda c: 0.9 if c.config.method.name == "fedavg" else ends[c.config.method.k])
    text = fig1.over_scalars(paper.Request(tmp_path)).read_text()
    assert "| k = 1 | 60.0 ± 0.0 | 400 | not reached |" in text
    assert "| FedAvg | 90.0 ± 0.0 | 3,140,000 | 3,140,000 |" in text
    assert "yes: k = 64 ends 1.0 points below FedAvg, k = 1 30.0" in text
    assert {p.name for p in tmp_path.glob("fig1a.*")} == {"fig1a.md", "fig1a.csv", "fig1a.png", "fig1a.svg"}
    assert len(runs.cells) == 15
    for cell in runs.cells:
        federation = cell.config.federation
        assert (federation.clients, federation.byzantine, federation.partition) == (12, 0, "by_label")
        assert (cell.config.aggregation.rule, cell.config.rounds, cell.config.method.lr) == ("mean", 400, 0.01)
    ends[64] = 0.85
    text = fig1.over_steps(paper.Request(tmp_path / "b")).read_text()
    assert "| the larger k, the closer to SGD | **no**" in text


@pytest.mark.slow
def test_figure_1c_names_the_worst_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"none": 0.88, "full_knowledge": 0.65, "label_flip": 0.7}
    runs = fake_runs(monkeypatch, fig1, lambda c: ends.get(c.config.federation.attack, 0.8))
    text = fig1.attacks(paper.Request(tmp_path)).read_text()
    assert "| full knowledge | 65.0 ± 0.0 | 23.0 |" in text
    assert "yes: full knowledge" in text
    assert "yes: 65.0 to 80.0" in text
    assert {c.config.federation.attack_reading for c in runs.cells} == {"literal"}
    ends["label_flip"] = 0.5
    text = fig1.attacks(paper.Request(tmp_path / "b")).read_text()
    assert "**no**: label flipping" in text
    assert "**no**: 50.0 to 80.0" in text


def table_accuracy(cell: Cell) -> float:
    name = {"krum": "Krum", "trimmed_mean": "Trimmed mean", "cyber0": "CyBeR-0"}[cell.config.method.name]
    mean, deviation = table1.PAPER[name][table1.ALPHAS.index(cell.config.aggregation.beta)]
    return (mean + deviation * (cell.config.seed - 1)) / 100  # seeds 0, 1, 2: one below, one at, one above


def test_table_1_that_is_the_papers_is_found_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_runs(monkeypatch, table1, table_accuracy)
    text = table1.reproduce(paper.Request(tmp_path)).read_text()
    assert "| CyBeR-0 | 0.375 | 60.3 ± 2.9 | 60.3 ± 2.9 | +0.0 | yes |" in text
    assert text.count("| yes |") == 9 + 3  # cells, and the order at every alpha
    latex = (tmp_path / "table1.tex").read_text()
    assert "Krum & 69.2 $\\pm$ 1.6 & 10.2 $\\pm$ 1.2" in latex and latex.endswith("\\end{tabular}\n")
    assert len(runs.cells) == 27
    byzantine = {(c.config.federation.clients, c.config.federation.byzantine, c.config.aggregation.beta)
             for c in runs.cells}  # fmt: skip
    assert byzantine == {(40, 5, 0.125), (40, 10, 0.25), (40, 15, 0.375)}
    assert {c.config.federation.partition for c in runs.cells} == {"iid"}


def test_table_1_says_by_how_much_it_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missed(cell: Cell) -> float:
        return table_accuracy(cell) + (0.3 if cell.config.method.name == "krum" and cell.config.seed >= 0 else 0)

    fake_runs(monkeypatch, table1, missed)
    text = table1.reproduce(paper.Request(tmp_path)).read_text()
    assert "| Krum | 0.25 | 10.2 ± 1.2 | 40.2 ± 1.2 | +30.0 | no: 25.0 deviations |" in text
    assert "| alpha = 0.125 | CyBeR-0 > Trimmed mean > Krum | Krum > CyBeR-0 > Trimmed mean | **no** |" in text


def test_readings_stand_beside_the_papers_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_runs(monkeypatch, table1, table_accuracy)
    text = table1.readings(paper.Request(tmp_path, seeds=2)).read_text()
    assert text.count("**paper**") == 3
    assert len(runs.cells) == len(table1.VARIANTS) * 3 * 2
    assert {c.config.federation.attack_sign for c in runs.cells if c.config.method.name == "krum"} == {
        "honest", "truth"}  # fmt: skip


def test_the_communication_table_counts_bytes_to_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accuracy(cell: Cell) -> float:
        byzantine = cell.config.federation.byzantine > 0
        return {"fedavg": 0.1 if byzantine else 0.9, "krum": 0.5}.get(cell.config.method.name, 0.86)

    fake_runs(monkeypatch, communication, accuracy)
    text = communication.reproduce(paper.Request(tmp_path)).read_text()
    assert "| 85 % | FedAvg | 12,560,000 | 12,560,000 | 1 x | 1 x | 90.0 |" in text
    assert "| 85 % | CyBeR-0, k = 1 | 1,600 | 1,600 | 7.85e+03 x | 7.85e+03 x | 86.0 |" in text
    assert "| 88 % | CyBeR-0, k = 64 | not reached | not reached | – | – | 86.0 |" in text
    rows = list(csv.DictReader((tmp_path / "communication.csv").open()))
    attacked = [r for r in rows if r["setting"] == communication.QUARTER and r["method"] == "FedAvg"]
    assert attacked and not any(r["uplink_bytes"] for r in attacked)
    assert r"85 \% & FedAvg & 12,560,000" in (tmp_path / "communication.tex").read_text()


def test_settings_of_the_user_have_the_last_word_and_quick_is_short(tmp_path: Path) -> None:
    request = paper.Request(tmp_path, quick=True, overrides=("method.k=3", "rounds=7"))
    (cell,) = mnist.make_cells(request, [({"a": 1}, ["method.k=64"])])
    assert (cell.config.method.k, cell.config.rounds) == (3, 7)
    (cell,) = mnist.make_cells(paper.Request(tmp_path, quick=True), [({"a": 1}, [])])
    assert cell.config.rounds == mnist.QUICK_ROUNDS


def test_settings_are_refused_where_there_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="theorem1 is not made of runs"):
        typer.testing.CliRunner().invoke(
            app, ["reproduce", "theory", "--set", "rounds=3", "--out", str(tmp_path / "x")], catch_exceptions=False
        )
    assert not (tmp_path / "x").exists()


def test_repetitions_that_would_all_be_the_same_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        mnist.make_cells(paper.Request(tmp_path, overrides=("seed=5",)), [({"a": 1}, [])])
