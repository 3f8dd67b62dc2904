"""What `cyber0 run` shows: the partition, a progress bar or lines, the result. rich is loaded on first use."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, Self

from cyber0.config import doors
from cyber0.errors import ExitCode
from cyber0.tasks import SETS, of_set

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cyber0.federation.simulation import Federation
    from cyber0.ledger import Record
    from cyber0.runs.run import Run

MOST_ROWS, MOST_COLUMNS = 16, 20  # of the table that shows a partition


def new_console(quiet: bool = False) -> Console:
    """Return a console as wide as $COLUMNS, else as the terminal, else 120 characters; a quiet one prints nothing.

    With a quiet one, what slow steps say of themselves is not shown either.
    """
    from rich.console import Console

    if quiet:
        logging.getLogger("cyber0.progress").setLevel(logging.WARNING)

    columns = os.environ.get("COLUMNS", "")
    known = sys.stdout.isatty() or (columns.isdecimal() and int(columns) > 0)  # then rich finds the width by itself
    return Console(quiet=quiet, highlight=False, width=None if known else 120)


def announce(this: Run, console: Console) -> None:
    """Print what is about to run."""
    console.print(this.title(), style="bold")
    simulation = this.simulation
    config, f = simulation.config, simulation.config.federation  # a method may have its own view of the settings
    console.print(f"d = {simulation.parameters.dimension:,}, device {this.config.device}, folder {this.folder}")
    if this.automatic_lr is not None:
        found = this.lr_search
        how = f", by {found['trials']} trial runs of {found['rounds']} rounds" if found else ""
        console.print(f'lr = {this.automatic_lr:g}{how} (method.lr = "auto")')
    if 0 < simulation.checkpointed_round < this.config.rounds:
        console.print(f"resuming after round {simulation.checkpointed_round} of {this.config.rounds}")
    elif simulation.checkpointed_round:
        console.print(f"all {simulation.checkpointed_round} rounds are done; missing outputs are written")
    if f.participation < 1:
        console.print(f"{f.invited} of {f.clients} clients are invited per round; {config.risk:.2%} of the rounds "
                      f"have more than the {config.borne} Byzantine clients that the rule tolerates")  # fmt: skip
    if f.byzantine and config.aggregation.rule == "mean":
        console.print("warning: the plain mean tolerates no Byzantine client", style="yellow")
    elif f.participation == 1 and f.byzantine > config.borne:
        console.print(
            f"warning: {f.byzantine} clients are Byzantine, and the rule tolerates {config.borne}", style="yellow"
        )
    console.print(partition_table(simulation, f.partition_title))
    for warning in simulation.federator.warnings:
        console.print(f"warning: {warning}", style="yellow")


def partition_table(simulation: Federation, name: str) -> Table:
    """Return how many samples of each label each client has; for many clients or labels, a summary."""
    from statistics import median

    from rich.table import Table

    counts, byzantine = simulation.label_counts(), simulation.byzantine
    clients, labels = counts.shape
    if clients > MOST_ROWS or labels > MOST_COLUMNS:
        table = Table(f"each of {clients:,} clients has", "min", "median", "max", title=f"Partition: {name}")
        figures = {"samples": counts.sum(axis=1), "labels": (counts > 0).sum(axis=1)}
        for what, values in figures.items() if simulation.task.classes else [("samples", figures["samples"])]:
            some = values.tolist()
            table.add_row(what, *(f"{measure(some):,g}" for measure in (min, median, max)))
        return table
    if not simulation.task.classes:
        table = Table("client", "samples", title=f"Partition: {name} (* Byzantine)")
        for client, row in enumerate(counts):
            table.add_row(f"{client}{'*' if byzantine[client] else ' '}", str(int(row.sum())))
        return table
    table = Table(title=f"Partition: {name} (samples of each label; * Byzantine)")
    names = getattr(simulation.task, "label_names", None) or map(str, range(labels))  # a task need not name them
    for head in ("client", *names, "all"):
        table.add_column(head, justify="right")
    for client, row in enumerate(counts):
        cells = [str(count) if count else "." for count in row.tolist()]
        table.add_row(f"{client}{'*' if byzantine[client] else ' '}", *cells, str(int(row.sum())))
    return table


class Display:
    """A callback that prints a run: its settings, its progress, its result.

    Progress is a bar on a terminal, and a line every tenth of the run elsewhere. Both name the round of an evaluation
    if it is not the current one; a line leaves out an evaluation that an earlier line showed. Use it as a context
    manager, so that the bar stops when the run is interrupted.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or new_console()
        self.run: Run | None = None
        """The run, once it has started."""
        self.code = ExitCode.DONE
        """The exit code, once the run has ended: not 0 if it certainly learned nothing."""
        self._bar: Any = None
        self._shown = 0
        self._evaluation = 0  # the round of the last one that a line has shown; the one at the start is not shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_start(self, run: Run) -> None:
        announce(run, self._console)
        self.show_progress(run)

    def show_progress(self, run: Run) -> None:
        """Show the progress of a run from now on."""
        self.run = run
        if self._console.is_terminal and not self._console.quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=run.rounds, completed=run.round, figures="")

    def on_round(self, record: Record) -> None:
        assert self.run is not None
        if not self.run.is_due(self.run.round):  # else the evaluation is shown with the round
            self._show(self.run)

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
        assert self.run is not None
        self._show(self.run)

    def on_end(self, summary: dict[str, Any]) -> None:
        assert self.run is not None
        self.__exit__()
        self.code = conclude(self.run, summary, self._console)

    def _show(self, run: Run) -> None:
        tenth = 10 * run.round // run.rounds if run.rounds else 0
        if self._bar is not None:
            self._bar.update(self._task, completed=run.round, figures=self._figures(run, 3))
        elif not self._console.quiet and tenth > self._shown:
            self._shown, evaluation = tenth, run.last_row.round
            figures = self._figures(run, 4, evaluated=evaluation > self._evaluation)
            self._evaluation = max(self._evaluation, evaluation)
            self._console.print(f"round {run.round}/{run.rounds}  {figures}")

    def _figures(self, run: Run, digits: int, *, evaluated: bool = True) -> str:
        """Return the last evaluation, with its round if that is not the current one, and the speed."""
        from cyber0.report.headline import rate_text

        row, which = run.last_row, run.simulation.evaluated_on
        when = "" if row.round == run.round else f" (at round {row.round})"
        figures = {_of_set(which, name) if name == "accuracy" else name: v for name, v in row.figures().items()}
        figures["loss" if "accuracy" in row.figures() else _of_set(which, "loss")] = row.loss
        evaluation = "  ".join(f"{name} {value:.{digits}f}" for name, value in figures.items()) + when
        return "  ".join(filter(None, [evaluation if evaluated else "", rate_text(run.rounds_per_second)]))


