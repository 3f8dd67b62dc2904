"""The optimizers side by side: accuracy against forward passes, with and without Byzantine clients.

A forward pass is one over all training samples, so runs with smaller batches, other numbers of directions or one-sided
probes are compared at equal cost, and each variant gets as many rounds as the budget of passes allows. Its learning
rate is found by successive halving (halving.py) on one seed, by the training loss; tasks that don't measure that one
(MNIST, ridge) are judged by the test loss. `sgd` and the best others then run with several seeds and the whole budget.

A rung's rate is constant. A full run's falls linearly to 0 and is still at 92 % where the last rung ends, a smaller
difference than the grid can resolve; a rung with a whole schedule of its own would choose rates for short runs. Even so
the search finds too high a rate for full runs (on MNIST by a factor of 2, for sgd and adaptive): those try lower ones.

Every run is an ordinary one in the study's folder: when `--minutes` are over, the same command continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.kernels.threads import available_cores
from cyber0.reproduce import Request
from cyber0.reproduce import text as lm
from cyber0.reproduce.cells import STUDY, check_overrides, print_notes, rows_of
from cyber0.reproduce.halving import START, Search, best_of, lowered, search
from cyber0.reproduce.outputs import drawn_from
from cyber0.reproduce.text import NO_BYZANTINE, of_task, seeds_of
from cyber0.study import Cell, Result, Study

RUNGS = (1 / 36, 1 / 12)
"""How long the rungs of a search are, as parts of a full run."""
EVALUATIONS = 36  # of a full run, beside the one at the start; every rung ends with one
BEST_OTHERS = 2  # how many optimizers run in full beside sgd
QUICK_SHARE = 20  # of the budget
BASELINE = "sgd"
SEARCH, FULL = "search", "full"


class Variant(NamedTuple):
    """An optimizer and what it is used with."""

    name: str
    settings: tuple[str, ...] = ()
    centre: float = 1.0
    """Of its grid of rates, relative to that of the task."""
    unit: bool = False
    """Whether the rate is the length of a step, which does not depend on how large the scalars are."""


EIGHT = "method.k=8"
ONE_SIDED = (EIGHT, "method.estimator=one_sided")
VARIANTS = (
    Variant(BASELINE),
    Variant("sgd_one_sided", ONE_SIDED, 4.0),
    Variant("adaptive", ("method.optimizer=adaptive",), unit=True),
    Variant("normalized", (*ONE_SIDED, "method.optimizer=normalized"), 4.0, unit=True),
    Variant("zscore", (*ONE_SIDED, "method.optimizer=zscore"), 4.0, unit=True),
    Variant("rank", (*ONE_SIDED, "method.optimizer=rank"), 4.0, unit=True),
    Variant("momentum", ("method.optimizer=momentum",)),
    Variant("adam", ("method.optimizer=adam",), unit=True),
    Variant("hessian", ("method.optimizer=hessian",)),
)


class TaskPlan(NamedTuple):
    """What the study does with a task."""

    title: str
    samples: int
    """Training samples; 0: as task.samples says."""
    rate: float
    """The centre of sgd's grid."""
    step: float
    """That of optimizers whose rate is the length of a step."""
    passes: float
    """The budget, in forward passes over the training samples."""
    batches: tuple[int, ...] = (0,)
    """Samples of a round, over all clients; 0: the task's own batch, which with 512 samples is all of them."""


TASKS = {
    "mnist": TaskPlan("MNIST", 60_000, 0.01, 0.01, 655.36),  # 400 rounds of sgd with k = 64
    "ridge": TaskPlan("Ridge regression", 1200, 0.02, 0.01, 4000),
    "sst2": TaskPlan("SST-2", 0, 6e-5, 3e-4, 6000, (0, 128, 32)),
    "trec": TaskPlan("TREC", 0, 6e-5, 3e-4, 6000, (0, 128, 32)),
    "snli": TaskPlan("SNLI", 0, 2e-4, 3e-4, 6000, (0, 128, 32)),
}
FIXED = {"rounds": "--passes", "task.name": "--tasks", "seed": "--seeds"}
VARIED = ("method.lr", "method.k", "method.batch_size", "method.estimator", "method.optimizer", "federation.byzantine",
          "aggregation.rule", "evaluate_every")  # fmt: skip


