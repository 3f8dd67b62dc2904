"""Philox4x32-10 and the streams of random words drawn from it.

Everything random in cyber0 is a word of one counter-based generator (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). The key is the 64-bit seed. The counter is

    (block low, block high, round, stream << 24 | index)

so that directions, rounding bits, batches and so on can never share a word, and any word can be computed
without drawing the ones before it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
INDEX_BITS = 24
MAX_SEED = 2**64 - 1
MAX_ROUND = 2**32 - 1
MAX_INDEX = 2**INDEX_BITS - 1

Words = npt.NDArray[np.uint32]

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Stream(IntEnum):
    """What a word is used for: the top 8 bits of the fourth counter word."""

    DIRECTIONS = 0
    ROUNDING = 1
    BATCHES = 2
    SAMPLING = 3
    ATTACKS = 4
    PARTITION = 5
    INITIAL_WEIGHTS = 6
    DATA = 7


def philox4x32(counter: Any, key: Any) -> Words:
    """Return Philox4x32-10 of counters under keys.

    Args:
        counter: Integers of shape (..., 4), each in 0 .. 2^32 - 1.
        key: Integers of shape (..., 2), broadcast against the counters.

    Returns:
        uint32 words of shape (..., 4).
    """
    c = np.asarray(counter, dtype=np.uint64)
    k = np.asarray(key, dtype=np.uint64)
    if c.shape[-1:] != (4,) or k.shape[-1:] != (2,):
        raise ValueError(f"a counter has 4 words and a key 2, got shapes {c.shape} and {k.shape}")
    if (c > _LOW).any() or (k > _LOW).any():
        raise ValueError("words of the counter and the key must be in 0 .. 2^32 - 1")
    c0, c1, c2, c3 = (c[..., i] for i in range(4))
    k0, k1 = k[..., 0], k[..., 1]
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    w0, w1 = (np.uint64(w) for w in KEY_INCREMENTS)
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + w0) & _LOW, (k1 + w1) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def check_counter(seed: int, round: int, index: int) -> None:
    """Refuse a seed, round or index that does not fit its place in the counter."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be in 0 .. 2^64 - 1, got {seed}")
    if not 0 <= round <= MAX_ROUND:
        raise ValueError(f"round must be in 0 .. 2^32 - 1, got {round}")
    if not 0 <= index <= MAX_INDEX:
        raise ValueError(f"index must be in 0 .. 2^{INDEX_BITS} - 1, got {index}")


def blocks(seed: int, stream: int, round: int, index: int, first: int, count: int) -> Words:
    """Return `count` blocks of four words, from block `first` on, as a (count, 4) array."""
    check_counter(seed, round, index)
    number = np.arange(first, first + count, dtype=np.uint64)
    counter = np.empty((count, 4), dtype=np.uint64)
    counter[:, 0] = number & _LOW
    counter[:, 1] = number >> _32
    counter[:, 2] = round
    counter[:, 3] = stream << INDEX_BITS | index
    return philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32])


def words(seed: int, stream: int, round: int, index: int, start: int, count: int) -> Words:
    """Return words start .. start + count - 1 of a stream; word i is word i % 4 of block i // 4."""
    first = start // 4
    last = -(-(start + count) // 4)
    return blocks(seed, stream, round, index, first, last - first).reshape(-1)[start - 4 * first :][:count]


def permutation(seed: int, stream: int, round: int, index: int, n: int) -> npt.NDArray[np.int64]:
    """Return a random permutation of 0 .. n - 1: the stable order of n 64-bit words of the stream."""
    pairs = words(seed, stream, round, index, 0, 2 * n).astype(np.uint64)
    return np.argsort(pairs[0::2] | pairs[1::2] << _32, kind="stable").astype(np.int64)
