"""What the hub knows of a stream: who is there, how far it has come, why it was cut off; and what is counted."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cyber0.protocol.messages import FOLLOWER, VOTER

ROLES = {VOTER: "client", FOLLOWER: "follower"}

Log = Callable[..., None]

_FINGERPRINT = re.compile("[0-9a-f]{64}")


class Cut(Exception):
    """A stream is ended by the federator, for a reason that is counted. `status` names a gRPC status code."""

    def __init__(self, reason: str, status: str, text: str, *, barred: bool = False) -> None:
        super().__init__(text)
        self.reason, self.status, self.text, self.barred = reason, status, text, barred


@dataclass(frozen=True)
class Identity:
    """Who is at the other end, as proven by its certificate."""

    role: int
    client: int
    fingerprint: str = ""


class Connection(Protocol):
    """A connection to one participant."""

    identity: Identity | None
    """None: nothing is proven, and what the hello says is believed."""

    @property
    def read(self) -> Callable[[], Awaitable[Any]]:
        """Return the next message, something else than bytes at the end."""
        ...

    @property
    def write(self) -> Callable[[bytes], Awaitable[None]]:
        """Send a message; returns when the network can take another."""
        ...

    def wire(self) -> tuple[int, int] | None:
        """Return the bytes that came and went on the connection since the last call; None: it can't be said."""
        ...


@dataclass(slots=True)
class Traffic:
    """What one client has cost: the numbers alone, the messages around them, and all bytes of its connections."""

    reports: int = 0
    misses: int = 0
    payload_in: int = 0
    payload_out: int = 0
    message_in: int = 0
    message_out: int = 0
    wire_in: int = 0
    wire_out: int = 0


@dataclass(eq=False)
class Session:
    """One participant's stream."""

    role: int
    client: int
    fingerprint: str
    sent: int
    """How many rounds the participant has been sent."""
    stop: asyncio.Future[Cut]
    traffic: Traffic
    stream: Connection
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    told: bool = False
    """Whether it knows that the round after those is open."""
    voted: bool = False
    restart: bool = False
    ended: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the half that writes."""
    frames: int = 0
    digest: bytes = b""
    evaluated: int = -1
    """After how many rounds a follower has evaluated the model last."""


class Clock:
    """A deadline that begins anew with every round.

    One timer serves many rounds: to make one and to cancel it costs as much as to take a report.
    """

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._seconds, self._ring = seconds, ring
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Whether it will ring."""
        return self._due is not None

    def start(self) -> None:
        """Begin to count down, if it does not already."""
        if self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + self._seconds
            if self._timer is None:
                self._timer = loop.call_at(self._due, self._look)

    def stop(self) -> None:
        """Do not ring."""
        self._due = None

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:  # it was started anew since the timer was made
            self._timer = loop.call_at(self._due, self._look)
            return
        self._due = None
        self._ring()


@dataclass
class Figures:
    """What is counted for whoever watches."""

    clients: list[Traffic] = field(default_factory=list)
    """By the clients' numbers."""
    others: Traffic = field(default_factory=Traffic)
    """Of followers, and of streams that were refused."""
    decided: int = 0
    abandoned: int = 0
    alarms: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"collect": 0.0, "decide": 0.0, "announce": 0.0})

    @property
    def deadline_misses(self) -> int:
        """How many reports were waited for until a deadline, in vain."""
        return self.total("misses")

    def total(self, name: str) -> int:
        """Add up one figure of all clients."""
        return sum(getattr(client, name) for client in self.clients)

    def a_round(self, kind: str) -> tuple[float, float] | None:
        """Return what a client sends and gets for each of its reports, in bytes of that kind; None: not known."""
        reports, up, down = self.total("reports"), self.total(f"{kind}_in"), self.total(f"{kind}_out")
        return (up / reports, down / reports) if reports and up and down else None


def digest_due(number: int, every: int) -> bool:
    """Tell whether reports of this round carry a digest of the weights."""
    return every > 0 and number > 0 and number % every == 0


def outside_majority(digests: dict[int, bytes]) -> list[int]:
    """Return the clients whose digest differs from the one that more than half have; none if there is no such one."""
    if not digests:
        return []
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return []
    return sorted(client for client, found in digests.items() if found != digest)


def read_revoked(text: str) -> frozenset[str]:
    """Return the client numbers and certificate fingerprints (SHA-256 in hexadecimal) of a list, one a line."""
    lines = (line.partition("#")[0].strip().lower().replace(":", "") for line in text.splitlines())
    return frozenset(str(int(line)) if line.isdecimal() and len(line) < 20 else line for line in lines if line)


def unknown_revocations(revoked: frozenset[str], clients: int) -> set[str]:
    """Return the entries of a list that can be nobody's: neither a client's number nor a fingerprint."""
    numbers = {str(client) for client in range(clients)}
    return {entry for entry in revoked if entry not in numbers and not _FINGERPRINT.fullmatch(entry)}


def name_of(role: int, number: int) -> str:
    return f"{ROLES.get(role, 'nobody')} {number}"


def revocation() -> Cut:
    return Cut("revoked", "PERMISSION_DENIED", "this certificate has been revoked")
