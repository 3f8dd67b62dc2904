"""docs/ARCHITECTURE.md and the tree agree: the layers, the rooms, the tests that it names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/cyber0"
PAGE = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The page from a title to the next of its rank."""
    marks = re.match(r"#+", title)[0]  # type: ignore[index]
    _, _, rest = PAGE.partition(f"{title}\n")
    assert rest, f"there is no section {title!r}"
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_layers_of_the_page_are_those_that_import_linter_checks() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [layer.split(" | ") for layer in contract["layers"]]
    table = rows(section("## Overview").partition("### ")[0])
    assert [re.findall(r"`(\w+)`", layer) for layer, _ in table] == checked
    assert contract["ignore_imports"] == ["cyber0 -> cyber0.**"], "an edge points upward"


def test_every_room_is_a_layer_and_has_a_section_and_a_docstring() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    headings = {name.strip() for line in re.findall(r"^## (.*)$", PAGE, flags=re.M) for name in line.split(",")}
    assert rooms <= headings
    for room in sorted(rooms):
        assert (PACKAGE / room / "__init__.py").read_text().startswith('"""'), room


def test_there_are_at_most_six_modules_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def test_tests_lie_in_folders_like_the_source() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert folders <= {path.stem for path in PACKAGE.iterdir()}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"tests/[\w/]+(?:\.py)?(?:::\w+)?", PAGE))))
def test_a_test_that_the_page_names_exists(path: str) -> None:
    file, _, name = path.partition("::")
    assert (ROOT / file).exists()
    assert not name or re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), flags=re.M)


def test_every_row_of_what_a_change_should_touch_names_a_test() -> None:
    table = rows(section("### What a change should touch"))
    assert len(table) == 7
    for change, _, shown in table:
        assert "tests/" in shown, f"{change}: by which test is it shown?"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[\w]+/)*\w+\.py)`", PAGE))))
def test_a_module_that_the_page_names_exists(name: str) -> None:
    assert list(PACKAGE.rglob(name)), f"no file of the package ends in {name}"
