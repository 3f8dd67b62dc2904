"""A ledger on a disk: one writer, whole records whatever happens, forced to the disk when it is said."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledgers import COUNTER, assert_same, make_header, make_record, write

import cyber0.ledger as ledger_room
from cyber0.errors import LedgerError
from cyber0.ledger import Header, Ledger, Reports
from cyber0.storage.memory import MemoryDisk


def test_an_existing_file_is_never_overwritten(folder: Path) -> None:
    path = write(folder, make_header(), [])
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(path, make_header())
    assert path.read_bytes() == before
    with pytest.raises(LedgerError, match="folder"):
        Ledger.create(folder / "nowhere" / "ledger.bin", make_header())
    assert not [name for name in os.listdir(folder) if name.endswith(".new")]


def test_two_writers_are_kept_apart_and_readers_let_in(folder: Path) -> None:
    pytest.importorskip("fcntl")
    header = make_header()
    path = folder / f"{next(COUNTER)}.bin"
    with Ledger.create(path, header) as ledger:
        with pytest.raises(LedgerError, match="another process"):
            Ledger.open(path, writable=True)
        ledger.append(make_record(header, 0))
        with Ledger.open(path) as reader:
            assert len(reader) == 1
    with Ledger.open(path, writable=True), pytest.raises(LedgerError, match="another process"):
        Ledger.open(path, writable=True)
    Ledger.open(path, writable=True).close()


def test_a_ledger_opened_for_reading_or_closed_takes_no_records(folder: Path) -> None:
    header = make_header()
    path = write(folder, header, [make_record(header, 0)])
    ledger = Ledger.open(path)
    with pytest.raises(LedgerError, match="for reading only"):
        ledger.append(make_record(header, 1))
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.append(make_record(header, 1))
    with pytest.raises(LedgerError, match="closed"):
        list(ledger)


def test_a_ledger_is_made_where_the_file_system_has_no_hard_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    place = folder / "without-links"
    place.mkdir()
    monkeypatch.setattr("cyber0.storage.disk.os.link", refuse)
    with Ledger.create(place / "ledger.bin", make_header()) as ledger:
        assert len(ledger) == 0
    assert [path.name for path in place.iterdir()] == ["ledger.bin"]


def test_a_full_disk_leaves_whole_records() -> None:
    header, disk = make_header(), MemoryDisk()
    with Ledger.create("ledger.bin", header, disk=disk) as ledger:
        ledger.append(make_record(header, 0))
        good, disk.room = disk.contents("ledger.bin"), 10
        with pytest.raises(LedgerError, match=r"record 1 can't be written .* only a part"):
            ledger.append(make_record(header, 1))
        assert disk.contents("ledger.bin") == good
        disk.room = None
        ledger.append(make_record(header, 1))
    assert len(Ledger.open("ledger.bin", disk=disk)) == 2


@pytest.mark.parametrize(("durability", "expected"), [("always", 5), ("batch", 2), ("none", 0)])
def test_durability_says_when_records_are_forced_to_the_disk(
    monkeypatch: pytest.MonkeyPatch, durability: Any, expected: int
) -> None:
    header, disk, now = make_header(), MemoryDisk(), [100.0]
    ledger = Ledger.create("ledger.bin", header, durability=durability, disk=disk, clock=lambda: now[0])
    synced: list[float] = []
    monkeypatch.setattr(ledger._file, "sync", lambda: synced.append(now[0]))
    for number, seconds in enumerate((0.1, 0.5, 1.2, 1.9, 2.3)):
        now[0] = 100 + seconds
        ledger.append(make_record(header, number))
    assert len(synced) == expected
    ledger.close()
    assert len(synced) == expected + 1
    with pytest.raises(LedgerError, match="durability = 'sometimes' is unknown"):
        Ledger.create(None, header, durability="sometimes")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["always", "none"])
def test_a_power_cut_leaves_what_was_synced_and_whole_records_of_the_rest(durability: Any) -> None:
    header = make_header(k=3, clients=5)
    opening = len(disk_with(header, 0).contents("ledger.bin"))
    size = len(disk_with(header, 1).contents("ledger.bin")) - opening
    for kept in range(3 * size + 1):
        disk = disk_with(header, 3, durability=durability)
        disk.cut_power(kept)
        ledger = Ledger.open("ledger.bin", writable=True, disk=disk)
        assert len(ledger) == (3 if durability == "always" else kept // size)
        ledger.append(make_record(header, len(ledger)))
        ledger.close()
        assert Ledger.inspect("ledger.bin", disk=disk)[1] is None


def disk_with(header: Header, records: int, durability: Any = "none") -> MemoryDisk:
    """Return a disk on which a ledger was being written."""
    disk = MemoryDisk()
    ledger = Ledger.create("ledger.bin", header, durability=durability, disk=disk)
    for number in range(records):
        ledger.append(make_record(header, number))
    return disk


def test_in_memory_as_on_a_disk_there_is_one_writer_and_no_file_is_overwritten() -> None:
    header, disk = make_header(), MemoryDisk()
    with Ledger.create("a", header, disk=disk):
        with pytest.raises(LedgerError, match="another process or object"):
            Ledger.open("a", writable=True, disk=disk)
        Ledger.open("a", disk=disk).close()
        with pytest.raises(LedgerError, match="a exists already"):
            Ledger.create("a", header, disk=disk)
    Ledger.open("a", writable=True, disk=disk).close()
    with pytest.raises(LedgerError, match="can't open the ledger b: No such file"):
        Ledger.open("b", disk=disk)


def test_reports_live_on_the_disk_they_are_handed_and_are_synced_before_the_ledger() -> None:
    header, disk = make_header(k=2, clients=3), MemoryDisk()
    ledger = Ledger.create("ledger.bin", header, durability="always", disk=disk)
    reports = Reports.beside(ledger, "reports.bin", disk=disk)
    rows = np.ones((3, 2), np.float32)
    for number in range(3):
        reports.append(number, rows * number)
        ledger.append(make_record(header, number))
    reports.append(3, rows)  # its record was not written when the power failed
    disk.cut_power(kept=5)
    again = Reports.beside(Ledger.open("ledger.bin", writable=True, disk=disk), "reports.bin", disk=disk)
    assert [(number, float(found[0, 0])) for number, found in again] == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("file", sorted(Path(ledger_room.__file__).parent.glob("*.py")), ids=lambda file: file.name)
def test_the_ledger_uses_the_disk_and_the_clock_that_it_is_handed(file: Path) -> None:
    found = {ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)}
    assert not found & {"open", "io.FileIO", "os.open", "os.fsync", "os.fstat", "time.monotonic", "time.time"}


def test_kill_minus_nine_leaves_whole_records(folder: Path) -> None:
    path = folder / f"{next(COUNTER)}.bin"
    code = (
        "import sys; from ledgers import *; from cyber0.ledger import Ledger\n"
        "header = make_header(); ledger = Ledger.create(sys.argv[1], header); print(flush=True)\n"
        "while True: ledger.append(make_record(header, ledger.next_round)); print(flush=True)"
    )
    here = Path(__file__).parent
    places = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": places}) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    header = make_header()
    with Ledger.open(path, writable=True) as ledger:
        assert len(ledger) >= 49
        for record in ledger:
            assert_same(record, make_record(header, record.round))
        ledger.append(make_record(header, ledger.next_round))
    Ledger.open(path).close()
