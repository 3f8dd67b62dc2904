"""What hostile, slow and stopped participants cost a federator and the others, on loopback with mutual TLS.

    python benchmarks/siege.py                  all of it, about 20 minutes
    python benchmarks/siege.py --quick          a smoke run
    python benchmarks/siege.py --only pace      one section

Eight honest clients without model maths are driven by this process against `cyber0 serve` in another. How much an
attack slows them down is measured against the same clients and federator without it, before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import frozen
import grpc
import intruders
import numpy as np
from intruders import Door
from measure import Figure, main
from serve import Client, K, Server, connected, speed, until, workplace, write_header

from cyber0.config.files import load, to_toml
from cyber0.ledger import Header, Ledger, Record
from cyber0.tasks import make as make_task

HONEST = 8
SLOWDOWN = 2.0  # that one client may cause for longer than a minute
FEW_FILES = 1024
ANSWER_S = 5.0  # that somebody waits for /metrics
LOOK_EVERY_S = 0.05


class Federation:
    """A federator in a process of its own, and what is needed to reach it."""

    def __init__(self, folder: Path, source: Path, before: Callable[[], None] | None = None) -> None:
        self.folder, self.certs, self.out = folder, folder / "certs", folder / "run"
        self.server = Server("-m", "cyber0", "serve", source, "--listen", "localhost:0", "--certs", self.certs,
                             "--out", self.out, "--log-json", "--metrics", 0, "--resume", before=before)  # fmt: skip
        self.header = read_header(self.out / "ledger.bin")
        self.door = Door(self.server.port, self.certs)
        self.honest = [self.client(number) for number in range(HONEST)]
        self._metrics = int(self.server.events("watching")[0]["metrics"].split(":")[2].split("/")[0])

    def client(self, number: int) -> Client:
        """Return a client that has seen nothing yet."""
        return Client(number, self.header)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the honest clients take part; they have done some rounds when this is entered."""
        first = self.honest[0].round
        async with connected(self.server.port, self.certs, self.honest):
            await until(lambda: all(client.round > first + 20 for client in self.honest))
            yield

    async def speed(self, window_s: float) -> float:
        """Return the rounds per second of the honest clients."""
        return await speed(self.honest[0], window_s)

    async def metrics(self) -> str:
        """Return what /metrics answers; empty if there is no answer in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._metrics)
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % self._metrics)
                answer = await reader.read()
                writer.close()
                return answer.decode()
        except (TimeoutError, OSError):
            return ""

    async def reports(self, client: int) -> int:
        """Return how many reports of a client have counted."""
        return int(float((await self.metrics()).partition(f'cyber0_reports_total{{client="{client}"}} ')[2].split()[0]))


def read_header(path: Path) -> Header:
    return Ledger.open(path).header


@contextlib.contextmanager
def federation(
    clients: int,
    *,
    followers: int = 0,
    ledger_bytes: int = 0,
    before: Callable[[], None] | None = None,
    **serve: object,
) -> Iterator[Federation]:
    """Start a federator without a model, with records of so many bytes."""
    with workplace(clients, followers) as folder:
        header = write_header(folder / "header.bin", clients, durability="batch", **serve)
        (folder / "run").mkdir()
        with Ledger.create(folder / "run" / "ledger.bin", header, durability="batch") as ledger:
            fill(ledger, ledger_bytes)
            at = len(ledger), ledger.chain
        run = Federation(folder, folder / "header.bin", before)
        for client in run.honest:
            client.round, client.chain = at
        try:
            yield run
        finally:
            run.server.close()


def fill(ledger: Ledger, size: int) -> None:
    """Append decided rounds until the ledger is that long."""
    everybody, nobody = np.ones(ledger.header.clients, np.bool_), np.zeros(ledger.header.clients, np.int64)
    while ledger.size < size:
        values = np.full(ledger.header.scalars, len(ledger) % 7 - 3, np.float32)
        ledger.append(Record(len(ledger), 0.01, values, everybody, nobody, rounds=ledger.header.rounds))


Attack = Callable[[Federation], Awaitable[None]]


async def slowdown(run: Federation, attack: Attack, settle_s: float, window_s: float) -> tuple[float, float]:
    """Return the rounds per second of the honest clients alone, and beside an attack that has lasted a while."""
    async with run.running():
        alone = [await run.speed(window_s / 3)]
        attacking = asyncio.ensure_future(attack(run))
        await asyncio.sleep(settle_s)
        beside = await run.speed(window_s)
        if attacking.done():
            attacking.result()
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
        await asyncio.sleep(1.0)
        alone.append(await run.speed(window_s / 3))
    return statistics.mean(alone), beside


def slowdown_figures(
    name: str, alone: float, beside: float, note: str = "", target: float | None = SLOWDOWN
) -> Iterator[Figure]:
    yield Figure(f"{name}: rounds of the others", beside, "rounds/s", note=note or f"{alone:.0f} without it")
    yield Figure(f"{name}: slows the others by", alone / max(beside, 1e-9), "x", target)


# The sections.


def pace(quick: bool) -> Iterator[Figure]:
    """One client with a vote, deadline 2 s: what it does to the rounds of eight others after the first minute."""
    settle_s, window_s, deadline_s = (1.5, 1.5, 1.0) if quick else (60.0, 30.0, 2.0)
    shortly = deadline_s - 0.2
    conducts: dict[str, Callable[[], intruders.Conduct]] = {
        "answers 0.2 s before each deadline": lambda: intruders.late(shortly),
        "joins, holds a round open, leaves": lambda: intruders.leaving(shortly),
        "never answers": lambda: intruders.silent,
        "answers as late as still counts": lambda: intruders.adaptive(shortly),
        "answers at once and late by turns": lambda: intruders.relapsing(shortly, window_s / 4),
    }
    for name, conduct in conducts.items():

        def attack(run: Federation, conduct: Callable[[], intruders.Conduct] = conduct) -> Awaitable[None]:
            return intruders.intrude(run.door, run.client(HONEST), conduct())

        with federation(HONEST + 1, deadline_s=deadline_s) as run:
            alone, beside = asyncio.run(slowdown(run, attack, settle_s, window_s))
        yield from slowdown_figures(name, alone, beside)


@contextlib.contextmanager
def joined(deadline_s: float, code: str = "") -> Iterator[tuple[Federation, Callable[[], subprocess.Popen[bytes]]]]:
    """Yield a federation of eight fast clients, and what starts `cyber0 join` beside them, after some code if given."""
    with workplace(HONEST + 1) as folder:
        config = load(None, ["task.name=logistic", f"federation.clients={HONEST + 1}", "federation.byzantine=0",
                             f"method.k={K}", "method.lr=1e-4", "rounds=1000000", "serve.durability=batch",
                             f"serve.deadline_s={deadline_s}"])  # fmt: skip
        (folder / "config.toml").write_text(to_toml(config))
        run = Federation(folder, folder / "config.toml")
        main_code = f"import sys\n{code}\nfrom cyber0.cli.main import main\nsys.exit(main())"
        command = [sys.executable, "-c", main_code, "join", f"localhost:{run.server.port}", "--certs", str(run.certs),
                   "--client", str(HONEST), "--quiet"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        started: list[subprocess.Popen[bytes]] = []

        def start() -> subprocess.Popen[bytes]:
            started.append(subprocess.Popen(command, env=environment))
            return started[-1]

        try:
            yield run, start
        finally:
            for client in started:
                client.kill()
                client.wait()
            run.server.close()


def stopped(quick: bool) -> Iterator[Figure]:
    """A `cyber0 join` among eight fast clients is stopped for 12 s and continued, three times."""
    pause_s, stops = (3.0, 1) if quick else (12.0, 3)
    for deadline_s in (0.5, 2.0):
        with joined(deadline_s) as (run, start):
            taken, missed = asyncio.run(_after_stops(run, start(), pause_s, stops))
            cuts = [event for event in run.server.events("cut_off") if event.get("client") == HONEST]
        note = f"longest of {', '.join(f'{s:.2g}' for s in taken)} s; stopped for {pause_s:g} s, {missed:,} rounds"
        yield Figure(f"deadline {deadline_s:g} s: current again after", max(taken), "s", 2.0, note=note)
        reasons = ", ".join(sorted({event["reason"] for event in cuts}))
        yield Figure(f"deadline {deadline_s:g} s: times it was cut off", len(cuts), "", 0.0, note=reasons)


async def _after_stops(
    run: Federation, client: subprocess.Popen[bytes], pause_s: float, stops: int
) -> tuple[list[float], int]:
    """Return the seconds until ten reports of the client count again after each stop, and the rounds it has missed."""
    taken, missed = [], 0
    async with run.running():
        for _ in range(stops):
            await _counted(run, await run.reports(HONEST) + 100)
            client.send_signal(signal.SIGSTOP)
            before = run.honest[0].round
            await asyncio.sleep(pause_s)
            missed, counted, begin = run.honest[0].round - before, await run.reports(HONEST), time.perf_counter()
            client.send_signal(signal.SIGCONT)
            await _counted(run, counted + 10)
            taken.append(time.perf_counter() - begin)
    return taken, missed


async def _counted(run: Federation, reports: int) -> None:
    while await run.reports(HONEST) < reports:
        await asyncio.sleep(LOOK_EVERY_S)


def slow(quick: bool) -> Iterator[Figure]:
    """A `cyber0 join` that takes 0.6 s for a report, beside a deadline of 0.5 s."""
    settle_s, window_s = (5.0, 5.0) if quick else (12.0, 30.0)
    slowly = "from cyber0.protocol.client import Client\nimport time\nmeasure = Client.measure\n"
    slowly += "Client.measure = lambda *of: (time.sleep(0.6), measure(*of))[1]"
    counted: list[int] = []
    with joined(0.5, slowly) as (run, start):

        async def attack(run: Federation) -> None:
            client = start()
            try:
                await asyncio.sleep(settle_s)
                counted.append(await run.reports(HONEST))
                await asyncio.sleep(window_s)
                counted.append(await run.reports(HONEST))
                await asyncio.Event().wait()
            finally:
                client.kill()

        alone, beside = asyncio.run(slowdown(run, attack, settle_s, window_s + 1.0))
    count, note = counted[1] - counted[0], f"in {window_s:g} s"
    yield Figure("its reports that counted", count, "", window_s / 10, at_least=True, note=note)
    yield from slowdown_figures("a slow client", alone, beside)


def followers(quick: bool) -> Iterator[Figure]:
    """Many streams of one follower's certificate: can another follower get in?"""
    streams = 110

    async def measured(run: Federation) -> tuple[int, int]:
        async with contextlib.AsyncExitStack() as calls:
            mine = await intruders.crowd(run.door, run.header, ["follower-0"] * streams, calls, ANSWER_S)
            return mine, await intruders.crowd(run.door, run.header, ["follower-1"], calls, ANSWER_S)

    with federation(HONEST, followers=2) as run:
        mine, others = asyncio.run(measured(run))
    yield Figure("streams of one follower's certificate", mine, "", note=f"of {streams} tried")
    yield Figure("other followers that get in beside them", others, "", 1.0, at_least=True, note="of 1")


