"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAST, Command
from synthetic import one_thread  # noqa: F401


@pytest.fixture
def cyber0(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command, run in this process in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return command


@pytest.fixture
def run(cyber0: Command) -> Path:
    """A finished run."""
    answer = cyber0("run", *FAST, "--out", "run", "--quiet")
    assert answer.code == 0, answer.err
    return Path("run")
