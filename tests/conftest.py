"""Settings and fixtures of all tests: what hypothesis tries is the same in every run, and never limited by time."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from commands import Answer, Command

# Threads of torch that wait for each other spin, and so take the time of the test that runs beside this one: 47 s of
# processor time instead of 29 for tests/estimate and the Trainer's. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("COLUMNS", None)  # of the terminal, or of pytest-xdist: tables would be cut to it

settings.register_profile("cyber0", derandomize=True, deadline=None)
settings.load_profile("cyber0")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command `cyber0`, run in this process."""
    from commands import Answer

    from cyber0.cli.main import main

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["cyber0", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())

    return call


@pytest.fixture
def folder_without_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no pictures: they take longer than small runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("accuracy_picture", "loss_picture", "suspects_picture", "partition_picture"):
        monkeypatch.setattr(f"cyber0.report.plots.{name}", lambda *_, **__: None)
    return tmp_path


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA GPU on this machine")
