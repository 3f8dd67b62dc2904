"""Watching a run: who may ask what of the server, and that it comes and goes with the run."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_folder
from synthetic import OWN_BLOBS, one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.cli import main as cli
from cyber0.errors import ConfigError
from cyber0.report.folder import read
from cyber0.report.watch import LivePage, LiveServer
from cyber0.runs.run import Run


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[LiveServer]:
    found = read(make_folder(tmp_path / "run"))
    with LiveServer() as one:
        one.start(lambda: (found, {"round": 50, "rounds": 50, "speed": "1.0 rounds/s"}))
        yield one
        one._last_request = -60.0  # nobody is waited for


def port_of(watch: LiveServer) -> int:
    return int(watch.address.rstrip("/").rsplit(":", 1)[1])


def ask(watch: LiveServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(watch), timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    result = answer.status, answer.read().decode()
    connection.close()
    return result


def test_it_serves_the_page_and_its_data_and_nothing_else(watch: LiveServer) -> None:
    status, text = ask(watch)
    assert status == 200 and "connect-src 'self'" in text and '"live":{"round":50' in text
    status, text = ask(watch, "/data.json")
    assert status == 200 and json.loads(text)["live"] == {
        "round": 50,
        "rounds": 50,
        "speed": "1.0 rounds/s",
        "ended": False,
    }
    for path in ("/config.toml", "/../run/config.toml", "/data.json/", "/data.json?x=1", "/%2e%2e/"):
        assert ask(watch, path)[0] == 404


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "NONSENSE"])
def test_it_takes_nothing_but_get(watch: LiveServer, method: str) -> None:
    assert ask(watch, "/", method)[0] == 405


def test_it_listens_on_loopback_alone(watch: LiveServer) -> None:
    assert watch.address.startswith("http://127.0.0.1:")
    assert watch._server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{port}", 200), ("localhost:{port}", 200), ("LOCALHOST", 200), ("[::1]:{port}", 200),
     ("evil.example", 403), ("evil.example:{port}", 403), ("localhost.evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("192.0.2.7:{port}", 403), ("", 403)],
)  # fmt: skip
def test_names_that_are_not_its_own_are_refused(watch: LiveServer, host: str, status: int) -> None:
    for path in ("/", "/data.json"):
        assert ask(watch, path, Host=host.format(port=port_of(watch)))[0] == status


def test_told_to_listen_everywhere_it_answers_to_addresses_and_its_own_name(tmp_path: Path) -> None:
    found = read(make_folder(tmp_path / "run"))
    with LiveServer("0.0.0.0") as watch:
        watch.start(lambda: (found, {"round": 1, "rounds": 2, "speed": "1.0 rounds/s"}))
        answers = {host: ask(watch, Host=host)[0] for host in ("192.0.2.7", socket.gethostname(), "evil.example")}
        watch._last_request = -60.0
    assert list(answers.values()) == [200, 200, 403]


def test_a_client_that_hangs_up_or_talks_nonsense_does_no_harm(
    watch: LiveServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (
        b"",
        b"GET",
        b"\x16\x03\x01\x00\xff\n\n",
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 70_000,
        b"GET /data.json HTTP/1.0\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port_of(watch))) as connection:
            connection.sendall(words)
    assert ask(watch)[0] == 200
    with socket.create_connection(("127.0.0.1", port_of(watch))) as connection:  # one name for us, one for a proxy
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 403 ")
    assert capfd.readouterr() == ("", "")


def test_an_address_that_cannot_be_had_is_refused_before_anything_runs(
    watch: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for host, port in (("127.0.0.1", port_of(watch)), ("no.such.host.invalid", 0), ("192.0.2.7", 0)):
        with pytest.raises(ConfigError, match="--watch-port"):
            LiveServer(host, port)
    monkeypatch.setattr(sys, "argv", ["cyber0", "run", "--out", str(tmp_path / "new"), "--watch", "--watch-port",
                                      str(port_of(watch))])  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main()
    assert "can't be watched" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows forgets closed connections at once")
def test_a_port_whose_page_somebody_has_read_can_be_listened_on_again(tmp_path: Path) -> None:
    found = read(make_folder(tmp_path / "run"))
    with LiveServer() as first:
        first.start(lambda: (found, {"round": 1, "rounds": 2, "speed": "1.0 rounds/s"}))
        port = port_of(first)
        with socket.create_connection(("127.0.0.1", port)) as reader:
            reader.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            while reader.recv(1 << 16):  # until the server closes: it is then its side that waits for stray packets
                pass
        first._last_request = -60.0
    with LiveServer(port=port) as second:
        assert port_of(second) == port
        with pytest.raises(ConfigError, match="--watch-port"):
            LiveServer(port=port)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accuracy_picture", "suspects_picture", "partition_picture"):
        monkeypatch.setattr(f"cyber0.report.plots.{name}", lambda *_, **__: None)


def test_a_run_can_be_seen_at_every_round(tmp_path: Path, no_pictures: None) -> None:
    run = Run.start(config("rounds=9", "evaluate_every=4"), tmp_path / "run")
    seen = []
    with LiveServer() as server:
        live = LivePage(server)

        class Reader:
            def on_round(self, record: Any) -> None:
                found, state = live.snapshot()
                assert found.notes == [] and not found.ended and found.summary["environment"]
                assert sum(row.trimmed for row in found.clients) > 0
                seen.append((state["round"], [e.round for e in found.evaluations]))

        run.run([live, Reader()])
    assert seen[0] == (1, [0]) and seen[4] == (5, [0, 4]) and seen[-1] == (9, [0, 4, 8])
    found, state = live.snapshot()
    assert state["round"] == 9 and [e.round for e in found.evaluations] == [0, 4, 8, 9]
    assert found.ended and found.summary["model_digest"] == run.simulation.parameters.digest()


def test_a_page_that_others_can_reach_is_warned_of(tmp_path: Path, no_pictures: None) -> None:
    with (
        LiveServer("0.0.0.0") as server,
        pytest.warns(RuntimeWarning, match="everybody who can reach this machine at 0.0."),
    ):
        Run.start(config("rounds=0"), tmp_path / "run").run([LivePage(server)])


@pytest.mark.slow
def test_the_command_prints_the_address_serves_the_run_and_stops_with_it(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[dict[str, Any]] = []

    class Reader:
        def get(self) -> dict[str, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            connection.request("GET", "/data.json")
            result: dict[str, Any] = json.loads(connection.getresponse().read())
            connection.close()
            return result

        def on_start(self, run: Run) -> None:
            out = capsys.readouterr().out
            address = re.search(r"^watch the run at http://127\.0\.0\.1:(\d+)/$", out, re.MULTILINE)
            assert address is not None, out
            self.port = int(address[1])
            answers.append(self.get())

        def on_end(self, summary: Any) -> None:
            threading.Timer(
                0.3, lambda: answers.append(self.get())
            ).start()  # the page asks once more: it is waited for
            answers.append({"port": self.port})

    original = Run.run
    monkeypatch.setattr(Run, "run", lambda self, callbacks: original(self, [*callbacks, Reader()]))
    monkeypatch.setattr(sys, "argv", ["cyber0", "run", OWN_BLOBS, "--set", "rounds=5", "--set", "method.k=4", "--out",
                                      str(tmp_path / "run"), "--quiet", "--watch"])  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    first, port, last = answers
    assert not first["live"]["ended"] and last["live"]["ended"] and last["runs"][0]["ended"]
    assert last["live"]["round"] == 5
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port["port"])):
        pass


def test_without_tensorboard_the_run_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["cyber0", "run", "--out", str(tmp_path / "run"), "--tensorboard"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "pip install tensorboard" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_event_files_hold_every_evaluation_once_also_after_a_resume(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["cyber0", "run", *arguments, "--quiet", "--tensorboard"])
        with pytest.raises(SystemExit):
            cli.main()

    run(OWN_BLOBS, "--set", "rounds=7", "--set", "evaluate_every=2", "--set", "method.k=4", "--out",
        str(tmp_path / "run"))  # fmt: skip
    run("--resume", str(tmp_path / "run"))
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    rows = read(tmp_path / "run").evaluations
    assert [e.step for e in events.Scalars("test/accuracy")] == [row.round for row in rows] == [0, 2, 4, 6, 7]
    assert [e.value for e in events.Scalars("test/loss")] == pytest.approx([row.loss for row in rows], rel=1e-6)
    assert events.Scalars("traffic/sent_by_each_client")[-1].value == 7 * 4 * 4
