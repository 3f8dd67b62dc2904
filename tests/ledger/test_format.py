"""docs/FORMAT.md: the vectors, the library and a second implementation written from that page agree to the bit."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import format_vectors
import independent_format
import pytest

DOCUMENT = format_vectors.FILE.with_name("FORMAT.md")
VECTORS: list[dict[str, Any]] = json.loads(format_vectors.FILE.read_text())["cases"]
NAMES = [f"{case['section']}-{number}" for number, case in enumerate(VECTORS)]


@pytest.mark.slow
@pytest.mark.parametrize("case", VECTORS, ids=NAMES)
def test_the_library_gives_the_vectors(case: dict[str, Any]) -> None:
    assert format_vectors.by_library(case) == case["expect"]


@pytest.mark.slow
@pytest.mark.parametrize("case", VECTORS, ids=NAMES)
def test_an_implementation_from_the_document_gives_the_vectors(case: dict[str, Any]) -> None:
    assert independent_format.by_hand(case) == case["expect"]


def test_the_file_holds_every_case_and_no_other() -> None:
    asked = [{key: value for key, value in case.items() if key != "expect"} for case in VECTORS]
    assert asked == json.loads(json.dumps(format_vectors.cases()))
    assert {case["section"] for case in VECTORS} == set(format_vectors.SECTIONS) == set(independent_format.SECTIONS)


@pytest.mark.slow
def test_the_second_implementation_takes_nothing_from_the_library() -> None:
    tree = ast.parse(Path(independent_format.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    allowed = {"__future__", "collections", "fractions", "hashlib", "json", "math", "numpy", "struct", "typing", "zlib"}
    assert imported <= allowed


def test_the_document_names_the_constants_of_the_code() -> None:
    from cyber0.directions import Stream, definition, philox
    from cyber0.ledger import FORMAT, MAGIC, Header
    from cyber0.ledger.header import DEFINITIONS
    from cyber0.ledger.reports import REPORTS_MAGIC

    text = DOCUMENT.read_text()
    for number in (*philox.MULTIPLIERS, *philox.KEY_INCREMENTS):
        assert f"0x{number:08X}" in text
    for coefficient in re.findall(r"-?0x1\.[0-9a-f]+p-?\d+", text)[:4]:
        assert float.fromhex(coefficient) in definition.POLYNOMIAL
    assert f"{definition.BYTE_CENTRE}" in text and "53 b0 + 97 b1 + 121 b2 + 127 b3 + 199" in text
    assert MAGIC == b"CYBER0\x00" and FORMAT == 2 and "# Formats, version 2" in text
    assert all(f'"{name}"' in text for names in DEFINITIONS.values() for name in names)
    assert {version for names in DEFINITIONS.values() for version in names.values()} == {1}
    assert REPORTS_MAGIC.decode().replace("\n", "\\n") in text
    assert all(f"{int(stream)} " in text for stream in Stream)
    assert all(f"`{name}`" in text for name in Header.__dataclass_fields__)
