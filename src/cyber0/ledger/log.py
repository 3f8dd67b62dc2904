"""The ledger itself: records in a file or in memory, appended one by one, verified when it is opened."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, TypeAlias

from cyber0.errors import LedgerError
from cyber0.ledger.format1 import RecordFormat1
from cyber0.ledger.header import Header
from cyber0.ledger.opening import Reader, opening_of, read_at_most, read_opening
from cyber0.ledger.record import Record, RecordFormat
from cyber0.storage import LEDGER
from cyber0.storage.disk import MONOTONIC, OS_DISK, AnyPath, Clock, Disk, DiskFile, in_use
from cyber0.storage.memory import MemoryDisk

Durability: TypeAlias = Literal["always", "batch", "none"]
"""When appended records are forced to the disk: each at once, at most once a second, or only on `sync` and `close`."""

_SYNC_SECONDS: dict[Durability, float] = {"always": 0.0, "batch": 1.0, "none": math.inf}


class Ledger:
    """An append-only, hash-chained log of decisions, in a file or in memory. Made by `create` or `open`.

    A ledger is a context manager; every record is written in one piece, so that killing the process at any moment
    leaves whole records and at most one torn one, which `open` cuts off, as it does the zeros that a power cut leaves.

    Examples:
        What a run has decided, round by round:

        >>> import cyber0
        >>> settings = {"rounds": 3, "task": {"name": "logistic"}, "method": {"k": 4}}
        >>> summary = cyber0.run(settings, out="runs/ledger")
        >>> with Ledger.open("runs/ledger/ledger.bin") as ledger:
        ...     [(record.round, len(record.values)) for record in ledger]
        [(0, 4), (1, 4), (2, 4)]
    """

    def __init__(
        self, file: DiskFile, header: Header, opening: bytes, name: str, durability: Durability, clock: Clock
    ) -> None:
        if durability not in _SYNC_SECONDS:
            raise LedgerError(f"durability = {durability!r} is unknown: use one of {', '.join(_SYNC_SECONDS)}")
        self.header = header
        self.torn_bytes = 0
        self.zero_tail = False  # whether they are a tail of zeros
        self._file = file
        self._name = name
        self._durability = durability
        self._format = RecordFormat1(header) if header.format == 1 else RecordFormat(header)
        self._offsets = array("Q", [len(opening)])  # where each record starts, and where the next will
        self._chain = self._first = hashlib.sha256(opening).digest()
        self._writable = True
        self._clock = clock
        self._synced_at = clock()
        self._earlier: list[Callable[[], None]] = []
        self._lock = threading.Lock()  # the position in the file is shared by appending and reading

    @classmethod
    def create(
        cls, path: AnyPath | None, header: Header, *, durability: Durability = "batch", disk: Disk = OS_DISK,
        clock: Clock = MONOTONIC,
    ) -> Ledger:  # fmt: skip
        """Start a ledger in a new file, or in memory if `path` is None. An existing file is never overwritten.

        Args:
            path: The file.
            header: What its records are made by.
            durability: When records are forced to the disk.
            disk: Where the file is.
            clock: What "batch" counts seconds by.
        """
        opening = opening_of(header)
        if path is None:
            path, disk = "in memory", MemoryDisk()
        file = _create_file(disk, path, opening)
        try:
            return cls(file, header, opening, str(path), durability, clock)
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(
        cls, path: AnyPath, *, writable: bool = False, durability: Durability = "batch", disk: Disk = OS_DISK,
        clock: Clock = MONOTONIC,
    ) -> Ledger:  # fmt: skip
        """Open and verify a ledger. A torn or zero-filled tail is cut off (if `writable`) or ignored: `torn_bytes`.

        Raises:
            LedgerError: it can't be read, does not verify, or (if `writable`) is in use by another writer.
        """
        ledger, fault = cls._read_file(path, disk, clock, writable=writable, durability=durability)
        try:
            if fault is not None:
                raise ledger._damage(fault)
            if writable and ledger.torn_bytes:
                ledger._file.truncate(ledger.size)
                ledger.sync()
            return ledger
        except BaseException:
            ledger._file.close()
            raise

    @classmethod
    def inspect(cls, path: AnyPath, *, disk: Disk = OS_DISK) -> tuple[Ledger, str | None]:
        """Open a ledger for reading as far as it is good; return it and what is wrong with the next record, if any.

        Raises:
            LedgerError: its header does not verify, so nothing of it is known.
        """
        return cls._read_file(path, disk, MONOTONIC, writable=False, durability="none")

    @classmethod
    def _read_file(
        cls, path: AnyPath, disk: Disk, clock: Clock, *, writable: bool, durability: Durability
    ) -> tuple[Ledger, str | None]:
        try:
            file = disk.open(path, writable=writable)
        except OSError as error:
            raise LedgerError(f"can't open the ledger {path}: {error.strerror}") from error
        try:
            if writable:
                _lock(file, path)
            # A disk's file has the methods that are used of a raw stream, not all that typing asks for.
            reader = io.BufferedReader(file, 1 << 20)  # type: ignore[type-var]
            header, opening = read_opening(reader, path)
            ledger = cls(file, header, opening, str(path), durability, clock)
            ledger._writable = writable
            fault = ledger._verify(reader)
            reader.detach()
            return ledger, fault
        except BaseException:
            file.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the ledger was closed: it can then neither be read nor written."""
        return self._file.closed

    @property
    def size(self) -> int:
        """How many bytes of the file are good: the header and whole records."""
        return self._offsets[-1]

    @property
    def tail(self) -> str:
        """What the `torn_bytes` are, in words."""
        what = "at the end that were never written" if self.zero_tail else "of a torn last record"
        return f"{self.torn_bytes} bytes {what}"

    @property
    def repairable(self) -> str:
        """What `cyber0 repair` takes for this file: the folder of a run, or else the file itself."""
        folder, name = os.path.split(self._name)
        return folder or "." if name == LEDGER else self._name

    @property
    def chain(self) -> bytes:
        """The hash over the cores of all records so far; that of everything before the records if there are none."""
        return self._chain

    @property
    def next_round(self) -> int:
        """The round that the next record must be of: rounds count 0, 1, 2, ..., abandoned ones included."""
        return len(self)

    @property
    def rounds(self) -> int:
        """How many rounds the run is to have, by the last record or else the header; 0: no number was set."""
        return self._format.rounds_in(self._bytes_of(len(self) - 1)) if len(self) else self.header.rounds

    @property
    def last(self) -> Record | None:
        """The last record, if there is one."""
        return next(self.records(len(self) - 1), None) if len(self) else None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over the records of the rounds from `start` up to, not including, `stop` (or the last)."""
        for number in range(max(0, start), len(self) if stop is None else min(stop, len(self))):
            yield self._format.decode(self._bytes_of(number))

    def chunk(self, start: int, size: int) -> tuple[bytes, int]:
        """Return the records from round `start` on as they stand in the file, about `size` bytes, and how many.

        At least one record if there is one; `read_records` verifies and decodes them on the other side.
        """
        end = bisect_right(self._offsets, self._offsets[start] + size, start) - 1  # the last that ends in time
        stop = min(max(end, start + 1), len(self))
        return self._read(start, stop), stop - start

    def chain_at(self, rounds: int) -> bytes:
        """Return what `chain` was after `rounds` records: a ledger that extends another has the same."""
        if not 0 <= rounds <= len(self):
            raise LedgerError(f"the ledger {self._name} has {len(self)} records, so no hash after {rounds}")
        if rounds == len(self):
            return self._chain
        return self._format.chain_after(self._bytes_of(rounds - 1)) if rounds else self._first

    def append(self, record: Record) -> Record:
        """Write the record of the next round, in one piece; return it as it can be read back."""
        if self._file.closed or not self._writable:
            state = "closed" if self._file.closed else "open for reading only"
            raise LedgerError(f"the ledger {self._name} is {state}: open it with writable=True")
        if record.round != self.next_round:
            raise LedgerError(f"the ledger {self._name} continues with round {self.next_round}, not {record.round}")
        data = self._format.encode(record, self._chain)
        with self._lock:
            self._write(data)
            self._chain = self._format.chain_after(data)
            self._offsets.append(self._offsets[-1] + len(data))
        if self._clock() - self._synced_at >= _SYNC_SECONDS[self._durability]:
            self.sync()
        return self._format.sealed(record, data)

    def sync(self) -> None:
        """Force everything appended so far to the disk."""
        if self._writable and not self._file.closed:
            for earlier in self._earlier:
                earlier()
            force_to_disk(self._file, f"the ledger {self._name}")
            self._synced_at = self._clock()

    def sync_before(self, earlier: Callable[[], None]) -> None:
        """Have `earlier` called whenever this ledger is about to be forced to the disk."""
        self._earlier.append(earlier)

    def close(self) -> None:
        """Sync and close; a second time does nothing."""
        self.sync()
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bytes_of(self, number: int) -> bytes:
        return self._read(number, number + 1)

    def _read(self, first: int, stop: int) -> bytes:
        if self._file.closed:
            raise LedgerError(f"the ledger {self._name} is closed: open it again to read it")
        start, end = self._offsets[first], self._offsets[stop]
        with self._lock:
            self._file.seek(start)
            data = self._file.read(end - start)
        if len(data) != end - start:
            raise LedgerError(f"the ledger {self._name} became shorter while it was open: record {first} is cut off")
        return data

    def _write(self, data: bytes) -> None:
        start = self._offsets[-1]
        self._file.seek(start)
        try:
            written, reason = self._file.write(data), "the disk took only a part of it"
        except OSError as error:
            written, reason = -1, str(error.strerror)
        if written != len(data):
            with contextlib.suppress(OSError):  # if this fails too, the torn record is cut off on the next open
                self._file.truncate(start)
            raise LedgerError(
                f"record {len(self)} can't be written to the ledger {self._name}: {reason}; make room and resume"
            )

    def _verify(self, reader: Reader) -> str | None:
        """Check and index all records, from the first on; return what is wrong with the one where this ended.

        Of a torn or zero-filled tail nothing is wrong: `torn_bytes` counts it.
        """
        while label := reader.read(1):
            number, start = len(self), self._offsets[-1]
            size = self._format.sizes.get(label[0], 1)
            data = label + read_at_most(reader, size - 1)
            if len(data) < size:
                if self._format.mislabelled(data):
                    return "its kind says decided, and its CRC-32 abandoned"
                if not self._format.begins(data, number):
                    return f"it is cut off, and does not begin as that of round {number} does"
                self.torn_bytes = len(data)
                return None
            unknown = label[0] not in self._format.sizes
            fault = (
                f"it is of the unknown kind {label[0]}" if unknown else self._format.fault(data, number, self._chain)
            )
            if fault is not None:
                torn = data == b"\0" if unknown else self._format.zero_filled(data, number, self._chain)
                zeros = only_zeros(reader) if torn else None
                if zeros is None:
                    return fault
                self.torn_bytes, self.zero_tail = len(data) + zeros, True
                return None
            self._chain = self._format.chain_after(data)
            self._offsets.append(start + size)
        return None

    def _damage(self, fault: str) -> LedgerError:
        number, start = len(self), self._offsets[-1]
        return LedgerError(
            f"record {number} of the ledger {self._name} does not verify: {fault}. The {number} records before it, the "
            f"first {start} bytes, are good. Restore the file from a copy, or keep these records alone by `cyber0 "
            f"repair {self.repairable}`"
        )


def only_zeros(reader: Reader) -> int | None:
    """Return how many bytes follow, if all of them are zeros; None if one is not."""
    count = 0
    while part := reader.read(1 << 20):
        if part.count(0) != len(part):
            return None
        count += len(part)
    return count


def force_to_disk(file: DiskFile, name: str) -> None:
    """Flush what was written to the disk; name the file in the error if that fails."""
    try:
        file.sync()
    except OSError as error:
        raise LedgerError(
            f"{name} can't be forced to the disk: {error.strerror}; make room or replace the disk, and resume the run"
        ) from error


def read_records(header: Header, data: bytes, first: int, previous: bytes) -> list[Record]:
    """Verify and decode the records of rounds `first`, `first` + 1, ... that lie in `data` one after another.

    `previous` is what the chain has reached before them.

    Raises:
        LedgerError: they do not continue that hash, are damaged or cut off.
    """
    layout, place = RecordFormat(header), 0
    records: list[Record] = []
    while place < len(data):
        number = first + len(records)
        size = layout.sizes.get(data[place], 0)
        record = data[place : place + size]
        if not record or len(record) < size:
            raise LedgerError(f"the record of round {number} is cut off or of the unknown kind {data[place]}")
        fault = layout.fault(record, number, previous)
        if fault is not None:
            raise LedgerError(f"the record of round {number} does not verify: {fault}")
        records.append(layout.decode(record))
        previous = records[-1].chain
        place += size
    return records


def _create_file(disk: Disk, path: AnyPath, opening: bytes) -> DiskFile:
    """Create a file that holds `opening`, all of it or nothing, and return it open and locked."""
    try:
        return disk.create(path, opening)
    except FileExistsError:
        raise LedgerError(f"{path} exists already: resume it, or choose another folder") from None
    except BlockingIOError as error:
        raise in_use(path) from error
    except OSError as error:
        raise LedgerError(f"can't create the ledger {path}: {error.strerror}; is its folder there?") from error


def _lock(file: DiskFile, path: AnyPath) -> None:
    try:
        file.lock()
    except BlockingIOError as error:
        raise in_use(path) from error
