"""The command line. Heavy packages are imported inside the command that needs them: --help answers at once."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cyber0 import __version__
from cyber0.cli import completion
from cyber0.cli import deploy as commands
from cyber0.cli import display as screen
from cyber0.errors import Cyber0Error

app = typer.Typer(
    help="Federated zero-order learning: k numbers a round each way, and clients that may lie.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line; what a user can mend is said in one line, without a traceback."""
    warnings.formatwarning = _warning_line
    if completion.answer_bash(os.environ):
        sys.exit(0)
    try:
        app(prog_name="cyber0")
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


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Write a warning of ours as what it says; of another package, with its place."""
    if category is RuntimeWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"warning: {message}\n"
    return _format_warning(message, category, filename, lineno, line)


_format_warning = warnings.formatwarning


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"cyber0 {__version__}")
        raise typer.Exit


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]
Rerun = Annotated[
    bool,
    typer.Option("--rerun", help="Run again what another version of cyber0 finished, and keep the old in 'earlier'."),
]


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml|FILE.py:NAME",
            help="Settings, or a task of your own; none: the default run.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            autocompletion=completion.settings,
            help="Replace one setting; may be repeated.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run. (default: runs/TASK-TIME)")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", autocompletion=completion.devices, help="Where losses are computed."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Resume a run that was cut off; with --set rounds=N, lengthen it."),
    ] = None,
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
    no_export: Annotated[
        bool, typer.Option("--no-export", help="Leave out the trained model: model.safetensors, or the folder model/.")
    ] = False,
) -> None:
    """Train: simulate a federation on this machine.

    Without arguments: MNIST, 12 clients of whom 3 lie, k = 64, 400 rounds. `cyber0 list` shows every setting. For
    comparison, --set method.name=NAME trains by fedavg, trimmed_mean, krum, fedzo or mezo instead of cyber0.

    --set federation.partition=NAME deals the samples by iid, by_label, dirichlet, shards or gamma. For dirichlet,
    federation.alpha says how even the parts are: 0.1 leaves a client few labels and makes sizes uneven, 100 is nearly
    iid.
    """
    from cyber0 import api
    from cyber0.config.files import load
    from cyber0.errors import ConfigError
    from cyber0.kernels.memory import keep_freed_memory
    from cyber0.runs.settings import named_settings
    from cyber0.storage import CONFIG

    keep_freed_memory()

    overrides = [*(set_ or []), *([f"device={device}"] if device else [])]
    if resume is not None:
        if config is not None or out is not None or {o.partition("=")[0].strip() for o in overrides} - {"rounds"}:
            raise ConfigError("--resume continues a run with the settings it was started with: give it no config, no "
                              "--out or --device, and no --set but --set rounds=N, which lengthens it")  # fmt: skip
        settings = load(resume / CONFIG, overrides) if overrides and (resume / CONFIG).exists() else None
    else:
        settings = named_settings(config, overrides)
    with ExitStack() as stack:
        # What can't be had, as an address or a package, is refused before anything is written.
        display = screen.Display(screen.new_console(quiet))
        callbacks: list[object] = []
        if tensorboard:
            from cyber0.report.tensorboard import Events

            callbacks.append(stack.enter_context(Events()))
        if watch:
            from cyber0.report.watch import LivePage, LiveServer

            callbacks.append(LivePage(stack.enter_context(LiveServer(watch_host, watch_port))))
        callbacks.append(stack.enter_context(display))
        try:
            api.run(settings, out=resume or out, resume=resume is not None, callbacks=callbacks, export=not no_export)
        except KeyboardInterrupt:
            if display.run is None:
                raise
            again = f"cyber0 run --resume {shlex.quote(str(display.run.folder))}"
            print(f"interrupted after {display.run.round} rounds; go on with: {again}", file=sys.stderr)
            sys.exit(130)
        except Cyber0Error as error:
            if display.run is None or "--resume" in str(error):
                raise
            again = f"cyber0 run --resume {shlex.quote(str(display.run.folder))}"
            raise Cyber0Error(f"{error}. Once that is mended, resume by: {again}") from error
    if display.code:
        sys.exit(display.code)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings, and a table 'study' of what varies.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the study. (default: runs/study-NAME)")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs at a time. (default: the cores; on a GPU 1)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and say what would run.")] = False,
    rerun: Rerun = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")] = False,
) -> None:
    """Run a grid of settings, and judge each rule by its worst attack.

    The same command goes on with a study that was cut off, and runs again what failed. examples/study.toml shows what
    a file looks like.
    """
    from cyber0.cli import study as command

    command.run(file, out, workers, screen.new_console(quiet), dry_run=dry_run, rerun=rerun)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The HTML file. (default: DIR/report.html; of several report.html here)"),
    ] = None,
) -> None:
    """Make one HTML file of one or several runs, to open in a browser; it needs no network."""
    from cyber0.report import page
    from cyber0.storage import REPORT, naming

    different = {folder.resolve(): folder for folder in reversed(folders)}
    shown = [folder for folder in dict.fromkeys(folders) if different[folder.resolve()] == folder]
    if len(shown) < len(folders):
        print(f"note: {len(folders)} folders are given, and {len(shown)} of them differ", file=sys.stderr)
    out = out or (shown[0] / REPORT if len(shown) == 1 else Path(REPORT))
    remedy = "choose another by --out FILE"
    with naming(out, remedy):
        page.check_out(out)
    page.write(shown, out, remedy=remedy)
    print(f"{out}: {len(shown)} {'run' if len(shown) == 1 else 'runs'}, {out.stat().st_size:,} bytes")


@app.command()
def diagnose(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR|CONFIG.toml|FILE.py:NAME", help="A run's folder, settings, or a task of your own."),
    ],
    round: Annotated[
        int | None,
        typer.Option(metavar="T", help="Measure after so many rounds. (default: at the start, middle and end)", min=0),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds whose steps are tried at each place.", min=1)] = 8,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", autocompletion=completion.devices, help="Where to compute. (default: as set)"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            autocompletion=completion.settings,
            help="Replace one setting of a config; of a run's folder, name a copy of its code. May be repeated.",
        ),
    ] = None,
    task: commands.OwnTask = "",
) -> None:
    """Is it the learning rate or a bug? Measure what the estimates are worth, and suggest lr and mu.

    Takes a few dozen steps' time, changes nothing of the run, and adds a section to its report. Code of your own is
    imported from where the run's config.toml says: for a folder that you received from somebody else, use --task, and
    --set for a rule, attack, partition or schedule.
    """
    from cyber0.cli import diagnose as command
    from cyber0.kernels.memory import keep_freed_memory

    keep_freed_memory()
    command.run(source, round, rounds, device, set_ or [], screen.new_console(), task)


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
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda", autocompletion=completion.devices, help="Where to compute; the bits are the same."
        ),
    ] = "cpu",
    model: commands.Model = "",
    task: commands.OwnTask = "",
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file, or a model's folder, that is there.")
    ] = False,
) -> None:
    """Rebuild the model from its starting weights and its ledger."""
    from cyber0.directions.backends import check_device
    from cyber0.runs import export
    from cyber0.runs import replay as replays

    check_device(device)
    export.check_replaceable(out, force=force)
    export.check_not_base(folder, out, model)
    ledger, parameters = replays.rebuild(folder, round, device, model, task)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors" or not export.export(ledger, parameters, out, model, folder=folder, rounds=round):
        export.save_weights(parameters, out.resolve())
    print(f"{out}: {parameters.dimension} weights after {len(ledger) if round is None else round} rounds")
    print(f"digest {parameters.digest()}")


Round = Annotated[int | None, typer.Option(metavar="T", help="The model after so many rounds. (default: all)", min=0)]
RunDevice = Annotated[
    str,
    typer.Option(metavar="cpu|cuda", autocompletion=completion.devices, help="Where to compute. (default: as the run)"),
]
TaskSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="task.KEY=VALUE", help="Replace one setting of the task; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def evaluate(
    folder: Folder,
    data: Annotated[
        str,
        typer.Option(
            metavar="DIR|FILE",
            help="Other data: for MNIST a folder of idx files; for text tasks a file of labelled sentences or a folder "
            "with one; for a task of your own its option `data`. (default: the run's)",
        ),
    ] = "",
    round: Round = None,
    device: RunDevice = "",
    model: commands.Model = "",
    task: commands.OwnTask = "",
    set_: TaskSettings = None,
    as_json: Json = False,
) -> None:
    """Measure the model of a run, finished or not, on its test set or on other data: loss, accuracy, metrics.

    A task of your own is imported from where the run's config.toml says, if it is the file that the run began with. For
    a folder that you received from somebody else, use --task.
    """
    from cyber0.runs.inference import evaluate
    from cyber0.runs.trained import InferenceOptions

    found = evaluate(folder, data, InferenceOptions(round, device, model, task, set_ or ()))
    if as_json:
        _print_json(found)
        return
    print(f"{folder} after {found['round']} rounds, on {found['samples']:,} samples ({found['evaluated_on']})")
    figures = {name: value for name, value in found.items() if name.endswith(("accuracy", "loss"))}
    for name, value in {**figures, **found["metrics"]}.items():
        if name != "accuracy" or value is not None:
            print(f"{name}: {_figure(name, value)}")
    print(f"digest {found['model_digest']}")
    sources = {
        "replay": "replayed from w0 and the ledger",
        "export": f"the exported ones, which are what summary.json claims; `cyber0 verify {folder}` replays the ledger",
        "checkpoint": "of state.safetensors: this method keeps no ledger to check them against",
    }
    print(f"weights: {sources[found['weights_from']]}")


def _figure(name: str, value: float | None) -> str:
    """Write a figure as the end of a run does."""
    if value is None:
        return "not finite"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"


def _print_json(found: object) -> None:
    import json

    written = _finite(found)
    if written != found:  # JSON has no NaN
        print("warning: some numbers are not finite; they are null here", file=sys.stderr)
    print(json.dumps(written, indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: object) -> object:
    """Return a value with None in place of the numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.command()
