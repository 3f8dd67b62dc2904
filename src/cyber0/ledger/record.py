"""One round of a ledger, and how it is written."""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import LedgerError
from cyber0.ledger.header import WORD, Header
from cyber0.protocol import ABANDONED, DECIDED

HASH_BYTES = 32

_HEAD = struct.Struct("<BId")
_START = struct.Struct("<BI")


@dataclass(frozen=True, eq=False)
class Record:
    """One round: what was decided (None: abandoned), who reported, and how often each client was trimmed.

    `chain` is the hash that the ledger's chain has reached with it, as read from a ledger; empty before it is in one.
    """

    round: int
    lr: float
    values: NDArray[np.float32] | None
    reported: NDArray[np.bool_]
    trimmed: NDArray[np.int64]
    chain: bytes = b""


class Codec:
    """Turns records into bytes and back, for one header."""

    def __init__(self, header: Header) -> None:
        self.clients = header.clients
        self.numbers = header.numbers
        self.shifts = np.arange(self.numbers.bit_length())
        self.bitmap_bytes = -(-self.clients // 8)
        self.trim_bytes = -(-self.clients * len(self.shifts) // 8)
        bare = _HEAD.size + self.bitmap_bytes + HASH_BYTES + WORD.size
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
        return body + WORD.pack(zlib.crc32(body))

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
        return Record(number, lr, values, reported, trimmed, hashlib.sha256(data).digest())

    def fault(self, data: bytes, number: int, previous: bytes) -> str | None:
        """Return what is wrong with a record of full length, if anything is."""
        end = len(data) - WORD.size
        if WORD.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
            return "its CRC-32 is wrong"
        if data[end - HASH_BYTES : end] != previous:
            return "it does not continue the hash chain"
        kind, found, lr = _HEAD.unpack_from(data)
        if found != number:
            return f"it is of round {found}"
        if not math.isfinite(lr):
            return f"its learning rate is {lr}"
        if kind == DECIDED and not np.isfinite(np.frombuffer(data, "<f4", self.numbers, _HEAD.size)).all():
            return "its numbers are not all finite"
        return None

    def zero_filled(self, data: bytes, number: int, previous: bytes) -> bool:
        """Say whether a record of full length may be the beginning of the right one and then nothing but zeros.

        A power cut leaves that where a file had grown but its last block was not written. Whatever of the beginning can
        be checked must be right, or else the record is a damaged one that happens to end in a zero.
        """
        written = data.rstrip(b"\0")
        if len(written) == len(data):
            return False
        seal = len(data) - WORD.size
        hash_at = seal - HASH_BYTES
        expected = [(0, _START.pack(data[0], number)), (hash_at, previous), (seal, WORD.pack(zlib.crc32(data[:seal])))]
        for place, right in expected:
            found = written[place : place + len(right)]
            if found != right[: len(found)]:
                return False
        return True

    def mislabelled(self, tail: bytes) -> bool:
        """Say whether a record that seems cut off is a whole abandoned one whose kind was damaged."""
        body = tail[: self.sizes[ABANDONED]]
        if len(body) < self.sizes[ABANDONED]:
            return False
        body = bytes([ABANDONED]) + body[1:]
        return bool(WORD.unpack(body[-WORD.size :])[0] == zlib.crc32(body[: -WORD.size]))

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
        absent = np.flatnonzero((record.trimmed > 0) & ~record.reported)
        if len(absent):
            raise LedgerError(f"{where} client {absent[0]} has a trim count but did not report; its count must be 0")
