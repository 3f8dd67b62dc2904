"""Rounds by messages: one message per round to each client, one reply. Both sides, over plain dicts; no network.

For transports that carry messages and no streams. A message holds the frames that a stream would have carried since the
client's last one, so that the same `Participant` reads them:

    message  opening   the ledger's opening: header and run id
             client    which client the message is for
             from      the round of the first record
             frames    [replay,] records, and then opened or ended
    reply    hello     how far the client is now; bound to run, client and model
             kept      the round at which it will start when the next message comes
             report    its report, if it made one
             digest    that of its weights in hexadecimal, after the last round

mailbox = Mailbox(RoundPolicy(federator, rounds=100, deadline_s=60.0))
while not mailbox.finished:
    for client, content in mailbox.outgoing(present, now).items(): ...  # send it
    mailbox.take_reply(client, content, now)                            # for whatever comes back; None: it failed
    mailbox.tick(now)
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from cyber0.errors import ProtocolError
from cyber0.ledger import Header, Ledger, opening_of, read_opening
from cyber0.protocol.messages import (
    ENDED,
    RECORDS,
    REPLAY,
    VOTER,
    Hello,
    Opened,
    decode_hello,
    encode_bare,
    encode_opened,
    kind_of,
)
from cyber0.serve.admission import Cut, Identity, check_hello, check_identity
from cyber0.serve.hub import CHUNK_BYTES
from cyber0.serve.policy import ACCEPTED, LATE, RoundPolicy

if TYPE_CHECKING:
    from cyber0.serve.participant import Participant

RETRY_SECONDS = 10.0  # before a client whose reply failed is sent another message

Content = dict[str, Any]


class Mailbox:
    """The federator's side: whom to send what, and what a reply does. `policy` decides how rounds run."""

    def __init__(self, policy: RoundPolicy) -> None:
        federator = policy.federator
        assert isinstance(federator.ledger, Ledger)  # messages are made of its records
        self.policy, self.figures = policy, policy.figures
        self.federator, self.ledger = federator, federator.ledger
        self.final_digests: dict[int, str] = {}
        """The digest that each client has stated after the last round."""
        self._opening = opening_of(self.ledger.header)
        self._position: dict[int, int] = {}  # the round at which each client will start
        self._unanswered: set[int] = set()
        self._not_before: dict[int, float] = {}
        self._given_up: set[int] = set()  # in this round: another message would bring the same reply
        self._resent: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether the last round is decided; messages then carry that decision and ask for the digest."""
        return self.policy.finished

    def outgoing(self, present: Collection[int], now: float) -> dict[int, Content]:
        """Return what to send now, by client, to those who can be reached."""
        if self.finished:
            wanted = [c for c in sorted(present) if c not in self.final_digests]
        else:
            if self.federator.round is None:
                self._open([c for c in present if self._is_free(c, now)], now)
            wanted = [c for c in sorted(present) if self.federator.may_answer(c) and c not in self._given_up]
            self.policy.set_present(set(present) - self._given_up, now)
        due = [c for c in wanted if self._is_free(c, now)]
        for client in due:
            self._unanswered.add(client)
            self.policy.arrive(client, now)
        return {client: self._message(client) for client in due}

    def take_reply(self, client: int, content: Mapping[str, Any] | None, now: float) -> None:
        """Take a client's reply, whatever it is made of; None: the client could not be reached, or failed."""
        self._unanswered.discard(client)
        if content is None:
            self.figures.refused["no_answer"] += 1
            self.policy.excuse(client, now)
            self._not_before[client] = now + RETRY_SECONDS
            return
        try:
            hello = self._checked_hello(client, content.get("hello"))
        except Cut as cut:
            self.policy.log("refused", client=client, text=cut.text)
            self.figures.refused[cut.reason] += 1
            self.policy.excuse(client, now)
            self._given_up.add(client)
            return
        kept = content.get("kept")
        self._position[client] = kept if type(kept) is int and 0 <= kept <= hello.round else 0
        if self.finished:
            self._take_final_digest(client, hello, content.get("digest"), now)
        elif "report" in content:
            self._take_report(client, content["report"], now)
        else:  # it lacked records: with those from its position on it can report, but not as often as it likes
            self._send_again(client, now)

    def tick(self, now: float) -> None:
        """Decide the round if it is complete, or if its deadline has passed."""
        if self.federator.round is None:
            return
        outcome = self.policy.decide(now)
        if outcome is not None and outcome.decision.values is not None:
            self.policy.log("decided", round=outcome.decision.round, chain=outcome.decision.chain.hex()[:16])

    def _is_free(self, client: int, now: float) -> bool:
        """Return whether this client can be sent a message: it has answered the last one, or its retry is due."""
        return client not in self._unanswered and now >= self._not_before.get(client, now)

    def _open(self, free: Collection[int], now: float) -> None:
        self._given_up.clear()
        self._resent.clear()
        self.policy.set_present(free, now)  # these are sent a message now, and waited for; the others once they are
        self.policy.open_round(now)

    def _message(self, client: int) -> Content:
        begin, frames = self._position.get(client, 0), []
        if client in self.policy.to_replay:
            self.policy.to_replay.discard(client)
            begin, frames = 0, [encode_bare(REPLAY)]
        reached = begin
        while reached < len(self.ledger):
            data, count = self.ledger.chunk(reached, CHUNK_BYTES)
            frames.append(bytes([RECORDS]) + data)
            reached += count
        opened = Opened(len(self.ledger), self.ledger.chain, self.policy.rounds)
        frames.append(encode_bare(ENDED) if self.finished else encode_opened(opened))
        traffic = self.figures.clients[client]
        traffic.payload_out += self.policy.payload * (reached - begin)
        traffic.message_out += sum(map(len, frames))
        return {"opening": self._opening, "client": client, "from": begin, "frames": frames}

    def _checked_hello(self, client: int, frame: Any) -> Hello:
        """Return the hello; the transport has proven who the client is, and the hello must agree."""
        try:
            hello = decode_hello(frame)
        except ProtocolError as error:
            raise Cut("bad_hello", "INVALID_ARGUMENT", str(error)) from None
        check_identity(hello, Identity(VOTER, client))
        check_hello(hello, self.ledger)
        return hello

    def _take_report(self, client: int, frame: Any, now: float) -> None:
        self.figures.clients[client].message_in += len(frame) if isinstance(frame, bytes) else 0
        reason = self.policy.take_report(client, frame, now)
        if reason in (ACCEPTED, LATE):  # who was late is sent the open round next
            return
        self.policy.excuse(client, now)  # nothing more can come until it is sent another message
        if reason not in ("wrong_round", "no_round"):
            self._given_up.add(client)

    def _take_final_digest(self, client: int, hello: Hello, digest: Any, now: float) -> None:
        if hello.round == len(self.ledger) and isinstance(digest, str):
            self.final_digests[client] = digest[:64]
        else:
            self._send_again(client, now)

    def _send_again(self, client: int, now: float) -> None:
        """Send another message, the first time at once."""
        self._not_before[client] = now + RETRY_SECONDS if client in self._resent else now
        self._resent.add(client)


def answer_message(message: Mapping[str, Any], build: Callable[[Header, int], Participant]) -> Content:
    """Return a client's reply to a message; `build` makes the participant as the message before has left it.

    Raises:
        LedgerError: the federator's ledger does not continue what was seen.
        ProtocolError: this is not such a message.
    """
    opening, client, begin, frames = (message.get(name) for name in ("opening", "client", "from", "frames"))
    if not (isinstance(opening, bytes) and type(client) is int and type(begin) is int and isinstance(frames, list)):
        raise ProtocolError(f"not a federator's message: it holds {', '.join(map(repr, message)) or 'nothing'}")
    participant = build(read_opening(io.BytesIO(opening), "the message")[0], client)
    report = None
    starts_over = bool(frames) and kind_of(frames[0]) == REPLAY
    if starts_over or begin == participant.client.next_round:
        for frame in frames:
            report = participant.receive(frame)
    participant.save()
    reached = participant.client.next_round
    reply: Content = {"hello": participant.hello(), "kept": reached if participant.state.keeps_weights else 0}
    if report is not None:
        reply["report"] = report
    if participant.ended:
        reply["digest"] = participant.client.parameters.digest()
    return reply
