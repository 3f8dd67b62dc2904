"""CUDA gives the bits of the definition: directions, norms, commits and probes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import HUGE, meeting_its_threshold, near_the_edge
from cuda_bits import DEVICE, DTYPES, SOME_PROBE, assert_same_bits, bits, some_step, transformers
from spaces import some_space
from torch import Tensor

from cyber0.directions import DISTRIBUTIONS, DirectionSpace, Probe, Step, definition, engine, reference
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.cuda

TILES = {"float32": 1024, "float16": 4096, "bfloat16": 4096}  # coordinates that one program owns
SPECIAL32 = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
             0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x3F800000, 0x33800000, 0x477FE000]  # fmt: skip


def patterns(storage: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bits: NaN, infinities, subnormals and signed zeros are among them."""
    rng = np.random.default_rng(seed)
    if storage != "float32":
        everything = np.arange(1 << 16, dtype=np.uint16)
        rng.shuffle(everything)
        return np.resize(everything, count)
    words = rng.integers(0, 2**32, count, dtype=np.uint32)
    words[::3] = np.float32(rng.normal(size=len(words[::3])) * 0.02).view(np.uint32)
    words[1::3] &= np.uint32(0x80FFFFFF)  # denormals and their neighbours
    words[: len(SPECIAL32)] = SPECIAL32[:count]
    return words.view(np.float32)


def on_device(stored: np.ndarray, storage: str, misaligned: int = 0) -> Tensor:
    """The stored values on the GPU, `misaligned` elements behind an address that allocators give."""
    whole = torch.empty(len(stored) + misaligned, dtype=DTYPES[storage], device=DEVICE)
    whole[misaligned:].copy_(torch.from_numpy(stored.copy()).view(DTYPES[storage]))
    return whole[misaligned:]


def check_apply(
    storage: str,
    start: int,
    count: int,
    steps: list[Step],
    probe: Probe | None,
    distribution: str = "gaussian",
    dimension: int = 1 << 20,
    misaligned: int = 0,
) -> None:
    stored = patterns(storage, count, seed=start % 1000)
    source = on_device(stored, storage, misaligned)
    before = bits(source).copy()
    assert_same_bits(before, stored)
    guard = torch.full((count + 64,), 3.0, dtype=DTYPES[storage], device=DEVICE)
    out = guard[32 : 32 + count]
    engine.apply(source, out, start, steps, probe, some_space(distribution, dimension))
    expected = definition.apply(stored, storage, start, steps, probe, some_space(distribution, dimension))
    assert_same_bits(out, expected)
    assert_same_bits(source, stored)
    assert (guard[:32] == 3).all() and (guard[32 + count :] == 3).all(), "written outside of out"
    engine.apply(source, source, start, steps, probe, some_space(distribution, dimension))
    assert_same_bits(source, expected)


# Directions.


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("count", [1, 2, 31, 127, 1023, 1024, 1025, 4095, 4097, 70 * 1024 + 13])
def test_directions_have_the_bits_of_the_definition(distribution: str, count: int) -> None:
    for start in (0, 1, 16, 1023, 1024, 12_345):
        place = (2**64 - 1 - count, 2**32 - 1, 2**24 - 1)
        out = torch.full((count,), torch.nan, device=DEVICE)
        engine.fill(out, start, *place, some_space(distribution, start + count))
        assert_same_bits(out, some_space(distribution, start + count).coordinates(*place, start, count))


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("start", [2**31 - 700, 2**32 - 700, 2**34 - 700, 2**34 + 12_345, 2**39 - 700, 2**41 - 3])
def test_far_coordinates_have_the_bits_of_the_definition(distribution: str, start: int) -> None:
    out = torch.empty(3000, device=DEVICE)
    engine.fill(out, start, 6, 7, 8, some_space(distribution, start + 3000))
    assert_same_bits(out, reference(6, 7, 8, start, 3000, distribution))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("round", [0, 1, 2**31, 2**32 - 1])
def test_every_part_of_the_counter_and_the_key_counts(seed: int, round: int) -> None:
    for index in (0, 1, 2**24 - 1):
        out = engine.fill(torch.empty(1500, device=DEVICE), 7, seed, round, index, DirectionSpace("gaussian", 2000))
        assert_same_bits(out, reference(seed, round, index, 7, 1500, "gaussian"))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_many_rows_are_the_single_directions(distribution: str) -> None:
    matrix = engine.fill(torch.empty(7, 5001, device=DEVICE), 1021, 9, 8, 2**24 - 7, some_space(distribution, 7000))
    for r in range(7):
        expected = some_space(distribution, 7000).coordinates(9, 8, 2**24 - 7 + r, 1021, 5001)
        assert_same_bits(matrix[r], expected)


