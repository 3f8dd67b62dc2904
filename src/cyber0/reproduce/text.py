"""The experiments with language models (Section 4.3 and Appendix A): what they have in common.

The paper's settings are the defaults of a config's text tasks. `--steps N` replaces its 20,000 steps; other lengths
(TREC, larger k, local epochs) are scaled in proportion. `--set trec:KEY=VALUE` applies to TREC only. Cells run seed by
seed, so that an interrupted reproduction is a complete table of fewer seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError
from cyber0.kernels.threads import available_cores
from cyber0.reproduce import Request
from cyber0.reproduce.cells import STUDY, check_overrides, done, run_cells
from cyber0.reproduce.outputs import drawn_from
from cyber0.storage import STATE
from cyber0.study import Cell, Result

STEPS, QUICK_STEPS = 20_000, 20
SEEDS, QUICK_SEEDS = 3, 1
PAPER_MODEL = "RoBERTa-large"
TITLES = {"sst2": "SST-2", "trec": "TREC", "snli": "SNLI"}
EVALUATED_SPLITS = {"sst2": ("dev", "test"), "trec": ("test",), "snli": ("test",)}
"""The sets that accuracy is reported on; the first is the paper's (SST-2's dev set is MeZO's test set)."""
EVALUATIONS = {"sst2": 20, "trec": 20, "snli": 10}  # per run, beside the one at the start; SNLI has 9,824 test samples
NO_BYZANTINE = ("federation.byzantine=0", "aggregation.rule=mean")  # "no Byzantine clients nor robust aggregation"
NON_IID = "federation.partition=by_label"
RECORDED = (
    "task.samples", "task.dtype", "task.adapter", "task.template", "task.label_words", "federation.clients",
    "federation.byzantine", "federation.attack", "federation.attack_reading", "federation.partition", "method.name",
    "method.k", "method.mu", "method.lr", "method.lr_schedule", "method.batch_size", "method.local_epochs",
    "aggregation.rule", "aggregation.beta", "rounds", "evaluate_every", "device",
)  # fmt: skip
FIXED = {"rounds": "--steps", "task.name": "--tasks", "seed": "--seeds"}
VARIED = ("method.name", "method.k", "method.local_epochs", "federation.clients", "federation.byzantine",
          "federation.partition")  # fmt: skip
"""What some tables vary; those can't be set for all runs of such a table."""

MeanAndStd = tuple[float, float]
"""Mean and deviation, in percent."""


@dataclass(frozen=True)
class Wanted:
    """A run, wanted for every seed.

    Args:
        axes: Its place in the table.
        task: The data set.
        settings: What differs from the task's defaults.
        share: Fraction of the task's steps; 0: none, for the accuracy before training.
        lr_factor: Multiplies the learning rate, whatever that is set to.
        seeds: How many at most; None: all.
    """

    axes: Mapping[str, Value]
    task: str
    settings: tuple[str, ...] = ()
    share: float = 1.0
    lr_factor: float = 1.0
    seeds: int | None = None


def tasks_of(request: Request, usual: Sequence[str]) -> tuple[str, ...]:
    """Return the data sets to show."""
    for task in request.text.tasks:
        if task not in TITLES:
            raise ConfigError(f"--tasks {task} is not one of the paper's data sets; {suggestion(task, TITLES)}")
    return tuple(dict.fromkeys(request.text.tasks)) or tuple(usual)


def seeds_of(request: Request) -> int:
    """Return the number of seeds."""
    return request.seeds or (QUICK_SEEDS if request.quick else SEEDS)


def steps_of(request: Request) -> int:
    """Return the number of steps in place of the paper's 20,000."""
    return request.text.steps or (QUICK_STEPS if request.quick else STEPS)


def make_cells(request: Request, wanted: Iterable[Wanted]) -> list[Cell]:
    """Return the cells, seed by seed; `--set` overrides everything else."""
    check_overrides(request)
    listed = list(wanted)
    for setting in request.overrides:
        task, assignment = of_task(setting)
        key = assignment.partition("=")[0].strip()
        if key in FIXED:
            raise ConfigError(f"--set {setting} would make different runs the same; use {FIXED[key]}")
        if task and request.text.tasks and task not in request.text.tasks:
            raise ConfigError(f"--set {setting} applies to {TITLES[task]}, which --tasks leaves out")
        if key in VARIED and any(given.partition("=")[0] == key for one in listed for given in one.settings):
            raise ConfigError(f"--set {setting} would make different runs the same: the table varies it")
    return [
        Cell(one.axes, _config(request, one, seed))
        for seed in range(seeds_of(request))
        for one in listed
        if seed < (one.seeds or seeds_of(request))
    ]


