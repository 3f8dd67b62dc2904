"""Ledgers of format 1, of cyber0 0.1: read, verified, replayed and continued in their own format; not served.

Their header repeats in `config` what it has in fields of its own, which must not contradict each other. A record holds
the hash of the whole record before it, and nothing says which definitions it was made by: those of version 1.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from cyber0.errors import LedgerError
from cyber0.ledger.header import Header, LayoutEntry, check_keys
from cyber0.ledger.record import RecordFormat

_FIELDS = (
    "seed", "layout", "distribution", "k", "local_epochs", "mu", "estimator", "lr", "lr_schedule", "projection_radius",
    "weights_digest", "rest_digest", "clients", "codec", "seed_mode",
)  # fmt: skip


def tables(header: Header) -> dict[str, Any]:
    """Return what the JSON of a header holds."""
    found = {name: getattr(header, name) for name in _FIELDS}
    layout = [{"name": e.name, "shape": list(e.shape), "dtype": e.dtype, "offset": e.offset} for e in header.layout]
    return found | {"layout": layout, "dimension": header.dimension, "config": header.settings, "version": 1}


def header(found: dict[str, Any]) -> Header:
    """Return the header whose JSON holds this."""
    if found.get("version") != 1:
        raise LedgerError(f"the ledger begins as format 1, and its header says version {found.get('version')!r}")
    check_keys(found, {*_FIELDS, "dimension", "config", "version"})
    config = found["config"]
    if not isinstance(config, dict):
        raise LedgerError(f"config = {config!r} in a ledger's header is impossible; it must be a table")
    layout = tuple(LayoutEntry(**entry) for entry in found["layout"])
    made = Header(**{**{name: found[name] for name in _FIELDS}, "layout": layout}, settings=config, format=1)
    if made.dimension != found["dimension"]:
        raise LedgerError(
            f"the layout of a ledger's header has {made.dimension} coordinates, but dimension = {found['dimension']}"
        )
    return made


class RecordFormat1(RecordFormat):
    """Records of format 1: without the number of rounds and the digest of the details; the hash is the one before."""

    head = struct.Struct("<BId")
    digest_bytes = 0

    def head_of(self, kind: int, round: int, lr: float, rounds: int) -> bytes:
        return self.head.pack(kind, round, lr)

    def rounds_in(self, data: bytes) -> int:
        return self.planned

    def hash_for(self, data: bytes, previous: bytes) -> bytes:
        return previous

    def chain_after(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()
