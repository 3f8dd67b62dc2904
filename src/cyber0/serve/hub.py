"""The federator's side of the network: one session a client, rounds with a deadline. Knows streams, but not gRPC.

A session has two halves. One writes what the client lacks: the decision just made, or pieces of the ledger if it lacks
more; it waits for the network, so a slow reader holds up nobody else and nothing queues up. The other reads reports,
and stops reading when the client's vote for the round is in, until it has sent the decision: a flood then waits in the
sender's buffers, not here.

A round is decided when everybody who is current and was asked has answered, with at least the reports that the rule
needs for all who might have been asked, or at the deadline. Its clock runs while so many can be had. A client
that misses a deadline is not waited for in the next rounds, each time for longer; its reports count if they come.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from cyber0.errors import Cyber0Error, ProtocolError
from cyber0.ledger import Ledger
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import (
    DIGEST_BYTES,
    ENDED,
    FOLLOWER,
    RECORDS,
    REPLAY,
    VOTER,
    Evaluation,
    Hello,
    Opened,
    decode_evaluation,
    decode_hello,
    decode_report,
    encode_bare,
    encode_decision,
    encode_opened,
    payload_bytes,
)
from cyber0.serve.sessions import (
    ROLES,
    Clock,
    Cut,
    Figures,
    Log,
    Session,
    Stream,
    Traffic,
    digest_due,
    name_of,
    outside_majority,
    revocation,
)

CHUNK_BYTES = 64 << 10  # of the ledger, in one message to somebody who catches up
FRAMES_A_ROUND = 8  # an honest client sends one; a few more are forgiven
HELLO_SECONDS = 10.0
BARRED_SECONDS = 30.0  # for which a client that was cut off for what it sent stays out
FOLLOWERS = 100  # at most
MISSES = 10  # the longest a silent client is not waited for is 2^10 rounds
FORGIVEN_AFTER = 32  # reports in time, for one miss
REPLAYS = 3  # of the whole ledger that a client can cause by claiming other weights

STOPPING = "stopping"


class Hub:
    """Drives a federator by the streams of its clients.

    Args:
        federator: The state machine; its ledger says where to go on.
        rounds: How many rounds the run has.
        deadline_s: How long a round waits for reports.
        digest_every: Every so many rounds reports carry a digest of the weights; 0: never.
        log: Called as log("event", key=value, ...).
        on_evaluation: Called when a follower has evaluated the model after more rounds than any before it.
    """

    def __init__(
        self,
        federator: Federator,
        *,
        rounds: int,
        deadline_s: float,
        digest_every: int = 0,
        log: Log = lambda *_, **__: None,
        on_evaluation: Callable[[Evaluation], None] = lambda _: None,
    ) -> None:
        assert isinstance(federator.ledger, Ledger)  # its records are what clients catch up by
        self.federator, self.ledger = federator, federator.ledger
        self.rounds, self.deadline_s, self.digest_every = rounds, deadline_s, digest_every
        self.run = self.ledger.chain_at(0)
        self.figures = Figures([Traffic() for _ in range(federator.clients)])
        self.failure: Cyber0Error | None = None
        self.stopping = False
        self.finished = asyncio.Event()
        """Set when the last round is decided, or when the ledger can't be written."""
        self.revoked: frozenset[str] = frozenset()
        self.evaluated = -1
        """After how many rounds the model was evaluated last; -1: never."""
        self._log, self._on_evaluation = log, on_evaluation
        self._voters: dict[int, Session] = {}
        self._here = np.zeros(federator.clients, np.bool_)  # who is connected and current
        self._followers: set[Session] = set()
        self._barred: dict[tuple[int, int], float] = {}
        self._misses = np.zeros(federator.clients, np.int64)
        self._in_time = np.zeros(federator.clients, np.int64)
        self._excused_until = np.zeros(federator.clients, np.int64)
        self._replays: Counter[int] = Counter()
        self._frame = b""  # the last decision, as everybody gets it
        self._frame_payload = 0
        self._clock = Clock(deadline_s, self._deadline)
        self._round_over = asyncio.Event()
        self._opened_at = 0.0
        self._report_bytes = 8 + payload_bytes(federator.scalars, federator.codec)
        self._payload = payload_bytes(federator.scalars, federator.codec)

    @property
    def sessions(self) -> list[Session]:
        """Everybody who is connected."""
        return [*self._voters.values(), *self._followers]

    @property
    def connected(self) -> int:
        """How many clients with a vote are connected."""
        return len(self._voters)

    @property
    def current(self) -> int:
        """How many clients with a vote are connected and hold the weights of the open round."""
        return int(np.count_nonzero(self._here))

    def state_of(self, client: int) -> str:
        """Say in a word or two how a client stands."""
        session = self._voters.get(client)
        if str(client) in self.revoked:
            return "revoked"
        if session is None:
            return "barred" if time.monotonic() < self._barred.get((VOTER, client), 0.0) else "away"
        if not self._here[client]:
            return "catching up"
        return "not waited for" if self._excused_until[client] > len(self.ledger) else "current"

    def start(self) -> None:
        """Open the first round, or the one that the ledger has reached."""
        self._open()

    # The rounds.

    def _open(self) -> None:
        if len(self.ledger) >= self.rounds:
            self._log("ended", rounds=len(self.ledger))
            self.finished.set()
            return
        announcement = self.federator.open_round()
        self._opened_at = time.monotonic()
        self.federator.wait_only_for(self._here & (self._excused_until <= announcement.round))
        self._set_clock()

    def _set_clock(self) -> None:
        """Count down while a decision is possible at all: rounds are not spent while too few clients are there."""
        if self._can_decide():
            self._clock.start()
        else:
            self._clock.stop()

    def _can_decide(self) -> bool:
        federator = self.federator
        if federator.round is None:
            return False
        if federator.invited_count < federator.clients:  # others may be asked in the next round
            return self.current >= federator.required
        return federator.answered + federator.possible(self._here) >= federator.required

    def _deadline(self) -> None:
        silent, number = self.federator.silent().tolist(), self.federator.round
        assert number is not None
        for client in silent:
            self._misses[client] = min(self._misses[client] + 1, MISSES)
            self._excused_until[client] = number + 1 + (1 << int(self._misses[client]))
            self.figures.clients[client].misses += 1
        self._log("deadline", round=number, answered=self.federator.answered, silent=silent[:20])
        self._decide(deadline=True)

    def _decide(self, *, deadline: bool = False) -> None:
        """Decide the round if it can be, tell everybody, and open the next."""
        begin = time.monotonic()
        try:
            decision = self.federator.decide(deadline=deadline)
        except (Cyber0Error, OSError) as error:  # a full disk, say: nothing was announced
            self.failure = error if isinstance(error, Cyber0Error) else ProtocolError(str(error))
            self._log("failed", error=str(error))
            self.finished.set()
            return
        if decision is None:
            return
        now, figures = time.monotonic(), self.figures
        figures.seconds["collect"] += begin - self._opened_at
        figures.seconds["decide"] += now - begin
        if decision.values is None:
            figures.abandoned += 1
            self._log("abandoned", round=decision.round)
        else:
            figures.decided += 1
        self._clock.stop()
        if digest_due(decision.round, self.digest_every):
            self._compare_digests(decision.round)
        self._frame = encode_decision(decision, self.federator.codec)
        self._frame_payload = 0 if decision.values is None else self._payload
        over, self._round_over = self._round_over, asyncio.Event()
        if not self.stopping:
            self._open()
        over.set()
        for session in self.sessions:
            session.frames = 0
            if not session.voted:
                session.wake.set()
            session.voted = False
        figures.seconds["announce"] += time.monotonic() - now

    def _compare_digests(self, number: int) -> None:
        found = {c: s.digest for c, s in self._voters.items() if s.digest}
        for session in self._voters.values():
            session.digest = b""
        odd = outside_majority(found)
        if odd:
            self.figures.alarms += 1
            self._log("digests_differ", round=number, clients=odd[:20], compared=len(found))
        for client in odd:
            if self._replays[client] < REPLAYS:
                self._replays[client] += 1
                session = self._voters[client]
                session.restart, self._here[client] = True, False

    def close(self) -> None:
        """Stop: the round in progress is decided or abandoned if anybody has answered, and streams are ended."""
        self.stopping = True
        if self.federator.round is not None and self.failure is None:
            if self.federator.answered:
                self._decide(deadline=True)
            else:
                self.federator.cancel_round()
        self._clock.close()
        for session in self.sessions:
            session.wake.set()

    def revoke(self, revoked: frozenset[str]) -> None:
        """From now on refuse these client numbers and certificate fingerprints; cut off who is connected."""
        self.revoked = revoked
        for session in self.sessions:
            if self._is_revoked(session.role, session.client, session.fingerprint) and not session.stop.done():
                session.stop.set_result(revocation())

    def _is_revoked(self, role: int, client: int, fingerprint: str) -> bool:
        return (role == VOTER and str(client) in self.revoked) or (bool(fingerprint) and fingerprint in self.revoked)

    # A stream.

    async def serve(self, stream: Stream) -> None:
        """Speak with one participant until it leaves or is cut off; raises `Cut` if it is cut off."""
        session: Session | None = None
        self.figures.comings_and_goings += 1
        try:
            session = self._welcomed(await self._hello(stream), stream)
            await self._converse(session)
        except Cut as cut:
            if cut.reason == STOPPING:
                raise
            self.figures.refused[cut.reason] += 1
            who = session.client if session else stream.identity.client if stream.identity else None
            self._log("cut_off", client=who, reason=cut.reason, text=cut.text)
            if cut.barred and session is not None:
                self._barred[session.role, session.client] = time.monotonic() + BARRED_SECONDS
            raise
        except asyncio.CancelledError:  # the connection broke, or gRPC would not take what came on it
            if not self.stopping:
                self.figures.refused["broken_stream"] += 1
            raise
        finally:
            self.figures.comings_and_goings += 1
            self._count_wire(session.traffic if session else self.figures.others, stream)
            if session is not None:
                self._forget(session)

    def count_wire(self) -> None:
        """Bring the bytes on the wire up to date."""
        for session in self.sessions:
            self._count_wire(session.traffic, session.stream)

    def _count_wire(self, traffic: Traffic, stream: Stream) -> None:
        news = stream.wire()
        if news is not None:
            traffic.wire_in += news[0]
            traffic.wire_out += news[1]

    async def _hello(self, stream: Stream) -> Hello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                frame = await stream.read()
        except TimeoutError:
            raise Cut("no_hello", "DEADLINE_EXCEEDED", f"no hello within {HELLO_SECONDS:g} s") from None
        if not isinstance(frame, bytes):
            raise Cut("no_hello", "INVALID_ARGUMENT", "the stream ended before its hello")
        self.figures.others.message_in += len(frame)
        try:
            return decode_hello(frame)
        except ProtocolError as error:
            raise Cut("bad_hello", "INVALID_ARGUMENT", str(error)) from None

    def _welcomed(self, hello: Hello, stream: Stream) -> Session:
        """Return the session of a participant that may take part; nothing of a refused one is kept."""
        identity = stream.identity
        fingerprint = identity.fingerprint if identity else ""
        if identity is not None and (identity.client, identity.role) != (hello.client, hello.role):
            raise Cut("other_identity", "PERMISSION_DENIED",
                      f"the certificate is that of {name_of(identity.role, identity.client)}, and the hello names "
                      f"{name_of(hello.role, hello.client)}")  # fmt: skip
        if self._is_revoked(hello.role, hello.client, fingerprint):
            raise revocation()
        if hello.role == VOTER and hello.client >= self.federator.clients:
            raise Cut("unknown_client", "PERMISSION_DENIED",
                      f"there is no client {hello.client}: they are 0 to {self.federator.clients - 1}")  # fmt: skip
        header = self.ledger.header
        if hello.run != self.run:
            raise Cut("other_run", "FAILED_PRECONDITION",
                      f"this is run {self.run.hex()[:16]}, not {hello.run.hex()[:16]}")  # fmt: skip
        for what, mine, theirs in (("trainable weights w0", header.weights_digest, hello.weights_digest),
                                   ("frozen weights or buffers", header.rest_digest, hello.rest_digest)):  # fmt: skip
            if mine != theirs.hex():
                raise Cut("other_model", "FAILED_PRECONDITION", f"the {what} differ from those agreed on")
        if hello.round > len(self.ledger) or self.ledger.chain_at(hello.round)[:CHAIN_BYTES] != hello.chain:
            raise Cut("other_history", "FAILED_PRECONDITION",
                      f"this ledger has {len(self.ledger)} rounds and does not go on from the hash "
                      f"{hello.chain.hex()} after {hello.round}")  # fmt: skip
        if time.monotonic() < self._barred.get((hello.role, hello.client), 0.0):
            raise Cut("barred", "RESOURCE_EXHAUSTED", f"client {hello.client} was cut off a moment ago: wait")
        traffic = self.figures.clients[hello.client] if hello.role == VOTER else self.figures.others
        stop: asyncio.Future[Cut] = asyncio.get_running_loop().create_future()
        session = Session(hello.role, hello.client, fingerprint, hello.round, stop, traffic, stream)
        if hello.role == FOLLOWER:
            if len(self._followers) >= FOLLOWERS:
                raise Cut("too_many_followers", "RESOURCE_EXHAUSTED", f"{FOLLOWERS} followers are here already")
            self._followers.add(session)
        elif hello.client in self._voters:
            raise Cut("identity_in_use", "ALREADY_EXISTS", f"client {hello.client} is connected already")
        else:
            self._voters[hello.client] = session
        self._count_wire(traffic, stream)
        self._log("joined", client=hello.client, role=ROLES[hello.role], round=hello.round)
        return session

    async def _converse(self, session: Session) -> None:
        reading = asyncio.ensure_future(self._read(session))
        writing = asyncio.ensure_future(self._write(session))
        halves: list[asyncio.Future[Any]] = [reading, writing, session.stop]
        try:
            while True:
                await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
                if session.stop.done():
                    raise session.stop.result()
                for half in (writing, reading):
                    if half.done():
                        half.result()
                if session.role == VOTER or reading.done():
                    return
                halves.remove(writing)  # a follower may yet have to evaluate the last round: it ends the stream itself
        finally:
            for half in (reading, writing):
                half.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    def _forget(self, session: Session) -> None:
        self._followers.discard(session)
        if self._voters.get(session.client) is session:
            del self._voters[session.client]
            self._here[session.client] = False
            self._log("left", client=session.client)
            self._do_not_wait_for(session.client)

    def _do_not_wait_for(self, client: int) -> None:
        """Go on without a client that has left, or has sent what can't count; the round may be complete by that."""
        if self.federator.round is None or self.stopping:
            return
        self.federator.excuse(client)
        if self.federator.complete:
            self._decide()
        else:
            self._set_clock()

    async def _write(self, session: Session) -> None:
        """Send what the participant lacks, for as long as it stays."""
        while not session.ended:
            await self._deliver(session)
            await session.wake.wait()
            session.wake.clear()

    async def _deliver(self, session: Session) -> None:
        """Send all that the participant lacks now."""
        async with session.lock:
            while await self._send_next(session):
                pass

    async def _send_next(self, session: Session) -> bool:
        """Send one message that the participant lacks, and tell whether there was one."""
        rounds = len(self.ledger)
        if session.restart:
            session.restart, session.told, session.sent = False, False, 0
            await self._send(session, encode_bare(REPLAY))
        elif session.sent == rounds - 1 and session.told and self._frame:
            session.sent += 1
            session.traffic.payload_out += self._frame_payload
            await self._send(session, self._frame)  # which announces the next round too
            return session.sent < len(self.ledger) or session.restart or self.stopping or self.finished.is_set()
        elif session.sent < rounds:
            session.told = False
            if session.role == VOTER:
                self._here[session.client] = False
            data, count = self.ledger.chunk(session.sent, CHUNK_BYTES)
            session.sent += count
            await self._send(session, bytes([RECORDS]) + data)
        elif self.stopping:
            raise Cut(STOPPING, "UNAVAILABLE", "the federator is stopping")
        elif rounds >= self.rounds:
            if session.ended:
                return False
            await self._send(session, encode_bare(ENDED))
            session.ended = True  # only now: the stream is closed when one of its halves sees this
            session.wake.set()
        elif not session.told:
            self._is_current(session)
            await self._send(session, encode_opened(Opened(rounds, self.ledger.chain, self.rounds)))
        else:
            return False
        return True

    async def _send(self, session: Session, message: bytes) -> None:
        session.traffic.message_out += len(message)
        await session.stream.write(message)

    def _is_current(self, session: Session) -> None:
        session.told, number = True, self.federator.round
        if session.role != VOTER or number is None:
            return
        self._here[session.client] = True
        if self._excused_until[session.client] <= number:
            self.federator.wait_for(session.client)
        self._set_clock()

    async def _read(self, session: Session) -> None:
        """Take what the participant sends; after its vote, nothing more until the round is over."""
        while isinstance(frame := await session.stream.read(), bytes):
            over = self._round_over
            if self._received(session, frame):
                # This half, awake by then, also sends the decision: waking the other would cost as much as sending.
                await over.wait()
                await self._deliver(session)
                if session.ended:
                    return

    def _received(self, session: Session, frame: bytes) -> bool:
        """Judge a message and tell whether it was the client's vote."""
        session.frames += 1
        session.traffic.message_in += len(frame)
        if session.role == FOLLOWER:
            self._take_evaluation(session, frame)
            return False
        if session.frames > FRAMES_A_ROUND:
            raise Cut("flood", "RESOURCE_EXHAUSTED", f"more than {FRAMES_A_ROUND} messages in a round", barred=True)
        if len(frame) > self._report_bytes + DIGEST_BYTES:
            raise Cut("oversized", "INVALID_ARGUMENT", f"a report has {self._report_bytes} bytes", barred=True)
        try:
            report = decode_report(frame, session.client, self.federator.scalars, self.federator.codec)
        except ProtocolError:
            self.figures.refused["truncated" if len(frame) < self._report_bytes else "malformed"] += 1
            self._do_not_wait_for(session.client)
            return False
        receipt = self.federator.receive(report)
        if receipt is not Receipt.ACCEPTED:
            self.figures.refused[receipt.name.lower()] += 1
            if receipt is Receipt.NOT_FINITE:
                self._do_not_wait_for(session.client)
            return False
        session.traffic.payload_in += self._payload
        session.traffic.reports += 1
        session.digest = report.digest
        self._forgive(session.client)
        session.voted = True  # until the round is decided, which may be now
        if self.federator.complete:
            self._decide()
        return True

    def _take_evaluation(self, session: Session, frame: bytes) -> None:
        """Pass on what a follower found; each of its messages is of a later round, so there can't be many."""
        try:
            found = decode_evaluation(frame)
        except ProtocolError:
            raise Cut("follower_spoke", "PERMISSION_DENIED", "a follower has no vote", barred=True) from None
        if not session.evaluated < found.round <= len(self.ledger):
            raise Cut("follower_spoke", "INVALID_ARGUMENT", f"round {found.round} was evaluated, or is to come",
                      barred=True)  # fmt: skip
        session.evaluated = found.round
        if found.round > self.evaluated:
            self.evaluated = found.round
            self._on_evaluation(found)

    def _forgive(self, client: int) -> None:
        """Count a report in time; enough of them make up for a miss."""
        if self._misses[client]:
            self._in_time[client] += 1
            if self._in_time[client] >= FORGIVEN_AFTER:
                self._in_time[client] = 0
                self._misses[client] -= 1
