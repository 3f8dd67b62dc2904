"""The federator: a state machine that opens rounds, checks reports, decides, and appends to the ledger. No I/O.

    federator = Federator(ledger, trimmed_mean(0.25), clients=12, lr_at=lambda t: 0.01)
    announcement = federator.open_round()
    ... federator.receive(report) for whatever comes ...
    decision = federator.decide()               # None until all invited have answered
    decision = federator.decide(deadline=True)  # decides now, or abandons the round

The federator needs no weights. It trusts nothing that a client sends, and a client has one vote a round: its first
valid report. Storage is fixed, so a flood of reports costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cyber0.aggregate import Rule
from cyber0.config.tolerance import invited_count
from cyber0.errors import ConfigError, ProtocolError
from cyber0.ledger import Log, Record, Reports, trim_counts
from cyber0.ledger.record import Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.decider import Decider, Expulsion
from cyber0.protocol.messages import Announcement, Report
from cyber0.storage import REPORTS


class Receipt(IntEnum):
    """What became of a report. Everything but ACCEPTED counts as not sent and leaves the client's vote unused."""

    ACCEPTED = 0
    NO_ROUND = auto()
    """No round is open."""
    MALFORMED = auto()
    """Not a report, or a field of it has the wrong type."""
    UNKNOWN_CLIENT = auto()
    """There is no client of that number."""
    WRONG_ROUND = auto()
    """Early or late: another round is open."""
    NOT_INVITED = auto()
    """The client was not invited to this round."""
    DUPLICATE = auto()
    """The client has voted already."""
    WRONG_LENGTH = auto()
    """Too few or too many scalars."""
    NOT_FINITE = auto()
    """A number that is not finite in float32."""


