"""The round policy by itself: deadlines, misses, digests and bars, on times that are handed in."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run
from wire import K, Voter, hello_of, make_header, make_hub, run_voter

from cyber0 import aggregate
from cyber0.ledger import Ledger
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import FOLLOWER, VOTER, Report, encode_report
from cyber0.serve.mailbox import Mailbox
from cyber0.serve.policy import ACCEPTED, BARRED_SECONDS, FORGIVEN_AFTER, MAX_MISSES, MAX_REPLAYS, RoundPolicy

CLIENTS, REQUIRED, DEADLINE = 4, 3, 10.0


def make_federator(participation: float = 1.0) -> Federator:
    ledger = Ledger.create(None, make_header(CLIENTS), durability="none")
    rule = aggregate.make("trimmed_mean", 0.25)
    return Federator(ledger, rule, CLIENTS, lr_at=lambda t: 0.1, participation=participation)


def make_policy(rounds: int = 1000, digest_every: int = 0) -> RoundPolicy:
    policy = RoundPolicy(make_federator(), rounds=rounds, deadline_s=DEADLINE, digest_every=digest_every)
    assert policy.federator.required == REQUIRED
    return policy


def all_present(**options: Any) -> RoundPolicy:
    policy = make_policy(**options)
    policy.open_round(0.0)
    for client in range(CLIENTS):
        policy.arrive(client, 0.0)
    return policy


def frame(policy: RoundPolicy, client: int, digest: bytes = b"", round: int | None = None) -> bytes:
    number = policy.federator.ledger.next_round if round is None else round
    return encode_report(Report(client, number, np.full(K, client, np.float32), digest))


def report(policy: RoundPolicy, *clients: int, digests: dict[int, bytes] | None = None) -> None:
    for client in clients:
        assert policy.take_report(client, frame(policy, client, (digests or {}).get(client, b""))) == ACCEPTED


def next_round(policy: RoundPolicy, now: float, *clients: int, **options: Any) -> Any:
    """Have these clients report, end the round, and open the next."""
    report(policy, *clients, **options)
    outcome = policy.decide(now)
    assert outcome is not None
    policy.open_round(now)
    return outcome


def test_the_deadline_counts_down_only_while_enough_reports_are_possible() -> None:
    policy = make_policy()
    policy.open_round(0.0)
    policy.arrive(0, 0.0)
    policy.arrive(1, 1.0)
    assert policy.due is None and not policy.overdue(1e9)
    policy.arrive(2, 5.0)
    assert policy.due == 15.0
    policy.depart(1, 6.0)
    assert policy.due is None
    policy.arrive(3, 7.0)
    assert policy.due == 17.0 and not policy.overdue(16.9) and policy.overdue(17.0)


def test_a_report_that_was_taken_counts_though_its_client_has_left() -> None:
    policy = make_policy()
    policy.open_round(0.0)
    for client in range(3):
        policy.arrive(client, 0.0)
    report(policy, 0)
    policy.depart(0, 1.0)
    assert policy.due == DEADLINE
    report(policy, 1, 2)
    assert policy.complete


def test_misses_double_the_rounds_in_which_a_client_is_not_waited_for() -> None:
    policy, now, gaps, waited = all_present(), 0.0, [], 0
    for number in range(40):
        report(policy, 0, 1, 2)
        if policy.complete:
            policy.decide(now)
        else:
            now += DEADLINE
            outcome = policy.decide(now)
            assert outcome is not None and outcome.decision.values is not None
            gaps.append(number - waited)
            waited = number
        policy.open_round(now)
    assert gaps == [0, 3, 5, 9, 17] and policy.figures.clients[3].misses == 5


def test_the_time_for_which_a_client_is_not_waited_for_is_limited() -> None:
    policy = all_present(rounds=1 << 20)
    for _ in range(3 * MAX_MISSES):
        policy._count_misses()
    assert policy.is_excused(0)
    assert int(policy._excused_until.max()) == 1 + (1 << MAX_MISSES)


def test_so_many_reports_in_time_make_up_for_one_miss() -> None:
    policy = all_present()
    for _ in range(2):  # with a second miss it would not be waited for in 4 rounds, with a first in 2
        report(policy, 0, 1, 2)
        policy.decide(policy.due or 0.0)
        policy.open_round(0.0)
        assert policy.is_excused(3)
        for _ in range(FORGIVEN_AFTER):
            next_round(policy, 0.0, 0, 1, 2, 3)
        assert policy._misses[3] == 0 and not policy.is_excused(3)
    assert policy.figures.clients[3].misses == 2


def test_an_excused_client_may_report_and_is_waited_for_again_when_its_time_is_over() -> None:
    policy = all_present()
    report(policy, 0, 1, 2)
    policy.decide(DEADLINE)
    policy.open_round(DEADLINE)
    report(policy, 0, 1, 3)
    assert not policy.complete  # of those who are waited for 2 is missing
    report(policy, 2)
    outcome = policy.decide(DEADLINE)
    assert outcome is not None and policy.federator.ledger.last is not None
    assert policy.federator.ledger.last.reported.all()


@pytest.mark.parametrize(
    ("content", "reason", "waited_for"),
    [(b"", "truncated", False), (b"x" * 50, "malformed", False), (None, "malformed", False), (3, "malformed", False),
     (encode_report(Report(0, 0, np.full(K, np.inf, np.float32))), "not_finite", False),
     (encode_report(Report(0, 7, np.ones(K, np.float32))), "wrong_round", True)],
)  # fmt: skip
def test_a_report_that_can_not_count_is_refused_by_reason(content: Any, reason: str, waited_for: bool) -> None:
    policy = all_present()
    report(policy, 1, 2, 3)
    assert policy.take_report(0, content) == reason and policy.figures.refused == {reason: 1}
    assert policy.complete != waited_for


def test_who_is_outside_the_majority_of_digests_replays_a_few_times_at_most() -> None:
    policy = all_present(digest_every=1)
    next_round(policy, 0.0, 0, 1, 2, 3)  # in round 0 no digest is due
    digests = {0: b"same....", 1: b"same....", 2: b"other...", 3: b"same...."}
    for time in range(MAX_REPLAYS + 2):
        outcome = next_round(policy, 0.0, 0, 1, 2, 3, digests=digests)
        assert outcome.differing == [2] and policy.figures.alarms == time + 1
        assert (policy.to_replay == {2}) == (time < MAX_REPLAYS) and policy.present[2] == (time >= MAX_REPLAYS)
        policy.to_replay.clear()
        policy.arrive(2, 0.0)
    assert next_round(policy, 0.0, 0, 1, 2, 3, digests=dict.fromkeys(range(4), b"same....")).differing == []


def test_a_bar_holds_for_one_participant_and_for_a_while() -> None:
    policy = make_policy()
    policy.bar(VOTER, 1, 5.0)
    assert policy.is_barred(VOTER, 1, 5.0) and policy.is_barred(VOTER, 1, 4.9 + BARRED_SECONDS)
    assert not policy.is_barred(VOTER, 1, 5.0 + BARRED_SECONDS)
    assert not policy.is_barred(VOTER, 2, 5.0) and not policy.is_barred(FOLLOWER, 1, 5.0)


def test_with_partial_participation_the_deadline_needs_enough_clients_though_none_of_them_be_invited() -> None:
    policy = RoundPolicy(make_federator(0.5), rounds=9, deadline_s=DEADLINE)
    policy.open_round(0.0)
    assert policy.federator.required == 1
    uninvited = next(client for client in range(CLIENTS) if not policy.federator.may_answer(client))
    assert policy.due is None
    policy.arrive(uninvited, 1.0)
    assert policy.due == 11.0


def test_between_rounds_no_deadline_counts_down() -> None:
    policy = all_present()
    report(policy, 0, 1, 2, 3)
    assert policy.decide(1.0) is not None
    policy.arrive(0, 2.0)
    policy.set_present([0, 1, 2], 3.0)
    assert policy.due is None and not policy.overdue(1e9)
    policy.open_round(4.0)
    assert policy.due == 4.0 + DEADLINE


def test_those_who_are_not_named_as_present_are_not() -> None:
    policy = all_present()
    policy.set_present([1, 3], 1.0)
    assert policy.present.tolist() == [False, True, False, True] and policy.due is None
    assert policy.federator.silent().tolist() == [0, 1, 2, 3]  # who is waited for stays as it was


def test_reports_that_count_and_the_time_they_take_are_figures() -> None:
    policy = all_present()
    for now in (3.0, 5.0):
        next_round(policy, now, 0, 1, 2, 3)
    figures = policy.figures
    assert [(client.reports, client.payload_in) for client in figures.clients] == [(2, 2 * 4 * K)] * CLIENTS
    assert (figures.decided, figures.abandoned, figures.seconds["collect"]) == (2, 0, 5.0)


def test_what_happens_is_logged() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    policy = all_present(digest_every=1)
    policy.log = lambda event, **details: events.append((event, details))
    report(policy, 0, 1)
    policy.decide(DEADLINE)
    policy.open_round(DEADLINE)
    next_round(policy, DEADLINE, 0, 1, 2, 3, digests={0: b"same....", 1: b"same....", 2: b"other...", 3: b"same...."})
    assert events == [
        ("deadline", {"round": 0, "answered": 2, "silent": [2, 3]}), ("abandoned", {"round": 0}),
        ("digests_differ", {"round": 1, "clients": [2], "compared": 4}),
    ]  # fmt: skip


def test_a_forced_decision_counts_no_misses() -> None:
    policy = all_present()
    report(policy, 0, 1, 2)
    assert policy.decide(5.0) is None
    outcome = policy.decide(5.0, force=True)
    assert outcome is not None and outcome.decision.values is not None and policy.figures.deadline_misses == 0


events = st.lists(
    st.tuples(st.sampled_from(["arrive", "depart", "report", "bad", "excuse", "wait"]), st.integers(0, CLIENTS - 1)),
    max_size=60,
)


@given(events)
def test_whatever_happens_no_round_is_decided_too_early_or_left_open_too_long(happened: list[tuple[str, int]]) -> None:
    policy, now, opened = make_policy(), 0.0, 0.0
    policy.open_round(now)
    for what, client in happened:
        if what == "arrive":
            policy.arrive(client, now)
        elif what == "depart":
            policy.depart(client, now)
        elif what == "excuse":
            policy.excuse(client)
        elif what == "wait":
            now += DEADLINE / 3
        else:
            policy.take_report(client, frame(policy, client) if what == "report" else b"?")
        answered, overdue = policy.federator.answered, policy.overdue(now)
        waited_for = policy.federator.silent().tolist()
        outcome = policy.decide(now)
        if outcome is None:
            assert policy.due is None or opened <= now < policy.due <= now + DEADLINE
            continue
        assert (outcome.decision.values is not None) == (answered >= REQUIRED)
        assert overdue or (answered >= REQUIRED and (not waited_for or answered == CLIENTS))
        opened = now
        policy.open_round(now)
        assert all(policy.is_excused(client) for client in waited_for) or not overdue
    ledger = policy.federator.ledger
    assert policy.figures.decided + policy.figures.abandoned == ledger.next_round


# Both transports go by it.


def late_client_by_streams(rounds: int) -> RoundPolicy:
    async def work() -> RoundPolicy:
        hub = make_hub(CLIENTS, rounds, deadline_s=DEADLINE)
        late = Voter(hub.ledger.header, 3)
        late._answer = lambda round, values: late.honest(round - 1, values) if round else None
        hub.start()
        await asyncio.gather(
            *(run_voter(hub, voter) for voter in (late, *(Voter(hub.ledger.header, c) for c in range(3))))
        )
        return hub.policy

    policy: RoundPolicy = run(work(), patience=1e6)
    return policy


def late_client_by_messages(rounds: int) -> RoundPolicy:
    mailbox, now = Mailbox(make_policy(rounds)), 0.0

    def reply(client: int) -> dict[str, Any]:
        number, chain = len(mailbox.ledger), mailbox.ledger.chain
        report = encode_report(Report(client, number, np.full(K, client + number, np.float32)))
        hello = hello_of(mailbox.ledger.header, client, round=number, chain=chain[:8])
        return {"hello": hello, "kept": number, "report": report}

    while not mailbox.finished:
        replies = {client: reply(client) for client in mailbox.outgoing(range(CLIENTS), now)}
        for client in range(3):
            mailbox.take_reply(client, replies[client], now)
        mailbox.tick(now)
        if mailbox.federator.round is not None:
            now += DEADLINE
            mailbox.tick(now)
        mailbox.take_reply(3, replies[3], now)
    return mailbox.policy


def test_streams_and_messages_decide_the_same_rounds_and_count_the_same_misses() -> None:
    rounds = 30
    streams, messages = late_client_by_streams(rounds), late_client_by_messages(rounds)
    assert [r.chain for r in streams.federator.ledger] == [r.chain for r in messages.federator.ledger]
    assert streams.figures.deadline_misses == messages.figures.deadline_misses == 4
    for name in ("_misses", "_in_time", "_excused_until"):
        assert getattr(streams, name).tolist() == getattr(messages, name).tolist()
