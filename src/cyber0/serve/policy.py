"""How a round runs, whatever carries its messages: deadlines, misses, digests, bars. No I/O, and no clock of its own.

    policy = RoundPolicy(federator, rounds=100, deadline_s=60.0)
    policy.open_round(now)
    policy.arrive(client, now)                  # it can answer the open round now
    policy.take_report(client, frame)           # ACCEPTED, or the reason why it does not count
    outcome = policy.decide(now)                # None until the round is complete or its deadline has passed

A round is decided when everybody it waits for has answered, with at least the reports that the rule needs of all who
were invited, or at its deadline. The deadline counts down only while that many reports are possible: no round is spent
while too few clients are present. A client that misses a deadline is not waited for in the next 2 rounds, after a
second miss in the next 4, and so on; its reports still count, and 32 of them in time make up for one miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cyber0.errors import ProtocolError
from cyber0.ledger.record import Decision
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import decode_report, payload_bytes
from cyber0.serve.figures import Figures, Traffic
from cyber0.serve.operations import EventLog, log_nothing

MAX_MISSES = 10  # the longest time that a silent client is not waited for is 2^10 rounds
FORGIVEN_AFTER = 32  # reports in time make up for one miss
MAX_REPLAYS = 3  # of the whole ledger, which a client can cause by claiming other weights
BARRED_SECONDS = 30.0  # for which a client that was cut off for what it sent stays out

ACCEPTED = "accepted"
_UNUSABLE = frozenset({"truncated", "malformed", "not_finite"})  # whoever sends this in a round is not waited for


class RoundOutcome(NamedTuple):
    """How a round ended."""

    decision: Decision
    differing: list[int]
    """Clients whose weights differ from those of the majority."""


class RoundPolicy:
    """Drives a federator's rounds; a transport tells it who is present and what they send, and when.

    Args:
        federator: The state machine; its ledger says which round comes next.
        rounds: How many rounds the run has.
        deadline_s: How long a round waits for reports.
        digest_every: Every so many rounds reports carry a digest of the weights; 0: never.
        log: Called as log("event", key=value, ...).
    """

    def __init__(
        self,
        federator: Federator,
        *,
        rounds: int,
        deadline_s: float,
        digest_every: int = 0,
        log: EventLog = log_nothing,
    ) -> None:
        self.federator, self.rounds = federator, rounds
        self.deadline_s, self.digest_every = deadline_s, digest_every
        self.figures = Figures([Traffic() for _ in range(federator.clients)])
        self.present = np.zeros(federator.clients, np.bool_)
        """Who can answer the open round."""
        self.due: float | None = None
        """When the open round's deadline passes; None while too few clients are present for a decision."""
        self.to_replay: set[int] = set()
        """Clients that must replay the ledger from w0 before their next report; the transport removes them."""
        self.payload = payload_bytes(federator.scalars, federator.codec)
        self.report_bytes = 8 + self.payload
        self.log = log
        self._misses = np.zeros(federator.clients, np.int64)
        self._in_time = np.zeros(federator.clients, np.int64)
        self._excused_until = np.zeros(federator.clients, np.int64)
        self._replays: Counter[int] = Counter()
        self._digests: dict[int, bytes] = {}
        self._barred: dict[tuple[int, int], float] = {}
        self._opened_at = 0.0

    @property
    def finished(self) -> bool:
        """Whether the last round is decided."""
        return self.federator.ledger.next_round >= self.rounds

    @property
    def complete(self) -> bool:
        """Whether a round is open that needs to wait no longer."""
        return self.federator.complete

    def overdue(self, now: float) -> bool:
        """Return whether the open round's deadline has passed."""
        return self.due is not None and now >= self.due

    # Who is waited for.

    def arrive(self, client: int, now: float) -> None:
        """The client knows of the open round and can answer it: wait for it, unless it is excused for its misses."""
        self.present[client] = True
        if self.federator.round is not None and not self.is_excused(client):
            self.federator.wait_for(client)
        self._update_deadline(now)

    def depart(self, client: int, now: float) -> None:
        """The client can't answer any more: do not wait for it."""
        self.present[client] = False
        self.excuse(client)
        self._update_deadline(now)

    def excuse(self, client: int) -> None:
        """Do not wait for the client in the open round; if it reports all the same, its report counts."""
        if self.federator.round is not None:
            self.federator.excuse(client)

    def set_present(self, clients: Iterable[int], now: float) -> None:
        """These clients and no others can answer; who is waited for stays as it is."""
        self.present[:] = False
        self.present[list(clients)] = True
        self._update_deadline(now)

    def is_excused(self, client: int) -> bool:
        """Return whether the client is not waited for because it missed deadlines."""
        return bool(self._excused_until[client] > self.federator.ledger.next_round)

    def bar(self, role: int, client: int, now: float) -> None:
        """Keep a participant out for a while."""
        self._barred[role, client] = now + BARRED_SECONDS

    def is_barred(self, role: int, client: int, now: float) -> bool:
        """Return whether a participant is kept out."""
        return now < self._barred.get((role, client), 0.0)

    # Rounds.

    def open_round(self, now: float) -> None:
        """Open the next round, and wait for those who are present and not excused."""
        number = self.federator.open_round().round
        self._digests.clear()
        self._opened_at, self.due = now, None
        self.federator.wait_only_for(self.present & (self._excused_until <= number))
        self._update_deadline(now)

    def take_report(self, client: int, frame: Any) -> str:
        """Count a client's report, whatever it is made of; return ACCEPTED, or the reason why it does not count."""
        federator = self.federator
        try:
            report = decode_report(frame, client, federator.scalars, federator.codec)
        except ProtocolError:
            reason = "truncated" if isinstance(frame, bytes) and len(frame) < self.report_bytes else "malformed"
        else:
            receipt = federator.receive(report)
            if receipt is Receipt.ACCEPTED:
                self._accepted(client, report.digest)
                return ACCEPTED
            reason = receipt.name.lower()
        self.figures.refused[reason] += 1
        if reason in _UNUSABLE:
            self.excuse(client)
        return reason

    def _accepted(self, client: int, digest: bytes) -> None:
        traffic = self.figures.clients[client]
        traffic.reports += 1
        traffic.payload_in += self.payload
        if digest:
            self._digests[client] = digest
        if self._misses[client]:
            self._in_time[client] += 1
            if self._in_time[client] >= FORGIVEN_AFTER:
                self._in_time[client] = 0
                self._misses[client] -= 1

    def decide(self, now: float, *, force: bool = False) -> RoundOutcome | None:
        """Decide or abandon the round if it is complete, if its deadline has passed, or if `force`."""
        if not self.complete and self.overdue(now):
            self._count_misses()
            force = True
        decision = self.federator.decide(deadline=force)
        if decision is None:
            return None
        self.due = None
        self.figures.seconds["collect"] += now - self._opened_at
        if decision.values is None:
            self.figures.abandoned += 1
            self.log("abandoned", round=decision.round)
        else:
            self.figures.decided += 1
        due = digest_due(decision.round, self.digest_every)
        return RoundOutcome(decision, self._compare_digests(decision.round) if due else [])

    def _count_misses(self) -> None:
        federator = self.federator
        silent, number = federator.silent().tolist(), federator.round
        assert number is not None
        for client in silent:
            self._misses[client] = min(self._misses[client] + 1, MAX_MISSES)
            self._excused_until[client] = number + 1 + (1 << int(self._misses[client]))
            self.figures.clients[client].misses += 1
        self.log("deadline", round=number, answered=federator.answered, silent=silent[:20])

    def _compare_digests(self, number: int) -> list[int]:
        differing = outside_majority(self._digests)
        if differing:
            self.figures.alarms += 1
            self.log("digests_differ", round=number, clients=differing[:20], compared=len(self._digests))
        for client in differing:
            if self._replays[client] < MAX_REPLAYS:
                self._replays[client] += 1
                self.to_replay.add(client)
                self.present[client] = False
        return differing

    def _update_deadline(self, now: float) -> None:
        """Count down while enough reports are possible."""
        if not self._can_decide():
            self.due = None
        elif self.due is None:
            self.due = now + self.deadline_s

    def _can_decide(self) -> bool:
        federator = self.federator
        if federator.round is None:
            return False
        if federator.invited_count < federator.clients:  # others may be invited to the next round
            return int(np.count_nonzero(self.present)) >= federator.required
        return federator.answered + federator.possible(self.present) >= federator.required


def digest_due(number: int, every: int) -> bool:
    """Return whether reports of this round carry a digest of the weights."""
    return every > 0 and number > 0 and number % every == 0


def outside_majority(digests: dict[int, bytes]) -> list[int]:
    """Return the clients whose digest differs from the one that more than half have; none if there is no such one."""
    if not digests:
        return []
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return []
    return sorted(client for client, own in digests.items() if own != digest)
