"""The Gaussian: its exact distribution by enumeration, then samples of it and of the signs.

Run with -s to see the exact figures that the docs cite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from cyber0 import ZeroOrder
from cyber0.directions import Stream, reference, words
from cyber0.directions.definition import (
    BYTE_WEIGHTS,
    GAUSSIAN_REACH,
    LEAST_SPHERE_DIMENSION,
    gaussian_from_words,
    scale_from_units,
    squared_norm_units,
)
from cyber0.errors import ModelError

REACH_IN_X = sum(BYTE_WEIGHTS) * 255 // 2  # x lies in -REACH_IN_X .. REACH_IN_X


def normal_cdf(z: Any) -> np.ndarray:
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in np.asarray(z, dtype=np.float64)])


@dataclass(frozen=True)
class Distribution:
    """Every value x = sum_i weight_i (byte_i + 1/2) can take, in how many of the 2^32 words, and its z."""

    x: np.ndarray
    counts: np.ndarray
    z: np.ndarray


@cache
def exact() -> Distribution:
    """Convolve four uniform bytes in integers, keeping for each x one word that gives it."""
    size = 2 * REACH_IN_X + 1
    counts, example = np.zeros(size, np.int64), np.zeros(size, np.uint32)
    counts[0] = 1  # the offset REACH_IN_X is taken off at the end: bytes run from -128, so sums from the far left
    for place, weight in enumerate(BYTE_WEIGHTS):
        new_counts, new_example = np.zeros_like(counts), np.zeros_like(example)
        for byte in range(256):
            shift = byte * weight
            part, words_so_far = counts[: size - shift], example[: size - shift]
            new_counts[shift:] += part
            pattern = np.uint32(((byte - 128) & 0xFF) << 8 * place)
            new_example[shift:] = np.where(part > 0, words_so_far | pattern, new_example[shift:])
        counts, example = new_counts, new_example
    reached = counts > 0
    x = np.arange(size)[reached] - REACH_IN_X
    return Distribution(x, counts[reached], gaussian_from_words(example[reached]))


def exact_moment(order: int) -> float:
    d = exact()
    return math.fsum(d.counts.astype(np.float64) / 2**32 * d.z.astype(np.float64) ** order)


def distance_from_normal() -> float:
    """The largest gap between the two distribution functions, looked for on both sides of every jump."""
    d = exact()
    above = np.cumsum(d.counts).astype(np.float64) / 2**32
    below = above - d.counts / 2**32
    normal = normal_cdf(d.z)
    return float(max(np.abs(above - normal).max(), np.abs(below - normal).max()))


def test_every_word_is_counted_once() -> None:
    assert int(exact().counts.sum()) == 2**32
    assert exact().x[0] == -REACH_IN_X and exact().x[-1] == REACH_IN_X


def test_the_table_is_the_map_that_the_source_uses() -> None:
    """z is a function of x alone, x the weighted sum of the word's signed bytes."""
    w = words(1, Stream.DIRECTIONS, 2, 3, 0, 1 << 18)
    doubled = sum(
        weight * (2 * ((w >> np.uint32(8 * i)) & np.uint32(0xFF)).astype(np.uint8).view(np.int8).astype(np.int64) + 1)
        for i, weight in enumerate(BYTE_WEIGHTS)
    )
    assert (doubled % 2 == 0).all()
    where = np.searchsorted(exact().x, doubled // 2)
    assert np.array_equal(exact().x[where], doubled // 2)
    assert np.array_equal(exact().z[where].view(np.uint32), gaussian_from_words(w).view(np.uint32))
    assert np.array_equal(gaussian_from_words(w), reference(1, 2, 3, 0, 1 << 18, "gaussian"))


def test_it_is_symmetric_to_the_bit_so_that_its_mean_is_exactly_0() -> None:
    d = exact()
    assert np.array_equal(d.x, -d.x[::-1]) and np.array_equal(d.counts, d.counts[::-1])
    assert np.array_equal(d.z, -d.z[::-1])


def test_its_variance_is_1_within_1e_4() -> None:
    assert abs(exact_moment(2) - 1) < 1e-4


def test_its_kurtosis_is_3_within_0_05() -> None:
    assert abs(exact_moment(4) / exact_moment(2) ** 2 - 3) < 0.05


def test_its_distribution_function_is_within_1e_3_of_the_normal_one_everywhere() -> None:
    assert distance_from_normal() < 1e-3


def test_it_grows_with_x_and_reaches_beyond_4_but_not_beyond_the_stated_reach() -> None:
    z = exact().z
    assert (np.diff(z) > 0).all()
    assert 4 < z[-1] <= GAUSSIAN_REACH
    assert GAUSSIAN_REACH - float(z[-1]) < 1e-3
    tail = exact().counts[z > 4].sum() / 2**32
    assert tail > 0.3 * 0.5 * math.erfc(4 / math.sqrt(2))  # not just reached but visited


def test_the_figures_for_the_docs() -> None:
    d = exact()
    variance = exact_moment(2)
    tails = {t: 2 * d.counts[d.z > t].sum() / 2**32 / math.erfc(t / math.sqrt(2)) for t in (2, 3, 4)}
    print(
        f"\nGaussian, exact: {len(d.x)} values, variance {variance:.9f}, kurtosis {exact_moment(4) / variance**2:.6f}, "
        f"sixth moment {exact_moment(6):.5f} (15), distance {distance_from_normal():.3e}, reach {d.z[-1]:.6f}, "
        + ", ".join(f"P(|z| > {t}) {r:.4f} of the normal's" for t, r in tails.items())
    )
    assert abs(exact_moment(6) - 15) < 0.5
    assert abs(tails[2] - 1) < 0.02 and abs(tails[3] - 1) < 0.1


# Samples. Fixed seeds: these pass or fail for good.

N = 1_000_000
SEEDS = [0, 1, 2**32, 2**64 - 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_moments_are_those_of_the_normal(seed: int) -> None:
    z = reference(seed, 17, 3, 0, N, "gaussian").astype(np.float64)
    # 5 standard errors: variances of z, z^2, z^3, z^4 are 1, 2, 15, 96.
    for order, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**order).mean() - moment) < 5 * math.sqrt(variance / N), order


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threshold", [3.0, 4.0])
def test_sampled_tails_are_those_of_the_exact_distribution(seed: int, threshold: float) -> None:
    d = exact()
    p = d.counts[np.abs(d.z) > threshold].sum() / 2**32
    assert 0.5 < p / math.erfc(threshold / math.sqrt(2)) < 1.5
    z = reference(seed, 17, 3, 0, N, "gaussian")
    for side in (z > threshold, z < -threshold):
        assert abs(side.sum() - N * p / 2) < 5 * math.sqrt(N * p / 2) + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_million_samples_pass_kolmogorov_and_smirnov(seed: int) -> None:
    z = np.sort(reference(seed, 5, 0, 0, N, "gaussian"))
    values, last = np.unique(z, return_index=True)
    normal = normal_cdf(values)
    below, above = last / N, np.append(last[1:], N) / N
    gap = max(np.abs(above - normal).max(), np.abs(below - normal).max())
    assert gap < distance_from_normal() + 1.95 / math.sqrt(N)  # exceeded once in a thousand by true samples


M = 1 << 18
BOUND = 5 / math.sqrt(M)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.mean((a - a.mean()) * (b - b.mean())) / (a.std() * b.std()))


