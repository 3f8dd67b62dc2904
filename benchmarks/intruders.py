"""Participants that misbehave over mutual TLS, for siege.py: late, coming and going, slow, greedy, or silent ones.

python benchmarks/intruders.py PORT CERTS HEADER NAME STREAMS    reads the ledger again and again until stdin ends
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from serve import Client

from cyber0.ledger import Header, Ledger, first_chain
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.protocol.messages import FOLLOWER, OPENED, RECORDS, VOTER, Hello, encode_hello
from cyber0.serve import tls as certificates
from cyber0.serve.transport import SERVICE, open_channel

AGAIN_S = 0.2  # before whoever was cut off tries again
_LARGEST_MESSAGE = 1 << 20  # bytes
ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)


def first_hello(header: Header, name: str) -> bytes:
    """Return the hello of a participant that has seen nothing yet; `name` is as in "client-7"."""
    role, number = name.split("-")
    run = first_chain(header)
    digests = bytes.fromhex(header.weights_digest), bytes.fromhex(header.rest_digest)
    code = VOTER if role == "client" else FOLLOWER
    return encode_hello(Hello(code, int(number), run, *digests, 0, run[:CHAIN_BYTES]))


class Door:
    """A federator's address, and the certificates to come with."""

    def __init__(self, port: int, certs: Path) -> None:
        self.port, self._certs = port, certs

    def channel(self, name: str) -> Any:
        """Return a connection of one's own."""
        return open_channel(f"localhost:{self.port}", certificates.load(self._certs, name), _LARGEST_MESSAGE)

    @contextlib.asynccontextmanager
    async def stream(self, name: str) -> AsyncIterator[Any]:
        """Open a stream that has said nothing yet."""
        async with self.channel(name) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Rounds")()
            try:
                yield call
            finally:
                call.cancel()


