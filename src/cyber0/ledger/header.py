"""A ledger's beginning: all that, with the starting weights, turns its records into a model."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import reprlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, BinaryIO

from cyber0.choices import CODECS, DISTRIBUTIONS, DTYPES, ESTIMATORS, SEED_MODES, Choices
from cyber0.errors import LedgerError
from cyber0.protocol import CHAIN_BYTES

VERSION = 1
MAGIC = b"CYBER0\x00\x01"
WORD = struct.Struct("<I")
_PIECE = 1 << 20

INDEX_LIMIT = 1 << 24
DIGEST = re.compile(r"[0-9a-f]{64}")

Check = tuple[Callable[[Any], bool], str]


def _is_whole(value: object) -> bool:
    return type(value) is int  # True is not a number here


def _is_number(value: object) -> bool:
    """Tell whether a value is a finite number; a whole one may stand for it, as long as a float can hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(low: int, high: int, limits: str) -> Check:
    return lambda value: _is_whole(value) and low <= value <= high, f"a whole number, {limits}"


def _choice(names: Choices) -> Check:
    return lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}"


_DIGEST: Check = (lambda v: isinstance(v, str) and DIGEST.fullmatch(v) is not None, "64 hexadecimal digits")
_FIELDS: dict[str, Check] = {
    "seed": _whole(0, (1 << 64) - 1, "0 to 2**64 - 1"),
    "dimension": _whole(1, (1 << 63) - 1, "at least 1"),
    "layout": (lambda v: isinstance(v, (tuple, list)), "a list of entries"),
    "distribution": _choice(DISTRIBUTIONS),
    "k": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "local_epochs": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "mu": (lambda v: _is_number(v) and v >= 0, "a finite number, at least 0"),
    "estimator": _choice(ESTIMATORS),
    "lr": (lambda v: _is_number(v) and v > 0, "a finite number above 0"),
    "lr_schedule": (lambda v: isinstance(v, str) and v != "", "the name of a schedule, as constant"),
    "projection_radius": (lambda v: v is None or (_is_number(v) and v > 0), "a finite number above 0, or null"),
    "weights_digest": _DIGEST,
    "rest_digest": _DIGEST,
    "clients": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "config": (lambda v: isinstance(v, dict), "a table"),
    "codec": _choice(CODECS),
    "seed_mode": _choice(SEED_MODES),
}
"""What each field may be: a test, and the same in words."""

_IN_CONFIG = {
    "seed": "seed",
    "k": "method.k",
    "local_epochs": "method.local_epochs",
    "mu": "method.mu",
    "estimator": "method.estimator",
    "lr": "method.lr",
    "lr_schedule": "method.lr_schedule",
    "distribution": "method.distribution",
    "projection_radius": "method.projection_radius",
    "clients": "federation.clients",
    "codec": "serve.codec",
    "seed_mode": "serve.seed_mode",
}
"""The fields that the config of a run has as well, and where."""


def _impossible(name: str, value: object, limits: str) -> LedgerError:
    return LedgerError(f"{name} = {reprlib.repr(value)} in a ledger's header is impossible; it must be {limits}")