def assert_unrelated(a: np.ndarray, b: np.ndarray) -> None:
    assert abs(correlation(a, b)) < BOUND
    assert abs(correlation(a * a, b * b)) < BOUND
    assert abs(correlation(np.sign(a), np.sign(b))) < BOUND


@pytest.mark.parametrize("lag", [*range(1, 9), 16, 32, 128, 1024, 4096])
def test_neighbouring_coordinates_are_unrelated(lag: int) -> None:
    z = reference(1, 2, 3, 0, M + lag, "gaussian")
    assert_unrelated(z[:-lag], z[lag:])


@pytest.mark.parametrize(
    "other", [(12, 7, 1), (12, 8, 0), (13, 7, 0), (12 + 2**32, 7, 0), (12, 7, 2**16), (12, 2**16, 0)]
)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
def test_neighbouring_directions_rounds_and_seeds_are_unrelated(
    other: tuple[int, int, int], lag: int, distribution: str
) -> None:
    a = reference(12, 7, 0, 0, M, distribution)
    b = reference(*other, lag, M, distribution)
    assert abs(correlation(a, b)) < BOUND
    if distribution == "gaussian":
        assert_unrelated(a, b)


def test_the_bytes_of_a_word_are_unrelated_to_its_neighbours_coordinate() -> None:
    """Rounding bits of a coordinate are unrelated to its direction."""
    z = reference(4, 4, 0, 0, M, "gaussian")
    rounding = words(4, Stream.ROUNDING, 4, 0, 0, M) / 2**32 - 0.5
    assert abs(correlation(z, rounding)) < BOUND
    assert abs(correlation(z * z, rounding)) < BOUND


