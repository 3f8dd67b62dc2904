"""Hello, announcement, report, decision: the messages of a run and their wire form. No I/O.

All values are little-endian. With n = local epochs * k scalars per round, each of which takes `size` bytes in the codec
that was agreed on (codec.py), a participant sends

    hello     "CYBER0 H" | u16 version | u8 role | u8 0 | u32 client | 32 bytes run id | 32 bytes digest of w0
              | 32 bytes digest of the rest | u32 round | 8 bytes of the chain | u32 CRC-32            128 bytes, once
    report    u32 round | n x scalar [| 8 bytes of the digest of w] | u32 CRC-32                 8 + size n [+ 8] bytes
    evaluation  u32 round | f64 accuracy | f64 loss | u8 count | count x (u8 length | name | f64 value) | u32 CRC-32
              from a follower, for display: what the task measures besides accuracy and loss          25 bytes or more

and a federator, with a first byte that names the kind,

    decision  u8 1 | u32 round | f64 lr | u32 rounds | n x scalar | 16 bytes of details | u32 CRC-32  37 + size n bytes
              u8 2 | u32 round | f64 lr | u32 rounds | 16 bytes of details | u32 CRC-32  abandoned           37 bytes
    records   u8 3 | whole records of the ledger, which carry a hash and a CRC of their own
    opened    u8 4 | u32 round | u32 rounds | 8 bytes of the chain | u32 CRC-32   this round is open         21 bytes
    replay    u8 5 | u32 CRC-32                           go back to w0; all records come again                5 bytes
    ended     u8 6 | u32 CRC-32                           the run is over                                      5 bytes

Apart from the codec, a decision is the core of its record: its receiver computes the ledger's chain from it, and need
not trust anybody for that. `rounds` is how many rounds the run is to have, and may grow; 0: no number was set. The
decision of round t announces round t + 1: `opened` is sent only after records, with the hash that the chain has
reached. A report does not name its client, run or model: the hello has bound those to the stream. The CRC detects
accidents, not forgeries; to prevent those is up to the transport.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import ProtocolError
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.ledger.record import ABANDONED, DECIDED, DECISION_HEAD, DETAILS_BYTES, Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.codec import Codec

VERSION = 2
RECORDS, OPENED, REPLAY, ENDED = 3, 4, 5, 6
VOTER, FOLLOWER = 1, 2
DIGEST_BYTES = 8
"""How much of the weights' digest a report carries when it carries it."""
METRICS_LIMIT, METRIC_NAME_BYTES = 32, 64
"""How many metrics an evaluation carries at most, and how long their names may be."""
FLOAT32 = codecs.make("float32")

_MAGIC = b"CYBER0 H"
_HELLO = struct.Struct("<8sHBBI32s32s32sI8s")
_OPENED = struct.Struct("<BII8s")
_EVALUATION = struct.Struct("<IddB")
_VALUE = struct.Struct("<d")
_REPORT_HEAD = struct.Struct("<I")
_CRC = struct.Struct("<I")
_WORD = 1 << 32

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Hello:
    """Who is speaking, about which run and model, and how far it has come; it holds for the rest of the stream.

    `run` is the hash of the ledger's opening; `chain` the 8 bytes of its hash after `round` rounds.
    """

    role: int
    client: int
    run: bytes
    weights_digest: bytes
    rest_digest: bytes
    round: int
    chain: bytes
    version: int = VERSION


@dataclass(frozen=True, eq=False)
class Announcement:
    """Round `round` is open, and the clients in `invited` (ascending) are to report."""

    round: int
    invited: NDArray[np.int64]


@dataclass(frozen=True)
class Opened:
    """Round `round` of `rounds` is open, and the ledger's chain has reached `chain` before it."""

    round: int
    chain: bytes
    rounds: int = 0


@dataclass(frozen=True, eq=False)
class Report:
    """What a client measured: one scalar per local epoch and direction. Nothing in it can be trusted."""

    client: int
    round: int
    values: NDArray[np.float32]
    digest: bytes = b""
    """The first 8 bytes of the digest of the w that was measured; empty if it was not due."""


