"""The command line of a deployment: certs, serve, join, follow. Heavy packages are imported inside the commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0.cli import completion

if TYPE_CHECKING:
    from cyber0.estimate.evaluator import Evaluator
    from cyber0.model.vector import Parameters
    from cyber0.protocol.client import Client
    from cyber0.serve.join import JoinOptions
    from cyber0.serve.operations import EventLog
    from cyber0.serve.participant import Participant
    from cyber0.tasks import EngineTask

Address = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the federator listens.")]
Certs = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with ca.pem and one's own .pem and .key.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS and no identities; on this machine only.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log nothing.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with one's own samples.")]
Model = Annotated[
    str,
    typer.Option(
        metavar="DIR|FILE|NAME", help="One's own copy of the run's language model, if not where the run has it."
    ),
]
OwnTask = Annotated[
    str,
    typer.Option(
        "--task", metavar="FILE.py:NAME", help="Your copy of the run's task, if it is none of cyber0's: it is imported."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Weights that the run starts from (safetensors), if not the task's own."),
]
Device = Annotated[
    str, typer.Option(metavar="cpu|cuda", autocompletion=completion.devices, help="Where losses are computed.")
]
RunId = Annotated[
    str, typer.Option("--run", metavar="ID", help="Take part in this run alone; the first digits of its ID are enough.")
]
Patience = Annotated[float, typer.Option(metavar="SECONDS", help="Give up after so long without the federator.")]

_LAST_PORT = 65_535


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (certs, serve, join, follow):
        app.command()(command)


def certs(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where they go; what is there is kept.")],
    clients: Annotated[int, typer.Option(metavar="N", help="Certificates for clients 0 to N - 1.", min=0)] = 0,
    client: Annotated[
        list[int] | None, typer.Option(metavar="NUMBER", help="For this client; may be repeated.", min=0)
    ] = None,
    followers: Annotated[int, typer.Option(metavar="N", help="Certificates for N followers.", min=0)] = 0,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name or address of the federator; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(metavar="N", help="How long they are valid.", min=1)] = 365,
) -> None:
    """Make a private authority, and certificates for the federator, its clients and followers."""
    _need("cryptography")
    from cyber0.serve import tls as certificates

    numbers = sorted({*range(clients), *(client or [])})
    hosts = host or ["localhost", "127.0.0.1"]
    if host:
        certificates.check_hosts(out, host)
    made = certificates.make(out, clients=numbers, followers=range(followers), hosts=hosts, days=days)
    for path in made:
        print(f"{path}  sha256 {certificates.fingerprint(path.read_bytes())}")
    noun = "certificate" if len(made) == 1 else "certificates"
    print(f"{len(made)} {noun} made in {out}; keep ca.key away from every other machine")


def serve(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="Settings (TOML), a task of your own (FILE.py:NAME), or a header of `cyber0 init`."
        ),
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder: ledger.bin, revoked.txt.")],
    certs: Certs = None,
    insecure: Insecure = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the ledger in --out, if there is one.")] = False,
    stay: Annotated[bool, typer.Option("--stay", help="After the last round, serve the ledger until stopped.")] = False,
    metrics: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Answer /metrics and /health on this loopback port.", min=0, max=_LAST_PORT),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run live on this machine, and log its address.")
    ] = False,
    watch_port: Annotated[
        int, typer.Option(metavar="PORT", help="For --watch; 0: a free one.", min=0, max=_LAST_PORT)
    ] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", autocompletion=completion.settings, help="Replace one setting."
        ),
    ] = None,
    log_json: LogJson = False,
    quiet: Quiet = False,
) -> None:
    """Be the federator of a run: clients come by `cyber0 join`. Needs no weights, data or GPU."""
    import asyncio

    _check_security(certs, insecure)
    _check_address(listen, first_port=0)
    _need("grpc")
    from cyber0.kernels.memory import share_one_arena

    share_one_arena()
    from cyber0.serve import server
    from cyber0.serve import tls as certificates
    from cyber0.serve.operations import make_log

    if certs is None:
        server.refuse_unless_loopback(listen)
    else:
        certificates.load(certs, certificates.SERVER)  # refused before anything is written
    for address in (listen, f"127.0.0.1:{metrics or 0}", f"127.0.0.1:{watch_port if watch else 0}"):
        _check_free(address)
    ledger = server.prepare(config, out, set_ or [], resume=resume)
    options = server.ServeOptions(listen, out, certs, stay, metrics, watch_port if watch else None)
    asyncio.run(server.serve(ledger, options, make_log(as_json=log_json, quiet=quiet)))
    _judge(out)


def _judge(folder: Path) -> None:
    """Exit as `cyber0 run` does when a run that came to its end certainly learned nothing."""
    import sys

    from cyber0.report import outcome
    from cyber0.runs.folder import load_summary

    try:
        idle = outcome.all_abandoned(load_summary(folder))
    except FileNotFoundError:  # stopped before its last round
        return
    if idle:
        print(f"error: nothing was learned: {idle}; see serve.deadline_s and serve.quorum, and which clients came",
              file=sys.stderr)  # fmt: skip
        raise typer.Exit(outcome.NOTHING_LEARNED)


def join(
    address: Address,
    certs: Certs = None,
    data: Data = None,
    model: Model = "",
    task: OwnTask = "",
    weights: Weights = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="What this client keeps between starts.")] = None,
    client: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Which client to be, if --certs has many.", min=0)
    ] = None,
    insecure: Insecure = False,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start from weights that `cyber0 follow` saved.")
    ] = None,
    run: RunId = "",
    device: Device = "cpu",
    patience: Patience = 300.0,
    lie: Annotated[str, typer.Option(metavar="ATTACK", help="For tests: be Byzantine.", hidden=True)] = "",
    log_json: LogJson = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a run as a client: measure on one's own data, send k numbers a round."""
    if state is not None:
        _check_folder("--state", state)
    options = _options(
        address, certs, "client", client, insecure, data=data, model=model, task=task, weights=weights, state=state,
        snapshot=snapshot, device=device, attack=lie, patience_s=patience, run=run,
    )  # fmt: skip
    from cyber0.serve.operations import make_log

    participant = _take_part(options, make_log(as_json=log_json, quiet=quiet))
    if participant is not None:
        at = participant.client
        print(f"client {options.number}: {at.next_round} rounds, digest {at.parameters.digest()}{_clamped(at)}")


