"""The network itself: mutual TLS, identities, revocation, and clients that abuse gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from wire import K, Voter, hello_of, make_hub, now

grpc = pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
pytest.importorskip("cryptography", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cyber0.errors import ConfigError, ProtocolError  # noqa: E402
from cyber0.ledger import opening_of  # noqa: E402
from cyber0.serve import tls as certificates  # noqa: E402
from cyber0.serve import transport  # noqa: E402
from cyber0.serve.addresses import refuse_unless_loopback  # noqa: E402
from cyber0.serve.chores import RevocationFile, chores_of  # noqa: E402
from cyber0.serve.hub import TOO_MANY_STREAMS, Hub  # noqa: E402
from cyber0.serve.limits import MAX_STREAMS  # noqa: E402
from cyber0.serve.metrics import MetricsServer  # noqa: E402
from cyber0.serve.operations import make_log  # noqa: E402
from cyber0.serve.sockets import Sockets  # noqa: E402
from cyber0.serve.stats import ServerStats  # noqa: E402

PATIENCE = 120.0


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(limited())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certs")
    certificates.make(path, clients=range(4), followers=[0], hosts=["localhost", "127.0.0.1"])
    return path


@contextlib.asynccontextmanager
async def listening(hub: Hub, folder: Path | None, max_connections: int | None = None) -> AsyncIterator[str]:
    credentials = None if folder is None else certificates.load(folder, "server")
    listen = "localhost:0" if folder else "127.0.0.1:0"
    this, port = transport.make_server(hub, listen, credentials, max_connections)
    await this.start()
    hub.start()
    try:
        yield f"localhost:{port}" if folder else f"127.0.0.1:{port}"
    finally:
        hub.close()
        await this.stop(None)


def channel_to(address: str, folder: Path | None, name: str = "") -> Any:
    options = [*transport.LEAN, ("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    if folder is None:
        return grpc.aio.insecure_channel(address, options)
    mine = certificates.load(folder, name)
    return grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(mine.authority, mine.key, mine.certificate), options
    )


def voter_of(hub: Hub, client: int) -> Voter:
    voter = Voter(hub.ledger.header, client)
    voter.rounds = hub.rounds
    return voter


async def converse(channel: Any, voter: Voter) -> str:
    """Speak until the stream ends, and return its status."""
    call = channel.stream_stream(f"/{transport.SERVICE}/Rounds")()
    try:
        await call.write(voter.hello())
        while (message := await call.read()) is not grpc.aio.EOF:
            for answer in voter.take(message):
                await call.write(answer)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        pass
    code: str = (await call.code()).name
    return code


async def join(address: str, folder: Path | None, voter: Voter) -> str:
    async with channel_to(address, folder, f"client-{voter.client}") as channel:
        return await converse(channel, voter)


@pytest.mark.parametrize("secure", [True, False])
def test_a_federation_over_grpc_ends_with_everybody_at_the_same_chain(secure: bool, folder: Path) -> None:
    async def work() -> None:
        hub, certs = make_hub(4, 20), folder if secure else None
        everyone = [voter_of(hub, c) for c in range(4)]
        async with listening(hub, certs) as address:
            async with channel_to(address, certs, "client-0") as channel:
                opening = await channel.unary_unary(f"/{transport.SERVICE}/Describe")(b"")
                assert opening == opening_of(hub.ledger.header)
            assert await asyncio.gather(*(join(address, certs, v) for v in everyone)) == ["OK"] * 4
        assert all(v.ended and v.chain == hub.ledger.chain for v in everyone)
        assert hub.figures.decided == 20
        for traffic in hub.figures.clients:
            assert traffic.payload_in == traffic.reports * 4 * K and traffic.message_in == traffic.reports * (4 * K + 8)
            assert traffic.payload_out <= 20 * 4 * K < traffic.message_out
            if sys.platform == "linux":  # elsewhere it is not known
                assert traffic.wire_in > traffic.message_in and traffic.wire_out > traffic.message_out

    run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bytes_of_a_connection_are_those_that_went_over_it(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    sockets = Sockets()
    with listener, socket.create_connection(listener.getsockname()[:2]) as far, listener.accept()[0] as near:
        port = far.getsockname()[1]
        peer = f"ipv6:%5B::1%5D:{port}" if ":" in host else f"ipv4:127.0.0.1:{port}"
        assert sockets.news(peer) == (0, 0)
        far.sendall(bytes(1000))
        near.sendall(bytes(77))
        assert len(near.recv(1000, socket.MSG_WAITALL)) == 1000 and len(far.recv(77, socket.MSG_WAITALL)) == 77
        total = [0, 0]
        while total != [1000, 77]:  # what was sent counts when it is acknowledged
            news = sockets.news(peer)
            assert news is not None and news.received >= 0 and news.sent >= 0
            total = [total[0] + news.received, total[1] + news.sent]
        assert sockets.news("ipv4:192.0.2.1:9") is None and sockets.news("unix:/run/x") is None
        sockets.hang_up("ipv4:192.0.2.1:9")
        sockets.hang_up(peer)
        assert far.recv(1) == near.recv(1) == b""
    assert sockets.news(peer) is None
    sockets.hang_up(peer)


def test_a_client_is_warm_before_it_says_hello() -> None:
    from types import SimpleNamespace

    from cyber0.serve.join import FederatorConnection, JoinOptions

    class Recorder:
        """A participant that notes what is asked of it, and leaves at the hello."""

        client = SimpleNamespace(next_round=0)

        def __init__(self) -> None:
            self.asked: list[str] = []

        def warm_up(self) -> None:
            self.asked.append("warm_up")

        def hello(self) -> bytes:
            self.asked.append("hello")
            raise ConfigError("enough")

        def save(self) -> None:
            self.asked.append("save")

    async def work() -> None:
        recorder: Any = Recorder()
        async with listening(make_hub(4, 5), None) as address:
            with pytest.raises(ConfigError, match="enough"):
                await FederatorConnection(JoinOptions(address, None, 0), make_log(quiet=True)).take_part(
                    lambda header: recorder
                )
        assert recorder.asked == ["warm_up", "hello", "save"]

    run(work())


def test_a_certificate_of_another_authority_or_none_gets_nowhere(folder: Path, tmp_path: Path) -> None:
    certificates.make(tmp_path, clients=[0], hosts=["localhost"])
    (tmp_path / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())  # it knows the true authority, though

    async def work() -> None:
        hub = make_hub(4, 2)
        async with listening(hub, folder) as address:
            assert await join(address, tmp_path, voter_of(hub, 0)) == "UNAVAILABLE"
            only_authority = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
            async with grpc.aio.secure_channel(address, only_authority) as channel:
                assert await converse(channel, voter_of(hub, 0)) == "UNAVAILABLE"
            async with grpc.aio.insecure_channel(address) as channel:
                assert await converse(channel, voter_of(hub, 0)) == "UNAVAILABLE"
        assert hub.sessions == [] and len(hub.ledger) == 0

    run(work())


def test_a_client_whose_certificate_is_refused_is_told_the_likely_causes(folder: Path, tmp_path: Path) -> None:
    from cyber0.serve.join import FederatorConnection, JoinOptions

    certificates.make(tmp_path, clients=[0], hosts=["localhost"])
    (tmp_path / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    expired = tmp_path / "expired"
    shutil.copytree(folder, expired)
    (expired / "client-0.pem").unlink()
    (expired / "client-0.key").unlink()
    certificates.make(expired, clients=[0], hosts=[], days=0)

    def never(header: Any) -> Any:
        raise AssertionError("the federator described its run to a client that it should refuse")

    async def work() -> None:
        async with listening(make_hub(4, 2), folder) as address:
            for certs in (tmp_path, expired):
                options = JoinOptions(address, certificates.load(certs, "client-0"), 0, patience_s=0.0)
                with pytest.raises(ProtocolError, match=r"ends the TLS handshake.* another authority .* has expired"):
                    await FederatorConnection(options, make_log(quiet=True)).take_part(never)

    run(work())


@pytest.mark.parametrize("large", ["header", "message"])
def test_a_client_reads_no_more_than_a_header_or_a_message_of_the_run_may_have(large: str) -> None:
    from types import SimpleNamespace

    from cyber0.serve.connection import FederatorConnection, largest_message
    from cyber0.serve.join import JoinOptions

    header = make_hub(4, 2).ledger.header
    opening, most = opening_of(header), largest_message(header)
    sent = {"header": (17 << 20, 16777232), "message": (most + 1, most)}[large]

    async def describe(request: bytes, context: Any) -> bytes:
        return bytes(sent[0]) if large == "header" else opening

    async def rounds(requests: Any, context: Any) -> None:
        await context.write(bytes(sent[0]))

    participant: Any = SimpleNamespace(
        client=SimpleNamespace(next_round=0), hello=lambda: b"hello", warm_up=lambda: None, save=lambda: None
    )

    async def work() -> None:
        hostile = grpc.aio.server()
        handlers = {"Describe": grpc.unary_unary_rpc_method_handler(describe),
                    "Rounds": grpc.stream_stream_rpc_method_handler(rounds)}  # fmt: skip
        hostile.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(transport.SERVICE, handlers),))
        address = f"127.0.0.1:{hostile.add_insecure_port('127.0.0.1:0')}"
        await hostile.start()
        with pytest.raises(ProtocolError, match=rf"sends {sent[0]} bytes; a message .* has at most {sent[1]}"):
            await FederatorConnection(JoinOptions(address, None, 0), make_log(quiet=True)).take_part(
                lambda described: participant
            )
        await hostile.stop(None)

    run(work())


def test_a_client_trusts_no_federator_of_another_authority(folder: Path, tmp_path: Path) -> None:
    certificates.make(tmp_path, clients=[0], hosts=["localhost"])

    async def work() -> None:
        hub = make_hub(4, 2)
        async with listening(hub, folder) as address:
            assert await join(address, tmp_path, voter_of(hub, 0)) == "UNAVAILABLE"

    run(work())


def test_one_identity_has_one_vote_whatever_it_claims(folder: Path) -> None:
    async def work() -> None:
        hub = make_hub(4, 1_000_000)
        async with listening(hub, folder) as address:
            others = [asyncio.ensure_future(join(address, folder, voter_of(hub, c))) for c in (0, 1, 2)]
            while hub.figures.decided < 3:
                await asyncio.sleep(0.01)
            assert await join(address, folder, voter_of(hub, 1)) == "ALREADY_EXISTS"
            async with channel_to(address, folder, "client-1") as channel:
                assert await converse(channel, voter_of(hub, 3)) == "PERMISSION_DENIED"  # names another
            async with channel_to(address, folder, "server") as channel:
                # The federator's own certificate is none of a client.
                assert await converse(channel, voter_of(hub, 3)) in ("PERMISSION_DENIED", "UNAVAILABLE")
            async with channel_to(address, folder, "follower-0") as channel:
                assert await converse(channel, voter_of(hub, 0)) == "PERMISSION_DENIED"  # has no vote
            before = hub.figures.decided
            while hub.figures.decided < before + 3:
                await asyncio.sleep(0.01)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        assert hub.figures.refused["identity_in_use"] == 1 and hub.figures.refused["other_identity"] == 2

    run(work())


@pytest.mark.slow
def test_a_list_in_the_folder_revokes_while_the_federator_runs(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        hub = make_hub(4, 20_000)
        async with listening(hub, folder) as address:
            (tmp_path / "config.toml").write_text("")
            stats = ServerStats(hub, tmp_path, now)
            log = make_log(quiet=True)
            revocations = RevocationFile(tmp_path / "revoked.txt", hub, log)
            watching = asyncio.ensure_future(chores_of(hub, stats, revocations, None, log, now, now).run())
            joined = asyncio.ensure_future(join(address, folder, voter_of(hub, 1)))
            while not hub.current:
                await asyncio.sleep(0.01)
            stolen = certificates.fingerprint((folder / "client-1.pem").read_bytes())
            (tmp_path / "revoked.txt").write_text(f"{stolen}  # stolen\n")
            assert await joined == "PERMISSION_DENIED"
            assert await join(address, folder, voter_of(hub, 1)) == "PERMISSION_DENIED"
            watching.cancel()
        assert hub.figures.refused["revoked"] >= 1

    run(work())


async def _huge(call: Any) -> None:
    await call.write(bytes(1 << 20))
    await call.read()


async def _endless(call: Any) -> None:
    while True:
        await call.write(b"x" * 20)


async def _abuse_again_and_again(address: str, folder: Path, hello: bytes, abuse: Any) -> None:
    """Come back after every cut, for as long as it lasts."""
    while True:
        async with channel_to(address, folder, "client-3") as channel:
            call = channel.stream_stream(f"/{transport.SERVICE}/Rounds")()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(hello)
                await abuse(call)
        await asyncio.sleep(0.01)


# What gRPC itself refuses breaks the stream; the rest is for the hub to see.
@pytest.mark.parametrize(("abuse", "reason"), [(_huge, "broken_stream"), (_endless, "flood")])
def test_rounds_go_on_beside_a_client_that_abuses_its_stream(abuse: Any, reason: str, folder: Path) -> None:
    async def work() -> None:
        rounds = 30
        hub = make_hub(4, rounds, deadline_s=PATIENCE)
        everyone = [voter_of(hub, c) for c in range(3)]
        async with listening(hub, folder) as address:
            first = [asyncio.ensure_future(join(address, folder, v)) for v in everyone[:2]]
            hello = hello_of(hub.ledger.header, 3)
            abusing = asyncio.ensure_future(_abuse_again_and_again(address, folder, hello, abuse))
            while not hub.figures.refused[reason]:  # three must report, so no round can end before this
                await asyncio.sleep(0.01)
            assert await asyncio.gather(*first, join(address, folder, everyone[2])) == ["OK"] * 3
            abusing.cancel()
            await asyncio.gather(abusing, return_exceptions=True)
        assert hub.figures.decided == rounds
        assert [client.misses for client in hub.figures.clients[:3]] == [0, 0, 0]  # to leave an open round is a miss

    run(work())


@pytest.mark.slow
def test_a_client_that_says_nothing_costs_a_deadline_and_no_round(folder: Path) -> None:
    async def work() -> None:
        hub = make_hub(4, 1_000_000, deadline_s=0.5)
        async with listening(hub, folder) as address, channel_to(address, folder, "client-3") as channel:
            call = channel.stream_stream(f"/{transport.SERVICE}/Rounds")()
            await call.write(hello_of(hub.ledger.header, 3))
            while not hub.current:
                await asyncio.sleep(0.01)
            others = [asyncio.ensure_future(join(address, folder, voter_of(hub, c))) for c in range(3)]
            # On a busy machine others miss deadlines too, and rounds are abandoned; but rounds are decided.
            while not (hub.figures.deadline_misses and hub.figures.decided >= 3):
                await asyncio.sleep(0.01)
            call.cancel()
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        assert not any(record.reported[3] for record in hub.ledger)

    run(work())


def test_a_connection_that_sends_a_byte_now_and_then_harms_nobody(folder: Path) -> None:
    async def work() -> None:
        hub = make_hub(4, 10)
        async with listening(hub, folder) as address:
            port = int(address.rpartition(":")[2])
            slow = [socket.create_connection(("localhost", port)) for _ in range(5)]
            for each in slow:
                each.send(b"\x16")
            others = [voter_of(hub, c) for c in range(4)]
            assert await asyncio.gather(*(join(address, folder, v) for v in others)) == ["OK"] * 4
            for each in slow:
                each.close()
        assert hub.figures.decided == 10

    run(work())


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.1.2.3:1", "[::]:1", "example.org:1", ":1"])
def test_plaintext_is_refused_beyond_this_machine(address: str) -> None:
    with pytest.raises(ConfigError, match="--insecure is for this machine alone"):
        refuse_unless_loopback(address)
    for fine in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        refuse_unless_loopback(fine)


def test_certificates_are_kept_and_keys_are_private(tmp_path: Path) -> None:
    made = certificates.make(tmp_path, clients=[0, 7], hosts=["fed.example", "10.0.0.1"])
    assert [path.name for path in made] == ["server.pem", "client-0.pem", "client-7.pem"]
    authority = (tmp_path / "ca.pem").read_bytes()
    assert [p.name for p in certificates.make(tmp_path, clients=[0, 8], hosts=[])] == ["client-8.pem"]
    assert (tmp_path / "ca.pem").read_bytes() == authority
    certificates.check_hosts(tmp_path, ["10.0.0.1", "fed.example"])
    with pytest.raises(ConfigError, match=r"server\.pem exists and is not for 10\.0\.0\.2:"):
        certificates.check_hosts(tmp_path, ["fed.example", "10.0.0.2"])
    if os.name == "posix":
        assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in tmp_path.glob("*.key"))
    with pytest.raises(ConfigError, match="holds 3 certificates of a client"):
        certificates.find(tmp_path, "client", None)
    with pytest.raises(ConfigError, match="holds 0 certificates of a follower"):
        certificates.find(tmp_path, "follower", None)
    assert certificates.find(tmp_path, "client", 7) == ("client-7", 7)
    with pytest.raises(ConfigError, match=r"client-9\.pem can't be read"):
        certificates.load(tmp_path, "client-9")
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"only one of ca\.pem and ca\.key"):
        certificates.make(tmp_path, clients=[9], hosts=[])


@pytest.mark.parametrize("host", ["fed.example:7171", "https://fed.example/run"])
def test_a_certificate_is_for_a_host_without_a_port(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"without a port or a path; give --host fed\.example$"):
        certificates.make(tmp_path / "pki", clients=[0], hosts=[host])
    assert not (tmp_path / "pki").exists()


async def ask(port: int, path: str, head: str = "Host: localhost\r\n") -> bytes:
    return await ask_raw(port, f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())


async def ask_raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


def test_figures_and_health_can_be_asked_for_on_loopback() -> None:
    async def work() -> None:
        hub = make_hub(4, 5)
        hub.figures.refused["flood"] = 3
        metrics = MetricsServer(hub)
        port = await metrics.start(0)
        text = await ask(port, "/metrics")
        assert (
            b'cyber0_refused_total{reason="flood"} 3' in text and b'cyber0_trimmed_numbers_total{client="3"} 0' in text
        )
        assert b'cyber0_wire_bytes_total{client="3",direction="out"} 0' in text
        assert b'"ok": true' in await ask(port, "/health")
        hub.failure = ConfigError("no disk")
        assert (await ask(port, "/health")).startswith(b"HTTP/1.1 503")
        assert (await ask(port, "/else")).startswith(b"HTTP/1.1 404")
        assert await ask_raw(port, b"nonsense") == await ask_raw(port, b"x" * 10_000) == b""
        metrics.stop()

    run(work())


def test_visitors_of_the_figures_take_few_files_and_little_time() -> None:
    async def work() -> None:
        metrics = MetricsServer(make_hub(500, 5))
        port = await metrics.start(0)
        mute = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        async with asyncio.timeout(4.0):
            closed = [asyncio.ensure_future(reader.read()) for reader, _ in mute]
            while sum(map(asyncio.Future.done, closed)) < 40 - 16:
                await asyncio.sleep(0.01)
        for _, writer in mute:
            writer.close()
        await asyncio.gather(*closed, return_exceptions=True)
        pages = {id(metrics._page("/metrics")[2]) for _ in range(50)}
        assert len(pages) <= 3  # however often somebody asks: a page of many clients takes a while
        metrics.stop()

    run(work())


def test_figures_are_refused_to_a_page_that_made_its_own_name_point_here() -> None:
    async def work() -> None:
        metrics = MetricsServer(make_hub(4, 5))
        port = await metrics.start(0)
        for host in ("127.0.0.1", f"127.0.0.1:{port}", "localhost:8000", "LOCALHOST", "[::1]", f"[::1]:{port}"):
            assert (await ask(port, "/metrics", f"hOsT: {host}\r\n")).startswith(b"HTTP/1.1 200"), host
        evil = "Host: evil.example\r\n"
        for head in (evil, f"Host: evil.example:{port}\r\n", "Host: 192.0.2.7\r\n", "Host: localhost.evil.example\r\n",
                     "Host:\r\n", "", f"Host: localhost\r\n{evil}", f"{evil}Host: localhost\r\n"):  # fmt: skip
            for path in ("/metrics", "/health", "/else"):
                assert (await ask(port, path, head)).startswith(b"HTTP/1.1 403"), head
        metrics.stop()

    run(work())


def test_a_figure_that_cannot_be_read_is_logged_once_and_answered_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        hub, events = make_hub(4, 5), []
        hub.policy.log = lambda event, **details: events.append((event, details))
        monkeypatch.setattr(hub, "count_wire", lambda: 1 / 0)
        metrics = MetricsServer(hub)
        port = await metrics.start(0)
        for _ in range(3):
            assert (await ask(port, "/metrics")).startswith(b"HTTP/1.1 500")
        assert (await ask(port, "/health")).startswith(b"HTTP/1.1 200")
        metrics.stop()
        ((event, details),) = events
        assert event == "task_failed" and details["error"].startswith("ZeroDivisionError: division by zero (test_grpc")

    run(work())


def test_the_names_of_the_figures_stay_as_dashboards_know_them() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from cyber0.serve.metrics import HubCollector

    async def work() -> None:
        registry = CollectorRegistry()
        registry.register(HubCollector(make_hub(2, 5, beta=0.0)))
        lines = generate_latest(registry).decode().splitlines()
        kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
        gauges = {"round", "clients_connected", "clients_current", "reports_required"}
        counters = {"rounds", "deadline_misses", "digest_alarms", "refused", "payload_bytes", "message_bytes",
                    "wire_bytes", "reports", "phase_seconds", "trimmed_numbers", "sent_numbers"}  # fmt: skip
        expected = {f"cyber0_{name}": "gauge" for name in gauges} | {f"cyber0_{n}_total": "counter" for n in counters}
        assert kinds == expected
        assert 'cyber0_payload_bytes_total{client="1",direction="in"} 0.0' in lines
        assert 'cyber0_rounds_total{outcome="abandoned"} 0.0' in lines and "cyber0_digest_alarms_total 0.0" in lines

    run(work())


def test_logs_are_lines_for_a_reader_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    make_log()("cut_off", client=3, reason="flood")
    make_log(as_json=True)("cut_off", client=3, path=Path("x"))
    make_log(quiet=True)("unheard")
    plain, structured = capsys.readouterr().err.splitlines()
    assert plain.endswith("cut off client=3 reason=flood")
    found = json.loads(structured)
    assert (found["event"], found["client"], found["path"]) == ("cut_off", 3, "x")


def test_one_certificate_can_not_take_all_streams(folder: Path) -> None:
    async def call_of(channel: Any) -> str:
        call = channel.stream_stream(f"/{transport.SERVICE}/Rounds")()
        code: str = (await call.code()).name
        return code

    async def work() -> None:
        hub = make_hub(4, 3)
        async with listening(hub, folder) as address, channel_to(address, folder, "follower-0") as silent:
            waiting = [asyncio.ensure_future(call_of(silent)) for _ in range(MAX_STREAMS)]  # they say no hello
            while hub.figures.refused[TOO_MANY_STREAMS] == 0:  # by then all of them have arrived
                async with channel_to(address, folder, "follower-0") as another:
                    describe = another.unary_unary(f"/{transport.SERVICE}/Describe")
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await describe(b"")
            async with channel_to(address, folder, "follower-0") as another:
                assert await call_of(another) == "RESOURCE_EXHAUSTED"
                assert {await call_of(another) for _ in range(3)} <= {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
            assert await asyncio.gather(*(join(address, folder, voter_of(hub, c)) for c in range(4))) == ["OK"] * 4
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert hub.figures.decided == 3

    run(work())


def test_connections_beyond_the_limit_are_closed_and_those_inside_stay() -> None:
    async def work() -> None:
        hub = make_hub(4, 3, quorum=4)
        async with listening(hub, None, max_connections=6) as address:
            early = [asyncio.ensure_future(join(address, None, voter_of(hub, c))) for c in range(3)]
            while hub.connected < 3:
                await asyncio.sleep(0.01)
            host, port = address.split(":")
            streams = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
            reading = [asyncio.ensure_future(reader.read(1)) for reader, _ in streams[3:]]
            assert [await done for done in reading] == [b""] * 5  # the first three wait for their handshake
            assert hub.connected == 3 and not any(task.done() for task in early)
            for _, writer in streams:
                writer.close()
            while await join(address, None, last := voter_of(hub, 3)) != "OK":
                pass  # the federator has not noticed yet that there is room
            assert last.ended and await asyncio.gather(*early) == ["OK"] * 3

    run(work())
