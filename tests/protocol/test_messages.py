"""The wire form of messages: nothing is lost, and nothing damaged gets through."""

from __future__ import annotations

import math
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cyber0.errors import ProtocolError
from cyber0.ledger.record import Decision
from cyber0.protocol import codec
from cyber0.protocol.messages import (
    ENDED,
    FOLLOWER,
    REPLAY,
    VOTER,
    EvaluationMessage,
    Hello,
    Opened,
    Report,
    decode_decision,
    decode_evaluation,
    decode_hello,
    decode_opened,
    decode_report,
    encode_bare,
    encode_decision,
    encode_evaluation,
    encode_hello,
    encode_opened,
    encode_report,
    kind_of,
    payload_bytes,
)

ROUNDS = st.integers(0, 2**32 - 1)


@st.composite
def bits(draw: st.DrawFn) -> NDArray[np.float32]:
    """Any float32 at all, NaNs with any payload included."""
    words = draw(st.lists(st.integers(0, 2**32 - 1), max_size=20))
    return np.array(words, np.uint32).view(np.float32)


@given(values=bits(), number=ROUNDS)
@settings(deadline=None)
def test_a_report_survives_the_wire_to_the_bit(values: NDArray[np.float32], number: int) -> None:
    data = encode_report(Report(7, number, values))
    assert len(data) == 8 + 4 * len(values)
    report = decode_report(data, 7, len(values))
    assert (report.client, report.round) == (7, number)
    assert report.values.tobytes() == values.tobytes()
    assert report.values.dtype == np.float32
    assert report.values.flags.writeable


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -float("inf")])
def test_a_decision_without_a_finite_learning_rate_is_refused(lr: float) -> None:
    data = encode_decision(Decision(3, lr, np.ones(2, np.float32), bytes(16)))
    with pytest.raises(ProtocolError, match="learning rate"):
        decode_decision(data, 2)


@given(values=st.none() | bits(), number=ROUNDS, lr=FINITE, rounds=ROUNDS, details=st.binary(min_size=16, max_size=16))
@settings(deadline=None)
def test_a_decision_survives_the_wire_to_the_bit(
    values: NDArray[np.float32] | None, number: int, lr: float, rounds: int, details: bytes
) -> None:
    scalars = 5 if values is None else len(values)
    data = encode_decision(Decision(number, lr, values, details, rounds, chain=b"stays at home"))
    if scalars == 0:  # decided and abandoned then have one length: the kind alone tells them apart
        assert len(data) == 37
    decision = decode_decision(data, scalars)
    assert decision.round == number
    assert struct.pack("<d", decision.lr) == struct.pack("<d", lr)
    assert (decision.details, decision.rounds, decision.chain) == (details, rounds, b"")
    assert (decision.values is None) == (values is None)
    if values is not None and decision.values is not None:
        assert decision.values.tobytes() == values.tobytes()


def test_the_layout_on_the_wire_is_fixed() -> None:
    body = struct.pack("<Iff", 3, 1.5, -2.0)
    values = np.array([1.5, -2.0], np.float32)
    assert encode_report(Report(0, 3, values)) == body + struct.pack("<I", zlib.crc32(body))
    details = b"abcdefghijklmnop"
    body = struct.pack("<BIdIff", 1, 3, 0.01, 400, 1.5, -2.0) + details
    assert encode_decision(Decision(3, 0.01, values, details, 400)) == body + struct.pack("<I", zlib.crc32(body))
    body = struct.pack("<BIdI", 2, 3, 0.01, 400) + details
    assert encode_decision(Decision(3, 0.01, None, details, 400)) == body + struct.pack("<I", zlib.crc32(body))
    assert payload_bytes(64) == 256


@given(values=bits(), number=ROUNDS, flip=st.integers(1, 255), data=st.data())
@settings(deadline=None)
def test_any_damaged_byte_is_refused(values: NDArray[np.float32], number: int, flip: int, data: st.DataObject) -> None:
    decided = encode_decision(Decision(number, 0.1, values, b"0123456789abcdef"))
    abandoned = encode_decision(Decision(number, 0.1, None, b"0123456789abcdef"))
    report = encode_report(Report(1, number, values))
    for message in (report, decided, abandoned):
        damaged = bytearray(message)
        damaged[data.draw(st.integers(0, len(message) - 1))] ^= flip
        with pytest.raises(ProtocolError):
            if message is report:
                decode_report(damaged, 1, len(values))
            else:
                decode_decision(damaged, len(values))


