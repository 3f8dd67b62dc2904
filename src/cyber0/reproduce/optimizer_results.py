"""What the comparison of the optimizers gave: the figure, the tables, and whether the claims of others hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from cyber0.reproduce.cells import STUDY, plus_minus
from cyber0.reproduce.optimizer_runs import BASELINE, HELD_OUT, RUNGS, TASKS, Entry, Run
from cyber0.reproduce.optimizers import OptimizerStudy
from cyber0.reproduce.outputs import UNFINISHED, Row, markdown_table, write_all
from cyber0.reproduce.text import seeds_of
from cyber0.study.device_memory import MEMORY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "optimizers"
MEASURED = ("accuracy", "loss", "validation_accuracy", "validation_loss", "train_loss", "seconds")
NEARLY = 0.9  # of the best decrease of the loss: a rate that gives this works


class Curve(NamedTuple):
    """A measure against forward passes, or rounds; the mean over runs, and their range."""

    passes: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    passes_per_round: float

    def passes_to(self, target: float) -> float | None:
        """Return where the mean first reaches a target, interpolated between evaluations; None if it never does."""
        for place, value in enumerate(self.mean):
            if value >= target:
                if place == 0:
                    return self.passes[0]
                before = self.mean[place - 1]
                share = (target - before) / (value - before)
                return self.passes[place - 1] + share * (self.passes[place] - self.passes[place - 1])
        return None


def curve_of(runs: Sequence[Run], *, loss: bool = False) -> Curve:
    """Return the curve of the accuracy in percent, or of the negative loss that rates are chosen by."""
    values = [[-x for x in run.losses] if loss else [100 * x for x in run.column("accuracy")] for run in runs]
    columns = [[x if not math.isnan(x) else -math.inf for x in column] for column in zip(*values, strict=True)]
    return Curve(runs[0].passes, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns],
                 runs[0].passes_per_round)  # fmt: skip


class Speed(NamedTuple):
    """How many times fewer forward passes and rounds than sgd a variant needs; 0: it does not get there."""

    passes: float
    rounds: float


def speed_of(baseline: Curve, curve: Curve) -> Speed:
    """Compare two curves at the level at which the baseline ends, each where it first reaches that."""
    target = baseline.mean[-1]
    needed, usual = curve.passes_to(target), baseline.passes_to(target)
    if needed is None or usual is None or not math.isfinite(target):
        return Speed(0.0, 0.0)
    passes = usual / needed if needed else math.inf
    return Speed(passes, passes * curve.passes_per_round / baseline.passes_per_round)


class Claim(NamedTuple):
    """What others claim of an optimizer, as the least factor over sgd that would bear it out."""

    work: str
    variant: str
    text: str
    at_least: float
    in_rounds: bool = False


CLAIMS = (
    Claim("FZOO", "normalized", "3 to 18 times fewer forward passes", 3.0),
    Claim("HiZOO", "hessian", "8 times fewer forward passes", 8.0),
    Claim("AdaMeZO", "adam", "up to 70 % fewer forward passes", 1 / 0.3),
    Claim("HiSo", "hessian", "1.4 to 5.4 times fewer rounds", 1.4, in_rounds=True),
)
ONE_SCALAR = ("adaptive", ("momentum", "adam", "hessian"))
"""MEAZO's claim: the first, with one scalar of state, does what the others do with a vector each."""
NO_WORSE = 0.9
"""The share of the others' factor that counts as doing the same."""


