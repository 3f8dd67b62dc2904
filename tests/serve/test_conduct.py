"""What a participant holds its federator to: learning rates, scalars, the end of the run, and standing still."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen import FrozenFederator, relative_error
from synthetic import Blobs, config, one_thread  # noqa: F401

pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cyber0 import Simulation
from cyber0.errors import ConfigError, DataError, LedgerError, ProtocolError
from cyber0.ledger import Header, Ledger, Record, first_chain
from cyber0.ledger.rates import AgreedRates
from cyber0.ledger.record import Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.messages import (
    ENDED,
    RECORDS,
    REPLAY,
    Opened,
    decode_report,
    encode_bare,
    encode_decision,
    encode_opened,
)
from cyber0.runs import replay as replays
from cyber0.serve import server
from cyber0.serve.conduct import FederatorCheck, Misconduct
from cyber0.serve.join import JoinOptions, make_participant
from cyber0.serve.participant import Participant
from cyber0.serve.state import open_state

K, ROUNDS, LR = 8, 40, 0.1
LIVE, CATCHING_UP = "live", "catching up"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence of a participant without a state folder lies in the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def participant(*overrides: str, folder: Path | None = None, number: int | None = 0, **options: Any) -> Participant:
    """Return one of a served run, at w0; it measures on the data of client 0."""
    client = Simulation(config(f"rounds={ROUNDS}", *overrides), task=Blobs()).client
    client.header = dataclasses.replace(client.header, id="0a" * 16)
    client.chain = first_chain(client.header)
    w0 = {name: t.clone() for name, t in client.parameters.state().items()}
    state = open_state(folder, client.chain, number or 0)
    return Participant(client, state, number, start=lambda: w0, **options)


def record(header: Header, number: int, *, lr: float = LR, value: float | None = 0.5, rounds: int = ROUNDS) -> Record:
    values = None if value is None else np.full(header.scalars, value, np.float32)
    nobody = np.zeros(header.clients, np.int64)
    return Record(number, lr, values, np.ones(header.clients, np.bool_), nobody, rounds=rounds)


class Frames:
    """A federator's messages about a ledger: live decisions, or records."""

    def __init__(self, header: Header) -> None:
        self.ledger = Ledger.create(None, header)

    def append(self, **changes: Any) -> bytes:
        """Append a round, and return its live decision."""
        sealed = self.ledger.append(record(self.ledger.header, len(self.ledger), **changes))
        decision = Decision(sealed.round, sealed.lr, sealed.values, sealed.details, sealed.rounds)
        return encode_decision(decision, codecs.make(self.ledger.header.codec))

    def records(self, start: int = 0) -> bytes:
        return bytes([RECORDS]) + self.ledger.chunk(start, 1 << 20)[0]

    def opened(self) -> bytes:
        return encode_opened(Opened(len(self.ledger), self.ledger.chain, self.ledger.rounds))


VIOLATIONS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"lr": 7.0}, (), r"round 2: the learning rate is 7\.0, and 0\.1 was agreed on"),
    ({"lr": 1e300}, (), r"round 2: the learning rate is 1e\+300, and 0\.1"),
    ({"lr": -LR}, (), r"the learning rate is -0\.1, and 0\.1"),
    ({"lr": 7.0, "value": None}, (), r"the learning rate is 7\.0"),
    ({"value": 3e38}, (), r"a scalar has the magnitude 3e\+38, and at most 1e\+06 was agreed on"),
    ({"value": -1.1e6}, (), r"a scalar has the magnitude 1\.1e\+06, and at most 1e\+06"),
    ({"value": 51.0}, ("serve.scalar_limit=50",), r"a scalar has the magnitude 51, and at most 50"),
    ({"value": 2e5}, ("task.dtype=float16",), r"may change a weight by \d+, which leaves the finite range"),
    ({"rounds": 0}, (), "the run is said to have 0 rounds, which does not include this one"),
    ({"rounds": 2}, (), "the run is said to have 2 rounds"),
    ({"lr": LR * (1 - 2 / ROUNDS), "rounds": 9}, ("method.lr_schedule=linear",), r"'linear' over 9 rounds"),
]


