"""The ledger: nothing is lost, nothing is changed unnoticed, and a crash costs at most the record being written."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyber0.errors import LedgerError
from cyber0.ledger import (
    MAGIC,
    Entry,
    Header,
    Ledger,
    Record,
    first_chain,
    next_chain,
    read_opening,
    read_records,
    trim_counts,
    without_fields,
)
from cyber0.ledger.record import Decision, RecordFormat
from cyber0.protocol.messages import decode_decision, encode_decision

COUNTER = itertools.count()


def make_header(**changes: Any) -> Header:
    settings: dict[str, Any] = {
        "seed": 2**64 - 1,
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
        "settings": {"rounds": 9, "task": {"name": "mnist", "shape": [1, 2]}, "ä": None},
    }
    return Header(**{**settings, **changes})


def make_record(header: Header, number: int, abandoned: bool = False) -> Record:
    generator = np.random.default_rng(number)
    reported = generator.random(header.clients) < 0.7
    trimmed = np.where(reported, generator.integers(0, header.scalars + 1, header.clients), 0)
    if abandoned:
        return Record(number, 0.5 / (number + 1), None, reported, np.zeros(header.clients, np.int64))
    values = generator.standard_normal(header.scalars).astype(np.float32)
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


@pytest.mark.parametrize(("k", "clients"), [(1, 1), (3, 40)])
def test_a_tail_of_zeros_is_cut_off_like_a_torn_one(folder: Path, k: int, clients: int) -> None:
    """As after a power cut: the file has grown, and its last blocks were never written."""
    header = make_header(k=k, clients=clients)
    records = [make_record(header, number, number in (1, 3)) for number in range(5)]
    ends = [len(write(folder, header, records[:count]).read_bytes()) for count in range(6)]
    data = write(folder, header, records).read_bytes()
    path = copy_with(folder, b"")
    for size, zeros in itertools.product(range(ends[0], len(data) + 1), (1, 7, ends[1] - ends[0], 5000)):
        left = data[:size] + bytes(zeros)
        path.write_bytes(left)
        whole = sum(left[:end] == data[:end] for end in ends) - 1  # a record may end in zeros of its own
        opened = Ledger.open(path)
        assert len(opened) == whole
        assert opened.torn_bytes == size + zeros - ends[whole]
        opened.close()
        assert path.stat().st_size == size + zeros  # only looked at
        with Ledger.open(path, writable=True, durability="none") as ledger:
            for record in records[whole:]:
                ledger.append(record)
        assert path.read_bytes() == data


def test_a_very_long_tail_of_zeros_is_cut_off_too(folder: Path) -> None:
    header = make_header()
    path = write(folder, header, [make_record(header, 0)])
    whole = path.stat().st_size
    os.truncate(path, whole + (3 << 20) + 5)
    with Ledger.open(path, writable=True) as ledger:
        assert (len(ledger), ledger.torn_bytes) == (1, (3 << 20) + 5)
    assert path.stat().st_size == whole


@pytest.mark.parametrize("zeros", [1, 4, 60, 5000])
def test_zeros_excuse_no_damage_before_them(folder: Path, zeros: int) -> None:
    """Not a damaged record in the middle, not one of another round or chain, and no byte after the zeros."""
    header = make_header(k=4)
    records = [make_record(header, number) for number in range(4)]
    data = write(folder, header, records).read_bytes()
    size = len(data) - len(write(folder, header, records[:3]).read_bytes())
    begin, path = len(data) - size, copy_with(folder, b"")
    for place in range(len(data) - 2 * size, begin):  # the last but one
        damaged = bytearray(data + bytes(zeros))
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"record 2 .* does not verify"):
            Ledger.open(path, writable=True)
        assert path.read_bytes() == damaged
    cut = data[: begin + size // 2] + bytes(size + zeros)
    for wrong in (cut + b"\1", data[:begin] + bytes(zeros) + b"\1"):
        path.write_bytes(wrong)
        with pytest.raises(LedgerError, match=r"record 3 .* does not verify"):
            Ledger.open(path)
    codec, chain = RecordFormat(header), Ledger.open(copy_with(folder, data)).chain
    right = make_record(header, 4)
    of_round_9 = dataclasses.replace(right, round=9)
    for forged, previous in ((of_round_9, chain), (right, bytes(32))):
        path.write_bytes(data + codec.encode(forged, previous)[:-3] + bytes(3 + zeros))
        with pytest.raises(LedgerError, match=r"record 4 .* does not verify"):
            Ledger.open(path)
    path.write_bytes(data + codec.encode(right, chain)[:-3] + bytes(3 + zeros))
    assert len(Ledger.open(path)) == 4


def test_a_whole_record_is_no_torn_one_however_many_zeros_follow(folder: Path) -> None:
    """Neither one that ends in a zero by chance, nor an abandoned one whose kind became "decided"."""
    header = make_header(k=100)
    start = write(folder, header, []).read_bytes()
    good = write(folder, header, [make_record(header, 0, abandoned=True)]).read_bytes()
    damaged = bytearray(good)
    damaged[len(start)] = 1
    for zeros in (0, 1, 390, 402, 403, 404, 5000):
        with pytest.raises(LedgerError, match=r"record 0 .* does not verify"):
            Ledger.open(copy_with(folder, bytes(damaged) + bytes(zeros)))
    codec, chain = RecordFormat(header), hashlib.sha256(start).digest()
    record = make_record(header, 0)
    for lr in range(2000):  # until the CRC of a record whose scalars are not finite ends in a zero
        data = bytearray(codec.encode(dataclasses.replace(record, lr=float(lr)), chain)[:-4])
        data[17:21] = np.float32(np.inf).tobytes()
        core = len(data) - 32 - codec.bitmap_bytes - codec.trim_bytes
        data[-32:] = hashlib.sha256(chain + data[:core]).digest()
        data += zlib.crc32(data).to_bytes(4, "little")
        if data[-1] == 0:
            break
    assert data[-1] == 0
    for zeros in (0, 7):
        with pytest.raises(LedgerError, match="its numbers are not all finite"):
            Ledger.open(copy_with(folder, start + bytes(data) + bytes(zeros)))


def test_a_torn_record_begins_as_that_of_the_next_round(folder: Path) -> None:
    header = make_header(k=8)
    data = write(folder, header, [make_record(header, number) for number in range(2)]).read_bytes()
    for tail in (b"\x01", b"\x01\x02", b"\x01\x02\0\0\0\xff", b"\x02\x02" + bytes(7)):
        assert Ledger.open(copy_with(folder, data + tail)).torn_bytes == len(tail)
    for tail in (b"\x01\x03", b"\x01" + b"\xff" * 20, b"\x02\x02\0\0\1"):
        with pytest.raises(LedgerError, match="does not begin as that of round 2 does"):
            Ledger.open(copy_with(folder, data + tail))


def test_a_ledger_is_inspected_as_far_as_it_is_good(folder: Path) -> None:
    header = make_header()
    data = write(folder, header, [make_record(header, number) for number in range(4)]).read_bytes()
    good = len(write(folder, header, [make_record(header, number) for number in range(2)]).read_bytes())
    damaged = bytearray(data)
    damaged[good + 9] ^= 1
    ledger, fault = Ledger.inspect(copy_with(folder, bytes(damaged)))
    assert (len(ledger), ledger.size, fault) == (2, good, "its CRC-32 is wrong")
    assert [record.round for record in ledger] == [0, 1]
    with pytest.raises(LedgerError, match="open for reading only"):
        ledger.append(make_record(header, 2))
    ledger, fault = Ledger.inspect(copy_with(folder, data[:-5]))
    assert (len(ledger), ledger.torn_bytes, fault) == (3, len(data) - 5 - ledger.size, None)


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
    with pytest.raises(LedgerError, match=r"record 4 .* unknown kind 7"):
        Ledger.open(copy_with(folder, data + b"\7" + bytes(size)))
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


def test_twenty_thousand_rounds_take_a_megabyte_and_a_half(folder: Path) -> None:
    header = make_header(k=1, clients=8)
    sizes = [
        len(write(folder, header, [make_record(header, n) for n in range(count)]).read_bytes()) for count in (0, 9)
    ]
    assert 20_000 * (sizes[1] - sizes[0]) / 9 == 1.5e6


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
        ({"reported": np.arange(8) != 5, "trimmed": np.ones(8, np.int64)}, "client 5 has a trim count"),
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


def test_a_ledger_is_made_where_the_file_system_has_no_hard_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    place = folder / "without-links"
    place.mkdir()
    monkeypatch.setattr("cyber0.ledger.log.os.link", refuse)
    with Ledger.create(place / "ledger.bin", make_header()) as ledger:
        assert len(ledger) == 0
    assert [path.name for path in place.iterdir()] == ["ledger.bin"]


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
    here = Path(__file__).parent
    places = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
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


def test_a_ledger_of_another_format_is_refused_by_name(folder: Path) -> None:
    text = make_header().to_json()
    with pytest.raises(LedgerError, match="format 3, and this cyber0 knows formats 1 and 2: update cyber0"):
        Header.from_json(text.replace(b'"format":2', b'"format":3'))
    data = bytearray(write(folder, make_header(), []).read_bytes())
    data[len(MAGIC)] = 3
    with pytest.raises(LedgerError, match="format 3, and"):
        Ledger.open(copy_with(folder, bytes(data)))
    assert Header.from_json(text) == make_header()
    assert Header.from_json(text).to_json() == text


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b'{"format":2}', b'{"format":2,"k":2}', b"\xff\xfe"])
def test_a_header_that_makes_no_sense_is_refused(text: bytes) -> None:
    with pytest.raises(LedgerError):
        Header.from_json(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
        ({"seed": 1.5}, r"seed = 1\.5"),
        ({"seed": True}, "seed = True"),
        ({"k": 0}, "k = 0"),
        ({"k": 2.5}, r"k = 2\.5 .* a whole number"),
        ({"k": "3"}, "k = '3'"),
        ({"local_epochs": 1.0}, r"local_epochs = 1\.0"),
        ({"clients": 0}, "clients = 0"),
        ({"clients": 2**24 + 1}, "clients = 16777217"),
        ({"k": 2**12, "local_epochs": 2**12}, r"local_epochs \* k = 16777216"),
        ({"codec": "int8"}, "codec = 'int8' .* one of float32, bfloat16, log8"),
        ({"codec": ["float32"]}, r"codec = \['float32'\]"),
        ({"seed_mode": None}, "seed_mode = None"),
        ({"optimizer": "adam"}, "optimizer 'adam' .* known are sgd in version 1: update cyber0"),
        ({"rounding": "nearest"}, "rounding 'nearest' .* known are stochastic in version 1"),
        ({"distribution": ["gaussian"]}, "distribution .*gaussian.* unknown"),
        ({"id": "ab"}, "id = 'ab' .* 32 hexadecimal digits"),
        ({"format": 3}, "format = 3"),
        ({"distribution": "uniform"}, "distribution 'uniform' .* unknown here; known are gaussian in version 1"),
        ({"estimator": "guess"}, "estimator = 'guess' .* two_point"),
        ({"lr_schedule": ""}, "lr_schedule = '' .* constant"),
        ({"lr_schedule": 1}, "lr_schedule = 1 .* constant"),
        ({"layout": ()}, "no coordinates"),
        ({"settings": {"function": print}}, "can't be written as JSON"),
        ({"settings": []}, r"settings = \[\] .* a table"),
        ({"settings": {"method": "on"}}, r"settings\.method = 'on' .* a table"),
        ({"settings": {"seed": 3}}, "a setting twice: seed"),
        ({"settings": {"method": {"mu": 1e-3}}}, r"a setting twice: method\.mu"),
        ({"mu": "x"}, "mu = 'x' .* a finite number, at least 0"),
        ({"mu": float("nan")}, "mu = nan"),
        ({"mu": -1e-3}, r"mu = -0\.001"),
        ({"mu": 0}, 'mu = 0 .* above 0 with estimator = "two_point"'),
        ({"mu": 10**400}, "mu = 1000"),
        ({"lr": 0.0}, r"lr = 0\.0"),
        ({"lr": float("inf")}, "lr = inf"),
        ({"lr": None}, "lr = None"),
        ({"projection_radius": 0}, "projection_radius = 0 .* above 0, or null"),
        ({"weights_digest": "ab"}, "weights_digest = 'ab' .* 64 hexadecimal digits"),
        ({"rest_digest": 7}, "rest_digest = 7"),
        ({"layout": 3}, "layout = 3"),
        ({"layout": ({"name": "w"},)}, "layout = .* a list of entries"),
        ({"layout": (Entry("w", (6,), "float32", 0), Entry("b", (6,), "float32", 5))}, "'b' .* at coordinate 5"),
        ({"layout": (Entry("w", (6,), "float32", 0), Entry("b", (5,), "float32", 7))}, "'b' .* at coordinate 7"),
        ({"layout": (Entry("w", (6,), "float32", 0), Entry("w", (6,), "float32", 6))}, "two weights are named 'w'"),
    ],
)
def test_an_impossible_header_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LedgerError, match=named):
        make_header(**changes)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ((5, (2,), "float32", 0), "layout.name = 5"),
        (("w", (2.5,), "float32", 0), r"layout\.shape of 'w' = \(2\.5,\)"),
        (("w", (-1,), "float32", 0), r"layout\.shape of 'w' = \(-1,\)"),
        (("w", 4, "float32", 0), r"layout\.shape = 4"),
        (("w", (2**63,), "float32", 0), r"layout\.shape of 'w' = \(9223372036854775808,\)"),
        (("w", (2**32, 2**31), "float32", 0), r"layout\.shape of 'w' .* fewer than 2\*\*63 coordinates"),
        (("w", (10**4000,) * 900, "float32", 0), r"layout\.shape of 'w' = "),
        (("w", (1,) * 65, "float32", 0), r"layout\.shape of 'w' = "),
        (("w", (2,), "int8", 0), r"layout\.dtype of 'w' = 'int8' .* float32, float16, bfloat16"),
        (("w", (2,), "float32", -1), r"layout\.offset of 'w' = -1"),
        (("w", (2,), "float32", "0"), r"layout\.offset of 'w' = '0'"),
    ],
)
def test_an_impossible_weight_in_the_layout_is_refused_by_name(entry: tuple[Any, ...], named: str) -> None:
    with pytest.raises(LedgerError, match=named):
        Entry(*entry)


def in_json(text: bytes, name: str, value: object) -> bytes:
    """Return a header's JSON with one key replaced."""
    found = {**json.loads(text), name: value}
    return json.dumps(found, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        (
            "distribution",
            {"name": "low_rank", "options": {"rank": 2}, "version": 1},
            "'low_rank' in version 1 .* update",
        ),
        ("distribution", {"name": "gaussian", "options": {}, "version": 2}, "'gaussian' in version 2 .* unknown here"),
        ("distribution", {"name": "gaussian", "options": {}, "version": True}, "'gaussian' in version True"),
        ("distribution", {"name": "gaussian", "options": {}, "version": None}, "'gaussian' in version None"),
        ("distribution", {"name": "gaussian", "options": {"rank": 2}, "version": 1}, "takes no options, got .*rank"),
        ("optimizer", {"name": "adam", "options": {}, "version": 1}, "optimizer 'adam' in version 1 .* known are sgd"),
        ("rounding", {"name": "stochastic", "options": {}, "version": 9}, "rounding 'stochastic' in version 9"),
        ("rounding", "stochastic", "an object of name, options and version"),
        ("extensions", {"privacy": {"version": 1}}, "extensions 'privacy', which this cyber0 does not know: update"),
        ("extensions", [], r"extensions \[\]"),
        ("surprise", 1, r"missing or too many: \['surprise'\]"),
    ],
)
def test_what_a_later_version_may_add_is_refused_by_name(name: str, value: object, named: str) -> None:
    text = make_header().to_json()
    assert Header.from_json(text) == make_header()
    with pytest.raises(LedgerError, match=named):
        Header.from_json(in_json(text, name, value))