def reread(quick: bool) -> Iterator[Figure]:
    """One certificate reads a ledger of 20 MB again and again."""
    size, settle_s, window_s = (1 << 20, 1.5, 1.5) if quick else (20 << 20, 10.0, 20.0)
    for name, streams in (("follower-0", 8), (f"client-{HONEST}", 1)):
        taken: list[int] = []

        async def attack(run: Federation, name: str = name, streams: int = streams, taken: list[int] = taken) -> None:
            command = [intruders.__file__, run.server.port, run.certs, run.folder / "header.bin", name, streams]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *map(str, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                await process.wait()
            except asyncio.CancelledError:
                taken.append(int((await process.communicate(b""))[0]))
                raise
            raise RuntimeError("the reader ended")

        with federation(HONEST + 1, followers=1, ledger_bytes=size) as run:
            alone, beside = asyncio.run(slowdown(run, attack, settle_s, window_s))
        who = f"{name.split('-')[0]}, {streams} stream{'s' * (streams > 1)}"
        yield from slowdown_figures(
            who, alone, beside, f"{taken[0] >> 20:,} MB in {settle_s + window_s:g} s; {alone:.0f} without"
        )


def halfopen(quick: bool) -> Iterator[Figure]:
    """Streams of one certificate that never say hello: the federator's memory and its log."""
    streams, hold_s = (200, 2.0) if quick else (4000, 15.0)

    async def measured(run: Federation) -> float:
        most, calm = 0.0, run.server.resident_mb()

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, run.server.resident_mb())
                await asyncio.sleep(LOOK_EVERY_S)

        watching = asyncio.ensure_future(watch())
        async with intruders.without_hello(run.door, "client-0", streams):
            await asyncio.sleep(hold_s)
        watching.cancel()
        return most - calm

    with federation(HONEST) as run:
        written = run.server.log.stat().st_size
        grown = asyncio.run(measured(run))
        written = run.server.log.stat().st_size - written
    yield Figure("memory that they take", grown, "MB", note=f"{streams:,} streams")
    yield Figure("log that they cause", written / 1e3, "kB")


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def files(quick: bool) -> Iterator[Figure]:
    """A federator whose soft limit is 1,024 open files: with more clients than that, and with mute connections."""
    many, some, mute, patience_s = (100, 50, 50, 10.0) if quick else (1200, 640, 400, 90.0)

    async def entering(run: Federation) -> tuple[int, str]:
        async with contextlib.AsyncExitStack() as calls:
            inside = await intruders.crowd(run.door, run.header, _names(many), calls, patience_s)
            return inside, await run.metrics()

    async def newcomer(run: Federation) -> float:
        async with contextlib.AsyncExitStack() as calls:
            await intruders.crowd(run.door, run.header, _names(some), calls, patience_s)
            async with intruders.mute_connections(run.server.port, mute):
                begin = time.perf_counter()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        while not await intruders.crowd(run.door, run.header, [f"client-{some}"], calls, patience_s):
                            await asyncio.sleep(intruders.AGAIN_S)
                return time.perf_counter() - begin

    with federation(many, deadline_s=600.0, before=few_files) as run:
        inside, answer = asyncio.run(entering(run))
    yield Figure("clients that get in", inside, "", many, at_least=True, note=f"of {many:,}, {FEW_FILES:,} open files")
    yield Figure(f"/metrics answers within {ANSWER_S:g} s", float(bool(answer)), "", 1.0, at_least=True)
    with federation(some + 1, deadline_s=600.0, before=few_files) as run:
        waited = asyncio.run(newcomer(run))
    note = f"beside {some} clients and {mute} connections that never speak; given up after {patience_s:g} s"
    yield Figure("a newcomer is in after", waited, "s", ANSWER_S, note=note)


