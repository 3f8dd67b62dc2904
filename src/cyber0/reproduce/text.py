"""The experiments with language models (Section 4.3 and Appendix A): what they have in common.

The paper's settings are the defaults of a config's text tasks. `--steps N` puts N in the place of its 20,000 steps;
what took more or fewer there (TREC, larger k, local epochs) does so in proportion. `--set trec:KEY=VALUE` is said of
one set only. Runs are played seed by seed, so that what was cut off is a whole table of fewer seeds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError
from cyber0.kernels.threads import available_cores
from cyber0.reproduce import Order
from cyber0.reproduce.cells import STUDY, check_overrides, done, play, plus_minus, rows_of
from cyber0.reproduce.outputs import UNFINISHED, Row, drawn_from, latex_table, markdown_table, write_csv
from cyber0.storage import CLIENTS, PARTITION, STATE, SUMMARY
from cyber0.study import Cell, Result

STEPS, QUICK_STEPS = 20_000, 20
SEEDS, QUICK_SEEDS = 3, 1
PAPER_MODEL = "RoBERTa-large"
TITLES = {"sst2": "SST-2", "trec": "TREC", "snli": "SNLI"}
SPLITS = {"sst2": ("dev", "test"), "trec": ("test",), "snli": ("test",)}
"""Which sets accuracy is reported on; the first is the paper's (SST-2's dev set is MeZO's test set)."""
EVALUATIONS = {"sst2": 20, "trec": 20, "snli": 10}  # of a run, beside that of the start; SNLI has 9,824 test samples
NOBODY_LIES = ("federation.byzantine=0", "aggregation.rule=mean")  # "no Byzantine clients nor robust aggregation"
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
"""What tables vary; where one does, it can't be set for all its runs."""

Measure = tuple[float, float]
"""Mean and deviation, in percent."""


@dataclass(frozen=True)
class Wanted:
    """A run that is wanted for every seed.

    Args:
        axes: Its place in the table.
        task: Which set.
        settings: What differs from the task's defaults.
        share: Of the task's steps; 0: none, for what the model can do before it has learned.
        lr_factor: By which the learning rate, whatever it is set to, is multiplied.
        seeds: How many at most; None: all that are wanted.
    """

    axes: Mapping[str, Value]
    task: str
    settings: tuple[str, ...] = ()
    share: float = 1.0
    lr_factor: float = 1.0
    seeds: int | None = None


def tasks_of(order: Order, usual: Sequence[str]) -> tuple[str, ...]:
    """Return the sets that are wanted."""
    for task in order.text.tasks:
        if task not in TITLES:
            raise ConfigError(f"--tasks {task} is none of the paper's sets; {suggestion(task, TITLES)}")
    return tuple(dict.fromkeys(order.text.tasks)) or tuple(usual)


def seeds_of(order: Order) -> int:
    """Return how many seeds are wanted."""
    return order.seeds or (QUICK_SEEDS if order.quick else SEEDS)


def steps_of(order: Order) -> int:
    """Return what stands in the place of the paper's 20,000 steps."""
    return order.text.steps or (QUICK_STEPS if order.quick else STEPS)


def make_cells(order: Order, wanted: Iterable[Wanted]) -> list[Cell]:
    """Return the runs, seed by seed; `--set` has the last word."""
    check_overrides(order)
    listed = list(wanted)
    for setting in order.overrides:
        task, said = _of_task(setting)
        key = said.partition("=")[0].strip()
        if key in FIXED:
            raise ConfigError(f"--set {setting} would make unlike runs alike; say it by {FIXED[key]}")
        if task and order.text.tasks and task not in order.text.tasks:
            raise ConfigError(f"--set {setting} is said of {TITLES[task]}, which --tasks leaves out")
        if key in VARIED and any(given.partition("=")[0] == key for one in listed for given in one.settings):
            raise ConfigError(f"--set {setting} would make unlike runs alike: it is what the table varies")
    return [
        Cell(one.axes, _config(order, one, seed))
        for seed in range(seeds_of(order))
        for one in listed
        if seed < (one.seeds or seeds_of(order))
    ]


