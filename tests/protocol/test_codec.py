"""Codecs: what travels comes back as everybody decodes it, order is kept, and replicas agree bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic import Blobs, config, one_thread  # noqa: F401

from cyber0 import Simulation
from cyber0.config import choices
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger import Ledger, first_chain, read_records
from cyber0.protocol import codec
from cyber0.protocol.messages import payload_bytes

CODECS = sorted(codec.CODECS)
WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda w: np.array(w, np.uint32).view(np.float32))
FINITE = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)


def test_the_codecs_are_those_that_can_be_chosen() -> None:
    assert list(codec.CODECS) == list(choices.CODECS)
    with pytest.raises(ConfigError, match="did you mean 'log8'"):
        codec.make("log")


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@given(values=WORDS)
def test_what_was_decoded_once_survives_any_number_of_journeys(name: str, values: NDArray[np.float32]) -> None:
    this = codec.make(name)
    data = this.encode(values)
    assert len(data) == this.size * len(values) == payload_bytes(len(values), this)
    seen = this.decode(data)
    assert seen.dtype == np.float32 and this.encode(this.decode(this.encode(seen))) == this.encode(seen)
    assert np.array_equal(np.isnan(this.as_decoded(seen)), np.isnan(seen))
    numbers = ~np.isnan(seen)
    assert np.array_equal(this.as_decoded(seen)[numbers], seen[numbers])


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@given(values=FINITE)
def test_codecs_keep_order_and_sign(name: str, values: list[float]) -> None:
    ordered = np.sort(np.array(values, np.float32))
    seen = codec.make(name).as_decoded(ordered)
    assert (np.diff(seen[np.isfinite(seen)]) >= 0).all()
    assert ((seen == 0) | (np.sign(seen) == np.sign(ordered))).all()
    mirrored = codec.make(name).as_decoded(-ordered)
    assert np.array_equal(mirrored, -seen)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.binary(max_size=64))
def test_any_bytes_decode(name: str, data: bytes) -> None:
    this = codec.make(name)
    whole = data[: len(data) // this.size * this.size]
    assert len(this.decode(whole)) == len(whole) // this.size


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    broken = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert not np.isfinite(codec.make(name).as_decoded(broken)).any()


def test_bfloat16_rounds_to_nearest_even_as_torch_does() -> None:
    import torch

    words = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = words.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(codec.make("bfloat16").as_decoded(values), expected)


def test_log8_is_off_by_a_tenth_at_most_within_its_range_and_saturates_beyond() -> None:
    this = codec.make("log8")
    values = np.exp(np.random.default_rng(0).uniform(np.log(1.9e-5), np.log(55_000), 10_000)).astype(np.float32)
    seen = this.as_decoded(values)
    assert np.abs(seen / values - 1).max() < 0.1
    assert this.as_decoded(np.array([1, 2, 0.5, -4, 0], np.float32)).tolist() == [1, 2, 0.5, -4, 0]
    assert this.as_decoded(np.array([1e38, -1e38, 1e-9], np.float32)).tolist() == [
        this.decode(b"\x7f")[0], -this.decode(b"\x7f")[0], 0,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["bfloat16", "log8"])
def test_decided_values_are_what_everyone_decodes_and_traffic_is_counted_by_codec(name: str) -> None:
    simulation = Simulation(config(f"serve.codec={name}", "rounds=3"), task=Blobs())
    for _ in range(3):
        record = simulation.run_round()
        assert record.values is not None
        assert codec.make(name).as_decoded(record.values).tobytes() == record.values.tobytes()
    assert simulation.ledger.header.codec == name
    assert simulation.traffic()[1] == 3 * 8 * codec.make(name).size


def test_training_gets_there_with_one_byte_a_number() -> None:
    losses = {}
    for name in ("float32", "log8"):
        simulation = Simulation(config(f"serve.codec={name}"), task=Blobs())
        start = simulation.evaluate().loss
        for _ in range(30):
            simulation.run_round()
        losses[name] = simulation.evaluate().loss
    assert losses["log8"] < 0.9 * start
    assert abs(losses["log8"] - losses["float32"]) < 0.1 * start


def test_chained_rounds_draw_other_directions_and_every_replica_agrees() -> None:
    digests = {}
    for mode in ("shared", "chained"):
        settings = config(f"serve.seed_mode={mode}", "method.local_epochs=2", "task.dtype=bfloat16")
        simulation = Simulation(settings, task=Blobs())
        keys = set()
        for _ in range(4):
            keys.add(simulation.ledger.header.round_key(simulation.client.chain))
            simulation.run_round()
        assert len(keys) == (1 if mode == "shared" else 4)
        other = Simulation(settings, task=Blobs())
        other.client.catch_up(simulation.ledger.records(0, 3))
        other.client.apply(next(simulation.ledger.records(3)))
        digests[mode] = simulation.parameters.digest()
        assert other.parameters.digest() == digests[mode]
        assert other.client.chain == simulation.ledger.chain
    assert digests["shared"] != digests["chained"]


def test_a_chained_key_depends_on_the_seed_and_on_the_chain_before_it() -> None:
    header = Simulation(config("serve.seed_mode=chained"), task=Blobs()).ledger.header
    key = header.round_key(bytes(8))
    assert key == header.round_key(bytes(32)) and 0 <= key < 2**64
    assert key != header.round_key(b"\x01" + bytes(7))
    with pytest.raises(LedgerError, match="8 bytes"):
        header.round_key(b"short")


def ledger_after(rounds: int) -> Ledger:
    simulation = Simulation(config(), task=Blobs())
    for _ in range(rounds):
        simulation.run_round()
    return simulation.ledger


def test_chunks_of_a_ledger_read_back_as_its_records() -> None:
    ledger = ledger_after(5)
    start, chain = 0, first_chain(ledger.header)
    while start < 5:
        data, count = ledger.chunk(start, 200)
        assert count >= 1
        records = read_records(ledger.header, data, start, chain)
        assert len(records) == count
        for mine, theirs in zip(records, ledger.records(start, start + count), strict=True):
            assert (mine.round, mine.chain) == (theirs.round, theirs.chain)
            assert mine.values is not None and theirs.values is not None
            assert mine.values.tobytes() == theirs.values.tobytes()
        start, chain = start + count, records[-1].chain
    assert chain == ledger.chain == ledger.chain_at(5)
    assert ledger.chunk(5, 200) == (b"", 0)


@pytest.mark.slow
@given(data=st.data())
def test_a_damaged_chunk_is_refused(data: st.DataObject) -> None:
    ledger = LEDGERS.setdefault("played", ledger_after(3))
    chunk, _ = ledger.chunk(0, 1 << 20)
    chain = first_chain(ledger.header)
    place = data.draw(st.integers(0, len(chunk) - 1))
    damaged = bytearray(chunk)
    damaged[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LedgerError):
        read_records(ledger.header, bytes(damaged), 0, chain)
    cut = chunk[:place]
    try:
        assert len(read_records(ledger.header, cut, 0, chain)) < 3
    except LedgerError as error:
        assert "round" in str(error)
    with pytest.raises(LedgerError, match="hash chain"):
        read_records(ledger.header, chunk, 0, b"another!")


LEDGERS: dict[str, Ledger] = {}
