"""The study of rules under their worst attacks: its files are valid, and the benchmarks make its tables and bounds."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path

import heterogeneity
import numpy as np
import pytest
import worst_attack
from processes import write_digits
from synthetic import one_thread  # noqa: F401

from cyber0.config.registry import ATTACKS
from cyber0.study.grid import read_plan

ROOT = Path(__file__).parent.parent
SMALL = """
rounds = 2
evaluate_every = 2
task.data = "{data}"
method.k = 4
method.batch_size = 8
[study]
seeds = 1
[study.grid]
partition = [{{ label = "iid", federation.partition = "iid" }}]
defence = [
    {{ label = "mean", aggregation.rule = "mean" }},
    {{ label = "fit_reference", aggregation = {{ rule = "fit_reference", reference = 20 }}, federation.clients = 13 }},
]
federation.attack = ["none", "ipm"]
"""


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("worst_attack*.toml")), ids=lambda file: file.stem)
def test_every_study_runs_each_defence_without_attack_and_under_attacks(file: Path) -> None:
    cells = read_plan(file).cells
    pairs = {(cell.axes["defence"], cell.config.federation.attack) for cell in cells}
    assert {attack for _, attack in pairs} <= set(ATTACKS)
    assert {(defence, attack) for defence, _ in pairs for attack in ("none", "full_knowledge")} <= pairs
    assert {cell.config.seed for cell in cells} == {0, 1, 2}
    assert all(cell.config.rounds == cell.config.evaluate_every for cell in cells)


def written(folder: Path, rows: list[tuple[str, str, str, float]], partition: str = "iid") -> Path:
    """Write the results of a study whose runs have no folders."""
    folder.mkdir()
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["partition", "defence", "federation.attack", "seed", "status", "final_accuracy", "folder"])
        for defence, attack, status, accuracy in rows:
            writer.writerow([partition, defence, attack, 0, status, accuracy, "runs/none"])
    return folder


def test_the_table_shows_each_defence_by_its_worst_attack(tmp_path: Path) -> None:
    rows = [("mine", "none", "done", 0.9), ("mine", "ipm", "done", 0.5), ("mine", "alie", "done", 0.7)]
    rows += [("new", "none", "done", 0.8), ("new", "ipm", "done", 0.6), ("new", "alie", "open", 0.0)]
    (panel,) = worst_attack.studied([written(tmp_path / "study", rows, "by_label")])
    shown = worst_attack.table(panel, {"honest_alone": [88.0], "samples_alone": [70.0]})
    assert "| mine | **50.0** | ipm | 90.0 | 2 of 2 |" in shown
    assert "| new | **60.0** | ipm | 80.0 | 1 of 2 |" in shown
    assert shown.index("| new") < shown.index("| mine")
    assert "goal without trusted samples 60.0; with them 84.0." in shown
    worst_attack.write_matrix(tmp_path / "all.csv", [panel])
    assert "mnist,linear,by_label,mine,alie,70.00,70.00,70.00,1" in (tmp_path / "all.csv").read_text().splitlines()


def test_a_page_gets_new_tables_and_keeps_its_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- /tables -->\nafter\n")
    for _ in range(2):
        worst_attack.put(page, "tables", "new")
    assert page.read_text() == "before\n<!-- tables -->\n\nnew\n<!-- /tables -->\nafter\n"
    with pytest.raises(SystemExit, match="has no comments"):
        worst_attack.put(page, "bound", "new")


def test_studies_of_other_rules_share_a_panel(tmp_path: Path) -> None:
    first = written(tmp_path / "study-a", [("mine", "ipm", "done", 0.5)])
    other = written(tmp_path / "study-b", [("yours", "ipm", "done", 0.4)])
    network = written(tmp_path / "study-network", [("mine", "ipm", "done", 0.3)])
    panels = worst_attack.studied([first, other, network])
    assert [panel.name for panel in panels] == ["mnist, linear, iid", "mnist, network, iid"]
    assert set(panels[0].accuracy) == {"mine", "yours"}


def test_what_was_found_before_stays_beside_a_new_study(tmp_path: Path) -> None:
    rows = [("mine", "ipm", "done", 0.5), ("mine", "alie", "done", 0.3)]
    (new,) = worst_attack.studied([written(tmp_path / "study-text", rows)])
    before = {
        "trec, linear, dirichlet 0.1": {"accuracy": {"mine": {"ipm": [1.0]}}},
        "mnist, SmolLM2-135M, iid": {"accuracy": {"mine": {"ipm": [2.0]}, "yours": {"ipm": [3.0]}}},
    }
    panels = {panel.name: panel.accuracy for panel in worst_attack.joined(before, [new])}
    assert panels == {
        "trec, linear, dirichlet 0.1": {"mine": {"ipm": [1.0]}},
        "mnist, SmolLM2-135M, iid": {"mine": {"ipm": [50.0], "alie": [30.0]}, "yours": {"ipm": [3.0]}},
    }


@pytest.mark.slow
def test_a_study_is_set_beside_the_honest_clients_and_the_trusted_samples_alone(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(data=write_digits(tmp_path / "data")))
    study = [sys.executable, "-m", "cyber0", "study", "small.toml", "--out", "study", "--workers", "1", "--quiet"]
    subprocess.run(study, check=True, cwd=tmp_path)
    (panel,) = worst_attack.studied([tmp_path / "study"])
    beside = worst_attack.lines_to_beat(panel, {})
    assert {name: len(found) for name, found in beside.items()} == {"honest_alone": 1, "samples_alone": 1}
    assert worst_attack.lines_to_beat(panel, {"honest_alone": [1.0], "samples_alone": [2.0]}) == {
        "honest_alone": [1.0], "samples_alone": [2.0],
    }  # fmt: skip


def test_the_least_loss_in_the_worse_world_is_the_one_that_a_search_finds() -> None:
    v, d = np.array([0.3, 0.2, 0.4]), np.array([1.0, 0.5, 0.0])
    grid = [np.array(p) for p in itertools.product(np.linspace(0, 1, 41), repeat=3)]
    searched = min(max(float(v @ (1 - p)), float(v @ (d * p))) for p in grid)
    assert heterogeneity.least_loss(v, d) == pytest.approx(searched, abs=0.01)
    assert heterogeneity.least_loss(v, d) <= searched


def test_who_alone_holds_a_class_can_be_denied_half_of_it() -> None:
    counts = np.eye(4, dtype=np.int64) * 100
    found = heterogeneity.disputes(counts, np.array([1, 2, 3]), 1, np.array([0.0, 0.2, 0.3, 0.1]))
    assert found.group == (2,) and found.cost == pytest.approx(0.15)
    assert found.other.tolist() == [0, 0, 1, 0]


def test_alike_clients_leave_nothing_to_dispute() -> None:
    counts = np.full((12, 10), 50)
    assert heterogeneity.disputes(counts, np.arange(3, 12), 3, np.full(10, 0.09)).cost == 0


def test_a_class_in_dispute_gets_the_label_of_the_next_one() -> None:
    assert heterogeneity.relabelled(np.array([1, 3]), 4).tolist() == [0, 3, 2, 1]
    assert heterogeneity.relabelled(np.array([3]), 4).tolist() == [0, 1, 2, 0]


def test_a_trained_rule_does_not_beat_the_bound_in_both_worlds(tmp_path: Path) -> None:
    settings = [f"task.data={write_digits(tmp_path / 'data')}", "federation.partition=by_label", "method.k=32",
                "method.batch_size=16", "method.lr=0.003"]  # fmt: skip
    found = heterogeneity.measured(settings, ["trimmed_mean"], rounds=40, every=20)
    assert [row["round"] for row in found["gradients"]] == [0, 20, 40]
    assert found["bound"] < found["honest_alone"] and found["in_dispute"]
    assert min(found["worlds"]["trimmed_mean"]) < found["bound"] + 1
    json.dumps(found)
