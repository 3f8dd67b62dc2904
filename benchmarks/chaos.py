"""Everything goes wrong at once: 12 client processes on MNIST, 3 of them Byzantine, for some minutes.

    python benchmarks/chaos.py                 a disturbed run beside an undisturbed one of the same settings
    python benchmarks/chaos.py --quick         6 clients, fewer rounds

Clients are killed with SIGKILL and started again at random, the federator is killed twice and resumed, a proxy between
them cuts and delays connections, and one client joins at half time. At the end every honest client's digest must be
that of the federator's ledger replayed from w0, no decided round may be lost, and the accuracy should be that of the
undisturbed run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from measure import Figure, main
from serve import Server, workplace

from cyber0.config import load, to_toml
from cyber0.ledger import Ledger
from cyber0.runs import rebuild
from cyber0.tasks import make as make_task

LIES = ("sign_flip", "gaussian", "nonfinite")
CUT_SECONDS, DELAY_SECONDS = 3.0, 0.2


class Storm:
    """A proxy in a thread of its own that delays bytes, and cuts a connection every few seconds."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[asyncio.StreamWriter] = []
        self.cuts = 0
        self.calm = False
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        self._ready.wait()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        generator = random.Random(1)
        while True:
            await asyncio.sleep(CUT_SECONDS)
            if self._writers and not self.calm:
                self.cuts += 1
                generator.choice(self._writers).transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("localhost", self._target)
        except OSError:
            writer.close()
            return
        both = [writer, far_writer]
        self._writers += both
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self._writers = [w for w in self._writers if w not in both]

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                if random.random() < 0.01 and not self.calm:
                    await asyncio.sleep(DELAY_SECONDS)
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


class Federation:
    """The processes of one run."""

    def __init__(self, folder: Path, clients: int, rounds: int, name: str) -> None:
        self.folder, self.out = folder, folder / name
        byzantine = len(LIES) if clients >= 12 else 1
        config = load(None, [f"federation.clients={clients}", f"federation.byzantine={byzantine}", f"rounds={rounds}",
                             "method.k=16", "serve.deadline_s=5", "serve.digest_every=50"])  # fmt: skip
        self.config, self.liars = config, range(clients - byzantine, clients)
        (folder / f"{name}.toml").write_text(to_toml(config))
        self.settings = folder / f"{name}.toml"
        self.server = self.serve(0)
        self.address = self.server.port
        self.clients: dict[int, subprocess.Popen[bytes]] = {}

    def serve(self, port: int) -> Server:
        return Server("-m", "cyber0", "serve", self.settings, "--listen", f"localhost:{port}", "--certs",
                      self.folder / "certs", "--out", self.out, "--log-json", "--resume", "--stay")  # fmt: skip

    def join(self, number: int) -> None:
        lie = ["--lie", LIES[number % len(LIES)]] if number in self.liars else []
        command = [
            *(sys.executable, "-m", "cyber0", "join", f"localhost:{self.address}", "--certs", self.folder / "certs"),
            *("--client", str(number), "--state", f"{self.out}-state-{number}", "--quiet", *lie),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.clients[number] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)

    def kill_client(self, number: int) -> None:
        self.clients[number].kill()
        self.clients[number].wait()

    def kill_server(self) -> tuple[int, bytes]:
        """Kill the federator and resume it; return how far its ledger had come."""
        port = self.server.port
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait()
        before = Ledger.open(self.out / "ledger.bin")
        self.server = self.serve(port)
        return len(before), before.chain

    def reached(self) -> int:
        return len(Ledger.open(self.out / "ledger.bin"))

    def digests(self) -> dict[int, str]:
        """Wait for all clients to end, and return what they ended with."""
        found = {n: client.communicate(timeout=600)[0].decode() for n, client in self.clients.items()}
        self.server.close()
        return {n: text.split()[-1] for n, text in found.items()}


def run(quick: bool) -> Iterator[Figure]:
    """The disturbed run and the undisturbed one."""
    clients, rounds = (6, 300) if quick else (12, 2000)
    with workplace(clients) as folder:
        calm = Federation(folder, clients, rounds, "calm")
        for number in range(clients):
            calm.join(number)
        calm_digests = calm.digests()

        wild = Federation(folder, clients, rounds, "wild")
        storm = Storm(wild.server.port)
        wild.address = storm.port
        late, generator = 0, random.Random(2)
        for number in range(1, clients):
            wild.join(number)
        begin, kills, marks = time.monotonic(), 0, []
        while (at := wild.reached()) < rounds * 9 // 10:
            time.sleep(1.0)
            if late not in wild.clients and at >= rounds // 2:
                wild.join(late)
            if len(marks) < 2 and at >= rounds * (1 + len(marks)) // 3:
                marks.append(wild.kill_server())
            victim = generator.choice(list(wild.clients))
            if generator.random() < 0.15:
                kills += 1
                wild.kill_client(victim)
                wild.join(victim)
        storm.calm = True
        seconds = time.monotonic() - begin
        digests = wild.digests()
        honest = {digests[n] for n in range(clients) if n not in wild.liars}
        ledger, parameters = rebuild(wild.out)
        _, calm_parameters = rebuild(calm.out)
        task = make_task(wild.config.task)
        accuracy, undisturbed = (100 * task.evaluate(p.model)[1] for p in (parameters, calm_parameters))
        lost = sum(ledger.chain_at(number) != chain for number, chain in marks)
        abandoned = sum(record.values is None for record in ledger)
    assert {calm_digests[n] for n in range(clients) if n not in calm.liars} == {calm_parameters.digest()}
    note = f"{kills} kills of clients, {len(marks)} of the federator, {storm.cuts} cuts in {seconds:.0f} s"
    yield Figure("honest digests that differ from the ledger's", float(len(honest ^ {parameters.digest()})), "", 0.0,
                 note=note)  # fmt: skip
    yield Figure("ledgers that lost a decided round", float(lost), "", 0.0)
    yield Figure("rounds abandoned", float(abandoned), "", note=f"of {len(ledger)}")
    yield Figure("accuracy, disturbed", accuracy, "%")
    yield Figure("accuracy, undisturbed", undisturbed, "%")


if __name__ == "__main__":
    sys.exit(main(__doc__, {"chaos": run}, {"cores": os.cpu_count()}))
