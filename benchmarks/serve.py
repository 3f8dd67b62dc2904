"""The figures of a deployment on loopback with mutual TLS: rounds, bytes on the wire, the federator's memory.

    python benchmarks/serve.py                  all of them, some minutes
    python benchmarks/serve.py --quick          a smoke run
    python benchmarks/serve.py --only rounds    one section

Clients without model maths are driven by one load process (this one) against `cyber0 serve` in another, and, in turn,
against a bare gRPC server that collects the same frames and sends the same back: what gRPC itself costs in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from measure import Figure, main

from cyber0.config.files import load, to_toml
from cyber0.config.schema import Config, to_dict
from cyber0.ledger import Header, LayoutEntry, Ledger, first_chain, next_chain, read_records, without_fields
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.ledger.record import ABANDONED, DECIDED
from cyber0.protocol import codec as codecs
from cyber0.protocol.messages import OPENED, RECORDS, VOTER, Hello, decode_decision, encode_hello
from cyber0.serve import tls as certificates
from cyber0.serve.transport import LEAN, SERVICE

K = 4
VALUES = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
DECISION = bytes(41)  # as long as a decision of four float32 numbers
PATIENCE = 120.0
Start = Callable[..., subprocess.Popen[bytes]]


# The other process: our federator, or a bare server.


def write_header(path: Path, clients: int, **serve: object) -> Header:
    """Write the header of a run without a model."""
    settings = [f"federation.clients={clients}", "federation.byzantine=0", f"method.k={K}", "rounds=1000000"]
    settings += [f"serve.{name}={value}" for name, value in serve.items()]
    config = load(None, settings)
    header = Header(
        seed=0, layout=(LayoutEntry("w", (5,), "float32", 0),), distribution="gaussian", k=K, local_epochs=1,
        mu=1e-3, estimator="two_point", lr=0.01, lr_schedule="constant", projection_radius=None,
        weights_digest="11" * 32, rest_digest="22" * 32, clients=clients, settings=without_fields(to_dict(config)),
        codec=config.serve.codec,
    )  # fmt: skip
    Ledger.create(path, header).close()
    return header


async def bare_server(certs: str, clients: int) -> None:
    """Collect one frame of every client, then send one to each: a round without a federator."""
    waiting = 0
    over = asyncio.Event()

    async def rounds(requests: Any, context: Any) -> None:
        nonlocal waiting, over
        await context.read()
        await context.write(DECISION)
        while await context.read() is not grpc.aio.EOF:
            waiting, mine = waiting + 1, over
            if waiting == clients:
                waiting, over = 0, asyncio.Event()
                mine.set()
            else:
                await mine.wait()
            await context.write(DECISION)
        waiting = 0

    server = grpc.aio.server(options=LEAN)
    handler = grpc.stream_stream_rpc_method_handler(rounds)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Rounds": handler}),))
    mine = certificates.load(Path(certs), "server")
    pair = [(mine.key, mine.certificate)]
    secured = grpc.ssl_server_credentials(pair, mine.authority, require_client_auth=True)
    port = server.add_secure_port("localhost:0", secured)
    await server.start()
    print(json.dumps({"event": "listening", "port": port}), file=sys.stderr, flush=True)
    await server.wait_for_termination()


class Server:
    """A server in a process of its own, with its port, its log and its memory; `before` is called in it first."""

    def __init__(self, *command: object, before: Callable[[], None] | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile("w+b")  # noqa: SIM115 (closed with the server)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)], stderr=self._log, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            preexec_fn=before,
        )  # fmt: skip
        self.port = self._await_port()

    @property
    def log(self) -> Path:
        """Where its stderr goes."""
        return Path(self._log.name)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what it has logged under that name."""
        lines = self.log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if event["event"] == name]

    def _await_port(self) -> int:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if listening := self.events("listening"):
                return int(listening[0]["port"])
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


# The load process: clients that send the same numbers every round.


