"""`cyber0 serve`: prepares a run's folder, and runs the hub over it. Holds no weights and never loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.config import doors
from cyber0.config.files import load, to_toml
from cyber0.config.overrides import overridden
from cyber0.config.paths import agreed
from cyber0.config.registry import RULES, SCHEDULES
from cyber0.config.schedules import AUTO
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.federation import build
from cyber0.federation import user_code as own
from cyber0.ledger import MAGIC, Header, Ledger, Reports, changed_settings
from cyber0.protocol.federator import Federator
from cyber0.runs.settings import load_named
from cyber0.serve import descriptors
from cyber0.serve import tls as certificates
from cyber0.serve.addresses import count_addresses
from cyber0.serve.chores import RevocationFile, chores_of, watched
from cyber0.serve.hub import MAX_FOLLOWERS, Hub
from cyber0.serve.operations import EventLog, on_stop_signals
from cyber0.serve.policy import JITTER_SECONDS, RoundPolicy
from cyber0.serve.stats import ServerStats
from cyber0.serve.transport import make_server
from cyber0.storage import CONFIG, LEDGER, REPORTS, SERVED, SUMMARY, write_text

if TYPE_CHECKING:
    from cyber0.serve.metrics import MetricsServer

HEADER, REVOKED = "header.bin", "revoked.txt"
GRACE_SECONDS = 5.0

Beside = Callable[[Hub, int], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class ServeOptions:
    """The options of `cyber0 serve`."""

    listen: str
    out: Path
    certs: Path | None
    """None: plaintext, on loopback only."""
    stay: bool = False
    metrics_port: int | None = None
    watch_port: int | None = None
    """Where the live page is, on loopback; 0: a free one, None: nowhere."""


def prepare(source: Path, out: Path, overrides: list[str], *, resume: bool) -> Ledger:
    """Return the ledger of the run in `out`: a new one from a config or a header, or the existing one when resuming."""
    rounds = [override for override in overrides if override.partition("=")[0].strip() == "rounds"]
    config, header = _settings(source, overrides, rounds if resume else [])
    if header is None and not (out / LEDGER).exists():
        own.refuse_of_header(config, source, overridden(overrides))
    return open_ledger(config, header, out, resume=resume, source=str(source), exactly=bool(rounds))


def open_ledger(
    config: Config, header: Header | None, out: Path, *, resume: bool, source: str, exactly: bool = False
) -> Ledger:
    """Return the ledger of the run in `out`; `source` is where its settings come from, for errors.

    A run that is resumed keeps the number of rounds that it was lengthened to, unless it is to have `exactly` those of
    the config.
    """
    build.resolve(config, served=True)
    if not (out / LEDGER).exists():
        return _create(config, header, out)
    if not resume:
        raise ConfigError(f"{out} already holds a ledger; continue it by --resume, or choose another --out")
    return _resume(config, header, out, source, exactly=exactly)


def _create(config: Config, given: Header | None, out: Path) -> Ledger:
    if config.method.lr == AUTO:
        config = build.with_lr(config, build.lr_without_data(config))
    header = given or _made_header(config)  # first: nothing is written before everything that can be refused
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be created: {error.strerror}") from None
    write_text(out / SERVED, "{}\n")  # before the config: from now on nobody takes what it names for the user's own
    write_text(out / CONFIG, _written(config, given, out))
    if given is None:
        own.remember(config, out)
    return Ledger.create(out / LEDGER, header, durability=config.serve.durability)  # type: ignore[arg-type]


def _resume(config: Config, header: Header | None, out: Path, source: str, *, exactly: bool) -> Ledger:
    path = out / LEDGER
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
        if config.method.lr == AUTO:
            config = build.with_lr(config, ledger.header.lr)
        if changed := changed_settings(agreed(config), ledger.header.config):
            raise LedgerError(
                f"{path} was created with other settings than {source}, which can't change within a run: "
                f"{', '.join(changed)}"
            )
        planned = max(ledger.rounds, load(out / CONFIG).rounds if (out / CONFIG).exists() else 0)
        if not exactly:
            config = replace(config, rounds=max(config.rounds, planned))
        if config.rounds < len(ledger):
            raise ConfigError(f"rounds = {config.rounds}, and the ledger {path} has {len(ledger)} already: raise it")
        if config.rounds == len(ledger) < planned:
            raise ConfigError(
                f"rounds = {config.rounds} would end the run without a record that says so, and clients that were "
                f"promised {planned} rounds would take it for misconduct: set rounds to at least {len(ledger) + 1}"
            )
        if header is None:
            own.warn_if_changed(config, out)
        if len(ledger) < config.rounds:
            (out / SUMMARY).unlink(missing_ok=True)  # it says that the run is complete
        write_text(out / CONFIG, _written(config, header, out))  # files may have moved, rounds may be more
        undo.pop_all()
    return ledger


def _written(config: Config, header: Header | None, out: Path) -> str:
    """Return config.toml; paths that only a header names are not resolved."""
    return to_toml(config, out) if header is None else to_toml(own.with_remembered_paths(config, out))


def _settings(source: Path, overrides: list[str], allowed: list[str]) -> tuple[Config, Header | None]:
    """Return the config, and the header if `source` is one of `cyber0 init`, for which some overrides are allowed."""
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
            raise ConfigError(f"cyber0 init can't create the header: {done.stderr.strip().removeprefix('error: ')}")
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


def make_policy(federator: Federator, config: Config, log: EventLog, jitter_s: float = JITTER_SECONDS) -> RoundPolicy:
    """Return how a run's rounds run, by its settings."""
    chosen = config.serve
    return RoundPolicy(federator, rounds=config.rounds, deadline_s=chosen.deadline_s, digest_every=chosen.digest_every,
                       jitter_s=jitter_s, log=log)  # fmt: skip