@pytest.mark.slow
@given(
    data=st.binary(max_size=60) | st.binary(min_size=140, max_size=170), scalars=st.integers(0, 10),
    name=st.sampled_from(sorted(codec.CODECS)), seal=st.booleans(), head=st.sampled_from([b"", b"CYBER0 H\x01\0"]),
)  # fmt: skip
@settings(deadline=None, max_examples=2000)
def test_random_bytes_raise_nothing_but_a_protocol_error(
    data: bytes, scalars: int, name: str, seal: bool, head: bytes
) -> None:
    data = head + data
    message, this = data + struct.pack("<I", zlib.crc32(data)) if seal else data, codec.make(name)
    for decode in (
        lambda: decode_report(message, 0, scalars, this),
        lambda: decode_decision(message, scalars, this),
        lambda: decode_hello(message),
        lambda: decode_opened(message),
        lambda: kind_of(message),
    ):
        try:
            decode()
        except ProtocolError as error:
            assert str(error)


@pytest.mark.slow
def test_twenty_thousand_random_frames_do_not_crash_a_decoder() -> None:
    """Lengths that are right, with a right CRC every other time: what passes the first checks is what could crash."""
    generator = random.Random(0)
    log8 = codec.make("log8")
    lengths = (0, 1, 4, 5, 12, 17, 20, 24, 25, 29, 32, 41, 128)
    decoders = (lambda d: decode_report(d, 0, 4), lambda d: decode_report(d, 0, 4, log8), decode_hello, decode_opened,
                lambda d: decode_decision(d, 4), lambda d: decode_decision(d, 4, log8), kind_of)  # fmt: skip
    passed = 0
    for i in range(20_000):
        data = generator.randbytes(generator.choice(lengths))
        if i % 2 and len(data) > 4:
            data = data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))
        for decode in decoders:
            try:
                decode(data)
                passed += 1
            except ProtocolError:
                pass
    assert passed > 1000


def test_a_refusal_says_why() -> None:
    values = np.zeros(2, np.float32)
    report = encode_report(Report(0, 1, values))
    with pytest.raises(ProtocolError, match="has 16 or 24 bytes, got 15"):
        decode_report(report[:-1], 0, 2)
    with pytest.raises(ProtocolError, match="CRC"):
        decode_report(report[:-1] + b"\xff", 0, 2)
    with pytest.raises(ProtocolError, match="made of bytes"):
        decode_report(10**12, 0, 2)  # type: ignore[arg-type]
    body = struct.pack("<BIdIff", 7, 3, 0.01, 9, 1.5, -2.0) + b"abcdefghijklmnop"
    with pytest.raises(ProtocolError, match="not 7"):
        decode_decision(body + struct.pack("<I", zlib.crc32(body)), 2)
    body = struct.pack("<BIdIff", 2, 3, 0.01, 9, 1.5, -2.0) + b"abcdefghijklmnop"
    with pytest.raises(ProtocolError, match="kind 2 has 37 bytes"):
        decode_decision(body + struct.pack("<I", zlib.crc32(body)), 2)


def test_numbers_that_are_not_finite_pass_the_decoder() -> None:
    values = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert decode_report(encode_report(Report(0, 1, values)), 0, 3).values.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "report",
    [
        Report(0, -1, np.zeros(1, np.float32)),
        Report(0, 2**32, np.zeros(1, np.float32)),
        Report(0, 0, np.zeros(1)),  # type: ignore[arg-type]
        Report(0, 0, np.zeros((1, 1), np.float32)),
    ],
)
def test_what_does_not_fit_the_wire_is_not_encoded(report: Report) -> None:
    with pytest.raises(ProtocolError):
        encode_report(report)


def test_a_decision_without_the_digest_of_its_details_is_not_encoded() -> None:
    with pytest.raises(ProtocolError, match="16 bytes of a digest of details, got 5"):
        encode_decision(Decision(0, 0.1, None, b"short"))


HELLO = Hello(VOTER, 7, b"r" * 32, b"w" * 32, b"f" * 32, 12, b"12345678")


@given(
    role=st.sampled_from([VOTER, FOLLOWER]), client=ROUNDS, number=ROUNDS, chain=st.binary(min_size=8, max_size=8),
    digests=st.lists(st.binary(min_size=32, max_size=32), min_size=3, max_size=3),
)  # fmt: skip
def test_a_hello_survives_the_wire(role: int, client: int, number: int, chain: bytes, digests: list[bytes]) -> None:
    hello = Hello(role, client, *digests, number, chain)
    data = encode_hello(hello)
    assert len(data) == 128 and decode_hello(data) == hello


