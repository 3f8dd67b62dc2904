"""A federator's figures for Prometheus, and the loopback port that serves them beside a health check.

Needs prometheus_client (the extra `deploy`). Every figure is defined once, in `_families`; it is read from the hub when
somebody asks.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cyber0.errors import ConfigError
from cyber0.report.own_host import is_own_host
from cyber0.serve.operations import described

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector
except ImportError:
    raise ConfigError("the metrics port needs the package prometheus_client: pip install 'cyber0[deploy]'") from None

if TYPE_CHECKING:
    from cyber0.serve.hub import Hub

LOOPBACK = "127.0.0.1"
_LONGEST_REQUEST = 4096
_REQUEST_SECONDS = 5.0
_MOST_VISITORS = 16  # at a time: each is an open file, of which some are kept free (descriptors.py)
_SHARE = 0.05  # of the time, at most, goes into writing figures, however many ask
_BYTES = {
    "payload": "Bytes of the scalars alone.",
    "message": "Bytes of the messages, before gRPC and TLS wrap them.",
    "wire": "Bytes of the TCP connections (0 where the system does not count them).",
}


class HubCollector(Collector):
    """Reads a hub's figures whenever a registry asks for them."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """Yield every figure as it stands."""
        self._hub.count_wire()
        yield from _families(self._hub)


def _families(hub: Hub) -> Iterator[Metric]:
    figures, federator = hub.figures, hub.federator
    yield _gauge("round", "Rounds in the ledger.", len(hub.ledger))
    outcomes = [(("decided",), figures.decided), (("abandoned",), figures.abandoned)]
    yield _counter("rounds", "Rounds ended by this process.", outcomes, "outcome")
    yield _gauge("clients_connected", "Clients with a vote that are connected.", hub.connected)
    yield _gauge("clients_current", "Of those, how many hold the weights of the open round.", hub.current)
    yield _gauge("reports_required", "Reports that a decision needs.", federator.required)
    misses = _by_client(client.misses for client in figures.clients)
    yield _counter("deadline_misses", "Rounds that ended without a report that was waited for.", misses, "client")
    text = "Comparisons of digests that found a client outside the majority."
    yield _counter("digest_alarms", text, [((), figures.alarms)])
    refused = [((reason,), count) for reason, count in sorted(figures.refused.items())]
    yield _counter("refused", "Reports and streams that were refused, by reason.", refused, "reason")
    for kind, text in _BYTES.items():
        sizes = [((str(client), way), getattr(traffic, f"{kind}_{way}"))
                 for client, traffic in enumerate(figures.clients) for way in ("in", "out")]  # fmt: skip
        yield _counter(f"{kind}_bytes", f"{text} By client.", sizes, "client", "direction")
    reports = _by_client(client.reports for client in figures.clients)
    yield _counter("reports", "Reports of a client that counted.", reports, "client")
    phases = [((phase,), seconds) for phase, seconds in figures.seconds.items()]
    yield _counter("phase_seconds", "Time spent in each phase of the rounds.", phases, "phase")
    for name, text in (("trimmed", "Scalars of a client that the rule left out."),
                       ("sent", "Scalars of a client in decided rounds.")):  # fmt: skip
        yield _counter(f"{name}_numbers", text, _by_client(getattr(federator, name).tolist()), "client")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cyber0_{name}", text, value)


def _counter(name: str, text: str, samples: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
    family = CounterMetricFamily(f"cyber0_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _by_client(counts: Iterable[float]) -> list[tuple[tuple[str], float]]:
    return [((str(client),), count) for client, count in enumerate(counts)]


class MetricsServer:
    """Answers GET /metrics and GET /health on a loopback port."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._registry = CollectorRegistry()  # of its own: the global one also has this process' figures
        self._registry.register(HubCollector(hub))
        self._server: asyncio.Server | None = None
        self._failing = ""
        self._text, self._fresh_until = b"", 0.0
        self._visitors = 0

    async def start(self, port: int) -> int:
        """Listen on loopback and return the port (a free one for port 0)."""
        try:
            self._server = await asyncio.start_server(self._answer, LOOPBACK, port, limit=_LONGEST_REQUEST)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ConfigError(
                f"can't listen on --metrics {port}: {reason}; choose another port (0: a free one)"
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._visitors >= _MOST_VISITORS:
            writer.close()
            return
        self._visitors += 1
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                writer.write(self._reply(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, TimeoutError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # such a request gets no answer
        finally:
            self._visitors -= 1
            writer.close()

    def _reply(self, request: bytes) -> bytes:
        first, *headers = request.decode("ascii", "replace").split("\r\n")
        path = first.split(" ")[1]
        hosts = [value for name, _, value in (line.partition(":") for line in headers) if name.lower() == "host"]
        if not is_own_host(hosts, LOOPBACK):
            text = f"the Host of a request has to be {LOOPBACK} or localhost, not {', '.join(hosts) or 'absent'}\n"
            status, kind, body = "403 Forbidden", "text/plain", text.encode()
        else:
            status, kind, body = self._page_or_error(path)
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body

    def _page_or_error(self, path: str) -> tuple[str, str, bytes]:
        try:
            page = self._page(path)
        except Exception as error:  # broad: a figure that can't be read is no reason to stop a federation
            if (text := described(error)) != self._failing:  # once, not at every scrape
                self._failing = text
                self._hub.policy.log("task_failed", task="metrics", error=text)
            return "500 Internal Server Error", "text/plain", b"the figures can't be read; the log says why\n"
        self._failing = ""
        return page

    def _page(self, path: str) -> tuple[str, str, bytes]:
        """Return the status, the type and the text at a path."""
        if path == "/metrics":
            return "200 OK", CONTENT_TYPE_LATEST, self._figures()
        if path in ("/health", "/"):
            healthy = self._hub.failure is None
            status = "200 OK" if healthy else "503 Service Unavailable"
            return status, "application/json", self._health(healthy).encode()
        return "404 Not Found", "text/plain", b"/metrics and /health are here\n"

    def _figures(self) -> bytes:
        """Return the figures, as they are or were a moment ago: those of a thousand clients take 0.1 s to write."""
        begin = time.monotonic()
        if begin >= self._fresh_until:
            self._text = generate_latest(self._registry)
            end = time.monotonic()
            self._fresh_until = end + (end - begin) / _SHARE
        return self._text

    def _health(self, healthy: bool) -> str:
        hub = self._hub
        state = {"ok": healthy, "round": len(hub.ledger), "rounds": hub.rounds, "current": hub.current,
                 "required": hub.federator.required, "error": str(hub.failure or "")}  # fmt: skip
        return json.dumps(state) + "\n"
