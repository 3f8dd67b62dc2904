"""One round of a ledger, and how it is written."""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import LedgerError
from cyber0.ledger.header import Header
from cyber0.ledger.opening import WORD

DECIDED, ABANDONED = 1, 2
DECISION_HEAD = struct.Struct("<BIdI")
"""What a decision begins with, on the wire and in the ledger: kind, round, lr, rounds."""
DETAILS_BYTES = 16
"""How much of the SHA-256 of a record's details is in its core."""
HASH_BYTES = 32
BLOCK_CLIENTS = 1 << 13  # whose trim counts are packed or unpacked at a time; a multiple of 8: blocks end at a byte

_START = struct.Struct("<BI")


@dataclass(frozen=True, eq=False)
class Decision:
    """What the federator decided, with the digest of the details of its record.

    `values` is None if the round was abandoned; `rounds` is how many rounds the run is to have. `chain` is what the
    federator's ledger has reached with it; it does not travel, and who receives the decision computes it.
    """

    round: int
    lr: float
    values: NDArray[np.float32] | None
    details: bytes
    rounds: int = 0
    chain: bytes = b""


@dataclass(frozen=True, eq=False)
class Record:
    """One round: what was decided (None: abandoned), who reported, and how often each client was trimmed.

    `rounds` is how many rounds the run was to have when this one was decided; 0: no number was set. `chain` is the hash
    that the ledger's chain has reached with it and `details` the digest of its details, as read from a ledger; both are
    empty before it is in one.
    """

    round: int
    lr: float
    values: NDArray[np.float32] | None
    reported: NDArray[np.bool_]
    trimmed: NDArray[np.int64]
    chain: bytes = b""
    rounds: int = 0
    details: bytes = b""


class PackedRecord(Record):
    """A record as read: who reported and who was trimmed are unpacked at first use.

    A message of a few megabytes may list millions of clients, and a replay uses none of it.
    """

    _format: RecordFormat
    _details: bytes

    @cached_property
    def reported(self) -> NDArray[np.bool_]:
        return self._format.unpack_reported(self._details)

    @cached_property
    def trimmed(self) -> NDArray[np.int64]:
        return self._format.unpack_trimmed(self._details)


def next_chain(chain: bytes, decision: Decision | Record) -> bytes:
    """Return the hash that a chain reaches with a decision; needs no more than the chain before and the decision."""
    kind = ABANDONED if decision.values is None else DECIDED
    values = b"" if decision.values is None else decision.values.astype("<f4", copy=False).tobytes()
    head = DECISION_HEAD.pack(kind, decision.round, decision.lr, decision.rounds)
    return hashlib.sha256(chain + head + values + decision.details).digest()


