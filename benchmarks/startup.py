"""How soon the command line answers, and the first round is run, in fresh processes.

python benchmarks/cpu.py --only start-up
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import Figure

_FIRST_ROUND = """
import sys, time
begin = time.perf_counter()
import torch
imported = time.perf_counter()
from pathlib import Path
from cyber0.config.files import load
from cyber0.runs.run import Run
run = Run.start(load(None, sys.argv[2:]), Path(sys.argv[1]))
run.simulation.run_round()
print(imported - begin, time.perf_counter() - imported)
"""


def start_up(quick: bool) -> Iterator[Figure]:
    """`cyber0 --help`, a refused config, and the first round after torch was imported."""
    repeats = 2 if quick else 5
    for name, arguments, status in (
        ("cyber0 --help", ["--help"], 0),
        ("a refused config", ["run", "--set", "method.kk=1"], 2),
    ):
        times = [_answer(arguments, status) for _ in range(repeats + 1)][1:]
        yield Figure(name, statistics.median(times), "s", 0.5)
    runs = [first_round() for _ in range(repeats + 1)][1:]  # the first may still compile kernels
    torch_import, first_round = (statistics.median(column) for column in zip(*runs, strict=True))
    yield Figure("import torch", torch_import, "s")
    yield Figure("from then to the end of the first round", first_round, "s", 1.0, note="kernels cached")


def _answer(arguments: list[str], status: int) -> float:
    """Return the seconds that the command takes."""
    script = Path(sys.executable).with_name("cyber0")
    plain = [sys.executable, "-c", "from cyber0.cli.main import main; main()"]
    begin = time.perf_counter()
    done = subprocess.run([*([str(script)] if script.exists() else plain), *arguments], capture_output=True, text=True)
    taken = time.perf_counter() - begin
    if done.returncode != status:
        raise RuntimeError(f"cyber0 {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    return taken


def first_round(*overrides: str) -> tuple[float, float]:
    """Return the seconds of importing torch, and from there to the end of the first round, in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _FIRST_ROUND, folder, *overrides]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the first round failed: {done.stderr.strip()[-200:]}")
    torch_import, first_round = (float(word) for word in done.stdout.split()[-2:])
    return torch_import, first_round
