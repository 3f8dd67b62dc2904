"""Whole deployments as processes: killed, cut off, resumed, joined late; and a federator that stays light."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from processes import PATIENCE, Process, many_processes, until, write_digits
from storm import Storm
from typer.testing import CliRunner
from wire import REST, WEIGHTS, Voter

grpc = pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
pytest.importorskip("cryptography", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cyber0.cli import deploy as commands  # noqa: E402
from cyber0.cli import main as cli  # noqa: E402
from cyber0.config.files import load  # noqa: E402
from cyber0.config.schedules import learning_rate  # noqa: E402
from cyber0.config.schema import Config, to_dict  # noqa: E402
from cyber0.errors import Cyber0Error  # noqa: E402
from cyber0.ledger import Header, LayoutEntry, Ledger, Record, without_fields  # noqa: E402
from cyber0.report.folder import read  # noqa: E402
from cyber0.serve import server  # noqa: E402
from cyber0.serve.transport import LEAN, SERVICE  # noqa: E402

LINUX = sys.platform == "linux"
RESIDENT_LIMIT_MB = 80


def read_ledger(path: Path) -> Ledger:
    return Ledger.open(path)


def reached(path: Path) -> int:
    return len(read_ledger(path)) if path.exists() else 0


@pytest.mark.slow
def test_a_federation_survives_kills_cuts_and_a_late_joiner(tmp_path: Path) -> None:
    """benchmarks/chaos.py in short: four clients, one Byzantine; the federator is killed twice, nothing is lost."""
    data, out = write_digits(tmp_path / "data"), tmp_path / "run"
    config = tmp_path / "config.toml"
    rounds, honest = 120, (0, 1, 3)
    # Three of the four must report, so that whenever one of three is away the run waits for it.
    config.write_text(
        f'rounds = {rounds}\n[task]\ndata = "{data}"\n[federation]\nclients = 4\nbyzantine = 1\n[method]\nk = 4\n'
        "lr = 0.001\n[aggregation]\nbeta = 0.25\n[serve]\nquorum = 3\ndeadline_s = 100.0\ndigest_every = 10\n"
        'codec = "bfloat16"\nseed_mode = "chained"\n'
    )
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(many_processes(tmp_path))
        _make_certs(tmp_path / "certs", 4)
        secure = ("--certs", tmp_path / "certs")

        def federator(port: int = 0, *more: str) -> Process:
            return start("serve", "serve", config, "--listen", f"localhost:{port}", "--out", out, *secure, *more)

        server = federator()
        port = server.await_event("listening")["port"]
        storm = stack.enter_context(Storm(port))

        def client(number: int) -> Process:
            state, lie = tmp_path / f"state-{number}", ("--lie", "sign_flip") if number == 2 else ()
            return start(f"client-{number}", "join", f"localhost:{storm.port}", *secure, "--client", number,
                         "--data", data, "--state", state, *lie)  # fmt: skip

        def await_round(number: int) -> None:
            until(lambda: reached(out / "ledger.bin") >= number, f"round {number}")

        seen: list[tuple[int, bytes]] = []

        def kill_federator(*more: str) -> Process:
            server.kill()
            before = read_ledger(out / "ledger.bin")
            seen.append((len(before), before.chain))
            return federator(port, "--resume", *more)

        clients = {number: client(number) for number in (0, 1, 2)}
        await_round(20)
        clients[1].kill()
        clients[1] = client(1)
        await_round(30)
        storm.cut()
        await_round(45)
        server = kill_federator()
        await_round(70)
        assert clients[0].kill(signal.SIGTERM) == 0
        clients[3] = client(3)  # joins late; the run waits for it
        await_round(85)
        server = kill_federator("--stay")
        clients[0] = client(0)
        digests = {n: p.output().strip().rpartition(" ")[2] for n, p in clients.items()}
        # From the weights that it kept when it was stopped, when the decision of round 69 may not have reached it yet.
        assert clients[0].events("joining")[0]["round"] >= 69
        assert {p.events("joining")[0]["samples"] for p in clients.values()} == {300}  # all of what each has
        assert server.kill(signal.SIGTERM) == 0

    from cyber0.runs.replay import rebuild

    ledger, parameters = rebuild(out)
    assert len(ledger) == rounds and ledger.torn_bytes == 0
    for number, chain in seen:
        assert ledger.chain_at(number) == chain
    assert {digests[n] for n in honest} == {parameters.digest()}
    assert any(record.reported[3] for record in ledger)
    assert storm.cuts >= 1
    command = [sys.executable, "-m", "cyber0", "verify", str(out)]
    assert "all is well" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _make_certs(folder: Path, clients: int) -> None:
    from cyber0.serve import tls as certificates

    certificates.make(folder, clients=range(clients), followers=[0], hosts=["localhost"])


def light_header(path: Path, clients: int = 4, rounds: int = 100_000, **serve: Any) -> Header:
    """Write a header without a model: what a federator needs and no more."""
    overrides = [f"rounds={rounds}", f"federation.clients={clients}", "federation.byzantine=0", "method.k=3"]
    config = Config().with_overrides([*overrides, *(f"serve.{name}={value}" for name, value in serve.items())])
    header = Header(
        seed=0, layout=(LayoutEntry("w", (5,), "float32", 0),), distribution="gaussian", k=3, local_epochs=1,
        mu=1e-3, estimator="two_point", lr=0.01, lr_schedule="constant", projection_radius=None, weights_digest=WEIGHTS,
        rest_digest=REST, clients=clients, settings=without_fields(to_dict(config)),
    )  # fmt: skip
    Ledger.create(path, header).close()
    return header


async def vote(address: str, voter: Voter, stop_at: int) -> None:
    """Take part without a model until a round is reached."""
    async with grpc.aio.insecure_channel(address, LEAN) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Rounds")()
        await call.write(voter.hello())
        while voter.round < stop_at and (message := await call.read()) is not grpc.aio.EOF:
            for answer in voter.take(message):
                await call.write(answer)
        call.cancel()


def vote_all(port: int, voters: list[Voter], stop_at: int) -> None:
    async def everyone() -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(vote(f"127.0.0.1:{port}", v, stop_at) for v in voters), return_exceptions=True)

    asyncio.run(everyone())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_federator_process_is_light_and_goes_on_after_any_end(how: signal.Signals, tmp_path: Path) -> None:
    header, out = light_header(tmp_path / "header.bin", durability="batch"), tmp_path / "run"
    voters = [Voter(header, c) for c in range(4)]
    listen = ("serve", tmp_path / "header.bin", "--insecure", "--out", out, "--listen")
    with many_processes(tmp_path) as start:
        server = start("serve", *listen, "127.0.0.1:0", "--metrics", 0, "--watch")
        port = server.await_event("listening")["port"]
        page = next(event["page"] for event in server.events("watching") if "page" in event)
        assert page.startswith("http://127.0.0.1:")
        vote_all(port, voters, 60)
        with urllib.request.urlopen(page) as answer:
            assert b"Clients over the network" in answer.read()
        with urllib.request.urlopen(page + "data.json") as answer:
            assert json.load(answer)["live"]["round"] >= 60
        if LINUX:
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            assert resident < RESIDENT_LIMIT_MB
            maps = Path(f"/proc/{server.process.pid}/maps").read_text()
            assert "libtorch" not in maps and "matplotlib" not in maps
        assert server.kill(how) == (0 if how is signal.SIGTERM else -signal.SIGKILL)
        ledger = read_ledger(out / "ledger.bin")
        assert len(ledger) >= 60 and ledger.torn_bytes == 0
        refused = start("again", *listen, "127.0.0.1:0")
        assert refused.process.wait(PATIENCE) == 2 and "--resume" in refused.log.read_text()
        again = start("resumed", *listen, "127.0.0.1:0", "--resume")
        port = again.await_event("listening")["port"]
        vote_all(port, voters, len(ledger) + 20)
        assert again.kill(signal.SIGTERM) == 0
        assert "bytes a client and round, up / down: payload 12.0 / " in again.output()
    assert read_ledger(out / "ledger.bin").chain_at(len(ledger)) == ledger.chain


@pytest.mark.slow
@pytest.mark.parametrize("directions", ["", 'distribution = "low_rank"\nrank = 2\n'], ids=["gaussian", "low_rank"])
def test_a_follower_evaluates_and_saves_snapshots_that_a_joiner_can_start_from(directions: str, tmp_path: Path) -> None:
    data, out = write_digits(tmp_path / "data"), tmp_path / "run"
    config = tmp_path / "config.toml"
    config.write_text(
        f'rounds = 30\n[task]\ndata = "{data}"\n[federation]\nclients = 1\nbyzantine = 0\n[method]\nk = 4\nlr = 0.001\n'
        f"{directions}[aggregation]\nbeta = 0.0\n"
    )
    with many_processes(tmp_path) as start:
        server = start("serve", "serve", config, "--listen", "127.0.0.1:0", "--insecure", "--out", out, "--stay")
        address = f"127.0.0.1:{server.await_event('listening')['port']}"
        here = (address, "--insecure", "--data", data)
        follower = start("follow", "follow", *here, "--out", tmp_path / "f", "--evaluate-every", 10,
                         "--snapshot-every", 20)  # fmt: skip
        first = start("client", "join", *here, "--client", 0)
        digest = first.output().strip().rpartition(" ")[2]
        reached = f"30 rounds, chain {read_ledger(out / 'ledger.bin').chain.hex()}, digest {digest}"
        assert follower.output().strip() == reached and first.output().strip() == f"client 0: {reached}"
        assert [e["chain"] in reached and e["digest"] == digest for e in first.events("ended")] == [True]
        rows = (tmp_path / "f" / "metrics.csv").read_text().splitlines()
        assert rows[0] == "round,accuracy,loss" and [row.split(",")[0] for row in rows[1:]] == ["10", "20", "30"]
        snapshot = tmp_path / "f" / "snapshot-20.safetensors"
        late = start("late", "join", *here, "--client", 0, "--snapshot", snapshot)
        assert late.output().strip() == f"client 0: {reached}"
        assert late.events("joining")[0]["round"] == 20
        (tmp_path / "f" / "state" / "snapshot.safetensors").unlink(missing_ok=True)  # as if it had been killed early
        again = start("follower-again", "follow", *here, "--out", tmp_path / "f", "--evaluate-every", 10)
        again.output()
        assert len(again.events("evaluated")) == 3
        assert (tmp_path / "f" / "metrics.csv").read_text().splitlines() == rows
        assert server.kill(signal.SIGTERM) == 0
    # The federator has been told what the follower found, the last round included.
    shown = read(out)
    assert [e.round for e in shown.evaluations] == [10, 20, 30] and shown.ended and shown.notes == []
    assert [f"{e.accuracy},{e.loss}" for e in shown.evaluations] == [row.partition(",")[2] for row in rows[1:]]


def test_a_resumed_federation_keeps_the_length_it_was_given_and_no_summary_of_the_shorter_one(tmp_path: Path) -> None:
    config, header, out = tmp_path / "c.toml", tmp_path / "header.bin", tmp_path / "run"
    config.write_text('rounds = 5\n[task]\nname = "logistic"\n')
    assert CliRunner().invoke(cli.app, ["init", str(config), "--out", str(header)]).exit_code == 0

    def rounds(source: Path, *overrides: str, resume: bool = True) -> int:
        server.prepare(source, out, list(overrides), resume=resume).close()
        return load(out / "config.toml").rounds

    assert rounds(header, resume=False) == 5
    with Ledger.open(out / "ledger.bin", writable=True) as ledger:
        m = ledger.header.clients
        for t in range(5):
            ledger.append(Record(t, 0.1, None, np.ones(m, np.bool_), np.zeros(m, np.int64), rounds=5))
    (out / "summary.json").write_text("{}")
    assert rounds(header) == rounds(config) == 5 and (out / "summary.json").exists()
    assert rounds(header, "rounds=9") == 9 and not (out / "summary.json").exists()
    assert rounds(header) == rounds(config) == 9  # though no record says so yet
    assert rounds(config, "rounds=7") == 7
    for source, overrides, error in (
        (header, ["method.k=2"], "settings are fixed"),
        (header, ["rounds=4"], "has 5 already"),
        (header, ["rounds=5"], r"clients that were promised 7 rounds .*: set rounds to at least 6"),
        (config, ["method.k=2"], r"method\.k \(now 2"),
    ):
        with pytest.raises(Cyber0Error, match=error):
            server.prepare(source, out, overrides, resume=True)
    with pytest.raises(Cyber0Error, match="settings are fixed"):
        server.prepare(header, tmp_path / "other", ["rounds=9"], resume=False)


@pytest.mark.slow
def test_a_federation_is_lengthened_when_it_is_resumed(tmp_path: Path) -> None:
    """Local epochs under a schedule: to measure what they should, clients have to know the new number of rounds."""
    data, out = write_digits(tmp_path / "data"), tmp_path / "run"
    config = tmp_path / "config.toml"
    text = (
        f'rounds = 6\n[task]\ndata = "{data}"\n[federation]\nclients = 2\nbyzantine = 0\n[method]\nk = 4\nlr = 0.001\n'
        'lr_schedule = "linear"\nlocal_epochs = 2\n[aggregation]\nrule = "mean"\nbeta = 0.0\n[serve]\nquorum = 2\n'
    )
    config.write_text(text)
    serve = ("serve", config, "--listen", "127.0.0.1:0", "--insecure", "--out", out, "--stay")
    digests = []
    with many_processes(tmp_path) as start:
        for more in ((), ("--resume", "--set", "rounds=10"), ("--resume", "--set", "rounds=10")):
            server = start("serve", *serve, *more)
            here = (f"127.0.0.1:{server.await_event('listening')['port']}", "--insecure", "--data", data)
            states = [("--client", i, "--state", tmp_path / f"state-{i}") for i in range(2)]
            clients = [start(f"client-{i}", "join", *here, *states[i]) for i in range(2)]
            digests.append({client.output().strip().rpartition(" ")[2] for client in clients})
            assert server.kill(signal.SIGTERM) == 0
        short = start("short", *serve, "--resume", "--set", "rounds=9")
        assert short.process.wait(PATIENCE) == 2
        assert "rounds = 9, and the ledger" in short.log.read_text() and "has 10 already" in short.log.read_text()
    assert [len(found) for found in digests] == [1, 1, 1] and digests[1] == digests[2] != digests[0]
    ledger = read_ledger(out / "ledger.bin")
    assert [record.rounds for record in ledger] == [6] * 6 + [10] * 4 and ledger.header.rounds == 6
    rates = [learning_rate(0.001, "linear", rounds)(t) for t, rounds in enumerate([6] * 6 + [10] * 4)]
    assert [record.lr for record in ledger] == rates


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["serve", "c.toml", "--listen", "127.0.0.1:0", "--out", "o"], "--certs DIR"),
     (["serve", "c.toml", "--listen", "0.0.0.0:7000", "--insecure", "--out", "o"], "this machine alone"),
     (["serve", "missing.toml", "--listen", "127.0.0.1:0", "--insecure", "--out", "o"], "no config file"),
     (["serve", "c.toml", "--listen", "localhost:0", "--certs", "nowhere", "--out", "o"], "cyber0 certs"),
     (["join", "localhost", "--insecure"], "not HOST:PORT"),
     (["join", "localhost:65537", "--insecure", "--client", "0"], "a port from 1 to 65535"),
     (["serve", "c.toml", "--listen", "7171", "--insecure", "--out", "o"], "not HOST:PORT"),
     (["serve", "c.toml", "--listen", "localhost:65537", "--insecure", "--out", "o"], "a port from 0 to 65535"),
     (["join", "localhost:1", "--insecure"], "--client NUMBER"),
     (["join", "other.example:1", "--insecure", "--client", "0"], "this machine alone"),
     (["join", "localhost:1", "--certs", "nowhere"], "holds 0 certificates"),
     (["follow", "localhost:1", "--insecure", "--out", __file__],
      f"--out {__file__} can't be a folder: {__file__} is a file; choose another"),
     (["join", "localhost:1", "--insecure", "--client", "0", "--state", f"{__file__}/state"],
      f"--state {__file__}/state can't be a folder: {__file__} is a file"),
     (["join", "localhost:1", "--insecure", "--client", "0", "--lie", "alie"], "--lie alie")],
)  # fmt: skip
def test_what_can_not_work_is_refused_in_one_line(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cyber0.cli import main as cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cyber0", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "options"), [("grpc", []), ("prometheus_client", ["--metrics", "0"])])
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    package: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    line = ["serve", "c.toml", "--listen", "127.0.0.1:0", "--insecure", "--out", str(tmp_path / "run"), *options]
    with pytest.raises(Cyber0Error, match=rf"needs the package {package}: pip install 'cyber0\[deploy\]'"):
        CliRunner().invoke(cli.app, line, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_to_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cyber0.cli.options import check_folder
    from cyber0.errors import ConfigError

    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # who runs tests may write anywhere
    with pytest.raises(ConfigError, match=f"--out {tmp_path}/a/b can't be used: {tmp_path} can't be written to"):
        check_folder("--out", tmp_path / "a" / "b")
    check_folder("--out", tmp_path.parent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("more", "said"), [([], "1 certificate made in"), (["--clients", "1"], "2 certificates made")])
def test_certificates_that_were_made_are_counted(
    more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cyber0.cli import main as cli

    monkeypatch.setattr(sys, "argv", ["cyber0", "certs", str(tmp_path / "pki"), *more])
    with contextlib.suppress(SystemExit):
        cli.main()
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("which", ["--listen", "--metrics", "--watch-port"])
def test_a_port_that_is_taken_is_refused_before_anything_is_written(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cyber0.cli import main as cli

    light_header(tmp_path / "header.bin")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = (
            {"--listen": f"127.0.0.1:{port}"} if which == "--listen" else {"--listen": "127.0.0.1:0", which: str(port)}
        )
        line = ["serve", str(tmp_path / "header.bin"), "--insecure", "--watch", "--out", str(tmp_path / "run")]
        monkeypatch.setattr(sys, "argv", ["cyber0", *line, *(word for pair in ports.items() for word in pair)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"can't listen on 127.0.0.1:{port}: " in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def federator(tmp_path: Path) -> Iterator[tuple[Any, Process]]:
    """A federator of one client, whose certificate is for localhost, and how to start other processes beside it."""
    config = tmp_path / "config.toml"
    config.write_text(f'rounds = 5\n[task]\ndata = "{write_digits(tmp_path / "data")}"\n[federation]\nclients = 1\n'
                      "byzantine = 0\n[aggregation]\nbeta = 0.0\n")  # fmt: skip
    _make_certs(tmp_path / "certs", 2)
    with many_processes(tmp_path) as start:
        yield start, start("serve", "serve", config, "--listen", "127.0.0.1:0", "--certs", tmp_path / "certs",
                           "--out", tmp_path / "run")  # fmt: skip


@pytest.mark.slow
def test_who_can_not_get_in_is_told_why_and_does_not_wait(federator: tuple[Any, Process], tmp_path: Path) -> None:
    start, server = federator
    port = server.await_event("listening")["port"]
    subprocess.run([sys.executable, "-m", "cyber0", "certs", tmp_path / "others", "--clients", "1"], check=True)
    for name, host, certs, number, text in (
        ("name", "127.0.0.1", "certs", 0, "not for this name"),
        ("authority", "localhost", "others", 0, "not from the authority"),
        ("number", "localhost", "certs", 1, "client 1 is not in this run"),
    ):
        joins = start(name, "join", f"{host}:{port}", "--certs", tmp_path / certs, "--client", number)
        assert joins.process.wait(PATIENCE) == 2
        said = joins.log.read_text()  # gRPC may log the failed handshake before or after
        assert [text in line for line in said.splitlines() if line.startswith("error: ")] == [True], said


@pytest.mark.slow
def test_a_federators_folder_is_not_gone_on_with_as_a_simulation(
    federator: tuple[Any, Process], tmp_path: Path
) -> None:
    _, server = federator
    server.await_event("listening")
    assert server.kill(signal.SIGTERM) == 0
    kept = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    command = [sys.executable, "-m", "cyber0", "run", "--resume", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "belongs to a federator" in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == kept


@pytest.mark.parametrize(("abandoned", "code"), [(5, 3), (4, 0)])
def test_a_federator_that_decided_no_round_exits_as_a_run_that_learned_nothing(
    abandoned: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"rounds": 5, "abandoned_rounds": abandoned, "rejected_reports": {"late": 7}}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    status = 0
    try:
        commands._judge(tmp_path)
    except typer.Exit as stop:
        status = stop.exit_code
    error = capsys.readouterr().err
    assert status == code
    assert ("every one of the 5 rounds was abandoned" in error and "7 late" in error) == (code == 3)