def predict(
    folder: Folder,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="For MNIST a picture (28 x 28 pixels), an idx file or an array (.npy); for text tasks a sentence, a "
            "file of lines, or - for the standard input; for a task of your own a file .npy, .npz, .csv, .safetensors.",
        ),
    ],
    round: Round = None,
    device: RunDevice = "",
    model: commands.Model = "",
    task: commands.OwnTask = "",
    set_: TaskSettings = None,
    as_json: Json = False,
) -> None:
    """Ask the model of a run, finished or not: the class of each input and its probability, or the model's outputs.

    A task of your own is imported from where the run's config.toml says, if it is the file that the run began with. For
    a folder that you received from somebody else, use --task.
    """
    from cyber0.runs.inference import predict
    from cyber0.runs.trained import InferenceOptions

    found = predict(folder, source, InferenceOptions(round, device, model, task, set_ or ()))
    if as_json:
        _print_json(found)
        return
    for row in found:
        said = f"{row['class']}  {row['probability']:.1%}" if "class" in row else _outputs(row["outputs"])
        print(f"{said}  {row['input']}" if isinstance(row["input"], str) else f"{row['input']}: {said}")


def _outputs(value: object) -> str:
    """Write outputs in one line."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        inner = " ".join(map(_outputs, value))
        return f"({inner})" if any(isinstance(one, list) for one in value) else inner
    if isinstance(value, dict):
        return ", ".join(f"{name} {_outputs(one)}" for name, one in value.items())
    return str(value)


@app.command()
def verify(
    folder: Folder,
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda", autocompletion=completion.devices, help="Where to compute; the bits are the same."
        ),
    ] = "cpu",
    model: commands.Model = "",
    task: commands.OwnTask = "",
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Decide every round again from reports.bin (serve.keep_reports).")
    ] = False,
    rule: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="With --decisions: where the run's rule is, if not built in.")
    ] = "",
) -> None:
    """Check a run: every record of the ledger, the starting weights, and that they give the model it claims.

    A folder without starting weights, as a federator's, needs --task for a task of somebody's own; without it the
    ledger and the decisions are checked alone, and the exit code is 2.
    """
    from cyber0.directions.backends import check_device
    from cyber0.errors import ConfigError, LedgerError
    from cyber0.runs import export
    from cyber0.runs import replay as replays
    from cyber0.runs.folder import load_summary
    from cyber0.storage import MODEL, SUMMARY

    if rule and not decisions:
        raise ConfigError(f"--rule {rule} is for --decisions: add it, or leave --rule out")
    check_device(device)
    ledger = replays.open_ledger(folder)
    decided, planned = 0, ledger.header.rounds
    for record in ledger:
        decided += record.values is not None
        if record.rounds != planned:
            change = "lengthened" if record.rounds > planned else "shortened"
            print(f"ledger: {change} from {planned} to {record.rounds} rounds at round {record.round}")
            planned = record.rounds
    print(f"ledger: {len(ledger)} records verify ({decided} decided, {len(ledger) - decided} abandoned)")
    if ledger.torn_bytes:
        print(f"ledger: {ledger.tail}; --resume will cut them off")
    if decisions:
        again = replays.check_decisions(folder, ledger, rule)
        print(f"decisions: {again} rounds decided again from reports.bin, all the same")
    print(f"chain {ledger.chain.hex()}")
    try:
        parameters = replays.rebuild(folder, None, device, model, task)[1]
    except Cyber0Error:
        print(f"model: not verified; {SUMMARY} and {MODEL} are not compared with it")
        raise
    print(f"digest {parameters.digest()}")
    summary = folder / SUMMARY
    if not summary.exists():
        print(f"{SUMMARY}: not there, so the run has not ended")
        return
    try:
        claimed = load_summary(folder)
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
    if exported := export.check_exported(folder, ledger, parameters):
        print(f"{exported.name}: the weights that w0 and the ledger give")


@app.command()
def repair(
    folder: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A run's folder, or the ledger of a ZeroOrder.")],
    yes: Annotated[bool, typer.Option("--yes", help="Repair without asking. Without a terminal: needed.")] = False,
) -> None:
    """Say what is good in a run's folder, and cut off what is damaged after keeping a copy of it.

    Nothing is changed before you agree. Copies end in .damaged and are never overwritten. What a kill or a power cut
    leaves needs no repair: resuming cuts it off.
    """
    from cyber0.runs import repair

    raise typer.Exit(repair.command(folder, yes=yes))


@app.command()
def init(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml|FILE.py:NAME", help="Settings of the run, or a task of your own.")
    ],
    out: Annotated[Path, typer.Option(metavar="HEADER", help="Where to write the header: a ledger without records.")],
) -> None:
    """Write what a federator without weights needs: dimension, layout, digests, settings."""
    from cyber0.errors import ConfigError
    from cyber0.runs.settings import load_named

    settings = load_named(config)
    if out.exists():
        raise ConfigError(f"--out {out} exists already: choose another name, or delete it if no run goes by it")
    if settings.method.name != "cyber0":
        raise ConfigError(
            f'method.name = {settings.method.name!r} has no federator to start; set method.name = "cyber0"'
        )
    from cyber0.federation.agreement import make_header
    from cyber0.federation.user_code import refuse_of_header
    from cyber0.ledger import Ledger
    from cyber0.model.vector import Parameters
    from cyber0.tasks import starting_model

    refuse_of_header(settings, config, ())
    model = starting_model(settings.task, settings.seed)
    header = make_header(settings, Parameters(model, settings.method.distribution), secrets.token_hex(16))
    out.parent.mkdir(parents=True, exist_ok=True)
    Ledger.create(out, header).close()
    print(f"{out}: d = {header.dimension}, weights {header.weights_digest[:16]}, rest {header.rest_digest[:16]}")


def _whole(text: str | int) -> int:
    """Read a whole number, which may be written as 1e6."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():  # nor is an infinite one
            raise ValueError(f"{text} is not a whole number") from None
        return int(float(text))