class Federator:
    """Opens rounds, checks reports, decides, and appends to the ledger; continues where the ledger ends.

    Args:
        ledger: where decisions go; its header holds the seed, the number of clients and of scalars a round.
        rule: how the reports are combined; its beta sets how many Byzantine clients a round withstands.
        clients: m, how many clients there are.
        participation: the share of them that is invited to a round.
        quorum: decide no round with fewer valid reports, even if the rule could.
        lr_at: the learning rate of a round.
        rounds: how many rounds the run is to have, for the records; 0: no number is set.
        limit: the largest magnitude of a decided scalar that clients accept.
        reports: where every accepted report is stored, if anywhere.
        expel: whether clients whose guilt is beyond doubt are no longer invited; needs a rule with a history.
        rehearsed: whether simulated attackers look ahead.
    """

    def __init__(
        self,
        ledger: Log,
        rule: Rule,
        clients: int,
        *,
        lr_at: Callable[[int], float],
        participation: float = 1.0,
        quorum: int = 0,
        rounds: int = 0,
        limit: float = math.inf,
        reports: Reports | None = None,
        expel: bool = False,
        rehearsed: bool = False,
    ) -> None:
        if clients != ledger.header.clients:
            raise ConfigError(f"clients = {clients}, but the ledger was started with {ledger.header.clients}")
        self.ledger = ledger
        self.rule = rule
        self.clients = clients
        self.participation = participation
        self.scalars = ledger.header.scalars
        self.codec = codecs.make(ledger.header.codec)
        self.decider = Decider(
            rule, ledger.header, participation=participation, quorum=quorum, limit=limit, expel=expel,
            rehearsed=rehearsed,
        )  # fmt: skip
        """Decides the rounds; has what the rule remembers, and who has been expelled."""
        self.invited_count = invited_count(clients, participation)
        """How many clients are invited to the open round, or were to the last one."""
        self.tolerated = self.decider.tolerated(0)
        """b, how many Byzantine clients that round withstands."""
        self.required = self.decider.required
        """How many reports a decision needs."""
        if self.required > self.invited_count:
            raise ConfigError(
                f"quorum = {quorum} and the rule {rule.name} with beta = {rule.beta:g} require {self.required} reports"
                f", but only {self.invited_count} clients are invited to a round"
            )
        self.rejections: dict[Receipt, int] = {receipt: 0 for receipt in Receipt if receipt is not Receipt.ACCEPTED}
        self.trimmed, self.sent = trim_counts(ledger)
        self._lr_at, self._rounds = lr_at, rounds
        self._reports = reports
        self._round: int | None = None
        self._invited = np.zeros(clients, np.bool_)
        self._awaited = np.zeros(clients, np.bool_)
        self._answered = np.zeros(clients, np.bool_)
        self._answers = 0
        self._missing = 0
        self._values = np.zeros((clients, self.scalars), np.float32)
        if self.decider.memory is not None and ledger.next_round:
            self._rebuild_memory()

    def _rebuild_memory(self) -> None:
        """Compute what the rule remembers again, from the stored reports of the rounds in the ledger."""
        if self._reports is None or self._reports.lacking:
            raise ConfigError(
                f"the rule {self.rule.name} judges clients by all their reports, and those of the ledger's "
                f"{self.ledger.next_round} rounds are not stored; restore {REPORTS} from a copy, or use a rule without "
                "a history"
            )
        self.decider.rebuild(self.ledger, self._reports)

    @property
    def expulsions(self) -> list[Expulsion]:
        """The clients that are no longer invited, in the order in which they were expelled."""
        return self.decider.expulsions

    @property
    def round(self) -> int | None:
        """The round that is open, if one is."""
        return self._round

    @property
    def answered(self) -> int:
        """How many valid reports the open round has."""
        return self._answers

    @property
    def missing(self) -> int:
        """How many clients are waited for and have not answered."""
        return self._missing

    @property
    def complete(self) -> bool:
        """Whether a round is open and all who are waited for have answered, and enough of them for a decision."""
        if self._round is None:
            return False
        if self._answers == self.invited_count:
            return True
        return self._answers >= self.required and self._missing == 0 and self.has_indispensable

    def wait_only_for(self, here: NDArray[np.bool_]) -> None:
        """Wait, in the open round, for those of the clients in `here` that were invited and have not answered."""
        np.logical_and(self._invited, here, out=self._awaited)
        self._missing = int(np.count_nonzero(self._awaited & ~self._answered))

    @property
    def has_indispensable(self) -> bool:
        """Whether all clients have answered without whom the rule decides nothing."""
        return all(self._answered[client] for client in self.rule.indispensable)

    def can_hear_indispensable(self, here: NDArray[np.bool_]) -> bool:
        """Return whether all clients without whom the rule decides nothing have answered or are in `here`."""
        return all(self._answered[client] or here[client] for client in self.rule.indispensable)

    def possible(self, here: NDArray[np.bool_]) -> int:
        """Return how many of the clients in `here` may still send a report that counts."""
        return int(np.count_nonzero(here & self._invited & ~self._answered))

    def excuse(self, client: int) -> None:
        """Do not wait for this client in the open round; if it reports all the same, its report counts."""
        if self._awaited[client]:
            self._awaited[client] = False
            self._missing -= not self._answered[client]

    def wait_for(self, client: int) -> None:
        """Wait again for a client that was excused, if it was invited to the open round."""
        if self._invited[client] and not self._awaited[client]:
            self._awaited[client] = True
            self._missing += not self._answered[client]

    def may_answer(self, client: int) -> bool:
        """Return whether a report of this client would count: it was invited to the open round and has not answered."""
        return self._round is not None and bool(self._invited[client] and not self._answered[client])

    def awaits(self, client: int) -> bool:
        """Return whether the open round waits for this client, which has not answered."""
        return self._round is not None and bool(self._awaited[client] and not self._answered[client])

    def silent(self) -> NDArray[np.int64]:
        """Return who is waited for and has not answered."""
        return np.flatnonzero(self._awaited & ~self._answered)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person who starts this federation should know."""
        if self.invited_count - self.tolerated >= self.required:
            return ()
        return (
            f"{self.tolerated} Byzantine client{'s' * (self.tolerated > 1)} that stay{'s' * (self.tolerated == 1)} "
            f"silent can halt training: {self.invited_count} are "
            f"invited to a round, so {self.invited_count - self.tolerated} reports can arrive, and {self.required} are "
            f"needed. Invite at least {self.tolerated + self.required} clients a round, or lower beta or the quorum",
        )

    def open_round(self) -> Announcement:
        """Open the round that the ledger has reached."""
        if self._round is not None:
            raise ProtocolError(f"round {self._round} is still open: decide it before opening another")
        number = self.ledger.next_round
        invited = self.decider.invited(number)
        if self.expulsions:
            self.invited_count, self.tolerated = len(invited), self.decider.tolerated(number)
        self._invited[:] = False
        self._invited[invited] = True
        self._awaited[:] = self._invited
        self._answered[:] = False
        self._answers, self._missing = 0, len(invited)
        self._round = number
        return Announcement(number, invited)

    def receive(self, report: Report) -> Receipt:
        """Check a report and store it if it is valid. Never raises, whatever the report is made of."""
        try:
            receipt = self._judge(report)
        except Exception:  # a report can hold objects that raise anything when they are read
            receipt = Receipt.MALFORMED
        if receipt is not Receipt.ACCEPTED:
            self.rejections[receipt] += 1
        return receipt

    def receive_many(self, clients: ArrayLike, round: int, values: ArrayLike) -> NDArray[np.int8]:
        """Check many reports at once, one row of `values` each, exactly as `receive` would one after another.

        Returns:
            A `Receipt` code per row.

        Raises:
            ProtocolError: `clients` is not a vector of integers, or `values` not a matrix with as many rows.
        """
        ids, rows = np.asarray(clients), np.asarray(values)
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise ProtocolError(f"clients must be a vector of integers, not {ids.dtype} of shape {ids.shape}")
        if rows.ndim != 2 or len(rows) != len(ids):
            raise ProtocolError(f"values must be a matrix with {len(ids)} rows, not of shape {rows.shape}")
        codes = self._judge_many(ids, round, rows)
        for code, count in enumerate(np.bincount(codes, minlength=len(Receipt)).tolist()):
            if code != Receipt.ACCEPTED:
                self.rejections[Receipt(code)] += count
        return codes

    def cancel_round(self) -> None:
        """Forget the open round, if one is, without a record: for a driver that could not go through with it."""
        self._round = None

    def decide(self, *, deadline: bool = False) -> Decision | None:
        """Decide the open round if it is `complete` or if `deadline`; otherwise return None and keep it open.

        With too few valid reports, or if the outcome is not finite in float32 or beyond the limit, the round is
        abandoned: its number is spent, so that late reports can't enter a retry. The record is in the ledger when this
        returns.
        """
        if self._round is None:
            raise ProtocolError("no round is open: call open_round first")
        if not self.complete and not deadline:
            return None
        # Rows in the order of the clients, not of arrival: the decision does not depend on who was faster.
        rows = self._values if self.answered == self.clients else self._values[self._answered]
        reporters = np.flatnonzero(self._answered)
        values, excluded = self.decider.decide(self._round, rows, reporters)
        trimmed = np.zeros(self.clients, np.int64)
        trimmed[self._answered] = excluded
        lr = float(self._lr_at(self._round))
        record = Record(self._round, lr, values, self._answered.copy(), trimmed, rounds=self._rounds)
        if self._reports is not None:
            self._reports.append(self._round, rows)
        record = self.ledger.append(record)  # if this fails the round stays open, with its reports
        self.decider.learn(record, rows)
        if values is not None:
            self.trimmed += trimmed
            self.sent += self._answered * np.int64(self.scalars)
        self._round = None
        return Decision(record.round, record.lr, values, record.details, record.rounds, record.chain)

    def _judge(self, report: Report) -> Receipt:
        if self._round is None:
            return Receipt.NO_ROUND
        if not isinstance(report, Report) or not _is_integer(report.client) or not _is_integer(report.round):
            return Receipt.MALFORMED
        client = int(report.client)
        if not 0 <= client < self.clients:
            return Receipt.UNKNOWN_CLIENT
        if int(report.round) != self._round:
            return Receipt.WRONG_ROUND
        if not self._invited[client]:
            return Receipt.NOT_INVITED
        if self._answered[client]:
            return Receipt.DUPLICATE
        values = np.asarray(report.values)
        if values.dtype.kind not in "fiu":
            return Receipt.MALFORMED
        if values.shape != (self.scalars,):
            return Receipt.WRONG_LENGTH
        if values.dtype != np.float32:
            values = _to_float32(values)
        if not np.isfinite(values).all():
            return Receipt.NOT_FINITE
        self._values[client] = values
        self._answered[client] = True
        self._answers += 1
        if self._awaited[client]:
            self._missing -= 1
        return Receipt.ACCEPTED

    def _judge_many(self, ids: NDArray[Any], round: int, rows: NDArray[Any]) -> NDArray[np.int8]:
        if self._round is None:
            return np.full(len(ids), Receipt.NO_ROUND, np.int8)
        if not _is_integer(round):
            return np.full(len(ids), Receipt.MALFORMED, np.int8)
        codes = np.full(len(ids), Receipt.ACCEPTED, np.int8)
        codes[(ids < 0) | (ids >= self.clients)] = Receipt.UNKNOWN_CLIENT
        if round != self._round:
            codes[codes == Receipt.ACCEPTED] = Receipt.WRONG_ROUND
            return codes
        known = np.flatnonzero(codes == Receipt.ACCEPTED)
        who = ids[known].astype(np.int64)
        codes[known[~self._invited[who]]] = Receipt.NOT_INVITED
        codes[known[self._invited[who] & self._answered[who]]] = Receipt.DUPLICATE
        open_ = np.flatnonzero(codes == Receipt.ACCEPTED)
        if rows.dtype.kind not in "fiu":
            codes[open_] = Receipt.MALFORMED
        elif rows.shape[1] != self.scalars:
            codes[open_] = Receipt.WRONG_LENGTH
        else:
            codes[open_] = self._accept_many(ids[open_].astype(np.int64), rows, open_)
        return codes

    def _accept_many(self, who: NDArray[np.int64], rows: NDArray[Any], places: NDArray[np.intp]) -> NDArray[np.int8]:
        """Store the first finite row of each client; `places` says which rows are those of `who`."""
        values = _to_float32(rows if len(places) == len(rows) else rows[places])
        finite = np.isfinite(values).all(axis=1)
        order = np.arange(len(who))
        first = np.full(self.clients, len(who))
        # Of several assignments to one place the last stays, so assigning backwards keeps each client's first.
        first[who[finite][::-1]] = order[finite][::-1]
        codes = np.where(order > first[who], Receipt.DUPLICATE, Receipt.NOT_FINITE).astype(np.int8)
        accepted = order == first[who]
        codes[accepted] = Receipt.ACCEPTED
        if accepted.all():
            self._values[who] = values
        else:
            self._values[who[accepted]] = values[accepted]
        self._answered[who[accepted]] = True
        self._answers += int(np.count_nonzero(accepted))
        self._missing -= int(np.count_nonzero(self._awaited[who[accepted]]))
        return codes


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def _to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Round to float32; what is beyond its range becomes infinite, without a warning."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(np.float32, copy=False)
