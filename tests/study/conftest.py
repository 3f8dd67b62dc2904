"""Fixtures of the tests of studies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import quick_worker
from synthetic import one_thread  # noqa: F401

from cyber0.study import worker_pool


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the workers by ones that train nothing, and return the file in which they log the cells they got."""
    monkeypatch.setattr(worker_pool, "WORKER", (sys.executable, quick_worker.__file__))
    monkeypatch.setenv("RUN_LOG", str(here / "run_log"))
    (here / "run_log").touch()
    return here / "run_log"
