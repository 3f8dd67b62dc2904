"""The runs of the comparison of optimizers: the variants, the tasks, and what a run costs."""

from __future__ import annotations

import math
from fnmatch import fnmatch
from typing import NamedTuple

from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError
from cyber0.reproduce import Request
from cyber0.reproduce import text as lm
from cyber0.reproduce.cells import check_overrides
from cyber0.reproduce.halving import Score
from cyber0.reproduce.text import NO_BYZANTINE, of_task
from cyber0.study import Cell, Result

RUNGS = (1 / 36, 1 / 12)
"""How long the rungs of a search are, as parts of a full run."""
EVALUATIONS = 36  # of a full run, beside the one at the start; every rung ends with one
BEST_OTHERS = 2  # how many optimizers run in full beside sgd
QUICK_SHARE = 20  # of the budget
HELD_OUT = 512  # samples of a text task, by which rates are chosen: the loss of the training samples over-fits
BASELINE = "sgd"
SEARCH, FULL = "search", "full"


class Variant(NamedTuple):
    """An optimizer and what it is used with."""

    name: str
    settings: tuple[str, ...] = ()
    unit: bool = False
    """Whether the rate is the length of a step, which does not depend on how large the scalars are."""
    least_k: int = 1
    """Directions a step, where the task has fewer."""
    matrices: bool = False
    """Whether it differs from others only where weights are matrices."""
    batches: tuple[int, ...] = ()
    """Samples of a round, over all clients, if not those of the task."""
    text: bool = False
    """Whether it is for language models only."""