class Session:
    """A client's stream, read as fast as messages come; `report` answers the newest announcement."""

    def __init__(self, call: Any, client: Client) -> None:
        self._call, self._client = call, client
        self.report: bytes | None = None
        self.announced = asyncio.Event()
        """A round was announced that has not been answered."""

    @property
    def round(self) -> int:
        """The newest round."""
        return self._client.round

    async def read(self) -> None:
        """Read until the stream ends."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self.report = self._client.take(message)
            if self.report is not None:
                self.announced.set()

    async def next_round(self) -> int:
        """Wait until a round is open that was not answered, and return it."""
        await self.announced.wait()
        return self.round

    async def answer(self) -> None:
        """Answer the newest announcement."""
        if self.announced.is_set() and self.report is not None:
            self.announced.clear()
            await self.send(self.report)

    async def send(self, report: bytes) -> None:
        """Send a report, on whichever round it is."""
        await self._call.write(report)


Conduct = Callable[[Session], Awaitable[None]]
"""What a client does in a stream; when it returns, the client leaves, and comes back."""


async def intrude(door: Door, client: Client, conduct: Conduct) -> None:
    """Be a client of that conduct, for ever; whoever is cut off comes back."""
    while True:
        with contextlib.suppress(*ENDED):
            async with door.stream(f"client-{client.number}") as call:
                session = Session(call, client)
                await call.write(client.hello())
                reading, acting = asyncio.ensure_future(session.read()), asyncio.ensure_future(conduct(session))
                try:
                    await asyncio.wait((reading, acting), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    left = acting.done()
                    for task in (reading, acting):
                        task.cancel()
                    await asyncio.gather(reading, acting, return_exceptions=True)
                if left:
                    continue
        await asyncio.sleep(AGAIN_S)


# What a client with a vote does to the pace of the others.


def late(after_s: float) -> Conduct:
    """Answer so long after the announcement."""

    async def conduct(session: Session) -> None:
        while True:
            await session.next_round()
            await asyncio.sleep(after_s)
            await session.answer()

    return conduct


def leaving(after_s: float) -> Conduct:
    """Hold a round open for so long, and leave."""

    async def conduct(session: Session) -> None:
        await session.next_round()
        await asyncio.sleep(after_s)

    return conduct


async def silent(session: Session) -> None:
    """Never answer."""
    await asyncio.Event().wait()


def adaptive(longest_s: float) -> Conduct:
    """Answer as late as still counts: earlier after a round that was decided without it, later after others."""
    delay = longest_s

    async def conduct(session: Session) -> None:
        nonlocal delay
        while True:
            number = await session.next_round()
            end = time.monotonic() + delay
            while time.monotonic() < end and session.round == number:
                await asyncio.sleep(min(1e-3, max(0.0, end - time.monotonic())))
            missed = session.round != number
            delay = max(1e-4, delay * 0.7) if missed else min(longest_s, delay * 1.1)
            await session.answer()

    return conduct


def relapsing(after_s: float, phase_s: float) -> Conduct:
    """Answer at once for a while, late for as long, and so on."""
    begin = time.monotonic()

    async def conduct(session: Session) -> None:
        while True:
            await session.next_round()
            if int((time.monotonic() - begin) / phase_s) % 2:
                await asyncio.sleep(after_s)
            await session.answer()

    return conduct


async def admitted(call: Any, hello: bytes) -> bool:
    """Say hello, and return whether that was the beginning of a stream."""
    with contextlib.suppress(*ENDED):
        await call.write(hello)
        message = await call.read()
        return message is not grpc.aio.EOF and message[0] in (OPENED, RECORDS)
    return False


async def crowd(
    door: Door, header: Header, names: list[str], calls: contextlib.AsyncExitStack, patience_s: float
) -> int:
    """Have all of these join, each over a connection of its own, and return how many got in."""

    async def enter(name: str) -> bool:
        call = await calls.enter_async_context(door.stream(name))
        try:
            async with asyncio.timeout(patience_s):
                return await admitted(call, first_hello(header, name))
        except TimeoutError:
            return False

    return sum(await asyncio.gather(*map(enter, names)))


@contextlib.asynccontextmanager
async def without_hello(door: Door, name: str, streams: int, each: int = 8) -> AsyncIterator[list[Any]]:
    """Open streams that say nothing, `each` to a connection; yields them."""
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(-(-streams // each)):
            channel = await stack.enter_async_context(door.channel(name))
            opened = [channel.stream_stream(f"/{SERVICE}/Rounds")() for _ in range(min(each, streams - len(calls)))]
            calls += opened
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await channel.channel_ready()
        yield calls


@contextlib.asynccontextmanager
async def mute_connections(port: int, count: int) -> AsyncIterator[None]:
    """Hold so many TCP connections that never speak; those that are broken off come back."""
    opened = 0
    enough = asyncio.Event()

    async def hold() -> None:
        nonlocal opened
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("localhost", port)
                opened += 1
                if opened >= count:
                    enough.set()
                try:
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(AGAIN_S)

    holding = [asyncio.ensure_future(hold()) for _ in range(count)]
    try:
        await enough.wait()
        yield
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


async def reread(door: Door, header: Header, name: str, streams: int) -> None:
    """Read the whole ledger over several streams, again and again, until stdin ends; print the bytes."""
    total = [0]

    async def read() -> None:
        while True:
            with contextlib.suppress(*ENDED):
                async with door.stream(name) as call:
                    await call.write(first_hello(header, name))
                    while (message := await call.read()) is not grpc.aio.EOF and message[0] == RECORDS:
                        total[0] += len(message)
                    if message is not grpc.aio.EOF:
                        continue
            await asyncio.sleep(AGAIN_S)

    readers = [asyncio.ensure_future(read()) for _ in range(streams)]
    await asyncio.to_thread(sys.stdin.read)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    print(total[0], flush=True)


if __name__ == "__main__":
    port, certs, header, name, streams = sys.argv[1:]
    asyncio.run(reread(Door(int(port), Path(certs)), Ledger.open(header).header, name, int(streams)))