@dataclass(frozen=True)
class EvaluationMessage:
    """A follower's evaluation of the model after `round` rounds. It is displayed, and nothing depends on it."""

    round: int
    accuracy: float
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the task measures, by name: at most 32 of them, of names up to 64 bytes of UTF-8."""


def payload_bytes(scalars: int, codec: Codec = FLOAT32) -> int:
    """Return the bytes that a client sends (or gets) a round for so many scalars, framing not counted."""
    return codec.size * scalars


def encode_hello(hello: Hello) -> bytes:
    """Return the hello as it goes over the wire."""
    for name in ("run", "weights_digest", "rest_digest"):
        if len(getattr(hello, name)) != 32:
            raise ProtocolError(f"a hello's {name} has 32 bytes, got {len(getattr(hello, name))}")
    if len(hello.chain) != CHAIN_BYTES:
        raise ProtocolError(f"a hello has {CHAIN_BYTES} bytes of the chain, got {len(hello.chain)}")
    if hello.role not in (VOTER, FOLLOWER) or not 0 <= hello.client < _WORD:
        raise ProtocolError(f"a hello can't be of role {hello.role} and client {hello.client}")
    return _sealed(
        _HELLO.pack(
            _MAGIC, hello.version, hello.role, 0, hello.client, hello.run, hello.weights_digest, hello.rest_digest,
            _checked_round(hello.round), hello.chain,
        )
    )  # fmt: skip


HELLO_BYTES = _HELLO.size + _CRC.size


def decode_hello(data: BytesLike) -> Hello:
    """Return the hello in `data`.

    Raises:
        ProtocolError: it is not a hello, damaged, or of another version.
    """
    if isinstance(data, BytesLike) and bytes(data[:8]) == _MAGIC and len(data) >= 10:
        _check_version(int.from_bytes(data[8:10], "little"))  # before the length, which another version may change
    body = _unsealed(data, (HELLO_BYTES,), "hello")
    magic, version, role, _, client, run, weights, rest, number, chain = _HELLO.unpack(body)
    if magic != _MAGIC or role not in (VOTER, FOLLOWER):
        raise ProtocolError(f"not a hello of cyber0: it starts with {magic!r} and names the role {role}")
    return Hello(role, client, run, weights, rest, number, chain, version)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version} of the protocol, this one {VERSION}: update it")


def encode_report(report: Report, codec: Codec = FLOAT32) -> bytes:
    """Return the report as it goes over the wire."""
    if len(report.digest) not in (0, DIGEST_BYTES):
        raise ProtocolError(f"a report carries {DIGEST_BYTES} bytes of a digest or none, got {len(report.digest)}")
    return _sealed(_REPORT_HEAD.pack(_checked_round(report.round)) + _pack(report.values, codec) + report.digest)


def decode_report(data: BytesLike, client: int, scalars: int, codec: Codec = FLOAT32) -> Report:
    """Return the report in `data`, which came on the stream of `client`.

    Scalars that are not finite pass: the federator refuses them, with a reason.

    Raises:
        ProtocolError: the length or the CRC is wrong.
    """
    end = _REPORT_HEAD.size + codec.size * scalars
    body = _unsealed(data, (end + _CRC.size, end + DIGEST_BYTES + _CRC.size), "report")
    (number,) = _REPORT_HEAD.unpack_from(body)
    return Report(client, number, codec.decode(body[_REPORT_HEAD.size : end]), body[end:])


def encode_decision(decision: Decision, codec: Codec = FLOAT32) -> bytes:
    """Return the decision as it goes over the wire."""
    if len(decision.details) != DETAILS_BYTES:
        raise ProtocolError(f"a decision has {DETAILS_BYTES} bytes of a digest of details, got {len(decision.details)}")
    kind = ABANDONED if decision.values is None else DECIDED
    head = DECISION_HEAD.pack(kind, _checked_round(decision.round), decision.lr, decision.rounds)
    values = b"" if decision.values is None else _pack(decision.values, codec)
    return _sealed(head + values + decision.details)


def decode_decision(data: BytesLike, scalars: int, codec: Codec = FLOAT32) -> Decision:
    """Return the decision in `data`, without the chain.

    Raises:
        ProtocolError: the length, the CRC or the kind is wrong.
    """
    bare = DECISION_HEAD.size + DETAILS_BYTES + _CRC.size
    sizes = {DECIDED: bare + payload_bytes(scalars, codec), ABANDONED: bare}
    body = _unsealed(data, tuple(sizes.values()), "decision")
    kind, number, lr, rounds = DECISION_HEAD.unpack_from(body)
    if kind not in sizes:
        raise ProtocolError(f"a decision is of kind {DECIDED} or {ABANDONED}, not {kind}: another version of cyber0?")
    if sizes[kind] != len(body) + _CRC.size:
        raise ProtocolError(f"a decision of kind {kind} has {sizes[kind]} bytes, not {len(body) + _CRC.size}")
    if not math.isfinite(lr):
        raise ProtocolError(f"a decision's learning rate must be finite, not {lr}")
    values = None if kind == ABANDONED else codec.decode(body[DECISION_HEAD.size : -DETAILS_BYTES])
    return Decision(number, lr, values, body[-DETAILS_BYTES:], rounds)


def encode_evaluation(evaluation: EvaluationMessage) -> bytes:
    """Return the evaluation as it goes over the wire; metrics beyond the limits are left out."""
    named = [(name.encode("utf-8", "replace"), value) for name, value in evaluation.metrics.items()]
    sent = [pair for pair in named if 0 < len(pair[0]) <= METRIC_NAME_BYTES][:METRICS_LIMIT]
    head = _EVALUATION.pack(_checked_round(evaluation.round), evaluation.accuracy, evaluation.loss, len(sent))
    return _sealed(head + b"".join(bytes([len(name)]) + name + _VALUE.pack(value) for name, value in sent))


def decode_evaluation(data: BytesLike) -> EvaluationMessage:
    """Return the evaluation in `data`.

    Raises:
        ProtocolError: the length or the CRC is wrong, the accuracy is impossible, or a metric's name is not valid.
    """
    least = _EVALUATION.size + _CRC.size
    size = len(data) if isinstance(data, BytesLike) else 0
    body = _unsealed(data, (max(size, least),), "evaluation")
    number, accuracy, loss, count = _EVALUATION.unpack_from(body)
    if not (-math.inf < accuracy <= 1 or math.isnan(accuracy)):  # below 0: a regression worse than the mean
        raise ProtocolError(f"an accuracy is finite and at most 1, or NaN if there is none, not {accuracy}")
    if count > METRICS_LIMIT:
        raise ProtocolError(f"an evaluation has at most {METRICS_LIMIT} metrics, not {count}")
    metrics: dict[str, float] = {}
    rest = body[_EVALUATION.size :]
    for _ in range(count):
        length = rest[0] if rest else 0
        name, value, rest = rest[1 : 1 + length], rest[1 + length : 9 + length], rest[9 + length :]
        if not 0 < length <= METRIC_NAME_BYTES or len(value) != _VALUE.size:
            raise ProtocolError(f"a metric's name has 1 to {METRIC_NAME_BYTES} bytes and its value 8, or it is cut off")
        metrics[_printable(name)] = _VALUE.unpack(value)[0]
    if rest or len(metrics) != count:
        raise ProtocolError("an evaluation names a metric twice, or has bytes after its last metric")
    return EvaluationMessage(number, accuracy, loss, metrics)


def _printable(name: bytes) -> str:
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if not text.isprintable():
        raise ProtocolError(f"the name of a metric is not printable: {name!r}")
    return text


def encode_opened(opened: Opened) -> bytes:
    """Return the announcement of a round to a participant that has just become current."""
    return _sealed(_OPENED.pack(OPENED, _checked_round(opened.round), opened.rounds, opened.chain[:CHAIN_BYTES]))


def decode_opened(data: BytesLike) -> Opened:
    """Return the announcement in `data`."""
    kind, number, rounds, chain = _OPENED.unpack(_unsealed(data, (_OPENED.size + _CRC.size,), "announcement"))
    if kind != OPENED:
        raise ProtocolError(f"an announcement is of kind {OPENED}, not {kind}")
    return Opened(number, chain, rounds)


def encode_bare(kind: int) -> bytes:
    """Return a message that consists of its kind alone: REPLAY or ENDED."""
    return _sealed(bytes([kind]))


def kind_of(data: BytesLike) -> int:
    """Return the kind of a federator's message; a message without content is checked as well."""
    kind = data[0] if isinstance(data, BytesLike) and len(data) else 0
    if not DECIDED <= kind <= ENDED:
        raise ProtocolError(f"a federator's message is of kind {DECIDED} to {ENDED}, not {kind}")
    if kind in (REPLAY, ENDED):
        _unsealed(data, (1 + _CRC.size,), "message")
    return kind