@pytest.mark.parametrize("way", [LIVE, CATCHING_UP])
@pytest.mark.parametrize(("changes", "overrides", "message"), VIOLATIONS)
def test_what_was_not_agreed_on_stops_a_client_with_evidence(
    changes: dict[str, Any], overrides: tuple[str, ...], message: str, way: str, tmp_path: Path
) -> None:
    mine = participant(*overrides, folder=tmp_path / "state")
    frames = Frames(mine.header)
    lr = {0: LR, 1: LR * (1 - 1 / ROUNDS)} if "method.lr_schedule=linear" in overrides else {0: LR, 1: LR}
    live = [frames.append(lr=lr[0]), frames.append(lr=lr[1])]
    if way == LIVE:
        mine.receive(encode_opened(Opened(0, mine.run, ROUNDS)))
        for frame in live:
            assert mine.receive(frame) is not None
    else:
        mine.receive(frames.records())
    chain, before = frames.ledger.chain, mine.client.parameters.digest()
    bad = frames.append(**changes)
    bad = bad if way == LIVE else frames.records(2)
    with pytest.raises(Misconduct, match=message) as raised:
        mine.receive(bad)
    assert mine.client.parameters.digest() == before and (mine.client.next_round, mine.client.chain) == (2, chain)
    assert mine.state.seen == (2, chain)  # nothing of it is committed or remembered
    (path,) = (tmp_path / "state").glob("evidence-*.json")
    assert path.name == "evidence-2.json" and str(path) in str(raised.value)
    found = json.loads(path.read_text())
    assert (found["run"], found["client"], found["round"]) == (mine.run.hex(), 0, 2)
    assert (bytes.fromhex(found["message"]), bytes.fromhex(found["chain"])) == (bad, chain)
    assert Header.from_json(found["header"].encode()) == mine.header and found["time"].startswith("20")
    assert found["text"] in str(raised.value)
    with pytest.raises(LedgerError, match=r"evidence-2\.json says .* delete the file to trust it again"):
        participant(*overrides, folder=tmp_path / "state")
    path.unlink()
    assert participant(*overrides, folder=tmp_path / "state").state.seen == (2, chain)


def test_nothing_of_a_message_with_one_bad_record_is_committed() -> None:
    mine = participant(number=None)
    frames = Frames(mine.header)
    for changes in ({}, {"value": None}, {"lr": 7.0}, {}):
        frames.append(**changes)
    with pytest.raises(Misconduct, match="round 2"):
        mine.receive(frames.records())
    assert mine.client.next_round == 0 and mine.state.seen is None


def test_evidence_of_who_has_no_folder_lies_in_the_working_directory_and_stops_the_next_start() -> None:
    mine = participant(number=3)
    with pytest.raises(Misconduct, match="evidence-"):
        mine.receive(Frames(mine.header).append(lr=7.0))
    (path,) = Path.cwd().glob(f"evidence-{mine.run.hex()[:8]}-3-0.json")
    with pytest.raises(LedgerError, match="broke the agreement"):
        participant(number=3)
    participant(number=2)  # who shares the folder is not meant
    path.unlink()
    participant(number=3)


def test_evidence_that_can_not_be_written_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DataError("evidence-0.json can't be written: no space left")

    mine = participant(folder=tmp_path / "state")
    monkeypatch.setattr("cyber0.serve.state.write_text", full)
    with pytest.raises(Misconduct, match=r"learning rate is 7\.0.*Evidence: evidence-0\.json can't be written"):
        mine.receive(Frames(mine.header).append(lr=7.0))