def test_a_header_has_each_setting_once_and_knows_them_all() -> None:
    settings = {"rounds": 9, "method": {"batch_size": 4}, "task": {"name": "mnist"}}
    config = make_header(settings=settings, projection_radius=2.0).config
    assert config["rounds"] == 9 and config["task"] == {"name": "mnist"} and config["seed"] == 2**64 - 1
    assert config["method"]["batch_size"] == 4 and config["method"]["projection_radius"] == 2.0
    assert config["federation"] == {"clients": 8} and config["serve"] == {"codec": "float32", "seed_mode": "shared"}
    assert make_header(settings=settings).config["method"]["projection_radius"] == 0.0
    assert make_header(settings=without_fields(config), projection_radius=2.0).config == config
    assert make_header(settings={}).config == {}
    assert settings["method"] == {"batch_size": 4}


def test_a_record_says_how_many_rounds_the_run_was_to_have() -> None:
    ledger = Ledger.create(None, make_header())
    assert ledger.rounds == 9  # by the header
    for number, rounds in ((0, 9), (1, 20), (2, 0)):
        ledger.append(dataclasses.replace(make_record(ledger.header, number), rounds=rounds))
        assert ledger.rounds == rounds
    assert [record.rounds for record in ledger] == [9, 20, 0]


@pytest.mark.parametrize("abandoned", [False, True])
def test_who_receives_a_decision_computes_the_chain(abandoned: bool) -> None:
    header = make_header(k=3)
    ledger = Ledger.create(None, header)
    before = ledger.chain
    record = ledger.append(dataclasses.replace(make_record(header, 0, abandoned), rounds=7))
    decision = decode_decision(encode_decision(Decision(0, record.lr, record.values, record.details, 7)), 3)
    assert next_chain(before, decision) == next_chain(before, record) == record.chain == ledger.chain
    for other in (
        {"round": 1},
        {"lr": 0.7},
        {"rounds": 8},
        {"details": bytes(16)},
        {"values": np.zeros(3, np.float32)},
    ):
        assert next_chain(before, dataclasses.replace(decision, **other)) != ledger.chain  # type: ignore[arg-type]
    found = ledger.last
    assert found is not None and (found.chain, found.details, found.rounds) == (record.chain, record.details, 7)


