"""The demo's server: what it answers, and that nobody but its own page can steer it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from small_demo import small_session
from synthetic import one_thread  # noqa: F401

from cyber0.cli import main as cli
from cyber0.demo.server import LONGEST_REQUEST, TOKEN_HEADER, DemoServer
from cyber0.errors import ConfigError

CHANGE = {"rule": "mean"}


@pytest.fixture
def demo() -> Iterator[DemoServer]:
    with DemoServer() as server:
        server.start(small_session())
        yield server


def port_of(demo: DemoServer) -> int:
    return int(demo.address.rstrip("/").rsplit(":", 1)[1])


def ask(
    demo: DemoServer, path: str, body: bytes | None = None, method: str | None = None, **headers: str | None
) -> tuple[int, str]:
    """Send what the demo's own page would; a header that is None is left out."""
    own = {"Host": f"127.0.0.1:{port_of(demo)}"}
    if body is not None:
        own |= {"Origin": demo.address.rstrip("/"), TOKEN_HEADER: demo.token, "Content-Type": "application/json"}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", port_of(demo), timeout=20)
    connection.request(
        method or ("GET" if body is None else "POST"), path, body,
        {name: value for name, value in (own | given).items() if value is not None},
    )  # fmt: skip
    answer = connection.getresponse()
    result = answer.status, answer.read().decode()
    connection.close()
    return result


def change(demo: DemoServer, path: str = "/settings", body: Any = CHANGE, **headers: str | None) -> tuple[int, str]:
    return ask(demo, path, json.dumps(body).encode(), **headers)


def test_it_serves_its_page_its_data_and_nothing_else(demo: DemoServer) -> None:
    status, page = ask(demo, "/")
    assert status == 200 and demo.token in page and "connect-src 'self'" in page
    status, text = ask(demo, "/data.json")
    found = json.loads(text)
    assert status == 200 and demo.token not in text and found["settings"]["attack"] == "sign_flip"
    assert found["chosen"]["digest"] and found["trials"][0]["accuracy"]
    for path in ("/settings", "/control", "/page.html", "/../", "/data.json?x=1"):
        assert ask(demo, path)[0] == 404
    assert change(demo, "/other")[0] == 404
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"):
        assert ask(demo, "/settings", method=method)[0] == 405


def test_its_own_page_changes_the_settings(demo: DemoServer) -> None:
    status, text = change(demo, body={"rule": "median", "byzantine": [0, 1]})
    assert status == 200
    assert json.loads(text)["settings"] == {
        "byzantine": [0, 1], "attack": "sign_flip", "rule": "median", "tolerated": 3,
    }  # fmt: skip
    assert json.loads(change(demo, "/control", {"action": "pause"})[1])["paused"] is True
    assert demo.session.step() is False


@pytest.mark.parametrize(
    "headers",
    [{"Origin": None}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"},
     {TOKEN_HEADER: None}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: "guess"}, {TOKEN_HEADER: "é"},
     {"Host": "evil.example", "Origin": "http://evil.example"}, {"Host": "evil.example"}],
)  # fmt: skip
def test_another_site_can_not_steer_it(demo: DemoServer, headers: dict[str, str | None]) -> None:
    before = demo.session.snapshot()
    for path, body in (("/settings", CHANGE), ("/control", {"action": "clear"})):
        assert change(demo, path, body, **headers)[0] == 403
    assert demo.session.snapshot() == before


def test_another_site_can_not_read_it(demo: DemoServer) -> None:
    for path in ("/", "/data.json"):
        assert ask(demo, path, Host="evil.example")[0] == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"[1]", 400), (b"{", 400), (b"\xff", 400), (b"[" * 4000, 400), (b"{}" + b" " * LONGEST_REQUEST, 400),
     (b'{"rule": "nope"}', 422), (b'{"rule": "krum", "tolerated": 5}', 422), (b'{"byzantine": [1e400]}', 422),
     (b'{"rule": {"a": 1}}', 422), (b"{}", 200)],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_with_a_reason(demo: DemoServer, body: bytes, status: int) -> None:
    found, text = ask(demo, "/settings", body)
    assert found == status and (status == 200 or json.loads(text)["error"])


def test_a_port_that_is_taken_is_refused_with_a_remedy(
    demo: DemoServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--port"):
        DemoServer(port_of(demo))
    monkeypatch.setattr(sys, "argv", ["cyber0", "demo", "--no-browser", "--port", str(port_of(demo))])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "choose another by --port" in capfd.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_the_command_with_code_0(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "cyber0", "demo", "--no-browser", "--rounds", "3"]
    environment = {**os.environ, "CYBER0_CACHE": str(tmp_path)}

    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests started in the background ignore it

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_ctrl_c
    ) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        lines = iter(demo.stdout.readline, "")
        assert any(re.match(r"the demo is at http://127\.0\.0\.1:\d+/ ", line) for line in lines)
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=60)
    assert demo.returncode == 0 and rest.strip() == "the demo has ended" and errors == ""