class Figures:
    """The measures of a study, by entry.

    Args:
        study: The study, with all that is done.
    """

    def __init__(self, study: OptimizerStudy) -> None:
        self.study, self.request = study, study.request
        self.full = {(e, b): study.full_runs(e, byzantine=b) for e in study.entries for b in (False, True)}
        self.searched = {e: study.searched(e) for e in study.entries}

    def of_task(self, task: str) -> list[Entry]:
        """Return the entries of a task of which something is done."""
        return [e for e in self.study.entries if e.task == task and (self.searched[e] or self.full[e, False])]

    def baseline(self, entry: Entry, *, same_batch: bool = False) -> Entry:
        """Return what an entry is compared with: plain sgd, or sgd with the same batches."""
        batch = entry.batch if same_batch else 0
        return next(e for e in self.study.entries
                    if (e.task, e.variant.name, e.batch) == (entry.task, BASELINE, batch))  # fmt: skip

    def full_speed(self, entry: Entry) -> Speed | None:
        """Return the factor over plain sgd, by the accuracy at which that ends; None if it was not measured."""
        mine, usual = self.full[entry, False], self.full[self.baseline(entry), False]
        return speed_of(curve_of(usual), curve_of(mine)) if mine and usual else None

    def search_speed(self, entry: Entry) -> Speed | None:
        """Return the factor over sgd with the same batches, by the loss at which the last rung of its search ends."""
        mine, usual = self.searched[entry], self.searched[self.baseline(entry, same_batch=True)]
        return speed_of(curve_of([usual], loss=True), curve_of([mine], loss=True)) if mine and usual else None

    def speed(self, task: str, variant: str) -> tuple[Speed, str] | None:
        """Return the best factor of an optimizer on a task, and how it was measured; that of full runs counts first."""
        entries = [e for e in self.of_task(task) if e.variant.name == variant]
        for measure, how in ((self.full_speed, "accuracy of full runs"), (self.search_speed, "loss in the search")):
            found = [speed for e in entries if (speed := measure(e)) is not None]
            if found:
                return max(found, key=lambda speed: speed.passes), how
        return None

    def memory(self, entry: Entry) -> float | None:
        """Return the peak memory of a round over that of inference, where it was measured."""
        runs = [*self.full[entry, False], *([run] if (run := self.searched[entry]) else [])]
        for run in runs:
            try:
                found = json.loads((self.request.out / STUDY / run.result.folder / MEMORY).read_text())
                return float(found["round_bytes"]) / float(found["inference_bytes"])
            except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
                continue
        return None

    def working_rates(self, entry: Entry) -> int:
        """Return how many rates of the first rung, by factors of 2, give nearly the best decrease of the loss."""
        wanted = self.study.search(entry).wanted[0]
        runs = [run for e in wanted if (run := self.study.run_of(entry, self.study.cell(entry, 0, e))) is not None]
        falls = [run.losses[0] - run.final_loss for run in runs]
        return sum(fall >= NEARLY * max(falls) for fall in falls) if falls and max(falls) > 0 else 0


def write(study: OptimizerStudy) -> Path:
    """Write optimizers.csv, every evaluation; the figure; and optimizers.md, the tables."""
    figures = Figures(study)
    return write_all(study.request.out, NAME, evaluations(study), draw(figures), "\n".join(_lines(figures)) + "\n")


def evaluations(study: OptimizerStudy) -> list[Row]:
    """Return one row per evaluation of every run."""
    rows: list[Row] = []
    for run in study.runs():
        for passes, row in zip(run.passes, run.rows, strict=True):
            measured = {key: row.get(key, "") for key in MEASURED}
            rows.append({**run.cell.axes, "seed": run.cell.config.seed, "round": row["round"],
                         "passes": round(passes, 2), **measured})  # fmt: skip
    return rows


