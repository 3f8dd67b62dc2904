"""The study of rules under their worst attacks: its file is valid, and benchmarks/worst_attack.py makes its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cyber0.config.registry import ATTACKS
from cyber0.study.grid import read_plan

ROOT = Path(__file__).parent.parent


def test_the_study_runs_every_defence_under_every_attack() -> None:
    cells = read_plan(ROOT / "examples/worst_attack.toml").cells
    assert len(cells) == 330
    assert {cell.config.federation.attack for cell in cells} <= set(ATTACKS)


@pytest.mark.mnist
def test_the_table_shows_each_defence_by_its_worst_attack(tmp_path: Path) -> None:
    rows = [("none", 0.9), ("ipm", 0.5), ("alie", 0.7)]
    lines = [f"iid,{attack},mine,0,{accuracy}" for attack, accuracy in rows]
    header = "federation.partition,federation.attack,defence,seed,final_accuracy"
    (tmp_path / "results.csv").write_text("\n".join([header, *lines]) + "\n")
    script = [sys.executable, str(ROOT / "benchmarks/worst_attack.py"), str(tmp_path), "--rounds", "2", "--seeds", "1"]
    done = subprocess.run(
        [*script, "--json", str(tmp_path / "out.json")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "| mine | **50.0** (ipm) | 90.0 | 70.0 | 50.0 |" in done.stdout
    stored = json.loads((tmp_path / "out.json").read_text())
    assert len(stored["samples_alone"]) == 1 and len(stored["honest_alone"]["iid"]) == 1
