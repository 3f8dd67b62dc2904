"""The Flower app on loopback: a SuperLink and three SuperNodes with TLS and node authentication, in both modes.

    python benchmarks/flower.py                   both modes, some minutes; needs the extra `flower`
    python benchmarks/flower.py --quick           a smoke run
    python benchmarks/flower.py --only stream     one mode

Everything runs as docs/DEPLOY.md says, by Flower's own commands, and nothing calls home. After each run `cyber0 verify`
rebuilds the model from the ledger, and its digest is compared with what every node has stated.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from measure import Figure, main

from cyber0.errors import LedgerError
from cyber0.ledger import Ledger
from cyber0.serve import tls as certificates

APP = Path(__file__).resolve().parent.parent / "examples" / "flower"
NODES = 3
PATIENCE = 300.0
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # nothing calls home
HOLDS = re.compile(r"holds client=(\d+) digest=([0-9a-f]{64})")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def until(condition: Callable[[], bool], what: str, processes: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited in vain for {what}")
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args[0]!r} ended with {process.returncode} before {what}")
        time.sleep(0.1)


class Deployment:
    """A SuperLink and its SuperNodes, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(1 + NODES)
        self._address = f"127.0.0.1:{ports[0]}"
        self._environment = os.environ | QUIET | {"FLWR_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
                                                  "NUMBA_NUM_THREADS": "1", "COLUMNS": "200"}  # fmt: skip
        # Flower's commands start each other by name.
        self._environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._processes: list[subprocess.Popen[bytes]] = []
        pki = folder / "pki"
        certificates.make(pki, clients=[], hosts=["127.0.0.1", "localhost"])
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{self._address}"\n'
            f'root-certificates = "{pki / "ca.pem"}"\n'
        )
        self._start("flower-superlink", "--ssl-ca-certfile", pki / "ca.pem", "--ssl-certfile", pki / "server.pem",
                    "--ssl-keyfile", pki / "server.key", "--enable-supernode-auth", "--host", "127.0.0.1", "--port",
                    ports[0], "--disable-runtime-dependency-installation")  # fmt: skip
        until(lambda: _listens(ports[0]), "the SuperLink", self._processes)
        for number, port in enumerate(ports[1:]):
            key = write_key(folder / f"node-{number}")
            self.flwr("supernode", "register", f"{key}.pub", "here")
            self._start("flower-supernode", "--superlink", self._address, "--root-certificates", pki / "ca.pem",
                        "--auth-supernode-private-key", key, "--host", "127.0.0.1", "--port", port)  # fmt: skip
        until(lambda: self.flwr("supernode", "list", "here").count("online") >= NODES, "SuperNodes", self._processes)

    def _start(self, *command: object) -> None:
        with (self.folder / f"{command[0]}-{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen([*map(str, command)], cwd=self.folder, env=self._environment,
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
        self._processes.append(process)

    def flwr(self, *arguments: object) -> str:
        done = subprocess.run(["flwr", *map(str, arguments)], cwd=self.folder, env=self._environment, text=True,
                              capture_output=True, check=False, timeout=PATIENCE * 4)  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"flwr {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def run(self, name: str, settings: str, warm_up: int) -> tuple[float, float, str]:
        """Run the app to its end; return rounds a second after `warm_up` rounds, seconds in all, and what it said."""
        out = self.folder / name
        begin = time.perf_counter()
        command = ["flwr", "run", str(APP), "here", "--stream", "--run-config", f'{settings} flower.out="{out}"']
        with (self.folder / f"{name}.log").open("w+b") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
            marks: list[tuple[int, float]] = []
            while process.poll() is None:
                reached = rounds_in(out / "ledger.bin")
                if reached >= warm_up and (not marks or reached > marks[-1][0]):
                    marks.append((reached, time.perf_counter()))
                time.sleep(0.02)
            whole = time.perf_counter() - begin
            log.seek(0)
            said = log.read().decode(errors="replace")
        if len(marks) < 2:
            raise RuntimeError(f"the run did not get going: {said[-2000:]}")
        return (marks[-1][0] - marks[0][0]) / (marks[-1][1] - marks[0][1]), whole, said

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def write_key(path: Path) -> Path:
    """Write a SuperNode's key pair as `ssh-keygen -t ecdsa -b 384` does."""
    key = ec.generate_private_key(ec.SECP384R1())
    plain, openssh = serialization.NoEncryption(), serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, openssh, plain))
    path.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")
    return path


def rounds_in(ledger: Path) -> int:
    try:
        return len(Ledger.open(ledger))
    except LedgerError:
        return 0


@contextlib.contextmanager
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="cyber0-flower-") as name, contextlib.ExitStack() as stack:
        made = Deployment(Path(name))
        stack.callback(made.close)
        yield made


def agreement(said: str, out: Path) -> str:
    """Compare what the nodes have stated with the ledger replayed from w0."""
    stated = dict(HOLDS.findall(said))
    command = [sys.executable, "-m", "cyber0", "verify", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cyber0 verify: {done.stderr.strip()[-300:]}; the app said: {said[-1500:]}")
    verified = done.stdout
    right = [client for client, digest in stated.items() if digest in verified]
    if len(stated) == NODES == len(right):
        return f"all {NODES} digests equal the replayed ledger's"
    return f"ONLY {len(right)} OF {NODES} DIGESTS EQUAL the replayed ledger's"


def measured(mode: str, rounds: int, warm_up: int, more: str) -> Iterator[Figure]:
    with deployment() as flower:
        settings = (f'flower.mode="{mode}" flower.listen="127.0.0.1:0" rounds={rounds} serve.durability="batch" '
                    f"federation.clients={NODES} serve.quorum={NODES} {more}")  # fmt: skip
        speed, whole, said = flower.run(mode, settings, warm_up)
        note = agreement(said, flower.folder / mode)
    yield Figure(f"{mode}: {NODES} SuperNodes on MNIST", speed, "rounds/s", note=note)
    yield Figure(f"{mode}: {rounds:,} rounds, from `flwr run` to its end", whole, "s")


def stream(quick: bool) -> Iterator[Figure]:
    """One message a run, k = 4: all rounds over the hub."""
    yield from measured("stream", 60 if quick else 4000, 20, "method.k=4")


def message(quick: bool) -> Iterator[Figure]:
    """One message a round, k = 4, ten local epochs."""
    yield from measured("message", 3 if quick else 10, 2, "method.k=4 method.local_epochs=10")


SECTIONS = {"stream": stream, "message": message}

if __name__ == "__main__":
    sys.exit(main(__doc__, SECTIONS, {"flwr": version("flwr"), "grpcio": version("grpcio"), "cores": os.cpu_count(),
                                         "load": round(os.getloadavg()[0], 1)}))  # fmt: skip
