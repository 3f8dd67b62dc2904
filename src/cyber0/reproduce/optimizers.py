"""The optimizers side by side: accuracy against forward passes, with and without Byzantine clients.

A forward pass is one over all training samples, so runs with smaller batches, other numbers of directions or one-sided
probes are compared at equal cost, and each variant gets as many rounds as the budget of passes allows. Its learning
rate is found by successive halving (halving.py) on one seed, by the loss on samples that are held out (the training
loss would favour rates that over-fit); MNIST and ridge, which hold none out, are judged by the test loss. `sgd` and the
best others then run with several seeds and the whole budget. Which others, and with which rates, is chosen by the
accuracy on the held-out samples where there are any, because it grows long after their loss has turned.

A rung's rate is constant. A full run's falls linearly to 0 and is still at 92 % where the last rung ends, a smaller
difference than the grid can resolve; a rung with a whole schedule of its own would choose rates for short runs. Even so
the search finds too high a rate for full runs (on MNIST by a factor of 2, for sgd and adaptive): those try lower ones
first, and higher ones if that is worse.

Every run is an ordinary one in the study's folder: when `--minutes` are over, the same command continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from cyber0.errors import ConfigError, Cyber0Error
from cyber0.kernels.threads import available_cores
from cyber0.reproduce import Request
from cyber0.reproduce.cells import STUDY, print_notes, rows_of
from cyber0.reproduce.halving import START, Score, Search, best_of, bracketed, search
from cyber0.reproduce.optimizer_runs import BEST_OTHERS, RUNGS, TASKS, Entry, Plan, Run, passes_per_round, samples_of
from cyber0.reproduce.outputs import drawn_from
from cyber0.reproduce.text import seeds_of
from cyber0.study import Cell, Result, Study


def reproduce(request: Request) -> Path:
    """Search the rates, run the best in full, and show all that is done."""
    from cyber0.reproduce.optimizer_results import write

    return write(OptimizerStudy(request).run())


class OptimizerStudy(Plan):
    """The runs that the study consists of, which follow from the results so far.

    Args:
        request: Its options.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._done: dict[str, tuple[Result, list[dict[str, str]]]] = {}
        self._errors: dict[str, str] = {}

    # What is known, and what follows from it.

    def observe(self, results: Iterable[Result]) -> None:
        """Take note of what has ended."""
        for result in results:
            digest = result.cell.digest
            if result.status == "done" and digest not in self._done:
                self._done[digest] = result, rows_of(self.request, result)
                self._errors.pop(digest, None)
            elif result.status == "failed":
                self._errors[digest] = result.error

    def is_done(self, cell: Cell) -> bool:
        """Return whether a run is finished, or failed."""
        return cell.digest in self._done or cell.digest in self._errors

    def run_of(self, entry: Entry, cell: Cell) -> Run | None:
        """Return a finished run."""
        if cell.digest not in self._done:
            return None
        result, rows = self._done[cell.digest]
        return Run(entry, cell, result, rows, passes_per_round(cell.config, samples_of(entry.task, cell.config)))

    def search(self, entry: Entry) -> Search:
        """Return the state of an entry's search."""
        measured: list[dict[int, Score]] = [{} for _ in RUNGS]
        while True:
            found = search(measured)
            new = [(rung, e, score) for rung, wanted in enumerate(found.wanted) for e in wanted
                   if e not in measured[rung] and (score := self._score(entry, rung, e)) is not None]  # fmt: skip
            if not new:
                return found
            for rung, e, score in new:
                measured[rung][e] = score

    def _score(self, entry: Entry, rung: int | None, exponent: int) -> Score | None:
        """Return how bad the end of a run is; infinite if it failed, None if it has not ended.

        In a rung the loss counts: it is the finer measure, and has not turned so early.
        """
        cell = self.cell(entry, rung, exponent)
        run = self.run_of(entry, cell)
        if run is None:
            return (math.inf,) if cell.digest in self._errors else None
        return run.score if rung is None else (run.final_loss,)

    def error(self, entry: Entry) -> str:
        """Return why an entry can't be run, if none of the rates that a search begins with could be."""
        errors = [self._errors.get(self.cell(entry, 0, e).digest, "") for e in START]
        return errors[0] if all(errors) else ""

    def cells(self, entries: Sequence[Entry]) -> list[Cell]:
        """Return all runs that follow from what is known: those of the searches, then the full ones, seed by seed."""
        searches = {entry: self.search(entry) for entry in entries if not self.error(entry)}
        listed = [
            self.cell(entry, rung, e)
            for rung in range(len(RUNGS))
            for entry, found in searches.items()
            for e in (found.wanted[rung] if rung < len(found.wanted) else ())
        ]
        settled = [e for e in searches if all(f.best is not None for o, f in searches.items() if o.task == e.task)]
        finalists = [e for task in self.tasks for e in self.finalists([e for e in settled if e.task == task])]
        tried = {entry: self.bracketed(entry) for entry in finalists}
        listed += [self.cell(entry, None, e) for entry, found in tried.items() for e in found.wanted[0]]
        return listed + [
            self.cell(entry, None, found.best, seed=seed, byzantine=byzantine)
            for seed in range(seeds_of(self.request))
            for byzantine in (False, True)
            for entry, found in tried.items()
            if found.best is not None
        ]

    def bracketed(self, entry: Entry) -> Search:
        """Return which rates an entry's full runs try, given those that are done; its search must be."""
        best = self.search(entry).best
        assert best is not None
        scores: dict[int, Score] = {}
        while True:
            found = bracketed(best, scores)
            new = {e: score for e in found.wanted[0] if e not in scores
                   and (score := self._score(entry, None, e)) is not None}  # fmt: skip
            if not new:
                return found
            scores |= new

    def finalists(self, searched: Sequence[Entry]) -> list[Entry]:
        """Return the baseline, and the other optimizers with the best scores at the end of their searches.

        Each is represented by its best size of batches.
        """
        scores = {entry: run.score for entry in searched if (run := self.searched(entry)) is not None}
        ranked = sorted((e for e in scores if not e.is_baseline and scores[e][0] < math.inf), key=lambda e: scores[e])
        others: dict[str, Entry] = {}
        for entry in ranked:
            others.setdefault(entry.variant.name, entry)
        return [*(e for e in scores if e.is_baseline), *list(others.values())[:BEST_OTHERS]]

    def searched(self, entry: Entry) -> Run | None:
        """Return the last run of an entry's search with the rate that it found; None if it is not done."""
        best = self.search(entry).best
        return None if best is None else self.run_of(entry, self.cell(entry, len(RUNGS) - 1, best))

    def full_runs(self, entry: Entry, *, byzantine: bool) -> list[Run]:
        """Return the finished full runs with the best rate, in the order of their seeds.

        Until that is known, those with the best of the rates that have been tried.
        """
        if self.search(entry).best is None:
            return []
        found = self.bracketed(entry)
        known = {e: score for e in found.wanted[0] if (score := self._score(entry, None, e)) is not None}
        best = found.best if found.best is not None else next(iter(best_of(known, 1)), found.wanted[0][0])
        cells = [self.cell(entry, None, best, seed=s, byzantine=byzantine) for s in range(seeds_of(self.request))]
        return [run for cell in cells if (run := self.run_of(entry, cell)) is not None]

    def runs(self) -> list[Run]:
        """Return all finished runs."""
        found: list[Run | None] = []
        for entry in self.entries:
            for rung, wanted in enumerate(self.search(entry).wanted):
                found += [self.run_of(entry, self.cell(entry, rung, e)) for e in wanted]
            if self.search(entry).best is not None:
                found += [self.run_of(entry, self.cell(entry, None, e)) for e in self.bracketed(entry).wanted[0]]
            found += [*self.full_runs(entry, byzantine=False), *self.full_runs(entry, byzantine=True)]
        return list({run.cell.digest: run for run in found if run is not None}.values())

    # Running it.

    def run(self) -> OptimizerStudy:
        """Run what is left and selected, as far as the time allows; with --redraw nothing."""
        request = self.request
        cells = self._known_cells(self.entries)
        if request.redraw and not self._done:
            raise ConfigError(f"--redraw: {request.out} holds no run of this study; leave it out to run them")
        if not request.redraw:
            self._run(self._known_cells(self.selected))
        drawn_from(request, len(self._done), len(cells))
        for error in dict.fromkeys(self._errors.values()):
            if not self._done:
                raise Cyber0Error(f"no run of the study succeeds: {error}")
            request.progress(f"note: a run failed: {error}")
        return self

    def _known_cells(self, entries: Sequence[Entry]) -> list[Cell]:
        """Return the cells that follow from what the folder holds."""
        seen: set[str] = set()
        while True:
            cells = self.cells(entries)
            digests = {cell.digest for cell in cells}
            if digests <= seen:
                return cells
            seen |= digests
            self.observe(Study(cells, self.request.out / STUDY).results())

    def _run(self, cells: list[Cell]) -> None:
        from rich.console import Console

        from cyber0.study.display import StudyDisplay

        request, text = self.request, any(not TASKS[task].samples for task in self.tasks)
        workers = request.text.workers if text else None
        threads = max(1, available_cores() // request.text.workers) if text else 1
        study = Study(cells, request.out / STUDY, workers, threads=threads, rerun=request.rerun)
        print_notes(request, study)

        def more(results: list[Result]) -> list[Cell]:
            self.observe(results)
            return self.cells(self.selected)

        if request.rerun:
            self._done.clear()
        minutes = request.search.minutes
        with StudyDisplay(Console()) as show:
            results = study.run(show, more=more, seconds=None if minutes is None else 60 * minutes)
        self.observe(results)
        left = sum(result.status == "open" for result in results)
        if left:
            request.progress(f"time is up with {left} of the {len(results)} runs known so far left; the same command "
                             "continues")  # fmt: skip