def _checked_round(number: int) -> int:
    if not 0 <= number < _WORD:
        raise ProtocolError(f"round {number} does not fit 32 bits: rounds are 0 to {_WORD - 1}")
    return number


def _pack(values: NDArray[np.float32], codec: Codec) -> bytes:
    if values.ndim != 1 or values.dtype != np.float32:
        raise ProtocolError(f"expected a vector of float32, got {values.dtype} of shape {values.shape}")
    return codec.encode(values)


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _unsealed(data: BytesLike, sizes: tuple[int, ...], what: str) -> bytes:
    """Return `data` without the CRC at its end, which is checked."""
    if type(data) is not bytes:
        if not isinstance(data, BytesLike):
            raise ProtocolError(f"a {what} is made of bytes, not of {type(data).__name__}")
        data = bytes(data)
    if len(data) not in sizes:
        expected = " or ".join(str(size) for size in sorted(set(sizes)))
        raise ProtocolError(f"a {what} has {expected} bytes, got {len(data)}: do k and local_epochs agree?")
    body = data[:-4]
    stated = int.from_bytes(data[-4:], "little")
    if zlib.crc32(body) != stated:
        raise ProtocolError(
            f"a {what} failed its CRC-32 (stated {stated:08x}, computed {zlib.crc32(body):08x}): resend it"
        )
    return body
