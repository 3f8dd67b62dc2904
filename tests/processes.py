"""Federators and clients as processes, for tests of what survives a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE = 240.0  # seconds; nothing here takes a tenth of that on an idle machine


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something to become true, and return it."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


class Process:
    """`cyber0 ARGUMENTS` in a process of its own; its JSON log can be read while it runs."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        self._error = log.open("ab")
        self._output = log.with_suffix(".out").open("ab")
        self._skip = log.stat().st_size
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cyber0", *map(str, arguments), "--log-json"],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._error, env=environment,
        )  # fmt: skip

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what this process has logged under that name."""
        lines = self.log.read_bytes()[self._skip :].splitlines()
        found = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
        return [event for event in found if event["event"] == name]

    def await_event(self, name: str) -> dict[str, Any]:
        """Wait until the process has logged such an event, and return the first."""

        def logged() -> list[dict[str, Any]]:
            assert self.process.poll() in (None, 0), self.log.read_text()
            return self.events(name)

        event: dict[str, Any] = until(logged, f"{name} in {self.log}")[0]
        return event

    def output(self) -> str:
        """Wait for the end and return what was printed."""
        code = self.process.wait(PATIENCE)
        assert code == 0, (code, self.log.read_text())
        return self.log.with_suffix(".out").read_text()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end."""
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._error.close()
        self._output.close()


@contextlib.contextmanager
def many_processes(folder: Path) -> Iterator[Callable[..., Process]]:
    """Start processes by `start(name, *arguments)`; all have ended when this does."""
    started: list[Process] = []

    def start(name: str, *arguments: object) -> Process:
        started.append(Process(folder / f"{name}.log", *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.close()


def write_digits(folder: Path, samples: int = 300, tests: int = 100) -> Path:
    """Write something like MNIST, small and easy: each digit is a pattern under noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 256, (10, 784))
    for name, count in (("train", samples), ("t10k", tests)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        noisy = np.clip(patterns[labels] + rng.normal(0, 60, (count, 784)), 0, 255).astype(np.uint8)
        head = bytes([0, 0, 8, 3]) + count.to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + noisy.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + labels.tobytes()
        )
    return folder
