"""The ledger: an append-only, hash-chained log of decisions. The model is its starting point plus this file.

    file      magic | u32 length | header as canonical JSON | u32 CRC-32 | record | record | ...
    record    u8 kind | u32 round | f64 lr | n x float32 | who reported | who was trimmed | SHA-256 | u32 CRC-32

All numbers are little-endian; n = local epochs * k. Who reported is one bit per client, who was trimmed (in how many of
the n numbers) as many bits per client as n needs. The SHA-256 is that of the whole previous record, or of everything
before the first record. A record of kind 2 (abandoned) holds neither numbers nor trim counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import LedgerError

try:
    import fcntl
except ImportError:  # not on Windows, where writers are then not kept apart
    fcntl = None  # type: ignore[assignment]

Durability: TypeAlias = Literal["always", "batch", "none"]
"""When appended records are forced to the disk: each at once, at most once a second, or only on `sync` and `close`."""

VERSION = 1
MAGIC = b"CYBER0\x00\x01"
DECIDED = 1
ABANDONED = 2

_SYNC_SECONDS: dict[Durability, float] = {"always": 0.0, "batch": 1.0, "none": math.inf}
_NUMBERS_LIMIT = 1 << 24
_WORD = struct.Struct("<I")
_HEAD = struct.Struct("<BId")
_HASH_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """Where one weight tensor lies in the flat vector w; `offset` counts coordinates, `dtype` is e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(length) for length in self.shape))

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Header:
    """All that, with the starting weights, turns the records into a model."""

    seed: int
    dimension: int
    layout: tuple[Entry, ...]
    distribution: str
    k: int
    local_epochs: int
    mu: float
    estimator: str
    lr: float
    lr_schedule: str
    projection_radius: float | None
    weights_digest: str
    rest_digest: str
    clients: int
    config: dict[str, Any] = field(default_factory=dict)
    codec: str = "float32"
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_version(self.version)
        if not 0 <= self.seed < 1 << 64:
            raise LedgerError(f"seed = {self.seed} does not fit 64 bits: use 0 to 2**64 - 1")
        for name in ("dimension", "k", "local_epochs", "clients"):
            if getattr(self, name) < 1:
                raise LedgerError(f"{name} = {getattr(self, name)} in a ledger's header: must be at least 1")
        if self.numbers >= _NUMBERS_LIMIT:
            raise LedgerError(f"local_epochs * k = {self.numbers} must be less than 2**24, the number of directions")
        if self.codec != "float32":
            raise LedgerError(f"codec = {self.codec!r} is not known to this cyber0: use 'float32'")
        for entry in self.layout:
            if entry.offset < 0 or entry.offset + entry.size > self.dimension:
                raise LedgerError(f"weight {entry.name!r} does not lie within the {self.dimension} coordinates")
        object.__setattr__(self, "layout", tuple(self.layout))
        try:  # as it will be read back, so that a header equals itself after a journey through a file
            object.__setattr__(self, "config", json.loads(json.dumps(self.config, allow_nan=False)))
            self.to_json()
        except (TypeError, ValueError) as error:
            raise LedgerError(f"a ledger's header can't be written as JSON: {error}") from error

    @property
    def numbers(self) -> int:
        """How many numbers a round decides: k for each local epoch."""
        return self.k * self.local_epochs

    def to_json(self) -> bytes:
        """Return the canonical JSON: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Header:
        """Return the header that `to_json` wrote."""
        try:
            found: dict[str, Any] = json.loads(text)
            _check_version(found["version"])
            unknown = set(found) ^ {item.name for item in fields(cls)}
            if unknown:
                raise LedgerError(f"a ledger's header has these keys missing or too many: {sorted(unknown)}")
            return cls(**{**found, "layout": tuple(Entry(**entry) for entry in found["layout"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"a ledger's header can't be read: {error!r}") from error


def _check_version(version: object) -> None:
    if version != VERSION:
        raise LedgerError(
            f"the ledger is of format version {version!r}, and this cyber0 knows version {VERSION}: "
            "use the cyber0 that wrote it"
        )


@dataclass(frozen=True, eq=False)
class Record:
    """One round: what was decided (None: abandoned), who reported, and how often each client was trimmed."""

    round: int
    lr: float
    values: NDArray[np.float32] | None
    reported: NDArray[np.bool_]
    trimmed: NDArray[np.int64]


class _Codec:
    """Turns records into bytes and back, for one header."""

    def __init__(self, header: Header) -> None:
        self.clients = header.clients
        self.numbers = header.numbers
        self.shifts = np.arange(self.numbers.bit_length())
        self.bitmap_bytes = -(-self.clients // 8)
        self.trim_bytes = -(-self.clients * len(self.shifts) // 8)
        bare = _HEAD.size + self.bitmap_bytes + _HASH_BYTES + _WORD.size
        self.sizes = {DECIDED: bare + 4 * self.numbers + self.trim_bytes, ABANDONED: bare}

    def encode(self, record: Record, previous: bytes) -> bytes:
        self._check(record)
        kind = ABANDONED if record.values is None else DECIDED
        parts = [_HEAD.pack(kind, record.round, record.lr)]
        bitmap = np.packbits(record.reported, bitorder="little").tobytes()
        if record.values is None:
            parts.append(bitmap)
        else:
            bits = (record.trimmed[:, None] >> self.shifts & 1).astype(np.uint8)
            trims = np.packbits(bits, bitorder="little").tobytes()
            parts += [record.values.astype("<f4", copy=False).tobytes(), bitmap, trims]
        body = b"".join([*parts, previous])
        return body + _WORD.pack(zlib.crc32(body))

    def decode(self, data: bytes) -> Record:
        """Return the record in `data`, which has been verified."""
        kind, number, lr = _HEAD.unpack_from(data)
        place = _HEAD.size
        values: NDArray[np.float32] | None = None
        trimmed = np.zeros(self.clients, np.int64)
        if kind == DECIDED:
            values = np.frombuffer(data, "<f4", self.numbers, place).astype(np.float32)
            place += 4 * self.numbers
        bitmap = np.frombuffer(data, np.uint8, self.bitmap_bytes, place)
        reported = np.unpackbits(bitmap, count=self.clients, bitorder="little").astype(np.bool_)
        place += self.bitmap_bytes
        if kind == DECIDED:
            packed = np.frombuffer(data, np.uint8, self.trim_bytes, place)
            bits = np.unpackbits(packed, count=self.clients * len(self.shifts), bitorder="little")
            trimmed = bits.reshape(self.clients, -1) @ (1 << self.shifts)
        return Record(number, lr, values, reported, trimmed)

    def fault(self, data: bytes, number: int, previous: bytes) -> str | None:
        """Return what is wrong with a record of full length, if anything is."""
        end = len(data) - _WORD.size
        if _WORD.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
            return "its CRC-32 is wrong"
        if data[end - _HASH_BYTES : end] != previous:
            return "it does not continue the hash chain"
        kind, found, lr = _HEAD.unpack_from(data)
        if found != number:
            return f"it is of round {found}"
        if not math.isfinite(lr):
            return f"its learning rate is {lr}"
        if kind == DECIDED and not np.isfinite(np.frombuffer(data, "<f4", self.numbers, _HEAD.size)).all():
            return "its numbers are not all finite"
        return None

    def mislabelled(self, tail: bytes) -> bool:
        """Say whether a record that seems cut off is a whole abandoned one whose kind was damaged."""
        body = tail[: self.sizes[ABANDONED]]
        if len(body) < self.sizes[ABANDONED]:
            return False
        body = bytes([ABANDONED]) + body[1:]
        return bool(_WORD.unpack(body[-_WORD.size :])[0] == zlib.crc32(body[: -_WORD.size]))

    def _check(self, record: Record) -> None:
        where = f"round {record.round} can't be appended to the ledger:"
        if not math.isfinite(record.lr):
            raise LedgerError(f"{where} its learning rate is {record.lr}")
        if record.reported.shape != (self.clients,) or record.trimmed.shape != (self.clients,):
            raise LedgerError(f"{where} it speaks of {record.reported.shape} clients, the header of {self.clients}")
        if record.values is None:
            return
        if record.values.shape != (self.numbers,) or record.values.dtype != np.float32:
            shape, dtype = record.values.shape, record.values.dtype
            raise LedgerError(f"{where} it has {dtype} numbers of shape {shape}, not {self.numbers} of float32")
        if not np.isfinite(record.values).all():
            raise LedgerError(f"{where} its numbers are not all finite; abandon such a round")
        if record.trimmed.min() < 0 or record.trimmed.max() > self.numbers:
            raise LedgerError(f"{where} a trim count is not within 0 and {self.numbers}")


class Ledger:
    """An append-only, hash-chained log of decisions, in a file or in memory. Made by `create` or `open`.

    A ledger is a context manager; every record is written in one piece, so that killing the process at any moment
    leaves whole records and at most one torn one, which `open` cuts off.
    """

    def __init__(
        self, file: io.FileIO | io.BytesIO, header: Header, opening: bytes, name: str, durability: Durability
    ) -> None:
        if durability not in _SYNC_SECONDS:
            raise LedgerError(f"durability = {durability!r} is unknown: use one of {', '.join(_SYNC_SECONDS)}")
        self.header = header
        self.torn_bytes = 0
        self._file = file
        self._name = name
        self._durability = durability
        self._codec = _Codec(header)
        self._offsets = array("Q", [len(opening)])  # where each record starts, and where the next will
        self._chain = hashlib.sha256(opening).digest()
        self._writable = True
        self._synced_at = time.monotonic()
        self._lock = threading.Lock()  # the position in the file is shared by appending and reading

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None, header: Header, *, durability: Durability = "batch") -> Ledger:
        """Start a ledger in a new file, or in memory if `path` is None. An existing file is never overwritten."""
        text = header.to_json()
        opening = MAGIC + _WORD.pack(len(text)) + text
        opening += _WORD.pack(zlib.crc32(opening))
        if path is None:
            return cls(io.BytesIO(opening), header, opening, "in memory", durability)
        file = _create_file(Path(path), opening)
        try:
            return cls(file, header, opening, str(path), durability)
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False, durability: Durability = "batch") -> Ledger:
        """Open and verify a ledger. A torn last record is cut off (if `writable`) or ignored; see `torn_bytes`.

        Raises:
            LedgerError: it can't be read, does not verify, or (if `writable`) is in use by another writer.
        """
        try:
            file = io.FileIO(path, "r+" if writable else "r")
        except OSError as error:
            raise LedgerError(f"can't open the ledger {path}: {error.strerror}") from error
        try:
            if writable:
                _lock_file(file, path)
            reader = io.BufferedReader(file, 1 << 20)
            header, opening = _read_opening(reader, path)
            ledger = cls(file, header, opening, str(path), durability)
            ledger._writable = writable
            ledger._verify(reader)
            reader.detach()
            if writable and ledger.torn_bytes:
                file.truncate(ledger._offsets[-1])
                ledger.sync()
            return ledger
        except BaseException:
            file.close()
            raise

    @property
    def chain(self) -> bytes:
        """The SHA-256 of the last record; of everything before the records if there are none."""
        return self._chain

    @property
    def next_round(self) -> int:
        """The round that the next record must be of: rounds count 0, 1, 2, ..., abandoned ones included."""
        return len(self)

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
            yield self._codec.decode(self._bytes_of(number))

    def chain_at(self, rounds: int) -> bytes:
        """Return what `chain` was when there were `rounds` records: who kept that can tell whether this extends it."""
        if not 0 <= rounds <= len(self):
            raise LedgerError(f"the ledger {self._name} has {len(self)} records, so no hash after {rounds}")
        if rounds == len(self):
            return self._chain
        return self._bytes_of(rounds)[-_WORD.size - _HASH_BYTES : -_WORD.size]

    def append(self, record: Record) -> None:
        """Write the record of the next round, in one piece."""
        if self._file.closed or not self._writable:
            state = "closed" if self._file.closed else "open for reading only"
            raise LedgerError(f"the ledger {self._name} is {state}: open it with writable=True")
        if record.round != self.next_round:
            raise LedgerError(f"the ledger {self._name} continues with round {self.next_round}, not {record.round}")
        data = self._codec.encode(record, self._chain)
        with self._lock:
            self._write(data)
            self._chain = hashlib.sha256(data).digest()
            self._offsets.append(self._offsets[-1] + len(data))
        if time.monotonic() - self._synced_at >= _SYNC_SECONDS[self._durability]:
            self.sync()

    def sync(self) -> None:
        """Force everything appended so far to the disk."""
        if isinstance(self._file, io.FileIO) and self._writable and not self._file.closed:
            os.fsync(self._file.fileno())
            self._synced_at = time.monotonic()

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
        if self._file.closed:
            raise LedgerError(f"the ledger {self._name} is closed: open it again to read it")
        start, end = self._offsets[number], self._offsets[number + 1]
        with self._lock:
            self._file.seek(start)
            data = self._file.read(end - start)
        if len(data) != end - start:
            raise LedgerError(f"the ledger {self._name} became shorter while it was open: record {number} is cut off")
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
            raise LedgerError(f"record {len(self)} can't be written to the ledger {self._name}: {reason}")

    def _verify(self, reader: BinaryIO) -> None:
        """Check and index all records, from the first on."""
        while label := reader.read(1):
            number, start = len(self), self._offsets[-1]
            size = self._codec.sizes.get(label[0])
            if size is None:
                raise self._damage(f"it is of the unknown kind {label[0]}")
            data = label + reader.read(size - 1)
            if len(data) < size:
                if self._codec.mislabelled(data):
                    raise self._damage("its kind says decided, and its CRC-32 abandoned")
                self.torn_bytes = len(data)
                return
            fault = self._codec.fault(data, number, self._chain)
            if fault is not None:
                raise self._damage(fault)
            self._chain = hashlib.sha256(data).digest()
            self._offsets.append(start + size)

    def _damage(self, fault: str) -> LedgerError:
        number, start = len(self), self._offsets[-1]
        return LedgerError(
            f"record {number} of the ledger {self._name} does not verify: {fault}. The {number} records before it, the "
            f"first {start} bytes, are good; get the rest from another participant"
        )


def trim_counts(ledger: Ledger) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, per client, how many of its numbers were trimmed and how many it sent, in all decided rounds.

    A client that is trimmed far more often than the others is probably the liar.
    """
    trimmed = np.zeros(ledger.header.clients, np.int64)
    sent = np.zeros(ledger.header.clients, np.int64)
    for record in ledger:
        if record.values is not None:
            trimmed += record.trimmed
            sent += record.reported
    return trimmed, sent * ledger.header.numbers


