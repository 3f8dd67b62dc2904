"""What a federator does beside its rounds: nothing that fails there is silent, or takes anything else with it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from virtual_time import run
from wire import Voter, make_header, make_hub, now, run_voter

from cyber0.config.schema import Config, to_dict
from cyber0.errors import ConfigError
from cyber0.ledger import Ledger, without_fields
from cyber0.serve.chores import Chore, Chores, RevocationFile, chores_of
from cyber0.serve.hub import Hub
from cyber0.serve.stats import ServerStats

Events = list[tuple[str, dict[str, Any]]]


def recorder(events: Events) -> Callable[..., None]:
    return lambda event, **details: events.append((event, details))


def chores_in(folder: Path, hub: Hub, events: Events) -> Chores:
    (folder / "config.toml").write_text("")
    log = recorder(events)
    revocations = RevocationFile(folder / "revoked.txt", hub, log)
    revocations.start()
    return chores_of(hub, ServerStats(hub, folder, now), revocations, None, log, now, now)


def test_a_list_that_cannot_be_read_keeps_the_last_one_and_is_read_as_soon_as_it_can_be(tmp_path: Path) -> None:
    async def work() -> None:
        hub, events, path = make_hub(4), Events(), tmp_path / "revoked.txt"
        path.write_text("1\n")
        watching = asyncio.ensure_future(chores_in(tmp_path, hub, events).run())
        await asyncio.sleep(1.5)
        path.unlink()
        path.mkdir()  # can't be read, not even by root
        await asyncio.sleep(20.0)
        assert hub.revoked == {"1"} and not watching.done()
        ((event, details),) = events  # once, not every second
        assert event == "warning" and "Is a directory; the list read last still applies" in details["text"]
        assert json.loads((tmp_path / "served.json").read_text())["seconds"] > 10.0, "the figures are still saved"
        path.rmdir()
        path.write_text("1\n2\n")
        await asyncio.sleep(1.5)
        assert hub.revoked == {"1", "2"}
        assert events[1:] == [("task_recovered", {"task": "revocations"})]
        watching.cancel()

    run(work())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_list_that_is_no_file_or_is_huge_is_not_read(tmp_path: Path) -> None:
    async def work() -> None:
        hub, events, path = make_hub(4), Events(), tmp_path / "revoked.txt"
        path.write_text("1\n")
        chores = chores_in(tmp_path, hub, events)
        path.unlink()
        os.mkfifo(path)
        chores.do()  # would wait for a writer
        path.unlink()
        path.symlink_to("/dev/zero")
        chores.do()
        path.unlink()
        path.touch()
        os.truncate(path, 1 << 40)
        chores.do()
        assert hub.revoked == {"1"}
        assert [details["text"].split(": ")[1].split(";")[0] for _, details in events] == [
            "Not a file", "It has more than 16 MB",
        ]  # fmt: skip

    run(work())


def test_a_list_that_was_deleted_applies_until_the_restart_and_an_empty_one_revokes_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        hub, events, path = make_hub(4), Events(), tmp_path / "revoked.txt"
        chores = chores_in(tmp_path, hub, events)
        chores.do()
        path.write_text("3\n")
        chores.do()
        path.unlink()
        for _ in range(3):
            chores.do()
        assert hub.revoked == {"3"}
        ((event, details),) = events
        assert event == "warning" and "is gone: the list read last still applies until" in details["text"]
        path.write_text("")
        chores.do()
        path.unlink()
        chores.do()
        assert hub.revoked == frozenset() and len(events) == 2

    run(work())


def test_a_federator_does_not_start_with_a_list_that_it_cannot_read(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "revoked.txt").mkdir()
        with pytest.raises(ConfigError, match=r"revoked\.txt can't be read: Is a directory; make it readable"):
            chores_in(tmp_path, make_hub(4), [])

    run(work())


def test_a_list_of_the_same_length_in_the_same_moment_is_read_too(tmp_path: Path) -> None:
    import os

    async def work() -> None:
        hub, path = make_hub(4), tmp_path / "revoked.txt"
        path.write_text("1\n")
        at = path.stat()
        chores = chores_in(tmp_path, hub, [])
        other = tmp_path / "other"
        other.write_text("2\n")
        os.utime(other, ns=(at.st_atime_ns, at.st_mtime_ns))
        other.replace(path)
        chores.do()
        assert hub.revoked == {"2"}

    run(work())


def test_a_chore_that_fails_stops_no_other_and_is_logged_once_per_reason() -> None:
    async def work() -> None:
        reasons, done, events = ["no", "no", "no", "never", ""], [], Events()

        def fail() -> None:
            if reason := reasons.pop(0):
                raise ValueError(reason)

        chores = Chores([Chore("bad", fail), Chore("good", lambda: done.append(now()), 2.0)], recorder(events), now)
        watching = asyncio.ensure_future(chores.run())
        await asyncio.sleep(4.5)
        watching.cancel()
        assert [round(time) for time in done] == [0, 2, 4]
        assert [(event, details.get("error", "")[:17]) for event, details in events] == [
            ("task_failed", "ValueError: no (t"), ("task_failed", "ValueError: never"), ("task_recovered", "")
        ]  # fmt: skip

    run(work())


def test_a_fault_in_the_policy_ends_the_federation_with_its_error_and_not_in_silence() -> None:
    async def work() -> None:
        hub, events = make_hub(4), Events()
        hub._log = recorder(events)

        def broken(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("a bug")

        hub.policy.decide = broken  # type: ignore[method-assign]
        hub.start()
        running = [asyncio.ensure_future(run_voter(hub, Voter(hub.ledger.header, c))) for c in range(4)]
        await hub.finished.wait()
        assert isinstance(hub.failure, ZeroDivisionError)
        assert [details["error"][:24] for event, details in events if event == "failed"] == ["ZeroDivisionError: a bug"]
        hub.close()
        await asyncio.gather(*running, return_exceptions=True)

    run(work())


def served_ledger(folder: Path) -> Ledger:
    """Return the ledger of a run of which nothing has to be computed."""
    from cyber0.serve import server

    overrides = ["seed=1", "method.k=3", "method.lr=0.1", "federation.clients=4", "federation.byzantine=0"]
    config = Config().with_overrides(overrides)
    header = make_header(4, settings=without_fields(to_dict(config)))
    return server.open_ledger(config, header, folder, resume=False, source="a test")


def test_a_background_task_that_ends_by_an_exception_stops_the_federator_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
    from cyber0.serve import server

    async def beside(hub: Hub, port: int) -> None:
        raise ZeroDivisionError("beside")

    async def chores(self: Chores) -> None:
        raise ZeroDivisionError("chores")

    async def forever(hub: Hub, port: int) -> None:
        await asyncio.Event().wait()

    for name, companion in (("beside", beside), ("chores", forever)):
        if name == "chores":
            monkeypatch.setattr(Chores, "run", chores)
        events: Events = []
        ledger = served_ledger(tmp_path / name)
        options = server.ServeOptions("127.0.0.1:0", tmp_path / name, None)
        with pytest.raises(ZeroDivisionError, match=name):
            asyncio.run(server.serve(ledger, options, recorder(events), beside=companion))
        assert [event for event, _ in events][-2:] == ["task_failed", "stopped"]
        assert events[-2][1]["error"].startswith(f"ZeroDivisionError: {name} (test_chores.py")
        assert (tmp_path / name / "served.json").stat().st_size > 10  # at its start it is empty
        Ledger.open(tmp_path / name / "ledger.bin", writable=True).close()  # nobody holds it any more
    assert "round" in capsys.readouterr().out
