"""The round policy by itself: how long rounds wait and for whom, digests, bars, on times that are handed in."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run
from wire import K, answer_newest, hello_of, make_header, make_hub

from cyber0 import aggregate
from cyber0.ledger import Ledger
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import FOLLOWER, VOTER, Report, encode_report
from cyber0.serve.mailbox import Mailbox
from cyber0.serve.pace import DEBT_SECONDS, PLENTY_SECONDS, STORED_SECONDS, WaitBudget
from cyber0.serve.policy import ACCEPTED, BARRED_SECONDS, JITTER_SECONDS, LATE, LONGEST_WAIT, MAX_REPLAYS, RoundPolicy

CLIENTS, REQUIRED, DEADLINE = 4, 3, 10.0


def make_federator(participation: float = 1.0, *, clients: int = CLIENTS, beta: float = 0.25) -> Federator:
    ledger = Ledger.create(None, make_header(clients), durability="none")
    rule = aggregate.make("trimmed_mean", beta)
    return Federator(ledger, rule, clients, lr_at=lambda t: 0.1, participation=participation)


def make_policy(rounds: int = 1000, digest_every: int = 0, deadline_s: float = DEADLINE) -> RoundPolicy:
    policy = RoundPolicy(make_federator(), rounds=rounds, deadline_s=deadline_s, digest_every=digest_every)
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


def report(policy: RoundPolicy, *clients: int, now: float = 0.0, digests: dict[int, bytes] | None = None) -> None:
    for client in clients:
        assert policy.take_report(client, frame(policy, client, (digests or {}).get(client, b"")), now) == ACCEPTED


def late(policy: RoundPolicy, client: int, round: int, now: float) -> None:
    assert policy.take_report(client, frame(policy, client, round=round), now) == LATE


def next_round(policy: RoundPolicy, now: float, *clients: int, **options: Any) -> Any:
    """Have these clients report, end the round, and open the next."""
    report(policy, *clients, now=now, **options)
    outcome = policy.decide(now)
    assert outcome is not None
    policy.open_round(now)
    return outcome


def test_a_rule_with_a_reference_waits_for_it_and_spends_no_round_while_it_is_away() -> None:
    ledger = Ledger.create(None, make_header(5), durability="none")
    federator = Federator(ledger, aggregate.make("fit_reference", 0.2), 5, lr_at=lambda t: 0.1)
    policy = RoundPolicy(federator, rounds=1000, deadline_s=DEADLINE, digest_every=0)
    policy.open_round(0.0)
    for client in range(1, 5):
        policy.arrive(client, 0.0)
    report(policy, 1, 2, 3, 4)
    assert not policy.complete and policy.due is None and not policy.overdue(1e9)
    policy.arrive(0, 100.0)
    assert policy.due == 100.0 + DEADLINE  # it has a whole deadline, however fast the others were
    report(policy, 0, now=105.0)
    outcome = policy.decide(105.0)
    assert outcome is not None and outcome.decision.values is not None


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


# How long a round waits. In these tests answers usually take a second.


def settled(budget: float, **options: Any) -> RoundPolicy:
    """Return a policy in round 1, opened at time 1, that knows all clients to answer in a second."""
    policy = all_present(**options)
    next_round(policy, 1.0, 0, 1, 2, 3)
    policy.budget.seconds = budget
    return policy


@pytest.mark.parametrize(("clients", "beta", "enough"), [(4, 0.25, 3), (20, 0.1, 13), (20, 0.3, 13), (3, 0.0, 2)])
def test_enough_are_all_but_a_quarter_and_as_many_as_are_tolerated(clients: int, beta: float, enough: int) -> None:
    policy = RoundPolicy(make_federator(clients=clients, beta=beta), rounds=9, deadline_s=DEADLINE)
    policy.set_present(range(clients), 0.0)
    policy.open_round(0.0)
    policy.budget.seconds = 0.0
    report(policy, *range(enough - 1), now=1.0)
    assert policy.due == DEADLINE
    report(policy, enough - 1, now=2.0)
    assert policy.due == 3.0


def test_once_enough_have_answered_the_others_have_half_as_long_again() -> None:
    policy = settled(budget=0.0)
    report(policy, 0, 1, 2, now=3.0)
    assert policy.due == 4.0 and policy.decide(3.9) is None
    outcome = policy.decide(4.0)
    assert outcome is not None and outcome.decision.values is not None
    assert policy.figures.clients[3].misses == 1 and policy.is_behind(3)


def test_with_too_few_reports_a_round_waits_until_the_deadline_whatever_the_budget_holds() -> None:
    for budget in (0.0, 60.0):
        policy = settled(budget)
        report(policy, 0, 1, now=2.0)
        assert policy.due == 1.0 + DEADLINE and policy.decide(10.9) is None
        outcome = policy.decide(11.0)
        assert outcome is not None and outcome.decision.values is None
        assert [client.misses for client in policy.figures.clients] == [0, 0, 1, 1]


def test_a_client_that_is_usually_fast_has_a_little_more_time_if_the_budget_allows() -> None:
    policy = settled(budget=5.0)
    report(policy, 0, 1, 2, now=1.01)
    assert policy.due == pytest.approx(1.01 + JITTER_SECONDS)
    assert policy.decide(1.2) is None and policy.due == pytest.approx(1.0 + 1.0 * 1.25)  # its last answer took 1 s
    assert policy.decide(2.25) is not None and policy.figures.clients[3].misses == 1
    assert policy.budget.seconds == pytest.approx(5.0 - (2.25 - 1.015) + 0.015 / 3)


@pytest.mark.parametrize(("budget", "waits"), [(2.3, True), (2.2, False)])
def test_a_slow_client_is_waited_for_if_the_budget_covers_what_it_needs(budget: float, waits: bool) -> None:
    policy = settled(budget)
    policy.response_times.seconds[3] = 3.0
    report(policy, 0, 1, 2, now=2.0)  # the others have until 2.5, and this one needs until 1 + 1.25 * 3
    outcome = policy.decide(2.5)
    if waits:
        assert outcome is None and policy.due == 4.75
        report(policy, 3, now=4.0)
        assert policy.decide(4.0) is not None and policy.budget.seconds == pytest.approx(2.3 - 1.5 + 1.5 / 3)
    else:
        assert outcome is not None and policy.is_behind(3)
    assert policy.figures.deadline_misses == 0  # it was not waited for as long as it needs


def test_no_client_is_waited_for_longer_than_a_few_deadlines() -> None:
    policy = settled(budget=1e6)
    policy.response_times.seconds[3] = LONGEST_WAIT * DEADLINE
    report(policy, 0, 1, 2, now=2.0)
    assert policy.decide(2.5) is not None


def test_of_several_slow_clients_those_are_given_up_that_need_too_much() -> None:
    policy = settled(budget=2.0)
    policy.federator.tolerated = 2  # of four, so that two may be slow
    policy.federator.required = 2
    policy.decide(1.0, force=True)
    policy.open_round(1.0)
    policy.response_times.seconds[2:] = [2.0, 9.0]
    report(policy, 0, 1, now=2.0)
    assert policy.decide(2.5) is None and policy.is_behind(3) and not policy.is_behind(2)
    report(policy, 2, now=3.0)
    assert policy.complete


def test_a_newcomer_may_use_what_the_budget_has_until_the_deadline() -> None:
    for budget, due in ((3.0, 5.5), (60.0, 1.0 + DEADLINE)):
        policy = settled(budget)
        policy.response_times.seconds[3] = None
        report(policy, 0, 1, 2, now=2.0)
        assert policy.decide(2.5) is None and policy.due == due


def test_who_is_behind_costs_nothing_more_until_it_shows_life() -> None:
    policy = settled(budget=1.0)
    report(policy, 0, 1, 2, now=2.0)
    assert policy.decide(4.0) is not None
    policy.open_round(4.0)
    for now in range(5, 25):
        next_round(policy, float(now), 0, 1, 2)
    assert policy.figures.clients[3].misses == 1 and policy.is_behind(3)
    late(policy, 3, 1, now=24.1)  # its round was told at 1.0
    assert policy.response_times.seconds[3] == pytest.approx(23.1)
    next_round(policy, 25.0, 0, 1, 2)  # too slow for the budget: its next answer shows that it is not
    late(policy, 3, 22, now=25.1)
    assert policy.response_times.seconds[3] == pytest.approx(1.0) and not policy.is_behind(3)
    report(policy, 0, 1, 2, now=26.0)
    assert not policy.complete
    report(policy, 3, now=26.1)
    assert policy.complete


def test_who_is_behind_is_counted_if_it_comes_in_time_all_the_same() -> None:
    policy = settled(budget=0.0)
    report(policy, 0, 1, 2, now=2.0)
    policy.decide(2.5)
    policy.open_round(2.5)
    report(policy, 0, 3, now=3.0)
    assert not policy.is_behind(3)
    next_round(policy, 3.5, 1, 2)
    assert policy.federator.ledger.last is not None and policy.federator.ledger.last.reported.all()


def test_a_late_answer_extends_the_open_round_beyond_the_deadline_if_the_budget_allows() -> None:
    policy = all_present(deadline_s=0.5)
    report(policy, 0, 1, 2, now=0.01)
    assert policy.decide(0.5) is not None and policy.figures.clients[3].misses == 1
    policy.open_round(0.5)
    policy.budget.seconds = 5.0
    report(policy, 0, 1, now=0.51)
    late(policy, 3, 0, now=0.6)
    report(policy, 2, now=0.61)
    assert policy.decide(0.8) is None and policy.due == pytest.approx(0.6 + 1.25 * 0.6)
    report(policy, 3, now=1.2)
    assert policy.decide(1.2) is not None  # the deadline was at 1.0


def test_a_late_answer_is_life_once_and_only_if_its_round_was_announced_to_the_client() -> None:
    policy = settled(budget=0.0)
    report(policy, 0, 1, 2, now=2.0)
    policy.decide(2.5)
    policy.open_round(2.5)
    late(policy, 3, 1, now=2.6)
    for number in (0, 1, 3):
        assert policy.take_report(3, frame(policy, 3, round=number), 2.7) == "wrong_round"
    policy.depart(3, 3.0)
    next_round(policy, 3.5, 0, 1, 2)
    policy.arrive(3, 3.6)
    assert policy.take_report(3, frame(policy, 3, round=2), 3.7) == "wrong_round"
    assert policy.figures.refused == {LATE: 1, "wrong_round": 4}


def test_leaving_an_open_round_is_a_miss_and_doubles_what_the_client_is_expected_to_need() -> None:
    policy, now = settled(budget=30.0), 1.0
    for time in range(4):
        report(policy, 0, 1, 2, now=now + 1.0)
        policy.depart(3, now + 1.2)
        assert policy.response_times.seconds[3] == pytest.approx(2.4 * 2**time)
        assert policy.complete and policy.decide(now + 1.2) is not None
        assert policy.figures.clients[3].misses == time + 1
        now += 1.2
        policy.open_round(now)
        policy.arrive(3, now)
        assert not policy.is_behind(3)
    policy.budget.seconds = 20.0
    policy.arrive(3, now)  # it is expected to need 19.2 * 1.25 seconds
    assert policy.is_behind(3)


def test_who_leaves_and_answers_the_same_round_all_the_same_has_missed_nothing() -> None:
    policy = settled(budget=30.0)
    policy.depart(3, 1.5)
    policy.arrive(3, 1.6)
    next_round(policy, 2.0, 0, 1, 2, 3)
    assert policy.figures.deadline_misses == 0


def test_holding_up_a_round_with_what_can_not_count_is_charged_like_silence() -> None:
    policy = settled(budget=30.0)
    policy.response_times.seconds[3] = None
    report(policy, 0, 1, 2, now=2.0)
    assert policy.decide(2.5) is None
    assert policy.take_report(3, b"?", 4.0) == "truncated"
    assert policy.complete and policy.response_times.seconds[3] == 6.0
    assert policy.decide(4.0) is not None and policy.budget.seconds == pytest.approx(30.0 - 1.5 + 1.5 / 3)
    assert policy.figures.deadline_misses == 0


def test_when_many_leave_the_rest_need_not_wait_for_the_deadline() -> None:
    policy = RoundPolicy(make_federator(clients=20, beta=0.1), rounds=9, deadline_s=DEADLINE)
    policy.set_present(range(20), 0.0)
    policy.open_round(0.0)
    policy.budget.seconds = 0.0
    report(policy, *range(8), now=1.0)
    for client in range(9, 16):
        policy.depart(client, 2.0)
    assert policy.due == 3.0 and policy.decide(3.0) is not None


def test_only_the_invited_are_waited_for() -> None:
    policy = RoundPolicy(make_federator(0.5), rounds=99, deadline_s=DEADLINE)
    policy.set_present(range(CLIENTS), 0.0)
    policy.open_round(0.0)
    invited = [client for client in range(CLIENTS) if policy.federator.may_answer(client)]
    assert len(invited) == 2 and policy.federator.silent().tolist() == invited
    report(policy, invited[0], now=1.0)
    assert policy.decide(1.0 + DEADLINE) is not None and policy.is_behind(invited[1])
    policy.open_round(20.0)
    while policy.federator.may_answer(invited[1]):
        policy.decide(20.0, force=True)
        policy.open_round(20.0)
    late(policy, invited[1], 0, now=20.0)
    assert not policy.is_behind(invited[1]) and not policy.federator.awaits(invited[1])


# The budget.


def test_the_budget_earns_a_third_and_keeps_a_minute() -> None:
    budget = WaitBudget(CLIENTS, 1000.0)
    assert budget.seconds == STORED_SECONDS
    budget.spend(30.0, {}, 0.0)
    budget.earn(3.0)
    assert budget.seconds == 31.0
    budget.earn(1e6)
    assert budget.seconds == STORED_SECONDS
    budget.earn(1e6, 200.0)
    assert budget.seconds == 200.0
    budget.earn(1e6)  # nothing is taken away when rounds get faster
    assert budget.seconds == 200.0


def test_who_uses_more_than_its_share_pays_before_it_is_waited_for_again() -> None:
    budget = WaitBudget(CLIENTS, 60.0)
    budget.spend(1.0, {0: 1.0}, 0.0)
    assert budget.available(0, 0.0) == 59.0 and not budget.has_debtors(0.0)  # it had not used its share for a while
    budget.spend(1.0, {0: 1.0}, 0.0)
    assert budget.available(0, 0.9) == 58.0 - PLENTY_SECONDS and budget.has_debtors(0.9)
    assert budget.available(0, 1.0) == 58.0 and not budget.has_debtors(1.0)
    budget.ask(1, 2.0)  # now there are two who could use it
    budget.spend(1.0, {0: 1.0}, 2.0)
    assert budget.available(0, 6.9) < budget.available(0, 7.0)
    assert budget.available(1, 2.0) == 57.0
    budget.spend(30.0, {0: 30.0}, 7.0)
    assert budget.available(0, 6.9 + DEBT_SECONDS) < budget.available(0, 7.0 + DEBT_SECONDS)
    budget.spend(budget.seconds - 0.5, {}, 8.0)  # there is not plenty any more
    assert budget.available(0, 8.0) == 0.0


def test_those_who_are_waited_for_together_share_what_it_costs() -> None:
    budget = WaitBudget(CLIENTS, 60.0)
    budget.spend(2.0, {0: 3.0, 1: 3.0}, 0.0)
    budget.spend(2.0, {1: 3.0, 0: 3.0}, 0.0)
    assert budget.available(0, 6.9) == budget.available(1, 6.9) < budget.available(0, 7.0)
    budget = WaitBudget(CLIENTS, 60.0)
    for _ in range(2):
        budget.spend(2.0, {0: 2.0, 1: 0.002}, 0.0)  # a fast client that was late by a moment does not pay
    assert budget.available(0, 6.9) < budget.available(1, 0.0)


steps = st.lists(
    st.tuples(st.sampled_from(["arrive", "depart", "report", "late", "bad", "wait", "due"]),
              st.integers(0, CLIENTS - 1), st.floats(0.001, 3.0)),
    max_size=80,
)  # fmt: skip


@given(steps, st.floats(0.0, 5.0))
def test_whatever_clients_do_rounds_wait_no_longer_than_the_budget_allows(
    happened: list[tuple[str, int, float]], budget: float
) -> None:
    policy, now, extra, free = settled(budget), 1.0, 0.0, 0.0
    for what, client, seconds in happened:
        number = policy.federator.ledger.next_round
        if what == "arrive":
            policy.arrive(client, now)
        elif what == "depart":
            policy.depart(client, now)
        elif what == "wait":
            now = min(now + seconds, policy.due or now)
        elif what == "due":
            now = policy.due or now
        else:
            content = frame(policy, client, round=number - (what == "late")) if what != "bad" else b"?"
            policy.take_report(client, content, now)
        began, until = policy._began, policy._free_until
        if policy.decide(now) is not None:
            if began is not None:
                free += (now if until is None else min(now, until)) - began
            extra += 0.0 if until is None else max(0.0, now - until)
            assert extra <= budget + free / 3 + 1e-6
            policy.open_round(now)
        elif policy.due is not None:
            assert now < policy.due
            if policy._free_until is not None:
                assert policy.due <= policy._free_until + max(0.0, policy.budget.seconds) + 1e-6


@pytest.mark.parametrize(
    ("content", "reason", "waited_for"),
    [(b"", "truncated", False), (b"x" * 50, "malformed", False), (None, "malformed", False), (3, "malformed", False),
     (encode_report(Report(0, 0, np.full(K, np.inf, np.float32))), "not_finite", False),
     (encode_report(Report(0, 7, np.ones(K, np.float32))), "wrong_round", True)],
)  # fmt: skip
def test_a_report_that_can_not_count_is_refused_by_reason(content: Any, reason: str, waited_for: bool) -> None:
    policy = all_present()
    report(policy, 1, 2, 3)
    assert policy.take_report(0, content, 0.0) == reason and policy.figures.refused == {reason: 1}
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
        ("missed", {"round": 0, "answered": 2, "clients": [2, 3]}), ("abandoned", {"round": 0}),
        ("digests_differ", {"round": 1, "clients": [2], "compared": 4}),
    ]  # fmt: skip


def test_however_often_clients_are_waited_for_in_vain_the_log_has_a_line_a_second() -> None:
    lines: list[tuple[str, Any]] = []
    policy, now = settled(budget=0.0), 1.0
    policy.log = lambda event, **details: lines.append((event, details.get("clients")))
    policy.response_times.seconds[3] = 0.0
    for time in range(40):
        report(policy, 0, 1, 2, now=now + 0.04)
        policy.decide(now + 0.07)
        assert policy.figures.clients[3].misses == time + 1
        now += 0.1
        policy.open_round(now)
        late(policy, 3, time + 1, now=now)
        policy.response_times.seconds[3], policy.budget.seconds = 0.0, 0.0
        policy.arrive(3, now)
    assert lines == [("missed", [3])] * 4


def test_a_forced_decision_counts_no_misses() -> None:
    policy = all_present()
    report(policy, 0, 1, 2, now=4.0)
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
            policy.excuse(client, now)
        elif what == "wait":
            now = min(now + DEADLINE / 3, policy.due or np.inf)
        else:
            policy.take_report(client, frame(policy, client) if what == "report" else b"?", now)
        answered, overdue = policy.federator.answered, policy.overdue(now)
        waited_for = policy.federator.silent().tolist()
        outcome = policy.decide(now)
        if outcome is None:
            assert policy.due is None or opened <= now < policy.due <= opened + LONGEST_WAIT * DEADLINE
            continue
        assert (outcome.decision.values is not None) == (answered >= REQUIRED)
        assert overdue or (answered >= REQUIRED and (not waited_for or answered == CLIENTS))
        opened = now
        policy.open_round(now)
        assert all(policy.is_behind(client) for client in waited_for) or not overdue
    ledger = policy.federator.ledger
    assert policy.figures.decided + policy.figures.abandoned == ledger.next_round


# Both transports go by it.


SECONDS = (0.9, 1.0, 1.1, 7.0)  # that each client takes for an answer


def slow_client_by_streams(rounds: int) -> RoundPolicy:
    async def work() -> RoundPolicy:
        hub = make_hub(CLIENTS, rounds, deadline_s=DEADLINE)
        hub.start()
        await asyncio.gather(*(answer_newest(hub, client, lambda _, s=s: s) for client, s in enumerate(SECONDS)))
        return hub.policy

    policy: RoundPolicy = run(work(), patience=1e6)
    return policy


def slow_client_by_messages(rounds: int) -> RoundPolicy:
    mailbox, now = Mailbox(make_policy(rounds)), 0.0
    on_the_way: list[tuple[float, int, dict[str, Any]]] = []

    def reply(client: int) -> dict[str, Any]:
        number, chain = len(mailbox.ledger), mailbox.ledger.chain
        report = encode_report(Report(client, number, np.full(K, client + number, np.float32)))
        hello = hello_of(mailbox.ledger.header, client, round=number, chain=chain[:8])
        return {"hello": hello, "kept": number, "report": report}

    while not mailbox.finished:
        on_the_way += [(now + SECONDS[c], c, reply(c)) for c in mailbox.outgoing(range(CLIENTS), now)]
        on_the_way.sort(key=lambda each: each[:2])
        now = min(on_the_way[0][0], mailbox.policy.due or np.inf)
        if on_the_way[0][0] <= now:
            mailbox.take_reply(on_the_way[0][1], on_the_way.pop(0)[2], now)
        mailbox.tick(now)
    return mailbox.policy


def test_streams_and_messages_decide_the_same_rounds_and_count_the_same_misses() -> None:
    rounds = 100
    streams, messages = slow_client_by_streams(rounds), slow_client_by_messages(rounds)
    assert [r.chain for r in streams.federator.ledger] == [r.chain for r in messages.federator.ledger]
    for policy in (streams, messages):
        assert policy.figures.deadline_misses == 0 and policy.figures.refused[LATE] > 3
        assert 3 < policy.figures.clients[3].reports < rounds == policy.figures.clients[2].reports
