"""The command line. Heavy packages are imported inside the command that needs them, so that --help answers at once."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

import cyber0
from cyber0.cli import catalogue, completion, deploy
from cyber0.cli import inspect as inspection
from cyber0.cli.bench import bench
from cyber0.cli.demo import demo
from cyber0.cli.diagnose import diagnose
from cyber0.cli.reproduce import reproduce
from cyber0.cli.run import init, run
from cyber0.cli.study import study
from cyber0.errors import Cyber0Error

app = typer.Typer(
    help="Byzantine-resilient federated zero-order learning: k scalars per client and round, each way.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line; an error that a user can fix is one line, without a traceback."""
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


for _command in (run, study, inspection.report, diagnose, inspection.replay, inspection.evaluate, inspection.predict,
                 inspection.verify, inspection.repair, init, catalogue.theory, reproduce, bench, demo):  # fmt: skip
    app.command()(_command)
app.command("list")(catalogue.list_)
app.command()(catalogue.data)
deploy.register(app)


def _flowing(text: str) -> str:
    """Return a docstring with the lines of each paragraph joined: typer keeps their breaks at any width of terminal."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


for _registered in app.registered_commands:
    _registered.help = _flowing(
        _registered.help or (_registered.callback.__doc__ if _registered.callback else "") or ""
    )
