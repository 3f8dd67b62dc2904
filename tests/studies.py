"""What the tests of studies share: a grid, cells, and the command."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from cyber0.cli import main as cli
from cyber0.config.schema import Config
from cyber0.study import Cell, read_plan

GRID = """
rounds = 2
[study]
seeds = 2
[study.grid]
aggregation.rule = ["mean", "krum"]
federation.attack = ["none", "alie", "ipm"]
"""


def plan_of(text: str) -> Any:
    Path("s.toml").write_text(text)
    return read_plan("s.toml")


def cells_of(*overrides: str, rules: tuple[str, ...] = ("mean", "krum"), seeds: int = 2) -> list[Cell]:
    return [
        Cell({"rule": rule}, Config().with_overrides([*overrides, f"aggregation.rule={rule}", f"seed={seed}"]))
        for rule in rules
        for seed in range(seeds)
    ]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cyber0", "study", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code if isinstance(stop.value.code, int) else 0
