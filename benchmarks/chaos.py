"""Everything goes wrong at once: 12 client processes on MNIST, 3 of them Byzantine, for some minutes.

    python benchmarks/chaos.py                 disturbed runs over 4 seeds, after undisturbed ones of the same seeds
    python benchmarks/chaos.py --quick         6 clients, 1 Byzantine, 120 rounds, 2 seeds: its accuracies mean little

Clients are killed with SIGKILL and started again at random, the federator is killed twice and resumed, a proxy between
them cuts and delays connections, and one client joins at half time. At the end every honest client's digest must be
that of the federator's ledger replayed from w0, no decided round may be lost, and the accuracy should be that of the
undisturbed runs, within their deviation over seeds. Who is killed is missing meanwhile, so beside it stands a
simulation in which the same clients are absent and nothing else goes wrong. tests/cli/test_deploy.py has it in short.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measure import Figure, main
from serve import Server, workplace
from storm import Storm

from cyber0.config.files import load, to_toml
from cyber0.config.schema import Config
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger
from cyber0.runs.replay import rebuild
from cyber0.serve.join import make_attack
from cyber0.tasks import make as make_task

LIES = ("sign_flip", "gaussian", "nonfinite")
CUT_EVERY_S = 3.0
KILLS, MORE_KILLS = 12, 30  # of clients, one each on average or more, at rounds drawn in advance
REPEATS = 4  # of a simulation with other batches
LOOK_EVERY_S = 0.5
ENDING_S = 600.0


class Deployment:
    """The processes of one run: a federator and its clients."""

    def __init__(self, folder: Path, name: str, clients: int, byzantine: int, rounds: int, seed: int) -> None:
        self.folder, self.out = folder, folder / name
        self.config: Config = load(None, [
            f"seed={seed}", f"rounds={rounds}", f"federation.clients={clients}", f"federation.byzantine={byzantine}",
            "method.k=16", "serve.deadline_s=10", "serve.digest_every=50",
        ])  # fmt: skip
        self.honest = range(clients - byzantine)
        self._settings = folder / f"{name}.toml"
        self._settings.write_text(to_toml(self.config))
        self._server = self._serve(0)
        self.port = self._server.port
        self.address = self.port
        """Where clients look for the federator."""
        self.clients: dict[int, subprocess.Popen[bytes]] = {}

    def _serve(self, port: int) -> Server:
        return Server("-m", "cyber0", "serve", self._settings, "--listen", f"localhost:{port}", "--certs",
                      self.folder / "certs", "--out", self.out, "--log-json", "--resume", "--stay")  # fmt: skip

    def join(self, number: int) -> None:
        """Start a client, for the first time or again."""
        lie = [] if number in self.honest else ["--lie", _lie(number)]
        command = [
            *(sys.executable, "-m", "cyber0", "join", f"localhost:{self.address}", "--certs", self.folder / "certs"),
            *("--client", str(number), "--state", f"{self.out}-state-{number}", "--quiet", *lie),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.clients[number] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)

    def restart_client(self, number: int) -> None:
        """Kill a client and start it again."""
        self.clients[number].kill()
        self.clients[number].communicate()
        self.join(number)

    def restart_federator(self) -> None:
        """Kill the federator and resume it where it was."""
        self._server.process.send_signal(signal.SIGKILL)
        self._server.process.wait()
        self._server.close()
        self._server = self._serve(self.port)

    def probe(self) -> tuple[int, bytes]:
        """Return how many rounds are in the ledger, and the hash that they lead to."""
        ledger = Ledger.open(self.out / "ledger.bin")
        return len(ledger), ledger.chain

    def digests(self) -> dict[int, str]:
        """Wait until every client has ended; return the digests of the honest ones' weights."""
        said = {n: client.communicate(timeout=ENDING_S)[0].decode().split() for n, client in self.clients.items()}
        return {n: said[n][-1] if said[n] else "none" for n in self.honest}

    def close(self) -> None:
        for client in self.clients.values():
            if client.poll() is None:
                client.kill()
                client.communicate()
        self._server.close()

    def accuracy(self) -> tuple[float, str, Ledger]:
        """Return the accuracy in percent and the digest of the ledger replayed from w0, and the ledger."""
        ledger, parameters = rebuild(self.out)
        return 100 * make_task(self.config.task).evaluate(parameters.model)[1], parameters.digest(), ledger


def _lie(number: int) -> str:
    """Return what a Byzantine client does."""
    return LIES[number % len(LIES)]


def reports_a_round(ledger: Ledger) -> float:
    return statistics.mean(int(record.reported.sum()) for record in ledger)


