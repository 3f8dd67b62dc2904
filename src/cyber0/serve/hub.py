"""The federator's side of the network: one session per client, over streams. Knows streams, but not gRPC.

A session has two halves. One writes what the client lacks: the decision just made, or pieces of the ledger if it lacks
more; it waits for the network, so a slow reader delays nobody else and nothing queues up. The other reads reports, and
stops reading when the client's vote for the round is in, until it has sent the decision: a flood then waits in the
sender's buffers, not here. A client may answer each round that it was told of once, however late.

How long a round waits, and for whom, is policy.py's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from cyber0.errors import ProtocolError
from cyber0.ledger import Ledger
from cyber0.protocol.messages import (
    DIGEST_BYTES,
    ENDED,
    FOLLOWER,
    RECORDS,
    REPLAY,
    VOTER,
    EvaluationMessage,
    Hello,
    Opened,
    decode_evaluation,
    decode_hello,
    encode_bare,
    encode_decision,
    encode_opened,
)
from cyber0.serve.admission import (
    ROLE_NAMES,
    Cut,
    Identity,
    check_hello,
    check_identity,
    expelled,
    is_revoked,
    revocation,
)
from cyber0.serve.figures import Traffic
from cyber0.serve.identity import expiration
from cyber0.serve.limits import CALL_BYTES, MAX_STREAMS, LimitedLog, Usage
from cyber0.serve.operations import described
from cyber0.serve.policy import ACCEPTED, LATE, RoundPolicy
from cyber0.serve.sessions import Connection, DeadlineTimer, Session
from cyber0.storage.disk import Clock

CHUNK_BYTES = 64 << 10  # of the ledger, in one message to a client that catches up
FRAMES_A_ROUND = 8  # that answer no round; an honest client sends none, but a few are forgiven
HELLO_SECONDS = 10.0
MAX_FOLLOWERS = 100
# Evaluations that are passed on, at once and a second: each becomes a line of metrics.csv, of up to a kilobyte.
MAX_EVALUATIONS, EVALUATIONS_A_SECOND = 1000, 1.0

STOPPING = "stopping"
TOO_MANY_STREAMS = "too_many_streams"


class Hub:
    """Runs the rounds of a federation over the streams of its clients.

    Args:
        policy: Decides how rounds run.
        clock: Returns the time in seconds.
        on_evaluation: Called when a follower has evaluated the model after more rounds than any before it.
    """

    def __init__(
        self,
        policy: RoundPolicy,
        *,
        clock: Clock,
        on_evaluation: Callable[[EvaluationMessage], None] = lambda _: None,
    ) -> None:
        federator = policy.federator
        assert isinstance(federator.ledger, Ledger)  # clients catch up with its records
        self.policy, self.figures, self.rounds = policy, policy.figures, policy.rounds
        self.federator, self.ledger = federator, federator.ledger
        self.run = self.ledger.chain_at(0)
        self.failure: Exception | None = None
        self.stopping = False
        self.finished = asyncio.Event()
        """Set when the last round is decided, or when no more can be: `failure` then says why."""
        self.revoked: frozenset[str] = frozenset()
        self.evaluated = -1
        """After how many rounds the model was evaluated last; -1: never."""
        self._clock, self._log, self._on_evaluation = clock, policy.log, on_evaluation
        self._usage, self._participant_log = Usage(), LimitedLog(policy.log, clock)
        self._voters: dict[int, Session] = {}
        self._followers: set[Session] = set()
        self._frame = b""  # the last decision, as everybody gets it
        self._frame_payload = 0
        self._timer = DeadlineTimer(clock, self._decide)
        self._round_over = asyncio.Event()
        self._evaluations, self._evaluations_at = float(MAX_EVALUATIONS), 0.0

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
        return int(np.count_nonzero(self.policy.present))

    def state_of(self, client: int) -> str:
        """Return a client's state in a word or two."""
        if str(client) in self.revoked:
            return "revoked"
        if any(one.client == client for one in self.federator.expulsions):
            return "expelled"
        if client not in self._voters:
            return "barred" if self.policy.is_barred(VOTER, client, self._clock()) else "away"
        if not self.policy.present[client]:
            return "catching up"
        return "not waited for" if self.policy.is_behind(client) else "current"

    def start(self) -> None:
        """Open the first round, or the one that the ledger has reached."""
        self._open()

    # The rounds.

    def _open(self) -> None:
        if self.policy.finished:
            self._log("ended", rounds=len(self.ledger))
            self.finished.set()
            return
        self.policy.open_round(self._clock())
        self._timer.set(self.policy.due)

    def _decide(self, *, force: bool = False) -> None:
        """Decide the round if that is possible, send everybody the decision, and open the next round."""
        begin = self._clock()
        try:
            outcome = self.policy.decide(begin, force=force)
        except Exception as error:  # broad: a full disk or a bug; nothing was announced, and no round can follow
            self.failure = ProtocolError(str(error)) if isinstance(error, OSError) else error
            self._log("failed", error=described(self.failure))
            self.finished.set()
            return
        self._timer.set(self.policy.due)
        if outcome is None:
            return
        decided, seconds = self._clock(), self.figures.seconds
        seconds["decide"] += decided - begin
        self._frame = encode_decision(outcome.decision, self.federator.codec)
        self._frame_payload = 0 if outcome.decision.values is None else self.policy.payload
        over, self._round_over = self._round_over, asyncio.Event()
        if not self.stopping:
            self._open()
        over.set()
        for session in self.sessions:
            session.frames = 0
            if not session.voted:
                session.wake.set()
            session.voted = False
        self._cut_expelled()
        seconds["announce"] += self._clock() - decided

    def _cut_expelled(self) -> None:
        """Tell clients that are no longer invited why, and end their streams."""
        for expulsion in self.federator.expulsions:
            session = self._voters.get(expulsion.client)
            if session is not None and not session.stop.done():
                session.stop.set_result(expelled(expulsion))

    def _update(self) -> None:
        """Decide the round if it is complete by what has changed; otherwise follow its deadline."""
        if self.stopping:
            return
        if self.policy.complete:
            self._decide()
        else:
            self._timer.set(self.policy.due)

    def close(self) -> None:
        """Stop: decide or abandon the open round if anybody has answered it, and end the streams."""
        self.stopping = True
        if self.federator.round is not None and self.failure is None:
            if self.federator.answered:
                self._decide(force=True)
            else:
                self.federator.cancel_round()
        self._timer.close()
        self._participant_log.close()
        for session in self.sessions:
            session.wake.set()

    def revoke(self, revoked: frozenset[str]) -> None:
        """From now on refuse these clients and certificate fingerprints; cut off those who are connected."""
        self.revoked = revoked
        for session in self.sessions:
            if is_revoked(revoked, session.role, session.client, session.fingerprint) and not session.stop.done():
                session.stop.set_result(revocation())

    def expire(self, now: float) -> None:
        """Cut off those whose certificate has expired; `now` is in seconds since 1970, as certificates count."""
        for session in self.sessions:
            identity = session.connection.identity
            if identity is not None and identity.expires <= now and not session.stop.done():
                session.stop.set_result(expiration(identity))

    # A stream.

    @contextlib.asynccontextmanager
    async def call(self, identity: Identity | None, size: int = 0) -> AsyncIterator[None]:
        """Count a call for as long as it lasts; first wait until its certificate may be sent so many bytes.

        Raises `Cut` if the certificate has too many calls already: that must cost less than serving them.
        """
        key = identity.fingerprint if identity else ""
        if key and not self._usage.enter(key):
            text = f"more than {MAX_STREAMS} streams of one certificate"
            cut = Cut(TOO_MANY_STREAMS, "RESOURCE_EXHAUSTED", text)
            self.count_refusal(identity, cut)
            raise cut
        try:
            await self._pace(key, max(size, CALL_BYTES))
            yield
        finally:
            if key:
                self._usage.leave(key)

    async def _pace(self, key: str, size: int) -> None:
        """Count bytes that are sent; wait if the participant has been sent more than it may have."""
        if key and (delay := self._usage.delay(key, size, self.ledger.size, self._clock())):
            await asyncio.sleep(delay)

    def count_refusal(self, identity: Identity | None, cut: Cut) -> None:
        """Count and log that somebody was refused, before or without a session; None: it has no identity."""
        self._count_cut(identity.fingerprint if identity else "", identity.client if identity else None, cut)

    def log_header_sent(self, identity: Identity | None) -> None:
        """Log that somebody was sent the header: whoever does not join then has stopped by itself."""
        key = identity.fingerprint if identity else ""
        who = {"client": identity.client, "role": ROLE_NAMES[identity.role]} if identity else {}
        self._participant_log(key, "header_sent", **who)

    def _count_cut(self, key: str, client: int | None, cut: Cut) -> None:
        self.figures.refused[cut.reason] += 1
        self._participant_log(key, "cut_off", client=client, reason=cut.reason, text=cut.text)

    async def serve(self, connection: Connection) -> None:
        """Serve one participant until it leaves or is cut off; raises `Cut` if it is cut off."""
        async with self.call(connection.identity):
            await self._serve(connection)

    async def _serve(self, connection: Connection) -> None:
        session: Session | None = None
        try:
            session = self._admit(await self._hello(connection), connection)
            await self._run_session(session)
        except Cut as cut:
            if cut.reason == STOPPING:
                raise
            identity = connection.identity
            who = session.client if session else identity.client if identity else None
            self._count_cut(session.key if session else identity.fingerprint if identity else "", who, cut)
            if cut.barred and session is not None:
                self.policy.bar(session.role, session.client, self._clock())
            raise
        except asyncio.CancelledError:  # the connection broke, or gRPC refused a message on it
            if not self.stopping:
                self.figures.refused["broken_stream"] += 1
            raise
        finally:
            self._count_wire(session.traffic if session else self.figures.others, connection)
            if session is not None:
                self._remove(session)

    def count_wire(self) -> None:
        """Bring the bytes on the wire up to date."""
        for session in self.sessions:
            self._count_wire(session.traffic, session.connection)

    def _count_wire(self, traffic: Traffic, connection: Connection) -> None:
        new = connection.wire()
        if new is not None:
            traffic.wire_in += new[0]
            traffic.wire_out += new[1]

    async def _hello(self, connection: Connection) -> Hello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                frame = await connection.read()
        except TimeoutError:
            raise Cut("no_hello", "DEADLINE_EXCEEDED", f"no hello within {HELLO_SECONDS:g} s") from None
        if not isinstance(frame, bytes):
            raise Cut("no_hello", "INVALID_ARGUMENT", "the stream ended before its hello")
        self.figures.others.message_in += len(frame)
        try:
            return decode_hello(frame)
        except ProtocolError as error:
            raise Cut("bad_hello", "INVALID_ARGUMENT", str(error)) from None

    def _admit(self, hello: Hello, connection: Connection) -> Session:
        """Return the session of a participant that may take part; nothing of a refused one is stored."""
        identity = connection.identity
        fingerprint = identity.fingerprint if identity else ""
        if identity is not None:
            check_identity(hello, identity)
        if is_revoked(self.revoked, hello.role, hello.client, fingerprint):
            raise revocation()
        check_hello(hello, self.ledger)
        for expulsion in self.federator.expulsions if hello.role == VOTER else ():
            if expulsion.client == hello.client:
                raise expelled(expulsion)
        if self.policy.is_barred(hello.role, hello.client, self._clock()):
            raise Cut("barred", "RESOURCE_EXHAUSTED", f"client {hello.client} was cut off a moment ago: wait")
        traffic = self.figures.clients[hello.client] if hello.role == VOTER else self.figures.others
        stop: asyncio.Future[Cut] = asyncio.get_running_loop().create_future()
        session = Session(hello.role, hello.client, fingerprint, hello.round, stop, traffic, connection)
        if hello.role == FOLLOWER:
            if len(self._followers) >= MAX_FOLLOWERS:
                raise Cut("too_many_followers", "RESOURCE_EXHAUSTED", f"{MAX_FOLLOWERS} followers are here already")
            self._followers.add(session)
        elif hello.client in self._voters:
            text = f"client {hello.client} is connected already: stop the other process that joins as it"
            raise Cut("identity_in_use", "ALREADY_EXISTS", text)
        else:
            self._voters[hello.client] = session
        self._count_wire(traffic, connection)
        self._participant_log(
            session.key, "joined", client=hello.client, role=ROLE_NAMES[hello.role], round=hello.round
        )
        return session

    async def _run_session(self, session: Session) -> None:
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

    def _remove(self, session: Session) -> None:
        self._followers.discard(session)
        if self._voters.get(session.client) is session:
            del self._voters[session.client]
            self._participant_log(session.key, "left", client=session.client)
            self.policy.depart(session.client, self._clock())
            self._update()

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
        """Send one message that the participant lacks; return whether there was one."""
        rounds = len(self.ledger)
        if self._must_replay(session):
            self.policy.to_replay.discard(session.client)
            session.announced, session.sent = False, 0
            await self._send(session, encode_bare(REPLAY))
        elif session.sent == rounds - 1 and session.announced and self._frame:
            session.sent += 1
            session.traffic.payload_out += self._frame_payload
            await self._send(session, self._frame)  # which announces the next round too
            more = session.sent < len(self.ledger) or self._must_replay(session)
            return more or self.stopping or self.finished.is_set()
        elif session.sent < rounds:
            session.announced = False
            if session.role == VOTER:
                self.policy.present[session.client] = False
            data, count = self.ledger.chunk(session.sent, CHUNK_BYTES)
            session.sent += count
            await self._send(session, bytes([RECORDS]) + data)
            await self._pace(session.key, len(data))
        elif self.stopping:
            raise Cut(STOPPING, "UNAVAILABLE", "the federator is stopping")
        elif rounds >= self.rounds:
            if session.ended:
                return False
            await self._send(session, encode_bare(ENDED))
            session.ended = True  # only now: the stream is closed when one of its halves sees this
            session.wake.set()
        elif not session.announced:
            session.announced = True
            if session.role == VOTER:
                self.policy.arrive(session.client, self._clock())
                self._timer.set(self.policy.due)
            await self._send(session, encode_opened(Opened(rounds, self.ledger.chain, self.rounds)))
        else:
            return False
        return True

    def _must_replay(self, session: Session) -> bool:
        return session.role == VOTER and session.client in self.policy.to_replay

    async def _send(self, session: Session, message: bytes) -> None:
        session.traffic.message_out += len(message)
        await session.connection.write(message)

    async def _read(self, session: Session) -> None:
        """Take what the participant sends; after its vote, nothing more until the round is over."""
        while isinstance(frame := await session.connection.read(), bytes):
            over = self._round_over
            if self._receive(session, frame):
                # This half, awake by then, also sends the decision: waking the other would cost as much as sending.
                await over.wait()
                await self._deliver(session)
                if session.ended:
                    return

    def _receive(self, session: Session, frame: bytes) -> bool:
        """Judge a message; return whether it was the client's vote."""
        session.traffic.message_in += len(frame)
        if session.role == FOLLOWER:
            self._take_evaluation(session, frame)
            return False
        longest = self.policy.report_bytes + DIGEST_BYTES
        if len(frame) > longest:
            raise Cut("oversized", "INVALID_ARGUMENT", f"a report has at most {longest} bytes", barred=True)
        # Before the round is decided, which may be now: who has voted is sent the decision by the half that reads.
        result = self.policy.take_report(session.client, frame, self._clock())
        session.voted = voted = result == ACCEPTED
        if not voted and result != LATE:
            session.frames += 1
            if session.frames > FRAMES_A_ROUND:
                text = f"more than {FRAMES_A_ROUND} messages in a round that answer none"
                raise Cut("flood", "RESOURCE_EXHAUSTED", text, barred=True)
        self._update()
        return voted

    def _take_evaluation(self, session: Session, frame: bytes) -> None:
        """Pass on a follower's evaluation; each of its messages is of a later round, so there can't be many."""
        try:
            evaluation = decode_evaluation(frame)
        except ProtocolError:
            raise Cut("follower_spoke", "PERMISSION_DENIED", "a follower has no vote", barred=True) from None
        if not session.evaluated < evaluation.round <= len(self.ledger):
            raise Cut("follower_spoke", "INVALID_ARGUMENT", f"round {evaluation.round} was evaluated, or is to come",
                      barred=True)  # fmt: skip
        session.evaluated = evaluation.round
        if evaluation.round > self.evaluated and (self._may_pass_on() or evaluation.round == self.rounds):
            self.evaluated = evaluation.round
            self._on_evaluation(evaluation)

    def _may_pass_on(self) -> bool:
        """Return whether another evaluation may be passed on; followers in a hurry would fill the disk."""
        now = self._clock()
        earned = EVALUATIONS_A_SECOND * (now - self._evaluations_at)
        self._evaluations, self._evaluations_at = min(MAX_EVALUATIONS, self._evaluations + earned), now
        if self._evaluations < 1:
            return False
        self._evaluations -= 1
        return True
