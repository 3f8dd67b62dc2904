"""The federator: everything from a client is hostile, and none of it may crash, stall or poison a round."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headers import make_header
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cyber0.aggregate import AggregationError, Outcome, Rule, mean, median, trimmed_mean
from cyber0.config.tolerance import invited_count, probability_of_too_many_byzantine
from cyber0.errors import ConfigError, LedgerError, ProtocolError
from cyber0.ledger import Ledger, Record, trim_counts
from cyber0.ledger.record import Decision
from cyber0.protocol.decider import invited_clients
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import Report


def make_federator(
    clients: int = 12, k: int = 4, rule: Rule | None = None, ledger: Ledger | None = None, **options: Any
) -> Federator:
    ledger = Ledger.create(None, make_header(clients, k)) if ledger is None else ledger
    return Federator(ledger, rule or trimmed_mean(0.25), clients, **{"lr_at": lambda t: 0.01 / (1 + t), **options})


def numbers(client: int, k: int = 4) -> NDArray[np.float32]:
    return np.full(k, client, np.float32)


def decided(federator: Federator, **options: Any) -> Decision:
    decision = federator.decide(**options)
    assert decision is not None
    return decision


def test_a_round_is_decided_when_all_invited_have_answered() -> None:
    federator = make_federator()
    announcement = federator.open_round()
    assert announcement.round == federator.round == 0
    assert announcement.invited.tolist() == list(range(12))
    for client in range(12):
        assert not federator.complete
        assert federator.decide() is None
        assert federator.receive(Report(client, 0, numbers(client))) is Receipt.ACCEPTED
    assert federator.complete
    decision = decided(federator)
    assert decision.values is not None
    assert decision.values.dtype == np.float32
    assert decision.values.tolist() == [5.5] * 4
    assert (decision.round, decision.lr) == (0, 0.01)
    assert decision.chain == federator.ledger.chain
    record = federator.ledger.last
    assert record is not None
    assert record.values is not None
    assert record.values.tolist() == [5.5] * 4
    assert record.reported.all()
    assert record.trimmed.tolist() == [4, 4, 4, 0, 0, 0, 0, 0, 0, 4, 4, 4]
    assert federator.trimmed.tolist() == record.trimmed.tolist()
    assert federator.sent.tolist() == [4] * 12
    assert federator.round is None
    assert federator.open_round().round == 1


def test_the_decision_does_not_depend_on_who_was_faster() -> None:
    values = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    chains = set()
    for seed in range(5):
        federator = make_federator()
        federator.open_round()
        for client in np.random.default_rng(seed).permutation(12):
            federator.receive(Report(int(client), 0, values[client]))
        chains.add(decided(federator).chain)
    assert len(chains) == 1


class Hostile:
    """Raises when looked at, in whatever way."""

    def __array__(self, *args: object, **options: object) -> NDArray[Any]:
        raise RuntimeError("boo")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("boo")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("boo")

    __hash__ = None  # type: ignore[assignment]


FINE = numbers(1)
HOSTILE_REPORTS: list[tuple[Any, Receipt]] = [
    (None, Receipt.MALFORMED),
    (b"bytes", Receipt.MALFORMED),
    (Hostile(), Receipt.MALFORMED),
    (Report(True, 0, FINE), Receipt.MALFORMED),
    (Report("1", 0, FINE), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1.0, 0, FINE), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(None, 0, FINE), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(Hostile(), 0, FINE), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, False, FINE), Receipt.MALFORMED),
    (Report(1, 0.0, FINE), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, Hostile(), FINE), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(-1, 0, FINE), Receipt.UNKNOWN_CLIENT),
    (Report(12, 0, FINE), Receipt.UNKNOWN_CLIENT),
    (Report(10**400, 0, FINE), Receipt.UNKNOWN_CLIENT),
    (Report(-(10**400), 0, FINE), Receipt.UNKNOWN_CLIENT),
    (Report(1, 1, FINE), Receipt.WRONG_ROUND),
    (Report(1, -1, FINE), Receipt.WRONG_ROUND),
    (Report(1, 10**400, FINE), Receipt.WRONG_ROUND),
    (Report(1, 0, FINE[:3]), Receipt.WRONG_LENGTH),
    (Report(1, 0, np.zeros(5, np.float32)), Receipt.WRONG_LENGTH),
    (Report(1, 0, np.zeros(0, np.float32)), Receipt.WRONG_LENGTH),
    (Report(1, 0, np.zeros((4, 1), np.float32)), Receipt.WRONG_LENGTH),
    (Report(1, 0, np.zeros((1, 4), np.float32)), Receipt.WRONG_LENGTH),
    (Report(1, 0, np.float32(1)), Receipt.WRONG_LENGTH),  # type: ignore[arg-type]
    (Report(1, 0, 3.0), Receipt.WRONG_LENGTH),  # type: ignore[arg-type]
    (Report(1, 0, None), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, 0, "1234"), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, 0, [1, 2, [3], 4]), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, 0, [10**400] * 4), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, 0, {1: 2}), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, 0, Hostile()), Receipt.MALFORMED),  # type: ignore[arg-type]
    (Report(1, 0, np.zeros(4, np.complex64)), Receipt.MALFORMED),
    (Report(1, 0, np.zeros(4, np.bool_)), Receipt.MALFORMED),
    (Report(1, 0, np.zeros(4, "datetime64[s]")), Receipt.MALFORMED),
    (Report(1, 0, np.array([1, np.nan, 1, 1], np.float32)), Receipt.NOT_FINITE),
    (Report(1, 0, np.array([1, np.inf, 1, 1], np.float32)), Receipt.NOT_FINITE),
    (Report(1, 0, np.array([1, 1, 1, -np.inf], np.float32)), Receipt.NOT_FINITE),
    (Report(1, 0, np.array([1, 1, 1, 1e39])), Receipt.NOT_FINITE),
    (Report(1, 0, np.array([1, 1, 1, -1e308])), Receipt.NOT_FINITE),
]


@pytest.mark.parametrize(("report", "receipt"), HOSTILE_REPORTS, ids=map(str, range(len(HOSTILE_REPORTS))))
def test_a_hostile_report_is_rejected_with_a_reason_and_leaves_the_vote_unused(report: Any, receipt: Receipt) -> None:
    federator = make_federator()
    federator.open_round()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert federator.receive(report) is receipt
    assert federator.rejections[receipt] == sum(federator.rejections.values()) == 1
    assert federator.answered == 0
    assert federator.receive(Report(1, 0, FINE)) is Receipt.ACCEPTED


def test_other_kinds_of_real_numbers_are_taken() -> None:
    for values in ([1, 2, 3, 4], np.arange(4), np.arange(4.0), np.arange(4, dtype=">f4"), np.arange(8.0)[::2]):
        federator = make_federator()
        federator.open_round()
        assert federator.receive(Report(np.int64(1), np.uint8(0), values)) is Receipt.ACCEPTED  # type: ignore[arg-type]


def test_one_client_has_one_vote() -> None:
    federator = make_federator()
    federator.open_round()
    bad = np.full(4, np.nan, np.float32)
    assert federator.receive(Report(1, 0, bad)) is Receipt.NOT_FINITE
    assert federator.receive(Report(1, 0, numbers(1))) is Receipt.ACCEPTED
    assert federator.receive(Report(1, 0, numbers(9))) is Receipt.DUPLICATE
    assert federator.receive(Report(1, 0, bad)) is Receipt.DUPLICATE
    assert federator.answered == 1
    assert federator._values[1].tolist() == [1.0] * 4


def test_a_later_change_of_the_clients_array_changes_nothing() -> None:
    federator = make_federator(clients=1, rule=mean())
    federator.open_round()
    values = numbers(3)
    federator.receive(Report(0, 0, values))
    values[:] = np.nan
    assert decided(federator).values is not None


def test_reports_outside_a_round_are_rejected() -> None:
    federator = make_federator(clients=2, rule=mean())
    assert federator.receive(Report(0, 0, numbers(1))) is Receipt.NO_ROUND
    federator.open_round()
    federator.receive(Report(0, 0, numbers(1)))
    decided(federator, deadline=True)
    assert federator.receive(Report(1, 0, numbers(1))) is Receipt.NO_ROUND
    federator.open_round()
    assert federator.receive(Report(1, 0, numbers(1))) is Receipt.WRONG_ROUND  # late
    assert federator.receive(Report(1, 2, numbers(1))) is Receipt.WRONG_ROUND  # early


def test_a_client_that_was_not_invited_has_no_vote() -> None:
    federator = make_federator(clients=40, participation=0.25)
    invited = set(federator.open_round().invited.tolist())
    assert len(invited) == 10
    for client in range(40):
        expected = Receipt.ACCEPTED if client in invited else Receipt.NOT_INVITED
        assert federator.receive(Report(client, 0, numbers(client))) is expected
    assert federator.complete
    decided(federator)
    record = federator.ledger.last
    assert record is not None
    assert set(np.flatnonzero(record.reported).tolist()) == invited


def test_at_the_deadline_too_few_reports_abandon_the_round_and_spend_its_number() -> None:
    federator = make_federator()
    federator.open_round()
    for client in range(6):  # b = 3, so 7 are needed
        federator.receive(Report(client, 0, numbers(client)))
    assert federator.decide() is None
    assert federator.round == 0
    decision = decided(federator, deadline=True)
    assert decision.values is None
    record = federator.ledger.last
    assert record is not None
    assert record.values is None
    assert record.reported.tolist() == [True] * 6 + [False] * 6
    assert not federator.sent.any()
    assert federator.open_round().round == 1
    assert federator.answered == 0
    assert federator.receive(Report(6, 0, numbers(6))) is Receipt.WRONG_ROUND


def test_the_trim_count_is_fixed_by_how_many_were_invited() -> None:
    federator = make_federator()
    federator.open_round()
    for client in range(7):
        federator.receive(Report(client, 0, numbers(client)))
    assert federator.decide() is None
    decision = decided(federator, deadline=True)
    assert decision.values is not None
    assert decision.values.tolist() == [3.0] * 4  # 3 of 7 go at each end
    assert federator.trimmed.tolist() == [4, 4, 4, 0, 4, 4, 4, 0, 0, 0, 0, 0]
    assert federator.sent.tolist() == [4] * 7 + [0] * 5


def test_a_quorum_can_ask_for_more() -> None:
    federator = make_federator(quorum=10)
    federator.open_round()
    for client in range(9):
        federator.receive(Report(client, 0, numbers(client)))
    assert decided(federator, deadline=True).values is None
    federator.open_round()
    for client in range(10):
        federator.receive(Report(client, 1, numbers(client)))
    assert decided(federator, deadline=True).values is not None


def test_the_median_too_is_not_left_to_a_few_early_byzantine_clients() -> None:
    federator = make_federator(rule=median(0.25))
    federator.open_round()
    for client in range(6):
        federator.receive(Report(client, 0, numbers(client)))
    assert decided(federator, deadline=True).values is None


def test_a_decision_that_is_not_finite_is_abandoned() -> None:
    def overflow(rows: NDArray[Any], b: int, round: int) -> Outcome:
        return Outcome(np.full(rows.shape[1], 1e39), np.zeros(len(rows), np.int64))

    def refuse(rows: NDArray[Any], b: int, round: int) -> Outcome:
        raise AggregationError("needs more rows")

    for combine in (overflow, refuse):
        federator = make_federator(clients=2, rule=Rule("custom", 0.0, combine))
        federator.open_round()
        federator.receive_many([0, 1], 0, np.ones((2, 4)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert decided(federator).values is None


def test_huge_but_finite_numbers_do_not_overflow_the_mean() -> None:
    federator = make_federator(clients=3, rule=mean())
    federator.open_round()
    federator.receive_many([0, 1, 2], 0, np.full((3, 4), 3e38))
    values = decided(federator).values
    assert values is not None
    assert np.isfinite(values).all()


def test_a_round_that_cannot_be_written_stays_open() -> None:
    federator = make_federator(clients=1, rule=mean())
    federator.open_round()
    federator.receive(Report(0, 0, numbers(1)))
    federator.ledger.close()
    with pytest.raises(LedgerError):
        federator.decide()
    assert federator.round == 0
    assert not federator.sent.any()


def test_rounds_are_opened_and_decided_in_turn() -> None:
    federator = make_federator()
    with pytest.raises(ProtocolError, match="no round is open"):
        federator.decide(deadline=True)
    federator.open_round()
    with pytest.raises(ProtocolError, match="round 0 is still open"):
        federator.open_round()


def test_a_federator_resumes_from_its_ledger(tmp_path: Path) -> None:
    def advance(federator: Federator, rounds: int) -> None:
        for _ in range(rounds):
            announcement = federator.open_round()
            number = announcement.round
            generator = np.random.default_rng(number)
            for client in announcement.invited.tolist()[: 6 if number % 3 == 1 else None]:
                federator.receive(Report(client, number, generator.standard_normal(4).astype(np.float32)))
            federator.decide(deadline=True)

    options = {"clients": 20, "participation": 0.6}
    whole = make_federator(**options)  # type: ignore[arg-type]
    advance(whole, 8)
    path = tmp_path / "ledger.bin"
    with Ledger.create(path, make_header(20)) as ledger:
        advance(make_federator(ledger=ledger, **options), 5)  # type: ignore[arg-type]
    with Ledger.open(path, writable=True) as ledger:
        resumed = make_federator(ledger=ledger, **options)  # type: ignore[arg-type]
        advance(resumed, 3)
        assert resumed.ledger.chain == whole.ledger.chain
        assert resumed.trimmed.tolist() == whole.trimmed.tolist() == trim_counts(ledger)[0].tolist()
        assert resumed.sent.tolist() == whole.sent.tolist() == trim_counts(ledger)[1].tolist()
        assert any(record.values is None for record in ledger)


def test_the_byzantine_client_is_found_in_the_trim_counts() -> None:
    federator = make_federator(k=16)
    generator = np.random.default_rng(0)
    for number in range(20):
        federator.open_round()
        values = generator.standard_normal((12, 16))
        values[7] += 5
        federator.receive_many(np.arange(12), number, values)
        federator.decide()
    assert np.argmax(federator.trimmed / federator.sent) == 7
    assert federator.trimmed[7] > 1.5 * np.delete(federator.trimmed, 7).max()


def test_a_flood_of_duplicates_costs_no_memory() -> None:
    federator = make_federator(k=64)
    federator.open_round()
    report = Report(1, 0, np.zeros(64, np.float32))
    federator.receive(report)
    tracemalloc.start()
    for _ in range(1_000):
        federator.receive(report)
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10_000):
        federator.receive(report)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1_000
    assert federator.rejections[Receipt.DUPLICATE] == 11_000


VALUES = st.one_of(st.floats(-10, 10), st.sampled_from([3e38, 1e39, math.nan, math.inf, -math.inf]))


def test_of_several_reports_in_one_batch_the_first_valid_one_counts() -> None:
    federator = make_federator(k=1)
    federator.open_round()
    codes = federator.receive_many([3, 3, 3, 5, 3], 0, [[math.nan], [1.0], [2.0], [7.0], [math.inf]])
    expected = [Receipt.NOT_FINITE, Receipt.ACCEPTED, Receipt.DUPLICATE, Receipt.ACCEPTED, Receipt.DUPLICATE]
    assert codes.tolist() == expected
    assert federator._values[[3, 5], 0].tolist() == [1.0, 7.0]
    assert federator.rejections[Receipt.DUPLICATE] == 2


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_many_reports_at_once_fare_exactly_as_one_after_another(data: st.DataObject) -> None:
    options: dict[str, Any] = {"clients": 10, "k": 2, "participation": data.draw(st.sampled_from([1.0, 0.5]))}
    single, many = make_federator(**options), make_federator(**options)
    if data.draw(st.integers(0, 9)):
        single.open_round()
        many.open_round()
    for _ in range(data.draw(st.integers(1, 3))):
        clients = data.draw(st.lists(st.integers(-1, 10), min_size=1, max_size=25))
        number = data.draw(st.sampled_from([0, 0, 0, 1, -1, 10**30]))
        width = data.draw(st.sampled_from([2, 2, 2, 1, 3]))
        dtype = data.draw(st.sampled_from([np.float32, np.float64, np.complex64]))
        rows = [[data.draw(VALUES) for _ in range(width)] for _ in clients]
        with np.errstate(over="ignore"):
            values = np.array(rows, np.float64).reshape(len(clients), width).astype(dtype)
        expected = [single.receive(Report(client, number, row)) for client, row in zip(clients, values, strict=True)]
        codes = many.receive_many(np.array(clients, np.int64), number, values)
        assert [Receipt(code) for code in codes] == expected
    assert many.rejections == single.rejections
    assert many._values.tobytes() == single._values.tobytes()
    if single.round is not None:
        assert decided(single, deadline=True).chain == decided(many, deadline=True).chain


def test_many_reports_that_are_no_matrix_are_a_mistake_of_the_caller() -> None:
    federator = make_federator()
    federator.open_round()
    with pytest.raises(ProtocolError, match="vector of integers"):
        federator.receive_many([0.5], 0, np.zeros((1, 4)))
    with pytest.raises(ProtocolError, match="2 rows"):
        federator.receive_many([0, 1], 0, np.zeros((1, 4)))
    unsigned = np.array([0, 2**64 - 1], np.uint64)
    codes = federator.receive_many(unsigned, 0, np.zeros((2, 4)))
    assert codes.tolist() == [Receipt.ACCEPTED, Receipt.UNKNOWN_CLIENT]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_sequence_of_hostile_events_moves_a_decision_out_of_the_honest_range(data: st.DataObject) -> None:
    clients, k, byzantine = 9, 2, {1, 4}
    federator = make_federator(
        clients=clients, k=k, rule=data.draw(st.sampled_from([trimmed_mean(0.25), median(0.25)]))
    )
    assert federator.tolerated == 2
    anything = st.one_of(
        st.none(), st.text(max_size=3), st.booleans(), st.integers(), st.floats(), st.lists(st.floats(), max_size=3)
    )
    for number in range(3):
        federator.open_round()
        honest = np.array([[data.draw(st.floats(-10, 10, width=32)) for _ in range(k)] for _ in range(clients)])
        events = list(range(clients)) + data.draw(st.lists(st.sampled_from([*byzantine, -1, 99]), max_size=15))
        heard = []
        for client in data.draw(st.permutations(events)):
            if client in byzantine or client not in range(clients):
                lie = np.array([data.draw(st.floats(width=32)) for _ in range(k)], np.float32)
                values = lie if data.draw(st.booleans()) else data.draw(anything)
                stated = data.draw(st.sampled_from([number, number, number - 1, number + 1, None, 2.0]))
                assert isinstance(federator.receive(Report(client, stated, values)), Receipt)  # type: ignore[arg-type]
            elif data.draw(st.integers(0, 9)):  # now and then an honest client is late
                assert federator.receive(Report(client, number, honest[client].astype(np.float32))) is Receipt.ACCEPTED
                heard.append(client)
        decision = decided(federator, deadline=True)
        if decision.values is not None:
            told = honest[heard].astype(np.float32)
            assert ((told.min(axis=0) <= decision.values) & (decision.values <= told.max(axis=0))).all()
        else:
            assert len(heard) < 5
    assert len(federator.ledger) == 3


def test_the_sample_is_a_function_of_seed_and_round_without_repetition() -> None:
    sample = invited_clients(3, 5, 1_000, 0.1)
    assert len(sample) == len(set(sample.tolist())) == 100
    assert sample.tolist() == sorted(sample.tolist()) == invited_clients(3, 5, 1_000, 0.1).tolist()
    assert sample.tolist() != invited_clients(3, 6, 1_000, 0.1).tolist()
    assert sample.tolist() != invited_clients(4, 5, 1_000, 0.1).tolist()
    assert invited_clients(3, 5, 7, 1.0).tolist() == list(range(7))
    assert len(invited_clients(3, 5, 7, 0.01)) == 1


def test_every_client_is_invited_equally_often() -> None:
    counts = np.zeros(20)
    for number in range(2_000):
        counts[invited_clients(11, number, 20, 0.25)] += 1
    assert np.abs(counts - 500).max() < 5 * math.sqrt(2_000 * 0.25 * 0.75)


@pytest.mark.parametrize("participation", [0.0, -0.5, 1.01, math.nan])
def test_an_impossible_participation_is_refused(participation: float) -> None:
    with pytest.raises(ConfigError, match="participation"):
        invited_count(10, participation)


def test_the_probability_of_too_many_byzantine_clients_is_exact() -> None:
    assert probability_of_too_many_byzantine(1_000, 250, 12, 3) == pytest.approx(0.3508, abs=1e-4)
    assert probability_of_too_many_byzantine(12, 3, 12, 3) == 0.0
    assert probability_of_too_many_byzantine(12, 4, 12, 3) == 1.0
    assert probability_of_too_many_byzantine(10, 0, 5, 0) == 0.0
    for clients, byzantine, invited, tolerated in [
        (9, 4, 5, 1),
        (9, 8, 5, 1),
        (20, 7, 10, 3),
        (6, 6, 3, 2),
        (6, 3, 0, 0),
    ]:
        plain = sum(
            math.comb(byzantine, i) * math.comb(clients - byzantine, invited - i)
            for i in range(tolerated + 1, min(byzantine, invited) + 1)
        ) / math.comb(clients, invited)
        assert probability_of_too_many_byzantine(clients, byzantine, invited, tolerated) == plain
    with pytest.raises(ConfigError):
        probability_of_too_many_byzantine(10, 11, 5, 1)


def test_silent_byzantine_clients_that_could_halt_training_are_warned_of() -> None:
    assert make_federator(clients=13).warnings == ()  # b = 3, and 13 - 3 >= 7
    assert make_federator(clients=12).warnings == ()
    (warning,) = make_federator(clients=9, rule=trimmed_mean(0.4)).warnings  # b = 3, and 9 - 3 < 7
    assert "3 Byzantine clients that stay silent can halt training" in warning
    (warning,) = make_federator(clients=12, quorum=10).warnings
    assert "10 are needed" in warning
    assert make_federator(clients=9, rule=mean()).warnings == ()


def test_a_federator_that_could_never_decide_is_refused() -> None:
    with pytest.raises(ConfigError, match="quorum = 13"):
        make_federator(quorum=13)
    with pytest.raises(ConfigError, match="the ledger was started with 5"):
        make_federator(ledger=Ledger.create(None, make_header(5)))


def test_an_abandoned_round_in_the_ledger_counts_for_nobody() -> None:
    ledger = Ledger.create(None, make_header(3))
    ledger.append(Record(0, 0.1, None, np.ones(3, np.bool_), np.zeros(3, np.int64)))
    federator = make_federator(clients=3, ledger=ledger)
    assert not federator.sent.any()
    assert federator.open_round().round == 1


STEPS = st.tuples(st.sampled_from(["excuse", "wait", "report", "many", "only"]), st.integers(0, 255))


@pytest.mark.slow
@given(steps=st.lists(STEPS, max_size=25), participation=st.sampled_from([0.5, 1.0]))
def test_a_round_is_complete_when_enough_and_all_who_are_waited_for_have_answered(
    steps: list[tuple[str, int]], participation: float
) -> None:
    """Counted as it goes, and here from the beginning."""
    federator = make_federator(8, participation=participation)
    invited = set(federator.open_round().invited.tolist())
    awaited, answered = set(invited), set()
    for step, number in steps:
        client, several = number % 8, {c for c in range(8) if number >> c & 1}
        if step == "excuse":
            federator.excuse(client)
            awaited.discard(client)
        elif step == "wait":
            federator.wait_for(client)
            awaited |= {client} & invited
        elif step == "only":
            federator.wait_only_for(np.array([c in several for c in range(8)]))
            awaited = several & invited
        elif step == "report":
            federator.receive(Report(client, 0, numbers(client)))
            answered |= {client} & invited
        else:
            federator.receive_many(sorted(several), 0, np.ones((len(several), 4), np.float32))
            answered |= several & invited
        enough = len(answered) >= federator.required and awaited <= answered
        assert federator.complete == (answered == invited or enough)
        assert federator.silent().tolist() == sorted(awaited - answered)
        here = np.array([c in several for c in range(8)])
        assert federator.possible(here) == len(several & invited - answered)
