"""Who fails in the TLS handshake: refused by gRPC's core, and counted under a reason all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, Process, many_processes, until
from wire import Voter, make_header, make_hub

grpc = pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
pytest.importorskip("cryptography", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cyber0.config.schema import Config, to_dict  # noqa: E402
from cyber0.ledger import Ledger, without_fields  # noqa: E402
from cyber0.serve import server  # noqa: E402
from cyber0.serve import tls as certificates  # noqa: E402
from cyber0.serve.grpc_log import reason_of  # noqa: E402
from cyber0.serve.handshakes import Handshakes  # noqa: E402

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell who is connected")
only_posix = pytest.mark.skipif(sys.platform == "win32", reason="stderr is led through a process on POSIX systems only")
RESIDENT_LIMIT_MB = 80
FAILED = "I1115 19:37:46.114377   27782 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
NO_VERDICT = ": Invalid certificate verification context"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("error:1a000064:ECDSA routines:OPENSSL_internal:BAD_SIGNATURE: certificate signature failure",
      "wrong_certificate"),
     ("error:04000088:RSA routines:OPENSSL_internal:PADDING: certificate signature failure", "wrong_certificate"),
     ("error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate",
      "wrong_certificate"),
     ("error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired",
      "expired_certificate"),
     ("error:100000c0:SSL routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE" + NO_VERDICT, "no_certificate"),
     ("error:10000418:SSL routines:OPENSSL_internal:TLSV1_ALERT_UNKNOWN_CA" + NO_VERDICT, "bad_handshake"),
     ("error:10000412:SSL routines:OPENSSL_internal:SSLV3_ALERT_BAD_CERTIFICATE" + NO_VERDICT, "bad_handshake"),
     ("error:1000009c:SSL routines:OPENSSL_internal:HTTP_REQUEST" + NO_VERDICT, "bad_handshake"),
     ("some words that a later version has", "bad_handshake")],
)  # fmt: skip
def test_grpcs_line_says_why_a_handshake_failed(text: str, reason: str) -> None:
    assert reason_of((FAILED + text).encode()) == reason


def test_other_lines_are_no_failed_handshakes() -> None:
    assert reason_of(b"") is None
    assert reason_of(b'{"event": "cut_off", "text": "Handshake failed: certificate has expired"}') is None


def run_beside_the_counter(body: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run lines of Python while failures are counted; `line` is one that counts."""
    script = (
        "import ctypes, os, sys, time\nfrom cyber0.serve.grpc_log import failures_counted\n"
        f"line = b{FAILED + 'certificate has expired'!r} + bytes([10])\n"
        "with failures_counted() as failures:\n" + "".join(f"    {each}\n" for each in body.splitlines())
    )
    command = [sys.executable, "-c", script]
    return subprocess.run(command, stdin=subprocess.DEVNULL, text=True, timeout=PATIENCE, check=False, **more)