def test_without_evidence_a_restart_grants_no_further_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DataError("evidence-1.json can't be written: no space left")

    mine = participant(folder=tmp_path / "state", stalled_rounds=1)
    frames = Frames(mine.header)
    mine.receive(frames.opened())
    monkeypatch.setattr("cyber0.serve.state.write_text", full)
    with pytest.raises(Misconduct, match=f"{K} scalars were sent"):
        mine.receive(frames.append(value=None))
    again = participant(folder=tmp_path / "state", stalled_rounds=1)
    again.receive(frames.records())
    with pytest.raises(Misconduct, match=f"{K} scalars were sent"):
        again.receive(frames.opened())


@pytest.mark.parametrize("reached", [0, 3])
def test_an_end_before_the_announced_number_of_rounds_stops_a_client(reached: int) -> None:
    mine = participant()
    frames = Frames(mine.header)
    for _ in range(reached):
        mine.receive(frames.append())
    with pytest.raises(Misconduct, match=f"round {reached}: .* has ended, and {ROUNDS} rounds were announced"):
        mine.receive(encode_bare(ENDED))
    assert not mine.ended


def test_a_run_is_not_shortened_by_an_announcement_that_no_record_repeats() -> None:
    mine = participant()
    frames = Frames(mine.header)
    mine.receive(frames.append())
    with pytest.raises(Misconduct, match="round 1: it is announced as one of 1 rounds, which do not include it"):
        mine.receive_all([encode_opened(Opened(1, frames.ledger.chain, 1)), encode_bare(ENDED)])
    assert not mine.ended


def test_a_run_that_was_shortened_by_a_record_may_end_there() -> None:
    mine = participant()
    frames = Frames(mine.header)
    for rounds in (ROUNDS, 3, 3):
        mine.receive(frames.append(rounds=rounds))
    mine.receive(encode_bare(ENDED))
    assert mine.ended
    told = participant()
    told.receive(encode_opened(Opened(0, told.run, 0)))  # which takes nothing back
    with pytest.raises(Misconduct, match=f"{ROUNDS} rounds were announced"):
        told.receive(encode_bare(ENDED))


def test_a_step_within_the_finite_range_is_taken_however_often_the_weights_are_read() -> None:
    mine = participant("serve.scalar_limit=1e39", "task.dtype=float16")
    frames, reads = Frames(mine.header), []
    read = mine.client.parameters.fullness
    mine.check._fullness = lambda: reads.append(1) or read()  # type: ignore[func-returns-value]
    for _ in range(12):
        mine.receive(frames.append(value=20000.0))
    assert mine.client.next_round == 12 and 1 < len(reads) < 12  # only where the bound has reached the end of the range
    again = participant("serve.scalar_limit=1e39", "task.dtype=float16")
    again.receive(frames.records())
    assert again.client.parameters.digest() == mine.client.parameters.digest()
    again.receive(encode_bare(REPLAY))
    again.receive(frames.records())
    assert again.client.parameters.digest() == mine.client.parameters.digest()


def federate(overrides: tuple[str, ...], lengths: list[tuple[int, int]]) -> Ledger:
    """Return what an honest federator of a served run writes: for each (rounds, until), it is resumed and goes on."""
    settings = config(*overrides)
    header = dataclasses.replace(Simulation(settings, task=Blobs()).ledger.header, id="0a" * 16)
    ledger, rng = Ledger.create(None, header), np.random.default_rng(0)
    for rounds, until in lengths:
        federator = server.make_federator(ledger, config=settings.with_overrides([f"rounds={rounds}"]))
        while len(ledger) < until:
            federator.open_round()
            if len(ledger) % 3 != 2:  # every third is abandoned
                rows = rng.normal(size=(header.clients, header.scalars)).astype(np.float32)
                federator.receive_many(np.arange(header.clients), len(ledger), rows)
            federator.decide(deadline=True)
    return ledger


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_an_honest_run_is_accepted_also_lengthened_and_with_abandoned_rounds(schedule: str) -> None:
    overrides = (f"rounds={ROUNDS}", f"method.lr_schedule={schedule}")
    ledger = federate(overrides, [(ROUNDS, 20), (60, 60), (61, 61)])
    live, at_once, follower = (participant(*overrides, number=n) for n in (0, 1, None))
    for sealed in ledger:
        decision = Decision(sealed.round, sealed.lr, sealed.values, sealed.details, sealed.rounds)
        live.receive(encode_decision(decision))
    at_once.receive(bytes([RECORDS]) + ledger.chunk(0, 1 << 20)[0])
    follower.receive(bytes([RECORDS]) + ledger.chunk(0, 1 << 20)[0])
    for mine in (live, at_once, follower):
        mine.receive(encode_bare(ENDED))
        assert mine.ended and mine.client.chain == ledger.chain
    assert not list(Path.cwd().glob("evidence-*"))
    assert replays.check_conduct(ledger).unknown == ""


