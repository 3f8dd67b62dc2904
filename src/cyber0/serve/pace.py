"""How fast each client answers, and how many seconds rounds may spend on waiting for the slow ones. No clock."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

EARNED = 1 / 3  # of the time that rounds take anyway
STORED_SECONDS = 60.0  # that the budget holds at most, where rounds do not take half as long themselves
CREDIT_SECONDS = 5.0  # of its share that a client which has not used it may use at once
PLENTY_SECONDS = 1.0  # in the budget that are left to those who have not used their share
CHARGED_PART = 0.1  # of what a round has waited, from which on a client pays for it
DEBT_SECONDS = 10.0  # for which a client that has used more than its share pays at most


class ResponseTimes:
    """When each client was told of the round it works on, and how long it took for its last answer."""

    def __init__(self, clients: int) -> None:
        self.behind = np.zeros(clients, np.bool_)
        """Who is not waited for until it shows life: it works on a decided round, or is too slow for this one."""
        self.seconds: list[float | None] = [None] * clients
        """From being told of a round to the answer; None: not known yet."""
        self._told = [0.0] * clients
        self._answered = [-1] * clients  # the last round that each client has answered
        self._round, self._opened = 0, 0.0

    def open_round(self, number: int, now: float) -> None:
        """Everybody who is not busy with an earlier round is told of this one."""
        self._round, self._opened = number, now

    def told_at(self, client: int) -> float:
        """Return when the client was told of the round that it works on."""
        told = self._told[client]
        if told < self._opened and (not self.behind[client] or self._answered[client] == self._round - 1):
            return self._opened
        return told

    def tell(self, client: int, now: float) -> None:
        """The client learns of the open round now, and of none before it."""
        self._told[client] = now
        self._answered[client] = max(self._answered[client], self._round - 1)

    def may_be_late(self, client: int, number: int) -> bool:
        """Return whether an answer to this earlier round is one that the client can have worked on until now."""
        return self._answered[client] < number

    def answer(self, client: int, number: int, now: float) -> float:
        """The client has answered a round and is free for the newest one; return how long it took."""
        took = self.seconds[client] = now - self.told_at(client)
        self._told[client], self._answered[client] = now, number
        return took

    def leave_behind(self, client: int) -> None:
        """The client stays busy with the round that it knows of."""
        self._told[client] = self.told_at(client)
        self.behind[client] = True

    def give_up(self, client: int, now: float) -> None:
        """Nothing has come: expect that the client needs twice as long as was known, or as it was waited for."""
        self.seconds[client] = 2 * max(self.seconds[client] or 0.0, now - self.told_at(client))


class WaitBudget:
    """Seconds that rounds may wait longer than the many need, for all clients together.

    It earns a third of the time that rounds take anyway: whatever clients do, waiting makes the run slower by that
    factor at most. Clients that could use it at the same time have equal shares, or those that need little each time
    would leave nothing for those that need more: whoever has used more than its share is not waited for at the expense
    of the budget until it has paid its debt, and what has come together for whoever asks in vain is kept for it.
    """

    def __init__(self, clients: int, seconds: float) -> None:
        self.seconds = min(seconds, STORED_SECONDS)
        self._asked = np.full(clients, -np.inf)
        self._paid_until = np.full(clients, -np.inf)
        self._all_paid = -np.inf
        self._reserve_until = -np.inf

    def available(self, client: int, now: float) -> float:
        """Return how long a round may wait for this client."""
        paid = self._paid_until[client]
        kept = PLENTY_SECONDS if paid > now else 0.0  # whoever has used more than its share has what nobody needs
        return max(0.0, self.seconds - kept - self._reserved(min(paid, now), now))

    def _reserved(self, paid_until: float, now: float) -> float:
        """Return what is kept for clients that ask in vain and have used less than one that has paid until then."""
        if now >= self._reserve_until:
            return 0.0
        recent = self._asked > now - STORED_SECONDS
        unserved = now - self._paid_until[recent & (self._paid_until < min(paid_until, now - CREDIT_SECONDS))]
        return float(np.minimum(unserved, STORED_SECONDS).sum()) * EARNED / max(1, int(np.count_nonzero(recent)))

    def has_debtors(self, now: float) -> bool:
        """Return whether any client has used more than its share."""
        return self._all_paid > now or self._reserved(now, now) > 0

    def ask(self, client: int, now: float) -> None:
        """Note that the client would use the budget if there were more of it."""
        self._asked[client] = now
        self._reserve_until = now + STORED_SECONDS

    def earn(self, seconds: float, most: float = STORED_SECONDS) -> None:
        """Add the share of a round that took so long, up to `most`."""
        if self.seconds < most:
            self.seconds = min(most, self.seconds + EARNED * seconds)

    def spend(self, seconds: float, waited: Mapping[int, float], now: float) -> None:
        """Charge clients, all the same, for the seconds that a round has waited for them.

        One for which it has waited only a small part of that, in seconds as given, is not charged.
        """
        self.seconds -= seconds
        each = sorted(client for client, alone in waited.items() if alone >= CHARGED_PART * seconds)
        if not each:
            return
        users = (self._asked > now - STORED_SECONDS) | (self._paid_until > now)  # not those who are slow now and then
        users[each] = True
        sharing = int(np.count_nonzero(users))
        share = seconds / len(each) * sharing / EARNED  # in so much time it earns what it has used
        paid_until = np.maximum(self._paid_until[each], now - CREDIT_SECONDS) + share
        self._paid_until[each] = np.minimum(paid_until, now + DEBT_SECONDS)
        self._all_paid = float(self._paid_until.max())