def test_a_hello_of_another_version_is_told_apart_from_damage() -> None:
    data = bytearray(encode_hello(HELLO))
    data[8] = 9
    with pytest.raises(ProtocolError, match="speaks version 9"):
        decode_hello(bytes(data) + b"and more")
    with pytest.raises(ProtocolError, match="CRC"):
        decode_hello(encode_hello(HELLO)[:-1] + b"?")
    with pytest.raises(ProtocolError, match="has 128 bytes"):
        decode_hello(b"GET / HTTP/1.1")
    with pytest.raises(ProtocolError, match="made of bytes"):
        decode_hello(None)  # type: ignore[arg-type]


def test_a_report_carries_the_digest_when_it_is_due() -> None:
    for digest in (b"", b"abcdefgh"):
        data = encode_report(Report(3, 9, np.ones(4, np.float32), digest))
        assert len(data) == 24 + len(digest) and decode_report(data, 3, 4).digest == digest
    with pytest.raises(ProtocolError, match="8 bytes of a digest"):
        encode_report(Report(3, 9, np.ones(4, np.float32), b"abc"))


def test_a_federators_messages_say_what_they_are() -> None:
    assert decode_opened(encode_opened(Opened(5, b"12345678 and more"))) == Opened(5, b"12345678")
    assert kind_of(encode_bare(REPLAY)) == REPLAY and kind_of(encode_bare(ENDED)) == ENDED
    for wrong in (b"", b"\x00", b"\x09abc", encode_bare(REPLAY)[:-1]):
        with pytest.raises(ProtocolError):
            kind_of(wrong)


def test_codecs_decide_how_long_a_message_is() -> None:
    values = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
    for name, size in (("float32", 4), ("bfloat16", 2), ("log8", 1)):
        this = codec.make(name)
        report = encode_report(Report(0, 1, values), this)
        assert len(report) == 8 + 4 * size and decode_report(report, 0, 4, this).values.tolist() == values.tolist()
        decision = encode_decision(Decision(1, 0.1, values, bytes(16)), this)
        assert len(decision) == 37 + 4 * size


@given(
    metrics=st.dictionaries(
        st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12), FINITE, max_size=8
    )
)
def test_what_a_follower_found_survives_the_wire(metrics: dict[str, float]) -> None:
    sent = EvaluationMessage(7, 0.5, -1.25, metrics)
    assert decode_evaluation(encode_evaluation(sent)) == sent
    assert len(encode_evaluation(EvaluationMessage(7, 0.5, 1.0))) == 25


@pytest.mark.parametrize("accuracy", [0.0, 1.0, -0.5, -1e9, math.nan])
def test_an_accuracy_may_be_below_0_as_that_of_a_regression(accuracy: float) -> None:
    found = decode_evaluation(encode_evaluation(EvaluationMessage(7, accuracy, 1.0)))
    assert found.accuracy == accuracy or math.isnan(accuracy)


@pytest.mark.parametrize("accuracy", [1.5, math.inf, -math.inf])
def test_an_accuracy_above_1_or_infinite_is_refused(accuracy: float) -> None:
    with pytest.raises(ProtocolError, match="an accuracy is finite and at most 1"):
        decode_evaluation(encode_evaluation(EvaluationMessage(7, accuracy, 1.0)))


def test_more_metrics_than_an_evaluation_may_carry_stay_at_home() -> None:
    sent = encode_evaluation(
        EvaluationMessage(7, 0.5, 1.0, {"x" * 65: 1.0, "": 2.0, **{f"m{i}": float(i) for i in range(40)}})
    )
    assert decode_evaluation(sent).metrics == {f"m{i}": float(i) for i in range(32)}


@pytest.mark.parametrize(
    ("count", "rest"),
    [(1, b""), (1, b"\x02f1" + bytes(7)), (0, b"\x02f1" + bytes(8)), (1, b"\x00" + bytes(8)),
     (1, b"\x02\xff\xfe" + bytes(8)), (1, b"\x02a\n" + bytes(8)), (2, (b"\x01a" + bytes(8)) * 2),
     (1, b"\x41" + b"a" * 65 + bytes(8)),
     (33, b"".join(b"\x02" + f"{i:02}".encode() + bytes(8) for i in range(33)))],
)  # fmt: skip
def test_an_evaluation_with_improper_metrics_is_refused(count: int, rest: bytes) -> None:
    body = struct.pack("<IddB", 7, 0.5, 1.0, count) + rest
    with pytest.raises(ProtocolError):
        decode_evaluation(body + struct.pack("<I", zlib.crc32(body)))