# What `cyber0 verify` says.


def test_verify_refuses_a_learning_rate_that_was_not_agreed_on(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from cyber0.cli.main import app

    header = participant().header
    with Ledger.create(tmp_path / "ledger.bin", header) as ledger:
        ledger.append(record(header, 0))
        ledger.append(record(header, 1, lr=7.0))
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code != 0 and "2 records verify" in result.output
    with pytest.raises(LedgerError, match=r"in round 1: the learning rate is 7\.0, and 0\.1 was agreed on"):
        replays.check_conduct(Ledger.open(tmp_path / "ledger.bin"))


def test_verify_refuses_a_scalar_beyond_the_limit_of_a_served_run() -> None:
    served = participant().header
    for header, refused in ((served, True), (dataclasses.replace(served, id=""), False)):
        ledger = Ledger.create(None, header)
        ledger.append(record(header, 0, value=2e6))
        if refused:
            with pytest.raises(LedgerError, match=r"in round 0: a scalar has the magnitude 2e\+06"):
                replays.check_conduct(ledger)
        else:
            replays.check_conduct(ledger)


def test_an_honest_federator_abandons_what_clients_would_refuse_and_verify_agrees(tmp_path: Path) -> None:
    settings = config(f"rounds={ROUNDS}", "serve.keep_reports=true")
    header = dataclasses.replace(Simulation(settings, task=Blobs()).ledger.header, id="0a" * 16)
    mine = participant("serve.keep_reports=true")
    with Ledger.create(tmp_path / "ledger.bin", header) as ledger:
        federator = server.make_federator(ledger, tmp_path / "reports.bin", settings)
        for value in (2e6, 9e5):
            federator.open_round()
            rows = np.full((header.clients, K), value, np.float32)
            federator.receive_many(np.arange(header.clients), len(ledger), rows)
            decision = federator.decide()
            assert decision is not None and (decision.values is None) == (value > 1e6)
            mine.receive(encode_decision(decision))
        assert replays.check_decisions(tmp_path, ledger).rounds == 2
        replays.check_conduct(ledger)
    assert mine.client.chain == ledger.chain


# Different decisions for different clients.


def test_a_client_that_was_sent_other_scalars_has_another_chain_and_refuses_the_true_one(tmp_path: Path) -> None:
    everyone = [participant(folder=tmp_path / str(n), number=n) for n in range(3)]
    true, other = Frames(everyone[0].header), Frames(everyone[0].header)
    for number in range(4):
        decision = true.append(value=0.5)
        forged = other.append(value=0.25 if number == 2 else 0.5)
        for mine in everyone:
            mine.receive(forged if mine.number == 2 else decision)
    chains = {mine.client.chain for mine in everyone}
    assert chains == {true.ledger.chain, other.ledger.chain} and len(chains) == 2
    seen = [(tmp_path / str(n) / "seen.bin").read_bytes()[4:36] for n in range(3)]
    assert seen == [true.ledger.chain, true.ledger.chain, other.ledger.chain]
    with pytest.raises(LedgerError, match="after 4 rounds: it was rewritten"):
        everyone[2].receive(true.opened())
    again = participant(folder=tmp_path / "2", number=2)  # after a restart the records of the true ledger come
    with pytest.raises(LedgerError, match="after 4 rounds: it was rewritten"):
        again.receive(true.records())
    assert again.client.next_round == 0


def test_a_made_up_chain_is_refused() -> None:
    mine = participant()
    frames = Frames(mine.header)
    mine.receive(frames.append())
    with pytest.raises(LedgerError, match="rewritten"):
        mine.receive(encode_opened(Opened(1, b"\7" * 8, ROUNDS)))
    with pytest.raises(ProtocolError, match="round 2 was announced"):
        mine.receive(encode_opened(Opened(2, b"\7" * 8, ROUNDS)))
    sealed = frames.records(0)
    with pytest.raises(LedgerError, match="hash chain"):
        participant().receive(sealed[:-36] + b"\7" * 32 + struct.pack("<I", zlib.crc32(sealed[1:-36] + b"\7" * 32)))


# Standing still.

FULL_BATCH = "method.batch_size=100000"


def true_gradient(mine: Participant) -> np.ndarray[Any, Any]:
    """Return the gradient of the client's loss on all its samples, at the weights that it holds."""
    task, model = Blobs(), mine.client.parameters.model
    rows = mine.client.samples.drawn(np.array([0]), 0)[0]
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outputs = task.train_inputs[rows] @ weights[0].T + weights[1]
    loss = task.losses(outputs, task.train_targets[rows]).mean()
    found = torch.autograd.grad(loss, weights)
    return np.concatenate([part.reshape(-1).numpy() for part in found]).astype(np.float64)


@pytest.mark.parametrize("decided", [None, 0.0, 1e-9])
def test_a_federator_that_keeps_w_where_it_is_does_not_learn_the_gradient(decided: float | None) -> None:
    trusting = participant(FULL_BATCH, stalled_rounds=1000)
    federator = FrozenFederator(trusting.header, decided)
    dimension = trusting.header.dimension
    rounds = -(-dimension // K)
    true = true_gradient(trusting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federator.collect(trusting.receive, rounds)
    assert federator.scalars >= dimension and relative_error(federator.gradient(), true) < 0.02
    mine = participant(FULL_BATCH)
    federator = FrozenFederator(mine.header, decided)
    with (
        pytest.warns(RuntimeWarning, match=rf"round 2: {2 * K} scalars were sent while .* stops at {4 * K}"),
        pytest.raises(Misconduct, match=rf"round 4: {4 * K} scalars were sent while the weights have moved less"),
    ):
        federator.collect(mine.receive, rounds)
    assert federator.scalars == 4 * K < dimension and relative_error(federator.gradient(), true) > 0.5


def test_a_round_that_is_announced_with_another_number_of_rounds_gets_the_same_answer() -> None:
    mine = participant("method.local_epochs=2", "method.lr_schedule=linear")
    mine._rates = AgreedRates(mine.header).of_run  # as of `cyber0 join`: local steps depend on the number of rounds
    frames = Frames(mine.header)
    first = mine.receive(frames.append())
    assert first is not None
    for rounds in (ROUNDS + 1, 2 * ROUNDS):
        assert mine.receive(encode_opened(Opened(1, frames.ledger.chain, rounds))) == first


def test_a_federator_can_not_have_a_client_start_over_again_and_again() -> None:
    mine = participant("serve.digest_every=2")
    frames = Frames(mine.header)
    for _ in range(2):
        mine.receive_all([encode_bare(REPLAY), *([frames.records()] if len(frames.ledger) else [])])
        with pytest.raises(ProtocolError, match="was sent no digest since"):
            mine.receive(encode_bare(REPLAY))
        mine.receive(frames.append())
        mine.receive(frames.append())  # whose answer has a digest
    assert mine.replays == 2


def test_a_federator_that_moves_w_just_enough_learns_the_gradient_all_the_same() -> None:
    """What the limit does not prevent, so that nobody relies on it."""
    mine = participant(FULL_BATCH)
    federator, true = FrozenFederator(mine.header, 0.0), true_gradient(mine)
    message = federator.opened()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while federator.scalars < mine.header.dimension:
            answer = mine.receive(message)
            assert answer is not None
            decided = np.zeros(mine.header.scalars, np.float32)
            decided[0] = 1.01 * mine.check._ordinary if federator.round % 3 == 2 else 0.0
            federator._decided = decided
            message = federator.take(answer)
    assert relative_error(federator.gradient(), true) < 0.03


@pytest.mark.filterwarnings("ignore:round .* scalars were sent while the weights have moved less:RuntimeWarning")
def test_a_client_stops_before_it_answers_and_a_restart_does_not_make_it_forget(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    mine = participant(FULL_BATCH, folder=folder, stalled_rounds=3)
    federator, first = FrozenFederator(mine.header), b""
    first = mine.receive(federator.opened()) or b""
    for _ in range(5):  # announced again after a reconnect: the same round, the same answer, counted once
        assert mine.receive(federator.opened()) == first
    federator.decision()
    frames = Frames(mine.header)
    frames.append(value=None)
    for expected in (2, 3):
        mine = participant(FULL_BATCH, folder=folder, stalled_rounds=3)
        mine.receive(frames.records())  # without a snapshot all records come again
        assert mine.receive(frames.opened()) is not None
        assert mine.state.stall.scalars == expected * K
        frames.append(value=None)
    mine = participant(FULL_BATCH, folder=folder, stalled_rounds=3)
    mine.receive(frames.records())
    mine.client.measure = None  # type: ignore[assignment,method-assign]  # it is not even measured
    with pytest.raises(Misconduct, match=f"{3 * K} scalars were sent"):
        mine.receive(frames.opened())
    (path,) = folder.glob("evidence-*.json")
    with pytest.raises(LedgerError, match="delete the file to trust it again"):
        participant(FULL_BATCH, folder=folder)
    path.unlink()  # which grants as many answers again
    mine = participant(FULL_BATCH, folder=folder, stalled_rounds=1)
    mine.receive(frames.records())
    assert mine.receive(frames.opened()) is not None


def test_a_round_that_was_answered_is_answered_again_also_at_the_limit() -> None:
    mine = participant(FULL_BATCH, stalled_rounds=1)
    federator = FrozenFederator(mine.header)
    answer = mine.receive(federator.opened())
    assert answer is not None and mine.receive(federator.opened()) == answer
    with pytest.raises(Misconduct, match=f"round 1: {K} scalars were sent"):
        mine.receive(federator.decision())


@pytest.mark.filterwarnings("ignore:round .* scalars were sent while the weights have moved less:RuntimeWarning")
def test_ordinary_rounds_between_abandoned_ones_start_the_count_again() -> None:
    mine = participant(stalled_rounds=2)
    frames = Frames(mine.header)
    answer = mine.receive(frames.opened())
    for number in range(ROUNDS - 1):
        assert answer is not None
        own = decode_report(answer, 0, K).values
        answer = mine.receive(frames.append(value=None if number % 2 else float(np.abs(own).mean()) / 12))
    assert mine.state.stall.scalars <= 2 * K


def test_a_client_that_sends_something_huge_is_judged_by_what_it_has_measured() -> None:
    mine = participant(FULL_BATCH, attack=lambda row, _: np.full_like(row, 1e36))
    frames = Frames(mine.header)
    mine.receive(frames.opened())
    for _ in range(8):
        assert mine.receive(frames.append()) is not None
    assert mine.state.stall.scalars == K


@pytest.mark.filterwarnings("ignore:round .* scalars were sent while the weights have moved less:RuntimeWarning")
@pytest.mark.parametrize("optimizer", ["zscore", "rank", "adaptive"])
def test_decisions_that_the_optimizer_makes_nothing_of_do_not_move_the_weights(optimizer: str) -> None:
    mine = participant(FULL_BATCH, f"method.optimizer={optimizer}")
    frames = Frames(mine.header)
    mine.receive(frames.opened())
    with pytest.raises(Misconduct, match="were sent while the weights have moved less than an ordinary round"):
        for number in range(8):  # one large decision makes later ones of `adaptive` short; the others compare scalars
            mine.receive(frames.append(value=1e5 if number == 0 else 1.0))


def test_ordinary_decisions_move_the_weights_with_an_optimizer_that_scales_them() -> None:
    mine = participant(FULL_BATCH, "method.optimizer=adaptive")
    frames = Frames(mine.header)
    mine.receive(frames.opened())
    for _ in range(8):
        assert mine.receive(frames.append(value=1e-3)) is not None  # of whatever size they are


@pytest.mark.filterwarnings("ignore:round .* scalars were sent while the weights have moved less:RuntimeWarning")
def test_small_moves_add_up_to_an_ordinary_one() -> None:
    mine = participant(FULL_BATCH)
    answer = mine.receive(Frames(mine.header).opened())
    assert answer is not None
    norm = float(np.linalg.norm(decode_report(answer, 0, K).values))
    ordinary = norm / (16 * math.sqrt(mine.header.clients))
    frames = Frames(mine.header)
    for number in range(6):
        assert mine.receive(frames.append(value=0.45 * ordinary / math.sqrt(K))) is not None
        assert mine.state.stall.scalars // K == (2, 3, 1, 2, 3, 1)[number]


@pytest.mark.filterwarnings("ignore:round .* scalars were sent while the weights have moved less:RuntimeWarning")
def test_a_run_that_is_said_to_end_with_every_round_moves_the_weights_as_little_as_its_rate() -> None:
    mine = participant(FULL_BATCH, "method.lr_schedule=linear")
    frames = Frames(mine.header)
    mine.receive(frames.opened())
    values = {number: frames.append(lr=LR * (1 - number / ROUNDS)) for number in range(3)}
    assert all(mine.receive(frame) is not None for frame in values.values()) and mine.state.stall.scalars == K
    with pytest.raises(Misconduct, match="scalars were sent while the weights"):
        for number in range(3, 12):  # each is the last but one, so the schedule has lowered the rate to almost nothing
            ended = number + 2
            mine.receive(frames.append(lr=LR * (1 - number / ended), rounds=ended, value=0.02))
    assert mine.client.next_round < 9


def test_a_replayed_round_is_no_movement() -> None:
    mine = participant(FULL_BATCH, "serve.digest_every=1")
    frames = Frames(mine.header)
    mine.receive(frames.append())
    for _ in range(4):
        mine.receive(encode_bare(REPLAY))
        mine.receive(frames.records())
        assert mine.receive(frames.opened()) is not None  # the same round: counted once
    mine.receive(frames.append(value=None))
    before = mine.state.stall
    assert before.scalars == 2 * K
    mine.receive(encode_bare(REPLAY))
    mine.receive(frames.records())
    assert mine.state.stall == before


def test_what_an_earlier_version_has_seen_is_read(tmp_path: Path) -> None:
    mine = participant(folder=tmp_path / "state")
    frames = Frames(mine.header)
    mine.receive(frames.append())
    body = struct.pack("<I32s", 1, frames.ledger.chain)
    (tmp_path / "state" / "seen.bin").write_bytes(body + struct.pack("<I", zlib.crc32(body)))
    again = participant(folder=tmp_path / "state")
    assert again.state.seen == (1, frames.ledger.chain) and again.state.stall.scalars == 0
    again.receive(frames.records())
    assert again.receive(frames.opened()) is not None
    assert participant(folder=tmp_path / "state").state.stall.scalars == K


def test_a_step_along_low_rank_directions_may_reach_further() -> None:
    """The weights are at a ninth of what float16 holds, and the step reaches 2,000 times 4.8 or 33 further."""
    plain = Simulation(config("task.dtype=float16", "method.k=1")).ledger.header
    low_rank = dataclasses.replace(plain, distribution="low_rank", rank=2)
    assert low_rank.space.reach > 6 * plain.space.reach
    decided = Decision(0, 1000.0, np.float32([2.0]), b"")
    for header, fits in ((plain, True), (low_rank, False)):
        check = FederatorCheck(header, AgreedRates(header), invited=1, fullness=lambda: 1 / 9)
        if fits:
            check.look(decided)
        else:
            with pytest.raises(Misconduct, match="leaves the finite range"):
                check.look(decided)


# Schedules of one's own.

STAIRS = "def stairs(*, every=2):\n    return lambda t, rounds: 2.0 ** -(t // every)\n"


def test_a_schedule_that_is_not_built_in_is_checked_by_who_names_it() -> None:
    Path("own.py").write_text(STAIRS)
    settings = ("task.name=logistic", f"rounds={ROUNDS}", "method.lr_schedule=own.py:stairs")
    simulation = Simulation(config(*settings))
    header = dataclasses.replace(simulation.ledger.header, id="0a" * 16)
    assert header.lr_schedule == "own.py:stairs"
    options = JoinOptions("127.0.0.1:1", None, 0)
    with pytest.warns(RuntimeWarning, match=r"learning rates are not checked.*--schedule FILE\.py:NAME") as caught:
        unsure = make_participant(header, options)
    assert len(caught) == 1
    sure = make_participant(header, dataclasses.replace(options, schedule="own.py:stairs"))
    frames = Frames(header)
    right = [frames.append(lr=LR), frames.append(lr=LR), frames.append(lr=LR / 2)]
    for mine in (unsure, sure):
        for frame in right:
            mine.receive(frame)
    wrong = frames.append(lr=7.0)
    unsure.receive(wrong)
    with pytest.raises(Misconduct, match=r"learning rate is 7\.0, and 0\.05 was agreed on"):
        sure.receive(wrong)
    with pytest.raises(Misconduct, match="at least 0 was agreed on"):
        unsure.receive(frames.append(lr=-1.0))
    frames = Frames(header)
    with pytest.raises(LedgerError, match="delete the file"):
        make_participant(header, options)
    next(Path.cwd().glob("evidence-*-4.json")).unlink()
    next(Path.cwd().glob("evidence-*-3.json")).unlink()
    with pytest.warns(RuntimeWarning):
        unsure = make_participant(header, options)
    with pytest.raises(Misconduct, match=r"may change a weight by \S+e\+300, which leaves the finite range"):
        unsure.receive(frames.append(lr=1e300))


def test_a_schedule_of_ones_own_with_local_epochs_can_be_joined_by_who_names_it() -> None:
    Path("own.py").write_text(STAIRS)
    settings = config("task.name=logistic", "method.local_epochs=2", "method.lr_schedule=own.py:stairs")
    header = Simulation(settings).ledger.header
    options = JoinOptions("127.0.0.1:1", None, 0)
    with pytest.warns(RuntimeWarning), pytest.raises(ConfigError, match=r"name your copy of it with --schedule"):
        make_participant(header, options)
    mine = make_participant(header, dataclasses.replace(options, schedule="own.py:stairs"))
    assert [mine.client.lr_at(t) for t in (0, 2, 4)] == [LR, LR / 2, LR / 4]
    assert mine.receive(encode_opened(Opened(0, first_chain(header), 30))) is not None


def test_a_served_header_that_leaves_the_learning_rate_open_is_refused() -> None:
    header = dataclasses.replace(participant().header, lr_schedule="free")
    with pytest.raises(ProtocolError, match="lr_schedule = 'free', by which it could choose any learning rate"):
        make_participant(header, JoinOptions("127.0.0.1:1", None, 0))