class Client:
    """A client without a model, with numbers of its own; for the bare server too, which never looks at them."""

    def __init__(self, number: int, header: Header | None) -> None:
        self.number, self.header = number, header
        self.round = 0
        self._codec = codecs.make(header.codec if header else "float32")
        self._payload = self._codec.encode(VALUES * np.float32(1 + 0.03 * number))
        self.chain = first_chain(header) if header else bytes(32)

    def hello(self) -> bytes:
        if self.header is None:
            return bytes(128)
        digests = bytes.fromhex(self.header.weights_digest), bytes.fromhex(self.header.rest_digest)
        at = self.round, self.chain[:CHAIN_BYTES]
        return encode_hello(Hello(VOTER, self.number, first_chain(self.header), *digests, *at))

    def take(self, message: bytes) -> bytes | None:
        """Return the report to send."""
        kind = message[0]
        if self.header is None or kind in (DECIDED, ABANDONED):
            self.round += 1
            if self.header is not None:
                decision = decode_decision(message, self.header.scalars, self._codec)
                self.chain = next_chain(self.chain, decision)
        elif kind == RECORDS:
            for record in read_records(self.header, message[1:], self.round, self.chain):
                self.round, self.chain = record.round + 1, record.chain
            return None
        elif kind != OPENED:
            raise RuntimeError(f"message of kind {kind}")
        body = struct.pack("<I", self.round) + self._payload
        return body + struct.pack("<I", zlib.crc32(body))