def conclude(this: Run, summary: dict[str, Any], console: Console) -> ExitCode:
    """Print the result, where it is, and what looks wrong with it; return the exit code."""
    from rich.table import Table

    from cyber0.report.headline import rate_text
    from cyber0.report.writer import curve_picture
    from cyber0.storage import REPORT, SOURCES, WEIGHTS

    table = Table(title="Result", show_header=False)
    for name, accuracy in _accuracies(summary):
        table.add_row(name, f"{accuracy:.2%}")
    for name, value in summary["metrics"].items():
        if name != "accuracy":
            table.add_row(_of_set(summary["evaluated_on"], name), "not finite" if value is None else f"{value:.4f}")
    loss = summary["final_loss"]
    table.add_row(_of_set(summary["evaluated_on"], "loss"),
                  "not finite: it diverged" if loss is None else f"{loss:.4f}")  # fmt: skip
    abandoned = f" ({summary['abandoned_rounds']} abandoned)" if summary["abandoned_rounds"] else ""
    table.add_row("rounds", f"{summary['rounds']}{abandoned}")
    if best := _best(this, summary):
        table.add_row("best round", best)
    table.add_row("sent by a client", f"{summary['uplink_bytes_per_client']:,} bytes")
    table.add_row("received by a client", f"{summary['downlink_bytes_per_client']:,} bytes")
    if this.config.method.name == "cyber0":
        dense = 4 * summary["dimension"] * summary["rounds"]
        table.add_row("as weights it would be", f"{dense:,} bytes each way")
    speed = rate_text(summary["rounds_per_second"])
    table.add_row("time", f"{summary['wall_seconds']:.1f} s{', ' if speed else ''}{speed}")
    if suspects := _suspects(this):
        table.add_row("most trimmed clients", suspects)
    for expulsion in this.simulation.federator.expulsions:
        table.add_row("expelled", expulsion.text)
    table.add_row("model digest", summary["model_digest"][:16])
    console.print(table)
    weights = f"{WEIGHTS}, " if (this.folder / WEIGHTS).exists() else ""  # not stored for a named model
    files = f"config.toml, partition.csv, metrics.csv, clients.csv, summary.json, {weights}{this.simulation.state_file}"
    files += f", {SOURCES}" if (this.folder / SOURCES).exists() else ""
    console.print(f"{this.folder}/: {files}, plots/{curve_picture(this)}, plots/suspects.png, plots/partition.png")
    if this.export:
        loader = " (from_pretrained or PEFT loads it)" if this.model_path.is_dir() else ""
        console.print(f"trained model: {this.model_path}{loader}", soft_wrap=True)
    console.print(f"report: {this.folder / REPORT}")
    return _judge(this, summary, console)


