"""The command line. Heavy packages are imported inside the command that needs them: --help answers at once."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0 import __version__
from cyber0.errors import Cyber0Error
from cyber0.serve import commands

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cyber0.report.watch import Watch
    from cyber0.runs import Progress, Run
    from cyber0.simulation import Federation

MOST_ROWS, MOST_COLUMNS = 16, 20  # of the table that shows a partition

app = typer.Typer(
    help="Federated zero-order learning: k numbers a round each way, and clients that may lie.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Run the command line; what a user can mend is said in one line, without a traceback."""
    try:
        app()
    except Cyber0Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as in `cyber0 list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:  # a folder that can't be written to, a full disk
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"cyber0 {__version__}")
        raise typer.Exit


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Settings; none: the default run.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one setting; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run. (default: runs/TASK-TIME)")] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where losses are computed.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with a run that was cut off.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report live on this machine, and print its address.")
    ] = False,
    watch_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where --watch listens. With another than the default, everybody who can reach it can read the run: "
            "it asks for no password and nothing is encrypted.",
        ),
    ] = "127.0.0.1",
    watch_port: Annotated[int, typer.Option(metavar="PORT", help="0: one that is free.", min=0, max=65535)] = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files for TensorBoard, which must be installed.")
    ] = False,
) -> None:
    """Train: simulate a federation on this machine.

    Without arguments: MNIST, 12 clients of whom 3 lie, k = 64, 400 rounds. `cyber0 list` shows every setting. For
    comparison, --set method.name=NAME trains by fedavg, trimmed_mean, krum, fedzo or mezo instead of cyber0.

    --set federation.partition=NAME deals the samples by iid, by_label, dirichlet, shards or gamma. Of dirichlet,
    federation.alpha says how even: 0.1 leaves a client few labels and makes sizes uneven, 100 is nearly iid.
    """
    from cyber0.config import load
    from cyber0.errors import ConfigError

    if resume is not None and (config is not None or set_ or out is not None or device is not None):
        raise ConfigError("--resume goes on with a run as it was begun: give it no config, --set, --out or --device")
    settings = None if resume else load(config, [*(set_ or []), *([f"device={device}"] if device else [])])
    if tensorboard:
        from cyber0.report.tensorboard import check_installed

        check_installed()
    console = _console(quiet)
    with ExitStack() as stack:
        server = None
        if watch:  # bound first: an address that can't be had is refused before anything is written
            from cyber0.report.watch import Watch

            server = stack.enter_context(Watch(watch_host, watch_port))
        from cyber0.runs import Run

        if resume is not None:
            this = Run.resume(resume)
        else:
            assert settings is not None
            this = Run.start(settings, out or _new_folder(settings.task.name))
        _announce(this, console)
        tell = _followers(this, stack, console, server, tensorboard)
        try:
            summary = this.play(tell)
        except KeyboardInterrupt:
            again = f"cyber0 run --resume {shlex.quote(str(this.folder))}"
            print(f"interrupted after {this.simulation.round} rounds; go on with: {again}", file=sys.stderr)
            sys.exit(130)
    _conclude(this, summary, console)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings, and a table 'study' of what varies.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the study. (default: runs/study-NAME)")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs at a time. (default: the cores; on a GPU 1)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and say what would run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")] = False,
) -> None:
    """Run a grid of settings, and judge each rule by its worst attack.

    The same command goes on with a study that was cut off, and runs again what failed. examples/study.toml shows what
    a file looks like.
    """
    from cyber0.study import command

    command.run(file, out, workers, _console(quiet), dry_run=dry_run)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The HTML file. (default: DIR/report.html; of several report.html here)"),
    ] = None,
) -> None:
    """Make one HTML file of one or several runs, to open in a browser; it needs no network."""
    from cyber0.files import REPORT
    from cyber0.report import page

    different = {folder.resolve(): folder for folder in reversed(folders)}
    shown = [folder for folder in dict.fromkeys(folders) if different[folder.resolve()] == folder]
    if len(shown) < len(folders):
        print(f"note: {len(folders)} folders are given, and {len(shown)} of them differ", file=sys.stderr)
    out = out or (shown[0] / REPORT if len(shown) == 1 else Path(REPORT))
    page.check_out(out)
    page.write(shown, out)
    print(f"{out}: {len(shown)} {'run' if len(shown) == 1 else 'runs'}, {out.stat().st_size:,} bytes")


@app.command()
def diagnose(
    source: Annotated[Path, typer.Argument(metavar="DIR|CONFIG.toml", help="A run's folder, or settings.")],
    round: Annotated[
        int | None,
        typer.Option(metavar="T", help="Measure after so many rounds. (default: at the start, middle and end)", min=0),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds whose steps are tried at each place.", min=1)] = 8,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where to compute. (default: as set)")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one setting of a config; may be repeated."),
    ] = None,
) -> None:
    """Is it the learning rate or a bug? Measure what the estimates are worth, and suggest lr and mu.

    Takes a few dozen steps' time, changes nothing of the run, and adds a section to its report.
    """
    from cyber0.diagnostics import command

    command.run(source, round, rounds, device, set_ or [], _console(False))


@app.command()
def replay(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Option(
            help="Where to write the weights (safetensors); without that suffix, a language "
            "model becomes a folder that from_pretrained loads."
        ),
    ],
    round: Annotated[int | None, typer.Option(metavar="T", help="After how many rounds. (default: all)")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute; the bits are the same.")] = "cpu",
) -> None:
    """Rebuild the model from its starting weights and its ledger."""
    from cyber0 import runs
    from cyber0.simulation import check_device

    check_device(device)
    ledger, parameters = runs.rebuild(folder, round, device)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors" or not runs.export(ledger, parameters, out):
        runs.save_weights(parameters, out)
    print(f"{out}: {parameters.dimension} weights after {len(ledger) if round is None else round} rounds")
    print(f"digest {parameters.digest()}")


@app.command()
def verify(
    folder: Folder,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute; the bits are the same.")] = "cpu",
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Decide every round again from reports.bin (serve.keep_reports).")
    ] = False,
) -> None:
    """Check a run: every record of the ledger, the starting weights, and that they give the model it claims."""
    import json

    from cyber0 import runs
    from cyber0.errors import LedgerError
    from cyber0.files import SUMMARY
    from cyber0.simulation import check_device

    check_device(device)
    ledger, parameters = runs.rebuild(folder, None, device)
    decided = sum(record.values is not None for record in ledger)
    print(f"ledger: {len(ledger)} records verify ({decided} decided, {len(ledger) - decided} abandoned)")
    if ledger.torn_bytes:
        print(f"ledger: {ledger.torn_bytes} bytes of a torn last record; --resume will cut them off")
    if decisions:
        again = runs.check_decisions(folder, ledger)
        print(f"decisions: {again} rounds decided again from reports.bin, all the same")
    print(f"chain {ledger.chain.hex()}")
    print(f"digest {parameters.digest()}")
    summary = folder / SUMMARY
    if not summary.exists():
        print(f"{SUMMARY}: not there, so the run has not ended")
        return
    try:
        claimed = json.loads(summary.read_text())
        digest = claimed.get("model_digest")  # a federator, which holds no weights, can't state one
        claim = (
            claimed["rounds"],
            claimed.get("chain", ledger.chain.hex()),
            parameters.digest() if digest is None else digest,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{summary} can't be read as a summary: {error!r}") from None
    if claim != (len(ledger), ledger.chain.hex(), parameters.digest()):
        raise LedgerError(
            f"{summary} claims {digest or claim[1]} after {claimed['rounds']} rounds, but w0 and the ledger give "
            f"{parameters.digest() if digest else ledger.chain.hex()} after {len(ledger)}"
        )
    what = "no model, as a federator has none" if digest is None else "this model"
    print(f"{SUMMARY}: claims {what}; all is well with it (accuracy and loss are not measured again)")


@app.command()
def init(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Settings of the run.")],
    out: Annotated[Path, typer.Option(metavar="HEADER", help="Where to write the header: a ledger without records.")],
) -> None:
    """Write what a federator without weights needs: dimension, layout, digests, settings."""
    from cyber0.config import load
    from cyber0.errors import ConfigError

    settings = load(config)
    if out.exists():
        raise ConfigError(f"--out {out} exists already: choose another name, or delete it if no run goes by it")
    if settings.method.name != "cyber0":
        raise ConfigError(
            f'method.name = {settings.method.name!r} has no federator to start; set method.name = "cyber0"'
        )
    from cyber0.ledger import Ledger
    from cyber0.parameters import Parameters
    from cyber0.simulation import make_header
    from cyber0.tasks import starting_model

    model = starting_model(settings.task, settings.seed)
    header = make_header(settings, Parameters(model, settings.method.distribution))
    out.parent.mkdir(parents=True, exist_ok=True)
    Ledger.create(out, header).close()
    print(f"{out}: d = {header.dimension}, weights {header.weights_digest[:16]}, rest {header.rest_digest[:16]}")


@app.command()
def theory(
    d: Annotated[int, typer.Option("--d", help="Dimension: how many weights.")],
    k: Annotated[int, typer.Option("--k", help="Directions a round.")] = 64,
    m: Annotated[int, typer.Option("--m", help="Clients.")] = 12,
    n: Annotated[int, typer.Option("--n", help="Samples of each client.")] = 1000,
    byzantine: Annotated[int | None, typer.Option(help="How many clients lie. (default: floor(beta m))")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Share trimmed at each end. (default: byzantine / m, or 0.25)")
    ] = None,
    mu: Annotated[float, typer.Option(help="Probing step; 0: projected gradients.")] = 0.001,
    strong_convexity: Annotated[float, typer.Option("--lambda", help="Least curvature of the loss.")] = 0.1,
    smoothness: Annotated[float, typer.Option("--smoothness", help="L_F, largest curvature.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Deviation of one sample's slope; v = d times it, unless --v.")] = 1.0,
    v: Annotated[float | None, typer.Option("--v", help="Sub-exponential parameter of one sample's number.")] = None,
    diameter: Annotated[float, typer.Option(help="D, of the set that holds the weights.")] = 10.0,
    lipschitz: Annotated[
        float | None, typer.Option(help="L_w + L_z of a sample's number. (default: d L_F (1 + D))")
    ] = None,
    distance: Annotated[float | None, typer.Option(help="||w0 - w*||. (default: D / 2)")] = None,
    error: Annotated[float | None, typer.Option(help="Distance to reach. (default: a tenth of --distance)")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw error against rounds for several k.")] = None,
) -> None:
    """Say what the paper's theorems promise for a setting, and which lr, k and beta they suggest."""
    from cyber0.report import advice

    setting = advice.make_setting(
        d=d, k=k, m=m, n=n, byzantine=byzantine, beta=beta, mu=mu, strong_convexity=strong_convexity,
        smoothness=smoothness, noise=noise, v=v, diameter=diameter, lipschitz=lipschitz, distance=distance, error=error,
    )  # fmt: skip
    from rich.table import Table

    console = _console(False)
    title = f"d = {d:,}, k = {k:,}, m = {m}, n = {n:,}, {setting.byzantine} lie, beta = {setting.beta:g}, mu = {mu:g}"
    console.print(title, style="bold")
    table = Table("quantity", "value", "what it means")
    for row in advice.table(setting):
        table.add_row(*row)
    console.print(table)
    for line in (*advice.dominating(setting), *advice.suggestions(setting)):
        console.print(f"- {line}", soft_wrap=True)
    if plot is not None:
        print(f"{advice.picture(setting, plot)}: error against rounds for several k")


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to reproduce; `cyber0 list` names them.")],
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Repetitions. (default: its own)")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="(default: reproduce/NAME)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: one seed, few rounds.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace a setting in all runs; may be repeated."),
    ] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Show what the runs that are done give; play none.")] = False,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where losses are computed.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_DIR", help="Language model: on the Hugging Face hub, a folder, a .gguf file."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Of a language model, where the paper took 20,000; the rest in proportion."
        ),
    ] = None,
    tasks: Annotated[str | None, typer.Option(metavar="SETS", help="Of a language model, as sst2,trec,snli.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with the folders sst2, trec, snli. (default: the hub)")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs of a language model at a time. (default: 1)")
    ] = None,
) -> None:
    """Make a table, figure or theorem of the paper again: PNG, SVG, CSV, LaTeX and a comparison.

    What was interrupted goes on where it stopped, given the same name, options and folder. Runs that several
    reproductions have in common are played once if they have the same --out.
    """
    import time

    from cyber0 import paper

    sets = tuple(part.strip() for part in tasks.split(",")) if tasks else ()
    chosen = paper.names(name, sets)
    overrides = (*(set_ or ()), *([f"device={device}"] if device else []))
    wanted = paper.TextOrder(model or "", steps, sets, data, workers or 1)
    _refuse_unused(chosen, {"--set": set_, "--device": device, "--redraw": redraw}, ("runs", "text runs"))
    of_text = {"--model": model, "--steps": steps, "--tasks": tasks, "--data": data, "--workers": workers}
    if not any(paper.REPRODUCTIONS[one].made_of == "text runs" for one in chosen):
        _refuse_unused(chosen, of_text, ("text runs",))
    folder = out or Path("reproduce") / name
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for one in chosen:
        order = paper.Order(folder, seeds, quick, lambda line: print(line, flush=True), overrides, redraw, wanted)
        comparison = paper.find(one)(order)
        print(comparison.read_text(encoding="utf-8"))
        print(f"{folder}/: {', '.join(sorted(path.name for path in folder.glob(f'{one}.*')))}")
    print(f"{name}: {time.monotonic() - started:.0f} s")


def _refuse_unused(chosen: Sequence[str], given: Mapping[str, object], made_of: Sequence[str]) -> None:
    """Refuse an option that says nothing to one of the chosen reproductions."""
    from cyber0 import paper
    from cyber0.errors import ConfigError

    for one in chosen:
        for option, value in given.items():
            if value and paper.REPRODUCTIONS[one].made_of not in made_of:
                kind = "runs" if "runs" in made_of else "runs of a language model"
                raise ConfigError(f"{one} is not made of {kind}, so {option} has nothing to change; leave it out")


@app.command("list")
def list_(
    settings: Annotated[
        bool, typer.Option("--settings", help="Show the paper's settings (its Tables 4 and 5) instead.")
    ] = False,
) -> None:
    """Show every setting and every name that can be chosen."""
    from rich.table import Table

    if settings:
        from cyber0.paper.settings import tables

        for shown in tables():
            table = Table(*shown.head, title=shown.title)
            for row in shown.rows:
                table.add_row(*row)
            _console(False).print(table)
        return

    from cyber0.config import DEPENDENT_DEFAULTS, describe

    table = Table("setting", "default", "meaning", title="Settings (TOML keys, and --set SECTION.KEY=VALUE)")
    console = _console(False)
    for key in describe():
        meaning = key.text + (f" ({key.limits})" if key.limits else "")
        if key.choices:
            meaning += "".join(f"\n  {name}: {text}" for name, text in key.choices.items())
        table.add_row(key.name, repr(key.default), meaning)
    console.print(table)
    table = Table("where", "other defaults", title="Defaults that depend on another setting")
    for name, cases in DEPENDENT_DEFAULTS.items():
        for case, values in cases.items():
            table.add_row(f"{name} = {case!r}", "\n".join(f"{k} = {v!r}" for k, v in values.items()))
    console.print(table)
    from cyber0.paper import GROUPS, REPRODUCTIONS

    table = Table("name", "what it shows", title="What `cyber0 reproduce NAME` makes again")
    for name, reproduction in REPRODUCTIONS.items():
        table.add_row(name, reproduction.text)
    for name, members in GROUPS.items():
        table.add_row(name, ", ".join(members))
    console.print(table)


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, sst2, snli or trec")],
    force: Annotated[bool, typer.Option("--force", help="Fetch it anew even if it is cached.")] = False,
) -> None:
    """Fetch a data set into the user's cache folder, or say where it is."""
    from cyber0.choices import DATASETS
    from cyber0.errors import ConfigError
    from cyber0.tasks import mnist

    if name not in DATASETS:
        raise ConfigError(f"unknown data set {name!r}; possible are {', '.join(DATASETS)}")
    if name != "mnist":
        from cyber0.tasks import sentences

        print(f"{name}: {sentences.fetch(name, force)}")
        return
    fetched = mnist.fetch(force)
    print(f"{fetched.path}: {fetched.summary}")


commands.register(app)


def _followers(
    this: Run, stack: ExitStack, console: Console, server: Watch | None, tensorboard: bool
) -> Callable[[Progress], None]:
    """Return what is to be told of every round; all of it ends with the stack."""
    hooks: list[Callable[[Progress], None]] = []
    if server is not None:
        from cyber0.report.watch import Live, is_loopback

        live = Live(this)
        server.start(live.look)
        print(f"watch the run at {server.address}", flush=True)  # also when quiet: it was asked for
        if not is_loopback(server.host):
            console.print(
                f"warning: everybody who can reach this machine at {server.host} can read the run", style="yellow"
            )
        hooks.append(live.update)
    if tensorboard:
        from cyber0.report.tensorboard import Events

        events = Events(this.folder)
        stack.callback(events.close)
        stack.callback(lambda: events.update(this.rows))
        hooks.append(lambda _: events.update(this.rows))
    hooks.append(stack.enter_context(_display(console, console.quiet)))

    def tell(progress: Progress) -> None:
        for hook in hooks:
            hook(progress)

    return tell


def _new_folder(task: str) -> Path:
    """Return a folder under runs/ that does not exist yet."""
    import time

    stem = time.strftime(f"{task}-%Y%m%d-%H%M%S")
    candidates = (Path("runs") / (stem + suffix) for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def _console(quiet: bool) -> Console:
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, width=None if sys.stdout.isatty() else 120)


def _announce(this: Run, console: Console) -> None:
    console.print(this.title(), style="bold")
    simulation = this.simulation
    config, f = simulation.config, simulation.config.federation  # a method may have its own view of the settings
    console.print(f"d = {simulation.parameters.dimension:,}, device {this.config.device}, folder {this.folder}")
    if simulation.kept:
        console.print(f"going on after round {simulation.kept} of {this.config.rounds}")
    if f.participation < 1:
        console.print(f"{f.invited} of {f.clients} clients are asked a round; {config.risk:.2%} of the rounds "
                      f"hold more than the {config.borne} liars that the rule bears")  # fmt: skip
    if f.byzantine and config.aggregation.rule == "mean":
        console.print("warning: the plain mean bears no liar", style="yellow")
    elif f.participation == 1 and f.byzantine > config.borne:
        console.print(f"warning: {f.byzantine} clients lie, and the rule bears {config.borne}", style="yellow")
    console.print(_partition_table(simulation, f.partition_title))
    for warning in simulation.federator.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _partition_table(simulation: Federation, name: str) -> Table:
    """Return who holds how many samples of each label; of many clients or labels a summary."""
    from statistics import median

    from rich.table import Table

    counts, lies = simulation.label_counts(), simulation.byzantine
    clients, labels = counts.shape
    if clients > MOST_ROWS or labels > MOST_COLUMNS:
        table = Table(f"each of {clients:,} clients has", "min", "median", "max", title=f"Partition: {name}")
        for what, numbers in (("samples", counts.sum(axis=1)), ("labels", (counts > 0).sum(axis=1))):
            some = numbers.tolist()
            table.add_row(what, *(f"{measure(some):,g}" for measure in (min, median, max)))
        return table
    table = Table(title=f"Partition: {name} (samples of each label; * Byzantine)")
    for head in ("client", *map(str, range(labels)), "all"):
        table.add_column(head, justify="right")
    for client, row in enumerate(counts):
        cells = [str(count) if count else "." for count in row.tolist()]
        table.add_row(f"{client}{'*' if lies[client] else ' '}", *cells, str(int(row.sum())))
    return table


class _display:
    """A progress bar on a terminal, a line every tenth of the run elsewhere."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._bar: Any = None
        self._shown = 0

    def __enter__(self) -> Any:
        if self._console.is_terminal and not self._quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("round"), MofNCompleteColumn(), BarColumn(),
                TextColumn("accuracy {task.fields[accuracy]:.3f}  loss {task.fields[loss]:.3f}  "
                           "{task.fields[speed]:.0f} rounds/s"),
                TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=None, accuracy=0.0, loss=0.0, speed=0.0)
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, p: Progress) -> None:
        row = p.row
        if self._bar is not None:
            self._bar.update(self._task, completed=p.round, total=p.rounds, accuracy=row.accuracy, loss=row.loss,
                             speed=p.rounds_per_second)  # fmt: skip
        elif not self._quiet and 10 * p.round // p.rounds > self._shown:
            self._shown = 10 * p.round // p.rounds
            self._console.print(f"round {p.round}/{p.rounds}  accuracy {row.accuracy:.4f}  loss {row.loss:.4f}  "
                                f"{p.rounds_per_second:.0f} rounds/s")  # fmt: skip


def _conclude(this: Run, summary: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    from cyber0.files import REPORT

    table = Table(title="Result", show_header=False)
    table.add_row("accuracy", f"{summary['final_accuracy']:.2%}")
    loss = summary["final_loss"]
    table.add_row("loss", "not finite: it diverged" if loss is None else f"{loss:.4f}")
    abandoned = f" ({summary['abandoned_rounds']} abandoned)" if summary["abandoned_rounds"] else ""
    table.add_row("rounds", f"{summary['rounds']}{abandoned}")
    table.add_row("sent by a client", f"{summary['uplink_bytes_per_client']:,} bytes")
    table.add_row("received by a client", f"{summary['downlink_bytes_per_client']:,} bytes")
    if this.config.method.name == "cyber0":
        dense = 4 * summary["dimension"] * summary["rounds"]
        table.add_row("as weights it would be", f"{dense:,} bytes each way")
    table.add_row("time", f"{summary['wall_seconds']:.1f} s, {summary['rounds_per_second']:.0f} rounds/s")
    if suspects := _suspects(this):
        table.add_row("most trimmed clients", suspects)
    table.add_row("model digest", summary["model_digest"][:16])
    console.print(table)
    files = f"config.toml, partition.csv, metrics.csv, clients.csv, summary.json, {this.simulation.kept_in}"
    console.print(f"{this.folder}/: {files}, plots/accuracy.png, plots/suspects.png, plots/partition.png")
    console.print(f"to look at: {this.folder / REPORT}")


def _suspects(this: Run) -> str:
    rows = sorted(this.suspects(), key=lambda row: -row[-1])
    worst = rows[: max(3, this.config.federation.byzantine)][:6]
    alike = sum(row[-1] == rows[0][-1] for row in rows)
    if alike > len(worst):  # nobody stands out: nothing is trimmed, or nearly everybody, as by Krum
        return f"{alike} of {len(rows)} alike ({rows[0][-1]:.0%})" if rows[0][-1] else ""
    return ", ".join(f"{i} ({share:.0%}{', Byzantine' if lies else ''})" for i, lies, _, _, share in worst)