def follow(
    address: Address,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where metrics.csv and snapshots go.")],
    certs: Certs = None,
    data: Data = None,
    model: Model = "",
    task: OwnTask = "",
    weights: Weights = None,
    follower: Annotated[int | None, typer.Option(metavar="NUMBER", help="Which follower to be.", min=0)] = None,
    insecure: Insecure = False,
    evaluate_every: Annotated[int, typer.Option(metavar="N", help="Rounds between evaluations.", min=1)] = 100,
    snapshot_every: Annotated[int, typer.Option(metavar="N", help="Rounds between snapshots; 0: none.", min=0)] = 1000,
    run: RunId = "",
    device: Device = "cpu",
    patience: Patience = 300.0,
    log_json: LogJson = False,
    quiet: Quiet = False,
) -> None:
    """Follow a run without a vote: replay its ledger, evaluate the model, save snapshots of the weights."""
    import math

    _check_folder("--out", out)
    options = _options(
        address, certs, "follower", follower, insecure, follows=True, data=data, model=model, task=task,
        weights=weights, state=out / "state", device=device, patience_s=patience, run=run,
    )  # fmt: skip
    from cyber0.serve.operations import make_log

    log = make_log(as_json=log_json, quiet=quiet)

    def watch(participant: Participant, task: EngineTask) -> Any:
        from cyber0.estimate.torch_threads import evaluating
        from cyber0.protocol.messages import EvaluationMessage, encode_evaluation
        from cyber0.serve.state import save_snapshot
        from cyber0.storage import METRICS

        def probe(round: int) -> None:
            if round % evaluate_every == 0 or round == participant.rounds:
                with evaluating(participant.client.parameters):
                    loss, accuracy, *more = task.evaluate(participant.client.parameters.model)
                metrics = more[0] if more else {}
                shown = metrics if math.isnan(accuracy) else {"accuracy": accuracy, **metrics}
                log("evaluated", round=round, **shown, loss=loss)
                _append_row(out / METRICS, round, accuracy, loss, metrics)
                participant.outbox.append(encode_evaluation(EvaluationMessage(round, accuracy, loss, metrics)))
            if snapshot_every and round % snapshot_every == 0:
                path = out / f"snapshot-{round}.safetensors"
                save_snapshot(path, participant.client.parameters, participant.run, round, participant.client.chain)

        return probe

    every = math.gcd(evaluate_every, snapshot_every) if snapshot_every else evaluate_every
    participant = _take_part(options, log, watch, every)
    if participant is not None:
        at = participant.client
        print(f"{at.next_round} rounds, digest {at.parameters.digest()}{_clamped(at)}")


