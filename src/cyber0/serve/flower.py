"""A Flower app: `server_app` is the federator, `client_app` a client. `flwr run` takes the folder examples/flower.

stream    The ServerApp opens the hub of `cyber0 serve` and sends each SuperNode one message: the hub's address, the
          authority of this run, and a certificate made for this run and this node. The ClientApp joins the stream and
          takes part in all rounds within that one call. Flower starts a process per message and polls every 3 s, so
          this is the mode to prefer.
message   One Flower message per round (mailbox.py), where no port but Flower's own is open, and in Flower's simulation,
          whose nodes may have to take turns.

The settings are described in nodes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from cyber0.config.schema import Config
from cyber0.errors import ConfigError, ProtocolError
from cyber0.federation import build
from cyber0.ledger import Header, Ledger, first_chain
from cyber0.protocol.messages import VOTER
from cyber0.serve import server
from cyber0.serve import tls as certificates
from cyber0.serve.admission import read_revoked
from cyber0.serve.hub import Hub
from cyber0.serve.mailbox import Mailbox, answer_message
from cyber0.serve.nodes import NODE, NODES, AppSettings, NodeSettings, Roster, read_run_config
from cyber0.serve.operations import EventLog, make_log
from cyber0.serve.stats import write_results
from cyber0.storage import LEDGER, REPORTS

if TYPE_CHECKING:
    from cyber0.serve.join import JoinOptions
    from cyber0.serve.participant import Participant

RECORD = "cyber0"
"""The name of our record in messages and in a node's context."""
STREAM, ROUND = "stream", "letter"
"""The two kinds of messages, as actions of Flower's category "train": an invitation to a stream, a round."""

_NODES_SECONDS = 2.0  # between queries for the nodes that are online
_PULL_SECONDS = 0.2  # between queries for replies in message mode; Flower's own loop takes 3
_RESEND_SECONDS = 60.0  # after which a node that has not joined is invited again
_FAILED_SECONDS = 10.0  # the same, if it answered with an error
_JITTER_SECONDS = 5.0  # by which a reply in message mode may take longer than the one before it
_HUB_SECONDS = 30.0  # for which a node tries to reach a hub that is gone; then it is free for the next invitation
_FAREWELL_SECONDS = 60.0  # for the last replies
_LIFETIME_S = 90 * 86400.0  # of an invitation: longer than a run
_CERTIFICATE_DAYS = 90


def federate(grid: Grid, context: Context) -> None:
    """Run the federation that the run config describes, until its last round."""
    settings, config = read_run_config(context.run_config)
    log, out = make_log(), Path(settings.out).expanduser()
    if (out / LEDGER).exists() and not settings.resume:
        raise ConfigError(f"{out} already holds a ledger: continue it by flower.resume=true, or set another flower.out")
    stream = settings.mode == "stream" or (settings.mode == "auto" and not isinstance(grid, InMemoryGrid))
    if config.federation.expel and not stream:
        raise ConfigError(
            "federation.expel = true can't tell an expelled client why where rounds travel in Flower's messages; set "
            'flower.mode = "stream" or federation.expel = false'
        )
    ledger = server.open_ledger(config, None, out, resume=settings.resume, source="the run config")
    nodes = _Nodes(grid, Roster(out / NODES, config.federation.clients, log), out / server.REVOKED, log)
    try:
        if stream:
            _federate_by_stream(nodes, settings, ledger, log)
        else:
            _federate_by_messages(nodes, settings, config, ledger, log)
    finally:
        ledger.close()
    if len(ledger) < config.rounds:
        raise ProtocolError(f"stopped after {len(ledger)} of {config.rounds} rounds; continue by flower.resume=true")
    nodes.conclude()


