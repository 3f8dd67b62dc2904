"""benchmarks/heads.py prints the tables that docs/measured/heads.md has."""

from __future__ import annotations

from pathlib import Path

import heads

ROOT = Path(__file__).parent.parent
NAMES = {"trec": "TREC", "snli": "SNLI", "sst2": "SST-2"}


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    page = (ROOT / "docs/measured/heads.md").read_text(encoding="utf-8").splitlines()
    results = ROOT / "docs" / "results"
    tables = heads.rates(results / "head_rates.csv") + heads.optimizers(results / "head_optimizers.csv")
    assert len(tables) == 2 * 2 + 2 * 3 * 8
    for line in tables:
        name = line.split("|")[1].strip()
        assert line.replace(f"| {name} |", f"| {NAMES.get(name, name)} |", 1) in page