@only_posix
def test_all_of_stderr_but_failed_handshakes_is_passed_on() -> None:
    done = run_beside_the_counter(
        "os.write(2, b'one' + bytes([10]) + line + b'two' + bytes([10, 255]) + b'half a line')\n"
        "print('mine', file=sys.stderr)\n"
        "while not failures(): time.sleep(0.01)\n"
        "print(failures())\n",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="backslashreplace",
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "Counter({'expired_certificate': 1})\n"
    # Our own lines take a way of their own, so they come anywhere between.
    assert "mine\n" in done.stderr and done.stderr.replace("mine\n", "") == "one\ntwo\n\\xffhalf a line"


@only_posix
def test_stderr_is_as_it_was_when_counting_ends() -> None:
    done = run_beside_the_counter(
        "pass\nassert sys.stderr is not sys.__stderr__", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = run_beside_the_counter("os.write(2, b'in it, ')\nraise SystemExit('after it')", stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "in it, after it\n")


@only_posix
@pytest.mark.parametrize(
    ("end", "code"),
    [("os.abort()", -signal.SIGABRT), ("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3)],
)
def test_the_last_words_before_a_crash_are_passed_on(end: str, code: int) -> None:
    done = run_beside_the_counter(f"os.write(2, b'check failed: all is lost')\n{end}", stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, "check failed: all is lost")


@only_posix
def test_a_flood_of_lines_by_a_thread_that_lets_no_other_run_blocks_nothing() -> None:
    done = run_beside_the_counter(
        "write = ctypes.PyDLL(None).write  # keeps the interpreter's lock, as parts of gRPC do\n"
        "for _ in range(20_000): assert write(2, line, len(line)) == len(line)\n"
        "while failures().total() < 20_000: time.sleep(0.01)\n",
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr) == (0, "")


@only_posix
@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_is_no_reason_to_stop(how: str) -> None:
    script = (
        "from cyber0.serve.grpc_log import failures_counted\nimport os, sys\nwith failures_counted() as failures:\n"
        "    for _ in range(1000 * (sys.stderr is not None)): os.write(2, b'words' + bytes([10]))\n"
        "    print('done', failures())\n"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {how}', sys.executable, script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, "done Counter()\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates: `ours`, with client 9's expired one; `theirs`, of another authority."""
    path = tmp_path_factory.mktemp("certs")
    certificates.make(path / "ours", clients=range(4), hosts=["localhost"])
    certificates.make(path / "ours", clients=[9], hosts=[], days=0)
    certificates.make(path / "theirs", clients=[0], hosts=["localhost"])
    return path


def shake(port: int, authority: Path, own: Path | None = None) -> None:
    """Try a handshake and wait for its end."""
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])
    if own is not None:
        context.load_cert_chain(own, own.with_suffix(".key"))
    with (
        contextlib.suppress(OSError),  # refused
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        while secure.recv(1 << 16):
            pass


def send(port: int, data: bytes) -> None:
    """Send what is no TLS; wait for the other side to end the connection if there was anything."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(data)
        while data and plain.recv(1 << 16):
            pass


async def vote(address: str, certs: Path, voter: Voter, stop_at: int) -> None:
    """Take part without a model until a round is reached."""
    mine = certificates.load(certs, f"client-{voter.client}")
    credentials = grpc.ssl_channel_credentials(mine.authority, mine.key, mine.certificate)
    options = [*server.LEAN, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        await channel.unary_unary(f"/{server.SERVICE}/Describe")(b"")  # two calls, one connection
        call = channel.stream_stream(f"/{server.SERVICE}/Rounds")()
        await call.write(voter.hello())
        while voter.round < stop_at and (message := await call.read()) is not grpc.aio.EOF:
            for answer in voter.take(message):
                await call.write(answer)
        call.cancel()


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(limited())


@only_linux
def test_without_the_log_whoever_leaves_without_a_call_is_counted_once_gone(folder: Path) -> None:
    async def settle(handshakes: Handshakes, done: Callable[[], bool]) -> None:
        while not done():
            handshakes.news()
            await asyncio.sleep(0.01)

    async def work() -> None:
        hub, handshakes = make_hub(4, 1_000_000), Handshakes()
        ours = certificates.load(folder / "ours", "server")
        this, port = server.make_server(hub, "localhost:0", ours, handshakes)
        await this.start()
        hub.start()
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for each in slow:
            each.send(b"\x16")
        voters = [Voter(hub.ledger.header, c) for c in range(4)]
        await asyncio.gather(*(vote(f"localhost:{port}", folder / "ours", v, 3) for v in voters))
        for _ in range(5):
            await asyncio.to_thread(send, port, b"")
        await settle(handshakes, lambda: handshakes.failed == {"no_call": 5})
        for _ in range(10):  # who called, and who is still trying, is never counted
            assert handshakes.news() == Counter()
        for each in slow:
            each.close()
        await settle(handshakes, lambda: handshakes.failed == {"no_call": 8})
        await asyncio.gather(*(vote(f"localhost:{port}", folder / "ours", v, v.round + 3) for v in voters))
        await asyncio.to_thread(send, port, b"")
        await settle(handshakes, lambda: handshakes.failed == {"no_call": 9})
        hub.close()
        await this.stop(None)

    run(work())


def metrics_of(federator: Process) -> dict[str, int]:
    """Return what the federator has refused, by reason."""
    page = next(event["metrics"] for event in federator.events("watching") if "metrics" in event)
    with urllib.request.urlopen(page) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.removeprefix('cyber0_refused_total{reason="').split('"} ') for line in lines if "{reason=" in line]
    return {reason: int(count) for reason, count in pairs}


@only_linux
def test_every_failed_handshake_is_counted_under_its_reason_and_rounds_go_on(folder: Path, tmp_path: Path) -> None:
    overrides = ["rounds=1000000", "federation.clients=4", "federation.byzantine=0", "method.k=3", "serve.deadline_s=1"]
    overrides += ["seed=1", "method.lr=0.1"]  # as the header has it
    header = make_header(4, settings=without_fields(to_dict(Config().with_overrides(overrides))))
    Ledger.create(tmp_path / "header.bin", header).close()
    ours, theirs, flood = folder / "ours", folder / "theirs", 200
    voters = [Voter(header, c) for c in range(4)]
    expected = {"wrong_certificate": 2 + flood, "expired_certificate": 1, "no_certificate": 1, "bad_handshake": 3,
                "no_call": 2}  # fmt: skip

    with many_processes(tmp_path) as start:
        federator = start("serve", "serve", tmp_path / "header.bin", "--listen", "localhost:0", "--certs", ours,
                          "--out", tmp_path / "run", "--metrics", 0, "--watch")  # fmt: skip
        port = federator.await_event("listening")["port"]

        async def play(stop_at: int) -> None:
            calls = (vote(f"localhost:{port}", ours, v, stop_at) for v in voters)
            await asyncio.gather(*calls, return_exceptions=True)

        run(play(5))
        for _ in range(2 + flood):
            shake(port, ours / "ca.pem", theirs / "client-0.pem")
        shake(port, ours / "ca.pem", ours / "client-9.pem")
        shake(port, ours / "ca.pem")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            send(port, garbage)
        send(port, b"")
        send(port, b"")
        run(play(10))

        def refused() -> dict[str, int]:
            return {reason: count for reason, count in metrics_of(federator).items() if reason != "broken_stream"}

        until(lambda: sum(refused().values()) >= sum(expected.values()), "all to be counted")
        assert refused() == expected
        page = next(event["page"] for event in federator.events("watching") if "page" in event)
        with urllib.request.urlopen(page + "data.json") as answer:
            assert f"{2 + flood} wrong_certificate" in answer.read().decode()
        status = Path(f"/proc/{federator.process.pid}/status").read_text()
        assert int(status.partition("VmRSS:")[2].split()[0]) / 1024 < RESIDENT_LIMIT_MB
        assert federator.kill(signal.SIGTERM) == 0
        assert f"{2 + flood} wrong certificate" in federator.output()
    kept = json.loads((tmp_path / "run" / "served.json").read_text())["refused"]
    assert {reason: kept[reason] for reason in expected} == expected
    assert len(Ledger.open(tmp_path / "run" / "ledger.bin")) >= 10
    # The log tells of them, though not of each.
    told = federator.events("handshakes_failed")
    assert told and len(federator.log.read_text().splitlines()) < flood / 2
