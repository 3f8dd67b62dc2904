"""What a command prints: text for people, or with --json one JSON value, alone on stdout."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Annotated, Any, NamedTuple

import typer

from cyber0.errors import ExitCode

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


class Reply(NamedTuple):
    """What a command has found."""

    data: Any
    """What --json prints: dictionaries, lists, strings, numbers, paths."""
    show: Callable[[], None] = lambda: None
    """Prints the same for people, where the command has not done so while it worked."""
    code: ExitCode = ExitCode.DONE


def with_json(command: Callable[..., Reply]) -> Callable[..., None]:
    """Give a command that returns a reply the option --json.

    With it, stdout is stderr while the command works, for child processes and code of the user's too.
    """

    @functools.wraps(command)
    def call(*given: Any, as_json: bool = False, **options: Any) -> None:
        if as_json:
            with _stdout_to_stderr():
                reply = command(*given, **options)
            print_json(reply.data)
        else:
            reply = command(*given, **options)
            reply.show()
        if reply.code:
            raise typer.Exit(reply.code)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
    parameters = [*signature.parameters.values(), option]
    # typer reads both: the signature for the defaults, the annotations for the types.
    vars(call)["__signature__"] = signature.replace(parameters=parameters, return_annotation=None)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def print_json(data: object) -> None:
    """Print data as JSON; numbers that are not finite become null, with a warning, for JSON has none."""
    lost: list[float] = []
    text = json.dumps(_plain(data, lost), indent=2, ensure_ascii=False, allow_nan=False)
    if lost:
        print("warning: some numbers are not finite; they are null here", file=sys.stderr)
    print(text)


def _plain(value: Any, lost: list[float]) -> Any:
    """Return a value as JSON has it; numbers that it can't have are added to `lost`."""
    if isinstance(value, dict):
        return {str(name): _plain(one, lost) for name, one in value.items()}
    if hasattr(value, "_asdict"):  # a named tuple
        return _plain(value._asdict(), lost)
    if isinstance(value, (list, tuple)):
        return [_plain(one, lost) for one in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(value)
        return None
    return value


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Lead to stderr what this process and its children write to stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)
