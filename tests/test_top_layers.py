"""benchmarks/top_layers.py prints the tables that docs/measured/top_layers.md has."""

from __future__ import annotations

import csv
from pathlib import Path

import top_layers

ROOT = Path(__file__).parent.parent
NAMES = {"trec": "TREC", "sst2": "SST-2"}


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    page = (ROOT / "docs/measured/top_layers.md").read_text(encoding="utf-8").splitlines()
    with top_layers.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tables = [*top_layers.searched(rows), *top_layers.compared(rows), *top_layers.with_few_labels(rows)]
    assert len(tables) == 2 + 18 + 2 + 6 + 2 + 6
    for line in tables:
        name = line.split("|")[1].strip()
        assert line.replace(f"| {name} |", f"| {NAMES.get(name, name)} |", 1) in page
