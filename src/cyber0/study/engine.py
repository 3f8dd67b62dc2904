"""Runs many cells in worker processes, and resumes where it stopped.

Every cell is an ordinary run in OUT/runs/, so nothing is lost whatever happens to a worker or to the study: a finished
cell is not run again, an unfinished one is resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cyber0.config.files import load
from cyber0.config.paths import paths
from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.kernels.threads import available_cores
from cyber0.storage import CONFIG, METRICS, SUMMARY
from cyber0.storage.disk import HAS_LOCKS, lock_handle
from cyber0.study import identity
from cyber0.study.cells import Cell, Result, Results, read_figures, write_csv
from cyber0.study.worker_pool import StudyProgress, WorkerPool

RESULTS, RUNS, COPY, LOG, LOCK = "results.csv", "runs", "study.toml", "workers.log", ".lock"
EARLIER = "earlier"  # the folder that replaced runs are moved to
Stamp = list[tuple[int, int, int]]
"""Modification times, sizes and inodes of files: if these are equal, the files have not changed."""
SECONDS_FOR_LOCK = 5.0  # the workers of a killed study need a moment to notice and exit


class Study:
    """Many runs in one folder.

    Args:
        cells: What to run. All have the same axes; results have this order.
        out: The folder; finished runs that it already holds are not run again.
        workers: How many processes; by default one per core, and a single one on a GPU.
        source: The file that the cells come from; a copy is stored in the folder.
        threads: Threads per process.
        rerun: Whether to run again what another version of cyber0 finished; its folders are moved to OUT/earlier.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        out: Path,
        workers: int | None = None,
        source: bytes | None = None,
        *,
        threads: int = 1,
        rerun: bool = False,
    ) -> None:
        if not cells:
            raise ConfigError("this study has no cells, so there is nothing to run")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers = {workers} is impossible; use at least 1")
        columns = list(cells[0].axes)
        if any(list(cell.axes) != columns for cell in cells):
            raise ConfigError(f"the cells of a study must have the same axes; the first has {', '.join(columns)}")
        self.cells, self.out, self._source, self._threads = list(cells), Path(out), source, threads
        self._rerun = rerun
        self._configs: dict[Path, Config | None] = {}
        self._seen: tuple[list[str], dict[str, Path]] | None = None
        self._figures: dict[str, tuple[Stamp, dict[str, Any] | None]] = {}
        self.by_name: set[str] = set()
        """Digests of runs matched only by the name of their model or data, because the content can't be compared."""
        on_gpu = any(cell.config.device != "cpu" for cell in cells)
        self.workers = workers or (1 if on_gpu else available_cores())

    def finished(self) -> int:
        """Return how many cells need not be run any more."""
        return sum(r.status == "done" and not (self._rerun and r.outdated) for r in self.results())

    def outdated(self) -> list[Result]:
        """Return the finished cells that another version of the code produced."""
        return [result for result in self.results() if result.outdated]

    def results(self) -> list[Result]:
        """Return the result of every cell so far, in the order of the cells, without running any."""
        return self._results().listed()

    def _results(self) -> Results:
        return Results(self.cells, self._folders(), self.out, self._figures_of)

    def _figures_of(self, cell: Cell, folder: Path) -> dict[str, Any] | None:
        """Return the figures of a finished run; its files are read again only if one of them has changed."""
        try:
            about = [(folder / name).stat() for name in (CONFIG, SUMMARY, METRICS)]
        except OSError:
            return None
        stamp = [(file.st_mtime_ns, file.st_size, file.st_ino) for file in about]
        known = self._figures.get(cell.digest)
        if known is None or known[0] != stamp:
            known = self._figures[cell.digest] = stamp, read_figures(cell, folder)
        return known[1]

    def run(
        self, progress: Callable[[StudyProgress], None] = lambda _: None, *,
        more: Callable[[list[Result]], Sequence[Cell]] | None = None, seconds: float | None = None,
    ) -> list[Result]:  # fmt: skip
        """Run what is left, write results.csv, and return the result of every cell in the order of the cells.

        A cell that fails is listed with its error, and the others continue. An interrupt stops the workers; the same
        call later resumes from there.

        Args:
            progress: Called whenever something has happened.
            more: Given the results so far, returns the cells that these lead to; known ones are ignored. Called before
                the first cell and after each, and the workers keep running in between.
            seconds: Stop after this time; what is unfinished then is listed as open.
        """
        self._check_device()
        try:
            (self.out / RUNS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.out} can't be made: {error.strerror}") from None
        with _locked(self.out) as lock:
            if self._source is not None:
                (self.out / COPY).write_bytes(self._source)
            self._set_aside()
            results = self._results()
            grow = None if more is None else partial(self._extend, results, more)
            if grow is not None:
                grow()
            try:
                if results.open:
                    with (self.out / LOG).open("ab") as log:
                        workers = self.workers if grow else min(self.workers, len(results.open))
                        WorkerPool(
                            results, workers, log, lock, progress, self._threads, grow=grow, seconds=seconds
                        ).run()
            finally:
                listed = results.listed()
                rows = [result.row() for result in listed]
                columns = dict.fromkeys(name for row in rows for name in row)
                write_csv(self.out / RESULTS, columns, [dict.fromkeys(columns, "") | row for row in rows])
                if (self.out / LOG).exists() and not (self.out / LOG).stat().st_size:
                    (self.out / LOG).unlink()
        return listed

    def _extend(self, results: Results, more: Callable[[list[Result]], Sequence[Cell]]) -> None:
        """Add the cells that the results so far lead to; some may be done already, and lead to others."""
        while True:
            known = {cell.digest for cell in self.cells}
            new = [cell for cell in more(results.listed()) if cell.digest not in known]
            if not new:
                return
            self.cells += new
            self._seen = None
            results.add(new, self._folders())

    def _check_device(self) -> None:
        for device in {cell.config.device for cell in self.cells} - {"cpu"}:
            from cyber0.directions.backends import check_device

            check_device(device)

    def _set_aside(self) -> None:
        """Move to OUT/earlier what is to be run again, and unfinished runs whose model or data is gone."""
        folders, cells = self._folders(), {cell.digest: cell for cell in self.cells}
        again = {r.cell.digest for r in self.outdated()} if self._rerun else set()
        for key, folder in folders.items():
            unfinished = (folder / CONFIG).exists() and not (folder / SUMMARY).exists()
            config = self._config_of(folder) if unfinished else None  # None if damaged: that run fails with an error
            lacking = config is not None and identity.lacks_files(config)
            if key in again or (lacking and not identity.lacks_files(cells[key].config)):
                (self.out / EARLIER).mkdir(exist_ok=True)
                names = (f"{folder.name}-{n}" if n > 1 else folder.name for n in itertools.count(1))
                folder.rename(next(path for name in names if not (path := self.out / EARLIER / name).exists()))
                self._configs.pop(folder, None)

    def _folders(self) -> dict[str, Path]:
        """Return the folder of each run, by digest; an existing one is found even if the axes had other names.

        A run with identical paths is found even if its files no longer exist. Folders of earlier versions are named by
        a digest of the paths or names of model and data. They are matched by that digest or, if files were moved, by
        the names, unless the contents can be compared and differ. Large files are compared by samples (see
        `identity`), so a run may be reused for a file that differs only between those.
        """
        runs = self.out / RUNS
        names = sorted(os.listdir(runs)) if runs.is_dir() else []
        if self._seen is not None and self._seen[0] == names:
            return self._seen[1]
        there = {name.rpartition("-")[2]: runs / name for name in names}
        moved = _Moved(self.cells, there, self._config_of)
        found: dict[str, Path] = {}
        for cell in self.cells:
            if cell.digest not in found:
                by_path = there.get(identity.digest_by_path(cell.config))
                folder = there.get(cell.digest) or by_path or moved.folder_of(cell)
                found[cell.digest] = folder or runs / cell.folder_name
        self.by_name |= moved.by_name
        self._seen = names, found
        return found

    def _config_of(self, folder: Path) -> Config | None:
        """Return the settings of a run's folder, read once; None if it has none."""
        if folder not in self._configs:
            try:
                self._configs[folder] = load(folder / CONFIG)
            except (OSError, ConfigError):
                self._configs[folder] = None
        return self._configs[folder]


