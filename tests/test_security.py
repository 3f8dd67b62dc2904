"""docs/SECURITY.md names a test for every line of its tables, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_\w+)`")


def test_every_line_of_the_threat_model_names_its_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    heads = {rows[0], *(row for row in rows if row.endswith("| test |"))}
    untested = [row for row in rows if row not in heads and not NAMED.search(row)]
    assert len(rows) > 40 and untested == []


def test_the_tests_that_the_threat_model_names_exist() -> None:
    named = NAMED.findall(PAGE)
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (TESTS / file).read_text()]
    assert len(named) > 50 and missing == []
