"""`cyber0 serve`: the hub behind gRPC. Holds no weights and never loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from cyber0.config import doors
from cyber0.config.files import load, to_toml
from cyber0.config.overrides import overridden
from cyber0.config.paths import agreed
from cyber0.config.registry import RULES, SCHEDULES
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.federation import build
from cyber0.federation import user_code as own
from cyber0.kernels.memory import return_freed_memory
from cyber0.ledger import MAGIC, Header, Ledger, Reports, changed_settings, opening_of
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import payload_bytes
from cyber0.runs.settings import load_named
from cyber0.serve import tls as certificates
from cyber0.serve.admission import Cut, Identity, read_revoked, unknown_revocations
from cyber0.serve.hub import Hub
from cyber0.serve.operations import EventLog, on_stop_signals
from cyber0.serve.sockets import Sockets
from cyber0.serve.stats import ServerStats
from cyber0.storage import CONFIG, LEDGER, REPORTS, SERVED, SUMMARY, write_text

SERVICE = "cyber0.Federation"
HEADER, REVOKED = "header.bin", "revoked.txt"
SMALLEST_LIMIT = 4096  # bytes of a message that is read at all
KEEPALIVE_MS = 10_000
HANDSHAKE_MS = 30_000  # who takes longer over TLS is let go
GRACE_SECONDS = 5.0
_POLL_SECONDS = 1.0
_SAVE_SECONDS = 5.0
# Between returns of memory that handshakes and streams have freed to the system; one takes milliseconds.
_TRIM_SECONDS = 10.0

# Messages have some dozen bytes. Probing the bandwidth would grow buffers to megabytes a client; with a small window
# gRPC tells the other side less often that it may send more: 13 bytes less a message each way.
LEAN = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096), ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS), ("grpc.http2.max_pings_without_data", 0))  # fmt: skip

Beside = Callable[[Hub, int], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class ServeOptions:
    """What `cyber0 serve` was asked for."""

    listen: str
    out: Path
    certs: Path | None
    """None: plaintext, on loopback only."""
    stay: bool = False
    metrics_port: int | None = None
    watch_port: int | None = None
    """Where the live page is, on loopback; 0: a free one, None: nowhere."""


def prepare(source: Path, out: Path, overrides: list[str], *, resume: bool) -> Ledger:
    """Return the ledger of the run in `out`: started from a config or a header, or resumed."""
    asked = [override for override in overrides if override.partition("=")[0].strip() == "rounds"]
    config, header = _settings(source, overrides, asked if resume else [])
    if header is None and not (out / LEDGER).exists():
        own.refuse_of_header(config, source, overridden(overrides))
    return begin(config, header, out, resume=resume, source=str(source), exactly=bool(asked))


def begin(
    config: Config, header: Header | None, out: Path, *, resume: bool, source: str, exactly: bool = False
) -> Ledger:
    """Return the ledger of the run in `out`; `source` is where its settings come from, for errors.

    A run that is resumed keeps the number of rounds that it was lengthened to, unless it is to have `exactly` those of
    the config.
    """
    build.resolve(config, served=True)
    path = out / LEDGER
    if path.exists():
        if not resume:
            raise ConfigError(f"{out} already holds a ledger; go on with it by --resume, or choose another --out")
        with contextlib.ExitStack() as undo:
            ledger = Ledger.open(path, writable=True, durability=config.serve.durability)  # type: ignore[arg-type]
            undo.callback(ledger.close)
            if header is not None and (odd := header.differences(ledger.header)):
                raise LedgerError(f"{path} belongs to another run than {source}: it differs in {', '.join(odd)}")
            if ledger.header.format == 1:
                raise LedgerError(
                    f"{path} is a ledger of format 1, which is not served any more: finish the run with cyber0 0.1, or "
                    "start a new one from its model by task.weights"
                )
            if changed := changed_settings(agreed(config), ledger.header.config):
                raise LedgerError(
                    f"{path} was begun with other settings than {source}, which can't change within a run: "
                    f"{', '.join(changed)}"
                )
            if not exactly:
                planned = load(out / CONFIG).rounds if (out / CONFIG).exists() else 0
                config = replace(config, rounds=max(config.rounds, ledger.rounds, planned))
            if config.rounds < len(ledger):
                raise ConfigError(
                    f"rounds = {config.rounds}, and the ledger {path} has {len(ledger)} already: raise it"
                )
            if header is None:
                own.warn_if_changed(config, out)
            if len(ledger) < config.rounds:
                (out / SUMMARY).unlink(missing_ok=True)  # where it is, the run is whole
            write_text(out / CONFIG, _written(config, header, out))  # files may have moved, rounds may be more
            undo.pop_all()
        return ledger
    header_given, header = (
        header,
        header or _made_header(config),
    )  # first: nothing is written before all that can be refused has been
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be made: {error.strerror}") from None
    write_text(out / SERVED, "{}\n")  # before the config: from now on nobody takes what it names for the user's own
    write_text(out / CONFIG, _written(config, header_given, out))
    if header_given is None:
        own.remember(config, out)
    return Ledger.create(path, header, durability=config.serve.durability)  # type: ignore[arg-type]


def _written(config: Config, header: Header | None, out: Path) -> str:
    """Return config.toml; what only a header names is not looked for in the working directory, nor anywhere else."""
    return to_toml(config, out) if header is None else to_toml(own.with_remembered_paths(config, out))


def _settings(source: Path, overrides: list[str], allowed: list[str]) -> tuple[Config, Header | None]:
    """Return the config, and the header if `source` is one that `cyber0 init` wrote, with some overrides alone."""
    try:
        with source.open("rb") as file:
            is_header = file.read(len(MAGIC)) == MAGIC
    except OSError:
        is_header = False
    if not is_header:
        return load_named(source, overrides, trusted=True), None
    if overrides != allowed:
        raise ConfigError(f"{source} is a header, whose settings are fixed: give --set to `cyber0 init`'s config")
    header = Ledger.open(source).header
    config = Config.recorded(header.config)
    for name, value, registry in (("aggregation.rule", config.aggregation.rule, RULES),
                                  ("method.lr_schedule", config.method.lr_schedule, SCHEDULES)):  # fmt: skip
        if value not in registry:
            raise ConfigError(
                f"{name} = {value!r} of the header {source} is not built in, and a header never makes anybody import "
                "code; serve the config that the header was made from"
            )
    return Config.from_dict(header.config).with_overrides(allowed), header


def _made_header(config: Config) -> Header:
    """Have `cyber0 init` write the header in a process of its own: it needs torch, and this process does not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / CONFIG, to_toml(config, folder))
        command = [sys.executable, "-m", "cyber0", "init", str(folder / CONFIG), "--out", str(folder / HEADER)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"the header can't be made: {done.stderr.strip().removeprefix('error: ')}")
        return Ledger.open(folder / HEADER).header