@app.command()
def theory(
    d: Annotated[int, typer.Option("--d", parser=_whole, metavar="N", help="Dimension: how many weights, as 1e6.")],
    k: Annotated[int, typer.Option("--k", parser=_whole, metavar="N", help="Directions a round.")] = 64,
    m: Annotated[int, typer.Option("--m", parser=_whole, metavar="N", help="Clients.")] = 12,
    n: Annotated[int, typer.Option("--n", parser=_whole, metavar="N", help="Samples of each client.")] = 1000,
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
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the bound over rounds for several k.")] = None,
) -> None:
    """Say which lr, k and rounds to choose: rules of thumb, and what the paper's theorems guarantee beside them."""
    from cyber0.report import advice

    setting = advice.make_setting(
        d=d, k=k, m=m, n=n, byzantine=byzantine, beta=beta, mu=mu, strong_convexity=strong_convexity,
        smoothness=smoothness, noise=noise, v=v, diameter=diameter, lipschitz=lipschitz, distance=distance, error=error,
    )  # fmt: skip
    if plot is not None:
        advice.check_picture(plot)
    from rich.table import Table

    console = screen.new_console()
    title = (
        f"d = {d:,}, k = {k:,}, m = {m}, n = {n:,}, {setting.byzantine} Byzantine, beta = {setting.beta:g}, mu = {mu:g}"
    )
    console.print(title, style="bold")
    bound = f"for the bound (Theorem {setting.number})"
    answer = Table("choose", "in practice", bound, "where the practical value comes from")
    for choice in advice.choices(setting):
        answer.add_row(*choice)
    console.print(answer)
    for line in advice.caveats(setting):
        console.print(f"- {line}", soft_wrap=True)
    details = Table("quantity", "value", "what it means", title="What the theorems say")
    for row in advice.table(setting):
        details.add_row(*row)
    console.print(details)
    for line in advice.dominating(setting):
        console.print(f"- {line}", soft_wrap=True)
    if plot is not None:
        print(f"{advice.picture(setting, plot)}: the bound over rounds for several k, with its floor")


