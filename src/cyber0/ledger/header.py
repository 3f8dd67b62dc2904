"""A ledger's beginning: all that, with the starting weights, turns its records into a model."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any, BinaryIO

from cyber0.choices import CODECS, SEED_MODES
from cyber0.errors import LedgerError
from cyber0.protocol import CHAIN_BYTES

VERSION = 1
MAGIC = b"CYBER0\x00\x01"
WORD = struct.Struct("<I")

_NUMBERS_LIMIT = 1 << 24


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
    seed_mode: str = "shared"
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
        for name, known in (("codec", CODECS), ("seed_mode", SEED_MODES)):
            if getattr(self, name) not in known:
                raise LedgerError(
                    f"{name} = {getattr(self, name)!r} is not known to this cyber0: use one of {', '.join(known)}"
                )
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

    def round_key(self, chain: bytes) -> int:
        """Return the key that a round's directions and roundings are drawn with.

        `chain` is the hash that the ledger had reached before the round, or the 8 bytes of it that travel. The key is
        the seed itself, or if chained the first 8 bytes of SHA-256("cyber0 round key" | seed | 8 bytes of the chain).
        """
        if self.seed_mode == "shared":
            return self.seed
        if len(chain) < CHAIN_BYTES:
            raise LedgerError(f"a chained round needs {CHAIN_BYTES} bytes of the hash before it, got {len(chain)}")
        text = b"cyber0 round key" + self.seed.to_bytes(8, "little") + chain[:CHAIN_BYTES]
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")

    def differences(self, other: Header) -> list[str]:
        """Return the names of what the two headers differ in."""
        return [item.name for item in fields(self) if getattr(self, item.name) != getattr(other, item.name)]

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


def changed_settings(settings: dict[str, Any], recorded: dict[str, Any], within: str = "") -> list[str]:
    """Return which settings differ from those on record, each by its full name with both values."""
    changed = []
    for key in sorted(settings.keys() | recorded.keys()):
        name, mine, theirs = f"{within}{key}", settings.get(key), recorded.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            changed += changed_settings(mine, theirs, f"{name}.")
        elif mine != theirs:
            changed.append(f"{name} (now {mine!r}, on record {theirs!r})")
    return changed


def _check_version(version: object) -> None:
    if version != VERSION:
        raise LedgerError(
            f"the ledger is of format version {version!r}, and this cyber0 knows version {VERSION}: "
            "use the cyber0 that wrote it"
        )


def opening_of(header: Header) -> bytes:
    """Return all that comes before the records."""
    text = header.to_json()
    opening = MAGIC + WORD.pack(len(text)) + text
    return opening + WORD.pack(zlib.crc32(opening))


def first_chain(header: Header) -> bytes:
    """Return the hash of all that comes before the records: where the chain begins, and what names the run."""
    return hashlib.sha256(opening_of(header)).digest()


def read_opening(reader: BinaryIO, path: str | os.PathLike[str]) -> tuple[Header, bytes]:
    """Read and check all that comes before the records."""
    start = reader.read(len(MAGIC) + WORD.size)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + WORD.size:
        raise LedgerError(f"{path} is not a ledger of cyber0 (it begins with {start[: len(MAGIC)]!r})")
    (length,) = WORD.unpack_from(start, len(MAGIC))
    rest = reader.read(length + WORD.size)
    if len(rest) < length + WORD.size:
        raise LedgerError(f"the header of the ledger {path} is cut off: {length} bytes were announced")
    text, seal = rest[:length], rest[length:]
    if WORD.unpack(seal)[0] != zlib.crc32(start + text):
        raise LedgerError(f"the header of the ledger {path} is damaged: its CRC-32 is wrong")
    return Header.from_json(text), start + rest