class Entry(NamedTuple):
    """A variant on a task, with a size of batches."""

    task: str
    variant: Variant
    batch: int = 0

    @property
    def name(self) -> str:
        """The variant as tables and `--only` name it."""
        return f"{self.variant.name}@{self.batch}" if self.batch else self.variant.name

    @property
    def is_baseline(self) -> bool:
        return self.name == BASELINE


class Run(NamedTuple):
    """A finished run and its evaluations."""

    entry: Entry
    cell: Cell
    result: Result
    rows: list[dict[str, str]]
    passes_per_round: float

    @property
    def passes(self) -> list[float]:
        """Forward passes behind each evaluation."""
        return [int(row["round"]) * self.passes_per_round for row in self.rows]

    def column(self, name: str) -> list[float]:
        """Return a column of metrics.csv; what is missing or not a number is NaN."""
        return [float(row[name]) if row.get(name) else math.nan for row in self.rows]

    @property
    def losses(self) -> list[float]:
        """The training losses, or the test losses where the task measures no others."""
        found = self.column("train_loss")
        return found if not all(map(math.isnan, found)) else self.column("loss")

    @property
    def final_loss(self) -> float:
        """The last of them; infinite if it is not finite."""
        return loss if math.isfinite(loss := self.losses[-1]) else math.inf


def reproduce(request: Request) -> Path:
    """Search the rates, run the best in full, and show all that is done."""
    from cyber0.reproduce.optimizers_results import write

    return write(OptimizerStudy(request).run())


