"""A client's side of a stream: what to answer to each message of a federator. No network, no disk, no clock.

participant = Participant(client, state, number, start=w0)
send(participant.hello())
while messages := whatever_has_come():              # at least one
    answer = participant.receive_all(messages)      # a report on the newest open round, or None
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.config.schema import Config
from cyber0.errors import DataError, LedgerError, ProtocolError
from cyber0.estimate.evaluator import Evaluator
from cyber0.ledger import Record, first_chain, read_records
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.ledger.rates import AgreedRates
from cyber0.ledger.record import ABANDONED, DECIDED, Decision
from cyber0.model.vector import Parameters
from cyber0.protocol import codec as codecs
from cyber0.protocol.client import Client
from cyber0.protocol.decider import invited_clients
from cyber0.protocol.messages import (
    DIGEST_BYTES,
    ENDED,
    FOLLOWER,
    OPENED,
    RECORDS,
    VOTER,
    Announcement,
    Hello,
    Report,
    decode_decision,
    decode_opened,
    encode_hello,
    encode_report,
    kind_of,
)
from cyber0.serve.conduct import STALLED_ROUNDS, FederatorCheck, Misconduct
from cyber0.serve.policy import digest_due
from cyber0.serve.snapshots import Snapshot, SnapshotError
from cyber0.serve.state import Evidence, ParticipantState, Seen

SNAPSHOT_EVERY = 1000  # rounds between snapshots that a client stores for its own restart

LocalAttack = Callable[[NDArray[np.float64], int], NDArray[np.float64]]
"""What a Byzantine client makes of its scalars in a round, without knowing anybody else's."""
CommitHook = Callable[[int], None]