@dataclass(frozen=True)
class Entry:
    """Where one weight tensor lies in the flat vector w; `offset` counts coordinates, `dtype` is e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise _impossible("layout.shape", self.shape, "a list of whole numbers")
        object.__setattr__(self, "shape", tuple(self.shape))
        if type(self.name) is not str:
            raise _impossible("layout.name", self.name, "a string")
        if not all(_is_whole(length) and length >= 0 for length in self.shape):
            raise _impossible(f"layout.shape of {self.name!r}", self.shape, "whole numbers, at least 0")
        if self.dtype not in DTYPES:
            raise _impossible(f"layout.dtype of {self.name!r}", self.dtype, f"one of {', '.join(DTYPES)}")
        if not _is_whole(self.offset) or self.offset < 0:
            raise _impossible(f"layout.offset of {self.name!r}", self.offset, "a whole number, at least 0")

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
        for name, (valid, limits) in _FIELDS.items():
            if not valid(getattr(self, name)):
                raise _impossible(name, getattr(self, name), limits)
        if self.estimator == "two_point" and self.mu == 0:
            raise _impossible("mu", self.mu, 'above 0 with estimator = "two_point", which divides by it')
        if self.numbers >= INDEX_LIMIT:
            raise LedgerError(f"local_epochs * k = {self.numbers} must be less than 2**24, the number of directions")
        object.__setattr__(self, "layout", tuple(self.layout))
        self._check_layout()
        self._check_config()
        try:  # as it will be read back, so that a header equals itself after a journey through a file
            object.__setattr__(self, "config", json.loads(json.dumps(self.config, allow_nan=False)))
            self.to_json()
        except (TypeError, ValueError) as error:
            raise LedgerError(f"a ledger's header can't be written as JSON: {error}") from error
        except RecursionError:
            raise LedgerError("a ledger's header can't be written as JSON: it is nested too deeply") from None

    def _check_layout(self) -> None:
        """Refuse weights that leave coordinates out, share them, or share a name."""
        end, names = 0, set[str]()
        for entry in self.layout:
            if not isinstance(entry, Entry):
                raise _impossible("layout", entry, "a list of entries")
            if entry.offset != end:
                raise LedgerError(
                    f"weight {entry.name!r} in the layout of a ledger's header begins at coordinate {entry.offset}, "
                    f"and the weights before it end at {end}"
                )
            if entry.name in names:
                raise LedgerError(f"two weights are named {entry.name!r} in the layout of a ledger's header")
            end += entry.size
            names.add(entry.name)
        if end != self.dimension:
            raise LedgerError(
                f"the layout of a ledger's header has {end} coordinates, but dimension = {self.dimension}"
            )

    def _check_config(self) -> None:
        """Refuse a config that contradicts the rest of the header; what it does not mention can't."""
        for name, path in _IN_CONFIG.items():
            *sections, key = path.split(".")
            table: Any = self.config
            for section in sections:
                table = table.get(section)
                if not isinstance(table, dict):
                    break
            else:
                mine = getattr(self, name)
                stated = 0 if name == "projection_radius" and mine is None else mine  # in a config, 0: no ball
                if key in table and table[key] != stated:
                    raise LedgerError(
                        f"a ledger's header contradicts itself: {name} = {mine!r}, but {path} = {table[key]!r} in its "
                        "config. One of them was changed: use the header as its federator made it"
                    )

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
            found = json.loads(text)
            if not isinstance(found, dict):
                raise LedgerError(f"a ledger's header must be a JSON object, not {type(found).__name__}")
            _check_version(found.get("version"))
            unknown = set(found) ^ {item.name for item in fields(cls)}
            if unknown:
                raise LedgerError(f"a ledger's header has these keys missing or too many: {sorted(unknown)}")
            return cls(**{**found, "layout": tuple(Entry(**entry) for entry in found["layout"])})
        except RecursionError:
            raise LedgerError("a ledger's header can't be read: its JSON is nested too deeply") from None
        except (TypeError, ValueError) as error:
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


def read_at_most(reader: BinaryIO | io.RawIOBase, size: int) -> bytes:
    """Read `size` bytes, or fewer where there are no more; a damaged size asks for no more memory than is there."""
    parts, left = [], size
    while left > 0 and (part := reader.read(min(left, _PIECE))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_opening(reader: BinaryIO, path: str | os.PathLike[str]) -> tuple[Header, bytes]:
    """Read and check all that comes before the records."""
    start = reader.read(len(MAGIC) + WORD.size)
    if not start:
        raise LedgerError(f"{path} is empty: nothing was written to it, so it can be deleted")
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + WORD.size:
        raise LedgerError(f"{path} is not a ledger of cyber0 (it begins with {start[: len(MAGIC)]!r})")
    (length,) = WORD.unpack_from(start, len(MAGIC))
    rest = read_at_most(reader, length + WORD.size)
    if len(rest) < length + WORD.size:
        raise LedgerError(f"the header of the ledger {path} is cut off: {length} bytes were announced")
    text, seal = rest[:length], rest[length:]
    if WORD.unpack(seal)[0] != zlib.crc32(start + text):
        raise LedgerError(f"the header of the ledger {path} is damaged: its CRC-32 is wrong")
    header = Header.from_json(text)
    if header.to_json() != text:  # participants who make the header anew must get the same run id from it
        raise LedgerError(
            f"the header of the ledger {path} is not canonical JSON (docs/FORMAT.md): it must be written with sorted "
            "keys, without spaces, in ASCII"
        )
    return header, start + rest