class OptimizerStudy:
    """The runs that the study consists of, which follow from the results so far.

    Args:
        request: Its options.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tasks = _tasks_of(request)
        self._check_overrides()
        self._cells: dict[tuple[Entry, int | None, int, int, bool], Cell] = {}
        self.skipped: dict[str, str] = {}
        """Variants whose settings this version refuses, and why."""
        self.entries = [entry for task in self.tasks for entry in self._entries(task)]
        patterns = [p if "/" in p else f"*/{p}" for p in request.search.only]
        for pattern in patterns:
            if not any(fnmatch(f"{e.task}/{e.name}", pattern) for e in self.entries):
                names = [f"{e.task}/{e.name}" for e in self.entries]
                raise ConfigError(f"--only {pattern} selects nothing; {suggestion(pattern, names)}")
        self.selected = [e for e in self.entries
                         if not patterns or any(fnmatch(f"{e.task}/{e.name}", p) for p in patterns)]  # fmt: skip
        self.targets = self._targets()
        self._done: dict[str, tuple[Result, list[dict[str, str]]]] = {}
        self._errors: dict[str, str] = {}

    # The settings of a run.

    def budget(self, task: str) -> float:
        """Return the forward passes of a full run."""
        given = self.request.search.passes or TASKS[task].passes
        return given / QUICK_SHARE if self.request.quick else given

    def config(
        self, entry: Entry, *, lr: float | None = None, seed: int = 0, byzantine: bool = False, share: float = 1.0
    ) -> Config:
        """Return the settings of a full run, or of the first part of one, at a constant rate."""
        text, plan = self.request.text, TASKS[entry.task]
        settings = [f"task.name={entry.task}", f"seed={seed}", "method.lr_schedule=linear"]
        if not plan.samples and text.model:
            settings.append(f"task.model={lm.find_model(text.model)}")
        if not plan.samples and text.data is not None:
            settings.append(f"task.data={lm.find_data(text.data, entry.task)}")
        given = [setting for task, setting in map(self._of_task, self.request.overrides) if task in ("", entry.task)]
        shared = Config().with_overrides([*settings, *given])
        settings += [*entry.variant.settings, *(() if byzantine else NO_BYZANTINE), *given]
        if entry.batch:
            settings.append(f"method.batch_size={max(1, round(entry.batch / shared.federation.clients))}")
        if share < 1:
            settings.append("method.lr_schedule=constant")
        if lr is not None:
            settings.append(f"method.lr={lr!r}")
        config = Config().with_overrides(settings)
        rounds = max(1, round(self.budget(entry.task) / passes_per_round(config, _samples(entry.task, config))))
        every = max(1, math.ceil(rounds / EVALUATIONS))
        return config.with_overrides([f"rounds={max(1, round(rounds * share))}", f"evaluate_every={every}"])

    def rate(self, entry: Entry, exponent: int) -> float:
        """Return a rate of the entry's grid. With smaller batches there are more rounds, and the rate is lower."""
        plan = TASKS[entry.task]
        centre = (
            (plan.step if entry.variant.unit else plan.rate)
            * entry.variant.centre
            * (math.sqrt(entry.batch / 512) if entry.batch else 1.0)
        )
        return float(f"{centre * 2.0**exponent:.4g}")

    def cell(self, entry: Entry, rung: int | None, exponent: int, *, seed: int = 0, byzantine: bool = False) -> Cell:
        """Return a run: of a rung of the search, or a full one."""
        key = (entry, rung, exponent, seed, byzantine)
        if key not in self._cells:
            lr, share = self.rate(entry, exponent), 1.0 if rung is None else RUNGS[rung]
            stage = FULL if rung is None else f"{SEARCH} {rung + 1}"
            axes: dict[str, Value] = {"task": entry.task, "variant": entry.name, "stage": stage, "lr": lr,
                                      "byzantine": byzantine}  # fmt: skip
            config = self.config(entry, lr=lr, seed=seed, byzantine=byzantine, share=share)
            self._cells[key] = Cell(axes, config)
        return self._cells[key]

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
        return Run(entry, cell, result, rows, passes_per_round(cell.config, _samples(entry.task, cell.config)))

    def search(self, entry: Entry) -> Search:
        """Return the state of an entry's search."""
        measured: list[dict[int, float]] = [{} for _ in RUNGS]
        while True:
            found = search(measured)
            new = [(rung, e, loss) for rung, wanted in enumerate(found.wanted) for e in wanted
                   if e not in measured[rung] and (loss := self._loss(entry, rung, e)) is not None]  # fmt: skip
            if not new:
                return found
            for rung, e, loss in new:
                measured[rung][e] = loss

    def _loss(self, entry: Entry, rung: int | None, exponent: int) -> float | None:
        """Return the loss at the end of a run; infinite if it failed, None if it has not ended."""
        cell = self.cell(entry, rung, exponent)
        run = self.run_of(entry, cell)
        return run.final_loss if run else math.inf if cell.digest in self._errors else None

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
        tried = {entry: self.lowered(entry) for entry in finalists}
        listed += [self.cell(entry, None, e) for entry, found in tried.items() for e in found.wanted[0]]
        return listed + [
            self.cell(entry, None, found.best, seed=seed, byzantine=byzantine)
            for seed in range(seeds_of(self.request))
            for byzantine in (False, True)
            for entry, found in tried.items()
            if found.best is not None
        ]

    def lowered(self, entry: Entry) -> Search:
        """Return which rates an entry's full runs try, given those that are done; its search must be."""
        best = self.search(entry).best
        assert best is not None
        losses: dict[int, float] = {}
        while True:
            found = lowered(best, losses)
            new = {e: loss for e in found.wanted[0] if e not in losses
                   and (loss := self._loss(entry, None, e)) is not None}  # fmt: skip
            if not new:
                return found
            losses |= new

    def finalists(self, searched: Sequence[Entry]) -> list[Entry]:
        """Return the baseline, and the other optimizers with the lowest losses at the end of their searches.

        Each is represented by its best size of batches.
        """
        losses = {entry: run.final_loss for entry in searched if (run := self.searched(entry)) is not None}
        ranked = sorted((e for e in losses if not e.is_baseline and losses[e] < math.inf), key=lambda e: losses[e])
        others: dict[str, Entry] = {}
        for entry in ranked:
            others.setdefault(entry.variant.name, entry)
        return [*(e for e in losses if e.is_baseline), *list(others.values())[:BEST_OTHERS]]

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
        found = self.lowered(entry)
        known = {e: loss for e in found.wanted[0] if (loss := self._loss(entry, None, e)) is not None}
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
                found += [self.run_of(entry, self.cell(entry, None, e)) for e in self.lowered(entry).wanted[0]]
            found += [*self.full_runs(entry, byzantine=False), *self.full_runs(entry, byzantine=True)]
        return list({run.cell.digest: run for run in found if run is not None}.values())

    # Running it.

    def run(self) -> OptimizerStudy:
        """Run what is left and selected, as far as the time allows; with --redraw nothing."""
        request = self.request
        for name, error in self.skipped.items():
            request.progress(f"note: {name} is left out: {error}")
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

    # Options.

    def _entries(self, task: str) -> list[Entry]:
        """Return the variants of a task, without those whose settings are refused."""
        found = []
        for variant in VARIANTS:
            entries = [Entry(task, variant, batch) for batch in TASKS[task].batches]
            try:
                for entry in entries:
                    self.config(entry, lr=self.rate(entry, 0))
            except ConfigError as error:
                if variant.name == BASELINE:
                    raise
                self.skipped[variant.name] = str(error)
            else:
                found += entries
        return found

    def _check_overrides(self) -> None:
        check_overrides(self.request)
        for setting in self.request.overrides:
            task, assignment = self._of_task(setting)
            key = assignment.partition("=")[0].strip()
            if key in FIXED:
                raise ConfigError(f"--set {setting} would make different runs the same; use {FIXED[key]}")
            if key in VARIED or key.startswith("method.optimizer_options"):
                raise ConfigError(f"--set {setting} would make different runs the same: the study varies it")
            if task and task not in self.tasks:
                raise ConfigError(f"--set {setting} applies to {TASKS[task].title}, which --tasks leaves out")

    def _targets(self) -> dict[str, list[float]]:
        """Return the accuracies in percent that were asked for, by task."""
        found: dict[str, list[float]] = {task: [] for task in self.tasks}
        for given in self.request.search.targets:
            task, _, percent = given.partition("=")
            if task not in found or not percent.replace(".", "", 1).isdigit():
                raise ConfigError(
                    f"--targets {given} must name one of {', '.join(found)} and a percentage, as mnist=90"
                )
            found[task].append(float(percent))
        return found

    @staticmethod
    def _of_task(setting: str) -> tuple[str, str]:
        return of_task(setting, TASKS)


