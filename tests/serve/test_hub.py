"""The hub: rounds over streams, whoever is slow, dead, late or hostile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import PATIENCE, run
from wire import K, Pipe, Voter, hello_of, make_header, make_hub, now, run_voter

from cyber0.errors import LedgerError
from cyber0.ledger import Ledger, Record
from cyber0.protocol.messages import FOLLOWER, VOTER, EvaluationMessage, Report, encode_evaluation, encode_report
from cyber0.serve import hub as hubs
from cyber0.serve import limits
from cyber0.serve.admission import Cut, Identity, read_revoked, unknown_revocations
from cyber0.serve.hub import MAX_EVALUATIONS, MAX_FOLLOWERS, Hub
from cyber0.serve.limits import MAX_LINES, MAX_STREAMS
from cyber0.serve.policy import MAX_REPLAYS, outside_majority


def voters(hub: Hub, *numbers: int) -> list[Voter]:
    return [Voter(hub.ledger.header, number) for number in numbers]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def speak_all(hub: Hub, *everyone: Voter) -> list[Cut | None]:
    hub.start()
    return list(await asyncio.gather(*(run_voter(hub, voter) for voter in everyone)))


def test_every_round_is_decided_when_all_who_are_there_have_answered() -> None:
    async def work() -> None:
        hub = make_hub(4, 20)
        everyone = voters(hub, 0, 1, 2, 3)
        assert await speak_all(hub, *everyone) == [None] * 4
        assert (hub.figures.decided, hub.figures.abandoned, hub.figures.deadline_misses) == (20, 0, 0)
        assert all(v.ended and v.chain == hub.ledger.chain for v in everyone)
        # Clients 0 to 3 send their number plus the round; the two extremes are trimmed once all four take part.
        last = hub.ledger.last
        assert last is not None and last.values is not None and last.values.tolist() == [19 + 1.5] * K
        assert hub.figures.total("payload_in") >= 20 * 3 * 4 * K

    run(work())


def test_absent_clients_are_not_waited_for_but_a_decision_needs_enough() -> None:
    async def work() -> None:
        hub = make_hub(4, 5)
        assert hub.federator.required == 3
        assert await speak_all(hub, *voters(hub, 0, 2, 3)) == [None] * 3
        assert hub.figures.decided == 5 and hub.figures.deadline_misses == 0

    run(work())


def test_rounds_wait_without_being_spent_until_enough_clients_are_there_and_late_ones_catch_up() -> None:
    async def work() -> None:
        hub = make_hub(4, 6, deadline_s=0.05)
        hub.start()
        early = [asyncio.ensure_future(run_voter(hub, v)) for v in voters(hub, 0, 1)]
        await asyncio.sleep(0.2)
        assert len(hub.ledger) == 0
        third, late = voters(hub, 2, 3)
        await asyncio.gather(*early, run_voter(hub, third))
        assert len(hub.ledger) == 6
        assert await run_voter(hub, late) is None  # after the end: everything at once
        assert late.ended and late.chain == hub.ledger.chain and late.chunks >= 1

    run(work())


def test_a_returner_gets_what_it_missed_and_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "CHUNK_BYTES", 300)

    async def work() -> None:
        hub = make_hub(4, 400)
        back = Voter(hub.ledger.header, 3)
        hub.start()
        others = [asyncio.ensure_future(run_voter(hub, v)) for v in voters(hub, 0, 1, 2)]
        await until(lambda: len(hub.ledger) > 30)
        assert await run_voter(hub, back) is None
        await asyncio.gather(*others)
        assert back.chunks > 3 and back.chain == hub.ledger.chain
        assert any(record.reported[3] for record in hub.ledger)

    run(work())


def test_a_silent_client_costs_one_deadline_and_is_then_not_waited_for() -> None:
    async def work() -> None:
        hub = make_hub(4, 12, deadline_s=0.1)
        header = hub.ledger.header
        silent = Voter(header, 3, lambda round, values: None)
        await speak_all(hub, *voters(hub, 0, 1, 2), silent)
        assert hub.figures.decided == 12
        # After the first miss it is excused for 2 rounds, then 4, then 8.
        assert 1 <= hub.figures.deadline_misses <= 4
        assert silent.ended  # and still it gets every decision

    run(work())


def test_too_few_reports_at_the_deadline_abandon_the_round() -> None:
    async def work() -> None:
        hub = make_hub(4, 2, deadline_s=0.05)
        silent = [Voter(hub.ledger.header, c, lambda round, values: None) for c in (2, 3)]
        await speak_all(hub, *voters(hub, 0, 1), *silent)
        assert (hub.figures.decided, hub.figures.abandoned) == (0, 2)
        assert silent[0].numbers == [None, None]

    run(work())


def test_a_reader_that_stops_reading_holds_up_nobody() -> None:
    async def work() -> None:
        hub = make_hub(4, 50, deadline_s=0.05)
        hub.start()
        stuck = Pipe()
        serving = asyncio.ensure_future(hub.serve(stuck))
        await stuck.up.put(hello_of(hub.ledger.header, 3))
        await asyncio.gather(*(run_voter(hub, v) for v in voters(hub, 0, 1, 2)))
        assert hub.figures.decided == 50 and stuck.down.qsize() <= 1  # nothing was queued for it
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(work())


HOSTILE: dict[str, Any] = {
    "truncated": lambda v, t, x: v.honest(t, x)[:-1],
    "malformed": lambda v, t, x: v.honest(t, x)[:-1] + b"?",
    "wrong_round": lambda v, t, x: v.honest(t + 1000, x),
    "not_finite": lambda v, t, x: v.honest(t, np.full(K, np.nan, np.float32)),
    "oversized": lambda v, t, x: bytes(1000),
    "flood": lambda v, t, x: [v.honest(t + 7, x)] * 1000,
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_what_a_hostile_client_sends_is_counted_and_the_round_goes_on(reason: str) -> None:
    async def work() -> None:
        hub = make_hub(4, 5, deadline_s=0.1)
        bad = Voter(hub.ledger.header, 1)
        bad._answer = lambda round, values: HOSTILE[reason](bad, round, values)
        cuts = await speak_all(hub, *voters(hub, 0, 2, 3), bad)
        assert hub.figures.decided == 5
        assert hub.figures.refused[reason] >= 1
        assert not any(record.reported[1] for record in hub.ledger)
        if reason in ("oversized", "flood"):
            assert cuts[3] is not None and cuts[3].reason == reason
            assert (await run_voter(hub, Voter(hub.ledger.header, 1))).reason == "barred"  # type: ignore[union-attr]

    run(work())


def test_after_its_vote_a_client_is_not_read_until_the_round_is_over() -> None:
    async def work() -> None:
        hub = make_hub(4, 1, deadline_s=30)
        hub.start()
        pipe, voter = Pipe(), Voter(hub.ledger.header, 0)
        serving = asyncio.ensure_future(hub.serve(pipe))
        await pipe.up.put(voter.hello())
        (vote,) = voter.take(await pipe.down.get())
        for _ in range(1000):
            await pipe.up.put(vote)
        await until(lambda: hub.federator.answered == 1)
        await asyncio.sleep(0.05)
        assert pipe.up.qsize() == 999
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert hub.sessions == []

    run(work())


def test_a_replayed_report_of_an_earlier_round_does_not_count() -> None:
    async def work() -> None:
        hub = make_hub(4, 6, deadline_s=0.1)
        first: list[bytes] = []
        bad = Voter(hub.ledger.header, 1)

        def answer(round: int, values: Any) -> bytes:
            first.append(bad.honest(round, values))
            return first[0]

        bad._answer = answer
        await speak_all(hub, *voters(hub, 0, 2, 3), bad)
        assert hub.figures.refused["wrong_round"] >= 1
        assert sum(record.reported[1] for record in hub.ledger) <= 1

    run(work())


HEADER = make_header(4)
REFUSED: dict[str, tuple[bytes, Identity | None]] = {
    "bad_hello": (b"GET / HTTP/1.1\r\n\r\n", None),
    "other_identity": (hello_of(HEADER, 2), Identity(VOTER, 1)),
    "unknown_client": (hello_of(HEADER, 4), None),
    "other_run": (hello_of(HEADER, 0, run=bytes(32)), None),
    "other_model": (hello_of(HEADER, 0, rest_digest=bytes(32)), None),
    "other_history": (hello_of(HEADER, 0, round=1), None),
    "revoked": (hello_of(HEADER, 0), Identity(VOTER, 0, "abcd")),
    "identity_in_use": (hello_of(HEADER, 3), None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_who_does_not_belong_is_refused_by_reason(reason: str) -> None:
    async def work() -> None:
        hub = make_hub(4, 5)
        hub.start()
        hub.revoke(read_revoked("# a list\n AB:CD \n"))
        there = Pipe()
        first = asyncio.ensure_future(hub.serve(there))
        await there.up.put(hello_of(HEADER, 3))
        await there.down.get()
        hello, identity = REFUSED[reason]
        pipe = Pipe(identity)
        await pipe.up.put(hello)
        with pytest.raises(Cut) as cut:
            await hub.serve(pipe)
        assert cut.value.reason == reason and hub.figures.refused[reason] == 1
        assert [session.client for session in hub.sessions] == [3]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(work())


def test_a_stream_without_a_hello_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "HELLO_SECONDS", 0.02)

    async def work() -> None:
        hub = make_hub()
        with pytest.raises(Cut, match="no hello within"):
            await hub.serve(Pipe())
        ended = Pipe()
        await ended.up.put(None)
        with pytest.raises(Cut, match="ended before its hello"):
            await hub.serve(ended)
        assert hub.figures.refused["no_hello"] == 2 and hub.sessions == []

    run(work())


def test_revoking_cuts_off_a_client_that_is_connected() -> None:
    async def work() -> None:
        hub = make_hub(4, 2)
        hub.start()
        running = asyncio.ensure_future(run_voter(hub, Voter(hub.ledger.header, 1), Pipe(Identity(VOTER, 1, "f00d"))))
        await until(lambda: hub.current == 1)
        hub.revoke(read_revoked("1\n"))
        cut = await running
        assert cut is not None and cut.reason == "revoked" and hub.sessions == []

    run(work())


def test_a_follower_gets_every_decision_and_has_no_vote() -> None:
    async def work() -> None:
        hub = make_hub(4, 5)
        follower = Voter(hub.ledger.header, 0, lambda round, values: None)
        follower.hello = lambda: hello_of(hub.ledger.header, 0, role=FOLLOWER)  # type: ignore[method-assign]
        await speak_all(hub, follower, *voters(hub, 0, 1, 2, 3))
        assert follower.ended and follower.chain == hub.ledger.chain
        loud = Voter(hub.ledger.header, 7, lambda round, values: b"me too")
        loud.hello = lambda: hello_of(hub.ledger.header, 7, role=FOLLOWER)  # type: ignore[method-assign]
        quiet = make_hub(4, 5)
        quiet.start()
        cut = await run_voter(quiet, loud)
        assert cut is not None and cut.reason == "follower_spoke"

    run(work())


def test_what_followers_find_is_passed_on_once_and_in_order() -> None:
    async def work() -> None:
        hub = make_hub(4, 6)
        found: list[tuple[int, float]] = []
        hub._on_evaluation = lambda e: found.append((e.round, e.accuracy))

        def follower(number: int, at: dict[int, list[bytes]]) -> Voter:
            this = Voter(hub.ledger.header, number, lambda round, values: at.get(round, []))
            this.hello = lambda: hello_of(hub.ledger.header, number, role=FOLLOWER)  # type: ignore[method-assign]
            return this

        def says(round: int, accuracy: float = 0.5) -> bytes:
            return encode_evaluation(EvaluationMessage(round, accuracy, float("nan")))

        first = follower(0, {2: [says(1), says(2)], 4: [says(4)]})
        await speak_all(hub, first, *voters(hub, 0, 1, 2, 3))
        assert found == [(1, 0.5), (2, 0.5), (4, 0.5)] and hub.evaluated == 4
        assert await run_voter(hub, follower(1, {6: [says(3)]})) is None  # late, and still welcome
        assert len(found) == 3

        for wrong in ([says(1), says(1)], [says(99)], [says(1, 1.5)], [says(1)[:-1]]):
            other = make_hub(4, 6)
            other._on_evaluation = lambda e: None
            other.start()
            other.federator.ledger.append(Record(0, 0.1, None, np.zeros(4, np.bool_), np.zeros(4, np.int64)))
            cut = await run_voter(other, follower(2, {1: wrong}))
            assert cut is not None and cut.reason == "follower_spoke"

    run(work())


def test_a_follower_that_evaluates_every_round_does_not_fill_the_disk() -> None:
    rounds = MAX_EVALUATIONS + 100

    async def work() -> None:
        hub, found = make_hub(4, rounds), list[int]()
        hub._on_evaluation = lambda e: found.append(e.round)
        hasty = Voter(hub.ledger.header, 0, lambda round, values: encode_evaluation(EvaluationMessage(round, 1, 0)))
        hasty.hello = lambda: hello_of(hub.ledger.header, 0, role=FOLLOWER)  # type: ignore[method-assign]
        await speak_all(hub, hasty, *voters(hub, 0, 1, 2, 3))
        assert MAX_EVALUATIONS <= len(found) < MAX_EVALUATIONS + 50 and found[-1] == rounds  # the last one counts

    run(work())


def test_a_client_with_other_weights_is_told_to_replay_from_w0() -> None:
    async def work() -> None:
        hub = make_hub(4, 60, digest_every=5)
        everyone = voters(hub, 0, 1, 2, 3)
        for voter in everyone:
            voter.digest = b"the same"
        odd = everyone[2]
        odd.digest = b"another!"
        take = odd.take

        def mended(message: bytes) -> list[bytes]:
            sent = take(message)
            if odd.replays:
                odd.digest = b"the same"
            return sent

        odd.take = mended  # type: ignore[method-assign]
        await speak_all(hub, *everyone)
        assert odd.replays >= 1 and hub.figures.alarms >= 1
        assert odd.ended and odd.chain == hub.ledger.chain and len(odd.numbers) == 60
        assert all(v.replays == 0 for v in everyone if v is not odd)

    run(work())


def test_a_client_that_lies_about_its_digest_causes_a_few_replays_at_most() -> None:
    async def work() -> None:
        hub = make_hub(4, 80, digest_every=2)
        everyone = voters(hub, 0, 1, 2, 3)
        for voter in everyone:
            voter.digest = b"the same"
        everyone[3].digest = b"another!"
        await speak_all(hub, *everyone)
        assert everyone[3].replays == MAX_REPLAYS and len(hub.ledger) == 80

    run(work())


@pytest.mark.slow
@given(digests=st.dictionaries(st.integers(0, 20), st.sampled_from([b"a", b"b", b"c"])))
def test_only_those_outside_a_true_majority_are_named(digests: dict[int, bytes]) -> None:
    odd = outside_majority(digests)
    if odd:
        rest = [digest for client, digest in digests.items() if client not in odd]
        assert len(set(rest)) == 1 and 2 * len(rest) > len(digests)
    else:
        counts = [list(digests.values()).count(d) for d in set(digests.values())]
        assert len(set(digests.values())) <= 1 or 2 * max(counts) <= len(digests)


def test_stopping_ends_the_round_whole_and_a_new_hub_goes_on(tmp_path: Path) -> None:
    async def begin() -> int:
        hub = make_hub(4, 1000, path=tmp_path / "ledger.bin")
        hub.start()
        running = [asyncio.ensure_future(run_voter(hub, v)) for v in voters(hub, 0, 1, 2, 3)]
        await until(lambda: len(hub.ledger) >= 10)
        hub.close()
        cuts = await asyncio.gather(*running)
        assert {cut.reason for cut in cuts if cut} == {"stopping"}
        hub.ledger.close()
        return len(hub.ledger)

    async def go_on(before: int) -> None:
        ledger = Ledger.open(tmp_path / "ledger.bin", writable=True, durability="none")
        assert len(ledger) == before and ledger.torn_bytes == 0
        hub = make_hub(4, before + 5, ledger=ledger)
        await speak_all(hub, *voters(hub, 0, 1, 2, 3))
        assert len(hub.ledger) == before + 5

    run(go_on(run(begin())))


def test_a_ledger_that_can_not_be_written_ends_the_federation_with_its_error() -> None:
    async def work() -> None:
        hub = make_hub(4, 5)

        def full(record: Any) -> None:
            raise LedgerError("the disk is full")

        hub.ledger.append = full  # type: ignore[method-assign]
        hub.start()
        running = [asyncio.ensure_future(run_voter(hub, v)) for v in voters(hub, 0, 1, 2, 3)]
        await hub.finished.wait()
        assert "disk is full" in str(hub.failure)
        hub.close()
        await asyncio.gather(*running, return_exceptions=True)

    run(work())


@pytest.mark.slow
@given(frames=st.lists(st.binary(max_size=40) | st.builds(
    lambda t, x: encode_report(Report(0, t, np.array(x, np.float32))),
    st.integers(0, 3), st.lists(st.floats(width=32), min_size=0, max_size=5)), max_size=30))  # fmt: skip
def test_no_frame_of_one_client_stops_the_others(frames: list[bytes]) -> None:
    async def work() -> None:
        hub = make_hub(4, 3, deadline_s=0.01)
        hub.start()
        pipe = Pipe()
        serving = asyncio.ensure_future(hub.serve(pipe))
        for frame in [hello_of(hub.ledger.header, 1), *frames]:
            await pipe.up.put(frame)
        await asyncio.gather(*(run_voter(hub, v) for v in voters(hub, 0, 2, 3)))
        assert len(hub.ledger) == 3
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(work())


def test_a_list_of_revoked_names_numbers_and_fingerprints() -> None:
    assert read_revoked("# gone\n07\nAA:bb  # stolen\n\n") == {"7", "aabb"}
    listed = read_revoked(f"0\n4\nclient 1\n{'AB:' * 31}ab\n{'1' * 64}\nabcd\n")
    assert unknown_revocations(listed, clients=4) == {"4", "client 1", "abcd"}


def test_the_clock_stands_still_while_too_few_are_there() -> None:
    async def work() -> None:
        hub = make_hub(4, 3, deadline_s=0.05)
        hub.start()
        silent = [
            asyncio.ensure_future(run_voter(hub, Voter(hub.ledger.header, c, lambda t, x: None))) for c in (0, 1, 2)
        ]
        await until(lambda: hub.policy.due is not None)
        silent[0].cancel()
        await until(lambda: hub.current < 3)
        before = len(hub.ledger)
        await asyncio.sleep(0.2)
        assert len(hub.ledger) == before
        for each in silent:
            each.cancel()
        await asyncio.gather(*silent, return_exceptions=True)

    run(work())


def test_whoever_votes_last_and_then_falls_silent_still_gets_every_decision() -> None:
    async def work() -> None:
        hub = make_hub(4, 4, deadline_s=0.1)
        hub.start()
        others = [asyncio.ensure_future(run_voter(hub, v)) for v in voters(hub, 0, 1)]
        last = Voter(hub.ledger.header, 2)
        last._answer = lambda t, x: last.honest(t, x) if t == 0 else None
        await until(lambda: hub.federator.answered == 2)
        assert await run_voter(hub, last) is None  # its vote was the one that decided round 0
        await asyncio.gather(*others)
        assert len(last.numbers) == 4 and last.ended
        assert (hub.figures.decided, hub.figures.abandoned) == (1, 3)

    run(work())


def test_numbers_that_can_not_count_are_not_waited_for_any_longer() -> None:
    async def work() -> None:
        hub = make_hub(4, 10, deadline_s=PATIENCE)  # a deadline would be longer than this test may last
        bad = Voter(hub.ledger.header, 1)
        bad._answer = lambda t, x: bad.honest(t, np.full(K, np.inf, np.float32))
        cuts = await speak_all(hub, *voters(hub, 0, 2, 3), bad)
        assert cuts == [None] * 4 and hub.figures.decided == 10 and hub.figures.deadline_misses == 0

    run(work())


def test_the_last_message_is_sent_in_full_before_a_stream_is_closed() -> None:
    class Slow(Pipe):
        async def write(self, message: bytes) -> None:
            await asyncio.sleep(0.02)
            await super().write(message)

    async def work() -> None:
        hub = make_hub(4, 3)
        hub.start()
        everyone = voters(hub, 0, 1, 2, 3)
        await asyncio.gather(*(run_voter(hub, v, Slow()) for v in everyone))
        assert all(v.ended for v in everyone)

    run(work())


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("says_hello", [True, False])
def test_many_streams_of_one_certificate_lock_nobody_out(says_hello: bool) -> None:
    async def work() -> None:
        lines: list[str] = []
        hub = make_hub(4, 5, log=lambda event, **_: lines.append(event))
        hub.start()
        hello = hello_of(hub.ledger.header, 0, role=FOLLOWER)
        pipes = [Pipe(Identity(FOLLOWER, 0, "f00d")) for _ in range(MAX_FOLLOWERS + 10)]
        many = [asyncio.ensure_future(hub.serve(pipe)) for pipe in pipes]
        if says_hello:
            for pipe in pipes:
                await pipe.up.put(hello)
        await asyncio.sleep(0.1)
        refused = MAX_FOLLOWERS + 10 - MAX_STREAMS
        assert sum(task.done() for task in many) == hub.figures.refused["too_many_streams"] == refused
        assert lines.count("cut_off") <= MAX_LINES

        other = Voter(hub.ledger.header, 1, lambda round, values: None)
        other.hello = lambda: hello_of(hub.ledger.header, 1, role=FOLLOWER)  # type: ignore[method-assign]
        taking_part = [run_voter(hub, voter) for voter in voters(hub, 0, 1, 2, 3)]
        cuts = await asyncio.gather(run_voter(hub, other, Pipe(Identity(FOLLOWER, 1, "beef"))), *taking_part)
        assert cuts == [None] * 5 and other.ended
        await ended(*many)
        again = Voter(hub.ledger.header, 0, lambda round, values: None)
        again.hello = lambda: hello  # type: ignore[method-assign]
        assert await run_voter(hub, again, Pipe(Identity(FOLLOWER, 0, "f00d"))) is None  # once the many are gone

    run(work())


def test_reading_the_ledger_again_and_again_slows_down_the_reader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FREE_BYTES", 0)
    monkeypatch.setattr(limits, "BYTES_PER_SECOND", 1000)
    monkeypatch.setattr(hubs, "CALL_BYTES", 0)

    async def work() -> None:
        hub = make_hub(4, 50)
        await speak_all(hub, *voters(hub, 0, 1, 2, 3))
        size = hub.ledger.size

        async def seconds_to_read(certificate: str) -> float:
            begin, reader = now(), Voter(hub.ledger.header, 0, lambda round, values: None)
            reader.hello = lambda: hello_of(hub.ledger.header, 0, role=FOLLOWER)  # type: ignore[method-assign]
            assert await run_voter(hub, reader, Pipe(Identity(FOLLOWER, 0, certificate))) is None
            assert reader.ended and reader.chain == hub.ledger.chain
            return now() - begin

        assert [await seconds_to_read("f00d") for _ in range(2)] == pytest.approx([0.0, 0.0], abs=0.1)
        slow = asyncio.ensure_future(seconds_to_read("f00d"))
        assert await seconds_to_read("beef") == pytest.approx(0.0, abs=0.1)
        assert await slow + await seconds_to_read("f00d") > size / 1000

    run(work(), patience=1000.0)