class _Nodes:
    """The nodes as the app sees them: clients, messages to them, and their replies."""

    def __init__(self, grid: Grid, roster: Roster, revoked: Path, log: EventLog) -> None:
        self._grid, self.roster, self._revoked, self._log = grid, roster, revoked, log
        self._sent: dict[str, int] = {}  # the client that an unanswered message went to
        self._not_taken: list[int] = []
        self._here: dict[int, int] = {}  # the node of each client that is online
        self._queried_at = -_NODES_SECONDS
        self.digests: dict[int, str] = {}
        """The digest that each client has stated at the end."""

    def here(self) -> dict[int, int]:
        """Return the node id of every client that is online, as of a moment ago."""
        if time.monotonic() - self._queried_at >= _NODES_SECONDS:
            self._here = {number: node for node, number in self.roster.admit(self._grid.get_node_ids()).items()}
            for number in self._read_revoked():
                self._here.pop(number, None)
            self._queried_at = time.monotonic()
        return self._here

    def _read_revoked(self) -> list[int]:
        try:
            return [int(entry) for entry in read_revoked(self._revoked.read_text()) if entry.isdecimal()]
        except FileNotFoundError:
            return []

    def send(self, kind: str, contents: Mapping[int, dict[str, Any]], ttl: float, group: str = "") -> None:
        """Send messages, by client; those who are not online any more get none."""
        there = {number: content for number, content in contents.items() if number in self._here}
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord(content)}),
                self._here[number],
                f"train.{kind}",
                ttl=ttl,
                group_id=group,
            )
            for number, content in there.items()
        ]
        ids = list(self._grid.push_messages(messages)) if messages else []
        if len(ids) != len(messages):
            raise ProtocolError(f"the SuperLink did not accept {len(messages)} messages; Flower's log above says why")
        for name, number in zip(ids, there, strict=True):
            if name:
                self._sent[name] = number
            else:
                self._not_taken.append(number)

    def pull(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield the replies that have come: client and content, None if the node failed or is gone."""
        while self._not_taken:
            yield self._not_taken.pop(), None
        if not self._sent:
            return
        for reply in self._grid.pull_messages(list(self._sent)):
            number = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if number is None:
                continue
            if reply.has_error():
                self._log("node_failed", client=number, reason=reply.error.reason)
                yield number, None
            else:
                record = reply.content.config_records.get(RECORD)
                yield number, dict(record) if record is not None else {}

    def conclude(self) -> None:
        """Log the digests that the nodes hold, and whether they agree; `cyber0 verify` says whether they are right."""
        for number, digest in sorted(self.digests.items()):
            self._log("holds", client=number, digest=digest)
        counts = Counter(self.digests.values())
        self._log("agreed" if len(counts) <= 1 else "digests_differ", nodes=len(self.digests), digests=len(counts))


# Stream mode.


def _federate_by_stream(nodes: _Nodes, settings: AppSettings, ledger: Ledger, log: EventLog) -> None:
    # The authority lives as long as this run, in a folder that nobody else can read.
    with tempfile.TemporaryDirectory(prefix="cyber0-") as name, _signal_handlers_kept():
        certs = Path(name)
        certificates.make(certs, clients=[], hosts=[settings.host.strip("[]")], days=_CERTIFICATE_DAYS)
        inviting = _Inviting(nodes, settings, certs, log)
        options = server.ServeOptions(settings.listen, Path(settings.out).expanduser(), certs,
                                 metrics_port=settings.metrics_port or None)  # fmt: skip
        asyncio.run(server.serve(ledger, options, log, beside=inviting.run))
        inviting.await_replies()


class _Inviting:
    """Sends every node its invitation, again if it does not join, and collects the replies at the end."""

    def __init__(self, nodes: _Nodes, settings: AppSettings, certs: Path, log: EventLog) -> None:
        self._nodes, self._settings, self._certs, self._log = nodes, settings, certs, log
        self._next_try: dict[int, float] = {}
        self._invited: set[int] = set()  # those not known to have failed

    async def run(self, hub: Hub, port: int) -> None:
        """Do so until cancelled; raise when no round ends for too long."""
        reached, moved_at = len(hub.ledger), time.monotonic()
        while True:
            connected = {session.client for session in hub.sessions if session.role == VOTER}
            await asyncio.to_thread(self._invite_absent, connected, self._settings.reached_at(port))
            if len(hub.ledger) > reached:
                reached, moved_at = len(hub.ledger), time.monotonic()
            _check_patience(self._settings, moved_at, hub.connected, hub.federator.required)
            await asyncio.sleep(_NODES_SECONDS)

    def _invite_absent(self, connected: set[int], address: str) -> None:
        now = time.monotonic()
        for number in self._take_replies():
            self._next_try[number] = now + _FAILED_SECONDS
        absent = [n for n in self._nodes.here() if n not in connected and now >= self._next_try.get(n, now)]
        if absent:
            self._nodes.send(STREAM, {n: self._invitation(n, address) for n in absent}, ttl=_LIFETIME_S)
            self._next_try |= dict.fromkeys(absent, now + _RESEND_SECONDS)
            self._invited |= set(absent)

    def _take_replies(self) -> list[int]:
        """Note the digests that were stated; return the clients that replied without one."""
        failed = []
        for number, content in self._nodes.pull():
            digest = content.get("digest") if content is not None else None
            if isinstance(digest, str):
                self._nodes.digests[number] = digest[:64]
            else:
                failed.append(number)
        self._invited -= set(failed)
        return failed

    def _invitation(self, number: int, address: str) -> dict[str, Any]:
        """Return what a node needs to join; its certificate names the node, and its key is sent nowhere else."""
        node = self._nodes.here()[number]
        made = certificates.make(self._certs, clients=[number], hosts=[], days=_CERTIFICATE_DAYS,
                                 also={number: f"urn:flower:node:{node}"})  # fmt: skip
        for path in made:
            self._log("certified", node=node, client=number, sha256=certificates.fingerprint(path.read_bytes()))
        mine = certificates.load(self._certs, f"client-{number}")
        return {"address": address, "client": number, **mine._asdict()}

    def await_replies(self) -> None:
        """Wait a while for the last replies of those who take part."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while not self._invited <= self._nodes.digests.keys() and time.monotonic() < end:
            time.sleep(_PULL_SECONDS)
            self._take_replies()


# Message mode.


def _federate_by_messages(nodes: _Nodes, settings: AppSettings, config: Config, ledger: Ledger, log: EventLog) -> None:
    federator = server.make_federator(ledger, _reports(settings, config), config)
    for warning in federator.warnings:
        log("warning", text=warning)
    mailbox = Mailbox(server.make_policy(federator, config, log, _JITTER_SECONDS))
    reached = len(ledger)
    started = moved_at = time.monotonic()
    log("writing", run=first_chain(ledger.header).hex()[:16], round=reached, rounds=config.rounds,
        clients=federator.clients, required=federator.required)  # fmt: skip
    while not mailbox.finished or _awaits_digests(mailbox, nodes, moved_at):
        present = nodes.here()
        # A message that is not answered within two deadlines never will be; Flower then reports an error.
        nodes.send(ROUND, mailbox.outgoing(present, time.monotonic()), 2 * config.serve.deadline_s, str(len(ledger)))
        time.sleep(_PULL_SECONDS)
        for client, content in nodes.pull():
            mailbox.take_reply(client, content, time.monotonic())
        mailbox.tick(time.monotonic())
        if len(ledger) > reached:
            reached, moved_at = len(ledger), time.monotonic()
        if not mailbox.finished:
            _check_patience(settings, moved_at, len(present), federator.required)
    nodes.digests = mailbox.final_digests
    f = mailbox.figures
    log("stopped", round=len(ledger), chain=ledger.chain.hex()[:16], decided=f.decided, abandoned=f.abandoned,
        refused=dict(f.refused), payload_bytes=[f.total("payload_in"), f.total("payload_out")])  # fmt: skip
    if len(ledger) == config.rounds:
        write_results(Path(settings.out).expanduser(), ledger, federator, f, time.monotonic() - started)


def _awaits_digests(mailbox: Mailbox, nodes: _Nodes, ended_at: float) -> bool:
    """Return whether a client that is online has yet to receive the last decision."""
    missing = nodes.here().keys() - mailbox.final_digests.keys()
    return bool(missing) and time.monotonic() - ended_at < _FAREWELL_SECONDS


def _reports(settings: AppSettings, config: Config) -> Path | None:
    return Path(settings.out).expanduser() / REPORTS if build.stores_reports(config) else None


def _check_patience(settings: AppSettings, moved_at: float, present: int, required: int) -> None:
    if time.monotonic() - moved_at > settings.patience_s:
        raise ProtocolError(
            f"no round for {settings.patience_s:g} s (flower.patience_s): {present} nodes are there, and a decision "
            f"needs {required}; start more SuperNodes, or set federation.clients and serve.quorum to their number; "
            "continue by flower.resume=true"
        )


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore Flower's signal handlers: asyncio replaces its own by the defaults."""
    names = (signal.SIGTERM, signal.SIGINT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread: nothing was changed
            for name, handler in before.items():
                signal.signal(name, handler)


# The client.


def join_stream(message: Message, context: Context) -> Message:
    """Join the hub that the invitation names, and take part in all rounds."""
    from cyber0.serve.connection import FederatorConnection

    invitation, log = _record_of(message), make_log()
    options = replace(
        _options(context, invitation["client"]),
        address=str(invitation["address"]),
        credentials=certificates.Credentials(*(invitation[name] for name in certificates.Credentials._fields)),
        patience_s=_HUB_SECONDS,
    )

    def build(header: Header) -> Participant:
        return _participant(header, options, context)

    with _signal_handlers_kept():
        participant = asyncio.run(FederatorConnection(options, log).take_part(build))
    if participant is None or not participant.ended:
        raise ProtocolError("stopped before the last round")
    at = participant.client
    log("ended", client=options.number, rounds=at.next_round, chain=at.chain.hex(), digest=at.parameters.digest())
    return _reply(message, {"rounds": at.next_round, "digest": at.parameters.digest()})


def answer(message: Message, context: Context) -> Message:
    """Answer the message of a round; until the next, what this client knows is in its context or folder."""

    def build(header: Header, number: int) -> Participant:
        return _participant(header, _options(context, number), context)

    return _reply(message, answer_message(_record_of(message), build))


def _options(context: Context, number: int) -> JoinOptions:
    """Return how this node takes part, by its own settings."""
    from cyber0.directions.backends import check_device
    from cyber0.serve.join import JoinOptions

    node = NodeSettings.read(NODE, context.node_config)
    check_device(node.device)
    return JoinOptions(address="", credentials=None, number=number, data=Path(node.data) if node.data else None,
                   model=node.model, task=node.task,
                   weights=Path(node.weights) if node.weights else None,
                   state=Path(node.state).expanduser() if node.state else None,
                   device=node.device, run=node.run, schedule=node.schedule,
                   stalled_rounds=node.stalled_rounds, max_scalars=node.max_scalars)  # fmt: skip


def _participant(header: Header, options: JoinOptions, context: Context) -> Participant:
    """Build the participant over its stored state: in a folder of the run's own, or in the node's context."""
    from cyber0.kernels.memory import keep_freed_memory
    from cyber0.serve.join import check_run, make_participant
    from cyber0.serve.state import RecordState

    keep_freed_memory()
    check_run(header, options.run)
    run, state = first_chain(header), None
    if options.state is not None:
        options = replace(options, state=options.state / run.hex()[:16])
    else:
        record = context.state.config_records.setdefault(RECORD, ConfigRecord())
        state = RecordState(record, run, options.number)
    return make_participant(header, options, state=state)


def _record_of(message: Message) -> dict[str, Any]:
    record = message.content.config_records.get(RECORD)
    if record is None:
        raise ProtocolError(f"the message holds no record {RECORD!r}: is the ServerApp of another version?")
    return dict(record)


def _reply(message: Message, content: dict[str, Any]) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord(content)}), reply_to=message)


server_app = ServerApp()
server_app.main()(federate)
client_app = ClientApp()
client_app.train(STREAM)(join_stream)
client_app.train(ROUND)(answer)
