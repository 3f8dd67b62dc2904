"""Rounds by letters: the same bits as over a stream, whoever forgets, is late, fails or lies."""

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
from cyber0.protocol.client import replay
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import REPLAY, Report, encode_report, kind_of
from cyber0.serve import state as states
from cyber0.serve.mailbox import RETRY_SECONDS, Content, Post, answer_letter
from cyber0.serve.participant import Participant
from cyber0.serve.state import RecordState

CLIENTS = 4
SETTINGS = (f"federation.clients={CLIENTS}", "federation.byzantine=0", "task.dtype=bfloat16", "rounds=6")


def make_post(
    header: Header | None = None, *, rounds: int = 6, digest_every: int = 0, deadline_s: float = 60.0
) -> Post:
    ledger = Ledger.create(None, header or make_header(CLIENTS), durability="none")
    federator = Federator(ledger, aggregate.make("trimmed_mean", 0.25), CLIENTS, lr_at=lambda t: 0.1)
    return Post(federator, rounds=rounds, deadline_s=deadline_s, digest_every=digest_every)


class Correspondent:
    """A client with a model that starts anew for every letter and knows no more than its record, as Flower's do."""

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
            participant.begin_at(snapshot)
        return participant

    def answer(self, letter: Content) -> Content:
        return answer_letter(letter, self.build)


class Light:
    """A client without a model, which sends the same numbers every round."""

    def __init__(self, post: Post, number: int) -> None:
        self.number, self.ledger = number, post.ledger

    def answer(self, letter: Content, **changes: Any) -> Content:
        reached = len(self.ledger)
        hello = hello_of(self.ledger.header, self.number, round=reached, chain=self.ledger.chain[:8])
        values = np.arange(K, dtype=np.float32) + self.number
        report = encode_report(Report(self.number, reached, values))
        return {"hello": hello, "kept": reached, "report": report, "digest": "ab", **changes}


def lights(post: Post) -> dict[int, Light]:
    return {number: Light(post, number) for number in range(CLIENTS)}


def exchange(post: Post, clients: dict[int, Any], now: float = 0.0) -> dict[int, Content]:
    """Write to all, take all answers, and return the letters."""
    letters = post.letters(list(clients), now)
    for number, letter in letters.items():
        post.answer(number, clients[number].answer(letter), now)
    post.tick(now)
    return letters


def replayed(post: Post, *overrides: str) -> str:
    parameters = Simulation(config(*SETTINGS, *overrides), task=Blobs()).client.parameters
    replay(post.ledger.header, parameters, post.ledger)
    return parameters.digest()


def begun(*overrides: str, **options: Any) -> tuple[Post, dict[int, Correspondent]]:
    header = Simulation(config(*SETTINGS, *overrides), task=Blobs()).ledger.header
    return make_post(header, **options), {n: Correspondent(n, *overrides) for n in range(CLIENTS)}


@pytest.mark.parametrize("setting", ["serve.seed_mode=chained", "method.local_epochs=3", "serve.codec=log8"])
def test_letters_lead_every_client_to_the_bits_of_the_replayed_ledger(setting: str) -> None:
    post, clients = begun(setting)
    for _ in range(7):
        assert len(exchange(post, clients)) == CLIENTS
    assert post.finished and post.figures.decided == 6
    assert post.finals == dict.fromkeys(range(CLIENTS), replayed(post, setting))


def test_a_letter_brings_only_what_its_client_lacks() -> None:
    post, clients = begun()
    sizes = [sum(map(len, exchange(post, clients)[0]["frames"])) for _ in range(6)]
    assert sizes[1] > sizes[0] and len(set(sizes[1:])) == 1


def test_a_node_that_lost_what_it_knew_gets_everything_again_in_the_same_round() -> None:
    post, clients = begun()
    for _ in range(3):
        exchange(post, clients)
    clients[2].record.clear()
    assert exchange(post, clients)[2]["from"] == 2 and len(post.ledger) == 3
    again = exchange(post, clients)
    assert list(again) == [2] and again[2]["from"] == 0
    assert len(post.ledger) == 4 and next(post.ledger.records(3)).reported.all()


def test_weights_that_are_too_large_to_be_kept_are_replayed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "RECORD_BYTES", 0)
    post, clients = begun(rounds=3)
    for _ in range(4):
        assert all(letter["from"] == 0 for letter in exchange(post, clients).values())
    assert set(post.finals.values()) == {replayed(post)}


def test_a_client_outside_the_majority_is_sent_back_to_w0() -> None:
    post, clients = begun("serve.digest_every=2", digest_every=2)
    for _ in range(2):
        exchange(post, clients)
    kept = clients[1].record
    kept["weights"] = states.serialise({n: t + 1 for n, t in states.deserialise(kept["weights"]).items()})
    exchange(post, clients)
    assert post.figures.alarms == 1
    letters = exchange(post, clients)
    assert [n for n, letter in letters.items() if kind_of(letter["frames"][0]) == REPLAY] == [1]
    for _ in range(3):
        exchange(post, clients)
    assert post.finals == dict.fromkeys(range(CLIENTS), replayed(post))


