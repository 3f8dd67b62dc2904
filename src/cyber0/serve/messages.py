"""Rounds by letters: one message a round to each client, one answer. Both sides, over plain dicts; no network.

For transports that carry messages and no streams. A letter holds the frames that a stream would have carried since the
client's last one, so that the same `Participant` reads them:

    letter   opening   the ledger's opening: header and run id
             client    which client the letter is for
             from      the round that the first record is of
             frames    [replay,] records, and then opened or ended
    answer   hello     where the client stands now; bound to run, client and model
             kept      the round that it will begin at when the next letter comes
             report    its report, if it made one
             digest    that of its weights in hexadecimal, after the last round

post = Post(federator, rounds=100, deadline_s=60.0)
while not post.finished:
    for client, letter in post.letters(present, now).items(): ...       # send it
    post.answer(client, content, now)                                   # for whatever comes back; None: it failed
    post.tick(now)
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from cyber0.errors import ProtocolError
from cyber0.ledger import Header, Ledger, opening_of, read_opening
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import (
    ENDED,
    RECORDS,
    REPLAY,
    VOTER,
    Hello,
    Opened,
    decode_hello,
    decode_report,
    encode_bare,
    encode_opened,
    kind_of,
    payload_bytes,
)
from cyber0.serve.hub import CHUNK_BYTES, MISSES, REPLAYS
from cyber0.serve.sessions import Figures, Log, Traffic, digest_due, outside_majority

if TYPE_CHECKING:
    from cyber0.serve.participant import Participant

RETRY_SECONDS = 10.0  # before a client whose answer failed is written to again

Content = dict[str, Any]


class Post:
    """The federator's side: whom to write what, and what an answer does.

    Args:
        federator: The state machine; its ledger says where to go on.
        rounds: How many rounds the run has.
        deadline_s: How long a round waits for answers, counted while enough clients for a decision are present.
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
        log: Log = lambda *_, **__: None,
    ) -> None:
        assert isinstance(federator.ledger, Ledger)  # its records are what letters are made of
        self.federator, self.ledger = federator, federator.ledger
        self.rounds, self.deadline_s, self.digest_every = rounds, deadline_s, digest_every
        self.figures = Figures([Traffic() for _ in range(federator.clients)])
        self.finals: dict[int, str] = {}
        """The digest that each client has stated after the last round."""
        self._log = log
        self._opening = opening_of(self.ledger.header)
        self._payload = payload_bytes(federator.scalars, federator.codec)
        self._position: dict[int, int] = {}  # where each client will begin
        self._unanswered: set[int] = set()
        self._not_before: dict[int, float] = {}
        self._given_up: set[int] = set()  # in this round: another letter would bring the same answer
        self._resent: set[int] = set()
        self._present: frozenset[int] = frozenset()
        self._deadline: float | None = None
        self._digests: dict[int, bytes] = {}
        self._to_replay: set[int] = set()
        self._replays: Counter[int] = Counter()
        self._misses: Counter[int] = Counter()
        self._excused_until: Counter[int] = Counter()

    @property
    def finished(self) -> bool:
        """Whether the last round is decided; letters then bring that decision and ask for the digest."""
        return len(self.ledger) >= self.rounds

    def letters(self, present: Collection[int], now: float) -> dict[int, Content]:
        """Return what is to be sent now, by client, to those who can be reached."""
        self._present = frozenset(present)
        if self.finished:
            wanted = [c for c in sorted(present) if c not in self.finals]
        else:
            if self.federator.round is None:
                self._open()
            wanted = [c for c in sorted(present) if self.federator.may_answer(c) and c not in self._given_up]
            self._set_clock(now)
        due = [c for c in wanted if c not in self._unanswered and now >= self._not_before.get(c, now)]
        for client in due:
            self._unanswered.add(client)
            self._wait_for(client)
        return {client: self._letter(client) for client in due}

    def answer(self, client: int, content: Mapping[str, Any] | None, now: float) -> None:
        """Take a client's answer, whatever it is made of; None: it could not be reached, or failed."""
        self._unanswered.discard(client)
        if content is None:
            self._refused(client, "no_answer")
            self._not_before[client] = now + RETRY_SECONDS
            return
        try:
            hello = self._checked_hello(client, content.get("hello"))
        except ProtocolError as error:
            self._log("refused", client=client, text=str(error))
            self._refused(client, "bad_hello")
            self._given_up.add(client)
            return
        kept = content.get("kept")
        self._position[client] = kept if type(kept) is int and 0 <= kept <= hello.round else 0
        if self.finished:
            self._take_final(client, hello, content.get("digest"), now)
        elif "report" in content:
            self._take_report(client, content["report"])
        else:  # it lacked records: with those from where it stands it can answer, but not as often as it likes
            self._not_before[client] = now + RETRY_SECONDS if client in self._resent else now
            self._resent.add(client)

    def tick(self, now: float) -> None:
        """Decide the round if it can be, or must be."""
        if self.federator.round is None:
            return
        if self.federator.complete:
            self._decide()
        elif self._deadline is not None and now >= self._deadline:
            silent = self.federator.silent().tolist()
            for client in silent:  # not waited for in the next rounds, each time for longer
                self._misses[client] = min(self._misses[client] + 1, MISSES)
                self._excused_until[client] = len(self.ledger) + 1 + (1 << self._misses[client])
                self.figures.clients[client].misses += 1
            self._log("deadline", round=self.federator.round, answered=self.federator.answered, silent=silent[:20])
            self._decide(deadline=True)

    # The rounds.

    def _open(self) -> None:
        announcement = self.federator.open_round()
        self._deadline = None
        for of_the_last_round in (self._given_up, self._resent, self._digests):
            of_the_last_round.clear()
        for client in announcement.invited.tolist():
            self.federator.excuse(client)  # until there is a letter to it

    def _wait_for(self, client: int) -> None:
        if not self.finished and self._excused_until[client] <= len(self.ledger):
            self.federator.wait_for(client)

    def _set_clock(self, now: float) -> None:
        """Count down while a decision is possible at all: rounds are not spent while too few clients are there."""
        federator = self.federator
        if federator.invited_count < federator.clients:  # others may be asked in the next round
            possible = len(self._present)
        else:
            reachable = self._present - self._given_up
            possible = federator.answered + sum(federator.may_answer(c) for c in reachable)
        if possible < federator.required:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = now + self.deadline_s

    def _decide(self, *, deadline: bool = False) -> None:
        decision = self.federator.decide(deadline=deadline)
        if decision is None:
            return
        if decision.values is None:
            self.figures.abandoned += 1
            self._log("abandoned", round=decision.round)
        else:
            self.figures.decided += 1
            self._log("decided", round=decision.round, chain=decision.chain.hex()[:16])
        if digest_due(decision.round, self.digest_every):
            self._compare_digests(decision.round)

    def _compare_digests(self, number: int) -> None:
        odd = outside_majority(self._digests)
        if odd:
            self.figures.alarms += 1
            self._log("digests_differ", round=number, clients=odd[:20], compared=len(self._digests))
        for client in odd:
            if self._replays[client] < REPLAYS:
                self._replays[client] += 1
                self._to_replay.add(client)

    # Letters and answers.

    def _letter(self, client: int) -> Content:
        begin, frames = self._position.get(client, 0), []
        if client in self._to_replay:
            self._to_replay.discard(client)
            begin, frames = 0, [encode_bare(REPLAY)]
        reached = begin
        while reached < len(self.ledger):
            data, count = self.ledger.chunk(reached, CHUNK_BYTES)
            frames.append(bytes([RECORDS]) + data)
            reached += count
        opened = Opened(len(self.ledger), self.ledger.chain, self.rounds)
        frames.append(encode_bare(ENDED) if self.finished else encode_opened(opened))
        traffic = self.figures.clients[client]
        traffic.payload_out += self._payload * (reached - begin)
        traffic.message_out += sum(map(len, frames))
        return {"opening": self._opening, "client": client, "from": begin, "frames": frames}

    def _checked_hello(self, client: int, frame: Any) -> Hello:
        """Return where the client stands; the transport has proven who it is, and the hello must not say otherwise."""
        hello, header = decode_hello(frame), self.ledger.header
        if (hello.role, hello.client) != (VOTER, client):
            raise ProtocolError(f"the answer of client {client} names client {hello.client} in role {hello.role}")
        if hello.run != self.ledger.chain_at(0):
            raise ProtocolError(f"the answer is about run {hello.run.hex()[:16]}, not this one")
        if (hello.weights_digest.hex(), hello.rest_digest.hex()) != (header.weights_digest, header.rest_digest):
            raise ProtocolError("the model differs from the one agreed on")
        if hello.round > len(self.ledger) or self.ledger.chain_at(hello.round)[:CHAIN_BYTES] != hello.chain:
            raise ProtocolError(f"this ledger does not go on from the hash {hello.chain.hex()} after {hello.round}")
        return hello

    def _take_report(self, client: int, frame: Any) -> None:
        traffic = self.figures.clients[client]
        traffic.message_in += len(frame) if isinstance(frame, bytes) else 0
        try:
            report = decode_report(frame, client, self.federator.scalars, self.federator.codec)
        except ProtocolError:
            self._refused(client, "malformed")
            self._given_up.add(client)
            return
        receipt = self.federator.receive(report)
        if receipt is Receipt.ACCEPTED:
            traffic.reports += 1
            traffic.payload_in += self._payload
            self._misses[client] = max(0, self._misses[client] - 1)
            if report.digest:
                self._digests[client] = report.digest
            return
        self._refused(client, receipt.name.lower())
        if receipt not in (Receipt.WRONG_ROUND, Receipt.NO_ROUND):  # who was late is written to again
            self._given_up.add(client)

    def _take_final(self, client: int, hello: Hello, digest: Any, now: float) -> None:
        if hello.round == len(self.ledger) and isinstance(digest, str):
            self.finals[client] = digest[:64]
        else:
            self._not_before[client] = now + RETRY_SECONDS if client in self._resent else now
            self._resent.add(client)

    def _refused(self, client: int, reason: str) -> None:
        self.figures.refused[reason] += 1
        if self.federator.round is not None:
            self.federator.excuse(client)


def answer_letter(letter: Mapping[str, Any], build: Callable[[Header, int], Participant]) -> Content:
    """Return a client's answer to a letter; `build` makes the participant as it was left by the letter before.

    Raises:
        LedgerError: the federator's ledger does not go on from what was seen.
        ProtocolError: this is no letter.
    """
    opening, number, begin, frames = (letter.get(name) for name in ("opening", "client", "from", "frames"))
    if not (isinstance(opening, bytes) and type(number) is int and type(begin) is int and isinstance(frames, list)):
        raise ProtocolError(f"this is no letter of a federator: it holds {', '.join(map(repr, letter)) or 'nothing'}")
    participant = build(read_opening(io.BytesIO(opening), "the letter")[0], number)
    report = None
    starts_over = bool(frames) and kind_of(frames[0]) == REPLAY
    if starts_over or begin == participant.client.next_round:
        for frame in frames:
            report = participant.receive(frame)
    participant.save()
    reached = participant.client.next_round
    answer: Content = {"hello": participant.hello(), "kept": reached if participant.state.keeps_weights else 0}
    if report is not None:
        answer["report"] = report
    if participant.ended:
        answer["digest"] = participant.client.parameters.digest()
    return answer
