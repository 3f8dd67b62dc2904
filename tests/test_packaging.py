"""What is shipped: one version, the files that the tests of the source archive need, and pages that agree with them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import cyber0

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_written_in_one_place() -> None:
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "cyber0.__version__"}
    assert "version:" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8").replace("cff-version:", "")


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert versions[0] == cyber0.__version__


def test_what_the_tests_need_is_in_the_source_archive() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    grafted = set(re.findall(r"^graft (\S+)", manifest, flags=re.M))
    included = {name for line in re.findall(r"^include (.*)$", manifest, flags=re.M) for name in line.split()}
    assert {"tests", "docs", "examples", "benchmarks"} <= grafted
    assert all((ROOT / name).exists() for name in grafted | included)
    pages = {path.name for path in ROOT.glob("*.md")} - {"README.md"}
    assert pages <= included, "a page at the top is not shipped"


@pytest.mark.parametrize("pattern", PROJECT["tool"]["setuptools"]["package-data"]["cyber0"])
def test_data_of_the_package_is_where_the_wheel_looks_for_it(pattern: str) -> None:
    assert list((ROOT / "src/cyber0").glob(pattern))


def test_every_python_of_the_classifiers_is_tested_by_the_workflow() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    named = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert named and named <= set(re.findall(r'"(3\.\d+)"', workflow))
    oldest = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    assert f"torch=={oldest.removeprefix('torch>=')}.*" in workflow


def test_the_citation_names_the_authors_of_the_paper_in_its_order() -> None:
    names = re.findall(r"family-names: (.*)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert names == ["de Sá Delgado Neto", "Egger", "Bakshi", "Bitar"]


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/CLI.md", "docs/RELEASING.md", "CONTRIBUTING.md"])
def test_files_that_a_page_links_to_exist(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target
