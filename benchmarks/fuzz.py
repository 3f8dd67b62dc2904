"""Hostile bytes into every decoder of the network: whatever comes, it is decoded or refused, never a crash.

    python benchmarks/fuzz.py                   a million inputs: random, and true messages that were damaged
    python benchmarks/fuzz.py --quick           20,000 of them, as tests/test_fuzz.py does in CI
    python benchmarks/fuzz.py --atheris 1000000     as many inputs by atheris (pip install atheris), guided by coverage

What is accepted must say the same again when it is encoded.
"""

from __future__ import annotations

import io
import math
import random
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from measure import Figure, main

from cyber0.errors import LedgerError, ProtocolError
from cyber0.ledger import Header, LayoutEntry, Ledger, Record, first_chain, opening_of, read_opening, read_records
from cyber0.ledger.record import Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.messages import (
    ENDED,
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
)

K = 4
INPUTS, FEW = 1_000_000, 20_000
REFUSALS = (ProtocolError, LedgerError)
HEADER = Header(
    seed=0, layout=(LayoutEntry("w", (5,), "float32", 0),), distribution="gaussian", k=K, local_epochs=1,
    mu=1e-3, estimator="two_point", lr=0.01, lr_schedule="constant", projection_radius=None, weights_digest="11" * 32,
    rest_digest="22" * 32, clients=3,
)  # fmt: skip
RUN = first_chain(HEADER)


def _report_as(name: str) -> Callable[[bytes], Any]:
    codec = codecs.make(name)

    def decode(data: bytes) -> None:
        report = decode_report(data, 0, K, codec)
        again = decode_report(encode_report(report, codec), 0, K, codec)
        assert again.round == report.round and again.digest == report.digest
        assert np.array_equal(again.values, report.values, equal_nan=True)

    return decode


def _decision_as(name: str) -> Callable[[bytes], Any]:
    codec = codecs.make(name)

    def decode(data: bytes) -> None:
        decision = decode_decision(data, K, codec)
        if decision.values is None or not np.isnan(decision.values).any():  # of NaN there are many patterns
            assert decode_decision(encode_decision(decision, codec), K, codec).details == decision.details

    return decode


def _hello(data: bytes) -> None:
    hello = decode_hello(data)
    assert decode_hello(encode_hello(hello)) == hello


def _opened(data: bytes) -> None:
    assert encode_opened(decode_opened(data)) == data


def _evaluation(data: bytes) -> None:
    found = decode_evaluation(data)
    if not math.isnan(found.accuracy):  # of NaN there are many patterns
        again = decode_evaluation(encode_evaluation(found))
        assert again.round == found.round and again.metrics.keys() == found.metrics.keys()


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{f"report {name}": _report_as(name) for name in codecs.CODECS},
    **{f"decision {name}": _decision_as(name) for name in codecs.CODECS},
    "hello": _hello,
    "opened": _opened,
    "evaluation": _evaluation,
    "kind": kind_of,
    "records": lambda data: read_records(HEADER, data, 0, RUN[:8]),
    "opening": lambda data: read_opening(io.BytesIO(data), "the other side"),
}


def true_messages() -> list[bytes]:
    """Return one of every kind, as an honest participant sends it."""
    values = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    ledger = Ledger.create(None, HEADER)
    for number in range(3):
        decided = values if number != 1 else None
        ledger.append(Record(number, 0.1, decided, np.ones(3, np.bool_), np.zeros(3, np.int64)))
    messages = [
        encode_hello(Hello(VOTER, 1, RUN, bytes(32), bytes(32), 0, RUN[:8])),
        encode_opened(Opened(2, RUN)),
        encode_evaluation(EvaluationMessage(3, 0.5, 1.0)),
        encode_evaluation(EvaluationMessage(3, 0.5, 1.0, {"f1": 0.5, "fehler": -1.0})),
        encode_bare(ENDED),
        ledger.chunk(0, 1 << 20)[0],
        opening_of(HEADER),
    ]
    for codec in codecs.CODECS.values():
        messages += [encode_report(Report(0, 5, values), codec), encode_report(Report(0, 5, values, bytes(8)), codec)]
        messages += [encode_decision(Decision(5, 0.1, v, RUN[:16]), codec) for v in (values, None)]
    return messages


def inputs(number: int, seed: int = 0) -> Iterator[bytes]:
    """Yield so many inputs: random bytes of telling lengths, and true messages with a few bytes changed, cut or added.

    Half of them are sealed anew, so that they come past the CRC.
    """
    generator, honest = random.Random(seed), true_messages()
    lengths = sorted({0, 1, 5, *map(len, honest)})
    for _ in range(number):
        if generator.random() < 0.3:
            data = bytearray(generator.randbytes(generator.choice([*lengths, generator.randrange(200)])))
        else:
            data = bytearray(generator.choice(honest))
            for _ in range(generator.randrange(4)):
                _damage(data, generator)
        if len(data) > 4 and generator.random() < 0.5:
            data[-4:] = struct.pack("<I", zlib.crc32(data[:-4]))
        yield bytes(data)


def _damage(data: bytearray, generator: random.Random) -> None:
    if not data:
        return
    place, how = generator.randrange(len(data)), generator.randrange(4)
    if how == 0:
        data[place] = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
    elif how == 1:
        del data[place:]
    elif how == 2:
        data[place:place] = generator.randbytes(generator.randrange(1, 9))
    else:
        data[place : place + 4] = generator.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\xff\xff"))


def feed(data: bytes) -> int:
    """Give bytes to every decoder, and return how many took them; anything but a refusal is an error."""
    taken = 0
    for decode in DECODERS.values():
        try:
            decode(data)
        except REFUSALS:
            continue
        taken += 1
    return taken


def fuzz(quick: bool) -> Iterator[Figure]:
    """Inputs into every decoder."""
    number, begin = FEW if quick else INPUTS, time.perf_counter()
    taken = sum(bool(feed(data)) for data in inputs(number))
    note = f"{taken:,} well formed; {len(DECODERS)} decoders; {number / (time.perf_counter() - begin):,.0f} a second"
    yield Figure("inputs without a crash", float(number), "", note=note)


def guided(runs: int) -> None:
    """Let atheris look for inputs that reach new code; it ends the process."""
    import atheris

    from cyber0.ledger import header, record
    from cyber0.protocol import codec
    from cyber0.protocol import messages as protocol

    for module in (codec, protocol, header, record):
        for name, function in vars(module).items():
            if callable(function) and getattr(function, "__module__", "") == module.__name__ and hasattr(
                function, "__code__"
            ):  # fmt: skip
                setattr(module, name, atheris.instrument_func(function))

    def one(data: bytes) -> None:
        sealed = data[:-4] + struct.pack("<I", zlib.crc32(data[:-4])) if len(data) > 4 else data
        feed(data)
        feed(sealed)

    atheris.Setup([sys.argv[0], f"-runs={runs}", "-seed=1", "-max_len=600", "-print_final_stats=1"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--atheris"]:
        guided(int(sys.argv[2]) if len(sys.argv) > 2 else INPUTS)
    else:
        sys.exit(main(__doc__, {"fuzz": fuzz}, {}))
