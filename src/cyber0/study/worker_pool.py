"""The worker processes of a study: each runs one cell after the other, and may die at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cyber0
from cyber0.config.schema import to_dict
from cyber0.errors import Cyber0Error
from cyber0.study.cells import Cell, Result, Results, read_figures

WORKER = (sys.executable, "-P", "-m", "cyber0.study.worker")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "CYBER0_THREADS")
TRIES = 2  # of a cell whose worker dies: once may be a kill from outside, twice is the cell's own fault


class StudyError(Cyber0Error):
    """A study can't be run at all."""


@dataclass(frozen=True)
class Running:
    """The progress of a worker with its cell."""

    cell: Cell
    round: int
    rounds: int
    accuracy: float | None


@dataclass(frozen=True)
class StudyProgress:
    """The progress of a study, for a display."""

    cells: int
    done: int
    found: int
    """How many of those were done before this call."""
    failed: int
    running: list[Running]
    seconds_left: float | None
    ended: Result | None
    """The result of the cell that has just ended, if one has."""


@dataclass(eq=False)
class Worker:
    """A process, and the cell it is running."""

    process: subprocess.Popen[bytes]
    cell: Cell | None = None
    ready: bool = False
    round: int = 0
    first_round: int = 0
    """The round from which this worker resumed its cell."""
    since: float = 0.0
    """When it did, by the monotonic clock."""
    accuracy: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether it can be handed a cell."""
        stdin = self.process.stdin
        return self.ready and self.cell is None and stdin is not None and not stdin.closed

    @property
    def rounds_run(self) -> int:
        """How many rounds of its cell it has run."""
        return max(self.round, self.first_round) - self.first_round

    @property
    def seconds(self) -> float:
        """How long that took."""
        return time.monotonic() - self.since if self.round >= 0 and self.cell is not None else 0.0

    def assign(self, cell: Cell, folder: Path) -> None:
        """Hand a cell to the process."""
        self.cell, self.round, self.first_round, self.accuracy = cell, -1, 0, None
        job = {"folder": str(folder), "config": to_dict(cell.config)}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the death of a worker is noticed when its output ends
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()


class WorkerPool:
    """Runs the open cells of a study in worker processes, and replaces those that die.

    Args:
        results: The cells, and what is known of them.
        workers: How many processes.
        log: Where their error output goes.
        lock: A descriptor that they inherit.
        progress: Called whenever something has happened.
        threads: Threads per process.
        grow: Called after each cell that ends; it may add cells to the results. Workers wait for these.
        seconds: How long to run; what is unfinished then can be resumed.
    """

    def __init__(
        self, results: Results, workers: int, log: IO[bytes], lock: int | None,
        progress: Callable[[StudyProgress], None], threads: int = 1, *,
        grow: Callable[[], None] | None = None, seconds: float | None = None,
    ) -> None:  # fmt: skip
        self._results, self._wanted, self._log, self._progress = results, workers, log, progress
        self._grow, self._stop_at = grow, None if seconds is None else time.monotonic() + seconds
        self._threads = str(threads)
        self._inherited = () if lock is None else (lock,)
        self._messages: queue.SimpleQueue[tuple[Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._deaths: dict[str, int] = {}
        self._failed_starts = 0
        self._rounds, self._seconds = 0, 0.0  # spent by workers on the cells that ended

    def run(self) -> None:
        """Run all open cells. A single worker starts first, so that missing data is fetched only once."""
        try:
            self._spawn()
            self._show(None)
            while self._workers and (self._stop_at is None or time.monotonic() < self._stop_at):
                try:
                    worker, message = self._messages.get(timeout=self._seconds_to_stop())
                except queue.Empty:
                    break
                ended = self._on_exit(worker) if message is None else self._on_message(worker, message)
                self._show(ended)
        finally:
            self._terminate()

    def _seconds_to_stop(self) -> float | None:
        return None if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())

    def _spawn(self) -> None:
        environment = {**os.environ, **dict.fromkeys(THREADS, self._threads)}
        home = str(Path(cyber0.__file__).parents[1])  # the workers run the same code as this process
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        # In a session of its own, so that an interrupt from the terminal reaches this process alone, which stops it.
        process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                   env=environment, start_new_session=True, pass_fds=self._inherited)  # fmt: skip
        worker = Worker(process)
        self._workers.append(worker)
        threading.Thread(target=self._read_messages, args=(worker,), daemon=True).start()

    def _read_messages(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        try:
            for line in worker.process.stdout:
                if line.endswith(b"\n"):
                    self._messages.put((worker, json.loads(line)))
        finally:  # whatever ended its output, this worker will not answer any more
            self._messages.put((worker, None))

    def _on_message(self, worker: Worker, message: dict[str, Any]) -> Result | None:
        ended = None
        if "ready" in message:
            worker.ready = True
        elif "round" in message:
            if worker.round < 0:
                worker.first_round, worker.since = message["round"], time.monotonic()
            worker.round, worker.accuracy = message["round"], message["accuracy"]
            while len(self._workers) < self._wanted and len(self._results.open) > self._idle():
                self._spawn()
        else:
            ended = self._end(worker, message.get("failed"))
        self._distribute(ended)
        return ended

    def _distribute(self, ended: Result | None) -> None:
        """Hand open cells to idle workers; those for which there will be none exit."""
        if ended is not None and self._grow is not None:
            self._grow()
        for worker in self._workers:
            if worker.waiting:
                self._assign_next(worker)

    def _idle(self) -> int:
        return sum(worker.cell is None for worker in self._workers)

    def _assign_next(self, worker: Worker) -> None:
        if self._results.open:
            cell = self._results.open.popleft()
            worker.assign(cell, self._results.folders[cell.digest])
        elif self._grow is not None and any(one.cell is not None for one in self._workers):
            return  # the cell that another worker runs may lead to more
        elif worker.process.stdin:
            worker.process.stdin.close()  # it then exits

    def _end(self, worker: Worker, error: str | None) -> Result:
        cell, results = worker.cell, self._results
        assert cell is not None
        folder = results.folders[cell.digest]
        figures = read_figures(cell, folder) if error is None else None
        if figures is not None:
            results.figures[cell.digest] = figures
            self._rounds += cell.config.rounds - worker.first_round
            self._seconds += worker.seconds
        else:
            results.errors[cell.digest] = " ".join((error or f"{folder} lacks what a finished run has").split())
        worker.cell = None
        return results.of(cell)

    def _on_exit(self, worker: Worker) -> Result | None:
        """Handle the exit of a worker; another one takes over its cell."""
        self._workers.remove(worker)
        code = worker.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not worker.ready:
            self._failed_starts += 1
            if code >= 0 or self._failed_starts > TRIES:
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
            self._spawn()
        self._distribute(ended)
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
        """Estimate from the rounds run so far, as if every round took equally long."""
        busy = [(w, w.cell) for w in self._workers if w.cell is not None]
        rounds_run = self._rounds + sum(w.rounds_run for w, _ in busy)
        if not rounds_run:
            return None
        left = sum(cell.config.rounds - max(w.round, 0) for w, cell in busy)
        left += sum(cell.config.rounds for cell in self._results.open)
        processes = max(1, min(self._wanted, len(busy) + len(self._results.open)))
        return (self._seconds + sum(w.seconds for w, _ in busy)) * left / rounds_run / processes

    def _terminate(self) -> None:
        """Stop the workers that are still running: none at the end, all of them after an interrupt."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
