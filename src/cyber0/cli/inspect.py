"""Commands that inspect a run: report, replay, evaluate, predict, verify, repair."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0.cli import options
from cyber0.cli.deploy import ModelOption, OwnTaskOption, ScheduleOption
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError, Cyber0Error, LedgerError

if TYPE_CHECKING:
    from cyber0.ledger import Ledger

RoundOption = Annotated[
    int | None, typer.Option(metavar="T", help="The model after this many rounds. (default: all)", min=0)
]
RunDeviceOption = Annotated[
    str,
    options.device_option("Where to compute. (default: as the run did)"),
]
TaskSettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="task.KEY=VALUE", help="Override one setting of the task; may be repeated."),
]


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The HTML file. (default: DIR/report.html; for several, ./report.html)"),
    ] = None,
) -> None:
    """Write a report of one or several runs: one HTML file that a browser opens without a network."""
    from cyber0.report import page
    from cyber0.storage import REPORT, naming

    different = {folder.resolve(): folder for folder in reversed(folders)}
    shown = [folder for folder in dict.fromkeys(folders) if different[folder.resolve()] == folder]
    if len(shown) < len(folders):
        print(f"note: of the {len(folders)} folders given, {len(shown)} differ", file=sys.stderr)
    out = out or (shown[0] / REPORT if len(shown) == 1 else Path(REPORT))
    remedy = "choose another with --out FILE"
    with naming(out, remedy):
        page.check_out(out)
    page.write(shown, out, remedy=remedy)
    print(f"{out}: {len(shown)} {'run' if len(shown) == 1 else 'runs'}, {out.stat().st_size:,} bytes")


@with_json
def replay(
    folder: options.FolderArgument,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE|DIR",
            help="Where to write the weights (safetensors). Without that suffix, a language model is written as a "
            "folder that from_pretrained loads.",
        ),
    ],
    round: Annotated[int | None, typer.Option(metavar="T", help="After this many rounds. (default: all)")] = None,
    device: options.ReplayDeviceOption = "cpu",
    model: ModelOption = "",
    task: OwnTaskOption = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file or model folder.")] = False,
) -> Reply:
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
    rounds, digest = len(ledger) if round is None else round, parameters.digest()

    def show() -> None:
        print(f"{out}: {parameters.dimension} weights after {rounds} rounds")
        print(f"digest {digest}")

    found = {"path": out, "dimension": parameters.dimension, "round": rounds, "model_digest": digest}
    return Reply(found, show)


@with_json
def evaluate(
    folder: options.FolderArgument,
    data: Annotated[
        str,
        typer.Option(
            metavar="DIR|FILE",
            help="Other data: for MNIST a folder of idx files; for text tasks a file of labelled sentences or a folder "
            "with one; for a task of your own its option `data`. (default: the run's)",
        ),
    ] = "",
    round: RoundOption = None,
    device: RunDeviceOption = "",
    model: ModelOption = "",
    task: OwnTaskOption = "",
    set_: TaskSettingsOption = None,
) -> Reply:
    """Measure a run's model, finished or not, on its test set or on other data: loss, accuracy, metrics.

    A task of your own is imported from where the run's config.toml says, if it is still the file that the run started
    with. For a folder that you received from somebody else, use --task.
    """
    from cyber0.runs.inference import evaluate
    from cyber0.runs.trained import InferenceOptions

    found = evaluate(folder, data, InferenceOptions(round, device, model, task, set_ or ()))
    return Reply(found, lambda: _show_evaluation(folder, found))


def _show_evaluation(folder: Path, found: dict[str, Any]) -> None:
    print(f"{folder} after {found['round']} rounds, on {found['samples']:,} samples ({found['evaluated_on']})")
    figures = {name: value for name, value in found.items() if name.endswith(("accuracy", "loss"))}
    for name, value in {**figures, **found["metrics"]}.items():
        if name != "accuracy" or value is not None:
            print(f"{name}: {_figure(name, value)}")
    print(f"digest {found['model_digest']}")
    sources = {
        "replay": "replayed from w0 and the ledger",
        "export": f"the exported ones, as claimed by summary.json; `cyber0 verify {folder}` replays the ledger",
        "checkpoint": "from state.safetensors; this method has no ledger to check them against",
    }
    print(f"weights: {sources[found['weights_from']]}")


def _figure(name: str, value: float | None) -> str:
    """Format a figure as the end of a run does."""
    if value is None:
        return "not finite"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"


@with_json
def predict(
    folder: options.FolderArgument,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="For MNIST a picture (28 x 28 pixels), an idx file or an array (.npy); for text tasks a sentence, a "
            "file of lines, or - for the standard input; for a task of your own a file .npy, .npz, .csv, .safetensors.",
        ),
    ],
    round: RoundOption = None,
    device: RunDeviceOption = "",
    model: ModelOption = "",
    task: OwnTaskOption = "",
    set_: TaskSettingsOption = None,
) -> Reply:
    """Predict with a run's model, finished or not: the class of each input and its probability, or the model's outputs.

    A task of your own is imported from where the run's config.toml says, if it is still the file that the run started
    with. For a folder that you received from somebody else, use --task.
    """
    from cyber0.runs.inference import predict
    from cyber0.runs.trained import InferenceOptions

    found = predict(folder, source, InferenceOptions(round, device, model, task, set_ or ()))
    return Reply(found, lambda: _show_predictions(found))


def _show_predictions(found: list[dict[str, Any]]) -> None:
    for row in found:
        answer = f"{row['class']}  {row['probability']:.1%}" if "class" in row else _outputs(row["outputs"])
        print(f"{answer}  {row['input']}" if isinstance(row["input"], str) else f"{row['input']}: {answer}")


def _outputs(value: object) -> str:
    """Format outputs in one line."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        inner = " ".join(map(_outputs, value))
        return f"({inner})" if any(isinstance(one, list) for one in value) else inner
    if isinstance(value, dict):
        return ", ".join(f"{name} {_outputs(one)}" for name, one in value.items())
    return str(value)


