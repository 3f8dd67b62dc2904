"""The command line of a deployment: certs, serve, join, follow. Heavy packages are imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0.cli import completion, options
from cyber0.cli.options import check_folder
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError, ExitCode
from cyber0.serve import addresses
from cyber0.serve.addresses import LAST_PORT

if TYPE_CHECKING:
    from cyber0.estimate.evaluator import Evaluator
    from cyber0.model.vector import Parameters
    from cyber0.protocol.client import Client
    from cyber0.serve.join import JoinOptions

AddressArgument = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the federator listens.")]
CertsOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with ca.pem and your own .pem and .key.")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Use no TLS and no identities; on this machine only.")]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]
QuietLogOption = Annotated[bool, typer.Option("--quiet", help="Log nothing.")]
DataOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with your own samples.")]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="DIR|FILE|NAME",
        help="Your own copy of the run's language model, if it is elsewhere.",
    ),
]
OwnTaskOption = Annotated[
    str,
    typer.Option(
        "--task", metavar="FILE.py:NAME", help="Your copy of the run's task, if it is not built in; it is imported."
    ),
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Your copy of the run's learning-rate schedule, if it is not built in; it is imported.",
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Weights that the run starts from (safetensors), if not the task's own."),
]
ParticipantDeviceOption = Annotated[str, options.device_option("Where losses are computed.")]
RunIdOption = Annotated[
    str, typer.Option("--run", metavar="ID", help="Take part only in this run; the first digits of its ID are enough.")
]
MaxScalarsOption = Annotated[
    int, typer.Option(metavar="N", help="Refuse a run with more scalars a round (local_epochs * k).", min=1)
]
PatienceOption = Annotated[
    float, typer.Option(metavar="SECONDS", help="Give up after this long without the federator.")
]


@with_json
def certs(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are written; existing files stay.")],
    clients: Annotated[int, typer.Option(metavar="N", help="Certificates for clients 0 to N - 1.", min=0)] = 0,
    client: Annotated[
        list[int] | None, typer.Option(metavar="NUMBER", help="For this client; may be repeated.", min=0)
    ] = None,
    followers: Annotated[int, typer.Option(metavar="N", help="Certificates for N followers.", min=0)] = 0,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or address of the federator, without a port; may be repeated. (default: localhost, 127.0.0.1)",
        ),
    ] = None,
    days: Annotated[int, typer.Option(metavar="N", help="How long they are valid.", min=1)] = 365,
) -> Reply:
    """Make a private authority, and certificates for the federator, its clients and followers."""
    _need("cryptography")
    from cyber0.serve import tls as certificates

    ids = sorted({*range(clients), *(client or [])})
    hosts = host or ["localhost", "127.0.0.1"]
    if host:
        certificates.check_hosts(out, host)
    made = certificates.make(out, clients=ids, followers=range(followers), hosts=hosts, days=days)
    found = [{"path": path, "sha256": certificates.fingerprint(path.read_bytes())} for path in made]

    def show() -> None:
        for one in found:
            print(f"{one['path']}  sha256 {one['sha256']}")
        noun = "certificate" if len(made) == 1 else "certificates"
        print(f"{len(made)} {noun} made in {out}; keep ca.key away from every other machine")

    return Reply(found, show)


def serve(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="Settings (TOML), a task of your own (FILE.py:NAME), or a header from `cyber0 init`."
        ),
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder: ledger.bin, revoked.txt.")],
    certs: CertsOption = None,
    insecure: InsecureOption = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the ledger in --out, if there is one.")] = False,
    stay: Annotated[bool, typer.Option("--stay", help="After the last round, serve the ledger until stopped.")] = False,
    metrics: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Answer /metrics and /health on this loopback port.", min=0, max=LAST_PORT),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run live on this machine, and log its address.")
    ] = False,
    watch_port: Annotated[
        int, typer.Option(metavar="PORT", help="For --watch; 0: a free one.", min=0, max=LAST_PORT)
    ] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", autocompletion=completion.settings, help="Replace one setting."
        ),
    ] = None,
    log_json: LogJsonOption = False,
    quiet: QuietLogOption = False,
) -> None:
    """Run the federator of a federation, which clients enter by `cyber0 join`. Needs no weights, data or GPU."""
    import asyncio
    import time

    check_folder("--out", out)
    _check_security(certs, insecure)
    addresses.check_address(listen, first_port=0)
    _need("grpc")
    if certs is not None:
        _need("cryptography")
    if metrics is not None:
        _need("prometheus_client")
    from cyber0.kernels.memory import share_one_arena

    share_one_arena()
    from cyber0.serve import server
    from cyber0.serve import tls as certificates
    from cyber0.serve.identity import expiry_warning
    from cyber0.serve.operations import make_log

    if certs is None:
        addresses.refuse_unless_loopback(listen)
    else:
        expiry_warning(certificates.load(certs, certificates.SERVER), time.time())  # refused before anything is written
    for address in (listen, f"127.0.0.1:{metrics or 0}", f"127.0.0.1:{watch_port if watch else 0}"):
        addresses.check_free(address)
    ledger = server.prepare(config, out, set_ or [], resume=resume)
    options = server.ServeOptions(listen, out, certs, stay, metrics, watch_port if watch else None)
    asyncio.run(server.serve(ledger, options, make_log(as_json=log_json, quiet=quiet)))
    _judge(out)


def _judge(folder: Path) -> None:
    """Exit as `cyber0 run` does when a run that ended certainly learned nothing."""
    import sys

    from cyber0.report import outcome
    from cyber0.runs.folder import load_summary

    try:
        idle = outcome.all_abandoned(load_summary(folder))
    except FileNotFoundError:  # stopped before its last round
        return
    if idle:
        print(f"error: nothing was learned: {idle}; see serve.deadline_s and serve.quorum, and which clients took part",
              file=sys.stderr)  # fmt: skip
        raise typer.Exit(ExitCode.NOTHING_LEARNED)


def join(
    address: AddressArgument,
    certs: CertsOption = None,
    data: DataOption = None,
    model: ModelOption = "",
    task: OwnTaskOption = "",
    schedule: ScheduleOption = "",
    weights: WeightsOption = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Where this client stores its state.")] = None,
    client: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Which client to be, if --certs has several.", min=0)
    ] = None,
    insecure: InsecureOption = False,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start from weights that `cyber0 follow` saved.")
    ] = None,
    run: RunIdOption = "",
    device: ParticipantDeviceOption = "cpu",
    patience: PatienceOption = 300.0,
    stalled_rounds: Annotated[
        int,
        typer.Option(metavar="N", help="Stop after answering this many rounds while the weights stand still.", min=1),
    ] = 4,
    max_scalars: MaxScalarsOption = 65_536,
    lie: Annotated[str, typer.Option(metavar="ATTACK", help="For tests: be Byzantine.", hidden=True)] = "",
    log_json: LogJsonOption = False,
    quiet: QuietLogOption = False,
) -> None:
    """Take part in a run as a client: measure on your own data, send k scalars per round."""
    if state is not None:
        check_folder("--state", state)
    options = _options(
        address, certs, "client", client, insecure, data=data, model=model, task=task, weights=weights, state=state,
        snapshot=snapshot, device=device, attack=lie, patience_s=patience, run=run, max_scalars=max_scalars,
        schedule=schedule, stalled_rounds=stalled_rounds,
    )  # fmt: skip
    from cyber0.serve.join import take_part
    from cyber0.serve.operations import make_log

    participant = take_part(options, make_log(as_json=log_json, quiet=quiet))
    if participant is not None:
        at = participant.client
        print(f"client {options.number}: {_reached(at)}")


def follow(
    address: AddressArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where metrics.csv and snapshots are written.")],
    certs: CertsOption = None,
    data: DataOption = None,
    model: ModelOption = "",
    task: OwnTaskOption = "",
    schedule: ScheduleOption = "",
    weights: WeightsOption = None,
    follower: Annotated[int | None, typer.Option(metavar="NUMBER", help="Which follower to be.", min=0)] = None,
    insecure: InsecureOption = False,
    evaluate_every: Annotated[int, typer.Option(metavar="N", help="Rounds between evaluations.", min=1)] = 100,
    snapshot_every: Annotated[int, typer.Option(metavar="N", help="Rounds between snapshots; 0: none.", min=0)] = 1000,
    run: RunIdOption = "",
    device: ParticipantDeviceOption = "cpu",
    patience: PatienceOption = 300.0,
    max_scalars: MaxScalarsOption = 65_536,
    log_json: LogJsonOption = False,
    quiet: QuietLogOption = False,
) -> None:
    """Follow a run without a vote: replay its ledger, evaluate the model, save snapshots of the weights."""
    check_folder("--out", out)
    options = _options(
        address, certs, "follower", follower, insecure, follows=True, data=data, model=model, task=task,
        weights=weights, state=out / "state", device=device, patience_s=patience, run=run, max_scalars=max_scalars,
        schedule=schedule,
    )  # fmt: skip
    from cyber0.serve.follow import follow_hook
    from cyber0.serve.join import take_part
    from cyber0.serve.operations import make_log

    log = make_log(as_json=log_json, quiet=quiet)
    participant = take_part(options, log, *follow_hook(out, evaluate_every, snapshot_every, log))
    if participant is not None:
        at = participant.client
        print(_reached(at))


def _reached(client: Client[Parameters, Evaluator]) -> str:
    """Return where a participant is: by the hash of the ledger and the digest of the weights it can be compared."""
    reached = f"{client.next_round} rounds, chain {client.chain.hex()}, digest {client.parameters.digest()}"
    return f"{reached}{_clamped(client)}"


def _clamped(client: Client[Parameters, Evaluator]) -> str:
    """Return how many weights are at the edge of the finite range, if steps were too long."""
    count = client.parameters.saturated()
    return f"; {count:,} weights were clamped to the finite range: method.lr is too large" if count else ""


def _options(
    address: str, certs: Path | None, role: str, number: int | None, insecure: bool, **more: Any
) -> JoinOptions:
    import os

    _check_security(certs, insecure)
    addresses.check_address(address)
    _need("grpc")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported: the log says it in plain words
    if certs is not None:
        _need("cryptography")
    from cyber0.serve import tls as certificates

    credentials = None
    if certs is None:
        addresses.refuse_unless_loopback(address)
        if number is None and role == "client":
            raise ConfigError(
                "without certificates the federator cannot know which client this is: add --client NUMBER"
            )
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


def _check_security(certs: Path | None, insecure: bool) -> None:
    if insecure == (certs is not None):
        raise ConfigError("choose how to connect: --certs DIR (`cyber0 certs` makes one), or --insecure on one machine")


def _need(package: str) -> None:
    """Refuse in one line if a package of the extra `deploy` is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(f"this needs the package {package}: pip install 'cyber0[deploy]'")
