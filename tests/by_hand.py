"""Values worked out apart from the library: Philox by hand, and weights at the edges of their formats."""

from __future__ import annotations

import numpy as np

from cyber0.directions import Stream, definition, words


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 from the paper's figure, in plain Python integers."""
    left0, right0, left1, right1 = counter[1], counter[0], counter[3], counter[2]
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        high0, low0 = divmod(right0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(right1 * 0xCD9E8D57, 2**32)
        right0, left0, right1, left1 = high1 ^ left0 ^ k0, low1, high0 ^ left1 ^ k1, low0
    return [right0, left0, right1, left1]


def word_by_hand(seed: int, stream: int, round: int, index: int, i: int) -> int:
    block = i // 4
    counter = [block % 2**32, block // 2**32, round, stream * 2**24 + index]
    return philox_by_hand(counter, [seed % 2**32, seed // 2**32])[i % 4]


def top(storage: str) -> int:
    """The pattern of the largest finite value."""
    return {"float32": 0x7F7FFFFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[storage]


def near_the_edge(storage: str, count: int) -> np.ndarray:
    """Finite values of either sign, many of them at or just below the largest one."""
    rng = np.random.default_rng(3)
    kind, sign = (np.uint32, 2**31) if storage == "float32" else (np.uint16, 2**15)
    magnitudes = rng.integers(0, top(storage) + 1, count)
    magnitudes[::2] = top(storage) - rng.integers(0, 3, len(magnitudes[::2]))
    stored = (magnitudes + sign * rng.integers(0, 2, count)).astype(kind)
    return stored.view(np.float32) if storage == "float32" else stored


# Updates c z_1, or c_1 z_1 + c_2 z_2 ..., from "reaches the edge" to "infinite" and "infinite minus infinite".
HUGE = {
    "one": [3.4e38], "the largest": [definition.LARGEST], "many": [3e38, 3e38, 3e38],
    "opposed": [3e38, 3e38, -3e38, 3e38], "fp16": [7e4, -1e3], "infinite": [np.inf], "not a number": [1.0, np.nan],
}  # fmt: skip


def meeting_its_threshold(storage: str, at: str) -> tuple[int, np.float32]:
    """Return a coordinate and an x > 0 whose threshold is its rounding word (seed 9, round 3, index 2)."""
    zeros = {"normal": 19, "subnormal": 8, "bfloat16": 16}[at]
    drawn = words(9, Stream.ROUNDING, 3, 2, 0, 1 << 22)
    i = int(np.flatnonzero((drawn % 2**zeros == 0) & (drawn >= 2**31))[0])
    word = int(drawn[i])
    if at == "normal":
        return i, np.float32(1 + (word >> 19) * 2.0**-23)  # 13 bits lie below fp16's last one
    if at == "subnormal":
        return i, np.float32((word >> 8) * 2.0**-48)  # that fraction of fp16's smallest value, 2^-24
    return i, np.uint32(0x3F800000 + (word >> 16)).view(np.float32)