@app.command()
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", autocompletion=completion.reproductions, help="What to reproduce; `cyber0 list` names them."
        ),
    ],
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Repetitions. (default: its own)")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="(default: reproduce/NAME)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: one seed, few rounds.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            autocompletion=completion.settings,
            help="Replace a setting in all runs; may be repeated. Of a language model also in those of one set: "
            "trec:method.lr=1e-5.",
        ),
    ] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Show what the runs that are done give; play none.")] = False,
    rerun: Rerun = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", autocompletion=completion.devices, help="Where losses are computed."),
    ] = None,
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

    from cyber0 import reproduce as paper
    from cyber0.errors import ConfigError
    from cyber0.kernels.memory import keep_freed_memory

    keep_freed_memory()
    sets = tuple(part.strip() for part in tasks.split(",")) if tasks else ()
    chosen = paper.names(name, sets)
    overrides = (*(set_ or ()), *([f"device={device}"] if device else []))
    wanted = paper.TextOrder(model or "", steps, sets, data, workers or 1)
    of_runs = {"--set": set_, "--device": device, "--redraw": redraw, "--rerun": rerun}
    _refuse_unused(chosen, of_runs, ("runs", "text runs"))
    if redraw and rerun:
        raise ConfigError("--redraw plays no run, and --rerun plays some again: give one of them")
    of_text = {"--model": model, "--steps": steps, "--tasks": tasks, "--data": data, "--workers": workers}
    if not any(paper.REPRODUCTIONS[one].made_of == "text runs" for one in chosen):
        _refuse_unused(chosen, of_text, ("text runs",))
    folder = out or Path("reproduce") / name
    if not redraw:  # which finds nothing in a folder that is not there
        folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for one in chosen:
        order = paper.Order(
            folder, seeds, quick, lambda line: print(line, flush=True), overrides, redraw, wanted, one, rerun
        )
        try:
            comparison = paper.find(one)(order)
        except KeyboardInterrupt:
            print(f"interrupted; the same command goes on where {one} stopped", file=sys.stderr)
            sys.exit(130)
        print(comparison.read_text(encoding="utf-8"))
        print(f"{folder}/: {', '.join(sorted(path.name for path in folder.glob(f'{one}.*')))}")
    print(f"{name}: {time.monotonic() - started:.0f} s")