def _names(clients: int) -> list[str]:
    return [f"client-{number}" for number in range(clients)]


def frozen_weights(quick: bool) -> Iterator[Figure]:
    """A federator that never moves w, and a `cyber0 join` with a few images: what it gives away before it stops."""
    images, k, wanted = (3, 64, 640) if quick else (9, 256, 34 * 256)
    for name, decided in (("every round abandoned", None), ("every decision zero", 0.0)):
        with workplace(2) as folder:
            data = frozen.write_images(folder / "images", images)
            config = load(None, ["federation.clients=2", "federation.byzantine=0", f"method.k={k}", "rounds=100000",
                                 f"task.data={data}"])  # fmt: skip
            (folder / "config.toml").write_text(to_toml(config))
            command = [sys.executable, "-m", "cyber0", "init", folder / "config.toml", "--out", folder / "header.bin"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            federator = frozen.FrozenFederator(read_header(folder / "header.bin"), decided)
            said = asyncio.run(_collect(federator, folder, data, wanted))
            task = make_task(config.task)
            true = task.prepare(task.train_inputs).double().numpy()
            w0 = np.concatenate([p.detach().double().numpy().ravel() for p in task.model(config.seed).parameters()])
        found = federator.gradient()
        far = frozen.relative_error(found, frozen.linear_gradient(w0, true))
        note = f"k = {k}, {len(w0):,} weights; {said or 'it never stops'}"
        yield Figure(f"{name}: scalars that the client answers", federator.scalars, "", 4 * k, note=note)
        yield Figure(f"{name}: relative error of the gradient", far, "")
        far = frozen.relative_error(frozen.images_from(found, w0, images), true)
        yield Figure(f"{name}: relative error of the images", far, "", note=f"{images} images")


async def _collect(federator: frozen.FrozenFederator, folder: Path, data: Path, wanted: int) -> str:
    """Have a client answer until the federator has enough, or until the client stops: return its last line."""
    async with frozen.listening(federator, folder / "certs", wanted) as port:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cyber0", "join", f"localhost:{port}", "--certs", str(folder / "certs")),
            *("--client", "0", "--data", str(data), "--state", str(folder / "state"), "--quiet"),
            stderr=subprocess.PIPE,
        )
        ending = asyncio.ensure_future(client.communicate())
        while federator.scalars < wanted and not ending.done():
            await asyncio.sleep(LOOK_EVERY_S)
        if ending.done():
            return (await ending)[1].decode().strip().rpartition("\n")[2].partition(" while")[0]
        client.kill()
        await ending
        return ""


SECTIONS = {"pace": pace, "stopped": stopped, "slow": slow, "followers": followers, "reread": reread,
            "halfopen": halfopen, "files": files, "frozen": frozen_weights}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(__doc__, SECTIONS, {"grpcio": grpc.__version__, "cores": os.cpu_count()}))