def test_details_that_do_not_belong_to_a_record_are_noticed(folder: Path) -> None:
    """Even with the chain, which does not cover them, and the CRC made anew."""
    header = make_header(k=3)
    path = write(folder, header, [make_record(header, 0)])
    data = bytearray(path.read_bytes())
    data[-37] ^= 1  # the last byte of the details, before the chain and the CRC
    body = len(write(folder, header, []).read_bytes())
    data[-4:] = zlib.crc32(bytes(data[body:-4])).to_bytes(4, "little")
    with pytest.raises(LedgerError, match=r"record 0 .* .digest of the details."):
        Ledger.open(copy_with(folder, bytes(data)))


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_deeply_nested_settings_are_refused_and_crash_nothing(depth: int) -> None:
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    with pytest.raises(LedgerError, match="nested too deeply"):
        Header.from_json(make_header(settings={}).to_json().replace(b'"settings":{}', b'"settings":' + nested))
    with pytest.raises(LedgerError, match="can't be read"):  # for its depth, or where Python reads it, for its end
        Header.from_json(b"[" * depth)
    config: dict[str, Any] = {}
    for _ in range(depth):
        config = {"a": config}
    with pytest.raises(LedgerError, match="nested too deeply"):
        make_header(settings=config)


def test_settings_may_be_nested_to_a_depth_that_does_not_depend_on_python() -> None:
    nested: Any = 1
    for _ in range(15):
        nested = [nested]
    make_header(settings={"a": nested})
    with pytest.raises(LedgerError, match="nested too deeply: 16 levels are the most"):
        make_header(settings={"a": [nested]})