@pytest.mark.parametrize("dimension", [1, 2, 1023, 1024, 1025, 7850, 1_000_003])
def test_norms_and_scales_are_those_of_the_definition(dimension: int) -> None:
    for seed, round, index in [(0, 0, 0), (1, 1, 1), (2**64 - 1, 2**32 - 1, 2**24 - 1)]:
        engine.sphere_scale.cache_clear()
        scale = engine.sphere_scale(seed, round, index, dimension, DEVICE)
        assert scale.dtype == np.float32
        assert scale == definition.sphere_scale(seed, round, index, dimension)


# Commits and probes.

WHAT: dict[str, tuple[list[Step], Probe | None]] = {
    "one step": ([some_step(1)], None),
    "a step of one direction": ([some_step(2, k=1)], None),
    "a probe": ([], SOME_PROBE),
    "three steps and a probe": ([some_step(1), some_step(2, rounding=9), some_step(2**32 - 1, seed=1)], SOME_PROBE),
    "three steps by 16 bits and a probe": (
        [some_step(1, bits=16), some_step(2, rounding=9, bits=16), some_step(2**32 - 1, seed=1, bits=16)],
        SOME_PROBE,
    ),
    "a step without directions": ([Step(1, 2, np.zeros(0, np.float32))], None),
    "nothing": ([], None),
}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
def test_the_kernel_gives_the_bits_of_the_definition(storage: str, distribution: str, what: str) -> None:
    tile = TILES[storage]
    # Triton compiles anew for an argument that is 1 or a multiple of 16: few places, not to compile for minutes.
    places = [(0, 1), (tile - 1, 2), (tile - 1, tile + 2), (777, 3 * tile + 5)]
    if distribution == "gaussian" and what == "three steps and a probe":
        places += [(0, tile), (1, tile - 1), (16, tile), (16, 3 * tile + 7)]
    for start, count in places:
        check_apply(storage, start, count, *WHAT[what], distribution, dimension=20_000)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("storage", DTYPES)
def test_low_rank_steps_agree_for_every_rank_and_however_they_are_cut(
    storage: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cyber0.directions.backends import triton_low_rank

    space, steps = some_space("low_rank", 30_000, rank), [some_step(t, k=2) for t in range(7)]
    stored = patterns(storage, 25_000, seed=5)
    for limit in (1 << 26, 1 << 15):
        monkeypatch.setattr(triton_low_rank, "FACTOR_BYTES", limit)
        for probe in (None, SOME_PROBE):
            source = on_device(stored, storage)
            engine.apply(source, source, 1021, steps, probe, space)
            assert_same_bits(source, definition.apply(stored, storage, 1021, steps, probe, space))
    rows = engine.fill(torch.empty(3, 9000, device=DEVICE), 777, 9, 8, 5, space)
    for r in range(3):
        assert_same_bits(rows[r], space.coordinates(9, 8, 5 + r, 777, 9000))


@pytest.mark.parametrize(("k", "rank"), [(12, 1), (64, 1), (8, 2)])
@pytest.mark.parametrize(
    ("storage", "half_words"), [("float32", 32), ("float16", 16), ("bfloat16", 32), ("bfloat16", 16)]
)
def test_low_rank_directions_whose_factors_are_read_at_once_are_added_in_order(
    storage: str, half_words: int, k: int, rank: int
) -> None:
    space = DirectionSpace.of("low_rank", [(64, 640), (31,), (9, 33)], rank)
    rng = np.random.default_rng(2)
    narrow = (rng.normal(size=space.dimension) * 0.02).astype(np.float32)
    stored = narrow if storage == "float32" else definition.narrow(narrow, storage)
    steps = [some_step(t, k, bits=half_words) for t in range(2)]
    for some, probe in ((steps, None), (steps, SOME_PROBE), (steps[:1], None)):
        w = on_device(stored, storage)
        engine.apply(w, w, 0, some, probe, space)
        assert_same_bits(w, definition.apply(stored, storage, 0, some, probe, space))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize(("shift", "tail"), [(0, 0), (0, 777), (1, 1), (16, 0), (1000, 777)])
def test_whole_tiles_without_a_mask_agree_too(storage: str, distribution: str, shift: int, tail: int) -> None:
    """Beyond 64 tiles the whole ones are launched without a mask, the first and the last with one."""
    if distribution != "gaussian" and (shift, tail) not in [(0, 0), (1000, 777)]:
        pytest.skip("how tiles are launched does not depend on the distribution")
    tile = TILES[storage]
    count = 70 * tile + tail
    for what in ("three steps and a probe", "three steps by 16 bits and a probe"):
        check_apply(storage, 3 * tile + shift, count, *WHAT[what], distribution, dimension=80 * tile)


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("tiles", [63, 64, 65, 66])
@pytest.mark.parametrize("shift", [0, 5])
def test_whole_and_partial_tiles_change_no_bit(storage: str, tiles: int, shift: int) -> None:
    tile = TILES[storage]
    for count in (tiles * tile - 1, tiles * tile, tiles * tile + 1):
        check_apply(storage, shift, count, [some_step(1)], SOME_PROBE)


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("misaligned", [1, 2, 3, 8])
def test_tensors_at_odd_addresses_agree_too(storage: str, misaligned: int) -> None:
    check_apply(storage, misaligned, 70 * TILES[storage] + 3, [some_step(1)], SOME_PROBE, misaligned=misaligned)
    check_apply(storage, 0, 5001, [some_step(1)], SOME_PROBE, misaligned=misaligned)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-9, 1e-5, 1e-3, 1.0, 1e4, 1e38])
