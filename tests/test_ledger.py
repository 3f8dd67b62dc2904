"""The ledger: nothing is lost, nothing is changed unnoticed, and a crash costs at most the record being written."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyber0.errors import LedgerError
from cyber0.ledger import Entry, Header, Ledger, Record, trim_counts

COUNTER = itertools.count()


def make_header(**changes: Any) -> Header:
    settings: dict[str, Any] = {
        "seed": 2**64 - 1,
        "dimension": 12,
        "layout": (Entry("weight", (5, 2), "float32", 0), Entry("bias", (2,), "bfloat16", 10)),
        "distribution": "gaussian",
        "k": 1,
        "local_epochs": 1,
        "mu": 1e-3,
        "estimator": "two_point",
        "lr": 0.01,
        "lr_schedule": "constant",
        "projection_radius": None,
        "weights_digest": "ab" * 32,
        "rest_digest": "cd" * 32,
        "clients": 8,
        "config": {"seed": 0, "task": {"name": "mnist", "shape": [1, 2]}, "ä": None},
    }
    return Header(**{**settings, **changes})


def make_record(header: Header, number: int, abandoned: bool = False) -> Record:
    generator = np.random.default_rng(number)
    reported = generator.random(header.clients) < 0.7
    trimmed = np.where(reported, generator.integers(0, header.numbers + 1, header.clients), 0)
    if abandoned:
        return Record(number, 0.5 / (number + 1), None, reported, np.zeros(header.clients, np.int64))
    values = generator.standard_normal(header.numbers).astype(np.float32)
    return Record(number, 0.5 / (number + 1), values, reported, trimmed)


def assert_same(found: Record, expected: Record) -> None:
    assert (found.round, found.lr) == (expected.round, expected.lr)
    assert (found.values is None) == (expected.values is None)
    if found.values is not None and expected.values is not None:
        assert found.values.dtype == np.float32
        assert found.values.tobytes() == expected.values.tobytes()
    assert found.reported.tolist() == expected.reported.tolist()
    assert found.trimmed.tolist() == expected.trimmed.tolist()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


def write(folder: Path, header: Header, records: list[Record]) -> Path:
    path = folder / f"{next(COUNTER)}.bin"
    with Ledger.create(path, header, durability="none") as ledger:
        for record in records:
            ledger.append(record)
    return path


def copy_with(folder: Path, data: bytes) -> Path:
    path = folder / f"{next(COUNTER)}.bin"
    path.write_bytes(data)
    return path


@given(
    k=st.integers(1, 40),
    local_epochs=st.integers(1, 3),
    clients=st.integers(1, 40),
    abandoned=st.lists(st.booleans(), max_size=8),
    seed=st.integers(0, 2**64 - 1),
)
@settings(deadline=None)
def test_what_was_appended_is_read_back(
    folder: Path, k: int, local_epochs: int, clients: int, abandoned: list[bool], seed: int
) -> None:
    header = make_header(k=k, local_epochs=local_epochs, clients=clients, seed=seed)
    records = [make_record(header, number, flag) for number, flag in enumerate(abandoned)]
    path = folder / f"{next(COUNTER)}.bin"
    memory = Ledger.create(None, header)
    with Ledger.create(path, header, durability="none") as written:
        for record in records:
            written.append(record)
            memory.append(record)
    with Ledger.open(path) as ledger:
        assert ledger.header == header
        assert ledger.chain == written.chain == memory.chain
        assert len(ledger) == len(memory) == ledger.next_round == len(records)
        assert ledger.torn_bytes == 0
        for source in (ledger, memory):
            for found, expected in zip(source, records, strict=True):
                assert_same(found, expected)
        if records:
            assert ledger.last is not None
            assert_same(ledger.last, records[-1])
        else:
            assert ledger.last is None


def test_a_part_of_the_records_can_be_asked_for() -> None:
    header = make_header()
    ledger = Ledger.create(None, header)
    for number in range(5):
        ledger.append(make_record(header, number))
    assert [record.round for record in ledger.records(2, 4)] == [2, 3]
    assert [record.round for record in ledger.records(3)] == [3, 4]
    assert [record.round for record in ledger.records(-3, 99)] == [0, 1, 2, 3, 4]
    assert list(ledger.records(5)) == []


def test_truncated_anywhere_a_ledger_opens_to_the_whole_records_before(folder: Path) -> None:
    header = make_header(k=3, clients=5)
    records = [make_record(header, number, number in (1, 3)) for number in range(5)]
    ends = [len(write(folder, header, records[:count]).read_bytes()) for count in range(6)]
    data = write(folder, header, records).read_bytes()
    for size in range(ends[0], len(data) + 1):
        path = copy_with(folder, data[:size])
        whole = sum(end <= size for end in ends) - 1
        torn = size - ends[whole]
        with Ledger.open(path) as ledger:
            assert (len(ledger), ledger.torn_bytes) == (whole, torn)
        assert path.stat().st_size == size  # only looked at
        with Ledger.open(path, writable=True, durability="none") as ledger:
            assert (len(ledger), ledger.torn_bytes) == (whole, torn)
            assert path.stat().st_size == ends[whole]
            for record in records[whole:]:
                ledger.append(record)
        assert path.read_bytes() == data
        path.unlink()


def test_truncated_within_its_header_a_ledger_is_refused(folder: Path) -> None:
    data = write(folder, make_header(), []).read_bytes()
    for size in range(len(data)):
        path = copy_with(folder, data[:size])
        with pytest.raises(LedgerError):
            Ledger.open(path)
        path.unlink()


# One client and one number make records as alike in length as they get; many numbers make an abandoned record
# whose kind is damaged look like a torn one.
@pytest.mark.parametrize(("k", "clients"), [(1, 1), (64, 3)])
@pytest.mark.parametrize("abandoned", [(), (1, 3), (2, 3)])
def test_any_damaged_byte_is_noticed(folder: Path, k: int, clients: int, abandoned: tuple[int, ...]) -> None:
    header = make_header(k=k, clients=clients)
    records = [make_record(header, number, number in abandoned) for number in range(4)]
    data = write(folder, header, records).read_bytes()
    path = copy_with(folder, data)
    for place, flip in itertools.product(range(len(data)), (1, 3, 0x80, 0xFF)):
        damaged = bytearray(data)
        damaged[place] ^= flip
        path.write_bytes(damaged)
        with pytest.raises(LedgerError):
            Ledger.open(path, writable=True)
        assert path.read_bytes() == damaged


def test_an_error_names_the_record_and_what_failed(folder: Path) -> None:
    header = make_header()
    records = [make_record(header, number) for number in range(4)]
    path = write(folder, header, records)
    data = path.read_bytes()
    size = len(data) - len(write(folder, header, records[:3]).read_bytes())
    start = len(data) - 4 * size
    damaged = bytearray(data)
    damaged[start + 2 * size + 7] ^= 1
    with pytest.raises(LedgerError, match=r"record 2 .* CRC-32 is wrong"):
        Ledger.open(copy_with(folder, bytes(damaged)))
    with pytest.raises(LedgerError, match=r"record 1 .* does not continue the hash chain"):
        Ledger.open(copy_with(folder, data[: start + size] + data[start + 2 * size :]))
    with pytest.raises(LedgerError, match=r"record 4 .* unknown kind 0"):
        Ledger.open(copy_with(folder, data + bytes(size)))
    with pytest.raises(LedgerError, match="not a ledger of cyber0"):
        Ledger.open(copy_with(folder, b"PK\x03\x04 something else entirely"))
    with pytest.raises(LedgerError, match="No such file"):
        Ledger.open(folder / "nothing.bin")


def test_records_of_another_ledger_do_not_continue_this_one(folder: Path) -> None:
    one, other = make_header(seed=1), make_header(seed=2)
    bare = len(write(folder, one, []).read_bytes())
    first = write(folder, one, [make_record(one, 0)]).read_bytes()
    second = write(folder, other, [make_record(other, 0)]).read_bytes()
    assert len(first) == len(second)
    with pytest.raises(LedgerError, match="hash chain"):
        Ledger.open(copy_with(folder, first[:bare] + second[bare:]))


def test_a_stored_hash_tells_whether_a_ledger_extends_what_was_seen(folder: Path) -> None:
    header = make_header()
    ledger = Ledger.create(None, header)
    seen = [ledger.chain]
    for number in range(4):
        ledger.append(make_record(header, number, number == 2))
        seen.append(ledger.chain)
    assert [ledger.chain_at(rounds) for rounds in range(5)] == seen
    assert len(set(seen)) == 5
    with pytest.raises(LedgerError, match="4 records"):
        ledger.chain_at(5)


def test_twenty_thousand_rounds_take_about_a_megabyte(folder: Path) -> None:
    header = make_header(k=1, clients=8)
    sizes = [
        len(write(folder, header, [make_record(header, n) for n in range(count)]).read_bytes()) for count in (0, 9)
    ]
    assert 20_000 * (sizes[1] - sizes[0]) / 9 <= 1.1e6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 1}, "continues with round 0, not 1"),
        ({"values": np.zeros(2, np.float32)}, "not 3 of float32"),
        ({"values": np.zeros(3)}, "not 3 of float32"),
        ({"values": np.array([0, np.nan, 0], np.float32)}, "not all finite"),
        ({"values": np.array([0, np.inf, 0], np.float32)}, "not all finite"),
        ({"lr": float("nan")}, "learning rate is nan"),
        ({"reported": np.ones(7, np.bool_)}, "clients"),
        ({"trimmed": np.full(8, 4)}, "trim count"),
        ({"trimmed": np.full(8, -1)}, "trim count"),
    ],
)
def test_a_record_that_does_not_fit_is_not_appended(changes: dict[str, Any], reason: str) -> None:
    header = make_header(k=3)
    ledger = Ledger.create(None, header)
    with pytest.raises(LedgerError, match=reason):
        ledger.append(dataclasses.replace(make_record(header, 0), **changes))
    assert len(ledger) == 0
    ledger.append(make_record(header, 0))


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


def test_a_full_disk_leaves_whole_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_header()
    path = folder / f"{next(COUNTER)}.bin"
    with Ledger.create(path, header) as ledger:
        ledger.append(make_record(header, 0))
        good = path.stat().st_size

        class Full:
            closed = False

            def write(self, data: bytes) -> int:
                return int(file.write(data[:10]))

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        file = ledger._file
        monkeypatch.setattr(ledger, "_file", Full())
        with pytest.raises(LedgerError, match=r"record 1 can't be written .* only a part"):
            ledger.append(make_record(header, 1))
        monkeypatch.undo()
        assert path.stat().st_size == good
        ledger.append(make_record(header, 1))
    assert len(Ledger.open(path)) == 2


@pytest.mark.parametrize(("durability", "expected"), [("always", 5), ("batch", 2), ("none", 0)])
def test_durability_says_when_records_are_forced_to_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, durability: Any, expected: int
) -> None:
    header = make_header()
    ledger = Ledger.create(folder / f"{next(COUNTER)}.bin", header, durability=durability)
    now = ledger._synced_at
    synced: list[int] = []
    monkeypatch.setattr("cyber0.ledger.log.os.fsync", synced.append)
    for number, seconds in enumerate((0.1, 0.5, 1.2, 1.9, 2.3)):
        monkeypatch.setattr("cyber0.ledger.log.time.monotonic", lambda seconds=seconds: now + seconds)
        ledger.append(make_record(header, number))
    assert len(synced) == expected
    ledger.close()
    assert len(synced) == expected + 1
    with pytest.raises(LedgerError, match="durability = 'sometimes' is unknown"):
        Ledger.create(None, header, durability="sometimes")  # type: ignore[arg-type]


def test_kill_minus_nine_leaves_whole_records(folder: Path) -> None:
    path = folder / f"{next(COUNTER)}.bin"
    code = (
        "import sys; from test_ledger import *\n"
        "header = make_header(); ledger = Ledger.create(sys.argv[1], header); print(flush=True)\n"
        "while True: ledger.append(make_record(header, ledger.next_round)); print(flush=True)"
    )
    places = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
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


def test_a_ledger_of_another_version_is_refused_by_name() -> None:
    text = make_header().to_json()
    with pytest.raises(LedgerError, match="format version 2, and this cyber0 knows version 1"):
        Header.from_json(text.replace(b'"version":1', b'"version":2'))
    assert Header.from_json(text) == make_header()
    assert Header.from_json(text).to_json() == text


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b'{"version":1}', b'{"version":1,"k":2}', b"\xff\xfe"])
def test_a_header_that_makes_no_sense_is_refused(text: bytes) -> None:
    with pytest.raises(LedgerError):
        Header.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"k": 0},
        {"clients": 0},
        {"k": 2**12, "local_epochs": 2**12},
        {"codec": "int8"},
        {"dimension": 11},
        {"version": 2},
        {"config": {"function": print}},
        {"mu": float("nan")},
    ],
)
def test_an_impossible_header_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LedgerError):
        make_header(**changes)


def test_seed_zero_is_a_seed_and_a_round_decides_k_numbers_per_local_epoch() -> None:
    header = make_header(seed=0, k=4, local_epochs=3, projection_radius=2.5)
    assert Header.from_json(header.to_json()) == header
    assert header.numbers == 12


def test_trim_counts_add_up_over_decided_rounds() -> None:
    header = make_header(k=4, clients=3)
    ledger = Ledger.create(None, header)
    values = np.zeros(4, np.float32)
    ledger.append(Record(0, 0.1, values, np.array([True, True, False]), np.array([1, 4, 0])))
    ledger.append(Record(1, 0.1, None, np.array([True, False, False]), np.zeros(3, np.int64)))
    ledger.append(Record(2, 0.1, values, np.array([True, True, True]), np.array([0, 4, 2])))
    trimmed, sent = trim_counts(ledger)
    assert trimmed.tolist() == [1, 8, 2]
    assert sent.tolist() == [8, 8, 4]
