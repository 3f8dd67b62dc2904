"""The commit, to the bit: kernels against the definition, and the definition against exact arithmetic."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from by_hand import HUGE, meeting_its_threshold, near_the_edge, top, word_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import some_space

from cyber0.directions import DISTRIBUTIONS, DirectionSpace, Probe, Step, Stream, definition, engine, words
from cyber0.directions.backends import rounding
from cyber0.directions.steps import coefficients
from cyber0.errors import ModelError
from cyber0.kernels import threads as pools

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIXTEEN = ["float16", "bfloat16"]
SOME_PROBE = Probe(2**63 + 5, 2**31, 77, 1e-3)
SPECIAL32 = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
             0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x3F800000, 0x33800000, 0x477FE000]  # fmt: skip


def some_step(round: int, k: int = 2, size: float = 1e-3, rounding: int = 0, bits: int = 32) -> Step:
    c = np.random.default_rng(round).normal(size=k).astype(np.float32) * np.float32(size)
    return Step(2**64 - 3, round, c, first=5, rounding=rounding, bits=bits)


def patterns(storage: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bits (NaN, infinities, subnormals and signed zeros are among them), special ones first."""
    rng = np.random.default_rng(seed)
    if storage == "float32":
        words = rng.integers(0, 2**32, count, dtype=np.uint32)
        words[::3] = np.float32(rng.normal(size=len(words[::3])) * 0.02).view(np.uint32)
        words[1::3] &= np.uint32(0x80FFFFFF)  # denormals and their neighbours
        words[: len(SPECIAL32)] = SPECIAL32[:count]
        return words.view(np.float32)
    halves = np.arange(count, dtype=np.uint32).astype(np.uint16)  # from 65,536 on, every pattern there is
    rng.shuffle(halves)
    return halves if count >= 1 << 16 else rng.integers(0, 1 << 16, count, dtype=np.uint16)


def tensor(stored: np.ndarray, storage: str) -> torch.Tensor:
    return torch.from_numpy(stored.copy()).view(DTYPES[storage])


def bits(stored: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(stored, torch.Tensor):
        stored = stored.view(torch.int32 if stored.dtype == torch.float32 else torch.int16).numpy()
    return stored.view(np.uint32 if stored.itemsize == 4 else np.uint16)


def applied(
    stored: np.ndarray,
    storage: str,
    start: int,
    steps: list[Step],
    probe: Probe | None,
    distribution: str = "gaussian",
    dimension: int = 1 << 17,
) -> np.ndarray:
    source = tensor(stored, storage)
    out = torch.full_like(source, 3.0)
    engine.apply(source, out, start, steps, probe, some_space(distribution, dimension))
    assert np.array_equal(bits(source), bits(stored)), "probing changed the source"
    return bits(out)


def defined(
    stored: np.ndarray,
    storage: str,
    start: int,
    steps: list[Step],
    probe: Probe | None,
    distribution: str = "gaussian",
    dimension: int = 1 << 17,
) -> np.ndarray:
    return bits(definition.apply(stored, storage, start, steps, probe, some_space(distribution, dimension)))


WHAT = {
    "one step": ([some_step(1)], None),
    "a probe": ([], SOME_PROBE),
    "three steps and a probe": ([some_step(1), some_step(2, rounding=9), some_step(2**32 - 1)], SOME_PROBE),
    "three steps by 16 bits and a probe": (
        [some_step(t, rounding=r, bits=16) for t, r in ((1, 0), (2, 9), (7, 1))],
        SOME_PROBE,
    ),
    "nothing": ([], None),
    "a step without directions": ([Step(1, 2, np.zeros(0, np.float32))], None),
}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
def test_the_kernel_gives_the_bits_of_the_definition(storage: str, distribution: str, what: str) -> None:
    steps, probe = WHAT[what]
    for start, count in [(0, 1), (0, 1024), (1, 1023), (1023, 2), (1023, 1026), (777, 3333), (5000, 2048)]:
        stored = patterns(storage, count, seed=start)
        args = (stored, storage, start, steps, probe, distribution, 10_000)
        assert np.array_equal(applied(*args), defined(*args)), (start, count)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("storage", SIXTEEN)
@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e4])
def test_every_16_bit_pattern_is_committed_as_defined(storage: str, what: str, size: float) -> None:
    steps, probe = WHAT[what]
    steps = [replace(s, coefficients=s.coefficients * np.float32(size / 1e-3)) for s in steps]
    probe = probe and Probe(probe.seed, probe.round, probe.index, size)
    args = (patterns(storage, (1 << 16) + 3), storage, 12_345, steps, probe)
    assert np.array_equal(applied(*args), defined(*args))