ONE_SIDED = ("method.estimator=one_sided",)
LOW_RANK = ("method.distribution=low_rank",)
FLOAT16 = ("task.dtype=float32", "task.compute=float16")
"""Keeps small updates, and slopes have at most a quarter of bfloat16's error (docs/measured/language_tasks.md)."""
VARIANTS = (
    Variant(BASELINE),
    Variant("sgd_one_sided", ONE_SIDED, least_k=8),
    Variant("adaptive", ("method.optimizer=adaptive",), unit=True),
    Variant("adaptive_one_sided", (*ONE_SIDED, "method.optimizer=adaptive"), unit=True, least_k=8),
    Variant(
        "adaptive_low_rank",
        (*ONE_SIDED, "method.optimizer=adaptive", *LOW_RANK),
        unit=True,
        least_k=48,
        matrices=True,
    ),
    *(
        Variant(
            f"{name}_low_rank_float16",
            (*ONE_SIDED, f"method.optimizer={name}", *LOW_RANK, *FLOAT16),
            unit=True,
            least_k=16,
            matrices=True,
            batches=(36,),
            text=True,
        )
        for name in ("adaptive", "zscore")
    ),
    Variant("normalized", (*ONE_SIDED, "method.optimizer=normalized"), unit=True, least_k=8),
    Variant("zscore", (*ONE_SIDED, "method.optimizer=zscore"), unit=True, least_k=8),
    Variant("rank", (*ONE_SIDED, "method.optimizer=rank"), unit=True, least_k=8),
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
    settings: tuple[str, ...] = ()
    """What differs from the task's defaults; 64 directions would leave too few rounds for 50 weights."""
    matrices: bool = True
    """Whether the model has weights that are matrices."""


TASKS = {
    "mnist": TaskPlan("MNIST", 60_000, 0.04, 0.08, 655.36),  # 400 rounds of sgd with k = 64
    "ridge": TaskPlan("Ridge regression", 1200, 0.16, 0.04, 1500, settings=("method.k=8",), matrices=False),
    "sst2": TaskPlan("SST-2", 0, 6e-5, 1.2e-3, 6000, (0, 128, 32, 12)),
    "trec": TaskPlan("TREC", 0, 6e-5, 1.2e-3, 6000, (0, 128, 32, 12)),
    "snli": TaskPlan("SNLI", 0, 2e-4, 1.2e-3, 6000, (0, 128, 32, 12)),
}
FIXED = {"rounds": "--passes", "task.name": "--tasks", "seed": "--seeds"}
VARIED = ("method.lr", "method.k", "method.batch_size", "method.estimator", "method.optimizer",
          "method.distribution", "federation.byzantine", "aggregation.rule", "evaluate_every")  # fmt: skip


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
        """The losses on held-out samples, or on the test samples where none are held out."""
        found = self.column("validation_loss")
        return found if not all(map(math.isnan, found)) else self.column("loss")

    @property
    def final_loss(self) -> float:
        """The last of them; infinite if it is not finite."""
        return loss if math.isfinite(loss := self.losses[-1]) else math.inf

    @property
    def score(self) -> Score:
        """By what full runs are chosen: the share of held-out samples that are wrong, then the loss.

        With few training samples the loss on held-out ones turns long before their accuracy stops growing, because
        wrong answers become more confident. Where none are held out, it is the loss.
        """
        accuracy = self.column("validation_accuracy")[-1]
        if math.isinf(self.final_loss) or math.isnan(accuracy):
            return (self.final_loss,)
        return 1 - accuracy, self.final_loss


class Plan:
    """What the study can run, by its options.

    Args:
        request: These options.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tasks = _tasks_of(request)
        self._check_overrides()
        self._cells: dict[tuple[Entry, int | None, int, int, bool], Cell] = {}
        self.entries = [entry for task in self.tasks for entry in self._entries(task)]
        patterns = [p if "/" in p else f"*/{p}" for p in request.search.only]
        for pattern in patterns:
            if not any(fnmatch(f"{e.task}/{e.name}", pattern) for e in self.entries):
                names = [f"{e.task}/{e.name}" for e in self.entries]
                raise ConfigError(f"--only {pattern} selects nothing; {suggestion(pattern, names)}")
        self.selected = [e for e in self.entries
                         if not patterns or any(fnmatch(f"{e.task}/{e.name}", p) for p in patterns)]  # fmt: skip
        self.targets = self._targets()

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
        settings = [f"task.name={entry.task}", f"seed={seed}", "method.lr_schedule=linear", *plan.settings]
        if not plan.samples:
            settings.append(f"task.validation={HELD_OUT}")
        if not plan.samples and text.model:
            settings.append(f"task.model={lm.find_model(text.model)}")
        if not plan.samples and text.data is not None:
            settings.append(f"task.data={lm.find_data(text.data, entry.task)}")
        given = [setting for task, setting in map(self._of_task, self.request.overrides) if task in ("", entry.task)]
        shared = Config().with_overrides([*settings, *given])
        settings += [*(() if byzantine else NO_BYZANTINE), *given, *entry.variant.settings,
                     f"method.k={max(shared.method.k, entry.variant.least_k)}"]  # fmt: skip
        if entry.batch:
            settings.append(f"method.batch_size={max(1, round(entry.batch / shared.federation.clients))}")
        if share < 1:
            settings.append("method.lr_schedule=constant")
        if lr is not None:
            settings.append(f"method.lr={lr!r}")
        config = Config().with_overrides(settings)
        rounds = max(1, round(self.budget(entry.task) / passes_per_round(config, samples_of(entry.task, config))))
        every = max(1, math.ceil(rounds / EVALUATIONS))
        return config.with_overrides([f"rounds={max(1, round(rounds * share))}", f"evaluate_every={every}"])

    def rate(self, entry: Entry, exponent: int) -> float:
        """Return a rate of the entry's grid.

        The centre follows the number of rounds: smaller batches give more, which are noisier; more directions fewer.
        """
        plan = TASKS[entry.task]
        k = Config().with_overrides([f"task.name={entry.task}", *plan.settings]).method.k
        centre = plan.step if entry.variant.unit else plan.rate
        centre *= max(1.0, entry.variant.least_k / 2 / k) * (math.sqrt(entry.batch / 512) if entry.batch else 1.0)
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

    # Options.

    def _entries(self, task: str) -> list[Entry]:
        """Return the variants of a task; what the settings of one refuse is an error before anything runs."""
        plan = TASKS[task]
        variants = [v for v in VARIANTS if (plan.matrices or not v.matrices) and not (v.text and plan.samples)]
        found = [Entry(task, variant, batch) for variant in variants for batch in variant.batches or plan.batches]
        for entry in found:
            self.config(entry, lr=self.rate(entry, 0))
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
    clients, method = config.federation.clients, config.method
    shares = [samples // clients + (i < samples % clients) for i in range(clients)]  # as equal as possible
    measured = sum(min(share, method.batch_size) for share in shares)
    candidates = sum(min(share, method.batch_size * method.candidates) for share in shares)
    evaluated = evaluations(config) * measured + (candidates if candidates > measured else 0) * method.local_epochs
    return evaluated / samples * config.federation.invited / clients


def samples_of(task: str, config: Config) -> int:
    """Return how many training samples a task has."""
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