def _refuse_unused(chosen: Sequence[str], given: Mapping[str, object], made_of: Sequence[str]) -> None:
    """Refuse an option that says nothing to one of the chosen reproductions."""
    from cyber0 import reproduce as paper
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
        from cyber0.reproduce.settings import tables

        for shown in tables():
            table = Table(*shown.head, title=shown.title)
            for row in shown.rows:
                table.add_row(*row)
            screen.new_console().print(table)
        return

    from cyber0.config.choices import TASKS
    from cyber0.config.keys import describe
    from cyber0.config.presets import of_task

    table = Table("setting", "default", "meaning", title="Settings (TOML keys, and --set SECTION.KEY=VALUE)")
    console = screen.new_console()
    for key in describe():
        meaning = key.text + (f" ({key.limits})" if key.limits else "")
        if key.choices:
            meaning += "".join(f"\n  {name}: {text}{_options(key.choices, name)}" for name, text in key.choices.items())
        table.add_row(key.name, repr(key.default), meaning)
    console.print(table)
    table = Table("where", "other defaults", title="Defaults that depend on another setting")
    for task in filter(of_task, TASKS):
        table.add_row(f"task.name = {task!r}", "\n".join(f"{k} = {v!r}" for k, v in of_task(task).items()))
    console.print(table)
    from cyber0.reproduce import GROUPS, REPRODUCTIONS

    table = Table("name", "what it shows", title="What `cyber0 reproduce NAME` makes again")
    for name, reproduction in REPRODUCTIONS.items():
        table.add_row(name, reproduction.text)
    for name, members in GROUPS.items():
        table.add_row(name, ", ".join(members))
    console.print(table)