@with_json
def verify(
    folder: options.FolderArgument,
    device: options.ReplayDeviceOption = "cpu",
    model: ModelOption = "",
    task: OwnTaskOption = "",
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Recompute every decision from reports.bin (serve.keep_reports).")
    ] = False,
    rule: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="With --decisions: the run's rule, if it is not built in.")
    ] = "",
    schedule: ScheduleOption = "",
) -> Reply:
    """Check a run: every record of the ledger, learning rates, starting weights, and that they give its model.

    For a folder without starting weights, such as a federator's, a task that is not built in needs --task; without it
    only the ledger and the decisions are checked, and the exit code is 2.
    """
    from cyber0.directions.backends import check_device
    from cyber0.runs import export
    from cyber0.runs import replay as replays
    from cyber0.storage import MODEL, SUMMARY

    if rule and not decisions:
        raise ConfigError(f"--rule {rule} is only used with --decisions: add that, or remove --rule")
    check_device(device)
    ledger = replays.open_ledger(folder)
    found = {"folder": folder, **_print_records(ledger)}
    rates = replays.check_conduct(ledger, schedule)
    if rates.unknown and not rates.free:
        print(f"warning: learning rates: not checked, except that they are finite and not negative; {rates.unknown}",
              file=sys.stderr)  # fmt: skip
    found["learning_rates"] = f"not checked; {rates.unknown}" if rates.unknown else "checked"
    if decisions:
        again = replays.check_decisions(folder, ledger, rule)
        print(f"decisions: {again.rounds} rounds decided again from reports.bin, all the same")
        for expulsion in again.expulsions:
            print(f"expelled: {expulsion.text}")
        found |= {"decisions_checked": again.rounds, "expelled": [one.as_dict() for one in again.expulsions]}
    print(f"chain {ledger.chain.hex()}")
    try:
        parameters = replays.rebuild(folder, None, device, model, task)[1]
    except Cyber0Error:
        print(f"model: not verified; {SUMMARY} and {MODEL} are not compared with it")
        raise
    digest = parameters.digest()  # once: hashing a large model takes seconds
    print(f"digest {digest}")
    found |= {"chain": ledger.chain.hex(), "model_digest": digest, "ended": False, "exported": None}
    summary = folder / SUMMARY
    if not summary.exists():
        print(f"{SUMMARY}: missing, so the run has not ended")
        return Reply(found)
    _check_summary(summary, ledger, digest)
    found["ended"] = True
    if exported := export.check_exported(folder, ledger, parameters, digest):
        print(f"{exported.name}: the weights that w0 and the ledger give")
        found["exported"] = exported.name
    return Reply(found)


def _print_records(ledger: Ledger) -> dict[str, Any]:
    """Read every record, which verifies it; print what the ledger holds, and return it."""
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
    return {"records": len(ledger), "decided": decided, "abandoned": len(ledger) - decided, "planned_rounds": planned,
            "torn_bytes": ledger.torn_bytes}  # fmt: skip


def _check_summary(summary: Path, ledger: Ledger, model_digest: str) -> None:
    """Refuse a summary that claims another model than that of this digest, which w0 and the ledger give."""
    from cyber0.runs.folder import load_summary

    try:
        claimed = load_summary(summary.parent)
        digest = claimed.get("model_digest")  # a federator, which holds no weights, can't state one
        claim = (
            claimed["rounds"],
            claimed.get("chain", ledger.chain.hex()),
            model_digest if digest is None else digest,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{summary} can't be read as a summary: {error!r}") from None
    if claim != (len(ledger), ledger.chain.hex(), model_digest):
        raise LedgerError(
            f"{summary} claims {digest or claim[1]} after {claimed['rounds']} rounds, but w0 and the ledger give "
            f"{model_digest if digest else ledger.chain.hex()} after {len(ledger)}"
        )
    what = "no model, as a federator has none" if digest is None else "this model"
    print(f"{summary.name}: claims {what}; all is well (accuracy and loss are not measured again)")


def repair(
    folder: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A run's folder, or the ledger of a ZeroOrder.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Repair without asking; required where there is no terminal.")
    ] = False,
) -> None:
    """Check a run's folder, and cut off what is damaged after saving a copy of it.

    Nothing is changed before you agree. Copies end in .damaged and are never overwritten. After a kill or a power cut
    no repair is needed: resuming cuts off the incomplete end.
    """
    from cyber0.runs import repair

    raise typer.Exit(repair.command(folder, yes=yes))
