"""The live page: a run's report, served while it runs.

The server serves the page and its data, and nothing else. It listens on loopback by default and accepts only GET
(local_server.py).
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

from cyber0.errors import ConfigError
from cyber0.report.contents import contents
from cyber0.report.headline import rate_text
from cyber0.report.local_server import LOOPBACK, LocalServer, PageHandler
from cyber0.report.own_host import is_loopback
from cyber0.report.page import page, to_json
from cyber0.runs import environment
from cyber0.runs.folder import RunFolder, read
from cyber0.storage import CLIENTS, SUMMARY

if TYPE_CHECKING:
    from cyber0.ledger import Record
    from cyber0.runs.run import Run

FRESH_S = 0.4  # the data is computed at most this often, however many pages ask,
SHARE = 0.05  # and takes at most this share of the run's time
POLL_S = 1.2  # a page asks once a second
LINGER_S = 5.0  # a page that asked this recently gets the final data before the server stops

ReadRun = Callable[[], tuple[RunFolder, dict[str, Any]]]


class LivePage:
    """A callback that shows a run on the live page; the server's threads take snapshots of it."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server

    def on_start(self, run: Run) -> None:
        self._run = run
        summary = {
            "environment": environment.describe(run.config.device),
            "dimension": run.simulation.parameters.dimension,
            "evaluated_on": run.simulation.evaluated_on,
        }
        self._start = dataclasses.replace(read(run.folder, running=True), summary=summary, notes=[])
        self._round, self._speed = run.round, 0.0
        self._server.start(self.snapshot)
        print(f"watch the run at {self._server.address}", flush=True)  # also with --quiet: the user asked for it
        if not is_loopback(self._server.host):
            warnings.warn(
                f"everybody who can reach this machine at {self._server.host} can read the run",
                RuntimeWarning,
                stacklevel=1,
            )

    def on_round(self, record: Record) -> None:
        """Note how far the run has come; this is all that the live page costs the run itself."""
        self._round, self._speed = self._run.round, self._run.rounds_per_second

    def snapshot(self) -> tuple[RunFolder, dict[str, Any]]:
        """Return the run as it is in memory, and from its folder once it has ended."""
        run = self._run
        if (run.folder / SUMMARY).exists() and (run.folder / CLIENTS).exists():
            folder = read(run.folder, running=True)
        else:
            rows = list(run.rows.values())  # copied at once: the run may add a row meanwhile
            folder = dataclasses.replace(
                self._start, evaluations=sorted(rows, key=lambda row: row.round), clients=run.suspects()
            )
        return folder, {"round": self._round, "rounds": run.config.rounds, "speed": rate_text(self._speed)}


class LiveServer:
    """An HTTP server beside a run, from `start` to the end of the `with` block.

    Args:
        host: Where to listen.
        port: 0 means any free one.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        self.host = host
        self._snapshot: ReadRun | None = None
        self._lock = threading.Lock()
        self._due, self._data = 0.0, ""
        self._last_request = -LINGER_S
        self._ended = self._end_delivered = False
        try:
            self._server = LocalServer((host, port), _Handler, self)
        except (OSError, OverflowError) as error:
            elsewhere = "" if host == LOOPBACK else "another host by --watch-host, or "
            raise ConfigError(
                f"the run can't be watched at {host}, port {port}: {error}; choose {elsewhere}another port by "
                "--watch-port (0: a free one)"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return self._server.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._server.started and kind is None:
            self._finish()
        self._server.end()

    def start(self, snapshot: ReadRun) -> None:
        """Start to answer; `snapshot` returns the run as it is and how far it has come, and is called by any thread."""
        self._snapshot = snapshot
        self._server.start()

    def _finish(self) -> None:
        """Mark the run as ended, and wait until the open pages have seen it."""
        with self._lock:
            self._ended, self._due = True, 0.0
        now = time.monotonic()
        watched = self._last_request > now - LINGER_S
        while watched and time.monotonic() < now + (POLL_S if self._end_delivered else LINGER_S):
            time.sleep(0.05)

    def page(self) -> str:
        """Return the page as it is now."""
        with self._lock:
            self._last_request = time.monotonic()
            folder, live = self._snapshot_now()
            return page([folder], live=live)

    def data(self) -> str:
        """Return the page's data as it is now, or was a moment ago."""
        with self._lock:
            self._last_request = time.monotonic()
            if self._last_request >= self._due:
                started = time.thread_time()
                folder, live = self._snapshot_now()
                self._data = to_json(contents([folder], live=live))
                self._due = time.monotonic() + max(FRESH_S, (time.thread_time() - started) / SHARE)
            return self._data

    def _snapshot_now(self) -> tuple[RunFolder, dict[str, Any]]:
        assert self._snapshot is not None
        folder, live = self._snapshot()
        return folder, {**live, "ended": self._ended}

    def delivered(self) -> None:
        """Note that a page has received the data."""
        self._end_delivered = self._ended


class _Handler(PageHandler):
    def do_GET(self) -> None:
        watch: LiveServer = self.server.owner
        if self.path == "/":
            self.answer(watch.page(), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            self.answer(watch.data(), "application/json")
            watch.delivered()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)
