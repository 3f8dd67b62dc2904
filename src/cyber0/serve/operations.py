"""How a federator or a participant behaves as a process: its log, and what stops it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyber0.errors import Cyber0Error

EventLog = Callable[..., None]
"""Called as log("event", key=value, ...)."""


def log_nothing(event: str, **details: Any) -> None:
    """Drop an event."""


def make_log(*, as_json: bool = False, quiet: bool = False) -> EventLog:
    """Return a function log("event", key=value, ...) that writes one line to stderr: JSON, or for a reader."""
    if quiet:
        return log_nothing

    def log(event: str, **details: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        if as_json:
            line = json.dumps({"time": now, "event": event, **details}, default=str)
        else:
            line = f"{now[:-6]} {event.replace('_', ' ')} " + " ".join(f"{k}={v}" for k, v in details.items())
            line = _printable(line)
        # Nobody may read stderr any more, or its disk is full: no reason to stop what is being logged.
        with contextlib.suppress(OSError, ValueError):
            print(line.rstrip(), file=sys.stderr, flush=True)

    return log


def _printable(line: str) -> str:
    """Return one line: what the other side says, as why it refuses, can't look like a line of its own."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def described(error: BaseException) -> str:
    """Return an error in one line; of an unexpected one also its type, and where it was raised."""
    if isinstance(error, Cyber0Error):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def date_of(seconds: float) -> str:
    """Return a time in seconds since 1970 for a reader."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call `stop` in the running loop; in a thread, where signals never come, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop)
