"""Plays many runs over worker processes, and goes on where it stopped.

Every cell is an ordinary run in OUT/runs/, so whatever happens to a worker or to the study, what was played is kept: a
finished cell is not played again, a half-done one is gone on with.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cyber0.errors import ConfigError
from cyber0.study.cells import COLUMNS, Cell, Result, Results, read_figures, write_csv
from cyber0.study.floor import Floor, StudyProgress

try:
    import fcntl
except ImportError:  # not on this system: two studies in one folder are then not told apart
    fcntl = None  # type: ignore[assignment]

RESULTS, RUNS, COPY, LOG, LOCK = "results.csv", "runs", "study.toml", "workers.log", ".lock"
SECONDS_FOR_LOCK = 5.0  # the workers of a study that was killed need a moment to notice


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Study:
    """Many runs in one folder.

    Args:
        cells: What to run. All have the same axes; the results come in this order.
        out: The folder; runs that it already holds are not played again.
        workers: How many processes; by default one a core, and one in all on a GPU.
        source: The file that the cells come from; a copy is kept in the folder.
        threads: Of each process.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        out: Path,
        workers: int | None = None,
        source: bytes | None = None,
        *,
        threads: int = 1,
    ) -> None:
        if not cells:
            raise ConfigError("a study without cells has nothing to run")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers = {workers} is impossible; use at least 1")
        columns = list(cells[0].axes)
        if any(list(cell.axes) != columns for cell in cells):
            raise ConfigError(f"the cells of a study must have the same axes; the first has {', '.join(columns)}")
        self.cells, self.out, self._source, self._threads = list(cells), Path(out), source, threads
        on_gpu = any(cell.config.device != "cpu" for cell in cells)
        self.workers = workers or (1 if on_gpu else available_cores())

    def finished(self) -> int:
        """Return how many cells need not be played any more."""
        folders = self._folders()
        return sum(read_figures(cell, folders[cell.digest]) is not None for cell in self.cells)

    def results(self) -> list[Result]:
        """Return what is known of every cell, in the order of the cells, without playing any."""
        return Results(self.cells, self._folders(), self.out).listed()

    def play(self, progress: Callable[[StudyProgress], None] = lambda _: None) -> list[Result]:
        """Play what is left, write results.csv, and return the result of every cell in the order of the cells.

        A cell that fails is in the results with its error, and the others go on. An interrupt stops the workers and
        leaves what is done; the same call goes on from there.
        """
        self._check_device()
        try:
            (self.out / RUNS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.out} can't be made: {error.strerror}") from None
        with _locked(self.out) as lock:
            if self._source is not None:
                (self.out / COPY).write_bytes(self._source)
            results = Results(self.cells, self._folders(), self.out)
            try:
                if results.open:
                    with (self.out / LOG).open("ab") as log:
                        workers = min(self.workers, len(results.open))
                        Floor(results, workers, log, lock, progress, self._threads).work()
            finally:
                listed = results.listed()
                write_csv(self.out / RESULTS, [*self.cells[0].axes, *COLUMNS], [result.row() for result in listed])
                if (self.out / LOG).exists() and not (self.out / LOG).stat().st_size:
                    (self.out / LOG).unlink()
        return listed

    def _check_device(self) -> None:
        for device in {cell.config.device for cell in self.cells} - {"cpu"}:
            from cyber0.simulation import check_device  # loads torch

            check_device(device)

    def _folders(self) -> dict[str, Path]:
        """Return the folder of each run, by digest; one from before is found also if the axes had other names."""
        runs = self.out / RUNS
        there = {path.name.rpartition("-")[2]: path for path in sorted(runs.iterdir())} if runs.is_dir() else {}
        return {cell.digest: there.get(cell.digest, runs / cell.folder_name) for cell in self.cells}


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[int | None]:
    """Keep a second study out of the folder.

    The workers inherit the lock (the descriptor that is yielded): should this process be killed, the folder is free
    when the last of them has noticed.
    """
    if fcntl is None:
        yield None
        return
    with (out / LOCK).open("w") as file:
        give_up = time.monotonic() + SECONDS_FOR_LOCK
        while True:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    raise ConfigError(
                        f"{out} is being worked on by another process; wait for it, or choose another --out"
                    ) from None
                time.sleep(0.1)
        yield file.fileno()