def _lines(figures: Figures) -> list[str]:
    study = figures.study
    seeds = seeds_of(study.request)
    spread = f"{seeds} seeds, means ± sample deviation" if seeds > 1 else "one seed"
    changed = f" Changed by --set: {'; '.join(f'`{o}`' for o in study.request.overrides)}.".replace("\n", "\\n")
    lines = ["# The optimizers at equal forward passes", "",
             f"A forward pass is one over all training samples. Rates: successive halving on one seed over "
             f"{' and '.join(f'1/{round(1 / share)}' for share in RUNGS)} of a run at a constant rate, by the loss on "
             f"{HELD_OUT} samples that are held out (MNIST, ridge: the test loss). Full runs: {spread}; the rate falls "
             f"linearly to 0, and is halved or doubled for all seeds as long as that helps the first one: by the "
             f"accuracy on the held-out samples, then by their loss (MNIST, ridge: by the test loss)."
             f"{changed if study.request.overrides else ''}"]  # fmt: skip
    if study.request.quick:
        lines += ["", "**A preview: the budgets are too small to compare anything.**"]
    left = [cell for cell in study.cells(study.entries) if not study.is_done(cell)]
    if left:
        lines += ["", f"**{len(left)} {UNFINISHED}, and more may follow from these.**"]
    for task in study.tasks:
        lines += [
            "",
            f"## {TASKS[task].title}, {study.budget(task):,.0f} forward passes",
            "",
            *_task_lines(figures, task),
        ]
    return [*lines, "", "## What others claim", "", claims_table(figures), "",
            "The factor is that of forward passes (HiSo: rounds) to the accuracy at which plain sgd ends, where the "
            "optimizer was among those run in full; else to the loss at which the search of sgd with the same batches "
            "ends. A claim holds if the factor reaches its lower end on every task measured; language tasks "
            "decide where there are any."]  # fmt: skip


def _task_lines(figures: Figures, task: str) -> list[str]:
    targets = figures.study.targets[task]
    head = ["variant", "k", "rate", "rates that work", "search loss", "accuracy (%)", "with Byzantine clients",
            "passes to sgd's end", "factor", *(f"passes to {t:g} %" for t in targets), "memory / inference",
            "seconds"]  # fmt: skip
    rows = []
    for entry in sorted(figures.of_task(task), key=lambda e: _order(figures, e)):
        runs, attacked = figures.full[entry, False], figures.full[entry, True]
        searched = figures.searched[entry]
        one = runs[0] if runs else searched
        assert one is not None
        usual, mine = figures.full[figures.baseline(entry), False], curve_of(runs) if runs else None
        speed, memory = figures.full_speed(entry), figures.memory(entry)
        rows.append([
            entry.name, one.cell.config.method.k, f"{one.cell.config.method.lr:.3g}", figures.working_rates(entry),
            "–" if searched is None else f"{searched.final_loss:.4f}",
            _accuracies(runs), _accuracies(attacked),
            _passes(mine.passes_to(curve_of(usual).mean[-1]) if mine and usual else None, measured=speed is not None),
            "–" if speed is None else _factor(speed.passes),
            *(_passes(mine.passes_to(t) if mine else None, measured=mine is not None) for t in targets),
            "–" if memory is None else f"{memory:.2f} x",
            f"{fmean(run.column('seconds')[-1] for run in runs):.3g}" if runs else "–",
        ])  # fmt: skip
    if not rows:
        return ["No search is done yet."]
    return [markdown_table(head, rows)]


def _order(figures: Figures, entry: Entry) -> tuple[bool, float]:
    """Full runs first, then by the loss of the search."""
    searched = figures.searched[entry]
    return not figures.full[entry, False], math.inf if searched is None else searched.final_loss


def _accuracies(runs: Sequence[Run]) -> str:
    return plus_minus([100 * run.column("accuracy")[-1] for run in runs]) if runs else "–"


def _passes(found: float | None, *, measured: bool) -> str:
    return f"{found:,.0f}" if found is not None else "not reached" if measured else "–"


