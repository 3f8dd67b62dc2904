"""The ledger: nothing is lost, nothing is changed unnoticed, and a crash costs at most the record being written."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import COUNTER, assert_same, copy_with, disk_with, make_header, make_record, write

from cyber0.errors import LedgerError
from cyber0.ledger import (
    Ledger,
    Record,
    first_chain,
    next_chain,
    read_records,
    trim_counts,
)
from cyber0.ledger.record import Decision, RecordFormat
from cyber0.protocol.messages import decode_decision, encode_decision


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("k", "clients"), [(1, 1), (3, 40)])
def test_a_tail_of_zeros_is_cut_off_like_a_torn_one(folder: Path, k: int, clients: int) -> None:
    """As after a power cut: the file has grown, and its last blocks were never written."""
    header = make_header(k=k, clients=clients)
    records = [make_record(header, number, number in (1, 3)) for number in range(5)]
    ends = [len(write(folder, header, records[:count]).read_bytes()) for count in range(6)]
    data = write(folder, header, records).read_bytes()
    for size, zeros in itertools.product(range(ends[0], len(data) + 1), (1, 7, ends[1] - ends[0], 5000)):
        left = data[:size] + bytes(zeros)
        disk = disk_with("a", left)
        whole = sum(left[:end] == data[:end] for end in ends) - 1  # a record may end in zeros of its own
        opened = Ledger.open("a", disk=disk)
        assert len(opened) == whole
        assert opened.torn_bytes == size + zeros - ends[whole]
        opened.close()
        assert disk.contents("a") == left  # only looked at
        with Ledger.open("a", writable=True, durability="none", disk=disk) as ledger:
            for record in records[whole:]:
                ledger.append(record)
        assert disk.contents("a") == data


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
        with pytest.raises(LedgerError, match="its scalars are not all finite"):
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
@pytest.mark.slow
@pytest.mark.parametrize(("k", "clients"), [(1, 1), (64, 3)])
@pytest.mark.parametrize("abandoned", [(), (1, 3), (2, 3)])
def test_any_damaged_byte_is_noticed(folder: Path, k: int, clients: int, abandoned: tuple[int, ...]) -> None:
    header = make_header(k=k, clients=clients)
    records = [make_record(header, number, number in abandoned) for number in range(4)]
    data = write(folder, header, records).read_bytes()
    for place, flip in itertools.product(range(len(data)), (1, 3, 0x80, 0xFF)):
        damaged = bytearray(data)
        damaged[place] ^= flip
        disk = disk_with("a", bytes(damaged))
        with pytest.raises(LedgerError):
            Ledger.open("a", writable=True, disk=disk)
        assert disk.contents("a") == damaged


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


@pytest.mark.slow
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
