"""A participant's connection to its federator: kept up until the run has ended, a signal comes, or it gives up.

Measuring blocks the event loop: handing it to a thread would cost each round two more switches between threads, which
took a quarter of the rounds from four clients on two cores. So messages wait in gRPC's buffers meanwhile, and a
participant that was slow, or stopped for a while, reads them all before it answers again.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from cyber0.errors import Cyber0Error, ProtocolError
from cyber0.ledger import Header, read_opening
from cyber0.ledger.opening import OPENING_LIMIT
from cyber0.ledger.record import DECIDED, RecordFormat
from cyber0.serve.operations import EventLog, on_stop_signals
from cyber0.serve.participant import Participant
from cyber0.serve.transport import SERVICE, open_channel
from cyber0.storage.disk import Clock

if TYPE_CHECKING:
    from cyber0.serve.join import JoinOptions

_DESCRIBE_SECONDS = 20.0
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0
_REFUSALS = ("FAILED_PRECONDITION", "PERMISSION_DENIED", "INVALID_ARGUMENT", "UNAUTHENTICATED", "UNIMPLEMENTED")
_INBOX_BYTES = 4 << 20  # of messages that were read and not yet taken; beyond that, flow control stops the federator
_DRAIN_SECONDS, _LATE_IN_A_ROW = 0.002, 3
_BUSY_SECONDS, _DRAIN_PART = 0.02, 0.05  # after so long a while, part of it is spent on reading what has come
_LARGEST_PIECE = 1 << 20  # bytes of records in one message, at most, if they are several
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")

# gRPC's words when the two sides can't agree on TLS, and what to do about it; waiting won't help.
_MISMATCHES = {
    "Hostname Verification": "its certificate is not for this name: join by a name it has, or make one with `cyber0 "
    "certs --host NAME`",
    "certificate verify failed": "its certificate is not from the authority in ca.pem, or has expired",
    "certificate signature failure": "its certificate is not from the authority in ca.pem",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: was it started with --insecure?",
}
# The same for what may pass: what happened, and what to check.
_NO_LISTENER = (
    "connection refused: nothing listens there; is the federator running, and is the port right? Or has the run ended?"
)
_NO_NAME = "its name can't be resolved: check the spelling, and this machine's DNS"
_NO_ROUTE = "there is no route to it: check the address and the network"
_SILENT = "it does not answer: check the address and the firewalls between"
_CLOSED = "the connection was closed: the federator stopped, or the network failed"
_NOT_GRPC = "what answers there is not a federator: check the port"
_OUTAGES = {
    "Connection refused": _NO_LISTENER,
    "DNS resolution failed": _NO_NAME,
    "Name or service not known": _NO_NAME,
    "lookup error": _NO_NAME,
    "No route to host": _NO_ROUTE,
    "Network is unreachable": _NO_ROUTE,
    "timed out": _SILENT,
    "Timeout occurred": _SILENT,
    "Deadline Exceeded": _SILENT,
    "Socket closed": _CLOSED,
    "Connection reset": _CLOSED,
    "GOAWAY": _CLOSED,
    "http1.x server": _NOT_GRPC,
    "Failed parsing HTTP/2": _NOT_GRPC,
    "federator is stopping": "the federator is stopping",
}
_WORDED = ("ALREADY_EXISTS", "RESOURCE_EXHAUSTED")  # statuses whose text is the federator's own
_LONGEST_REASON, _MOST_REASONS, _LOG_SECONDS = 120, 32, 60.0
_HANGS_UP = (
    "it ends the TLS handshake: this client's certificate is from another authority than those in the federator's "
    "ca.pem, or has expired (the federator's log says which)"
)
_WANTS_TLS = "it ends the connection at once, as a federator with TLS does: join with --certs DIR, not --insecure"


def _mismatch(details: str) -> str:
    """Return what is wrong if a connection can never succeed; empty if it is worth trying again."""
    return next((text for sign, text in _MISMATCHES.items() if sign.lower() in details.lower()), "")


class _Refused(ProtocolError):
    """The federator refuses us, and trying again would not help."""


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return why a call failed and what to check; gRPC needs hundreds of characters."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _SILENT
    if code.name in _WORDED:
        return details[:_LONGEST_REASON]
    known = next((text for sign, text in _OUTAGES.items() if sign.lower() in details.lower()), "")
    return known or f"it can't be reached (gRPC: {code.name}; GRPC_VERBOSITY=debug logs the details)"


def _shows_details() -> bool:
    """Return whether gRPC was told to log all: then its own words are logged too."""
    return os.environ.get("GRPC_VERBOSITY", "").lower() in ("debug", "info")


class Waits:
    """Logs why a participant has to wait: every reason at once, and again at most once a minute, with how often."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._reasons: dict[str, tuple[float, int]] = {}  # when it was logged last, and how often it came since

    def note(self, reason: str, seconds: float) -> None:
        """Note that a reason has come up and how long the participant waits now."""
        if len(self._reasons) >= _MOST_REASONS and reason not in self._reasons:
            self._reasons.clear()
        now = self._clock()
        logged, count = self._reasons.get(reason, (-math.inf, 0))
        if now - logged < _LOG_SECONDS:
            self._reasons[reason] = (logged, count + 1)
            return
        self._reasons[reason] = (now, 0)
        times = {"times": count + 1} if count else {}
        self._log("waiting", seconds=round(seconds, 1), reason=reason, **times)