def undisturbed(folder: Path, clients: int, byzantine: int, rounds: int, seed: int) -> tuple[float, float]:
    """Return the accuracy of a run in which nothing goes wrong, and its reports a round."""
    with contextlib.closing(Deployment(folder, f"calm-{seed}", clients, byzantine, rounds, seed)) as run:
        for number in range(clients):
            run.join(number)
        digests = run.digests()
        accuracy, digest, ledger = run.accuracy()
    assert set(digests.values()) == {digest} and len(ledger) == rounds
    return accuracy, reports_a_round(ledger)


def disturb(run: Deployment, storm: Storm, clients: int, deaths: int) -> tuple[dict[str, int], list[tuple[int, bytes]]]:
    """Let everything go wrong until nine tenths of the rounds are run; return what did, and the ledger as seen.

    Nobody is killed in the last quarter: whoever has not come back by the end was not restarted, but left out.
    """
    rounds, generator = run.config.rounds, random.Random(2)
    late, kills = 0, {"clients": 0, "federator": 0}
    doom = sorted(generator.sample(range(10, rounds * 3 // 4), deaths))
    for number in range(1, clients):
        run.join(number)
    seen = [run.probe()]
    while seen[-1][0] < rounds * 9 // 10:
        time.sleep(LOOK_EVERY_S)
        seen.append(run.probe())
        at = seen[-1][0]
        if late not in run.clients and at >= rounds // 2:
            run.join(late)
        if kills["federator"] < 2 and at >= rounds * (1 + kills["federator"]) // 3:
            kills["federator"] += 1
            run.restart_federator()
        elif doom and at >= doom[0]:
            del doom[0]
            kills["clients"] += 1
            run.restart_client(generator.choice(list(run.clients)))
    storm.calm = True
    return kills, seen


def simulated(config: Config, honest: range, ledger: Ledger, batches: int) -> float:
    """Return the accuracy in percent of a simulation in which those report who are in the ledger, round by round.

    `batches` is the seed of what they draw: in a deployment that is everybody's own.
    """
    simulation = Simulation(config.with_overrides(["federation.byzantine=0"]))
    simulation.samples.seed = batches
    attacks = {n: make_attack(_lie(n), config) for n in range(len(honest), config.federation.clients)}
    federator = simulation.federator
    for record in ledger:
        announcement, here = federator.open_round(), np.flatnonzero(record.reported)
        sent = simulation.measure(announcement, here)
        for place, number in enumerate(here.tolist()):
            if number in attacks:
                sent[place] = attacks[number](sent[place], record.round)
        federator.receive_many(here, record.round, sent.astype(np.float32))
        federator.decide(deadline=True)
        assert federator.ledger.last is not None
        simulation.apply(federator.ledger.last)
    return 100 * simulation.evaluate().accuracy


@dataclass(frozen=True)
class Survived:
    """What is left of a disturbed run, and what it went through."""

    accuracy: float
    absent: list[float]
    """Accuracies of simulations in which the same clients are missing in the same rounds, and nothing else happens."""
    reports: float
    clients: int
    strangers: int
    """Honest clients with another digest than the ledger replayed from w0."""
    probes: int
    lost: int
    """Ledgers seen on the way that the last one does not extend."""
    missing: int
    abandoned: int
    late: int
    """Rounds with a report of the one that joined at half time."""
    kills: dict[str, int]
    cuts: int
    delays: int
    seconds: float


def disturbed(
    folder: Path,
    clients: int,
    byzantine: int,
    rounds: int,
    seed: int,
    *,
    deaths: int = KILLS,
    batches: Sequence[int] = (),
) -> Survived:
    """Return what a run comes to in which everything goes wrong, beside a simulation for each seed of batches."""
    begin = time.monotonic()
    with (contextlib.closing(Deployment(folder, f"wild-{seed}", clients, byzantine, rounds, seed)) as run,
          Storm(run.port, cut_every_s=CUT_EVERY_S) as storm):  # fmt: skip
        run.address = storm.port
        kills, seen = disturb(run, storm, clients, deaths)
        digests = run.digests()
        accuracy, digest, ledger = run.accuracy()
    absent = [simulated(run.config, run.honest, ledger, drawn) for drawn in batches or [seed]]
    return Survived(
        accuracy, absent, reports_a_round(ledger),
        len(digests), sum(found != digest for found in digests.values()), len(seen),
        sum(ledger.chain_at(number) != chain for number, chain in seen), rounds - len(ledger),
        sum(record.values is None for record in ledger), sum(bool(record.reported[0]) for record in ledger),
        kills, storm.cuts, storm.delays, time.monotonic() - begin,
    )  # fmt: skip


def chaos(quick: bool) -> Iterator[Figure]:
    """Disturbed runs beside undisturbed ones of the same seeds."""
    clients, byzantine, rounds, seeds = (6, 1, 120, 2) if quick else (12, 3, 2000, 4)
    with workplace(clients) as folder:
        calm = [undisturbed(folder, clients, byzantine, rounds, seed) for seed in range(seeds)]
        mean, deviation = (f([accuracy for accuracy, _ in calm]) for f in (statistics.mean, statistics.stdev))
        each = statistics.mean(reports for _, reports in calm)
        yield Figure("accuracy, undisturbed", mean, "%",
                     note=f"± {deviation:.2f} over {seeds} seeds; {each:.1f} reports a round")  # fmt: skip
        wild = [disturbed(folder, clients, byzantine, rounds, seed) for seed in range(seeds)]
    accuracies, each = [run.accuracy for run in wild], statistics.mean(run.reports for run in wild)
    note = f"± {statistics.stdev(accuracies):.2f} over {seeds} seeds; {each:.1f} reports a round"
    yield Figure("accuracy, disturbed", statistics.mean(accuracies), "%", note=note)
    below = (mean - statistics.mean(accuracies)) / deviation
    yield Figure("by how much that is lower, in deviations over seeds", below, "", 1.0)
    control, spread = (f([a for run in wild for a in run.absent]) for f in (statistics.mean, statistics.stdev))
    yield Figure("accuracy, simulated with the same clients absent in the same rounds", control, "%",
                 note=f"± {spread:.2f} over {seeds} seeds")  # fmt: skip
    yield Figure("by how much the disturbed one is lower than that, in its deviations",
                 (control - statistics.mean(accuracies)) / spread, "", 1.0)  # fmt: skip
    yield Figure("honest clients with another digest than the ledger replayed from w0",
                 sum(r.strangers for r in wild), "", 0.0, note=f"of {sum(r.clients for r in wild)}")  # fmt: skip
    yield Figure("ledgers seen on the way that the last one does not extend",
                 sum(r.lost for r in wild), "", 0.0, note=f"of {sum(r.probes for r in wild)}")  # fmt: skip
    yield Figure("rounds missing at the end", sum(r.missing for r in wild), "", 0.0,
                 note=f"{sum(r.abandoned for r in wild)} abandoned of {seeds * rounds}")  # fmt: skip
    yield Figure("client processes killed, a run", min(r.kills["clients"] for r in wild), "")
    yield Figure("federator killed, a run", min(r.kills["federator"] for r in wild), "", 2.0, at_least=True)
    yield Figure("connections cut, a run", statistics.mean(r.cuts for r in wild), "",
                 note=f"{sum(r.delays for r in wild):,} messages delayed in all")  # fmt: skip
    yield Figure("rounds with a report of the one that joined at half time, a run", min(r.late for r in wild), "", 1.0,
                 at_least=True)  # fmt: skip
    yield Figure("time of a disturbed run", statistics.mean(r.seconds for r in wild), "s")


def more_kills(quick: bool) -> Iterator[Figure]:
    """Clients are killed so often that some are always missing: what that costs, and whether it is all there is."""
    clients, byzantine, rounds, seeds = (6, 1, 120, 1) if quick else (12, 3, 2000, 2)
    with workplace(clients) as folder:
        wild = [disturbed(folder, clients, byzantine, rounds, seed, deaths=MORE_KILLS,
                          batches=range(1000, 1000 + REPEATS)) for seed in range(seeds)]  # fmt: skip
    for seed, run in enumerate(wild):
        yield Figure(f"seed {seed}: accuracy, disturbed", run.accuracy, "%",
                     note=f"{run.kills['clients']} kills; {run.reports:.1f} reports a round")  # fmt: skip
        yield Figure(f"seed {seed}: accuracy, simulated with the same clients absent", statistics.mean(run.absent), "%",
                     note=f"± {statistics.stdev(run.absent):.2f} over {REPEATS} draws of batches")  # fmt: skip
    yield Figure("honest clients with another digest than the ledger replayed from w0",
                 sum(r.strangers for r in wild), "", 0.0, note=f"of {sum(r.clients for r in wild)}")  # fmt: skip
    yield Figure("rounds missing at the end", sum(r.missing for r in wild), "", 0.0)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"chaos": chaos, "more_kills": more_kills}, {"cores": os.cpu_count()}))