def claims_table(figures: Figures) -> str:
    """Return what the works claim, what was measured, and whether the claims hold here."""
    rows: list[Sequence[object]] = []
    for claim in CLAIMS:
        found = {task: speed for task in figures.study.tasks if (speed := figures.speed(task, claim.variant))}
        factors = {task: speed.rounds if claim.in_rounds else speed.passes for task, (speed, _) in found.items()}
        verdict = judge({task: factor >= claim.at_least for task, factor in factors.items()})
        shown = [f"{TASKS[task].title} {_factor(factors[task])} ({how})" for task, (_, how) in found.items()]
        rows.append([claim.work, claim.variant, claim.text, "; ".join(shown) or "–", verdict])
    simple, others = ONE_SCALAR
    holds, shown = {}, []
    for task in figures.study.tasks:
        mine = figures.speed(task, simple)
        theirs = {name: speed[0].passes for name in others if (speed := figures.speed(task, name))}
        if mine is None or not theirs:
            continue
        best = max(theirs, key=lambda name: theirs[name])
        holds[task] = mine[0].passes >= NO_WORSE * theirs[best]
        shown.append(f"{TASKS[task].title} {_factor(mine[0].passes)}, {best} {_factor(theirs[best])}")
    rows.append(["MEAZO", simple, f"one scalar does as well as vectors ({', '.join(others)})", "; ".join(shown) or "–",
                 judge(holds)])  # fmt: skip
    return markdown_table(["work", "here", "claim", "measured factor over sgd", "holds"], rows)


def judge(holds: Mapping[str, bool]) -> str:
    """Return the verdict on a claim, given whether it holds on each task; language tasks decide where there are any."""
    deciding = {task: value for task, value in holds.items() if not TASKS[task].samples} or holds
    if not deciding:
        return "not measured"
    good = [TASKS[task].title for task, value in deciding.items() if value]
    return "yes" if len(good) == len(deciding) else f"only on {', '.join(good)}" if good else "**no**"


def _factor(factor: float) -> str:
    return f"{factor:.2g} x" if factor else "not reached"


def draw(figures: Figures) -> Figure:
    """Draw a panel for each task: full runs where there are any, else the searches' best."""
    from cyber0.report.plots import new_figure

    tasks = figures.study.tasks
    figure = new_figure("", width=5.2 * len(tasks), height=4.2)
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        _panel(axes, figures, task)
    return figure


def _panel(axes: Axes, figures: Figures, task: str) -> None:
    from cyber0.report.plots import COLOURS, INK, plain

    entries = [e for e in figures.of_task(task) if figures.full[e, False] or figures.full[e, True]]
    searches = not entries
    entries = entries or sorted(figures.of_task(task), key=lambda e: _order(figures, e))[: len(COLOURS)]
    colours, shown = iter(COLOURS), list[Curve]()
    for entry in entries:
        colour = INK if entry.is_baseline else next(colours, INK)
        runs = [run for run in [figures.searched[entry]] if run] if searches else figures.full[entry, False]
        for group, dashed in ((runs, False), ([] if searches else figures.full[entry, True], True)):
            if group:
                curve = curve_of(group)
                shown.append(curve)
                label = f"{entry.name}, Byzantine clients" if dashed else entry.name
                axes.plot(curve.passes, curve.mean, color=colour, linestyle="--" if dashed else "-", linewidth=1.6,
                          label=label)  # fmt: skip
                axes.fill_between(curve.passes, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    _clip(axes, shown)
    axes.set_title(f"{TASKS[task].title}{', search' if searches else ''}", fontsize=11)
    axes.set_xlabel("Forward passes over the training samples")
    axes.set_ylabel("Explained variance (%)" if task == "ridge" else "Accuracy (%)")
    if entries:
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    plain(axes)


def _clip(axes: Axes, curves: Sequence[Curve]) -> None:
    """Leave out the first steep rise: the axis begins where the lowest curve is after a twelfth of its passes."""
    lows = [low for curve in curves for p, low in zip(curve.passes, curve.low, strict=True)
            if p >= RUNGS[-1] * curve.passes[-1] and math.isfinite(low)]  # fmt: skip
    highs = [high for curve in curves for high in curve.high if math.isfinite(high)]
    if lows and max(highs) > min(lows):
        room = 0.04 * (max(highs) - min(lows))
        axes.set_ylim(min(lows) - room, max(highs) + room)
