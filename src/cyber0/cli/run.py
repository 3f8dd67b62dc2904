"""`cyber0 run` trains in a simulated federation; `cyber0 init` writes the header that a federator starts from."""

from __future__ import annotations

import secrets
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cyber0.cli import display as screen
from cyber0.cli import options
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError, Cyber0Error, ExitCode

if TYPE_CHECKING:
    from cyber0.config.schema import Config


@with_json
def run(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml|TASK|FILE.py:NAME",
            help="Settings, a task (cyber0 list), or one of your own; without any, the default run.",
            show_default=False,
        ),
    ] = None,
    set_: options.SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run. (default: runs/TASK-TIME)")
    ] = None,
    device: options.DeviceOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Resume an interrupted run; with --set rounds=N, extend it."),
    ] = None,
    quiet: options.QuietOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report live on this machine, and print its address.")
    ] = False,
    watch_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where --watch listens. With any other address than the default, everybody who can reach it can read "
            "the run: there is no password and no encryption.",
        ),
    ] = "127.0.0.1",
    watch_port: Annotated[int, typer.Option(metavar="PORT", help="0: any free port.", min=0, max=65535)] = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files for TensorBoard, which must be installed.")
    ] = False,
    no_export: Annotated[
        bool, typer.Option("--no-export", help="Do not write the trained model (model.safetensors, or model/).")
    ] = False,
) -> Reply:
    """Train: simulate a federation on this machine.

    Without arguments: MNIST, 12 clients of which 3 are Byzantine, k = 64, 400 rounds. `cyber0 list` shows every
    setting. For comparison, --set method.name=NAME trains by fedavg, trimmed_mean, krum, fedzo or mezo instead of
    cyber0.

    --set federation.partition=NAME distributes the samples by iid, by_label, dirichlet, shards or gamma. For dirichlet,
    federation.alpha sets how even the parts are: 0.1 gives each client few labels and uneven sizes, 100 is nearly iid.
    """
    from cyber0 import api
    from cyber0.kernels.memory import keep_freed_memory
    from cyber0.runs.settings import named_settings

    if out is not None:
        options.check_folder("--out", out)
    keep_freed_memory()
    overrides = [*(set_ or []), *([f"device={device}"] if device else [])]
    settings = named_settings(config, overrides) if resume is None else _resumed(resume, config, out, overrides)
    with ExitStack() as stack:
        # An address or package that is not available is refused before anything is written.
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
            summary = api.run(
                settings, out=resume or out, resume=resume is not None, callbacks=callbacks, export=not no_export
            )
        except KeyboardInterrupt:
            if display.run is None:
                raise
            print(f"interrupted after {display.run.round} rounds; resume with: {_resume(display)}", file=sys.stderr)
            sys.exit(ExitCode.INTERRUPTED)
        except Cyber0Error as error:
            if display.run is None or "--resume" in str(error):
                raise
            raise Cyber0Error(f"{error}. Once that is fixed, resume with: {_resume(display)}") from error
    assert display.run is not None
    return Reply({"folder": display.run.folder, **summary}, code=display.code)


def _resumed(folder: Path, config: Path | None, out: Path | None, overrides: list[str]) -> Config | None:
    """Return the settings of a run that is resumed, None if they do not change; refuse any other change."""
    from cyber0.config.files import load
    from cyber0.storage import CONFIG

    if config is not None or out is not None or {o.partition("=")[0].strip() for o in overrides} - {"rounds"}:
        raise ConfigError("--resume continues a run with the settings it was started with: give no config, no --out or "
                          "--device, and no --set except --set rounds=N, which extends it")  # fmt: skip
    return load(folder / CONFIG, overrides) if overrides and (folder / CONFIG).exists() else None


def _resume(display: screen.Display) -> str:
    assert display.run is not None
    return f"cyber0 run --resume {shlex.quote(str(display.run.folder))}"


def init(
    config: options.ConfigArgument,
    out: Annotated[Path, typer.Option(metavar="HEADER", help="Where to write the header: a ledger without records.")],
) -> None:
    """Write what a federator without weights needs: dimension, layout, digests, settings."""
    from cyber0.runs.settings import load_named

    settings = load_named(config)
    if out.exists():
        raise ConfigError(f"--out {out} already exists: choose another name, or delete it if no run uses it")
    if settings.method.name != "cyber0":
        raise ConfigError(
            f'method.name = {settings.method.name!r} has no federator to start; set method.name = "cyber0"'
        )
    from cyber0.config.schedules import AUTO
    from cyber0.federation.agreement import make_header
    from cyber0.federation.build import lr_without_data, with_lr
    from cyber0.federation.user_code import refuse_of_header
    from cyber0.ledger import Ledger
    from cyber0.model.vector import Parameters
    from cyber0.tasks import starting_model

    refuse_of_header(settings, config, ())
    if settings.method.lr == AUTO:
        settings = with_lr(settings, lr_without_data(settings))
        print(f'lr = {settings.method.lr:g} (method.lr = "auto")')
    model = starting_model(settings.task, settings.seed)
    parameters = Parameters(model, settings.method.distribution, rank=settings.method.rank)
    header = make_header(settings, parameters, secrets.token_hex(16))
    out.parent.mkdir(parents=True, exist_ok=True)
    Ledger.create(out, header).close()
    print(f"{out}: d = {header.dimension}, weights {header.weights_digest[:16]}, rest {header.rest_digest[:16]}")