def _options(choices: Mapping[str, str], name: str) -> str:
    """Say which options go with a name, if any do."""
    from cyber0.config.registry import Registry

    taken = choices.entry(name).shown_options if isinstance(choices, Registry) else ""
    return f" Options: {taken}." if taken else ""


@app.command()
def data(
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=completion.data_sets, help="mnist, sst2, snli or trec")
    ],
    force: Annotated[bool, typer.Option("--force", help="Fetch it anew even if it is cached.")] = False,
) -> None:
    """Fetch a data set into the user's cache folder, or say where it is."""
    from cyber0.config.choices import DATASETS
    from cyber0.errors import ConfigError
    from cyber0.tasks import mnist

    if name not in DATASETS:
        raise ConfigError(f"unknown data set {name!r}; possible are {', '.join(DATASETS)}")
    if name != "mnist":
        from cyber0.tasks.text import sentences

        print(f"{name}: {sentences.fetch(name, force)}")
        return
    fetched = mnist.fetch(force)
    print(f"{fetched.path}: {fetched.summary}")


commands.register(app)


def _flowing(text: str) -> str:
    """Return a docstring with the lines of each paragraph joined: typer keeps their breaks at any width of terminal."""
    import inspect

    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


for _command in app.registered_commands:
    _command.help = _flowing(_command.help or (_command.callback.__doc__ if _command.callback else "") or "")