def _config(order: Order, one: Wanted, seed: int) -> Config:
    rounds = Config().with_overrides([f"task.name={one.task}"]).rounds * one.share * steps_of(order) / STEPS
    length = max(1, round(rounds)) if one.share else 0
    settings = [f"task.name={one.task}", f"seed={seed}", f"rounds={length}",
                f"evaluate_every={max(1, math.ceil(length / EVALUATIONS[one.task]))}"]  # fmt: skip
    if order.text.model:
        settings.append(f"task.model={_model(order.text.model)}")
    if order.text.data is not None:
        settings.append(f"task.data={_folder(order.text.data, one.task)}")
    config = Config().with_overrides([*settings, *one.settings, *_fitting(order.overrides, one)])
    if one.lr_factor == 1:
        return config
    return config.with_overrides([f"method.lr={config.method.lr * one.lr_factor!r}"])


def _fitting(overrides: Iterable[str], one: Wanted) -> list[str]:
    """Leave out what is said of another set, and of a federation where there is none; what is said of one set last."""
    central = "method.name=mezo" in one.settings
    said = sorted(map(_of_task, overrides), key=lambda pair: bool(pair[0]))
    return [setting for task, setting in said if task in ("", one.task)
            and not (central and setting.startswith(("federation.", "aggregation.")))]  # fmt: skip


def _of_task(setting: str) -> tuple[str, str]:
    """Split "trec:method.lr=1e-5" into the set and what is said of it; without a set, of all."""
    task, colon, rest = setting.strip().partition(":")
    if not colon or not re.fullmatch(r"\w+", task):  # a colon further on belongs to the value
        return "", setting.strip()
    if task not in TITLES:
        raise ConfigError(f"--set {setting} names a set that the paper has not; {suggestion(task, TITLES)}")
    return task, rest.strip()


def _model(name: str) -> str:
    path = Path(name).expanduser()
    if path.exists():
        return str(path.resolve())
    if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        raise ConfigError(f"--model {name}: there is no such file or folder")
    return name


def _folder(data: Path, task: str) -> str:
    folder = data.expanduser().resolve() / task
    if not folder.is_dir():
        raise ConfigError(f"--data {data} holds no folder {task!r}; it must hold {', '.join(TITLES)}, as far as wanted")
    return str(folder)


