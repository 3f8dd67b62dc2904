"""How rounds are decided: a function of the reports and the ledger alone, whoever computes it, and when.

    decider = Decider(rule, header, quorum=1)
    decider.rebuild(ledger, reports)               # where the ledger has rounds already
    clients = decider.invited(round)
    values, excluded = decider.decide(round, rows, reporters)
    decider.learn(record, rows)                    # once the record is in the ledger

The federator decides live by it, and `cyber0 verify --decisions` decides again by it. What a rule with a history
remembers is here, and who has been expelled by it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from copy import copy, deepcopy
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cyber0 import optimizers
from cyber0.aggregate import AggregationError, Guilt, Judge, Memory, Rule, tolerated
from cyber0.config.tolerance import check_expelling, invited_count
from cyber0.directions import Stream, permutation
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger import Header, Record
from cyber0.ledger.store import Agreed
from cyber0.protocol import codec as codecs
from cyber0.storage import REPORTS

NEVER = 2**63 - 1


def invited_clients(seed: int, round: int, clients: int, participation: float) -> NDArray[np.int64]:
    """Return who is invited to a round, ascending: a sample without replacement, which anyone can draw again.

    Clients that have been expelled are then left out; see `Decider.invited`.
    """
    count = invited_count(clients, participation)
    if count == clients:
        return np.arange(clients, dtype=np.int64)
    return np.sort(permutation(seed, Stream.SAMPLING, round, 0, clients)[:count])


class Expulsion(NamedTuple):
    """A client that is no longer invited, and why."""

    client: int
    round: int
    """The last round to which it was invited."""
    evidence: Guilt

    @property
    def text(self) -> str:
        """What happened, in a sentence."""
        return f"client {self.client} was expelled after round {self.round}: {self.evidence.text}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as it stands in summary.json."""
        numbers = dict(self.evidence.numbers)
        return {"client": self.client, "round": self.round, "text": self.text, "evidence": numbers}


def judge_in(rule: Rule, memory: Memory | None) -> Judge:
    """Return the memory of a rule as one that can say who is guilty.

    Raises:
        ConfigError: it can't.
    """
    if memory is None or not hasattr(memory, "guilty"):
        raise ConfigError(
            f"federation.expel = true needs a rule that gathers evidence over the rounds, and {rule.name} does not; "
            'set aggregation.rule = "reputation" or federation.expel = false'
        )
    return cast(Judge, memory)


class Stage(NamedTuple):
    """A round that was decided, as attackers rehearse it."""

    round: int
    clients: NDArray[np.int64]
    """Who reported."""
    rows: NDArray[np.float32]
    lr: float


class Rehearsal(NamedTuple):
    """What attackers that look ahead need: what the rule remembered before a round, and the rounds before that one."""

    round: int
    decider: Decider
    """A copy; play on copies of it (`Decider.fork`)."""
    stages: tuple[Stage, ...]


REHEARSE_EVERY, REHEARSED = 20, 20
"""Rounds from one rehearsal to the next, and over how many rounds it goes at most."""
EARLY = (5, 10)
"""Rounds before which there is one too."""