def test_a_client_refuses_a_ledger_that_was_rewritten() -> None:
    post, clients = begun()
    for _ in range(2):
        exchange(post, clients)
    other, others = begun()
    exchange(other, {n: others[n] for n in range(3)} | {3: Silent()})  # another first round
    exchange(other, others)
    with pytest.raises(LedgerError, match=r"does not (go on|verify)"):
        other._position[0] = 1
        clients[0].answer(other.letters([0], 0.0)[0])


class Silent:
    def answer(self, letter: Content) -> None:
        return None


def test_no_round_is_spent_while_too_few_are_there() -> None:
    post = make_post()
    two = {n: light for n, light in lights(post).items() if n < 2}
    for now in range(0, 1000, 100):
        exchange(post, two, float(now))
    assert len(post.ledger) == 0
    exchange(post, lights(post), 1000.0)
    assert next(post.ledger.records(0)).reported.all()


def test_who_is_silent_costs_a_deadline_and_is_then_not_waited_for() -> None:
    post = make_post(deadline_s=10.0)
    clients = lights(post)
    letters = post.letters(range(CLIENTS), 0.0)
    for number in range(3):
        post.answer(number, clients[number].answer(letters[number]), 1.0)
    late = clients[3].answer(letters[3])
    post.tick(9.9)
    assert len(post.ledger) == 0
    post.tick(10.0)
    assert len(post.ledger) == 1 and post.figures.deadline_misses == 1
    assert 3 not in exchange(post, clients, 11.0)  # no second letter to who is busy
    assert len(post.ledger) == 2
    post.letters([0], 12.0)
    post.answer(3, late, 12.0)
    assert post.figures.refused == {"wrong_round": 1}
    assert 3 in post.letters(range(CLIENTS), 12.0)


def test_a_node_that_failed_is_written_to_again_after_a_while_and_holds_up_nobody() -> None:
    post = make_post()
    clients: dict[int, Any] = {**lights(post), 1: Silent()}
    exchange(post, clients, 0.0)
    assert len(post.ledger) == 1 and post.figures.refused == {"no_answer": 1}
    assert 1 not in exchange(post, clients, 1.0)
    assert 1 in exchange(post, lights(post), RETRY_SECONDS)
    assert next(post.ledger.records(2)).reported.all()


def test_too_few_answers_at_the_deadline_abandon_the_round() -> None:
    post = make_post(deadline_s=5.0)
    post.letters(range(CLIENTS), 0.0)
    post.tick(5.0)
    assert post.figures.abandoned == 1 and next(post.ledger.records(0)).values is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [(lambda h: {"hello": hello_of(h, 0)}, "bad_hello"),
     (lambda h: {"hello": hello_of(h, 1, run=bytes(32))}, "bad_hello"),
     (lambda h: {"hello": hello_of(h, 1, weights_digest=bytes(32))}, "bad_hello"),
     (lambda h: {"hello": hello_of(h, 1, chain=bytes(8))}, "bad_hello"),
     (lambda h: {"hello": hello_of(h, 1, round=9)}, "bad_hello"), (lambda h: {"hello": None}, "bad_hello"),
     (lambda h: {"report": b"x"}, "malformed"), (lambda h: {"report": 3}, "malformed"),
     (lambda h: {"report": encode_report(Report(1, 0, np.full(K, np.nan, np.float32)))}, "not_finite"),
     (lambda h: {"report": encode_report(Report(1, 7, np.ones(K, np.float32)))}, "wrong_round")],
)  # fmt: skip
def test_a_hostile_answer_is_counted_under_its_reason_and_the_round_goes_on(
    changes: Callable[[Header], Content], reason: str
) -> None:
    post = make_post()
    clients = lights(post)
    for number, letter in post.letters(range(CLIENTS), 0.0).items():
        hostile = changes(post.ledger.header) if number == 1 else {}
        post.answer(number, clients[number].answer(letter, **hostile), 0.0)
    post.tick(0.0)
    assert post.figures.refused == {reason: 1}
    assert next(post.ledger.records(0)).reported.tolist() == [True, False, True, True]


anything = st.none() | st.integers() | st.binary(max_size=200) | st.text(max_size=20) | st.floats()


@given(st.dictionaries(st.sampled_from(["hello", "kept", "report", "digest", "x"]), anything), st.booleans())
def test_no_answer_can_stop_the_federation(content: Content, well_formed_hello: bool) -> None:
    post = make_post(rounds=1)
    clients = lights(post)
    letters = post.letters(range(CLIENTS), 0.0)
    if well_formed_hello:
        content = {**content, "hello": hello_of(post.ledger.header, 0)}
    post.answer(0, content, 0.0)
    for number in (1, 2, 3):
        post.answer(number, clients[number].answer(letters[number]), 0.0)
    post.tick(60.0)
    assert post.finished
    post.answer(0, content, 61.0)


def test_what_is_no_letter_is_refused() -> None:
    for letter in ({}, {"opening": b"", "client": "0", "from": 0, "frames": []}):
        with pytest.raises(ProtocolError, match="no letter"):
            answer_letter(letter, Correspondent(0).build)


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
