"""Rounds by messages: the same bits as over a stream, whoever forgets, is late, fails or is Byzantine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Blobs, config, one_thread  # noqa: F401
from wire import K, hello_of, make_header

from cyber0 import Simulation, aggregate
from cyber0.errors import LedgerError, ProtocolError
from cyber0.ledger import Header, Ledger, first_chain
from cyber0.model.stored import digest_of
from cyber0.protocol.client import replay
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import REPLAY, Report, encode_report, kind_of
from cyber0.serve import state as states
from cyber0.serve.mailbox import RETRY_SECONDS, Content, Mailbox, answer_message
from cyber0.serve.participant import Participant
from cyber0.serve.policy import RoundPolicy
from cyber0.serve.state import RecordState

CLIENTS = 4
SETTINGS = (f"federation.clients={CLIENTS}", "federation.byzantine=0", "task.dtype=bfloat16", "rounds=6")


def make_mailbox(
    header: Header | None = None, *, rounds: int = 6, digest_every: int = 0, deadline_s: float = 60.0
) -> Mailbox:
    ledger = Ledger.create(None, header or make_header(CLIENTS), durability="none")
    federator = Federator(ledger, aggregate.make("trimmed_mean", 0.25), CLIENTS, lr_at=lambda t: 0.1, rounds=rounds)
    return Mailbox(RoundPolicy(federator, rounds=rounds, deadline_s=deadline_s, digest_every=digest_every))


class MessageClient:
    """A client with a model that starts anew for every message and knows no more than its record, as Flower's do."""

    def __init__(self, number: int, *overrides: str) -> None:
        self.number, self.record = number, dict[str, Any]()
        self._config = config(*SETTINGS, *overrides)

    def build(self, header: Header, number: int) -> Participant:
        assert number == self.number
        client = Simulation(self._config, task=Blobs()).client
        w0 = {name: t.clone() for name, t in client.parameters.state().items()}
        state = RecordState(self.record, first_chain(header), number)
        participant = Participant(client, state, number, start=lambda: w0)
        snapshot = state.snapshot()
        if snapshot is not None:
            participant.resume_from(snapshot)
        return participant

    def answer(self, message: Content) -> Content:
        return answer_message(message, self.build)


class Light:
    """A client without a model, which sends the same numbers every round."""

    def __init__(self, mailbox: Mailbox, number: int) -> None:
        self.number, self.ledger = number, mailbox.ledger

    def answer(self, message: Content, **changes: Any) -> Content:
        reached = len(self.ledger)
        hello = hello_of(self.ledger.header, self.number, round=reached, chain=self.ledger.chain[:8])
        values = np.arange(K, dtype=np.float32) + self.number
        report = encode_report(Report(self.number, reached, values))
        return {"hello": hello, "kept": reached, "report": report, "digest": "ab", **changes}


def lights(mailbox: Mailbox) -> dict[int, Light]:
    return {number: Light(mailbox, number) for number in range(CLIENTS)}


def exchange(mailbox: Mailbox, clients: dict[int, Any], now: float = 0.0) -> dict[int, Content]:
    """Write to all, take all answers, and return the messages."""
    messages = mailbox.outgoing(list(clients), now)
    for number, message in messages.items():
        mailbox.take_reply(number, clients[number].answer(message), now)
    mailbox.tick(now)
    return messages


def replayed(mailbox: Mailbox, *overrides: str) -> str:
    parameters = Simulation(config(*SETTINGS, *overrides), task=Blobs()).client.parameters
    replay(mailbox.ledger.header, parameters, mailbox.ledger)
    return parameters.digest()


def begun(*overrides: str, **options: Any) -> tuple[Mailbox, dict[int, MessageClient]]:
    header = Simulation(config(*SETTINGS, *overrides), task=Blobs()).ledger.header
    return make_mailbox(header, **options), {n: MessageClient(n, *overrides) for n in range(CLIENTS)}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["serve.seed_mode=chained", "method.local_epochs=3", "serve.codec=log8"])
def test_messages_lead_every_client_to_the_bits_of_the_replayed_ledger(setting: str) -> None:
    mailbox, clients = begun(setting)
    for _ in range(7):
        assert len(exchange(mailbox, clients)) == CLIENTS
    assert mailbox.finished and mailbox.figures.decided == 6
    assert mailbox.final_digests == dict.fromkeys(range(CLIENTS), replayed(mailbox, setting))