def run(order: Order, cells: list[Cell]) -> list[Result]:
    """Play what is left of the cells, or with --redraw take what there is."""
    if order.redraw:
        found = done(order, cells)
        if not found:
            raise ConfigError(f"--redraw: {order.out} holds none of these {len(cells)} runs; leave it out to play them")
        drawn_from(order, len(found), len(cells))
        return found
    _check_loadable(order, cells)
    workers = order.text.workers
    results = play(order, cells, workers=workers, threads=max(1, available_cores() // workers))
    for result in results:  # as large as the model, and the run is done
        (order.out / STUDY / result.folder / STATE).unlink(missing_ok=True)
    return results


def _check_loadable(order: Order, cells: Sequence[Cell]) -> None:
    """Load tokenizer and sentences of each set once: what can't be had would fail every run, one after the other."""
    from cyber0.tasks.text.task import Text

    found = done(order, list(cells))
    finished = {result.cell.digest for result in found if not (order.rerun and result.outdated)}
    left = {cell.config.task.name: cell.config.task for cell in cells if cell.digest not in finished}
    for task in left.values():
        Text(task)


def summary_of(order: Order, result: Result) -> dict[str, Any]:
    """Return a run's figures."""
    found: dict[str, Any] = json.loads((order.out / STUDY / result.folder / SUMMARY).read_text(encoding="utf-8"))
    return found


class Table:
    """What came of the runs, to be asked for accuracies.

    Args:
        order: What is wanted.
        results: The runs that are done.
        cells: All that there should be.
    """

    def __init__(self, order: Order, results: Sequence[Result], cells: Sequence[Cell]) -> None:
        self.order, self.results, self.cells = order, results, cells
        self._summaries = [summary_of(order, result) for result in results]

    @property
    def model(self) -> str:
        """The model's name as tables have it."""
        return model_title(self.cells[0].config.task.model)

    def figures(self, key: str, **axes: Value) -> list[float]:
        """Return a figure of the runs at a place, one a seed, as far as they have it."""
        rows = zip(self.results, self._summaries, strict=True)
        return [float(summary[key]) for result, summary in rows
                if summary.get(key) is not None and axes.items() <= result.cell.axes.items()]  # fmt: skip

    def accuracy(self, split: str, **axes: Value) -> list[float]:
        """Return the final accuracies at a place, one a seed, in percent."""
        return [100 * value for value in self.figures(f"{split}_accuracy", **axes)]

    def rows(self) -> list[Row]:
        """Return one row a run, for a CSV file."""
        return [self._row(*pair) for pair in zip(self.results, self._summaries, strict=True)]

    def _row(self, result: Result, summary: Mapping[str, Any]) -> Row:
        config = result.cell.config  # which has as numbers what axes say in words
        splits = {f"{split}_accuracy": summary.get(f"{split}_accuracy") for split in ("dev", "test")}
        return {
            **result.cell.axes, "seed": config.seed, "model": self.model, "method": config.method.name, **splits,
            "zero_shot_accuracy": summary.get("initial_accuracy"), "loss": summary["final_loss"],
            "rounds": summary["rounds"], "k": config.method.k, "local_epochs": config.method.local_epochs,
            "lr": config.method.lr, "clients": config.federation.clients, "byzantine": config.federation.byzantine,
            "partition": config.federation.partition, "uplink_bytes": summary["uplink_bytes_per_client"],
            "dimension": summary["dimension"], "seconds": round(summary["wall_seconds"], 1),
            "model_digest": summary["model_digest"],
        }  # fmt: skip

    def evaluations(self) -> list[Row]:
        """Return one row an evaluation of every run, for a CSV file."""
        rows: list[Row] = []
        for result in self.results:
            for row in rows_of(self.order, result):
                kept = {key: row[key] for key in ("round", "accuracy", "loss", "train_loss", "uplink_bytes")}
                rows.append({**result.cell.axes, "seed": result.cell.config.seed, "model": self.model, **kept})
        return rows

    def clients(self) -> list[Row]:
        """Return one row a client of every run that is under attack, for a CSV file."""
        rows: list[Row] = []
        for result in self.results:
            if not result.cell.config.federation.byzantine:
                continue
            files = (rows_of(self.order, result, name) for name in (PARTITION, CLIENTS))
            for holds, came in zip(*files, strict=True):
                rows.append({**result.cell.axes, "seed": result.cell.config.seed,
                             "share_trimmed": came["share"], **holds})  # fmt: skip
        return rows


def finish(table: Table, name: str, title: str, lines: Sequence[str]) -> Path:
    """Write NAME.md: what there is to say, and the settings that it rests on."""
    order, path = table.order, table.order.out / f"{name}.md"
    steps = steps_of(order)
    scale = f" where the paper took {STEPS:,}, and others in proportion" if steps != STEPS else ""
    seeds = seeds_of(order)
    spread = f"{seeds} seeds, means ± sample deviation" if seeds > 1 else "one seed"
    tasks = {"", *(cell.config.task.name for cell in table.cells)}
    said = "; ".join(f"`{o}`" for o in order.overrides if _of_task(o)[0] in tasks).replace("\n", "\\n")
    changed = f" Changed by --set: {said}." if said else ""
    head = [f"# {title}", "", f"**Model: {table.model}.** The paper's is {PAPER_MODEL}. {steps:,} steps{scale}; "
            f"{spread}.{changed}"]  # fmt: skip
    if order.quick:
        head += ["", "**A quick look: not to be compared with the paper.**"]
    missing = len(table.cells) - len(table.results)
    if missing:
        head += ["", f"**{missing} of {len(table.cells)} {UNFINISHED}: means are over the seeds there are.**"]
    text = "\n".join([*head, "", *lines, "", "## Settings", "", settings_table(table.cells)])
    path.write_text(text + "\n", encoding="utf-8")
    return path


def write_latex(table: Table, name: str, *tables: tuple[Sequence[str], Sequence[Sequence[Any]]]) -> None:
    """Write NAME.tex: the tables, under a comment that names the model."""
    parts = [latex_table(head, rows) for head, rows in tables]
    text = f"% {table.model}, {steps_of(table.order):,} steps, {seeds_of(table.order)} seed(s)\n" + "\n".join(parts)
    (table.order.out / f"{name}.tex").write_text(text, encoding="utf-8")


def write_runs(table: Table, name: str) -> None:
    """Write NAME.csv, one row a run; who lied in it, had which labels, and was trimmed; and every evaluation."""
    write_csv(table.order.out / f"{name}.csv", table.rows())
    write_csv(table.order.out / f"{name}.clients.csv", table.clients())
    write_csv(table.order.out / f"{name}.evaluations.csv", table.evaluations())


def settings_table(cells: Sequence[Cell]) -> str:
    """Return the settings of the runs, set by set; where runs differ, all values that there are."""
    tasks = dict.fromkeys(cell.config.task.name for cell in cells)
    trained = [cell.config for cell in cells if cell.config.rounds]
    rows = []
    for key in RECORDED:
        section, _, name = key.rpartition(".")
        values: list[list[Value]] = []
        for task in tasks:
            tables = [asdict(config) for config in trained if config.task.name == task]
            values.append(list(dict.fromkeys((t[section] if section else t)[name] for t in tables)))
        if any(value != "" for found in values for value in found):
            rows.append([f"`{key}`", *(", ".join(map(_shown, found)) for found in values)])
    return markdown_table(["setting", *(TITLES[task] for task in tasks)], rows)


def _shown(value: Value) -> str:
    if value == "":
        return "the task's own"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", "\\n").replace("|", "\\|")


def model_title(name: str) -> str:
    """Return a model's name as tables have it: of a .gguf file with what it was dequantised from."""
    path = Path(name)
    if path.suffix == ".gguf":
        found = re.fullmatch(r"(.+)[.-]i?q(\d)(?:[_a-z0-9]*)", path.stem, re.IGNORECASE)
        return f"{found[1]}, dequantised from {found[2]} bit" if found else path.stem
    return path.name if path.is_absolute() else name


def paper_cell(measure: Measure | None) -> str:
    """Write what the paper has, if anything."""
    return "–" if measure is None else f"{measure[0]:.1f} ± {measure[1]:.1f}"


def cell(values: Sequence[float]) -> str:
    """Write mean and deviation, or that there is nothing yet."""
    return plus_minus(values) if values else "–"


def difference(values: Sequence[float], paper: Measure | None) -> str:
    """Write by how much our mean is above the paper's."""
    return f"{fmean(values) - paper[0]:+.1f}" if values and paper else "–"


def split_titles(task: str) -> dict[str, str]:
    """Return how the sets are called that a task's accuracy is reported on."""
    splits = SPLITS[task]
    return {split: TITLES[task] if len(splits) == 1 else f"{TITLES[task]} ({split})" for split in splits}


def attacked(task: str, axes: Mapping[str, Value], *settings: str, **more: Any) -> Wanted:
    """Return the run that Tables 3 and 6 vary: a quarter of the clients lies, and each has labels of its own."""
    return Wanted({"task": TITLES[task], **axes}, task, (NON_IID, *settings), **more)
