"""How a ledger's file begins: magic, format, and the header with its CRC-32; the hash of it all names the run."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from typing import Protocol

from cyber0.errors import LedgerError
from cyber0.ledger.header import Header, check_format

MAGIC = b"CYBER0\x00"
"""What every ledger begins with; the next byte is the format."""
WORD = struct.Struct("<I")
_START_BYTES = len(MAGIC) + 1 + WORD.size
_PIECE = 1 << 20
HEADER_LIMIT = 16 << 20
"""Bytes of JSON that a header may have. A layout of 92,000 weights, as a large mixture of experts has, takes 10 MB; in
memory JSON takes 20 times as much at worst."""
OPENING_LIMIT = _START_BYTES + HEADER_LIMIT + WORD.size
"""Bytes that come before the records, at most."""


def opening_of(header: Header) -> bytes:
    """Return all that comes before the records."""
    text = header.to_json()
    if len(text) > HEADER_LIMIT:
        raise LedgerError(
            f"the header of a ledger with {len(header.layout)} weights takes {len(text)} bytes; {HEADER_LIMIT} are the "
            "most: train fewer weights, as with task.adapter"
        )
    opening = MAGIC + bytes([header.format]) + WORD.pack(len(text)) + text
    return opening + WORD.pack(zlib.crc32(opening))


def first_chain(header: Header) -> bytes:
    """Return the hash of all that comes before the records: where the chain begins, and what names the run."""
    return hashlib.sha256(opening_of(header)).digest()


class Reader(Protocol):
    """What can be read from."""

    def read(self, size: int = -1, /) -> bytes | None: ...


def read_at_most(reader: Reader, size: int) -> bytes:
    """Read `size` bytes, or fewer where there are no more; a damaged size asks for no more memory than is there."""
    parts, left = [], size
    while left > 0 and (part := reader.read(min(left, _PIECE))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_opening(reader: Reader, path: str | os.PathLike[str]) -> tuple[Header, bytes]:
    """Read and check all that comes before the records."""
    start = read_at_most(reader, _START_BYTES)
    if not start:
        raise LedgerError(f"{path} is empty: nothing was written to it, so it can be deleted")
    if start[: len(MAGIC)] != MAGIC or len(start) < _START_BYTES:
        raise LedgerError(f"{path} is not a ledger of cyber0 (it begins with {start[: len(MAGIC)]!r})")
    format = start[len(MAGIC)]
    check_format(format)
    (length,) = WORD.unpack_from(start, len(MAGIC) + 1)
    if length > HEADER_LIMIT:
        raise LedgerError(f"the header of the ledger {path} claims {length} bytes; {HEADER_LIMIT} are the most")
    rest = read_at_most(reader, length + WORD.size)
    if len(rest) < length + WORD.size:
        raise LedgerError(f"the header of the ledger {path} is cut off: {length} bytes were announced")
    text, seal = rest[:length], rest[length:]
    if WORD.unpack(seal)[0] != zlib.crc32(start + text):
        raise LedgerError(f"the header of the ledger {path} is damaged: its CRC-32 is wrong")
    header = Header.from_json(text, format)
    if header.format != format:
        raise LedgerError(f"the ledger {path} begins as format {format}, and its header says {header.format}")
    if header.to_json() != text:  # participants who make the header anew must get the same run id from it
        raise LedgerError(
            f"the header of the ledger {path} is not canonical JSON (docs/FORMAT.md): it must be written with sorted "
            "keys, without spaces, in ASCII"
        )
    return header, start + rest
