"""The generator: known answers, an independent implementation, streams that never meet."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from by_hand import philox_by_hand, word_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st

from cyber0.directions import Stream, permutation, philox4x32, words
from cyber0.directions.philox import blocks

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)
INDEX = st.integers(0, 2**24 - 1)
MASK = 0xFFFFFFFF

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def from_hex(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_are_given(counter: str, key: str, answer: str) -> None:
    assert philox4x32(from_hex(counter), from_hex(key)).tolist() == from_hex(answer)
    assert philox_by_hand(from_hex(counter), from_hex(key)) == from_hex(answer)


def test_the_result_is_uint32_and_many_counters_go_at_once_under_one_key_or_many() -> None:
    counters = [from_hex(c) for c, _, _ in KNOWN_ANSWERS]
    keys = [from_hex(k) for _, k, _ in KNOWN_ANSWERS]
    together = philox4x32(counters, keys)
    assert together.dtype == np.uint32
    assert together.tolist() == [from_hex(a) for _, _, a in KNOWN_ANSWERS]
    assert philox4x32(counters, keys[1]).tolist() == [philox_by_hand(c, keys[1]) for c in counters]


@pytest.mark.slow
@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
@settings(max_examples=300, deadline=None)
def test_an_independent_implementation_agrees(counter: list[int], key: list[int]) -> None:
    assert philox4x32(counter, key).tolist() == philox_by_hand(counter, key)


@pytest.mark.parametrize(
    ("counter", "key"),
    [
        ([0, 0, 0], [0, 0]),
        ([0, 0, 0, 0], [0]),
        (0, [0, 0]),
        (np.array([0, 0, 0, 2**32]), [0, 0]),
        ([0] * 4, [2**32, 0]),
    ],
)
def test_a_counter_or_key_of_another_shape_or_range_is_refused(counter: object, key: object) -> None:
    with pytest.raises(ValueError, match="counter"):
        philox4x32(counter, key)


@given(SEED, st.sampled_from(list(Stream)), WORD, INDEX, st.integers(0, 2**65), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_a_word_is_what_the_counter_in_the_design_says(
    seed: int, stream: Stream, round: int, index: int, start: int, count: int
) -> None:
    expected = [word_by_hand(seed, int(stream), round, index, start + i) for i in range(count)]
    assert words(seed, stream, round, index, start, count).tolist() == expected


@given(st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_any_start_and_count_is_a_slice_of_the_whole(start: int, count: int) -> None:
    whole = words(5, Stream.ATTACKS, 6, 7, 0, 600)
    assert np.array_equal(words(5, Stream.ATTACKS, 6, 7, start, count), whole[start : start + count])


def test_blocks_beyond_2_to_the_32_carry_into_the_second_counter_word() -> None:
    across = blocks(9, Stream.DIRECTIONS, 1, 2, 2**32 - 2, 4)
    key = [9, 0]
    assert across.tolist() == [
        philox_by_hand([low, high, 1, 2], key) for low, high in [(MASK - 1, 0), (MASK, 0), (0, 1), (1, 1)]
    ]
    assert across[2].tolist() != blocks(9, Stream.DIRECTIONS, 1, 2, 0, 1)[0].tolist()


def test_streams_have_the_numbers_of_the_design() -> None:
    assert [(s.name, int(s)) for s in Stream] == [
        ("DIRECTIONS", 0), ("ROUNDING", 1), ("BATCHES", 2), ("SAMPLING", 3), ("ATTACKS", 4), ("PARTITION", 5),
        ("INITIAL_WEIGHTS", 6), ("DATA", 7),
    ]  # fmt: skip


def test_streams_rounds_indices_and_seeds_never_share_words() -> None:
    """Philox is a bijection of the counter, so unlike counters give unlike blocks; unlike keys merely should."""
    count = 4096
    drawn = {(s, t, j): words(1, s, t, j, 0, count) for s in Stream for t in (0, 1) for j in (0, 1, 2**24 - 1)}
    as_blocks = np.concatenate([w.reshape(-1, 4) for w in drawn.values()])
    assert len(np.unique(as_blocks, axis=0)) == len(as_blocks)
    for a, b in itertools.combinations(drawn.values(), 2):
        assert (a == b).sum() <= 1  # words in the same place agree with probability 2^-32


@pytest.mark.parametrize(
    ("seed", "other"), [(0, 1), (0, 2**32), (1, 1 + 2**32), (2**63, 0), (2**64 - 1, 2**32 - 1), (7, 7 << 32)]
)
def test_all_64_bits_of_the_seed_count(seed: int, other: int) -> None:
    a, b = (words(s, Stream.DIRECTIONS, 0, 0, 0, 1000) for s in (seed, other))
    assert (a == b).sum() == 0


def test_seed_0_is_a_seed_like_any_other() -> None:
    first = words(0, Stream.DIRECTIONS, 0, 0, 0, 4)
    assert first.tolist() == from_hex("6627e8d5 e169c58d bc57ac4c 9b00dbd8")
    assert np.array_equal(first, words(0, Stream.DIRECTIONS, 0, 0, 0, 4))


@pytest.mark.parametrize(
    ("name", "seed", "round", "index"),
    [
        ("seed", -1, 0, 0), ("seed", 2**64, 0, 0), ("round", 0, -1, 0), ("round", 0, 2**32, 0),
        ("index", 0, 0, -1), ("index", 0, 0, 2**24),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_counter_is_refused_with_its_value(name: str, seed: int, round: int, index: int) -> None:
    value = {"seed": seed, "round": round, "index": index}[name]
    with pytest.raises(ValueError, match=rf"{name} must be in .*, got {value}$"):
        words(seed, Stream.DIRECTIONS, round, index, 0, 1)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100, 1000])
def test_a_permutation_holds_every_number_once(n: int) -> None:
    order = permutation(3, Stream.BATCHES, 4, 5, n)
    assert sorted(order.tolist()) == list(range(n))


def test_permutations_follow_seed_stream_round_and_index() -> None:
    base = (3, Stream.BATCHES, 4, 5)
    others = [
        (2, Stream.BATCHES, 4, 5),
        (3, Stream.SAMPLING, 4, 5),
        (3, Stream.BATCHES, 3, 5),
        (3, Stream.BATCHES, 4, 6),
    ]
    assert np.array_equal(permutation(*base, 50), permutation(*base, 50))
    for other in others:
        assert not np.array_equal(permutation(*base, 50), permutation(*other, 50))


@pytest.mark.slow
def test_permutations_are_uniform() -> None:
    """Each of the 24 orders of 4 things, over 12,000 rounds: chi-square with 23 degrees, 5 deviations."""
    seen: dict[tuple[int, ...], int] = {}
    for t in range(12_000):
        order = tuple(permutation(8, Stream.SAMPLING, t, 0, 4).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    chi_square = sum((n - 500) ** 2 / 500 for n in seen.values())
    assert chi_square < 23 + 5 * (2 * 23) ** 0.5