class Decider:
    """Decides rounds, remembers what the rule needs to know of them, and expels clients where that is asked for.

    Args:
        rule: How the reports are combined; its beta sets how many Byzantine clients a round withstands.
        header: That of the ledger.
        participation: The share of the clients that is invited to a round.
        quorum: Decide no round with fewer valid reports, even if the rule could.
        limit: The largest magnitude of a decided scalar that clients accept.
        expel: Whether clients whose guilt is beyond doubt are no longer invited; needs participation = 1.
        rehearsed: Whether attackers look ahead, so that `rehearsal` is kept for them.
    """

    def __init__(
        self, rule: Rule, header: Agreed, *, participation: float = 1.0, quorum: int = 0, limit: float = math.inf,
        expel: bool = False, rehearsed: bool = False,
    ) -> None:  # fmt: skip
        self.rule, self.clients = rule, header.clients
        self.memory = rule.memory(header.clients)
        """What a rule with a history remembers of the rounds so far."""
        self.expulsions: list[Expulsion] = []
        """Who is no longer invited, in the order in which they were expelled."""
        self._header, self._participation, self._quorum, self._limit = header, participation, quorum, limit
        self._codec = codecs.make(header.codec)
        self._last_round = np.full(header.clients, NEVER)  # to which each client is invited
        self._drawn = invited_count(header.clients, participation)  # for a round, before any are expelled
        self._b = tolerated(rule.beta, self._drawn)
        self._optimizer = None
        if self.memory is not None and isinstance(header, Header):
            self._optimizer = optimizers.make(header.optimizer, header.optimizer_options)
            self._state = self._optimizer.start()
        self._judges = expel
        if expel:
            judge_in(rule, self.memory)
            check_expelling(header.clients, participation, rule.beta)
        self._stages: deque[Stage] | None = deque(maxlen=REHEARSED) if rehearsed and self.memory is not None else None
        self.rehearsal: Rehearsal | None = None
        """As of the last of the rounds at which attackers rehearse, where they do."""
        if self._stages is not None:
            self.rehearsal = Rehearsal(0, self.fork(), ())

    def invited(self, round: int) -> NDArray[np.int64]:
        """Return who is invited to a round, ascending; it must be at most one after those that were learned."""
        drawn = invited_clients(self._header.seed, round, self.clients, self._participation)
        return drawn[self._last_round[drawn] >= round] if self.expulsions else drawn

    def invited_count(self, round: int) -> int:
        """Return how many clients are invited to a round."""
        return len(self.invited(round)) if self.expulsions else self._drawn

    def tolerated(self, round: int) -> int:
        """Return how many Byzantine clients a round withstands: b, less those that have been expelled."""
        return max(self._b - (self._drawn - self.invited_count(round)), 0)

    @property
    def required(self) -> int:
        """How many reports the decision of a round needs; expulsions do not lower it, as one may be a mistake."""
        return max(self._quorum, self.rule.required(self._b))

    def decide(
        self, round: int, rows: NDArray[np.float32], clients: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.int64]]:
        """Return the decided scalars as everybody decodes them and how often each client's row was trimmed.

        None if there is no safe decision, or if clients would refuse it because a scalar is beyond the limit.
        """
        nobody = np.zeros(len(rows), np.int64)
        if len(rows) < self.required:
            return None, nobody
        try:
            outcome = self.rule.decide(
                rows, self.invited_count(round), round, memory=self.memory, clients=clients, b=self.tolerated(round)
            )
        except AggregationError:  # a rule may find that it can't decide
            return None, nobody
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            values = self._codec.as_decoded(outcome.values.astype(np.float32, copy=False))
        if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > self._limit:
            return None, nobody
        return values, outcome.excluded

    def learn(self, record: Record, rows: NDArray[np.float32]) -> list[Expulsion]:
        """Remember a round that is in the ledger, given its reports; return who is expelled because of it."""
        found: list[Expulsion] = []
        if self.memory is not None and record.values is not None:
            stage = Stage(record.round, np.flatnonzero(record.reported), rows, record.lr)
            self.remember(stage, record.values)
            found = self._expel(record.round) if self._judges else []
            if self._stages is not None:
                self._stages.append(stage._replace(rows=rows.copy()))
        following = record.round + 1
        if self._stages and (following % REHEARSE_EVERY == 0 or following in EARLY):
            self.rehearsal = Rehearsal(following, self.fork(), tuple(self._stages))
        return found

    def remember(self, stage: Stage, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Let the rule remember a decided round; return the scalars that its step is made of."""
        moved = values.astype(np.float64)
        if self._optimizer is not None:
            with np.errstate(over="ignore", under="ignore"):
                moved, self._state = self._optimizer.scaled(self._state, moved)
        if self.memory is not None:
            self.memory.learn(stage.rows, stage.clients, moved, stage.lr)
        return moved

    def step(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the optimizer would make of these decided scalars, for rules with a history."""
        return values if self._optimizer is None else self._optimizer.taken(self._state, values)

    def fork(self) -> Decider:
        """Return a copy that remembers by itself."""
        fork = copy(self)
        fork.memory, fork._last_round = deepcopy(self.memory), self._last_round.copy()
        fork.expulsions = [*self.expulsions]
        fork._stages = fork.rehearsal = None
        return fork

    def rebuild(self, records: Iterable[Record], reports: Iterable[tuple[int, NDArray[np.float32]]]) -> None:
        """Learn the rounds of a ledger, given the stored reports of each of them.

        Raises:
            LedgerError: the reports are not those of these rounds.
        """
        for record, (number, rows) in zip(records, reports, strict=True):
            if number != record.round or len(rows) != np.count_nonzero(record.reported):
                raise LedgerError(
                    f"{REPORTS} does not hold the reports of round {record.round} that the ledger has, and the rule "
                    "needs them; restore it from a copy"
                )
            self.learn(record, rows)

    def _expel(self, round: int) -> list[Expulsion]:
        """Expel the guilty, most certain first, as long as b and the reports that a decision needs allow it."""
        found: list[Expulsion] = []
        here = np.flatnonzero(self._last_round == NEVER)
        b = self._b - len(self.expulsions)
        for evidence in judge_in(self.rule, self.memory).guilty(here, b)[:b]:
            if len(here) - len(found) - 1 < self.required:
                break
            found.append(Expulsion(evidence.client, round, evidence))
            self._last_round[evidence.client] = round
        self.expulsions += found
        return found