def _judge(this: Run, summary: dict[str, Any], console: Console) -> ExitCode:
    """Print what looks wrong with the run; return the exit code, which is not 0 if it certainly learned nothing."""
    from cyber0.report import outcome

    ledger = getattr(this.simulation, "ledger", None)  # without one, the change of the loss decides
    unchanged = ledger is not None and ledger.header.weights_digest == summary["model_digest"]
    found = outcome.judge(
        summary,
        [this.rows[r] for r in sorted(this.rows)],
        unchanged=unchanged,
        rule=doors.short(this.config.aggregation.rule),
    )
    remedy = outcome.remedy(this.config.method.name, shlex.quote(str(this.folder)))
    if found.failure:
        print(f"error: nothing was learned: {found.failure}; {remedy}", file=sys.stderr)
        return ExitCode.NOTHING_LEARNED
    if found.doubts:
        console.print(f"warning: {'; '.join(found.doubts)}. If that is unexpected: {remedy}", style="yellow",
                      soft_wrap=True, markup=False)  # fmt: skip
    return ExitCode.DONE


def _best(this: Run, summary: dict[str, Any]) -> str:
    """Return at which round the model was best, and how good, if the task defines that."""
    row, metric = this.rows.get(summary["best_round"]), summary.get("best_metric", "").removeprefix("-")
    if row is None or not metric:
        return ""
    value = row.measured()[metric]
    return f"{row.round} ({metric} {value:.4f})"


def _accuracies(summary: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the final accuracy by name, and that on the other set where there are two."""
    measured = summary["evaluated_on"]
    other = [(of_set(s, "accuracy"), summary[f"{s}_accuracy"]) for s in SETS
             if s != measured and f"{s}_accuracy" in summary]  # fmt: skip
    name = of_set(measured, "accuracy") if other else _of_set(measured, "accuracy")
    own = [] if summary["final_accuracy"] is None else [(name, summary["final_accuracy"])]
    return [*own, *other]


def _of_set(which: str, what: str) -> str:
    """Name a figure by its set, unless that is the test set."""
    return what if which == "test" else of_set(which, what)


def _suspects(this: Run) -> str:
    rows = sorted(this.suspects(), key=lambda row: -row.share)
    worst = rows[: max(3, this.config.federation.byzantine)][:6]
    alike = sum(row.share == rows[0].share for row in rows)
    if alike > len(worst):  # nobody stands out: nothing is trimmed, or nearly everybody, as with Krum
        who = "each" if alike == len(rows) else f"{alike} of {len(rows)} clients"
        return f"none stands out: {who} had {rows[0].share:.0%} of the scalars trimmed" if rows[0].share else ""
    units = (" of its scalars", *[""] * len(worst))  # named only once
    return ", ".join(f"{row.client} ({row.share:.0%}{of}{', Byzantine' if row.byzantine else ''})"
                     for row, of in zip(worst, units, strict=False))  # fmt: skip
