"""What the tests of runs share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from finished_runs import SETTINGS
from own_task_home import HERE, write_config
from synthetic import own_config

from cyber0.runs.run import Run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    Run.start(own_config(*SETTINGS), folder).run()
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: a task, and a config beside it that names it."""
    shutil.copy(HERE / "own_tasks.py", tmp_path / "my_task.py")
    write_config(tmp_path, "my_task.py:Pictures", "options = {width = 3}")
    return tmp_path


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)
