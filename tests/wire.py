"""Participants without a model, for tests of the network: they say hello and answer every round with some numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0 import aggregate
from cyber0.ledger import Header, LayoutEntry, Ledger, first_chain, next_chain, read_records
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.ledger.record import ABANDONED, DECIDED
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import (
    ENDED,
    OPENED,
    RECORDS,
    VOTER,
    Hello,
    Report,
    decode_decision,
    decode_opened,
    encode_hello,
    encode_report,
    kind_of,
)
from cyber0.serve.admission import Cut, Identity
from cyber0.serve.hub import Hub
from cyber0.serve.operations import EventLog, log_nothing
from cyber0.serve.policy import RoundPolicy

K = 3
WEIGHTS, REST = "11" * 32, "22" * 32


def make_header(clients: int = 4, **changes: Any) -> Header:
    values: dict[str, Any] = {
        "seed": 1, "layout": (LayoutEntry("w", (5,), "float32", 0),), "distribution": "gaussian", "k": K,
        "local_epochs": 1, "mu": 1e-3, "estimator": "two_point", "lr": 0.1, "lr_schedule": "constant",
        "projection_radius": None, "weights_digest": WEIGHTS, "rest_digest": REST, "clients": clients,
    }  # fmt: skip
    return Header(**{**values, **changes})


def make_hub(
    clients: int = 4, rounds: int = 5, *, beta: float = 0.25, path: Path | None = None, deadline_s: float = 30.0,
    digest_every: int = 0, quorum: int = 0, ledger: Ledger | None = None, log: EventLog = log_nothing,
) -> Hub:  # fmt: skip
    if ledger is None:
        ledger = Ledger.create(path, make_header(clients), durability="none")
    rule = aggregate.make("trimmed_mean", beta)
    federator = Federator(ledger, rule, clients, lr_at=lambda t: 0.1, quorum=quorum)
    policy = RoundPolicy(federator, rounds=rounds, deadline_s=deadline_s, digest_every=digest_every, log=log)
    return Hub(policy, clock=now)


def now() -> float:
    """Return the running loop's time, which may be a virtual one."""
    return asyncio.get_running_loop().time()


def hello_of(header: Header, client: int, **changes: Any) -> bytes:
    run = first_chain(header)
    values: dict[str, Any] = {
        "role": VOTER, "client": client, "run": run, "weights_digest": bytes.fromhex(header.weights_digest),
        "rest_digest": bytes.fromhex(header.rest_digest), "round": 0, "chain": run[:CHAIN_BYTES],
    }  # fmt: skip
    return encode_hello(Hello(**{**values, **changes}))


class Pipe:
    """Both ends of a stream in memory. A message is taken by the other side before the next can be written."""

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity
        self.up: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.down: asyncio.Queue[bytes] = asyncio.Queue(1)

    async def read(self) -> bytes | None:
        return await self.up.get()

    async def write(self, message: bytes) -> None:
        await self.down.put(message)

    def wire(self) -> tuple[int, int] | None:
        return None


Answer = Callable[[int, NDArray[np.float32]], bytes | list[bytes] | None]


class Voter:
    """Keeps up with the ledger and answers every round."""

    def __init__(self, header: Header, client: int, answer: Answer | None = None) -> None:
        self.header, self.client = header, client
        self.round, self.chain = 0, first_chain(header)
        self.ended = False
        self.rounds = 1 << 32
        """How many rounds the run has: who answers the last decision may find the stream closed."""
        self.replays = 0
        self.chunks = 0
        self.numbers: list[NDArray[np.float32] | None] = []
        self.digest = b""
        self._answer = answer or self.honest

    def hello(self) -> bytes:
        return hello_of(self.header, self.client, round=self.round, chain=self.chain[:CHAIN_BYTES])

    def honest(self, round: int, values: NDArray[np.float32]) -> bytes:
        return encode_report(Report(self.client, round, values, self.digest))

    def take(self, message: bytes) -> list[bytes]:
        """Return what to send in answer to a message."""
        kind = kind_of(message)
        if kind == RECORDS:
            self.chunks += 1
            for record in read_records(self.header, message[1:], self.round, self.chain):
                self._apply(record.values, record.chain)
            return []
        if kind in (DECIDED, ABANDONED):
            decision = decode_decision(message, self.header.scalars)
            assert decision.round == self.round
            self._apply(decision.values, next_chain(self.chain, decision))
        elif kind == OPENED:
            opened = decode_opened(message)
            assert (opened.round, opened.chain) == (self.round, self.chain[:CHAIN_BYTES])
        elif kind == ENDED:
            self.ended = True
            return []
        else:
            self.replays += 1
            self.round, self.chain, self.numbers = 0, first_chain(self.header), []
            return []
        if self.round >= self.rounds:
            return []
        answer = self._answer(self.round, np.full(K, self.client + self.round, np.float32))
        return [] if answer is None else answer if isinstance(answer, list) else [answer]

    def _apply(self, values: NDArray[np.float32] | None, chain: bytes) -> None:
        self.numbers.append(values)
        self.round, self.chain = self.round + 1, chain


async def run_voter(hub: Hub, voter: Voter, pipe: Pipe | None = None) -> Cut | None:
    """Let a voter speak with the hub until its stream ends; return why it was cut off, if it was."""
    pipe = pipe or Pipe()
    serving = asyncio.ensure_future(hub.serve(pipe))
    await pipe.up.put(voter.hello())

    async def speak() -> None:
        while not voter.ended:
            for message in voter.take(await pipe.down.get()):
                await pipe.up.put(message)

    speaking = asyncio.ensure_future(speak())
    try:
        await asyncio.wait([serving, speaking], return_when=asyncio.FIRST_COMPLETED)
        if speaking.done():
            speaking.result()
            await pipe.up.put(None)
        await serving
    except Cut as cut:
        return cut
    finally:
        speaking.cancel()
        serving.cancel()
    return None


async def answer_newest(
    hub: Hub, client: int, delay: Callable[[int], float], change: Callable[[bytes], bytes] = lambda answer: answer
) -> None:
    """Answer the newest round that was announced, over and over, each time after a while."""
    pipe, voter, inbox, came = Pipe(), Voter(hub.ledger.header, client), list[bytes](), asyncio.Event()
    serving = asyncio.ensure_future(hub.serve(pipe))
    await pipe.up.put(voter.hello())

    async def read() -> None:
        while True:
            inbox.append(await pipe.down.get())
            came.set()

    reading = asyncio.ensure_future(read())
    try:
        while not (serving.done() or voter.ended):
            await came.wait()
            came.clear()
            answers: list[bytes] = []
            while inbox:
                answers = voter.take(inbox.pop(0))
            if answers:
                await asyncio.sleep(delay(voter.round))
                await pipe.up.put(change(answers[0]))
    finally:
        reading.cancel()
        serving.cancel()
        await asyncio.gather(serving, reading, return_exceptions=True)