class Participant:
    """A client with a vote, or a follower, as a state machine fed with messages.

    Args:
        client: The weights and how they are measured; at w0.
        state: What is stored between starts.
        number: Which client this is; None: a follower.
        start: Returns w0 by name, for a replay from the beginning.
        attack: What a Byzantine client sends instead; for tests.
        hook_every: Catching up stops at multiples of so many rounds, for `on_commit`.
        rates: Returns the learning rates of a run with so many rounds; None: they do not depend on their number.
        agreed: The learning rates that decisions are checked against; by default those of the header, if its schedule
            is built in.
        stalled_rounds: How many rounds are answered while the weights stay where they are.
    """

    def __init__(
        self,
        client: Client[Parameters, Evaluator],
        state: ParticipantState,
        number: int | None,
        *,
        follower: int = 0,
        start: Callable[[], Mapping[str, torch.Tensor]],
        attack: LocalAttack | None = None,
        hook_every: int = 1,
        rates: Callable[[int], Callable[[int], float]] | None = None,
        agreed: AgreedRates | None = None,
        stalled_rounds: int = STALLED_ROUNDS,
    ) -> None:
        self.client, self.state, self.number = client, state, number
        self.header = client.header
        self.config = Config.recorded(self.header.config)
        self.run = first_chain(self.header)
        self.rounds = self.config.rounds
        """How many rounds the run is to have, by the last message that stated it."""
        self.ended = False
        self.outbox: list[bytes] = []
        """What else to send, after what `receive` returns: a follower's evaluations."""
        self.replays = 0
        """How often the weights were rebuilt from w0 because they differed from everybody else's."""
        self._follower, self._start, self._attack = follower, start, attack
        self._rates = rates or (lambda _: client.lr_at)
        self.on_commit: CommitHook | None = None
        """Called after every commit with the number of rounds that the weights include."""
        self.check = FederatorCheck(
            self.header, agreed or AgreedRates(self.header), invited=self.config.federation.invited,
            stalled_rounds=stalled_rounds, stall=state.stall, fullness=client.parameters.fullness,
            carried=client.parameters.carried,
        )  # fmt: skip
        """What the federator is held to."""
        self._hook_every = hook_every
        self._codec = codecs.make(self.header.codec)
        self._saved = 0
        self._may_replay = True
        self._sent: tuple[int, bytes] | None = None  # the last round that was answered, and the answer

    def resume_from(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot instead of w0; one that is damaged or of another run is refused."""
        if snapshot.run != self.run:
            fault = f"it is of run {snapshot.run.hex()[:16]}, not of {self.run.hex()[:16]}"
            raise SnapshotError(snapshot.source, fault)
        snapshot.check(self.header.layout, self.client.updates.optimizer)
        seen = self.state.seen
        if seen is not None and (snapshot.round > seen.round or (snapshot.round, snapshot.chain) == seen):
            seen = None  # the same as what was seen, or newer: the federator will have to continue it
        if seen is not None and snapshot.round == seen.round:
            stated, known = snapshot.chain[:CHAIN_BYTES].hex(), seen.chain[:CHAIN_BYTES].hex()
            fault = f"after {seen.round} rounds its hash is {stated}, and this client has seen {known}"
            raise SnapshotError(snapshot.source, fault)
        self.client.move_to(snapshot.tensors, snapshot.round, snapshot.chain, snapshot.state, snapshot.vectors)
        self.check.forget_weights()
        self._saved = snapshot.round

    def warm_up(self) -> None:
        """Measure once without sending, so that the first report comes in time; a follower need not."""
        if self.number is not None and not self._is_last(self.client.next_round):
            self.client.rehearse()

    def hello(self) -> bytes:
        """Return the first message of a stream."""
        role, number = (FOLLOWER, self._follower) if self.number is None else (VOTER, self.number)
        digests = bytes.fromhex(self.header.weights_digest), bytes.fromhex(self.header.rest_digest)
        client = self.client
        return encode_hello(Hello(role, number, self.run, *digests, client.next_round, client.chain[:CHAIN_BYTES]))

    def receive(self, message: bytes) -> bytes | None:
        """Take one message of the federator, as `receive_all` does."""
        return self.receive_all([message])

    def receive_all(self, messages: Sequence[bytes]) -> bytes | None:
        """Take all messages that have come, and return the report that the newest of them requests, if any.

        Only the newest round is still open: whoever was slow or stopped for a while need not measure the others.

        Raises:
            LedgerError: the federator's ledger does not continue what was seen.
            Misconduct: the federator broke the agreement; the evidence is stored.
            ProtocolError: this is not a federator's message.
        """
        requested, message = False, b""
        try:
            for live, group in itertools.groupby(messages, lambda message: kind_of(message) in (DECIDED, ABANDONED)):
                if live:  # each announces the next round
                    message, requested = self._take_decisions(list(group)), True
                else:
                    for message in group:
                        requested = self._take(message)
            return self._report() if requested else None
        except Misconduct as error:
            raise self._with_evidence(error, error.message or message) from None

    def _take_decisions(self, messages: list[bytes]) -> bytes:
        """Commit live decisions in one pass, up to one that was not agreed on; return the last message."""
        decisions: list[Decision] = []
        refused: Misconduct | None = None
        for message in messages:
            try:
                decisions.append(self._checked(message))
            except Misconduct as error:
                refused, error.message = error, message
                break
        first = self.client.next_round
        try:
            self._commit(decisions)  # also those before a refused one: the evidence has the chain before it
        except Misconduct as error:
            refused, error.message = error, messages[self.client.next_round - first]
        if refused is not None:
            raise refused
        return messages[-1]

    def _with_evidence(self, error: Misconduct, message: bytes) -> Misconduct:
        """Store what the federator did; return the error with the place of the evidence."""
        header, client, seen = self.header, self.client, self.state.seen
        evidence = Evidence(
            run=self.run, client=self._follower if self.number is None else self.number,
            header=header.to_json().decode(), round=client.next_round, chain=client.chain, message=bytes(message),
            text=str(error),
        )  # fmt: skip
        try:
            place = self.state.store_evidence(evidence)
        except DataError as failure:  # a full disk, say: what the federator did matters more
            place = str(failure)
        else:
            self.check.forget_answers()  # only here: without the file nothing prevents the next start
            if seen is not None:
                self.state.remember(*seen, self.check.stall)
        return Misconduct(f"the federator broke the agreement in {error}. Evidence: {place}")

    def _take(self, message: bytes) -> bool:
        """Take a message that is not a decision; return whether it announces a round."""
        kind = kind_of(message)
        if kind == RECORDS:
            self._replay(read_records(self.header, bytes(message[1:]), self.client.next_round, self.client.chain))
            return False
        if kind == OPENED:
            opened = decode_opened(message)
            self._check_reached(opened.round, opened.chain)
            self.check.opened(opened.round, opened.rounds)
            self._plan(opened.rounds)
            return True
        if kind == ENDED:
            self._check_reached(self.client.next_round, self.client.chain[:CHAIN_BYTES])
            self.check.ended(self.client.next_round)
            self.ended = True
            return False
        # kind REPLAY: our weights differ from everybody else's, by a digest that we sent, perhaps before a restart
        if not self._may_replay:
            raise ProtocolError("the federator says again that all has to be replayed, and was sent no digest since")
        self._may_replay, self._sent = False, None
        self.replays += 1
        self.client.move_to(self._start(), 0, self.run)
        self.check.forget_weights()
        return False

    def save(self) -> None:
        """Store the weights for the next start."""
        client = self.client
        if client.next_round > self._saved:
            self.state.save(client, self.run)
            self._saved = client.next_round

    def _replay(self, records: list[Record]) -> None:
        seen = self.state.seen
        for record in records:
            if seen is not None and record.round + 1 == seen.round and record.chain != seen.chain:
                raise _other_history(seen)
        for record in records:  # all of them before any is committed
            self.check.decision(record)
        self._commit(records)

    def _checked(self, message: bytes) -> Decision:
        """Return the decision in a live message, if it is one that was agreed on."""
        decision = decode_decision(message, self.header.scalars, self._codec)
        seen = self.state.seen
        if seen is not None and decision.round < seen.round:
            raise _other_history(seen)  # a decision comes only after the round was announced, which was checked
        self.check.decision(decision)
        return decision

    def _commit(self, rounds: Sequence[Decision | Record]) -> None:
        """Commit consecutive rounds in one pass, or in several: to the hook's next call, or to look at the weights."""
        begin = 0
        while begin < len(rounds):
            number = rounds[begin].round
            stop = len(rounds) if self.on_commit is None else min(
                len(rounds), begin + self._hook_every - number % self._hook_every
            )  # fmt: skip
            if not self.check.fits(rounds[begin]):
                self.check.look(rounds[begin])
            fitting = begin + 1
            while fitting < stop and self.check.fits(rounds[fitting]):
                fitting += 1
            self._commit_pass(rounds[begin:fitting])
            begin = fitting

    def _commit_pass(self, rounds: Sequence[Decision | Record]) -> None:
        lengths = self.client.updates.lengths(rounds)
        self.client.catch_up(rounds)
        seen = self.state.seen
        for decision, length in zip(rounds, lengths, strict=True):
            if seen is None or decision.round >= seen.round:  # replayed ones were counted before
                self.check.committed(decision, length)
        self._plan(rounds[-1].rounds)
        self._moved()

    def _is_last(self, rounds: int) -> bool:
        return 0 < self.rounds <= rounds

    def _plan(self, rounds: int) -> None:
        """Note how many rounds the run is to have: the learning rate of local steps may depend on it."""
        self.check.announced(rounds)
        if rounds != self.rounds:
            self.rounds, self.client.lr_at = rounds, self._rates(rounds)

    def _moved(self) -> None:
        client, seen = self.client, self.state.seen
        if seen is None or client.next_round > seen.round:
            self.state.remember(client.next_round, client.chain, self.check.stall)
        if client.next_round - self._saved >= SNAPSHOT_EVERY:
            self.save()
        if self.on_commit is not None:
            self.on_commit(client.next_round)

    def _check_reached(self, round: int, chain: bytes) -> None:
        """Refuse a federator that announces another round than the one after the ledger as this client knows it."""
        seen = self.state.seen
        if seen is not None and (round < seen.round or (round == seen.round and not seen.chain.startswith(chain))):
            raise _other_history(seen)
        mine = self.client.chain
        if round != self.client.next_round or not mine.startswith(chain):
            raise ProtocolError(
                f"round {round} was announced after the hash {chain.hex()}, but this client is at round "
                f"{self.client.next_round} after {mine[:CHAIN_BYTES].hex()}"
            )
        self.state.remember(round, mine)

    def _report(self) -> bytes | None:
        number, client = self.client.next_round, self.client
        if self.number is None or self._is_last(number):
            return None
        invited = invited_clients(self.header.seed, number, self.header.clients, self.config.federation.participation)
        if self.number not in invited:
            return None
        if self._sent is not None and self._sent[0] == number:  # announced again; with other local steps, maybe
            return self._sent[1]
        if warning := self.check.answering(number):
            warnings.warn(warning, RuntimeWarning, stacklevel=4)
        row = measured = client.measure(Announcement(number, invited), [0])[0]
        if self._attack is not None:
            row = self._attack(row, number)
        with np.errstate(over="ignore", invalid="ignore"):
            values = row.astype(np.float32)
        self.check.answered(number, measured)
        self.state.remember(number, client.chain, self.check.stall)  # before it is sent: a restart must not forget it
        digest = b""
        if digest_due(number, self.config.serve.digest_every):
            digest = bytes.fromhex(client.digest())[:DIGEST_BYTES]
            self._may_replay = True
        self._sent = number, encode_report(Report(self.number, number, values, digest), self._codec)
        return self._sent[1]


def _other_history(seen: Seen) -> LedgerError:
    return LedgerError(
        f"the federator's ledger does not continue from the hash {seen.chain[:CHAIN_BYTES].hex()} that this client saw "
        f"after {seen.round} rounds: it was rewritten, or cut short"
    )