def make_federator(ledger: Ledger, reports: Path | None = None, config: Config | None = None) -> Federator:
    """Return the federator that a ledger's header describes.

    A rule or schedule that is not built in comes from the federator's own config.
    """
    with contextlib.ExitStack() as stack:
        if config is None:
            config = Config.recorded(ledger.header.config)
            stack.enter_context(doors.closed("the federator's own config has to name it"))
        return build.make_federator(ledger, config, None if reports is None else Reports.beside(ledger, reports))


def _own_config(ledger: Ledger, out: Path) -> Config:
    """Return the settings of a run, with the paths of the federator's own rule and schedule where it has such."""
    mine = load(out / CONFIG)
    if changed := changed_settings(agreed(mine), ledger.header.config):
        raise LedgerError(
            f"{out / CONFIG} has other settings than {out / LEDGER}, which can't change within a run: "
            f"{', '.join(changed)}"
        )
    return mine


class _GrpcStream:
    """A stream of gRPC as the hub sees one."""

    def __init__(self, context: Any, identity: Identity | None, sockets: Sockets) -> None:
        self.identity = identity
        self.read, self.write = context.read, context.write  # at the end `read` returns grpc.aio.EOF
        self._peer, self._sockets = context.peer(), sockets

    def wire(self) -> tuple[int, int] | None:
        return self._sockets.news(self._peer)


