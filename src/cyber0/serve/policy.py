"""How a round runs, whatever carries its messages: how long it waits and for whom, digests, bars. No I/O, no clock.

    policy = RoundPolicy(federator, rounds=100, deadline_s=60.0)
    policy.open_round(now)
    policy.arrive(client, now)                  # it can answer the open round now
    policy.take_report(client, frame, now)      # ACCEPTED, LATE, or the reason why it does not count
    outcome = policy.decide(now)                # None until the round is complete or waits no longer

A round is decided when everybody it waits for has answered, with at least the reports that the rule needs of all who
were invited. Otherwise it ends

    at the deadline             while fewer reports than `enough` are in: all but b and a quarter of those who are
                                waited for, and never fewer than the rule needs
    after 1.5 times the time    that those reports took. No b clients can delay them, also beside a quarter of all that
                                are slow by themselves
    later than that             as far as the budget allows (`pace.WaitBudget`), for clients that are slow: up to 1.25
                                times as long as their last answer took, which may be beyond the deadline; for one that
                                has not answered yet until the deadline; for all a little, since messages take time

The budget earns a third of the time that rounds take, so that slow, silent and hostile clients together make a run at
most 1.5 * 4/3 = 2 times slower than those reports allow, once the budget's first minute is used up.

A client that was not waited for long enough is `behind`: it works on a decided round, or on one that can't wait for it.
Nobody waits for it, and its reports count if they come in time all the same, until it shows life: an answer to whatever
round it knows of means that it takes up the newest one now. Then it is waited for, if the budget allows. A client that
never answers is expected to need twice as long as it was waited for, so that silence, and leaving a round that is open,
needs ever more of the budget.

The deadline counts down only while enough reports for a decision are possible: no round is spent while too few clients
are present.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cyber0.errors import ProtocolError
from cyber0.ledger.record import Decision
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import Report, decode_report, payload_bytes
from cyber0.serve.figures import Figures, Traffic
from cyber0.serve.operations import EventLog, log_nothing
from cyber0.serve.pace import STORED_SECONDS, ResponseTimes, WaitBudget

FREE_FACTOR = 1.5  # times what enough reports took, a round waits for the others without using the budget
SLACK_FACTOR = 1.25  # times what a client's last answer took, it is waited for
LONGEST_WAIT = 4  # deadlines: no client is waited for any longer, whatever the budget holds
JITTER_SECONDS = 0.1  # for which clients that are usually fast are waited for
MAX_REPLAYS = 3  # of the whole ledger, which a client can cause by claiming other weights
LOG_SECONDS = 1.0  # between two lines about clients that were waited for in vain
BARRED_SECONDS = 30.0  # for which a client that was cut off for what it sent stays out

ACCEPTED = "accepted"
LATE = "late"
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
        deadline_s: How long a round waits for enough reports.
        digest_every: Every so many rounds reports carry a digest of the weights; 0: never.
        jitter_s: By how much an honest client's response time varies because of how messages are carried.
        log: Called as log("event", key=value, ...).
    """

    def __init__(
        self,
        federator: Federator,
        *,
        rounds: int,
        deadline_s: float,
        digest_every: int = 0,
        jitter_s: float = JITTER_SECONDS,
        log: EventLog = log_nothing,
    ) -> None:
        self.federator, self.rounds = federator, rounds
        self.deadline_s, self.digest_every, self.jitter_s = deadline_s, digest_every, jitter_s
        self.figures = Figures([Traffic() for _ in range(federator.clients)])
        self.present = np.zeros(federator.clients, np.bool_)
        """Who can answer the open round."""
        self.due: float | None = None
        """When the open round waits no longer; None while too few clients are present for a decision."""
        self.budget = WaitBudget(federator.clients, deadline_s)
        self.response_times = ResponseTimes(federator.clients)
        self.to_replay: set[int] = set()
        """Clients that must replay the ledger from w0 before their next report; the transport removes them."""
        self.payload = payload_bytes(federator.scalars, federator.codec)
        self.report_bytes = 8 + self.payload
        self.log = log
        self._replays: Counter[int] = Counter()
        self._digests: dict[int, bytes] = {}
        self._barred: dict[tuple[int, int], float] = {}
        self._opened_at = 0.0
        self._began: float | None = None  # when the deadline began to count down
        self._enough = 0  # reports, from which on only the slowest are missing
        self._free_until: float | None = None  # waiting longer uses the budget; None until enough reports are in
        self._usual_seconds = np.inf  # that enough reports took in the last round
        self._slow: dict[int, float] = {}  # how long the open round has waited for clients by the budget, in seconds
        self._missed: list[int] = []  # clients that the open round has waited for in vain
        self._unlogged: set[int] = set()
        self._logged_expulsions = 0
        self._log_after = -np.inf

    @property
    def finished(self) -> bool:
        """Whether the last round is decided."""
        return self.federator.ledger.next_round >= self.rounds

    @property
    def complete(self) -> bool:
        """Whether a round is open that needs to wait no longer."""
        return self.federator.complete

    def overdue(self, now: float) -> bool:
        """Return whether the open round has waited long enough for those who are still silent."""
        return self.due is not None and now >= self.due

    # Who is waited for.

    def arrive(self, client: int, now: float) -> None:
        """The client is told of the open round and can answer it: wait for it, if it is not too slow."""
        self.present[client] = True
        self.response_times.tell(client, now)
        self._update_deadline(now)
        self._take_up(client, now)

    def depart(self, client: int, now: float) -> None:
        """The client can't answer any more: do not wait for it. If it was waited for, it has missed the round."""
        self.present[client] = False
        if self.federator.awaits(client):
            self._missed.append(client)
            self.excuse(client, now)
            self.response_times.leave_behind(client)
        self._update_deadline(now)

    def excuse(self, client: int, now: float) -> None:
        """Do not wait for the client in the open round any longer: nothing useful will come."""
        federator = self.federator
        if federator.awaits(client):
            self._give_up(client, now)
            self._enough = max(federator.required, self._enough - 1)
            if self._has_enough():
                self._end_free_wait(now)

    def set_present(self, clients: Iterable[int], now: float) -> None:
        """These clients and no others can answer; who is waited for stays as it is."""
        self.present[:] = False
        self.present[list(clients)] = True
        self._update_deadline(now)

    def is_behind(self, client: int) -> bool:
        """Return whether the client is not waited for until it shows life."""
        return bool(self.response_times.behind[client])

    def bar(self, role: int, client: int, now: float) -> None:
        """Keep a participant out for a while."""
        self._barred[role, client] = now + BARRED_SECONDS

    def is_barred(self, role: int, client: int, now: float) -> bool:
        """Return whether a participant is kept out."""
        return now < self._barred.get((role, client), 0.0)

    # Rounds.

    def open_round(self, now: float) -> None:
        """Open the next round, and wait for those who are present and not behind."""
        federator, times = self.federator, self.response_times
        for expulsion in federator.expulsions[self._logged_expulsions :]:  # after a restart, all of them
            self.log("expelled", client=expulsion.client, round=expulsion.round, evidence=expulsion.evidence.text)
        self._logged_expulsions = len(federator.expulsions)
        number = federator.open_round().round
        times.open_round(number, now)
        self._digests.clear()
        self._opened_at, self.due, self._began, self._free_until = now, None, None, None
        slow, self._slow = self._slow, {}
        for client in slow:
            if federator.may_answer(client) and not self._can_wait_for(client, now):
                self._leave_behind(client, now)
        federator.wait_only_for(self.present & ~times.behind)
        # Not the larger of the two: b clients that are just as slow as the slowest would count as those who are enough.
        spare = federator.tolerated + max(1, federator.missing // 4)
        self._enough = max(federator.required, federator.missing - spare)
        self._update_deadline(now)

    def take_report(self, client: int, frame: Any, now: float) -> str:
        """Count a client's report, whatever it is made of; return ACCEPTED, or the reason why it does not count."""
        federator = self.federator
        try:
            report = decode_report(frame, client, federator.scalars, federator.codec)
        except ProtocolError:
            reason = "truncated" if isinstance(frame, bytes) and len(frame) < self.report_bytes else "malformed"
        else:
            receipt = federator.receive(report)
            if receipt is Receipt.ACCEPTED:
                self._accepted(report, now)
                return ACCEPTED
            reason = LATE if self._is_late(report, receipt) else receipt.name.lower()
            if reason == LATE:
                self.response_times.answer(client, report.round, now)
                if self.present[client]:
                    self._take_up(client, now)
        self.figures.refused[reason] += 1
        if reason in _UNUSABLE:
            self.excuse(client, now)
        return reason

    def _accepted(self, report: Report, now: float) -> None:
        client, times = report.client, self.response_times
        traffic = self.figures.clients[client]
        traffic.reports += 1
        traffic.payload_in += self.payload
        if report.digest:
            self._digests[client] = report.digest
        times.answer(client, report.round, now)
        times.behind[client] = False
        if self._has_enough():
            self._end_free_wait(now)
        elif self._free_until is not None and now > self._free_until:
            self._slow[client] = now - self._free_until

    def _is_late(self, report: Report, receipt: Receipt) -> bool:
        """Return whether a report answers a decided round that its client may have worked on until now."""
        if receipt not in (Receipt.WRONG_ROUND, Receipt.NO_ROUND) or report.round >= self.federator.ledger.next_round:
            return False
        return self.response_times.may_be_late(report.client, report.round)

    def decide(self, now: float, *, force: bool = False) -> RoundOutcome | None:
        """Decide or abandon the round if it is complete, if it has waited long enough, or if `force`."""
        if not self.complete and self.overdue(now):
            self._stop_waiting(now)
            force = force or self.overdue(now)
        if self._missed and (force or self.complete):
            self._count_misses(now)
        decision = self.federator.decide(deadline=force)
        if decision is None:
            return None
        self.due = None
        self.figures.seconds["collect"] += now - self._opened_at
        self._settle_budget(now)
        if decision.values is None:
            self.figures.abandoned += 1
            self.log("abandoned", round=decision.round)
        else:
            self.figures.decided += 1
        due = digest_due(decision.round, self.digest_every)
        return RoundOutcome(decision, self._compare_digests(decision.round) if due else [])

    def _count_misses(self, now: float) -> None:
        federator = self.federator
        missed = {client for client in self._missed if federator.may_answer(client)}  # the others came back in time
        self._missed.clear()
        for client in missed:
            self.figures.clients[client].misses += 1
        self._unlogged |= missed
        if self._unlogged and now >= self._log_after:
            clients = sorted(self._unlogged)[:20]
            self.log("missed", round=federator.round, answered=federator.answered, clients=clients)
            self._unlogged.clear()
            self._log_after = now + LOG_SECONDS

    # How long to wait.

    def _has_enough(self) -> bool:
        """Return whether enough reports are in, which was not so before."""
        federator = self.federator
        return self._free_until is None and federator.answered >= self._enough and federator.has_indispensable

    def _end_free_wait(self, now: float) -> None:
        """Enough reports are in: from here on only the slowest are waited for."""
        began = now if self._began is None else self._began
        self._usual_seconds = now - began
        self._free_until = min(began + FREE_FACTOR * self._usual_seconds, began + self.deadline_s)
        self.due = self._free_until
        if not self.budget.has_debtors(now):  # else who is silent can be looked at later: most rounds end before
            self.due = max(self.due, min(now + self.jitter_s, self.due + self.budget.seconds))

    def _stop_waiting(self, now: float) -> None:
        """Give up the silent clients that can't be waited for any longer; `due` is then when to look again."""
        due, enough = now, self._free_until is not None
        for client in self.federator.silent().tolist():
            until = self._wait_until(client, now) if enough else now
            if until > now:
                due = max(due, until)
            elif enough and self._needed_until(client) > now:
                self.federator.excuse(client)  # it was not waited for as long as it is known to need
                self._leave_behind(client, now)
            else:
                self._missed.append(client)
                self._give_up(client, now)
                self.response_times.leave_behind(client)
        self.due = due

    def _give_up(self, client: int, now: float) -> None:
        """Do not wait for a client of which nothing has come."""
        self.federator.excuse(client)
        self.response_times.give_up(client, now)
        self._slow[client] = 0.0 if self._free_until is None else max(0.0, now - self._free_until)

    def _take_up(self, client: int, now: float) -> None:
        """The client takes up the open round now: wait for it, or leave it behind."""
        times, federator = self.response_times, self.federator
        if federator.may_answer(client) and not self._can_wait_for(client, now):
            federator.excuse(client)
            self._leave_behind(client, now)
            return
        times.behind[client] = False
        if federator.may_answer(client):
            federator.wait_for(client)
            if self._free_until is not None and self.due is not None:
                self.due = max(self.due, self._wait_until(client, now))

    def _leave_behind(self, client: int, now: float) -> None:
        self.response_times.leave_behind(client)
        self.budget.ask(client, now)

    def _can_wait_for(self, client: int, now: float) -> bool:
        return self._wait_until(client, now) > now

    def _needed_until(self, client: int) -> float:
        """Return when the client's answer should be in; the past if it is not known."""
        seconds = self.response_times.seconds[client]
        return -np.inf if seconds is None else self.response_times.told_at(client) + SLACK_FACTOR * seconds

    def _wait_until(self, client: int, now: float) -> float:
        """Return until when the open round can wait for a client; the past if that is not worth while."""
        began = now if self._began is None else self._began
        free_until = self._free_until
        if free_until is None:  # as far as can be foreseen
            free_until = max(now, began + FREE_FACTOR * self._usual_seconds)
        affordable = free_until + self.budget.available(client, now)
        seconds = self.response_times.seconds[client]
        if seconds is None:
            return min(affordable, began + self.deadline_s)
        told = self.response_times.told_at(client)
        needed = told + SLACK_FACTOR * seconds
        if needed > min(affordable, began + LONGEST_WAIT * self.deadline_s):
            return -np.inf
        return min(max(needed, told + seconds + self.jitter_s), affordable)

    def _settle_budget(self, now: float) -> None:
        """Charge the budget for what the round has waited beyond the free time, and credit it for the rest."""
        free_until = now if self._free_until is None else min(now, self._free_until)
        if now > free_until:
            self.budget.spend(now - free_until, self._slow, now)
        if self._began is not None:
            longest = 0.0 if self._free_until is None else 2 * self._usual_seconds
            self.budget.earn(free_until - self._began, max(STORED_SECONDS, longest))

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
        if self._free_until is not None and self.federator.round is not None:
            return  # enough are in
        if not self._can_decide():
            self.due = self._began = None
        elif self.due is None:
            self._began, self.due = now, now + self.deadline_s

    def _can_decide(self) -> bool:
        federator = self.federator
        if federator.round is None or not federator.can_hear_indispensable(self.present):
            return False
        remaining = federator.clients - len(federator.expulsions)
        if federator.invited_count < remaining:  # others may be invited to the next round
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
