"""Announcement, report, decision: the messages of a round and their wire form. No I/O.

All numbers are little-endian. With n = local epochs * k numbers a round:

    report    u32 round | n x float32 | u32 CRC-32                                                8 + 4 n bytes
    decision  u8 kind | u32 round | f64 lr | n x float32 | 8 bytes of the chain hash | u32 CRC-32  25 + 4 n bytes

The kind of a decision is 1 (decided) or 2 (abandoned, without numbers). A report does not name its client: identity is
bound to the stream that it comes on. The CRC finds accidents, not forgeries; those are for the transport to prevent.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import ProtocolError

DECIDED = 1
ABANDONED = 2
CHAIN_BYTES = 8
"""How much of the ledger's chain hash a decision carries on the wire."""

_REPORT_HEAD = struct.Struct("<I")
_DECISION_HEAD = struct.Struct("<BId")
_CRC = struct.Struct("<I")
_WORD = 1 << 32


@dataclass(frozen=True, eq=False)
class Announcement:
    """Round `round` is open, and the clients in `invited` (ascending) are asked to report."""

    round: int
    invited: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Report:
    """What a client measured: one number per local epoch and direction. Nothing in it can be trusted."""

    client: int
    round: int
    values: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Decision:
    """What the federator decided, and the hash that the ledger's chain has reached with it.

    `values` is None if the round was abandoned. `chain` is the whole hash from a federator, its first 8 bytes from the
    wire.
    """

    round: int
    lr: float
    values: NDArray[np.float32] | None
    chain: bytes


def payload_bytes(numbers: int) -> int:
    """Return the bytes that a client sends (or gets) a round for `numbers` numbers, framing not counted."""
    return 4 * numbers


def encode_report(report: Report) -> bytes:
    """Return the report as it goes over the wire."""
    return _sealed(_REPORT_HEAD.pack(_checked_round(report.round)) + _pack(report.values))


def decode_report(data: bytes | bytearray | memoryview, client: int, numbers: int) -> Report:
    """Return the report in `data`, which came on the stream of `client`.

    Numbers that are not finite are let through: to refuse those, with a reason, is the federator's part.

    Raises:
        ProtocolError: the length or the CRC is wrong.
    """
    body = _unsealed(data, {_REPORT_HEAD.size + payload_bytes(numbers) + _CRC.size}, "report")
    (number,) = _REPORT_HEAD.unpack_from(body)
    return Report(client, number, _unpack(body[_REPORT_HEAD.size :]))


def encode_decision(decision: Decision) -> bytes:
    """Return the decision as it goes over the wire."""
    if len(decision.chain) < CHAIN_BYTES:
        raise ProtocolError(f"a decision needs at least {CHAIN_BYTES} bytes of the chain, got {len(decision.chain)}")
    kind = ABANDONED if decision.values is None else DECIDED
    head = _DECISION_HEAD.pack(kind, _checked_round(decision.round), decision.lr)
    values = b"" if decision.values is None else _pack(decision.values)
    return _sealed(head + values + decision.chain[:CHAIN_BYTES])


def decode_decision(data: bytes | bytearray | memoryview, numbers: int) -> Decision:
    """Return the decision in `data`; its chain holds the first 8 bytes of the hash.

    Raises:
        ProtocolError: the length, the CRC or the kind is wrong.
    """
    bare = _DECISION_HEAD.size + CHAIN_BYTES + _CRC.size
    sizes = {DECIDED: bare + payload_bytes(numbers), ABANDONED: bare}
    body = _unsealed(data, set(sizes.values()), "decision")
    kind, number, lr = _DECISION_HEAD.unpack_from(body)
    if kind not in sizes:
        raise ProtocolError(f"a decision is of kind {DECIDED} or {ABANDONED}, not {kind}: another version of cyber0?")
    if sizes[kind] != len(body) + _CRC.size:
        raise ProtocolError(f"a decision of kind {kind} has {sizes[kind]} bytes, not {len(body) + _CRC.size}")
    if not math.isfinite(lr):
        raise ProtocolError(f"a decision's learning rate must be finite, not {lr}")
    values = None if kind == ABANDONED else _unpack(body[_DECISION_HEAD.size : -CHAIN_BYTES])
    return Decision(number, lr, values, body[-CHAIN_BYTES:])


def _checked_round(number: int) -> int:
    if not 0 <= number < _WORD:
        raise ProtocolError(f"round {number} does not fit 32 bits: rounds are 0 to {_WORD - 1}")
    return number


def _pack(values: NDArray[np.float32]) -> bytes:
    if values.ndim != 1 or values.dtype != np.float32:
        raise ProtocolError(f"expected a vector of float32, got {values.dtype} of shape {values.shape}")
    return values.astype("<f4", copy=False).tobytes()


def _unpack(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _unsealed(data: bytes | bytearray | memoryview, sizes: set[int], what: str) -> bytes:
    """Return what the CRC at the end of `data` vouches for."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"a {what} is made of bytes, not of {type(data).__name__}")
    whole = bytes(data)
    if len(whole) not in sizes:
        expected = " or ".join(str(size) for size in sorted(sizes))
        raise ProtocolError(f"a {what} has {expected} bytes, got {len(whole)}: do k and local_epochs agree?")
    body = whole[: -_CRC.size]
    (stated,) = _CRC.unpack(whole[-_CRC.size :])
    if zlib.crc32(body) != stated:
        raise ProtocolError(
            f"a {what} failed its CRC-32 (stated {stated:08x}, found {zlib.crc32(body):08x}): resend it"
        )
    return body