@pytest.mark.parametrize("seed", SEEDS)
def test_signs_are_balanced_and_their_runs_are_as_many_as_chance_has(seed: int) -> None:
    z = reference(seed, 1, 0, 0, N, "rademacher")
    assert set(np.unique(z)) == {-1.0, 1.0}
    assert abs(z.sum()) < 5 * math.sqrt(N)
    runs = 1 + int((z[1:] != z[:-1]).sum())
    assert abs(runs - (N + 1) / 2) < 5 * math.sqrt(N) / 2
    for lag in (2, 4, 8, 31, 32, 33, 64, 128, 1024):
        assert abs(float((z[:-lag] * z[lag:]).mean())) < 5 / math.sqrt(N - lag)
    for place in range(32):  # no bit of the word leans
        assert abs(z[place::32].sum()) < 5 * math.sqrt(N / 32)


# The sphere in few dimensions.


def norm_error(dimension: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """How far ||z|| of sphere directions is from 1, and ||z||^2 of the Gaussian they are made from."""
    z = gaussian_from_words(words(4, Stream.DIRECTIONS, 5, 6, 0, dimension * count)).reshape(count, dimension)
    squares = (z.astype(np.float64) ** 2).sum(axis=1)
    scales = np.array([scale_from_units(squared_norm_units(row)) for row in z], np.float64)
    return np.abs(np.sqrt(squares) * scales - 1), squares


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [LEAST_SPHERE_DIMENSION, 5, 8, 30])
def test_sphere_directions_of_few_coordinates_have_norm_1_within_the_bound(dimension: int) -> None:
    """Every square is off by 2^-21 of the grid at most, and by what float32 rounds: 2^-23 of it."""
    error, squares = norm_error(dimension, 20_000)
    assert (error <= dimension * 2.0**-22 / squares + 2.0**-22).all()
    assert error.max() < 1e-3


@pytest.mark.slow
def test_a_direction_whose_squares_all_vanish_is_rarer_than_any_run_is_long_from_the_least_dimension_on() -> None:
    d = exact()
    vanishing = np.array([squared_norm_units(d.z[i : i + 1]) == 0 for i in range(len(d.z))])
    p = float(d.counts[vanishing].sum()) / 2**32
    assert 1 / 2000 < p < 1 / 1500
    assert p**LEAST_SPHERE_DIMENSION < 1.1e-13 < p ** (LEAST_SPHERE_DIMENSION - 1)


def test_the_scale_of_a_direction_whose_squares_all_vanish_is_that_of_one_unit() -> None:
    assert scale_from_units(0) == scale_from_units(1) == 1024


@pytest.mark.parametrize("shape", [(1, 1), (1, 3)])
def test_a_model_with_too_few_weights_for_the_sphere_is_refused_with_the_remedy(shape: tuple[int, int]) -> None:
    model = torch.nn.Linear(*shape, bias=False)
    with pytest.raises(ModelError, match=rf"at least 4 .* has {shape[1]}: use distribution gaussian or rademacher"):
        ZeroOrder(model, lr=1e-3, distribution="sphere")
    for distribution in ("gaussian", "rademacher"):
        optimizer = ZeroOrder(model, lr=1e-3, distribution=distribution)
        optimizer.step(lambda: model.weight.square().sum())
    wide = torch.nn.Linear(1, 4, bias=False)
    ZeroOrder(wide, lr=1e-3, distribution="sphere").step(lambda: wide.weight.square().sum())