def _create_file(path: Path, opening: bytes) -> io.FileIO:
    """Create a file that holds `opening`, all of it or nothing, and return it open and locked."""
    exists = LedgerError(f"{path} exists already: resume it, or choose another folder")
    if path.exists():
        raise exists
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        file = io.FileIO(temporary, "w+")
        try:
            _lock_file(file, path)
            file.write(opening)
            os.fsync(file.fileno())
            try:
                os.link(temporary, path)  # unlike a rename, fails if somebody else was faster
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                os.rename(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except BaseException:
            file.close()
            raise
    except FileExistsError:
        raise exists from None
    except OSError as error:
        raise LedgerError(f"can't create the ledger {path}: {error.strerror}; is its folder there?") from error
    return file


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems can't open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lock_file(file: io.FileIO, path: str | os.PathLike[str]) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerError(f"the ledger {path} is being written by another process: wait for it or stop it") from error


def _read_opening(reader: BinaryIO, path: str | os.PathLike[str]) -> tuple[Header, bytes]:
    """Read and check all that comes before the records."""
    start = reader.read(len(MAGIC) + _WORD.size)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + _WORD.size:
        raise LedgerError(f"{path} is not a ledger of cyber0 (it begins with {start[: len(MAGIC)]!r})")
    (length,) = _WORD.unpack_from(start, len(MAGIC))
    rest = reader.read(length + _WORD.size)
    if len(rest) < length + _WORD.size:
        raise LedgerError(f"the header of the ledger {path} is cut off: {length} bytes were announced")
    text, seal = rest[:length], rest[length:]
    if _WORD.unpack(seal)[0] != zlib.crc32(start + text):
        raise LedgerError(f"the header of the ledger {path} is damaged: its CRC-32 is wrong")
    return Header.from_json(text), start + rest