@contextlib.asynccontextmanager
async def connected(port: int, certs: Path, clients: list[Client]) -> AsyncIterator[None]:
    """Have all clients answer every round, each over a connection of its own, until the context ends."""
    options = [*LEAN, ("grpc.use_local_subchannel_pool", 1)]
    tasks: list[asyncio.Task[None]] = []

    async def speak(client: Client) -> None:
        mine = certificates.load(certs, f"client-{client.number}")
        secured = grpc.ssl_channel_credentials(mine.authority, mine.key, mine.certificate)
        async with grpc.aio.secure_channel(f"localhost:{port}", secured, options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Rounds")()
            await call.write(client.hello())
            while (message := await call.read()) is not grpc.aio.EOF:
                answer = client.take(message)
                if answer is not None:
                    await call.write(answer)

    tasks = [asyncio.create_task(speak(client)) for client in clients]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [error for error in ended if isinstance(error, Exception) and not isinstance(error, grpc.aio.AioRpcError)]
    if broken:
        raise broken[0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10 * PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


async def rounds_per_second(port: int, certs: Path, clients: list[Client], window_s: float) -> float:
    """Connect everybody, let it warm up, and count the rounds of a while."""
    start = clients[-1].round
    async with connected(port, certs, clients):
        await until(lambda: all(client.round > start + 2 for client in clients))
        return await speed(clients[-1], window_s)


@contextlib.contextmanager
def workplace(clients: int, followers: int = 0) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cyber0-") as name:
        certificates.make(Path(name) / "certs", clients=range(clients), followers=range(followers), hosts=["localhost"])
        yield Path(name)


def serve_process(folder: Path, name: str, header: Path) -> Server:
    return Server("-m", "cyber0", "serve", header, "--listen", "localhost:0", "--certs", folder / "certs",
                  "--out", folder / name, "--log-json")  # fmt: skip


# The sections.


def rounds(quick: bool) -> Iterator[Figure]:
    """Rounds a second for k = 4, against bare gRPC in turn."""
    for count in (8, 100):
        yield from _rounds(count, repeats=1 if quick else 5, window_s=1.0 if quick else 4.0)


def _rounds(count: int, repeats: int, window_s: float) -> Iterator[Figure]:
    with workplace(count) as folder, contextlib.ExitStack() as servers:
        running: dict[str, tuple[Server, list[Client]]] = {}
        for durability in ("batch", "always"):
            path = folder / f"{durability}.bin"
            header = write_header(path, count, durability=durability)
            server = serve_process(folder, durability, path)
            servers.callback(server.close)
            running[durability] = server, [Client(c, header) for c in range(count)]
        bare = Server(Path(__file__), "--bare", folder / "certs", count)
        servers.callback(bare.close)
        running["bare"] = bare, [Client(c, None) for c in range(count)]
        speeds: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(repeats):
            for name, (server, clients) in running.items():
                speeds[name].append(asyncio.run(rounds_per_second(server.port, folder / "certs", clients, window_s)))
    median = {name: statistics.median(found) for name, found in speeds.items()}
    for name, text in (("bare", "bare gRPC"), ("batch", "durability batch"), ("always", "durability always")):
        yield Figure(f"{count} clients, {text}", median[name], "rounds/s")
    yield Figure(f"{count} clients, bare / batch", median["bare"] / median["batch"], "x", 1.5)
    yield Figure(f"{count} clients, bare / always", median["bare"] / median["always"], "x")


class Proxy:
    """Passes bytes on and counts them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.up = self.down = 0

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("localhost", self._port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, up: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    if up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, far_writer, True), copy(far_reader, writer, False))

    def stop(self) -> None:
        self._server.close()


def wire(quick: bool) -> Iterator[Figure]:
    """Bytes of the TCP streams with mutual TLS, a client and round; without the headers of TCP and IP."""
    count, number = 8, 100 if quick else 1000

    async def measured(port: int, certs: Path, clients: list[Client]) -> tuple[float, float]:
        proxy = Proxy(port)
        async with connected(await proxy.start(), certs, clients):
            await until(lambda: all(client.round > 20 for client in clients))
            begin, up, down = clients[0].round, proxy.up, proxy.down
            await until(lambda: clients[0].round >= begin + number)
            reports = (clients[0].round - begin) * count
            figures = (proxy.up - up) / reports, (proxy.down - down) / reports
        proxy.stop()
        await asyncio.sleep(0.1)  # the connections end
        return figures

    for codec in ("float32", "log8"):
        with workplace(count) as folder:
            header = write_header(folder / "h.bin", count, durability="batch", codec=codec)
            server = serve_process(folder, "run", folder / "h.bin")
            clients = [Client(c, header) for c in range(count)]
            try:
                up, down = asyncio.run(measured(server.port, folder / "certs", clients))
            finally:
                server.close()
        payload = K * codecs.make(codec).size
        yield Figure(f"{codec}: up, a client and round", up, "bytes", 100.0, note=f"{payload} of them payload")
        yield Figure(f"{codec}: down, a client and round", down, "bytes", 110.0, note=f"{payload} of them payload")


def memory(quick: bool) -> Iterator[Figure]:
    """The federator's resident memory over many rounds and with many clients."""
    long, crowd = (1_000, 100) if quick else (20_000, 1_000)

    async def run_clients(server: Server, certs: Path, clients: list[Client], stops: list[int]) -> list[float]:
        found = []
        async with connected(server.port, certs, clients):
            for stop in stops:
                await until(lambda stop=stop: all(client.round >= stop for client in clients))
                found.append(server.resident_mb())
        return found

    for count, stops in ((8, [long // 20, long]), (crowd, [2, 12])):
        with workplace(count) as folder:
            # The deadline must not cut off the many while they are all made to connect by one process.
            header = write_header(folder / "h.bin", count, durability="batch", deadline_s=600.0)
            server = serve_process(folder, "run", folder / "h.bin")
            idle = server.resident_mb()
            try:
                clients = [Client(c, header) for c in range(count)]
                early, late = asyncio.run(run_clients(server, folder / "certs", clients, stops))
            finally:
                server.close()
        target = 80.0 if count == 8 else None
        yield Figure(
            f"{count} clients, {stops[0]:,} rounds", early, "MB", target, note=f"{idle:.0f} MB without clients"
        )
        yield Figure(f"{count} clients, {stops[1]:,} rounds", late, "MB", target)
        yield Figure(f"{count} clients, growth in between", late - early, "MB", 2.0)


def real(quick: bool) -> Iterator[Figure]:
    """Eight client processes on MNIST, k = 4, durability batch."""
    count, number = (2, 20) if quick else (8, 400)
    with workplace(count) as folder:
        config: Config = load(None, [f"federation.clients={count}", "federation.byzantine=0", f"method.k={K}",
                                     f"rounds={number + 20}", "serve.durability=batch",
                                     f"serve.quorum={count}"])  # fmt: skip
        (folder / "config.toml").write_text(to_toml(config))
        server = serve_process(folder, "run", folder / "config.toml")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        clients = [subprocess.Popen([sys.executable, "-m", "cyber0", "join", f"localhost:{server.port}", "--certs",
                                     folder / "certs", "--client", str(c), "--quiet"], env=environment,
                                    stdout=subprocess.PIPE) for c in range(count)]  # fmt: skip

        def reached() -> int:
            return len(Ledger.open(folder / "run" / "ledger.bin"))

        while reached() < 20:
            time.sleep(0.05)
        first, begin = reached(), time.perf_counter()
        while server.process.poll() is None and reached() < number + 20:
            time.sleep(0.02)
        speed = (reached() - first) / (time.perf_counter() - begin)
        digests = {client.communicate()[0].split()[-1] for client in clients}
        server.close()
    note = "all digests equal" if len(digests) == 1 else "DIGESTS DIFFER"
    yield Figure(f"{count} client processes on MNIST", speed, "rounds/s", note=note)


def hostile(quick: bool) -> Iterator[Figure]:
    """One client floods, coming back after every cut, beside connections that say nothing: the others continue."""
    count, window_s, silent = 8, 2.0 if quick else 15.0, 200

    async def flood(port: int, certs: Path, client: Client, sent: list[int]) -> None:
        mine = certificates.load(certs, f"client-{client.number}")
        secured = grpc.ssl_channel_credentials(mine.authority, mine.key, mine.certificate)
        options = [*LEAN, ("grpc.use_local_subchannel_pool", 1)]
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with (asyncio.timeout(1.0),
                            grpc.aio.secure_channel(f"localhost:{port}", secured, options) as channel):  # fmt: skip
                    call = channel.stream_stream(f"/{SERVICE}/Rounds")()
                    await call.write(client.hello())
                    while True:
                        await call.write(bytes(24))
                        sent[0] += 1

    async def measured(server: Server, certs: Path, clients: list[Client]) -> tuple[float, float, float, int]:
        victims, byzantine, sent = clients[:-1], clients[-1], [0]
        async with connected(server.port, certs, victims):
            await until(lambda: all(client.round > 20 for client in victims))
            alone = await speed(victims[0], window_s / 3)
            before = server.resident_mb()
            idle = [socket.create_connection(("localhost", server.port)) for _ in range(silent)]
            flooding = asyncio.ensure_future(flood(server.port, certs, byzantine, sent))
            beside = await speed(victims[0], window_s)
            grown = server.resident_mb() - before
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
            for each in idle:
                each.close()
        return alone, beside, grown, sent[0]

    with workplace(count + 1) as folder:
        header = write_header(folder / "h.bin", count + 1, durability="batch")
        server = serve_process(folder, "run", folder / "h.bin")
        try:
            clients = [Client(c, header) for c in range(count + 1)]
            alone, beside, grown, sent = asyncio.run(measured(server, folder / "certs", clients))
        finally:
            server.close()
        refused = json.loads((folder / "run" / "served.json").read_text())["refused"]
    yield Figure(f"{count} clients alone", alone, "rounds/s")
    yield Figure("beside a client that floods", beside, "rounds/s", note=f"{sent:,} frames; refused: {refused}")
    yield Figure("memory that the flood takes", grown, "MB", note=f"with {silent} connections that say nothing")


async def speed(client: Client, window_s: float) -> float:
    before, begin = client.round, time.perf_counter()
    await asyncio.sleep(window_s)
    return (client.round - before) / (time.perf_counter() - begin)


SECTIONS = {"rounds": rounds, "wire": wire, "memory": memory, "hostile": hostile, "real": real}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        asyncio.run(bare_server(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit(main(__doc__, SECTIONS, {"grpcio": grpc.__version__, "cores": os.cpu_count()}))