class RecordFormat:
    """Turns records into bytes and back, for one header.

    A record is its core, the details, the hash that the chain reaches with it, and a CRC-32. The core ends with a
    digest of the details.
    """

    head = DECISION_HEAD
    digest_bytes = DETAILS_BYTES

    def __init__(self, header: Header) -> None:
        self.clients = header.clients
        self.scalars = header.scalars
        self.planned = header.rounds
        self.shifts = np.arange(self.scalars.bit_length())
        self.bitmap_bytes = -(-self.clients // 8)
        self.trim_bytes = -(-self.clients * len(self.shifts) // 8)
        core = self.head.size + self.digest_bytes
        self.core_sizes = {DECIDED: core + 4 * self.scalars, ABANDONED: core}
        rest = self.bitmap_bytes + HASH_BYTES + WORD.size
        self.sizes = {DECIDED: self.core_sizes[DECIDED] + self.trim_bytes + rest, ABANDONED: core + rest}

    # What format 1 does in another way.

    def head_of(self, kind: int, round: int, lr: float, rounds: int) -> bytes:
        return self.head.pack(kind, round, lr, rounds)

    def rounds_in(self, data: bytes) -> int:
        """Return how many rounds the run was to have, by a record."""
        return int(self.head.unpack_from(data)[3])

    def hash_for(self, data: bytes, previous: bytes) -> bytes:
        """Return the hash that belongs into a record: what the chain reaches with its core."""
        return hashlib.sha256(previous + data[: self.core_sizes[data[0]]]).digest()

    def chain_after(self, data: bytes) -> bytes:
        """Return what the chain has reached with a whole record."""
        return data[-WORD.size - HASH_BYTES : -WORD.size]

    # What both do.

    def encode(self, record: Record, previous: bytes) -> bytes:
        self._check(record)
        kind = ABANDONED if record.values is None else DECIDED
        details = np.packbits(record.reported, bitorder="little").tobytes()
        values = b""
        if record.values is not None:
            details += self._pack_trimmed(record.trimmed)
            values = record.values.astype("<f4", copy=False).tobytes()
        head = self.head_of(kind, record.round, record.lr, record.rounds)
        body = head + values + self._digest(details) + details
        body += self.hash_for(body, previous)
        return body + WORD.pack(zlib.crc32(body))

    def sealed(self, record: Record, data: bytes) -> Record:
        """Return the record that `data` was encoded from, with what it has as part of a ledger."""
        core = self.core_sizes[data[0]]
        return replace(record, chain=self.chain_after(data), details=data[core - self.digest_bytes : core])

    def decode(self, data: bytes) -> Record:
        """Return the record in `data`, which has been verified."""
        kind, number, lr = self.head.unpack_from(data)[:3]
        values: NDArray[np.float32] | None = None
        if kind == DECIDED:
            values = np.frombuffer(data, "<f4", self.scalars, self.head.size).astype(np.float32)
        place = self.core_sizes[kind]
        record = PackedRecord.__new__(PackedRecord)
        record.__dict__.update(
            round=number, lr=lr, values=values, chain=self.chain_after(data), rounds=self.rounds_in(data),
            details=data[place - self.digest_bytes : place], _format=self,
            _details=data[place : -WORD.size - HASH_BYTES],
        )  # fmt: skip
        return record

    def unpack_reported(self, details: bytes) -> NDArray[np.bool_]:
        """Return who reported."""
        bitmap = np.frombuffer(details, np.uint8, self.bitmap_bytes)
        return np.unpackbits(bitmap, count=self.clients, bitorder="little").view(np.bool_)

    def unpack_trimmed(self, details: bytes) -> NDArray[np.int64]:
        """Return how often each client was trimmed; an abandoned round trims nobody and stores no counts."""
        trimmed = np.zeros(self.clients, np.int64)
        if len(details) == self.bitmap_bytes:
            return trimmed
        width = len(self.shifts)
        for begin, count in self._blocks():
            place = self.bitmap_bytes + begin * width // 8
            packed = np.frombuffer(details, np.uint8, -(-count * width // 8), place)
            bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
            trimmed[begin : begin + count] = bits @ (1 << self.shifts)
        return trimmed

    def _pack_trimmed(self, trimmed: NDArray[np.int64]) -> bytes:
        blocks = (trimmed[begin : begin + count, None] >> self.shifts & 1 for begin, count in self._blocks())
        return b"".join(np.packbits(bits.astype(np.uint8), bitorder="little").tobytes() for bits in blocks)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the clients in blocks, as the first and how many: 64 bits for each bit of a count are then small."""
        for begin in range(0, self.clients, BLOCK_CLIENTS):
            yield begin, min(BLOCK_CLIENTS, self.clients - begin)

    def fault(self, data: bytes, number: int, previous: bytes) -> str | None:
        """Return what is wrong with a record of full length, if anything is."""
        end = len(data) - WORD.size
        if WORD.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
            return "its CRC-32 is wrong"
        if data[end - HASH_BYTES : end] != self.hash_for(data, previous):
            return "it does not continue the hash chain"
        if not self._details_match(data):
            return "who reported and who was trimmed are not those that were decided on (digest of the details)"
        kind, found, lr = self.head.unpack_from(data)[:3]
        if found != number:
            return f"it is of round {found}"
        if not math.isfinite(lr):
            return f"its learning rate is {lr}"
        if kind == DECIDED and not np.isfinite(np.frombuffer(data, "<f4", self.scalars, self.head.size)).all():
            return "its scalars are not all finite"
        return None

    def zero_filled(self, data: bytes, number: int, previous: bytes) -> bool:
        """Return whether a record of full length may be the beginning of the right one and then nothing but zeros.

        A power cut leaves that where a file had grown but its last block was not written. Whatever of the beginning can
        be checked must be right, or else the record is a damaged one that happens to end in a zero.
        """
        written = data.rstrip(b"\0")
        if len(written) == len(data):
            return False
        seal = len(data) - WORD.size
        hash_at = seal - HASH_BYTES
        if WORD.unpack_from(data, seal)[0] == zlib.crc32(data[:seal]):  # all of it was written: it is what it is
            return False
        if data[0] == DECIDED and self.mislabelled(data):
            return False
        if len(written) > hash_at and not self._details_match(data):
            return False
        hashed = self.hash_for(data, previous)
        expected = [(0, _START.pack(data[0], number)), (hash_at, hashed), (seal, WORD.pack(zlib.crc32(data[:seal])))]
        for place, right in expected:
            found = written[place : place + len(right)]
            if found != right[: len(found)]:
                return False
        return True

    def begins(self, data: bytes, number: int) -> bool:
        """Return whether what was written of a record, before zeros at its end, is the beginning of that of a round."""
        start = data.rstrip(b"\0")[: _START.size]
        return start == _START.pack(data[0], number)[: len(start)]

    def mislabelled(self, tail: bytes) -> bool:
        """Return whether a record that seems cut off is a whole abandoned one whose kind was damaged."""
        body = tail[: self.sizes[ABANDONED]]
        if len(body) < self.sizes[ABANDONED]:
            return False
        body = bytes([ABANDONED]) + body[1:]
        return bool(WORD.unpack(body[-WORD.size :])[0] == zlib.crc32(body[: -WORD.size]))

    def _digest(self, details: bytes) -> bytes:
        return hashlib.sha256(details).digest()[: self.digest_bytes]

    def _details_match(self, data: bytes) -> bool:
        core = self.core_sizes[data[0]]
        details = data[core : -WORD.size - HASH_BYTES]
        return data[core - self.digest_bytes : core] == self._digest(details)

    def _check(self, record: Record) -> None:
        where = f"round {record.round} can't be appended to the ledger:"
        if not math.isfinite(record.lr):
            raise LedgerError(f"{where} its learning rate is {record.lr}")
        if not 0 <= record.rounds < 1 << 32:
            raise LedgerError(f"{where} rounds = {record.rounds} does not fit 32 bits")
        if record.reported.shape != (self.clients,) or record.trimmed.shape != (self.clients,):
            raise LedgerError(f"{where} it has {record.reported.shape} clients, the header {self.clients}")
        if record.values is None:
            return
        if record.values.shape != (self.scalars,) or record.values.dtype != np.float32:
            shape, dtype = record.values.shape, record.values.dtype
            raise LedgerError(f"{where} it has {dtype} scalars of shape {shape}, not {self.scalars} of float32")
        if not np.isfinite(record.values).all():
            raise LedgerError(f"{where} its scalars are not all finite; abandon such a round")
        if record.trimmed.min() < 0 or record.trimmed.max() > self.scalars:
            raise LedgerError(f"{where} a trim count is not within 0 and {self.scalars}")
        absent = np.flatnonzero((record.trimmed > 0) & ~record.reported)
        if len(absent):
            raise LedgerError(f"{where} client {absent[0]} has a trim count but did not report; its count must be 0")