@pytest.mark.parametrize("indent", [None, 1])
def test_a_header_that_is_not_canonical_json_is_refused(folder: Path, indent: int | None) -> None:
    found = json.loads(make_header().to_json())
    text = json.dumps(found, indent=indent, sort_keys=True).encode()
    opening = MAGIC + b"\x02" + len(text).to_bytes(4, "little") + text
    path = folder / "ledger.bin"
    path.write_bytes(opening + zlib.crc32(opening).to_bytes(4, "little"))
    with pytest.raises(LedgerError, match="not canonical JSON"):
        Ledger.open(path)


def test_a_header_whose_length_is_damaged_asks_for_no_memory(folder: Path) -> None:
    data = bytearray(write(folder, make_header(), []).read_bytes())
    data[len(MAGIC) + 1 : len(MAGIC) + 5] = b"\xff" * 4
    asked = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    with pytest.raises(LedgerError, match="claims 4294967295 bytes; 67108864 are the most"):
        read_opening(Watched(data), "x")
    data[len(MAGIC) + 1 : len(MAGIC) + 5] = (1 << 26).to_bytes(4, "little")
    with pytest.raises(LedgerError, match="cut off: 67108864 bytes were announced"):
        read_opening(Watched(data), "x")
    assert max(asked) <= 1 << 20


def test_seed_zero_is_a_seed_and_a_round_decides_k_numbers_per_local_epoch() -> None:
    header = make_header(seed=0, k=4, local_epochs=3, projection_radius=2.5)
    assert Header.from_json(header.to_json()) == header
    assert header.scalars == 12


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


def test_records_that_speak_of_many_clients_take_little_more_memory_than_their_bytes() -> None:
    header = make_header(clients=2**18 + 3, k=2**12)
    records = [make_record(header, 0), make_record(header, 1, abandoned=True), make_record(header, 2)]
    ledger = Ledger.create(None, header)
    for record in records:
        ledger.append(record)
    data, count = ledger.chunk(0, 1 << 30)
    assert count == 3
    tracemalloc.start()
    try:
        read = read_records(header, data, 0, first_chain(header))
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)
        for found, expected in zip(read, records, strict=True):
            assert_same(found, expected)  # 9 bytes a client, which has 14 bits in a message
        assert tracemalloc.get_traced_memory()[1] < 30 * len(data)
    finally:
        tracemalloc.stop()
    changed = dataclasses.replace(read[0], lr=0.25)
    assert changed.lr == 0.25
    assert np.array_equal(changed.trimmed, records[0].trimmed)