def _own_config(ledger: Ledger, out: Path) -> Config:
    """Return the settings of a run, with the paths of the federator's own rule and schedule if there are any."""
    mine = load(out / CONFIG)
    if changed := changed_settings(agreed(mine), ledger.header.config):
        raise LedgerError(
            f"{out / CONFIG} has other settings than {out / LEDGER}, which can't change within a run: "
            f"{', '.join(changed)}"
        )
    return mine


async def serve(ledger: Ledger, options: ServeOptions, log: EventLog, beside: Beside | None = None) -> None:
    """Run the federation until its last round, a signal, a ledger that can't be written, or the end of a task.

    `beside` is a task that runs concurrently, given the hub and its port. The exception that ends a task is logged, and
    raised in the end.
    """
    config = _own_config(ledger, options.out)
    federator = make_federator(ledger, options.out / REPORTS if build.stores_reports(config) else None, config)
    hub = Hub(
        make_policy(federator, config, log),
        clock=time.monotonic,
        on_evaluation=lambda evaluation: _write_or_warn(lambda: stats.add_evaluation(evaluation), log),
    )
    stats = ServerStats(hub, options.out, time.monotonic)
    for warning in federator.warnings:
        log("warning", text=warning)
    credentials = None if options.certs is None else certificates.load(options.certs, certificates.SERVER)
    revocations = RevocationFile(options.out / REVOKED, hub, log)
    revocations.start()
    server, port = make_server(hub, options.listen, credentials, _connections(federator.clients, options.listen, log))
    stop = asyncio.Event()
    on_stop_signals(stop.set)
    with contextlib.ExitStack() as pages:
        if options.watch_port is not None:
            log("watching", page=_start_page(options.watch_port, stats, pages))
        gc.freeze()  # what is there by now stays: collections need not examine it
        metrics = await _start_metrics(options.metrics_port, hub, log)
        await server.start()
        hub.start()
        log("listening", port=port, run=hub.run.hex()[:16], round=len(ledger), rounds=config.rounds,
            clients=federator.clients, required=federator.required, secure=credentials is not None)  # fmt: skip
        chores = chores_of(hub, stats, revocations, credentials, log, time.monotonic, time.time)
        tasks = [watched("chores", chores.run(), log, stop.set)]
        if beside is not None:
            tasks.append(watched("companion", beside(hub, port), log, stop.set))
        try:
            await _until_done(hub, stop, stay=options.stay)
        finally:
            for task in tasks:
                task.cancel()
            hub.close()
            await server.stop(GRACE_SECONDS)
            if metrics is not None:
                metrics.stop()
            _write_or_warn(stats.finish, log)
            ledger.close()
        # In a thread: it waits for requests that are being answered, and their answers come from this loop.
        await asyncio.to_thread(pages.close)
    f = hub.figures
    log("stopped", round=len(ledger), chain=ledger.chain.hex()[:16], decided=f.decided, abandoned=f.abandoned,
        refused=dict(f.refused), **{f"{kind}_bytes": [f.total(f"{kind}_in"), f.total(f"{kind}_out")]
                                    for kind in ("payload", "message", "wire")})  # fmt: skip
    for line in stats.summary_lines():
        print(line)
    if hub.failure is not None:
        raise hub.failure
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


def _connections(clients: int, listen: str, log: EventLog) -> int:
    """Raise the limit of open files, warn if it is too low for everybody, and return how many connections to accept."""
    limit, participants = descriptors.raise_limit(), clients + MAX_FOLLOWERS
    if warning := descriptors.shortage(limit, participants):
        log("warning", text=warning)
    return descriptors.max_connections(limit, participants, count_addresses(listen))


async def _start_metrics(port: int | None, hub: Hub, log: EventLog) -> MetricsServer | None:
    """Serve the hub's figures on a loopback port, if one is given."""
    if port is None:
        return None
    from cyber0.serve.metrics import MetricsServer

    metrics = MetricsServer(hub)
    log("watching", metrics=f"http://127.0.0.1:{await metrics.start(port)}/metrics")
    return metrics


def _start_page(port: int, stats: ServerStats, stack: contextlib.ExitStack) -> str:
    """Show the run live on loopback until the stack ends; return where."""
    from cyber0.report.watch import LiveServer

    page = stack.enter_context(LiveServer(port=port))
    page.start(stats.live_view)
    return page.address


def _write_or_warn(write: Callable[[], None], log: EventLog) -> None:
    """Write a file that only people read: if that fails, it is no reason to stop a federation."""
    try:
        write()
    except (OSError, DataError) as error:
        log("warning", text=f"figures can't be written: {error}")


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
        # Everybody who is connected gets the last decision; others can get it by --resume --stay.
        async with asyncio.timeout(hub.policy.deadline_s):
            while hub.sessions and not stop.is_set():
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    finally:
        finished.cancel()
        stopped.cancel()
