"""`cyber0 new`: what it writes runs as it is, and it overwrites nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command, refused

from cyber0.cli import new

FILES = ["README.md", "config.toml", "task.py", "test_task.py"]


@pytest.mark.parametrize(
    ("name", "task"),
    [("spam", "Spam"), ("spam-filter", "SpamFilter"), ("my_2nd_task", "My2ndTask"), ("HTMLPages", "HTMLPages"),
     ("a-", "A")],
)  # fmt: skip
def test_the_class_is_named_after_the_task(name: str, task: str) -> None:
    assert new.class_name(name) == task


@pytest.mark.slow
def test_what_is_written_learns_and_passes_its_tests_as_it_is(cyber0: Command) -> None:
    answer = cyber0("new", "spam-filter", "--json")
    assert answer.code == 0 and json.loads(answer.out)["task"] == "SpamFilter"
    folder = Path("spam-filter").absolute()
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert not any("@" in path.read_text() for path in folder.iterdir())
    command = [sys.executable, "-m", "cyber0", "run", "config.toml", "--json"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["final_accuracy"] > 0.9
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=folder,
                           capture_output=True, text=True, timeout=300)  # fmt: skip
    assert tests.returncode == 0 and "3 passed" in tests.stdout, tests.stdout


@pytest.mark.slow
def test_what_is_written_is_formatted_like_this_package(cyber0: Command) -> None:
    pytest.importorskip("ruff")
    cyber0("new", "spam")
    root = Path(__file__).parents[2]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "--config", root / "pyproject.toml", "."],
                              cwd="spam", capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_of_the_readme_are_commands(cyber0: Command) -> None:
    assert cyber0("new", "spam", "--out", "deep/folder").out.endswith("cd deep/folder && cyber0 run config.toml\n")
    text = Path("deep/folder/README.md").read_text()
    for line in (line for line in text.splitlines() if line.startswith("cyber0 ")):
        assert cyber0(line.split()[1], "--help").code == 0


@pytest.mark.parametrize("name", ["", "2nd", "a b", "../up", "a/b", "-x", "naïve", "none", "true", "_"])
def test_a_name_that_can_be_no_folder_and_class_is_refused(name: str, cyber0: Command) -> None:
    refused(cyber0("new", "--", name), f"NAME = {name!r}")
    assert not list(Path().iterdir())


def test_nothing_is_overwritten(cyber0: Command) -> None:
    Path("spam").mkdir()
    Path("spam/task.py").write_text("mine")
    refused(cyber0("new", "spam"), "spam already exists")
    assert [path.name for path in Path("spam").iterdir()] == ["task.py"] and Path("spam/task.py").read_text() == "mine"
    Path("file").write_text("mine")
    refused(cyber0("new", "spam", "--out", "file"), "file already exists")
    Path("empty").mkdir()
    assert cyber0("new", "spam", "--out", "empty").code == 0