@pytest.mark.slow
def test_a_letter_brings_only_what_its_client_lacks() -> None:
    mailbox, clients = begun()
    sizes = [sum(map(len, exchange(mailbox, clients)[0]["frames"])) for _ in range(6)]
    assert sizes[1] > sizes[0] and len(set(sizes[1:])) == 1


def test_a_node_that_lost_what_it_knew_gets_everything_again_in_the_same_round() -> None:
    mailbox, clients = begun()
    for _ in range(3):
        exchange(mailbox, clients)
    clients[2].record.clear()
    assert exchange(mailbox, clients)[2]["from"] == 2 and len(mailbox.ledger) == 3
    again = exchange(mailbox, clients)
    assert list(again) == [2] and again[2]["from"] == 0
    assert len(mailbox.ledger) == 4 and next(mailbox.ledger.records(3)).reported.all()


def test_weights_that_are_too_large_to_be_kept_are_replayed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "RECORD_BYTES", 0)
    mailbox, clients = begun(rounds=3)
    for _ in range(4):
        assert all(message["from"] == 0 for message in exchange(mailbox, clients).values())
    assert set(mailbox.final_digests.values()) == {replayed(mailbox)}


@pytest.mark.slow
def test_a_client_outside_the_majority_is_sent_back_to_w0() -> None:
    mailbox, clients = begun("serve.digest_every=2", digest_every=2)
    for _ in range(2):
        exchange(mailbox, clients)
    kept = clients[1].record
    wrong = {n: t + 1 for n, t in states.deserialise(kept["weights"]).items()}
    kept["weights"] = states.serialise(wrong)
    kept["digest"] = digest_of(wrong[entry.name] for entry in mailbox.ledger.header.layout)
    exchange(mailbox, clients)
    assert mailbox.figures.alarms == 1
    messages = exchange(mailbox, clients)
    assert [n for n, message in messages.items() if kind_of(message["frames"][0]) == REPLAY] == [1]
    for _ in range(3):
        exchange(mailbox, clients)
    assert mailbox.final_digests == dict.fromkeys(range(CLIENTS), replayed(mailbox))


def test_a_client_refuses_a_ledger_that_was_rewritten() -> None:
    mailbox, clients = begun()
    for _ in range(2):
        exchange(mailbox, clients)
    other, others = begun()
    exchange(other, {n: others[n] for n in range(3)} | {3: Silent()})  # another first round
    exchange(other, others)
    with pytest.raises(LedgerError, match=r"does not (continue|verify)"):
        other._position[0] = 1
        clients[0].answer(other.outgoing([0], 0.0)[0])


class Silent:
    def answer(self, message: Content) -> None:
        return None


def test_no_round_is_spent_while_too_few_are_there() -> None:
    mailbox = make_mailbox()
    two = {n: light for n, light in lights(mailbox).items() if n < 2}
    for now in range(0, 1000, 100):
        exchange(mailbox, two, float(now))
    assert len(mailbox.ledger) == 0
    exchange(mailbox, lights(mailbox), 1000.0)
    assert next(mailbox.ledger.records(0)).reported.all()


def test_who_is_silent_costs_a_deadline_and_is_then_not_waited_for() -> None:
    mailbox = make_mailbox(deadline_s=10.0)
    clients = lights(mailbox)
    messages = mailbox.outgoing(range(CLIENTS), 0.0)
    for number in range(3):
        mailbox.take_reply(number, clients[number].answer(messages[number]), 1.0)
    late = clients[3].answer(messages[3])
    mailbox.tick(9.9)
    assert len(mailbox.ledger) == 0
    mailbox.tick(10.0)
    assert len(mailbox.ledger) == 1 and mailbox.figures.deadline_misses == 1
    assert 3 not in exchange(mailbox, clients, 11.0)  # no second message to who is busy
    assert len(mailbox.ledger) == 2
    mailbox.outgoing([0], 12.0)
    mailbox.take_reply(3, late, 12.0)
    assert mailbox.figures.refused == {"late": 1}
    assert 3 in mailbox.outgoing(range(CLIENTS), 12.0)


