"""Watch a run: its report, served live while it is being played.

The server knows three answers: the page, its data, and no. It listens on loopback unless told otherwise, takes nothing
but GET, and refuses names that are not its own in the Host header, so that no web page elsewhere can read a run through
the reader's browser by making its own name point here (DNS rebinding).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import threading
import time
import warnings
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Self

from cyber0.errors import ConfigError
from cyber0.report.contents import contents
from cyber0.report.headline import rate_text
from cyber0.report.page import page, to_json
from cyber0.runs import environment
from cyber0.runs.folder import RunFolder, read
from cyber0.storage import CLIENTS, SUMMARY

if TYPE_CHECKING:
    from cyber0.ledger import Record
    from cyber0.runs.run import Run

LOOPBACK = "127.0.0.1"
FRESH_S = 0.4  # news is made at most so often, however many pages ask,
SHARE = 0.05  # and takes at most this share of the run's time
POLL_S = 1.2  # a page asks once a second
LINGER_S = 5.0  # a page that asked so recently gets the run's end before the server goes
SLOWEST_CLIENT_S = 10.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}

Snapshot = Callable[[], tuple[RunFolder, dict[str, Any]]]


class LivePage:
    """The live page of a run, a callback: the run as it stands at any moment, read by the server's threads."""

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
        print(f"watch the run at {self._server.address}", flush=True)  # also when quiet: it was asked for
        if not is_loopback(self._server.host):
            warnings.warn(
                f"everybody who can reach this machine at {self._server.host} can read the run",
                RuntimeWarning,
                stacklevel=1,
            )

    def on_round(self, record: Record) -> None:
        """Note how far the run has come; this is all that the run itself spends on being watched."""
        self._round, self._speed = self._run.round, self._run.rounds_per_second

    def snapshot(self) -> tuple[RunFolder, dict[str, Any]]:
        """Return the run from what is in memory, and from its folder once it has ended."""
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
    """A server that runs beside a run, from `start` to the end of the `with` block.

    Args:
        host: Where to listen.
        port: 0: one that is free.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        self.host = host
        self._snapshot: Snapshot | None = None
        self._lock = threading.Lock()
        self._due, self._news = 0.0, ""
        self._asked = -LINGER_S
        self._ended = self._told_end = False
        try:
            self._server = _Server((host, port), _Handler, self)
        except (OSError, OverflowError) as error:
            elsewhere = "" if host == LOOPBACK else "another host by --watch-host, or "
            raise ConfigError(
                f"the run can't be watched at {host}, port {port}: {error}; choose {elsewhere}another port by "
                "--watch-port (0: a free one)"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        host, port = self._server.server_address[:2]
        name = (
            LOOPBACK if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host!s}]" if ":" in str(host) else host
        )
        return f"http://{name!s}:{port}/"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread.is_alive():
            if kind is None:
                self._finish()
            self._server.shutdown()
        self._server.server_close()

    def start(self, snapshot: Snapshot) -> None:
        """Start to answer; `snapshot` returns the run as it is and how far it has come, and is called by any thread."""
        self._snapshot = snapshot
        self._thread.start()

    def _finish(self) -> None:
        """Tell the pages that the run has ended; those that are looking are waited for."""
        with self._lock:
            self._ended, self._due = True, 0.0
        now = time.monotonic()
        watched = self._asked > now - LINGER_S
        while watched and time.monotonic() < now + (POLL_S if self._told_end else LINGER_S):
            time.sleep(0.05)

    def page(self) -> str:
        """Return the page as it is now."""
        with self._lock:
            self._asked = time.monotonic()
            folder, live = self._snapshot_now()
            return page([folder], live=live)

    def news(self) -> str:
        """Return the data as it is now, or a moment ago."""
        with self._lock:
            self._asked = time.monotonic()
            if self._asked >= self._due:
                began = time.thread_time()
                folder, live = self._snapshot_now()
                self._news = to_json(contents([folder], live=live))
                self._due = time.monotonic() + max(FRESH_S, (time.thread_time() - began) / SHARE)
            return self._news

    def _snapshot_now(self) -> tuple[RunFolder, dict[str, Any]]:
        assert self._snapshot is not None
        folder, live = self._snapshot()
        return folder, {**live, "ended": self._ended}

    def delivered(self) -> None:
        """Note that a page has got the news."""
        self._told_end = self._ended


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], watch: LiveServer) -> None:
        self.watch = watch
        self.host = address[0]
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the machine's name here, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = SLOWEST_CLIENT_S
    server_version, sys_version = "cyber0", ""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command != "GET":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return False
        if not _is_own_name(self.headers.get("Host", ""), self.server.host):  # type: ignore[attr-defined]
            self.send_error(HTTPStatus.FORBIDDEN, "this server is not known by that name")
            return False
        return True

    def do_GET(self) -> None:
        watch: LiveServer = self.server.watch  # type: ignore[attr-defined]
        if self.path == "/":
            self._answer(watch.page(), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            self._answer(watch.news(), "application/json")
            watch.delivered()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the terminal for the run."""


def _is_own_name(header: str, bound: str) -> bool:
    """Tell whether a Host header names this server, by an address (no name server decides that) or a name of ours."""
    name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
    name = name.strip("[]").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        local = name == "localhost"
        return local or (not is_loopback(bound) and name in {bound.lower(), socket.gethostname().lower()})
    return not is_loopback(bound) or address.is_loopback


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