def _config(request: Request, one: Wanted, seed: int) -> Config:
    rounds = Config().with_overrides([f"task.name={one.task}"]).rounds * one.share * steps_of(request) / STEPS
    length = max(1, round(rounds)) if one.share else 0
    settings = [f"task.name={one.task}", f"seed={seed}", f"rounds={length}",
                f"evaluate_every={max(1, math.ceil(length / EVALUATIONS[one.task]))}"]  # fmt: skip
    if request.text.model:
        settings.append(f"task.model={find_model(request.text.model)}")
    if request.text.data is not None:
        settings.append(f"task.data={find_data(request.text.data, one.task)}")
    config = Config().with_overrides([*settings, *one.settings, *_fitting(request.overrides, one)])
    if one.lr_factor == 1:
        return config
    return config.with_overrides([f"method.lr={config.method.rate * one.lr_factor!r}"])


def _fitting(overrides: Iterable[str], one: Wanted) -> list[str]:
    """Return the overrides that apply to a run, those of its own data set last; central runs have no federation."""
    central = "method.name=mezo" in one.settings
    by_task = sorted(map(of_task, overrides), key=lambda pair: bool(pair[0]))
    return [setting for task, setting in by_task if task in ("", one.task)
            and not (central and setting.startswith(("federation.", "aggregation.")))]  # fmt: skip


def of_task(setting: str, known: Iterable[str] = TITLES) -> tuple[str, str]:
    """Split "trec:method.lr=1e-5" into the data set, empty for all, and the assignment."""
    task, colon, rest = setting.strip().partition(":")
    if not colon or not re.fullmatch(r"\w+", task):  # a colon further on belongs to the value
        return "", setting.strip()
    if task not in known:
        raise ConfigError(f"--set {setting} names an unknown data set; {suggestion(task, known)}")
    return task, rest.strip()


def find_model(name: str) -> str:
    """Return what task.model is set to for `--model`."""
    path = Path(name).expanduser()
    if path.exists():
        return str(path.resolve())
    if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        raise ConfigError(f"--model {name}: there is no such file or folder")
    return name


def find_data(data: Path, task: str) -> str:
    """Return what task.data is set to for `--data`."""
    folder = data.expanduser().resolve() / task
    if not folder.is_dir():
        raise ConfigError(f"--data {data} has no folder {task!r}; it must contain one for each data set that is shown")
    return str(folder)


def run(request: Request, cells: list[Cell]) -> list[Result]:
    """Run the cells that are not done yet; with --redraw, return the finished ones."""
    if request.redraw:
        found = done(request, cells)
        if not found:
            raise ConfigError(
                f"--redraw: {request.out} holds none of these {len(cells)} runs; leave it out to run them"
            )
        drawn_from(request, len(found), len(cells))
        return found
    _check_loadable(request, cells)
    workers = request.text.workers
    results = run_cells(request, cells, workers=workers, threads=max(1, available_cores() // workers))
    for result in results:  # as large as the model, and no longer needed
        (request.out / STUDY / result.folder / STATE).unlink(missing_ok=True)
    return results


def _check_loadable(request: Request, cells: Sequence[Cell]) -> None:
    """Load tokenizer and sentences of each data set once: if one is missing, every run would fail."""
    from cyber0.tasks import text

    found = done(request, list(cells))
    finished = {result.cell.digest for result in found if not (request.rerun and result.outdated)}
    left = {cell.config.task.name: cell.config.task for cell in cells if cell.digest not in finished}
    for task in left.values():
        text.make(task)


def attacked(task: str, axes: Mapping[str, Value], *settings: str, **more: Any) -> Wanted:
    """Return the run that Tables 3 and 6 vary: a quarter of the clients Byzantine, each with labels of its own."""
    return Wanted({"task": TITLES[task], **axes}, task, (NON_IID, *settings), **more)