def test_a_node_that_failed_is_written_to_again_after_a_while_and_holds_up_nobody() -> None:
    mailbox = make_mailbox()
    clients: dict[int, Any] = {**lights(mailbox), 1: Silent()}
    exchange(mailbox, clients, 0.0)
    assert len(mailbox.ledger) == 1 and mailbox.figures.refused == {"no_answer": 1}
    assert 1 not in exchange(mailbox, clients, 1.0)
    assert 1 in exchange(mailbox, lights(mailbox), RETRY_SECONDS)
    assert next(mailbox.ledger.records(2)).reported.all()


def test_too_few_answers_at_the_deadline_abandon_the_round() -> None:
    mailbox = make_mailbox(deadline_s=5.0)
    mailbox.outgoing(range(CLIENTS), 0.0)
    mailbox.tick(5.0)
    assert mailbox.figures.abandoned == 1 and next(mailbox.ledger.records(0)).values is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [(lambda h: {"hello": hello_of(h, 0)}, "other_identity"),
     (lambda h: {"hello": hello_of(h, 1, run=bytes(32))}, "other_run"),
     (lambda h: {"hello": hello_of(h, 1, weights_digest=bytes(32))}, "other_model"),
     (lambda h: {"hello": hello_of(h, 1, chain=bytes(8))}, "other_history"),
     (lambda h: {"hello": hello_of(h, 1, round=9)}, "other_history"), (lambda h: {"hello": None}, "bad_hello"),
     (lambda h: {"report": b"x"}, "truncated"), (lambda h: {"report": 3}, "malformed"),
     (lambda h: {"report": encode_report(Report(1, 0, np.full(K, np.nan, np.float32)))}, "not_finite"),
     (lambda h: {"report": encode_report(Report(1, 7, np.ones(K, np.float32)))}, "wrong_round")],
)  # fmt: skip
def test_a_hostile_answer_is_counted_under_its_reason_and_the_round_goes_on(
    changes: Callable[[Header], Content], reason: str
) -> None:
    mailbox = make_mailbox()
    clients = lights(mailbox)
    for number, message in mailbox.outgoing(range(CLIENTS), 0.0).items():
        hostile = changes(mailbox.ledger.header) if number == 1 else {}
        mailbox.take_reply(number, clients[number].answer(message, **hostile), 0.0)
    mailbox.tick(0.0)
    assert mailbox.figures.refused == {reason: 1}
    assert next(mailbox.ledger.records(0)).reported.tolist() == [True, False, True, True]


anything = st.none() | st.integers() | st.binary(max_size=200) | st.text(max_size=20) | st.floats()


@given(st.dictionaries(st.sampled_from(["hello", "kept", "report", "digest", "x"]), anything), st.booleans())
def test_no_answer_can_stop_the_federation(content: Content, well_formed_hello: bool) -> None:
    mailbox = make_mailbox(rounds=1)
    clients = lights(mailbox)
    messages = mailbox.outgoing(range(CLIENTS), 0.0)
    if well_formed_hello:
        content = {**content, "hello": hello_of(mailbox.ledger.header, 0)}
    mailbox.take_reply(0, content, 0.0)
    for number in (1, 2, 3):
        mailbox.take_reply(number, clients[number].answer(messages[number]), 0.0)
    mailbox.tick(60.0)
    assert mailbox.finished
    mailbox.take_reply(0, content, 61.0)


def test_what_is_no_letter_is_refused() -> None:
    for message in ({}, {"opening": b"", "client": "0", "from": 0, "frames": []}):
        with pytest.raises(ProtocolError, match="not a federator's message"):
            answer_message(message, MessageClient(0).build)


def test_a_record_keeps_the_private_seed_of_its_run_and_forgets_other_runs() -> None:
    record: dict[str, Any] = {}
    first = RecordState(record, bytes(32), 1)
    first.remember(5, bytes(8))
    again = RecordState(record, bytes(32), 1)
    assert again.seed == first.seed and again.seen is not None and again.seen.round == 5
    assert RecordState(record, b"\1" * 32, 1).seen is None
    with pytest.raises(LedgerError, match="damaged"):
        record["seen"] = b"damaged"
        RecordState(record, b"\1" * 32, 1)