class Service:
    """The two calls that a participant makes: `Describe` returns the ledger's opening, `Rounds` is the stream."""

    def __init__(self, hub: Hub, *, secure: bool) -> None:
        self._hub, self._secure, self._sockets = hub, secure, Sockets()
        self._opening = opening_of(hub.ledger.header)

    def handlers(self) -> Any:
        """Return what a gRPC server is given; messages are plain bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
                "Rounds": grpc.stream_stream_rpc_method_handler(self._rounds),
            },
        )

    async def _describe(self, request: bytes, context: Any) -> bytes:
        async def opening(identity: Identity | None) -> bytes:
            return self._opening

        result: bytes = await self._guarded(context, opening)
        return result

    async def _rounds(self, requests: Any, context: Any) -> None:
        await self._guarded(context, lambda identity: self._hub.serve(_GrpcStream(context, identity, self._sockets)))

    async def _guarded(self, context: Any, serve: Callable[[Identity | None], Awaitable[Any]]) -> Any:
        try:
            return await serve(self._identity(context))
        except Cut as cut:
            await context.abort(grpc.StatusCode[cut.status], cut.text)

    def _identity(self, context: Any) -> Identity | None:
        """Return who the certificate says is calling; gRPC has verified that it comes from the authority."""
        if not self._secure:
            return None
        proven = context.auth_context()
        names, pem = proven.get("x509_subject_alternative_name", []), proven.get("x509_pem_cert", [b""])[0]
        identity = certificates.identity_of(names, pem)
        if identity is None:
            self._hub.figures.refused["no_identity"] += 1
            raise Cut("no_identity", "PERMISSION_DENIED", "the certificate names no client or follower of cyber0")
        return identity


def make_server(hub: Hub, listen: str, credentials: certificates.Credentials | None) -> tuple[Any, int]:
    """Return a gRPC server for the hub, not yet started, and its port. Without credentials: loopback only."""
    largest = max(SMALLEST_LIMIT, 2 * payload_bytes(hub.federator.scalars, hub.federator.codec))
    options = [*LEAN, ("grpc.max_receive_message_length", largest), ("grpc.max_concurrent_streams", 8),
               ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
               ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS), ("grpc.so_reuseport", 0)]  # fmt: skip
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Service(hub, secure=credentials is not None).handlers(),))
    try:
        if credentials is None:
            refuse_unless_loopback(listen)
            port = server.add_insecure_port(listen)
        else:
            pair = [(credentials.key, credentials.certificate)]
            secured = grpc.ssl_server_credentials(pair, credentials.authority, require_client_auth=True)
            port = server.add_secure_port(listen, secured)
    except RuntimeError:  # gRPC has printed why
        raise ConfigError(
            f"--listen {listen} can't be had: another process has the port, or the host is no address of this machine"
        ) from None
    return server, port


def refuse_unless_loopback(address: str) -> None:
    """Refuse to speak plainly with anything but this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"--insecure is for this machine alone (127.0.0.1, ::1 or localhost), and {address} is not: use --certs"
        )


async def serve(ledger: Ledger, options: ServeOptions, log: EventLog, beside: Beside | None = None) -> None:
    """Run the federation until its last round, a signal, or a ledger that can't be written.

    `beside` runs along with it, given the hub and its port; if it ends, so does this, and what it raises is raised.
    """
    config = _own_config(ledger, options.out)
    federator = make_federator(ledger, options.out / REPORTS if config.serve.keep_reports else None, config)
    hub = Hub(federator, rounds=config.rounds, deadline_s=config.serve.deadline_s,
              digest_every=config.serve.digest_every, clock=time.monotonic, log=log,
              on_evaluation=lambda found: _keep(lambda: account.evaluated(found), log))  # fmt: skip
    account = ServerStats(hub, options.out)
    for warning in federator.warnings:
        log("warning", text=warning)
    credentials = None if options.certs is None else certificates.load(options.certs, certificates.SERVER)
    _read_revocations(hub, options.out / REVOKED, log)
    server, port = make_server(hub, options.listen, credentials)
    stop = asyncio.Event()
    on_stop_signals(stop.set)
    with contextlib.ExitStack() as pages:
        if options.watch_port is not None:
            log("watching", page=_start_page(options.watch_port, account, pages))
        gc.freeze()  # what is there by now stays: collections need not look at it
        if options.metrics_port is not None:
            log("watching", metrics=await _start_metrics(options.metrics_port, hub, pages))
        await server.start()
        hub.start()
        log("listening", port=port, run=hub.run.hex()[:16], round=len(ledger), rounds=config.rounds,
            clients=federator.clients, required=federator.required, secure=credentials is not None)  # fmt: skip
        chores = asyncio.ensure_future(_do_chores(hub, account, options.out / REVOKED, log))
        companion = None if beside is None else asyncio.ensure_future(beside(hub, port))
        if companion is not None:
            companion.add_done_callback(lambda _: stop.set())
        try:
            await _until_done(hub, stop, stay=options.stay)
        finally:
            chores.cancel()
            if companion is not None:
                companion.cancel()
            hub.close()
            await server.stop(GRACE_SECONDS)
            _keep(account.finish, log)
            ledger.close()
        # In a thread: it waits for the pages that are being looked at, and they ask this loop.
        await asyncio.to_thread(pages.close)
    f = hub.figures
    log("stopped", round=len(ledger), chain=ledger.chain.hex()[:16], decided=f.decided, abandoned=f.abandoned,
        refused=dict(f.refused), **{f"{kind}_bytes": [f.total(f"{kind}_in"), f.total(f"{kind}_out")]
                                    for kind in ("payload", "message", "wire")})  # fmt: skip
    for line in account.words():
        print(line)
    if hub.failure is not None:
        raise hub.failure
    if companion is not None and companion.done() and not companion.cancelled():
        companion.result()


