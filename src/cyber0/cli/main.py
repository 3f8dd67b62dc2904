"""The command line. Heavy packages are imported inside the command that needs them, so that --help answers at once."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

import cyber0
from cyber0.cli import catalogue, completion, deploy
from cyber0.cli import help as show_help
from cyber0.cli import inspect as inspection
from cyber0.cli.bench import bench
from cyber0.cli.demo import demo
from cyber0.cli.diagnose import diagnose
from cyber0.cli.doctor import doctor
from cyber0.cli.new import new
from cyber0.cli.reproduce import reproduce
from cyber0.cli.run import init, run
from cyber0.cli.study import study
from cyber0.errors import Cyber0Error, ExitCode

app = typer.Typer(
    cls=show_help.Group,
    help="Byzantine-resilient federated zero-order learning: k scalars per client and round, each way.",
    epilog="Exit codes: 0 done; 1 something is not in order, such as failed runs of a study; 2 refused or unreadable; "
    "3 nothing was learned; 130 interrupted. With --json, commands print JSON and nothing else on stdout.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line; an error that a user can fix is one line, without a traceback."""
    warnings.formatwarning = _warning_line
    _show_progress()
    if completion.answer_bash(os.environ):
        sys.exit(0)
    try:
        app(prog_name="cyber0")
    except Cyber0Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.REFUSED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as in `cyber0 list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(ExitCode.FAULTS)
    except OSError as error:  # a folder that can't be written to, a full disk
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.REFUSED)


def _show_progress() -> None:
    """Print what slow steps, such as a download, say of themselves; `display.new_console` turns that off."""
    progress = logging.getLogger("cyber0.progress")
    progress.handlers, progress.propagate = [_Stderr()], False
    progress.setLevel(logging.INFO)


class _Stderr(logging.Handler):
    """Writes messages to what is the standard error at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of ours as its text alone, and one of another package with its place."""
    if category is RuntimeWarning and Path(filename).is_relative_to(Path(cyber0.__file__).parent):
        return f"warning: {message}\n"
    return _format_warning(message, category, filename, lineno, line)


_format_warning = warnings.formatwarning


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"cyber0 {cyber0.__version__}")
        raise typer.Exit


_PANELS = {
    "Train": (run, study, reproduce, new, demo),
    "Look into a run": (inspection.report, inspection.evaluate, inspection.predict, diagnose, inspection.replay,
                        inspection.verify, inspection.repair),
    "Deploy": (init, deploy.certs, deploy.serve, deploy.join, deploy.follow),
    "Look up": (catalogue.list_, catalogue.theory, catalogue.data, bench, doctor),
}  # fmt: skip
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        show_help.add(app, _command, _panel, _command.__name__.rstrip("_"))