def largest_message(header: Header) -> int:
    """Return how many bytes a message of a run's federator has at most: a piece of the ledger, or one record."""
    return 1 + max(_LARGEST_PIECE, RecordFormat(header).sizes[DECIDED])


class Inbox:
    """What was read from a stream and not yet taken.

    Args:
        read: Returns the next message; at the end of the stream something that is not bytes.
        limit: How many bytes to hold; with so many nothing more is read until they are taken.
    """

    def __init__(self, read: Callable[[], Awaitable[Any]], limit: int = _INBOX_BYTES) -> None:
        self._read, self._limit = read, limit
        self._messages: list[bytes] = []
        self._bytes = 0
        self._late = 0  # how often in a row a message was there already
        self._clock = asyncio.get_running_loop().time
        self._taken_at = self._clock()
        self._came, self._room = asyncio.Event(), asyncio.Event()
        self._filling = asyncio.ensure_future(self._fill())
        self._filling.add_done_callback(self._filled)

    async def take(self) -> list[bytes]:
        """Wait for a message, and return all that have come; nothing at the end of the stream.

        Raises:
            Exception: what reading raised, once all that came before has been taken.
        """
        busy = self._clock() - self._taken_at
        self._late = self._late + 1 if self._messages else 0
        if busy >= _BUSY_SECONDS:
            await self._drain_for(_DRAIN_PART * busy)
        elif len(self._messages) > 1 or self._late >= _LATE_IN_A_ROW:
            await self._drain()
        await self._came.wait()
        self._came.clear()
        self._taken_at = self._clock()
        messages, self._messages, self._bytes = self._messages, [], 0
        self._room.set()
        if self._filling.done():
            self._came.set()
            if not messages:
                self._filling.result()
        return messages

    def close(self) -> None:
        """Read no more."""
        self._filling.cancel()

    async def _drain(self) -> None:
        """Wait until all that can be read at once have been read.

        If several messages wait already, their receiver has fallen behind, by how much nobody knows; a single one may
        be the decision on the report that was just sent, but not time after time. Messages of rounds that are running
        come more slowly than one in each wait.
        """
        self._late = 0
        count = -1
        while len(self._messages) > count + 1:
            count = len(self._messages)
            await asyncio.sleep(_DRAIN_SECONDS)

    async def _drain_for(self, seconds: float) -> None:
        """Read what has come while the receiver was busy, for that long at most; rounds may go on meanwhile."""
        end, count = self._clock() + seconds, -1
        while len(self._messages) > count and self._clock() < end:
            count = len(self._messages)
            await asyncio.sleep(_DRAIN_SECONDS)

    async def _fill(self) -> None:
        while isinstance(message := await self._read(), bytes):
            self._messages.append(message)
            self._bytes += len(message)
            self._came.set()
            while self._bytes >= self._limit:
                self._room.clear()
                await self._room.wait()

    def _filled(self, filling: asyncio.Task[None]) -> None:
        self._came.set()
        if not filling.cancelled():
            filling.exception()  # `take` raises it, unless nobody takes any more