def _clamped(client: Client[Parameters, Evaluator]) -> str:
    """Say how many weights a run whose steps were too long has left at the edge of the finite range."""
    count = client.parameters.saturated()
    return f"; {count:,} weights were clamped to the finite range: method.lr is too large" if count else ""


def _append_row(path: Path, round: int, accuracy: float, loss: float, metrics: Mapping[str, float]) -> None:
    """Add a round's row, unless it is there: who was killed replays rounds that it has evaluated before."""
    from cyber0.runs.folder import MetricsFile
    from cyber0.tasks.metrics import MetricsRow

    rows = path.read_text().splitlines() if path.exists() else []
    if not any(row.startswith(f"{round},") for row in rows):
        row = MetricsRow(round, accuracy, loss, 0, 0, None, 0.0, metrics=metrics)
        MetricsFile(path, ("round", "accuracy", "loss")).append(row)


def _take_part(options: JoinOptions, log: EventLog, watch: Any = None, watch_every: int = 1) -> Participant | None:
    import asyncio
    import warnings

    from cyber0.ledger import Header
    from cyber0.serve.join import FederatorConnection, check_run, make_participant

    def warn(message: Warning | str, *_: object, **__: object) -> None:
        log("warning", text=str(message))

    def build(header: Header) -> Participant:
        check_run(header, options.run)
        participant = make_participant(header, options, watch, watch_every)
        at = participant.client
        learns = {} if options.follows else {"samples": int(at.samples.sizes.sum())}
        log("joining", client=options.number, run=participant.run.hex()[:16], round=at.next_round, **learns)
        return participant

    async def go() -> Participant | None:
        return await FederatorConnection(options, log).take_part(build)

    with warnings.catch_warnings():
        warnings.simplefilter("default", RuntimeWarning)
        warnings.showwarning = warn  # a line of the log like any other
        return asyncio.run(go())


def _options(
    address: str, certs: Path | None, role: str, number: int | None, insecure: bool, **more: Any
) -> JoinOptions:
    from cyber0.errors import ConfigError

    _check_security(certs, insecure)
    _check_address(address)
    _need("grpc")
    from cyber0.serve import server
    from cyber0.serve import tls as certificates

    credentials = None
    if certs is None:
        server.refuse_unless_loopback(address)
        if number is None and role == "client":
            raise ConfigError("without certificates nothing says which client this is: add --client NUMBER")
    else:
        name, number = certificates.find(certs, role, number)
        credentials = certificates.load(certs, name)
    from cyber0.directions.backends import check_device
    from cyber0.serve import join

    check_device(more.get("device", "cpu"))
    if more.get("attack"):
        from cyber0.config.schema import Config

        join.make_attack(more["attack"], Config())  # an unknown one is refused before anything is loaded
    return join.JoinOptions(address, credentials, number or 0, **more)


def _check_address(address: str, first_port: int = 1) -> None:
    """Refuse what gRPC would take for something else: it counts ports modulo 65,536."""
    from cyber0.errors import ConfigError

    host, _, port = address.rpartition(":")
    if host == "" or not (port.isascii() and port.isdecimal() and first_port <= int(port) <= _LAST_PORT):
        raise ConfigError(f"{address!r} is no HOST:PORT with a port from {first_port} to {_LAST_PORT}")


def _check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that can't be made or written to, before anything is."""
    import os

    from cyber0.errors import ConfigError

    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{option} {folder} can't be a folder: {there} is a file; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} can't be used: {there} can't be written to; choose another")


def _check_free(address: str) -> None:
    """Refuse a port that another process has; port 0 is any that is free."""
    import socket

    from cyber0.errors import ConfigError

    host, _, port = address.rpartition(":")
    if int(port) == 0:
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError as error:
        raise ConfigError(
            f"{address} can't be listened at: {error.strerror}; choose another port, or end what uses it"
        ) from None


def _check_security(certs: Path | None, insecure: bool) -> None:
    from cyber0.errors import ConfigError

    if insecure == (certs is not None):
        raise ConfigError("say how to be secure: --certs DIR (`cyber0 certs` makes one), or --insecure on one machine")


def _need(package: str) -> None:
    """Refuse in one line if the packages of the deploy extra are not there."""
    from importlib.util import find_spec

    from cyber0.errors import ConfigError

    if find_spec(package) is None:
        raise ConfigError(f"this needs the package {package}: pip install 'cyber0[deploy]'")
