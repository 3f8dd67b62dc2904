"""What a federator leaves for people to read: figures that survive a kill, a report, a page that is live."""

from __future__ import annotations

import asyncio
import csv
import http.client
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from wire import K, Voter, make_header, make_hub, now, run_voter

from cyber0.config.files import to_toml
from cyber0.config.schema import Config, to_dict
from cyber0.ledger import Ledger, without_fields
from cyber0.protocol.messages import EvaluationMessage
from cyber0.report.contents import contents
from cyber0.report.folder import read
from cyber0.report.watch import LiveServer
from cyber0.serve.hub import Hub
from cyber0.serve.stats import ServerStats


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60.0):
            return await work

    return asyncio.run(limited())


def served(folder: Path, rounds: int = 6) -> Hub:
    """Return a hub that goes on with the ledger in the folder, as `cyber0 serve --resume` would."""
    folder.mkdir(exist_ok=True)
    agreed = ["seed=1", "method.k=3", "method.lr=0.1", "federation.clients=4"]  # as the header has it
    config = Config().with_overrides([f"rounds={rounds}", "federation.byzantine=0", *agreed])
    (folder / "config.toml").write_text(to_toml(config))
    path = folder / "ledger.bin"
    if path.exists():
        ledger = Ledger.open(path, writable=True, durability="none")
    else:
        ledger = Ledger.create(path, make_header(4, settings=without_fields(to_dict(config))), durability="none")
    return make_hub(4, rounds, ledger=ledger)


async def run_until(hub: Hub, voters: list[Voter], stop: int) -> None:
    """Run this many rounds and no more."""
    for voter in voters:
        voter.rounds = stop
    hub.start()
    running = [asyncio.ensure_future(run_voter(hub, voter)) for voter in voters]
    while len(hub.ledger) < stop:
        await asyncio.sleep(0.001)
    hub.close()
    await asyncio.gather(*running, return_exceptions=True)


def network_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = contents([read(folder)])["runs"][0]
    return result


def test_a_resumed_federator_goes_on_counting_where_the_last_one_was(tmp_path: Path) -> None:
    async def first() -> int:
        hub = served(tmp_path, 1000)
        stats = ServerStats(hub, tmp_path, now)
        await run_until(hub, [Voter(hub.ledger.header, c) for c in range(4)], 5)
        hub.figures.refused["flood"] = 3
        stats.save()  # and then it is killed
        hub.ledger.close()
        return hub.figures.clients[1].payload_in

    async def second(before: int) -> None:
        hub = served(tmp_path, 1000)
        ServerStats(hub, tmp_path, now)
        hub.ledger.close()
        assert hub.figures.clients[1].payload_in == before >= 4 * 4 * K and hub.figures.refused["flood"] == 3

    async def anew() -> None:
        hub = served(tmp_path, 1000)
        ServerStats(hub, tmp_path, now)
        hub.ledger.close()
        assert hub.figures.total("reports") == 0

    run(second(run(first())))
    (tmp_path / "served.json").write_text('{"clients": [], ')
    run(anew())


def test_at_the_end_the_folder_is_that_of_a_run_and_makes_a_report(tmp_path: Path) -> None:
    async def begin() -> None:
        hub = served(tmp_path)
        stats = ServerStats(hub, tmp_path, now)
        await run_until(hub, [Voter(hub.ledger.header, c) for c in range(4)], 3)
        for round, accuracy in ((0, 0.1), (3, 0.75)):
            stats.add_evaluation(EvaluationMessage(round, accuracy, 1.0))
        stats.finish()
        hub.ledger.close()

    async def go_on() -> list[str]:
        hub = served(tmp_path)
        stats = ServerStats(hub, tmp_path, now)
        assert hub.evaluated == 3
        await run_until(hub, [Voter(hub.ledger.header, c) for c in range(4)], 6)
        stats.finish()
        hub.ledger.close()
        return stats.summary_lines()

    run(begin())
    assert not network_of(tmp_path)["ended"] and not (tmp_path / "summary.json").exists()
    words = run(go_on())
    assert words[0].startswith("6 of 6 rounds") and "payload 12.0 / 12.0, message 20.0 /" in words[-1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rounds"] == 6 and summary["final_accuracy"] == 0.75 and summary["deadline_misses"] == 0
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [(row["round"], row["uplink_bytes"]) for row in rows] == [("0", "0"), ("3", str(3 * 4 * K))]
    report = network_of(tmp_path)
    assert report["ended"] and report["notes"] == [] and "over the network" in report["sentence"]
    assert report["network"]["total"] == 4 and report["network"]["rows"][0][2] == 6  # reports
    assert sorted(row[0] for row in report["clients"]["rows"]) == [0, 1, 2, 3]
    figures = {figure["key"]: figure["text"] for figure in report["figures"]}
    assert figures["payload"] == "12 / 12 B" and figures["misses"] == "0"


def test_counts_that_make_no_sense_are_noted_in_the_report(tmp_path: Path) -> None:
    run(write_served(tmp_path))
    counts = json.loads((tmp_path / "served.json").read_text())
    for broken in ("[]", "{}", json.dumps({"clients": {**counts["clients"], "misses": ["<b>"]}}),
                   json.dumps({"clients": {**counts["clients"], "reports": [1]}})):  # fmt: skip
        (tmp_path / "served.json").write_text(broken)
        report = network_of(tmp_path)
        assert report["network"] is None and any("served.json can't be read" in note for note in report["notes"])


async def write_served(folder: Path) -> None:
    hub = served(folder)
    ServerStats(hub, folder, now).save()
    hub.ledger.close()


@pytest.mark.slow
def test_the_live_page_shows_how_every_client_stands(tmp_path: Path) -> None:
    def ask(port: int, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == 200
        return text

    async def work() -> None:
        hub = served(tmp_path, 1_000_000)
        stats, loop = ServerStats(hub, tmp_path, now), asyncio.get_running_loop()
        hub.revoke(frozenset({"3"}))
        hub.start()
        running = [asyncio.ensure_future(run_voter(hub, Voter(hub.ledger.header, c))) for c in range(3)]
        while len(hub.ledger) < 3:
            await asyncio.sleep(0.001)
        stats.add_evaluation(EvaluationMessage(2, 0.5, 1.0))
        with LiveServer() as page:
            page.start(stats.live_view)
            port = int(page.address.rstrip("/").rsplit(":", 1)[1])
            assert "Clients over the network" in await loop.run_in_executor(None, ask, port, "/")
            data = json.loads(await loop.run_in_executor(None, ask, port, "/data.json"))
            page._last_request = -60.0  # nobody is waited for
        hub.close()
        await asyncio.gather(*running, return_exceptions=True)
        assert data["live"]["round"] >= 3 and data["live"]["rounds"] == 1_000_000
        shown = data["runs"][0]
        assert shown["curve"]["columns"]["accuracy"] == [0.5]
        states = {row[0]: row[1] for row in shown["network"]["rows"]}
        assert states[3] == "revoked" and {states[c] for c in range(3)} <= {"current", "catching up"}
        assert sum(row[2] for row in shown["clients"]["rows"]) > 0  # numbers sent

    run(work())


@pytest.mark.parametrize("kind", ["payload", "message", "wire"])
def test_without_a_report_nothing_is_said_of_bytes_a_round(kind: str, tmp_path: Path) -> None:
    assert served(tmp_path).figures.a_round(kind) is None