async def _start_metrics(port: int, hub: Hub, stack: contextlib.ExitStack) -> str:
    """Serve the hub's figures on loopback until the stack ends; return where."""
    from cyber0.serve.metrics import MetricsServer

    metrics = MetricsServer(hub)
    stack.callback(metrics.stop)
    return f"http://127.0.0.1:{await metrics.start(port)}/metrics"


def _start_page(port: int, account: ServerStats, stack: contextlib.ExitStack) -> str:
    """Show the run live on loopback until the stack ends; return where."""
    from cyber0.report.watch import LiveServer

    page = stack.enter_context(LiveServer(port=port))
    page.start(account.probe)
    return page.address


def _keep(write: Callable[[], None], log: EventLog) -> None:
    """Write a file that only people read: that it can't be written is no reason to stop a federation."""
    try:
        write()
    except (OSError, DataError) as error:
        log("warning", text=f"figures can't be kept: {error}")


async def _until_done(hub: Hub, stop: asyncio.Event, *, stay: bool) -> None:
    finished = asyncio.ensure_future(hub.finished.wait())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([finished, stopped], return_when=asyncio.FIRST_COMPLETED)
        if hub.failure is not None or stop.is_set():
            return
        if stay:
            await stopped
            return
        # Everybody who is connected gets the last decision; others can have it by --resume --stay.
        async with asyncio.timeout(hub.policy.deadline_s):
            while hub.sessions and not stop.is_set():
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    finally:
        finished.cancel()
        stopped.cancel()


def _read_revocations(hub: Hub, path: Path, log: EventLog) -> None:
    with contextlib.suppress(FileNotFoundError):
        revoked = read_revoked(path.read_text(errors="replace"))
        news = revoked - hub.revoked
        hub.revoke(revoked)
        for entry in sorted(unknown_revocations(news, hub.federator.clients)):
            log("warning", text=f"{path}: {entry!r} revokes nobody; it is neither a client's number nor the SHA-256 "
                "fingerprint of a certificate (64 hexadecimal digits)")  # fmt: skip


def _state_of(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file does; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


async def _do_chores(hub: Hub, account: ServerStats, revoked: Path, log: EventLog) -> None:
    """Read the list of the revoked anew whenever it changes, keep the figures, give back what streams have used."""
    seen, saved, trimmed = None, -math.inf, time.monotonic()  # saved at once: served.json says whose folder this is
    while True:
        if (state := _state_of(revoked)) != seen:
            seen = state
            _read_revocations(hub, revoked, log)
        hub.count_wire()
        if time.monotonic() - saved > _SAVE_SECONDS:
            saved = time.monotonic()
            _keep(account.save, log)
        if time.monotonic() - trimmed > _TRIM_SECONDS:
            trimmed = time.monotonic()
            return_freed_memory()
        await asyncio.sleep(_POLL_SECONDS)
