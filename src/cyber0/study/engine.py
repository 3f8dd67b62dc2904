"""Plays many runs over worker processes, and goes on where it stopped.

Every cell is an ordinary run in OUT/runs/, so whatever happens to a worker or to the study, what was played is kept: a
finished cell is not played again, a half-done one is gone on with.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cyber0
from cyber0.config import to_dict
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.study.cells import COLUMNS, Cell, Result, read_figures, write_csv

try:
    import fcntl
except ImportError:  # not on this system: two studies in one folder are then not told apart
    fcntl = None  # type: ignore[assignment]

RESULTS, RUNS, LOG, LOCK = "results.csv", "runs", "workers.log", ".lock"
WORKER = (sys.executable, "-P", "-m", "cyber0.study.worker")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "CYBER0_THREADS")
TRIES = 2  # of a cell whose worker dies: once may be somebody's kill, twice is the cell's own doing
SECONDS_FOR_LOCK = 5.0  # the workers of a study that was killed need a moment to notice


class StudyError(Cyber0Error):
    """A study can't be run at all."""


@dataclass(frozen=True)
class Running:
    """How far a worker has come with its cell."""

    cell: Cell
    round: int
    rounds: int
    accuracy: float | None


@dataclass(frozen=True)
class StudyProgress:
    """What a display needs to know."""

    cells: int
    done: int
    found: int
    """How many of those were done before this call."""
    failed: int
    running: list[Running]
    seconds_left: float | None
    ended: Result | None
    """The cell that has just ended, if one has."""


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Study:
    """Many runs in one folder.

    Args:
        cells: What to run. All have the same axes; the results come in this order.
        out: The folder; runs that it already holds are not played again.
        workers: How many processes, each with one thread; by default one a core, and one in all on a GPU.
    """

    def __init__(self, cells: Sequence[Cell], out: Path, workers: int | None = None) -> None:
        if not cells:
            raise ConfigError("a study without cells has nothing to run")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers = {workers} is impossible; use at least 1")
        columns = list(cells[0].axes)
        if any(list(cell.axes) != columns for cell in cells):
            raise ConfigError(f"the cells of a study must have the same axes; the first has {', '.join(columns)}")
        self.cells, self.out = list(cells), Path(out)
        on_gpu = any(cell.config.device != "cpu" for cell in cells)
        self.workers = workers or (1 if on_gpu else available_cores())

    def finished(self) -> int:
        """Return how many cells need not be played any more."""
        folders = self._folders()
        return sum(read_figures(cell, folders[cell.digest]) is not None for cell in self.cells)

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
            results = _Results(self.cells, self._folders())
            try:
                if results.open:
                    with (self.out / LOG).open("ab") as log:
                        _Floor(results, min(self.workers, len(results.open)), log, lock, progress).work()
            finally:
                listed = results.listed(self.out)
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


class _Results:
    """What is known of the cells. Cells with the same settings are one run."""

    def __init__(self, cells: Sequence[Cell], folders: dict[str, Path]) -> None:
        self.cells, self.folders = cells, folders
        self.figures: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.open: deque[Cell] = deque()
        for cell in {cell.digest: cell for cell in reversed(cells)}.values():
            known = read_figures(cell, folders[cell.digest])
            if known is None:
                self.open.appendleft(cell)
            else:
                self.figures[cell.digest] = known
        self.found = self.count(self.figures)

    def count(self, digests: dict[str, Any]) -> int:
        return sum(cell.digest in digests for cell in self.cells)

    def of(self, cell: Cell, folder: str) -> Result:
        if cell.digest in self.figures:
            return Result(cell, "done", folder, self.figures[cell.digest])
        if cell.digest in self.errors:
            return Result(cell, "failed", folder, {}, self.errors[cell.digest])
        return Result(cell, "open", folder, {})

    def listed(self, out: Path) -> list[Result]:
        return [self.of(cell, self.folders[cell.digest].relative_to(out).as_posix()) for cell in self.cells]


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    cell: Cell | None = None
    ready: bool = False
    round: int = 0
    begun_at: int = 0
    """The round from which this worker went on."""
    accuracy: float | None = None

    def give(self, cell: Cell, folder: Path) -> None:
        self.cell, self.round, self.begun_at, self.accuracy = cell, -1, 0, None
        job = {"folder": str(folder), "config": to_dict(cell.config)}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # a worker that has died is noticed by the end of its answers
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()