def evaluations(config: Config) -> int:
    """Return how often a round evaluates the loss of its samples."""
    k = config.method.k
    return config.method.local_epochs * (k + 1 if config.method.estimator == "one_sided" else 2 * k)


def passes_per_round(config: Config, samples: int) -> float:
    """Return the forward passes over so many training samples that a round costs."""
    clients = config.federation.clients
    shares = (samples // clients + (i < samples % clients) for i in range(clients))  # as equal as possible
    drawn = sum(min(share, config.method.batch_size) for share in shares)
    return evaluations(config) * drawn / samples * config.federation.invited / clients


def _samples(task: str, config: Config) -> int:
    found = config.task.samples or TASKS[task].samples
    if not found:
        raise ConfigError(f"--set task.samples=0 takes all samples of {TASKS[task].title}, and the budget is counted "
                          "in passes over a known number; set another")  # fmt: skip
    return found


def _tasks_of(request: Request) -> tuple[str, ...]:
    """Return the tasks to compare on: those asked for, or all for which there is what they need."""
    for task in request.text.tasks:
        if task not in TASKS:
            raise ConfigError(f"--tasks {task} is not one of the study's; {suggestion(task, TASKS)}")
    with_text = bool(request.text.model or request.text.data)
    usual = [task for task, plan in TASKS.items() if plan.samples or with_text]
    return tuple(dict.fromkeys(request.text.tasks)) or tuple(usual)
