"""A participant's connection: it reads all that has come before it answers, and no more than it can hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import run
from wire import make_header

grpc = pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cyber0.errors import LedgerError, ProtocolError  # noqa: E402
from cyber0.ledger import opening_of  # noqa: E402
from cyber0.serve import connection  # noqa: E402
from cyber0.serve.connection import FederatorConnection, Inbox  # noqa: E402
from cyber0.serve.join import JoinOptions  # noqa: E402
from cyber0.serve.operations import log_nothing, make_log  # noqa: E402
from cyber0.serve.transport import SERVICE  # noqa: E402

READ_SECONDS = 0.0001


class Stream:
    """A gRPC call whose messages are handed in; each takes a moment to be read."""

    def __init__(self) -> None:
        self.down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: list[bytes] = []
        self.cancelled = False

    async def read(self) -> Any:
        message = await self.down.get()
        await asyncio.sleep(READ_SECONDS)
        return grpc.aio.EOF if message is None else message

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(READ_SECONDS)
        self.sent.append(message)

    def cancel(self) -> None:
        self.cancelled = True

    async def code(self) -> Any:
        return grpc.StatusCode.OK


class Listener:
    """A participant that notes what it is given at a time, and answers with the newest of it."""

    def __init__(self, stream: Stream, last: bytes) -> None:
        self.client, self.outbox, self.ended = SimpleNamespace(next_round=0), list[bytes](), False
        self.taken: list[list[bytes]] = []
        self._stream, self._last = stream, last

    def warm_up(self) -> None: ...

    def save(self) -> None: ...

    def hello(self) -> bytes:
        return b"hello"

    def receive_all(self, messages: list[bytes]) -> bytes:
        self.taken.append(messages)
        if messages[-1] == self._last:
            self.ended = True
            self._stream.down.put_nowait(None)
        return messages[-1]


def connected(stream: Stream, participant: Any, monkeypatch: pytest.MonkeyPatch) -> asyncio.Future[Any]:
    """Start a connection over the stream, to a federator that describes some run."""
    opening = opening_of(make_header())

    @contextlib.asynccontextmanager
    async def channel(*_: Any, **__: Any) -> AsyncIterator[Any]:
        async def describe(request: bytes, timeout: float) -> bytes:
            return opening

        yield SimpleNamespace(unary_unary=lambda _: describe, stream_stream=lambda _: lambda: stream)

    monkeypatch.setattr(connection, "open_channel", channel)
    monkeypatch.setattr(connection, "on_stop_signals", lambda stop: None)
    joining = FederatorConnection(JoinOptions("127.0.0.1:1", None, 0), log_nothing)
    return asyncio.ensure_future(joining.take_part(lambda header: participant))


def test_a_client_that_was_stopped_for_a_while_answers_the_newest_round_and_not_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [bytes([n >> 8, n & 255]) for n in range(1000)]

    async def work() -> None:
        stream = Stream()
        participant = Listener(stream, rounds[-1])
        for message in rounds:
            stream.down.put_nowait(message)
        await connected(stream, participant, monkeypatch)
        assert b"".join(m for taken in participant.taken for m in taken) == b"".join(rounds)
        assert stream.sent == [b"hello", *rounds[:3], rounds[-1]]  # then it has noticed

    run(work())


def test_a_client_that_keeps_up_never_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_DRAIN_SECONDS", 5.0)

    async def work() -> None:
        stream = Stream()
        participant = Listener(stream, b"9")
        ended = connected(stream, participant, monkeypatch)
        for number in range(10):
            stream.down.put_nowait(b"%d" % number)
            while len(stream.sent) < number + 2:
                await asyncio.sleep(READ_SECONDS)
        await ended
        assert participant.taken == [[b"%d" % number] for number in range(10)]
        assert asyncio.get_running_loop().time() < 5.0

    run(work())


def test_no_more_is_read_than_an_inbox_holds() -> None:
    async def work() -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for number in range(100):
            queue.put_nowait(bytes([number]) * 10)
        queue.put_nowait(None)
        inbox = Inbox(queue.get, limit=200)
        await asyncio.sleep(1.0)
        assert queue.qsize() == 81  # with 20 messages it is full
        taken = [await inbox.take()]
        while taken[-1]:
            taken.append(await inbox.take())
        assert [len(part) for part in taken] == [20, 20, 20, 20, 20, 0]
        assert await inbox.take() == []

    run(work())


def test_what_came_before_a_stream_broke_is_taken_first() -> None:
    async def work() -> None:
        rest = [b"a", b"b"]

        async def read() -> bytes:
            if not rest:
                raise ProtocolError("the stream broke")
            return rest.pop(0)

        inbox = Inbox(read)
        assert await inbox.take() == [b"a", b"b"]
        with pytest.raises(ProtocolError, match="broke"):
            await inbox.take()

    run(work())


REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: "
    "connect: Connection refused (111)"
)


def failure(code: str, details: str) -> Any:
    return grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "details", "text"),
    [("UNAVAILABLE", REFUSED, "connection refused: nothing listens there; is the federator running, and is the port"),
     ("UNAVAILABLE", "x" * 500, "it can't be reached (gRPC: UNAVAILABLE; GRPC_VERBOSITY=debug logs the details)"),
     ("UNAVAILABLE", "the federator is stopping", "the federator is stopping"),
     ("UNAVAILABLE", "[field:hostname lookup error:address lookup failed]", "its name can't be resolved: check the"),
     ("UNAVAILABLE", "127.0.0.1:80: Failed parsing HTTP/2 (Expected", "what answers there is not a federator: check"),
     ("DEADLINE_EXCEEDED", "Deadline Exceeded", "it does not answer: check the address and the firewalls"),
     ("ALREADY_EXISTS", "client 3 is connected", "client 3 is connected")],
)  # fmt: skip
def test_a_reason_to_wait_says_what_happened_and_what_to_check(code: str, details: str, text: str) -> None:
    assert connection._reason(failure(code, details)).startswith(text)


def test_a_reason_to_wait_is_logged_once_and_then_once_a_minute_with_how_often() -> None:
    lines: list[dict[str, Any]] = []
    seconds = 0.0
    waits = connection.Waits(lambda event, **details: lines.append(details), lambda: seconds)
    for second in range(0, 130, 5):
        seconds = float(second)
        waits.note("connection refused", 5.0)
        if second == 65:
            waits.note("it does not answer", 5.0)
    assert [(line["reason"], line.get("times")) for line in lines] == [
        ("connection refused", None), ("connection refused", 12), ("it does not answer", None),
        ("connection refused", 12),
    ]  # fmt: skip


@pytest.mark.parametrize("verbosity", ["error", "debug"])
def test_what_grpc_says_is_logged_at_its_debug_level_only(monkeypatch: pytest.MonkeyPatch, verbosity: str) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", verbosity)

    async def work() -> None:
        lines: list[dict[str, Any]] = []

        @contextlib.asynccontextmanager
        async def channel(*_: Any, **__: Any) -> AsyncIterator[Any]:
            async def describe(request: bytes, timeout: float) -> bytes:
                raise failure("UNAVAILABLE", REFUSED)

            yield SimpleNamespace(unary_unary=lambda _: describe)

        monkeypatch.setattr(connection, "open_channel", channel)
        monkeypatch.setattr(connection, "on_stop_signals", lambda stop: None)
        options = JoinOptions("127.0.0.1:9", None, 0, patience_s=30.0)
        loop = asyncio.get_running_loop()
        joining = FederatorConnection(options, lambda event, **details: lines.append(details), loop.time)
        with pytest.raises(
            ProtocolError, match=r"with 127\.0\.0\.1:9 for 30 s \(--patience\): connection refused: nothing"
        ):
            await joining.take_part(lambda header: None)  # type: ignore[arg-type, return-value]
        assert len([line for line in lines if line.get("reason", "").startswith("connection refused")]) == 1
        assert any(line.get("details") == REFUSED for line in lines) == (verbosity == "debug")

    run(work(), 120.0)


def test_a_federator_that_is_not_believed_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        stream = Stream()
        participant = Listener(stream, b"")
        stream.down.put_nowait(b"1")

        def refuse(messages: list[bytes]) -> bytes:
            raise LedgerError("rewritten")

        participant.receive_all = refuse  # type: ignore[method-assign]
        with pytest.raises(LedgerError, match="rewritten"):
            await connected(stream, participant, monkeypatch)
        assert stream.cancelled

    run(work())


@pytest.mark.parametrize("moment", ["warm_up", "hello", "receive_all"])
def test_a_signal_stops_a_client_at_any_moment_and_its_weights_are_saved(moment: str) -> None:
    """Over gRPC itself: a call that is cancelled before it has begun never ends a write to it."""
    calls: list[str] = []

    async def rounds(requests: Any, context: Any) -> None:
        await context.read()
        await context.write(b"message")
        await context.read()

    async def describe(request: bytes, context: Any) -> bytes:
        return opening_of(make_header())

    async def work() -> None:
        server = grpc.aio.server()
        handlers = {"Describe": grpc.unary_unary_rpc_method_handler(describe),
                    "Rounds": grpc.stream_stream_rpc_method_handler(rounds)}  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        joining = FederatorConnection(JoinOptions(address, None, 0), log_nothing)

        def called(name: str, result: Any) -> Any:
            def call(*_: Any) -> Any:
                calls.append(name)
                if name == moment:
                    joining._stop.set()
                return result

            return call

        results = {"warm_up": None, "hello": b"hello", "receive_all": b"answer", "save": None}
        participant: Any = SimpleNamespace(
            client=SimpleNamespace(next_round=0), ended=False, outbox=[],
            **{name: called(name, result) for name, result in results.items()},
        )  # fmt: skip
        taking_part = asyncio.ensure_future(joining.take_part(lambda header: participant))
        assert (await asyncio.wait([taking_part], timeout=60))[0], "the client goes on"
        assert await taking_part is participant
        await server.stop(None)

    asyncio.run(work())
    assert calls[-1] == "save" and moment in calls


def test_what_a_federator_says_can_not_look_like_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    make_log()("waiting", reason="UNAVAILABLE: wait\n2026-01-01T00:00:00.000 ended rounds=9 chain=00\x1b[2J")
    (line,) = capsys.readouterr().err.splitlines()
    assert r"wait\n2026" in line and r"\x1b[2J" in line
