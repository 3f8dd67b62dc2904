"""Logs, figures for Prometheus, a health check: what whoever runs a federator looks at."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cyber0.errors import ConfigError

if TYPE_CHECKING:
    from cyber0.serve.hub import Hub

Log = Callable[..., None]

_LONGEST_REQUEST = 4096
_REQUEST_SECONDS = 5.0


def make_log(*, as_json: bool = False, quiet: bool = False) -> Log:
    """Return a function log("event", key=value, ...) that writes one line to stderr: JSON, or for a reader."""

    def log(event: str, **details: Any) -> None:
        if quiet:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        if as_json:
            line = json.dumps({"time": now, "event": event, **details}, default=str)
        else:
            line = f"{now[:-6]} {event.replace('_', ' ')} " + " ".join(f"{k}={v}" for k, v in details.items())
        print(line.rstrip(), file=sys.stderr, flush=True)

    return log


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call `stop` in the running loop; in a thread, where signals never come, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop)


def prometheus(hub: Hub) -> str:
    """Return the hub's figures in Prometheus' text format."""
    hub.count_wire()
    f, federator = hub.figures, hub.federator
    lines: list[str] = []

    def add(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP cyber0_{name} {text}")
        lines.append(f"# TYPE cyber0_{name} {kind}")
        lines.extend(f"cyber0_{name}{labels} {value:g}" if value % 1 else f"cyber0_{name}{labels} {int(value)}"
                     for labels, value in samples)  # fmt: skip

    add("round", "gauge", "Rounds in the ledger.", ("", len(hub.ledger)))
    add("rounds_total", "counter", "Rounds ended by this process.",
        ('{outcome="decided"}', f.decided), ('{outcome="abandoned"}', f.abandoned))  # fmt: skip
    add("clients_connected", "gauge", "Clients with a vote that are connected.", ("", hub.connected))
    add("clients_current", "gauge", "Of those, how many hold the weights of the open round.", ("", hub.current))
    add("reports_required", "gauge", "Reports that a decision needs.", ("", federator.required))
    add("deadline_misses_total", "counter", "Reports that were waited for until the deadline, in vain.",
        *((f'{{client="{c}"}}', traffic.misses) for c, traffic in enumerate(f.clients)))  # fmt: skip
    add("digest_alarms_total", "counter", "Comparisons of digests that found a client outside the majority.",
        ("", f.alarms))  # fmt: skip
    add("refused_total", "counter", "Reports and streams that were refused, by reason.",
        *((f'{{reason="{reason}"}}', count) for reason, count in sorted(f.refused.items())))  # fmt: skip
    for kind, text in (("payload", "Bytes of the numbers alone."),
                       ("message", "Bytes of the messages, before gRPC and TLS wrap them."),
                       ("wire", "Bytes of the TCP connections (0 where the system does not tell).")):  # fmt: skip
        add(f"{kind}_bytes_total", "counter", f"{text} By client.",
            *((f'{{client="{c}",direction="{way}"}}', getattr(traffic, f"{kind}_{way}"))
              for c, traffic in enumerate(f.clients) for way in ("in", "out")))  # fmt: skip
    add("reports_total", "counter", "Reports of a client that counted.",
        *((f'{{client="{c}"}}', traffic.reports) for c, traffic in enumerate(f.clients)))  # fmt: skip
    add("phase_seconds_total", "counter", "Time spent in each phase of the rounds.",
        *((f'{{phase="{phase}"}}', spent) for phase, spent in f.seconds.items()))  # fmt: skip
    for name, text in (("trimmed", "Numbers of a client that the rule left out."),
                       ("sent", "Numbers of a client in decided rounds.")):  # fmt: skip
        counts = getattr(federator, name).tolist()
        add(f"{name}_numbers_total", "counter", text, *((f'{{client="{c}"}}', n) for c, n in enumerate(counts)))
    return "\n".join(lines) + "\n"


class Watch:
    """Answers GET /metrics and GET /health on a loopback port."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> int:
        """Listen on 127.0.0.1 and return the port (a free one if 0 was asked for)."""
        try:
            self._server = await asyncio.start_server(self._answer, "127.0.0.1", port, limit=_LONGEST_REQUEST)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ConfigError(f"--metrics {port} can't be had: {reason}; choose another port (0: a free one)") from None
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._reply(request.split(b" ", 2)[1].decode("ascii", "replace")))
                await writer.drain()
        except (OSError, TimeoutError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asks so gets no answer
        finally:
            writer.close()

    def _reply(self, path: str) -> bytes:
        if path == "/metrics":
            status, kind, body = "200 OK", "text/plain; version=0.0.4", prometheus(self._hub)
        elif path in ("/health", "/"):
            well = self._hub.failure is None
            status, kind = "200 OK" if well else "503 Service Unavailable", "application/json"
            body = json.dumps({"ok": well, "round": len(self._hub.ledger), "rounds": self._hub.rounds,
                               "current": self._hub.current, "required": self._hub.federator.required,
                               "error": str(self._hub.failure or "")}) + "\n"  # fmt: skip
        else:
            status, kind, body = "404 Not Found", "text/plain", "/metrics and /health are here\n"
        data = body.encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        return head.encode() + data