class _Floor:
    """Where the workers work."""

    def __init__(
        self, results: _Results, workers: int, log: IO[bytes], lock: int | None,
        progress: Callable[[StudyProgress], None],
    ) -> None:  # fmt: skip
        self._results, self._wanted, self._log, self._progress = results, workers, log, progress
        self._kept_open = () if lock is None else (lock,)
        self._messages: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._deaths: dict[str, int] = {}
        self._stillborn = 0
        self._rounds_played = 0
        self._started = time.monotonic()

    def work(self) -> None:
        """Play all open cells. The first worker leads: data that must be fetched is fetched once."""
        try:
            self._hire()
            self._show(None)
            while self._workers:
                worker, message = self._messages.get()
                ended = self._lost(worker) if message is None else self._heard(worker, message)
                self._show(ended)
        finally:
            self._dismiss()

    def _hire(self) -> None:
        environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
        home = str(Path(cyber0.__file__).parents[1])  # the workers run the code that this process runs
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        # In a session of their own, an interrupt from the terminal reaches this process alone, which then stops them.
        process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                   env=environment, start_new_session=True, pass_fds=self._kept_open)  # fmt: skip
        worker = _Worker(process)
        self._workers.append(worker)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            if line.endswith(b"\n"):
                self._messages.put((worker, json.loads(line)))
        self._messages.put((worker, None))

    def _heard(self, worker: _Worker, message: dict[str, Any]) -> Result | None:
        ended = None
        if "ready" in message:
            worker.ready = True
        elif "round" in message:
            if worker.round < 0:
                worker.begun_at = message["round"]
            worker.round, worker.accuracy = message["round"], message["accuracy"]
            while len(self._workers) < self._wanted and len(self._results.open) > self._idle():
                self._hire()
        else:
            ended = self._end(worker, message.get("failed"))
        if worker.cell is None:
            self._next(worker)
        return ended

    def _idle(self) -> int:
        return sum(worker.cell is None for worker in self._workers)

    def _next(self, worker: _Worker) -> None:
        if self._results.open:
            cell = self._results.open.popleft()
            worker.give(cell, self._results.folders[cell.digest])
        elif worker.process.stdin and not worker.process.stdin.closed:
            worker.process.stdin.close()  # and so it ends

    def _end(self, worker: _Worker, error: str | None) -> Result:
        cell, results = worker.cell, self._results
        assert cell is not None
        folder = results.folders[cell.digest]
        figures = read_figures(cell, folder) if error is None else None
        if figures is not None:
            results.figures[cell.digest] = figures
            self._rounds_played += cell.config.rounds - worker.begun_at
        else:
            results.errors[cell.digest] = " ".join((error or f"{folder} lacks what a finished run has").split())
        worker.cell = None
        return results.of(cell, str(folder))

    def _lost(self, worker: _Worker) -> Result | None:
        """A worker has ended, by itself or by force: its cell is played by another."""
        self._workers.remove(worker)
        code = worker.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not worker.ready:
            self._stillborn += 1
            if code >= 0 or self._stillborn > TRIES:
                raise StudyError(f"a worker could not start ({how}); {self._log.name} says why")
        ended, cell = None, worker.cell
        if cell is not None:
            self._deaths[cell.digest] = self._deaths.get(cell.digest, 0) + 1
            if self._deaths[cell.digest] < TRIES:
                worker.cell = None
                self._results.open.appendleft(cell)
            else:
                ended = self._end(worker, f"its worker process died twice ({how}); out of memory? try fewer --workers")
        if self._results.open and len(self._workers) < self._wanted:
            self._hire()
        return ended

    def _show(self, ended: Result | None) -> None:
        results = self._results
        busy = [(w, w.cell) for w in self._workers if w.cell is not None]
        self._progress(
            StudyProgress(
                cells=len(results.cells),
                done=results.count(results.figures),
                found=results.found,
                failed=results.count(results.errors),
                running=[Running(c, max(w.round, 0), c.config.rounds, w.accuracy) for w, c in busy],
                seconds_left=self._seconds_left(),
                ended=ended,
            )
        )

    def _seconds_left(self) -> float | None:
        """Guess from the rounds played so far, as if every round took equally long."""
        busy = [w for w in self._workers if w.cell is not None]
        played = self._rounds_played + sum(max(w.round, w.begun_at) - w.begun_at for w in busy)
        left = sum(w.cell.config.rounds - max(w.round, 0) for w in busy if w.cell is not None)
        left += sum(cell.config.rounds for cell in self._results.open)
        return (time.monotonic() - self._started) * left / played if played else None

    def _dismiss(self) -> None:
        """Stop whoever still works: at the end nobody, after an interrupt all."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


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
