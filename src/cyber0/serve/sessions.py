"""What the hub knows of a stream: who is at the other end, how far it has come; and the timer of a round's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cyber0.serve.admission import ROLE_NAMES, Cut, Identity
from cyber0.serve.figures import Traffic
from cyber0.storage.disk import Clock

HELD_UP_SECONDS = (
    0.05  # by which a timer is late if the process stood still; then what has come meanwhile is read first
)


class Connection(Protocol):
    """A connection to one participant."""

    identity: Identity | None
    """None: nothing is proven, and what the hello says is believed."""

    @property
    def read(self) -> Callable[[], Awaitable[Any]]:
        """Return the next message; at the end something that is not bytes."""
        ...

    @property
    def write(self) -> Callable[[bytes], Awaitable[None]]:
        """Send a message; returns when the network can take another."""
        ...

    def wire(self) -> tuple[int, int] | None:
        """Return the bytes received and sent on the connection since the last call; None if they are not known."""
        ...


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
    connection: Connection
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    announced: bool = False
    """Whether it knows that the round after those is open."""
    voted: bool = False
    ended: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the half that writes."""
    frames: int = 0
    """How many messages it has sent in the open round that answer no round it was told of."""
    evaluated: int = -1
    """After how many rounds a follower has evaluated the model last."""

    @property
    def key(self) -> str:
        """What its use of the federator is counted under: its certificate, or without TLS what its hello says."""
        return self.fingerprint or f"{ROLE_NAMES[self.role]} {self.client}"


class DeadlineTimer:
    """Calls `ring` when a deadline passes.

    One timer serves many rounds: to create and cancel one costs as much as to take a report. It is replaced only if the
    deadline moves forward.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock, self._ring = clock, ring
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0

    def set(self, due: float | None) -> None:
        """Ring at this time and no other; None: do not ring."""
        self._due = due
        if due is not None and (self._timer is None or due < self._wakes_at):
            self._schedule(due)

    def close(self) -> None:
        """Stop for good."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, at: float, held_up: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = at
        delay = max(0.0, at - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._check, held_up)

    def _check(self, held_up: bool) -> None:
        self._timer = None
        if self._due is None:
            return
        now = self._clock()
        if now < self._due:  # it was set anew since the timer was made
            self._schedule(self._due)
        elif not held_up and now - self._due > HELD_UP_SECONDS:
            self._schedule(now + min(now - self._due, 1.0), held_up=True)
        else:
            self._due = None
            self._ring()