class FederatorConnection:
    """Keeps a participant connected to its federator until the run has ended, a signal comes, or it gives up."""

    def __init__(self, options: JoinOptions, log: EventLog, clock: Clock = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self._log, self._waits = log, Waits(log, clock)
        self._stop = asyncio.Event()

    async def take_part(self, build: Callable[[Header], Participant]) -> Participant | None:
        """Take part until the run ends; return the participant, None if a signal came before there was one."""
        on_stop_signals(self._stop.set)
        participant: Participant | None = None
        largest = 0
        last_progress, delay = self._clock(), _FIRST_DELAY
        try:
            while not self._stop.is_set():
                try:
                    if participant is None:
                        header = await self._describe()
                        participant, largest = build(header), largest_message(header)
                        participant.warm_up()  # the first measurement may take longer than a deadline
                    begin = participant.client.next_round
                    async with open_channel(self._options.address, self._options.credentials, largest) as channel:
                        await self._stream(channel, participant)
                    if participant.ended or self._stop.is_set():
                        break
                    reason = _CLOSED
                except grpc.aio.AioRpcError as error:
                    reason = self._judge(error, participant)
                if participant is not None and participant.client.next_round > begin:
                    last_progress, delay = self._clock(), _FIRST_DELAY
                if self._clock() - last_progress > self._options.patience_s:
                    waited = f"{self._options.patience_s:g} s (--patience)"
                    raise ProtocolError(f"no contact with {self._options.address} for {waited}: {reason}")
                self._waits.note(reason, delay)
                await self._pause(delay)
                delay = min(_LONGEST_DELAY, 2 * delay)
        finally:
            if participant is not None:
                participant.save()
        return participant

    def _judge(self, error: grpc.aio.AioRpcError, participant: Participant | None) -> str:
        """Return why to wait before the next attempt; raise `_Refused` if none can succeed."""
        address, details = self._options.address, error.details() or ""
        if _shows_details():
            self._log("grpc", code=error.code().name, details=details)
        if participant is None and (mismatch := _mismatch(details)):
            raise _Refused(f"{address} can't be trusted: {mismatch}") from None
        if found := _TOO_LARGE.search(details):
            what = "of this run" if participant is not None else "that describes a run"
            raise _Refused(f"{address} sends {found[1]} bytes; a message {what} has at most {found[2]}") from None
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise _Refused(f"{address} is another gRPC service, not a federator: check the port") from None
        if error.code().name in _REFUSALS:
            raise _Refused(f"{address} refused: {details}") from None
        if participant is None and "Socket closed" in details:
            return _HANGS_UP if self._options.credentials else _WANTS_TLS
        return _reason(error)

    async def _describe(self) -> Header:
        async with open_channel(self._options.address, self._options.credentials, OPENING_LIMIT) as channel:
            opening = await channel.unary_unary(f"/{SERVICE}/Describe")(b"", timeout=_DESCRIBE_SECONDS)
        return read_opening(io.BytesIO(opening), self._options.address)[0]

    async def _stream(self, channel: Any, participant: Participant) -> None:
        """Exchange messages with the federator until the stream ends."""
        call = channel.stream_stream(f"/{SERVICE}/Rounds")()
        exchanging = asyncio.current_task()

        def stop(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and exchanging is not None:
                call.cancel()
                exchanging.cancel()  # a write to a call that is cancelled before it has begun would never return

        stopped = asyncio.ensure_future(self._stop.wait())
        stopped.add_done_callback(stop)
        inbox = None
        try:
            await call.write(participant.hello())
            inbox = Inbox(call.read)
            while messages := await inbox.take():
                answer = participant.receive_all(messages)
                if answer is not None:
                    await call.write(answer)
                while participant.outbox:
                    await call.write(participant.outbox.pop(0))
                if participant.ended and self._options.follows:
                    await call.done_writing()  # the federator waits for the last evaluation
                if self._stop.is_set():
                    return
        except asyncio.InvalidStateError:
            pass  # the stream ended while we wrote; its status says why
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
            return
        except Cyber0Error:
            call.cancel()
            raise
        finally:
            exchanging = None
            stopped.cancel()
            if inbox is not None:
                inbox.close()
        if await call.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(),
                                       details=await call.details())  # fmt: skip

    async def _pause(self, seconds: float) -> None:
        """Wait, with jitter so that clients do not return all at once, or until a signal comes."""
        try:
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.5)):
                await self._stop.wait()
        except TimeoutError:
            pass