class _Moved:
    """Finds the folders of runs whose model or data was elsewhere; each folder is read at most once."""

    def __init__(
        self, cells: Sequence[Cell], there: Mapping[str, Path], config_of: Callable[[Path], Config | None]
    ) -> None:
        self._cells, self._there, self._config_of = cells, there, config_of
        self.by_name: set[str] = set()
        """Digests of the runs whose model or data could not be compared."""

    @cached_property
    def _folders(self) -> dict[str, list[tuple[str, Path, Config]]]:
        """The folders, by the settings of their runs without model and data."""
        found: dict[str, list[tuple[str, Path, Config]]] = {}
        for key, folder in self._there.items():
            config = self._config_of(folder)
            if config is not None:
                found.setdefault(identity.digest_of_settings(config), []).append((key, folder, config))
        return found

    @cached_property
    def _alike(self) -> dict[str, set[str]]:
        """The digests of the cells, by their settings and the names of model and data."""
        found: dict[str, set[str]] = {}
        for cell in self._cells:
            found.setdefault(identity.digest_by_name(cell.config), set()).add(cell.digest)
        return found

    def folder_of(self, cell: Cell) -> Path | None:
        """Return the folder of a cell, if there is exactly one candidate."""
        by_content = paths(cell.config)  # a user's code is identified by its content alone
        if by_content or not any(getattr(cell.config.task, key) for key in identity.PLACES):
            return None
        matching = []
        for key, folder, config in self._folders.get(identity.digest_of_settings(cell.config), ()):
            same = identity.same_run(key, config, cell.config)
            if same:
                return folder
            if same is None:
                matching.append(folder)
        if len(matching) != 1 or len(self._alike[identity.digest_by_name(cell.config)]) != 1:
            return None
        self.by_name.add(cell.digest)
        return matching[0]


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[int | None]:
    """Lock the folder against a second study.

    The workers inherit the lock (the descriptor that is yielded): if this process is killed, the folder is free once
    the last of them has exited.
    """
    if not HAS_LOCKS:
        yield None
        return
    with (out / LOCK).open("w") as file:
        give_up = time.monotonic() + SECONDS_FOR_LOCK
        while True:
            try:
                lock_handle(file.fileno())
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ConfigError(
                        f"{out} is in use by another process; wait for it, or choose another --out"
                    ) from None
                time.sleep(0.1)
        yield file.fileno()