@pytest.mark.slow
@given(
    st.sampled_from(list(DTYPES)), st.sampled_from(list(DISTRIBUTIONS)), st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3000), st.integers(1, 2500), st.integers(0, 4), st.floats(1e-12, 1e6), st.booleans(),
    st.sampled_from([16, 32]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_kernel_gives_the_bits_of_the_definition_whatever_is_asked(
    storage: str, distribution: str, seed: int, round: int, start: int, count: int, steps: int, size: float,
    probe: bool, bits: int,
) -> None:  # fmt: skip
    made = [some_step(round % 1000 + s, k=3, size=size, rounding=s, bits=bits) for s in range(steps)]
    seen = Probe(seed, round, 2**24 - 1, -size) if probe else None
    args = (patterns(storage, count, seed=count), storage, start, made, seen, distribution, 6000)
    assert np.array_equal(applied(*args), defined(*args))


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("start", [2**32 - 700, 2**34 - 700, 2**35 - 699, 2**34 + 4099])
def test_far_coordinates_are_committed_as_defined(storage: str, start: int, bits: int) -> None:
    args = (patterns(storage, 1500), storage, start, [some_step(3, bits=bits)], SOME_PROBE)
    assert np.array_equal(applied(*args), defined(*args))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("storage", DTYPES)
def test_any_number_of_threads_commits_the_same_bits(
    storage: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBER0_THREADS", str(threads))
    count = pools.THREADED_FROM + 77
    args = (patterns(storage, count), storage, 1021, [some_step(3), some_step(4)], SOME_PROBE)
    assert np.array_equal(applied(*args), defined(*args))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
def test_many_steps_in_one_pass_are_those_steps_one_at_a_time(storage: str, distribution: str) -> None:
    steps = [some_step(t, k=3, size=0.1) for t in range(20)]
    w = tensor(patterns(storage, 5001), storage)
    together = engine.apply(w, torch.empty_like(w), 99, steps, None, some_space(distribution, 6000))
    for step in steps:
        w = engine.apply(w, torch.empty_like(w), 99, [step], None, some_space(distribution, 6000))
    assert np.array_equal(bits(together), bits(w))


@pytest.mark.parametrize("storage", DTYPES)
def test_in_place_and_out_of_place_agree_and_shards_agree_with_the_whole(storage: str) -> None:
    steps, stored = [some_step(1), some_step(2)], patterns(storage, 9000)
    expected = applied(stored, storage, 0, steps, SOME_PROBE)
    w = tensor(stored, storage)
    assert engine.apply(w, w, 0, steps, SOME_PROBE, DirectionSpace("gaussian", 1 << 17)) is w
    assert np.array_equal(bits(w), expected)
    w = tensor(stored, storage)
    for low, high in [(5000, 9000), (1, 1700), (0, 1), (1700, 5000)]:
        engine.apply(w[low:high], w[low:high], low, steps, SOME_PROBE, DirectionSpace("gaussian", 1 << 17))
    assert np.array_equal(bits(w), expected)


# An independent commit: exact fractions, rounded once where the definition says so.

FORMATS = {"float32": (24, -149, 127), "float16": (11, -24, 15), "bfloat16": (8, -133, 127)}


class Number:
    """A signed fraction: the sign counts for zeros too."""

    def __init__(self, value: Fraction, negative: bool) -> None:
        self.value, self.negative = value, negative


def rounded(
    value: Fraction, negative: bool, storage: str = "float32", word: int | None = None, bits: int = 32
) -> Number:
    """Round to nearest even, or stochastically by a word of so many bits and saturating; finite results only."""
    precision, smallest, largest_exponent = FORMATS[storage]
    a = abs(value)
    binade = a.numerator.bit_length() - a.denominator.bit_length()  # exact: denominators are powers of two
    ulp = Fraction(2) ** max(smallest, binade - precision + 1)
    units, rest = divmod(a, ulp)
    if word is None:
        units += rest > ulp / 2 or (rest == ulp / 2 and units % 2 == 1)
    else:
        units += word < math.floor(rest / ulp * 2**bits)
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** largest_exponent
    a = min(units * ulp, largest) if word is not None else units * ulp
    assert a <= largest
    return Number(-a if negative else a, negative)


def product(a: Number, b: Number) -> Number:
    return rounded(a.value * b.value, a.negative != b.negative)


def total(a: Number, b: Number) -> Number:
    value = a.value + b.value
    return rounded(value, value < 0 if value else a.negative and b.negative)


def number(x: float) -> Number:
    return Number(Fraction(x), math.copysign(1, x) < 0)


def number_from(pattern: int, storage: str) -> Number:
    if storage == "float16":
        return number(struct.unpack("<e", struct.pack("<H", pattern))[0])
    if storage == "bfloat16":
        pattern <<= 16
    return number(struct.unpack("<f", struct.pack("<I", pattern))[0])


def pattern_of(x: Number, storage: str) -> int:
    as_float = -0.0 if x.value == 0 and x.negative else float(x.value)
    if storage == "float16":
        return int(struct.unpack("<H", struct.pack("<e", as_float))[0])
    pattern = int(struct.unpack("<I", struct.pack("<f", as_float))[0])
    return pattern >> 16 if storage == "bfloat16" else pattern


COEFFICIENTS = [float.fromhex(c) for c in ("0x1.043c58p-14", "0x1.483bf2p-48", "-0x1.bda568p-80", "0x1.2ed9d0p-109")]


def gaussian_by_hand(seed: int, round: int, index: int, i: int) -> Number:
    word = word_by_hand(seed, 0, round, index, i)
    signed = struct.unpack("<4b", struct.pack("<I", word))
    x = number(float(sum(w * (2 * b + 1) for w, b in zip((53, 97, 121, 127), signed, strict=True)) // 2))
    t = product(x, x)
    a, b, c, d = (number(v) for v in COEFFICIENTS)
    return product(x, total(a, product(t, total(b, product(t, total(c, product(t, d)))))))


def committed_by_hand(pattern: int, storage: str, i: int, step: Step) -> int:
    u = number(0.0)
    for r, c in enumerate(step.coefficients):
        u = total(u, product(number(float(c)), gaussian_by_hand(step.seed, step.round, step.first + r, i)))
    x = total(number_from(pattern, storage), Number(-u.value, not u.negative))
    if storage != "float32":
        place, each = (step.seed, 1, step.round, step.rounding), 32 // step.bits
        word = word_by_hand(*place, i // each) >> step.bits * (i % each) & (1 << step.bits) - 1
        x = rounded(x.value, x.negative, storage, word, step.bits)
    return pattern_of(x, storage)


@pytest.mark.slow
@pytest.mark.parametrize("bits_each", [16, 32])
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0])
def test_an_independent_commit_in_exact_fractions_agrees(storage: str, size: float, bits_each: int) -> None:
    stored, start = patterns(storage, 300, seed=7), 1001
    as_float = tensor(stored, storage).double().abs()
    stored = stored[(as_float < 1e30).numpy()]  # finite, and too small for float32 to overflow
    step = some_step(6, k=3, size=size, rounding=4, bits=bits_each)
    by_hand = [committed_by_hand(int(p), storage, start + i, step) for i, p in enumerate(bits(stored))]
    assert defined(stored, storage, start, [step], None).tolist() == by_hand
    assert applied(stored, storage, start, [step], None).tolist() == by_hand


@pytest.mark.parametrize("storage", SIXTEEN)
def test_an_independent_probe_rounds_to_nearest_even(storage: str) -> None:
    stored = patterns(storage, 300, seed=8)
    stored = stored[(tensor(stored, storage).double().abs() < 60_000).numpy()]
    by_hand = []
    for i, pattern in enumerate(bits(stored)):
        z = gaussian_by_hand(SOME_PROBE.seed, SOME_PROBE.round, SOME_PROBE.index, i)
        x = total(number_from(int(pattern), storage), product(number(float(np.float32(SOME_PROBE.coefficient))), z))
        by_hand.append(pattern_of(rounded(x.value, x.negative, storage), storage))
    assert applied(stored, storage, 0, [], SOME_PROBE).tolist() == by_hand


# storage, the pattern of w, the exponent of half a step there
TIES = [("float16", 0x3C00, -11), ("float16", 0x3C01, -11), ("float16", 4, -25), ("float16", 5, -25),
        ("bfloat16", 0x3F80, -8), ("bfloat16", 0x3F81, -8), ("bfloat16", 7, -134), ("bfloat16", 8, -134)]  # fmt: skip


@pytest.mark.parametrize(("storage", "pattern", "exponent"), TIES)
def test_a_probe_that_falls_between_two_storable_values_takes_the_even_one(
    storage: str, pattern: int, exponent: int
) -> None:
    probe = Probe(1, 2, 3, 2.0**exponent)
    stored = np.full(200, pattern, np.uint16)
    exact = number_from(pattern, storage).value
    expected = []
    for z in definition.reference(1, 2, 3, 0, 200, "rademacher"):
        x = rounded(exact + Fraction(float(z)) * Fraction(2) ** exponent, False, storage)
        expected.append(pattern_of(x, storage))
    assert defined(stored, storage, 0, [], probe, "rademacher").tolist() == expected
    assert applied(stored, storage, 0, [], probe, "rademacher").tolist() == expected


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(SIXTEEN),
    st.sampled_from([(word, bits) for bits in (16, 32) for word in (0, 1, 2 ** (bits - 1), 2**bits - 1)]),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_stochastic_rounding_of_any_float_is_that_of_exact_fractions(
    pattern: int, storage: str, drawn: tuple[int, int]
) -> None:
    x, (word, bits) = np.array([pattern], np.uint32).view(np.float32), drawn
    got = int(definition.narrow_stochastically(x, storage, np.array([word], np.uint32), bits)[0])
    if np.isnan(x[0]):
        assert got == definition.NAN16
    elif np.isinf(x[0]):
        assert got & 0x7FFF == {"float16": 0x7BFF, "bfloat16": 0x7F7F}[storage]
    else:
        exact = rounded(Fraction(float(x[0])), bool(np.signbit(x[0])), storage, word, bits)
        assert got == pattern_of(exact, storage)


# Stochastic rounding: what it is for.


def storable(storage: str) -> np.ndarray:
    """Every finite value that is not negative, ascending: the value of pattern 0, 1, 2, ..."""
    top = 0x7BFF if storage == "float16" else 0x7F7F
    return tensor(np.arange(top + 1, dtype=np.uint16), storage).double().numpy()


# name: storage, the pattern of w, the update as a fraction of the step above w
PLACES = {
    "float16 at 1": ("float16", 0x3C00, 0.3), "float16 inside a binade": ("float16", 0x3D55, 0.77),
    "float16 subnormal": ("float16", 5, 0.37), "float16 smallest": ("float16", 1, 0.1),
    "float16 zero": ("float16", 0, 0.6), "float16 where subnormals end": ("float16", 0x400, 0.25),
    "float16 largest subnormal": ("float16", 0x3FF, 0.9), "float16 tiny fraction": ("float16", 0x3C00, 2**-9),
    "bfloat16 at 1": ("bfloat16", 0x3F80, 0.3), "bfloat16 inside a binade": ("bfloat16", 0x3FC5, 0.5),
    "bfloat16 subnormal": ("bfloat16", 7, 0.37), "bfloat16 zero": ("bfloat16", 0, 0.25),
}  # fmt: skip


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("place", PLACES)
def test_rounding_is_unbiased_between_the_two_neighbours(place: str, sign: int, bits: int) -> None:
    storage, pattern, fraction = PLACES[place]
    values, count = storable(storage), 1 << 18
    step_up = values[pattern + 1] - values[pattern]
    c = np.float32(fraction * step_up)
    stored = np.full(count, pattern | sign, np.uint16)
    got = applied(stored, storage, 0, [Step(11, 12, np.array([c]), bits=bits)], None, "rademacher")
    got_values = tensor(got, storage).double().numpy()
    z = definition.reference(11, 12, 0, 0, count, "rademacher")
    w = tensor(stored[:1], storage).double().item()
    for side in (1.0, -1.0):
        x, results = w - float(c) * side, got_values[z == side]
        above = int(np.searchsorted(values, abs(x), side="right"))
        neighbours = sorted(math.copysign(v, x) for v in values[above - 1 : above + 1])
        assert set(np.unique(results)) <= set(neighbours)
        ulp = neighbours[1] - neighbours[0]
        p = abs(x - neighbours[0]) / ulp
        assert abs(results.mean() - x) <= 5 * ulp * math.sqrt(p * (1 - p) / len(results)), (x, neighbours)


ALL_HALVES = np.arange(1 << 16, dtype=np.uint32)


@given(st.sampled_from(SIXTEEN), st.integers(0, 0x7F7FFFFF))
@settings(max_examples=60, deadline=None)
def test_the_bias_of_rounding_by_16_bits_is_bounded_and_zero_but_for_the_smallest_float16(
    storage: str, pattern: int
) -> None:
    """The mean over all 2^16 words, exactly; where the largest value clamps x, there is nothing to round."""
    x = np.uint32(pattern).view(np.float32)
    if abs(float(x)) > storable(storage)[-1]:
        return
    got = definition.narrow_stochastically(np.full(1 << 16, x), storage, ALL_HALVES, 16)
    patterns, counts = np.unique(got, return_counts=True)
    mean = sum(number_from(int(p), storage).value * int(n) for p, n in zip(patterns, counts, strict=True)) / 2**16
    bias = Fraction(float(x)) - mean
    if storage == "float16" and x < 2.0**-17:
        assert 0 <= bias < Fraction(1, 2**40)
    else:
        assert bias == 0


def test_rounding_by_16_bits_has_the_stated_bias_at_the_smallest_float16() -> None:
    x = np.float32(2.0**-24 * (2.0**-16 - 2.0**-30))  # almost 2^-16 of the smallest value: always rounded to 0
    assert not definition.narrow_stochastically(np.full(1 << 16, x), "float16", ALL_HALVES, 16).any()
    assert definition.narrow_stochastically(np.array([x]), "float16", np.zeros(1, np.uint32), 32) == 1


def test_two_weights_share_a_rounding_word_and_no_two_pairs_do() -> None:
    step = some_step(3, rounding=4, bits=16)
    whole = definition.rounding_words(step, 0, 4000)
    drawn = words(step.seed, Stream.ROUNDING, 3, 4, 0, 2000)
    assert np.array_equal(whole[::2], drawn % 2**16) and np.array_equal(whole[1::2], drawn >> 16)
    for start, count in [(0, 1), (1, 1), (7, 8), (8, 7), (1001, 2002)]:
        assert np.array_equal(definition.rounding_words(step, start, count), whole[start : start + count])


def test_steps_that_round_differently_are_not_taken_in_one_pass() -> None:
    w = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the same number of bits"):
        engine.apply(w, w, 0, [some_step(1), some_step(2, bits=16)], None, DirectionSpace("gaussian", 8))


@pytest.mark.parametrize(("storage", "largest"), [("float16", 65504.0), ("bfloat16", float(0xFF << 120))])
def test_a_commit_saturates_at_the_largest_finite_value(storage: str, largest: float) -> None:
    assert storable(storage)[-1] == largest
    for update in (largest * 2**-12, largest * 0.9):
        w = torch.tensor([largest, -largest]).repeat(5000).to(DTYPES[storage])
        engine.apply(w, w, 0, [Step(1, 1, np.float32([update]))], None, DirectionSpace("rademacher", 10_000))
        assert w.isfinite().all()
        assert w.max().item() == largest and w.min().item() == -largest
        assert (w.abs() < largest).any()


@pytest.mark.parametrize("update", HUGE)
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("storage", DTYPES)
def test_no_commit_leaves_the_finite_range_and_the_kernel_clamps_as_defined(
    storage: str, distribution: str, update: str
) -> None:
    stored = near_the_edge(storage, 5000)
    steps = [Step(7, t, np.float32(HUGE[update]), rounding=t) for t in range(3)]
    for made in (steps[:1], steps):
        got = applied(stored, storage, 33, made, None, distribution)
        assert np.array_equal(got, defined(stored, storage, 33, made, None, distribution))
        assert tensor(got.view(stored.dtype), storage).isfinite().all()
    w = tensor(stored, storage)
    for step in steps:  # one at a time
        engine.apply(w, w, 33, [step], None, some_space(distribution, 1 << 17))
    assert np.array_equal(bits(w), got)


@pytest.mark.parametrize("storage", DTYPES)
def test_a_weight_goes_to_the_edge_when_its_update_is_infinite_and_stays_when_that_is_no_number(storage: str) -> None:
    stored = near_the_edge(storage, 4000)
    z1, z2 = (definition.reference(7, 1, j, 0, 4000, "rademacher") for j in (0, 1))
    c = np.float32([3e38, 3e38])  # infinite where both signs are the same
    got = applied(stored, storage, 0, [Step(7, 1, c)], None, "rademacher")
    same = z1 == z2
    sign = np.where(z1 > 0, 1 << (31 if storage == "float32" else 15), 0)  # w - inf is at the lower edge
    assert np.array_equal(got[same], (sign + top(storage))[same])
    c = np.float32([3e38, 3e38, np.inf])
    lost = same & (definition.reference(7, 1, 2, 0, 4000, "rademacher") != z1)  # inf - inf
    got = applied(stored, storage, 0, [Step(7, 1, c)], None, "rademacher")
    assert lost.sum() > 500
    assert np.array_equal(got[lost], bits(stored)[lost])


def test_drawn_directions_move_weights_beyond_the_edge_to_the_same_bits() -> None:
    stored = near_the_edge("float32", 3000)
    for update in HUGE.values():
        step, w = Step(7, 1, np.float32(update)), tensor(stored, "float32")
        z = engine.fill(torch.empty(len(update), 3000), 0, 7, 1, 0, DirectionSpace("gaussian", 3000))
        engine.move(w, z, step.coefficients)
        assert np.array_equal(bits(w), defined(stored, "float32", 0, [step], None))


# Thresholds: a word equal to the threshold rounds down. Coordinates whose rounding word has zeros at its end are looked
# for, and w - u is made to have just that threshold there.


@pytest.mark.slow
@pytest.mark.parametrize("way", ["definition", "kernel"])
@pytest.mark.parametrize(("storage", "at"), [("float16", "normal"), ("float16", "subnormal"), ("bfloat16", "bfloat16")])
def test_a_word_that_equals_the_threshold_rounds_down_and_one_below_it_up(storage: str, at: str, way: str) -> None:
    i, x = meeting_its_threshold(storage, at)
    z = definition.reference(9, 3, 0, i, 1, "rademacher")
    down = {"normal": 0x3C00, "subnormal": 0, "bfloat16": 0x3F80}[at]
    ulp = {"normal": 2.0**-23, "subnormal": 2.0**-48, "bfloat16": 2.0**-23}[at]
    commit = applied if way == "kernel" else defined
    for moved, expected in ((x, down), (np.float32(x + np.float32(ulp)), down + 1)):
        step = Step(9, 3, -moved * z, rounding=2)
        assert commit(np.zeros(1, np.uint16), storage, i, [step], None, "rademacher")[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("storage", SIXTEEN)
@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_a_storable_value_stays_whatever_the_word(storage: str, kind: type) -> None:
    """Its threshold is 0, and no word is below that; also the word 0, which comes once in 2^16 or 2^32."""
    stored = np.arange(top(storage) + 1, dtype=np.uint16)
    x, zero = definition.widen(stored, storage), np.zeros(len(stored), kind)
    assert np.array_equal(definition.narrow_stochastically(x, storage, zero, 8 * zero.itemsize), stored)
    out = np.zeros_like(stored)
    code = {"float16": rounding.FLOAT16, "bfloat16": rounding.BFLOAT16}[storage]
    rounding.narrow_stochastically_tile(x, zero, out, 0, len(x), code)
    assert np.array_equal(out, stored)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("storage", SIXTEEN)
def test_an_update_far_below_the_last_bit_is_not_lost(storage: str, bits: int) -> None:
    """1,024 times 1e-6 along one direction: nearest rounding would not move at all, the mean must move by 1e-3."""
    count, repeats, c = 1 << 16, 1024, np.float32([1e-6])
    w = torch.ones(count, dtype=DTYPES[storage])
    assert ((w.float() - 1e-6).to(w.dtype) == w).all(), "plain rounding keeps the weight"
    steps = [Step(21, 22, c, rounding=r, bits=bits) for r in range(repeats)]
    engine.apply(w, w, 0, steps, None, DirectionSpace("rademacher", count))
    z = torch.from_numpy(definition.reference(21, 22, 0, 0, count, "rademacher")).double()
    moved = ((1 - w.double()) * z).mean().item()
    ulp = 2**-10 if storage == "float16" else 2**-7
    deviation = math.sqrt(repeats * 1e-6 * ulp / count)
    assert abs(moved - repeats * 1e-6) < 5 * deviation


def test_rounding_bits_follow_the_round_and_the_rounding_index() -> None:
    w = np.full(4096, 0x3F80, np.uint16)
    c = np.float32([2**-9])
    results = [
        applied(w, "bfloat16", 0, [Step(1, t, np.float32([0, 0, *c]), first=f, rounding=r)], None, "rademacher")
        for t, f, r in [(1, 0, 0), (1, 0, 1), (2, 0, 0)]
    ]
    assert not np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


# Floating-point modes.


@pytest.fixture
def flushing() -> Iterator[None]:
    """Flush-to-zero as a user sets it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush denormals")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def is_flushing() -> bool:
    tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    return bool((tiny * 1.0).view(torch.int32).item() == 0)


def test_float32_denormals_are_kept() -> None:
    tiny = np.full(4096, 0x00000100, np.uint32).view(np.float32)
    for args in ([Step(1, 1, np.float32([1e-42]))], None), ([], Probe(1, 1, 1, 1e-42)):
        got = applied(tiny, "float32", 0, *args)
        assert np.array_equal(got, defined(tiny, "float32", 0, *args))
        assert (got & 0x7F800000 == 0).all() and len(np.unique(got)) > 100


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("storage", DTYPES)
def test_flush_to_zero_set_by_the_user_changes_no_bit_and_stays_set(
    storage: str, threads: int, flushing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the pool inherit the mode of whoever starts them: the kernels must set it there too."""
    count = pools.THREADED_FROM + 77
    small = [Step(3, 4, np.float32([1e-41, 3e-39, 1e-38]))]
    steps, probe = [some_step(1), *small] if storage == "float32" else [some_step(1)], Probe(1, 2, 3, 1e-40)
    cases = [(steps[:1], SOME_PROBE), (steps[-1:], None), ([], probe)]
    stored = patterns(storage, count)
    stored[3::5] = 0
    expected = [defined(stored, storage, 7, s, p) for s, p in cases]
    monkeypatch.setenv("CYBER0_THREADS", str(threads))
    pools._pool.cache_clear()
    source = tensor(stored, storage)
    outs = [torch.empty_like(source) for _ in cases]
    torch.set_flush_denormal(True)
    for out, (s, p) in zip(outs, cases, strict=True):
        engine.apply(source, out, 7, s, p, DirectionSpace("gaussian", 1 << 17))
    still = [is_flushing()]
    if threads > 1:
        still += pools._pool(threads, os.getpid()).map(lambda _: is_flushing(), range(20))
    torch.set_flush_denormal(False)
    pools._pool.cache_clear()
    for out, bits_expected in zip(outs, expected, strict=True):
        assert np.array_equal(bits(out), bits_expected)
    assert all(still), "the kernels must leave the mode as they found it"
    assert not is_flushing()


def test_flush_to_zero_changes_neither_directions_nor_scales_nor_coefficients(flushing: None) -> None:
    expected = definition.reference(1, 2, 3, 0, 5000, "sphere", dimension=5000)
    values = np.array([1e-38, 3e-40, -1e-42, 1e-300, 5e-324, 1.0])
    c = definition.coefficients_for(0.1, values, 3)
    out = torch.empty(5000)
    engine.sphere_scale.cache_clear()
    torch.set_flush_denormal(True)
    engine.fill(out, 0, 1, 2, 3, DirectionSpace("sphere", 5000))
    got = coefficients(0.1, values, 3)
    torch.set_flush_denormal(False)
    assert np.array_equal(bits(out), bits(expected))
    assert np.array_equal(bits(got), bits(c)) and (bits(c)[:3] & 0x7FFFFFFF > 0).all()


def test_kernels_do_not_turn_flushing_on_either() -> None:
    assert not is_flushing()
    applied(patterns("float16", 5000), "float16", 0, [some_step(1)], SOME_PROBE)
    assert not is_flushing()


# Coefficients and refusals.


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.floats(allow_infinity=False), max_size=5),
    st.integers(1, 2**24),
)
@settings(max_examples=200, deadline=None)
def test_coefficients_from_the_kernel_are_the_defined_ones(lr: float, values: list[float], k: int) -> None:
    with np.errstate(all="ignore"):
        expected = definition.coefficients_for(lr, values, k)
    got = coefficients(lr, values, k)
    assert got.dtype == np.float32
    same = (bits(got) == bits(expected)) | (np.isnan(got) & np.isnan(expected))
    assert same.all()


@pytest.mark.parametrize(("lr", "value", "k"), [(50.0, 3e38, 4), (1e300, 1e30, 1), (1e308, 1e38, 7), (2.0, 3e38, 1)])
def test_a_coefficient_beyond_float32_is_its_largest_value(lr: float, value: float, k: int) -> None:
    for make in (definition.coefficients_for, coefficients):
        c = make(lr, np.array([value, -value]), k)
        assert c.tolist() == [definition.LARGEST, -definition.LARGEST]


def test_coefficients_are_taken_in_float64_and_rounded_once() -> None:
    rng = np.random.default_rng(1)
    for lr, value, k in zip(
        rng.normal(size=200), np.float32(rng.normal(size=200)), rng.integers(1, 100, 200), strict=True
    ):
        in_float64 = float(lr) * float(value) / float(k)
        expected = rounded(Fraction(in_float64), in_float64 < 0).value
        assert Fraction(float(definition.coefficients_for(float(lr), [value], int(k))[0])) == expected


@pytest.mark.parametrize("factor", [0.25, 0.7, 1e-3])
@pytest.mark.parametrize("storage", DTYPES)
def test_scaling_rounds_to_nearest_even(storage: str, factor: float) -> None:
    stored = patterns(storage, (1 << 16) + 3)
    with np.errstate(all="ignore"):
        expected = definition.narrow(definition.widen(stored, storage) * np.float32(factor), storage)
    w = tensor(stored, storage)
    engine.scale(w, factor)
    assert np.array_equal(bits(w), bits(expected))


def test_what_can_not_be_committed_is_refused() -> None:
    w = torch.zeros(10)
    with pytest.raises(ModelError, match="float64"):
        engine.apply(w.double(), w.double(), 0, [], SOME_PROBE, DirectionSpace("gaussian", 10))
    with pytest.raises(ValueError, match="agree"):
        engine.apply(w, torch.zeros(9), 0, [], SOME_PROBE, DirectionSpace("gaussian", 10))
    with pytest.raises(ValueError, match="agree"):
        engine.apply(w.half(), w, 0, [], SOME_PROBE, DirectionSpace("gaussian", 10))
    with pytest.raises(ValueError, match="same number of directions"):
        engine.apply(w, w, 0, [some_step(1, k=2), some_step(2, k=3)], None, DirectionSpace("gaussian", 10))
    with pytest.raises(ValueError, match="round"):
        engine.apply(w, w, 0, [Step(1, 2**32, np.float32([1]))], None, DirectionSpace("gaussian", 10))
    with pytest.raises(ValueError, match="'normal'"):
        engine.apply(w, w, 0, [], SOME_PROBE, DirectionSpace("normal", 10))
    assert (w == 0).all()


def test_a_step_whose_directions_do_not_fit_24_bits_is_refused() -> None:
    Step(1, 1, np.zeros(2, np.float32), first=2**24 - 2)
    with pytest.raises(ValueError, match="2\\^24"):
        Step(1, 1, np.zeros(2, np.float32), first=2**24 - 1)
