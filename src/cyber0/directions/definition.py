"""What a direction, a rounding and a commit are: the definition, in plain numpy.

The fast kernels in backends/ must give these bits. Nothing here needs a library's log or cosine, nothing is fused,
and every operation is one IEEE operation in float32 or an exact one on integers, so that every machine can give the
same bits.

A new distribution is an entry of DISTRIBUTIONS here and a branch in the kernels of each backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cyber0.directions.philox import INDEX_BITS, MAX_INDEX, Stream, Words, words

if TYPE_CHECKING:
    from cyber0.directions.low_rank import LowRankLayout
    from cyber0.directions.space import DirectionSpace

F32 = npt.NDArray[np.float32]

# A Gaussian coordinate is an odd polynomial of a weighted sum of the four bytes of one word. The bytes,
# read as signed and centred (byte + 1/2), are symmetric; four of them with unlike weights are already
# close to normal, and the polynomial does the rest. Found by least squares on the distribution function
# with the moments of order 2, 4 and 6 as constraints (tests/directions/test_gaussian.py integrates the result).
BYTE_WEIGHTS = (53, 97, 121, 127)
BYTE_CENTRE = sum(BYTE_WEIGHTS) // 2
POLYNOMIAL = tuple(float.fromhex(c) for c in ("0x1.043c58p-14", "0x1.483bf2p-48", "-0x1.bda568p-80", "0x1.2ed9d0p-109"))
GAUSSIAN_REACH = 4.8386  # no number drawn is further from 0; of coordinates, see DirectionSpace.reach
NORM_GRID = 2.0**20  # z^2 is counted in units of 1 / NORM_GRID
# With fewer weights than this, sphere directions are refused. | ||z|| - 1 | is at most d 2^-22 / ||Gaussian z||^2: more
# than 1 % once in 500 directions for d = 1, in 10^5 for d = 2, in 10^7 for d = 3 and in 10^9 for d = 4; and all squares
# are rounded to 0 once in 1,800, in 3 * 10^6, in 5 * 10^9 and in 10^13 directions.
LEAST_SPHERE_DIMENSION = 4
NAN16 = 0x7FFF  # the one NaN pattern of a 16-bit result: what NVIDIA's conversions give
NAN32 = 0x7FC00000  # the same for float32
LARGEST = float.fromhex("0x1.fffffep127")  # the largest finite float32
HALF_WORDS = 1 << 32  # in the kernels' tables, added to the index of a step's rounding words: each serves two weights


def gaussian_from_words(w: Words) -> F32:
    """Map each 32-bit word to one coordinate: z = x (a + x^2 (b + x^2 (c + x^2 d))), all in float32."""
    signed_bytes = np.ascontiguousarray(w, dtype="<u4").view(np.int8).reshape(*w.shape, 4).astype(np.int32)
    x: F32 = (signed_bytes @ np.array(BYTE_WEIGHTS, dtype=np.int32) + np.int32(BYTE_CENTRE)).astype(np.float32)
    a, b, c, d = (np.float32(v) for v in POLYNOMIAL)
    t = x * x
    return np.asarray(x * (a + t * (b + t * (c + t * d))), dtype=np.float32)


def _gaussian(seed: int, round: int, index: int, start: int, count: int) -> F32:
    return gaussian_from_words(words(seed, Stream.DIRECTIONS, round, index, start, count))


def _rademacher(seed: int, round: int, index: int, start: int, count: int) -> F32:
    """Coordinate i is +1 or -1 by bit i % 32 of word i // 32 (set: -1)."""
    first = start // 32
    last = -(-(start + count) // 32)
    w = words(seed, Stream.DIRECTIONS, round, index, first, last - first)
    bits = (w[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return (1.0 - 2.0 * bits.reshape(-1)[start - 32 * first :][:count].astype(np.float32)).astype(np.float32)


def squared_norm_units(z: F32) -> int:
    """Return sum of z^2 in units of 1 / NORM_GRID, each z^2 rounded to that grid, summed in integers."""
    return int((z * z * np.float32(NORM_GRID) + np.float32(0.5)).astype(np.int64).sum())


def scale_from_units(units: int) -> np.float32:
    """Return the float32 factor 1 / ||z|| from ||z||^2 in units of 1 / NORM_GRID, of which there is at least one."""
    return np.float32(1.0 / math.sqrt(max(units, 1) / NORM_GRID))


def sphere_scale(seed: int, round: int, index: int, dimension: int, chunk: int = 1 << 20) -> np.float32:
    """Return s = 1 / ||z|| of one Gaussian direction of that dimension."""
    units = 0
    for start in range(0, dimension, chunk):
        units += squared_norm_units(_gaussian(seed, round, index, start, min(chunk, dimension - start)))
    return scale_from_units(units)


@dataclass(frozen=True)
class Distribution:
    """A distribution of directions.

    Args:
        text: The same in one line, for people.
        coordinates: Returns coordinates start .. start + count - 1 for (seed, round, index, start, count); where a
            direction depends on shapes, the numbers that its coordinates are made from.
        normalized: Whether every direction is divided by its length, which needs all its coordinates.
        least_dimension: The smallest number of weights for which the bits are sound.
        shaped: Whether a direction depends on the shapes of the weights.
    """

    text: str
    coordinates: Callable[[int, int, int, int, int], F32]
    normalized: bool = False
    least_dimension: int = 1
    shaped: bool = False

    def factor(self, dimension: int) -> float:
        """Return 1 / E[z_i^2], by which an estimate <grad f, z> is multiplied: d on the unit sphere (Algorithm 1)."""
        return float(dimension) if self.normalized else 1.0


DISTRIBUTIONS: Mapping[str, Distribution] = {
    "gaussian": Distribution("standard normal (the paper's experiments)", _gaussian),
    "sphere": Distribution(
        "unit sphere, with the factor d (the paper's theory)", _gaussian, True, LEAST_SPHERE_DIMENSION
    ),
    "rademacher": Distribution("signs, the cheapest", _rademacher),
    "low_rank": Distribution("matrices of low rank, cheap for large models: see method.rank", _gaussian, shaped=True),
    # LR
}
"""By name, all that can be chosen; settings, ledgers and backends follow."""


def distribution_named(name: str) -> Distribution:
    """Return the distribution of that name, or raise a ValueError that names all."""
    if name not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {name!r}")
    return DISTRIBUTIONS[name]


def reference(
    seed: int,
    round: int,
    index: int,
    start: int,
    count: int,
    distribution: str,
    *,
    dimension: int | None = None,
    layout: LowRankLayout | None = None,
) -> F32:
    """Return coordinates start .. start + count - 1 of one direction.

    Args:
        seed: The run's seed, any of 64 bits.
        round: The round t.
        index: The direction's index in the round, j = e * k + r.
        start: First coordinate of the flat vector.
        count: How many coordinates.
        distribution: A name from DISTRIBUTIONS.
        dimension: d; only normalized distributions need it.
        layout: LowRankLayout.of(shapes, rank) of the weights; only low-rank directions need it.

    Returns:
        float32 coordinates.

    Examples:
        Every coordinate stands alone, so that any part of a direction can be drawn by itself, on any machine:

        >>> reference(0, round=3, index=1, start=0, count=6, distribution="rademacher")
        array([-1.,  1.,  1., -1.,  1.,  1.], dtype=float32)
        >>> reference(0, round=3, index=1, start=2, count=2, distribution="rademacher")
        array([ 1., -1.], dtype=float32)
    """
    if start < 0 or count < 0:
        raise ValueError(f"start and count must not be negative, got {start} and {count}")
    known = distribution_named(distribution)
    if known.shaped:
        if layout is None:
            raise ValueError(
                f"distribution {distribution!r} needs layout=LowRankLayout.of(shapes, rank): a direction depends on "
                "the shapes of the weights"
            )
        return layout.coordinates(partial(known.coordinates, seed, round, index), start, count)
    if not known.normalized:
        return known.coordinates(seed, round, index, start, count)
    if dimension is None:
        raise ValueError(f"distribution {distribution!r} needs dimension=d: the norm is taken over all coordinates")
    if start + count > dimension:
        raise ValueError(f"coordinates up to {start + count} were requested of a direction with {dimension}")
    return known.coordinates(seed, round, index, start, count) * sphere_scale(seed, round, index, dimension)


class Rounding(NamedTuple):
    """How a commit rounds 16-bit weights: stochastically, each weight by so many random bits."""

    text: str
    bits: int


ROUNDINGS: Mapping[str, Rounding] = {
    "stochastic": Rounding("16-bit weights are rounded by 32 random bits each", 32),
    "stochastic16": Rounding("16-bit weights are rounded by 16 random bits each: half the drawing", 16),
}
"""Names in a header and a config. bfloat16 loses nothing by 16 bits; see narrow_stochastically for float16."""


class Elementwise(NamedTuple):
    """What an optimizer makes of u = sum_r c_r z_r at each coordinate, by vectors beside w: see moments.py."""

    name: str
    constants: F32


@dataclass(frozen=True)
class Step:
    """One update: w <- w - sum_r coefficients[r] * z_(first + r), then rounded to storage.

    A committed round is one step with all its E * k directions (first = 0, rounding = 0); a client's local
    epoch e is one with k of them (first = e * k, rounding = e + 1). With `elementwise`, w moves by what that makes of
    the sum. `bits` is how many random bits round a 16-bit weight: those of one of the ROUNDINGS.
    """

    seed: int
    round: int
    coefficients: F32
    first: int = 0
    rounding: int = 0
    elementwise: Elementwise | None = None
    bits: int = 32

    def __post_init__(self) -> None:
        if self.first + len(self.coefficients) > MAX_INDEX + 1:
            raise ValueError(f"directions {self.first} .. do not fit {INDEX_BITS} bits: E * k must be below 2^24")


@dataclass(frozen=True)
class Probe:
    """The point w + coefficient * z_index, where a loss is measured."""

    seed: int
    round: int
    index: int
    coefficient: float


@dataclass(frozen=True)
class Directions:
    """The k directions of one round and local epoch: indices first .. first + k - 1."""

    seed: int
    round: int
    k: int
    first: int = 0

    def probe(self, r: int, coefficient: float) -> Probe:
        """Return the probe at w + coefficient * z of the r-th of them."""
        return Probe(self.seed, self.round, self.first + r, coefficient)


def coefficients_for(lr: float, values: npt.ArrayLike, k: int) -> F32:
    """Return c_j = fp32(fp64(lr) * ghat_j / k), clamped to the finite range of float32."""
    with np.errstate(over="ignore", under="ignore"):
        return _clamped(np.float64(lr) * np.asarray(values, dtype=np.float64) / np.float64(k)).astype(np.float32)


def moved(w: F32, u: F32) -> F32:
    """Return w - u in float32, clamped to its finite range; where w - u is not a number, w."""
    x = w - u
    return np.asarray(_clamped(np.where(np.isnan(x), w, x)), dtype=np.float32)


def _clamped(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Clamp to the finite range of float32. By comparisons: they leave a NaN as it is on every machine."""
    x = np.where(x > LARGEST, LARGEST, x)
    return np.where(x < -LARGEST, -LARGEST, x)


def widen(stored: npt.NDArray[np.generic], storage: str) -> F32:
    """Return the float32 values of a stored array (float32, or uint16 patterns of a 16-bit format)."""
    if storage == "float32":
        return stored.astype(np.float32)
    bits = stored.astype(np.uint16)
    if storage == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def narrow(x: F32, storage: str) -> npt.NDArray[np.generic]:
    """Round to the nearest storable value, ties to even; overflow gives infinity."""
    x = _canonical(x)
    if storage == "float32":
        return x
    if storage == "float16":
        with np.errstate(over="ignore"):
            return np.where(np.isnan(x), np.uint16(NAN16), x.astype(np.float16).view(np.uint16))
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint64(NAN16), rounded).astype(np.uint16)


def rounding_words(step: Step, start: int, count: int) -> Words:
    """Return the random words that round coordinates start, start + 1, ... in a step, one each.

    With 16 bits, two coordinates share a word of the stream: an even one has its low half, an odd one its high half.
    """
    place = step.seed, Stream.ROUNDING, step.round, step.rounding
    if step.bits == 32:
        return words(*place, start, count)
    shared = words(*place, start // 2, (start + count + 1) // 2 - start // 2)
    halves = np.stack([shared & np.uint32(0xFFFF), shared >> np.uint32(16)], axis=1).reshape(-1)
    return halves[start % 2 :][:count]


def narrow_stochastically(x: F32, storage: str, w: Words, bits: int = 32) -> npt.NDArray[np.generic]:
    """Round to one of the two neighbouring storable values, up with probability of the fraction.

    With a = |x| between the storable lo and lo + ulp, the result is lo + ulp when
    w < floor((a - lo) / ulp * 2^bits) and lo otherwise; beyond the largest finite value it is that value.

    So the probability of rounding up is the fraction, less what the floor drops: less than 2^-bits. It drops nothing
    where at most `bits` bits lie below the last storable one: 16 in bfloat16, 13 in float16. Only float16's subnormal
    values have more. With 16 bits, values |x| < 2^-17 are rounded with a bias of less than 2^-16 of their ulp, which is
    2^-24: less than 2^-40, toward zero.
    """
    x = _canonical(x)
    if storage == "float32":
        return x
    pattern = x.view(np.uint32).astype(np.uint64)
    sign, a = (pattern >> np.uint64(31)) << np.uint64(15), pattern & np.uint64(0x7FFFFFFF)
    exponent = np.maximum(a >> np.uint64(23), np.uint64(1)).astype(np.int64)
    if storage == "bfloat16":
        below, kept, largest = np.full(a.shape, 16), a, 0x7F7F
    else:
        normal = exponent >= 113
        implicit = np.where(a >> np.uint64(23) > 0, np.uint64(0x800000), np.uint64(0))
        subnormal = (a & np.uint64(0x7FFFFF)) | implicit  # |x| = subnormal * 2^(exponent - 150)
        below = np.where(normal, 13, 126 - exponent)  # bits below the last storable one
        kept = np.where(normal, a - np.uint64(112 << 23), subnormal)
        largest = 0x7BFF
    shift = np.minimum(below, 60).astype(np.uint64)  # kept has 24 bits: further than 60 changes nothing
    lo = kept >> shift
    fraction = kept - (lo << shift)  # in units of 2^-shift of the last storable bit
    to_left = np.minimum(shift, np.uint64(bits))
    threshold = (fraction << (np.uint64(bits) - to_left)) >> (shift - to_left)
    up = (w.astype(np.uint64) < threshold).astype(np.uint64)
    magnitude = np.minimum(lo + up, np.uint64(largest))
    return np.where(np.isnan(x), np.uint64(NAN16), sign | magnitude).astype(np.uint16)


def _canonical(x: F32) -> F32:
    """Give every NaN one bit pattern: processors disagree about the others."""
    return np.where(np.isnan(x), np.uint32(NAN32).view(np.float32), x).astype(np.float32)


def update(step: Step, start: int, count: int, space: DirectionSpace) -> F32:
    """Return u = sum_r c_r z_r at coordinates start, start + 1, ..., summed in order."""
    u = np.zeros(count, dtype=np.float32)
    for r, c in enumerate(step.coefficients):
        u = u + c * space.coordinates(step.seed, step.round, step.first + r, start, count)
    return u


def moved_by(
    stored: npt.NDArray[np.generic], storage: str, start: int, u: F32, step: Step
) -> npt.NDArray[np.generic]:  # fmt: skip
    """Return stored weights (coordinates start, ...) moved by u and rounded to storage by the step's words."""
    drawn = rounding_words(step, start, len(stored))
    return narrow_stochastically(moved(widen(stored, storage), u), storage, drawn, step.bits)


def apply(
    stored: npt.NDArray[np.generic],
    storage: str,
    start: int,
    steps: Sequence[Step],
    probe: Probe | None,
    space: DirectionSpace,
) -> npt.NDArray[np.generic]:
    """Return coordinates start, start + 1, ... of w after `steps`, then perturbed by `probe`."""
    count = len(stored)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for step in steps:
            stored = moved_by(stored, storage, start, update(step, start, count, space), step)
        if probe is not None:
            z = space.coordinates(probe.seed, probe.round, probe.index, start, count)
            stored = narrow(widen(stored, storage) + np.float32(probe.coefficient) * z, storage)
    return stored