def test_every_16_bit_pattern_with_updates_of_every_size(storage: str, size: float, bits: int) -> None:
    steps = [some_step(3, k=3, size=size, bits=bits), some_step(4, k=3, size=size, bits=bits)]
    probe = Probe(1, 2, 3, size)
    for made, seen in ((steps, None), ([], probe), (steps, probe)):
        check_apply(storage, 12_345, (1 << 16) + 3, made, seen)


@pytest.mark.parametrize("size", [1e-44, 1e-41, 1e-38, 1e-3, 1e38])
def test_float32_denormals_are_kept(size: float) -> None:
    steps = [some_step(3, k=3, size=size), some_step(4, k=3, size=size)]
    for made, seen in ((steps, None), ([], Probe(1, 2, 3, size)), (steps, Probe(1, 2, 3, -size))):
        check_apply("float32", 12_345, 70_001, made, seen)


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("start", [2**31 - 700, 2**32 - 700, 2**34 - 700, 2**34 + 4099])
def test_far_coordinates_are_committed_as_defined(storage: str, start: int) -> None:
    check_apply(storage, start, 10_000, [some_step(3)], SOME_PROBE)
    check_apply(storage, start, 70 * TILES[storage], [some_step(3)], SOME_PROBE)
    check_apply(storage, start, 10_000, [some_step(3, bits=16)], None)


@pytest.mark.parametrize("storage", DTYPES)
def test_many_directions_and_many_steps_agree(storage: str) -> None:
    check_apply(storage, 99, 5001, [some_step(t, k=64) for t in range(3)], None)
    check_apply(storage, 99, 5001, [some_step(t, k=1) for t in range(100)], None)


@pytest.mark.parametrize("update", HUGE)
@pytest.mark.parametrize("storage", DTYPES)
def test_a_weight_that_would_leave_the_finite_range_is_clamped_as_defined(storage: str, update: str) -> None:
    stored = near_the_edge(storage, 3 * TILES[storage] + 5)
    steps = [Step(7, t, np.float32(HUGE[update]), rounding=t) for t in range(3)]
    for distribution in ("gaussian", "rademacher"):
        for made in (steps[:1], steps):
            w = on_device(stored, storage)
            engine.apply(w, w, 33, made, None, some_space(distribution, 1 << 17))
            assert_same_bits(w, definition.apply(stored, storage, 33, made, None, some_space(distribution, 1 << 17)))
            assert w.isfinite().all()


@pytest.mark.parametrize("size", [1e-46, 3e38, 3.5e38, 1e300])
def test_a_probe_goes_as_far_as_on_the_cpu_however_far_that_is(size: float) -> None:
    """The coefficient of a probe is rounded to float32 without being clamped: w + c z may be infinite."""
    with np.errstate(over="ignore"):
        check_apply("float32", 5, 3000, [], Probe(1, 2, 3, size), "rademacher")


@pytest.mark.parametrize(("storage", "at"), [("float16", "normal"), ("float16", "subnormal"), ("bfloat16", "bfloat16")])
def test_a_word_that_equals_the_threshold_rounds_as_defined(storage: str, at: str) -> None:
    i, x = meeting_its_threshold(storage, at)
    step = Step(9, 3, -x * reference(9, 3, 0, i, 1, "rademacher"), rounding=2)
    stored = np.zeros(1, np.uint16)
    w = on_device(stored, storage)
    engine.apply(w, w, i, [step], None, DirectionSpace("rademacher", 1 << 23))
    assert_same_bits(w, definition.apply(stored, storage, i, [step], None, DirectionSpace("rademacher", 1 << 23)))


def test_a_model_that_diverges_has_the_same_bits_as_on_the_cpu_and_as_many_clamped_weights() -> None:
    for storage in DTYPES:
        here, there = (Parameters(m) for m in transformers(DTYPES[storage]))
        for p in (here, there):
            for t in range(3):  # the second and third by a recorded move
                p.commit(some_step(t, k=4, size=1e38))
            p.commit(some_step(3, k=4, size=3e38), radius=1e38)
        assert here.digest() == there.digest()
        assert here.saturated() == there.saturated()


@pytest.mark.parametrize("factor", [0.25, 0.7, 1e-3, 1e-6])
@pytest.mark.parametrize("storage", DTYPES)
def test_scaling_rounds_as_on_the_cpu(storage: str, factor: float) -> None:
    stored = patterns(storage, (1 << 16) + 3)
    with np.errstate(all="ignore"):
        expected = definition.narrow(definition.widen(stored, storage) * np.float32(factor), storage)
    w = on_device(stored, storage)
    engine.scale(w, factor)
    assert_same_bits(w, expected)
