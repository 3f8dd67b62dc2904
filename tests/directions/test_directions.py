"""One direction, everywhere the same bits: golden vectors, and the CPU kernels against the definition."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spaces import some_space

from cyber0.directions import DISTRIBUTIONS, DirectionSpace, Stream, definition, engine, reference, words
from cyber0.directions.backends import numba_kernels
from cyber0.kernels.threads import THREADED_FROM, TILE, split, thread_count

SEED = st.integers(0, 2**64 - 1)
ROUND = st.integers(0, 2**32 - 1)
INDEX = st.integers(0, 2**24 - 1)
D = 5000  # the dimension, where a test only needs some

TOP, SOME = (2**64 - 1, 2**32 - 1, 2**24 - 1), (0x0123456789ABCDEF, 12345, 678)
# (distribution, seed, round, index, start, dimension) and the bit patterns of 8 coordinates, made once by `reference`.
GOLDEN = {
    ("gaussian", 0, 0, 0, 0, 7850): "3f554c96 be353e5b be010362 bf9500ef bf637c79 3cf60221 bf2b6f89 3fb41f1c",
    ("gaussian", 1, 399, 63, 7842, 7850): "bfa05967 be819b96 3eff46b2 3effeb91 3fdb2d5f bf120b78 3fad63b3 be66884d",
    ("gaussian", *TOP, 1020, 100003): "3ee53a06 4027fb9f c00d4c14 3e88d08a 3f270399 3d84cc03 3c27bafb 3fbbbc5e",
    ("gaussian", *SOME, 3, 11): "bdbee357 3f5aafa0 bf915360 bf252140 bd9eb9f4 be3c1e33 3e234c4d 3fb9e20d",
    ("gaussian", 42, 7, 3, 2**34 - 4, 0): "bfaca6b7 be981149 bf1abbeb bf206c60 3fa6725f 3e9562d5 3fd43bcc 3e0c34cd",
    ("gaussian", 42, 7, 3, 2**39 - 4, 0): "3fc4d0cc 3e82c16c 3f30f41d 3f9c7468 bf06a59f bcacd072 3ee6a3d8 3ee297d9",
    ("rademacher", 0, 0, 0, 0, 7850): "bf800000 3f800000 bf800000 3f800000 bf800000 3f800000 bf800000 bf800000",
    ("rademacher", 1, 399, 63, 7842, 7850): "3f800000 3f800000 bf800000 bf800000 3f800000 bf800000 bf800000 bf800000",
    ("rademacher", *TOP, 1020, 100003): "bf800000 3f800000 bf800000 3f800000 3f800000 bf800000 3f800000 3f800000",
    ("rademacher", *SOME, 3, 11): "bf800000 bf800000 bf800000 3f800000 3f800000 bf800000 3f800000 3f800000",
    ("rademacher", 42, 7, 3, 2**34 - 4, 0): "bf800000 3f800000 3f800000 bf800000 bf800000 bf800000 3f800000 3f800000",
    ("rademacher", 42, 7, 3, 2**39 - 4, 0): "3f800000 bf800000 bf800000 bf800000 3f800000 3f800000 3f800000 3f800000",
    ("sphere", 0, 0, 0, 0, 7850): "3c188fc0 bb01a246 bab88d75 bc552614 bc22b572 39aff4e7 bbf53cd5 3c80d4d2",
    ("sphere", 1, 399, 63, 7842, 7850): "bc6793a0 bb3b2e06 3bb855cd 3bb8ccdb 3c9e44a2 bbd2eb0e 3c7a68cd bb2677ba",
    ("sphere", *TOP, 1020, 100003): "3ab9594b 3c07d401 bbe48044 3a5d4081 3b070b75 3956c134 38079fbc 3b97cccd",
    ("sphere", *SOME, 3, 11): "bd07d55f 3e9b9d3a beced2e3 be6b0234 bce1e532 bd85dcc1 3d6866ce 3f04459f",
}


def bits(z: np.ndarray | torch.Tensor) -> np.ndarray:
    array = z.numpy() if isinstance(z, torch.Tensor) else z
    assert array.dtype == np.float32
    return np.ascontiguousarray(array).view(np.uint32)


def filled(
    start: int, count: int, seed: int, round: int, index: int, distribution: str, dimension: int = D
) -> torch.Tensor:
    out = torch.full((count,), torch.nan)
    return engine.fill(out, start, seed, round, index, some_space(distribution, dimension))


@pytest.mark.parametrize("place", GOLDEN, ids=str)
def test_golden_vectors_never_change(place: tuple[str, int, int, int, int, int]) -> None:
    distribution, seed, round, index, start, dimension = place
    expected = [int(word, 16) for word in GOLDEN[place].split()]
    z = some_space(distribution, dimension).coordinates(seed, round, index, start, len(expected))
    assert bits(z).tolist() == expected
    kernel = filled(start, len(expected), seed, round, index, distribution, dimension)
    assert bits(kernel).tolist() == expected


@given(SEED, ROUND, INDEX, st.integers(0, 5000), st.integers(0, 3000), st.sampled_from(["gaussian", "rademacher"]))
@example(0, 0, 0, 0, 1, "gaussian")
@example(0, 0, 0, 1023, 2, "gaussian")
@example(2**64 - 1, 2**32 - 1, 2**24 - 1, 1024, 1024, "gaussian")
@example(2**64 - 1, 2**32 - 1, 2**24 - 1, 31, 2, "rademacher")
@settings(max_examples=100, deadline=None)
def test_the_kernel_gives_the_bits_of_the_definition_for_any_start_and_count(
    seed: int, round: int, index: int, start: int, count: int, distribution: str
) -> None:
    expected = reference(seed, round, index, start, count, distribution)
    assert np.array_equal(bits(filled(start, count, seed, round, index, distribution)), bits(expected))


@given(SEED, ROUND, INDEX, st.integers(1, 4000), st.data())
@settings(max_examples=50, deadline=None)
def test_the_kernel_gives_the_bits_of_the_definition_on_the_sphere(
    seed: int, round: int, index: int, dimension: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, dimension))
    count = data.draw(st.integers(0, dimension - start))
    expected = reference(seed, round, index, start, count, "sphere", dimension=dimension)
    assert np.array_equal(bits(filled(start, count, seed, round, index, "sphere", dimension)), bits(expected))


@pytest.mark.slow
@given(st.integers(0, 900), st.integers(0, 900), st.sampled_from(tuple(DISTRIBUTIONS)))
@settings(max_examples=50, deadline=None)
def test_any_shard_is_a_slice_of_the_whole(start: int, count: int, distribution: str) -> None:
    whole = some_space(distribution, 1800).coordinates(1, 2, 3, 0, 1800)
    shard = some_space(distribution, 1800).coordinates(1, 2, 3, start, count)
    assert np.array_equal(bits(shard), bits(whole[start : start + count]))


FAR = [2**31 - 700, 2**32 - 700, 2**32, 2**34 - 700, 2**34 + 12345, 2**37 - 700, 2**39 + 1, 2**41 - 3]


@pytest.mark.parametrize("start", FAR)
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
def test_coordinates_far_out_have_the_bits_of_the_definition(start: int, distribution: str) -> None:
    """2^34 Gaussian coordinates are 2^32 blocks, 2^39 signs are: from there on the high counter word counts."""
    far = reference(6, 7, 8, start, 1500, distribution)
    assert np.array_equal(bits(filled(start, 1500, 6, 7, 8, distribution)), bits(far))
    for wrapped in (start % 2**32, start % 2**34, start % 2**39):
        if wrapped != start:
            assert not np.array_equal(far, reference(6, 7, 8, wrapped, 1500, distribution))


def test_a_far_coordinate_is_the_word_of_its_own_number() -> None:
    start = 2**34 + 5
    expected = definition.gaussian_from_words(words(6, Stream.DIRECTIONS, 7, 8, start, 10))
    assert np.array_equal(reference(6, 7, 8, start, 10, "gaussian"), expected)
    sign_word = words(6, Stream.DIRECTIONS, 7, 8, 2**39 // 32, 1)[0]
    signs = reference(6, 7, 8, 2**39, 32, "rademacher")
    assert [z < 0 for z in signs] == [bool(int(sign_word) >> i & 1) for i in range(32)]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_any_number_of_threads_gives_the_same_bits(
    threads: int, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = THREADED_FROM + 3 * TILE + 77
    monkeypatch.setenv("CYBER0_THREADS", str(threads))
    assert thread_count() == threads
    for start in (0, 1, 1023, 123_457):
        dimension = start + count
        expected = some_space(distribution, dimension).coordinates(3, 4, 5, start, count)
        pieces = split(start, count, count)
        assert (len(pieces) == 1) == (threads == 1)
        assert np.array_equal(bits(filled(start, count, 3, 4, 5, distribution, dimension)), bits(expected))


@given(st.integers(0, 5000), st.integers(1, 300_000), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_pieces_for_threads_cover_everything_once_and_never_cut_a_tile(start: int, count: int, threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CYBER0_THREADS", str(threads))
        pieces = split(start, count, THREADED_FROM)
    assert pieces[0][0] == 0 and pieces[-1][1] == count
    assert all(low < high for low, high in pieces)
    assert all(a[1] == b[0] and (start + b[0]) % TILE == 0 for a, b in itertools.pairwise(pieces))


@pytest.mark.parametrize("wanted", ["", "0", "-3", "many"])
def test_a_thread_count_that_is_none_falls_back_to_the_processors(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYBER0_THREADS", wanted)
    assert thread_count() >= 1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("rows", "count"), [(1, 1500), (3, 1500), (7, 30_001)])
def test_many_rows_are_the_single_directions(distribution: str, rows: int, count: int) -> None:
    start, dimension = 1021, 1021 + count
    matrix = torch.full((rows, count), torch.nan)
    returned = engine.fill(matrix, start, 9, 8, 2**24 - rows, some_space(distribution, dimension))
    assert returned is matrix
    for r in range(rows):
        expected = some_space(distribution, dimension).coordinates(9, 8, 2**24 - rows + r, start, count)
        assert np.array_equal(bits(matrix[r]), bits(expected))


def test_directions_differ_by_seed_round_and_index() -> None:
    base = reference(1, 1, 1, 0, 1000, "gaussian")
    for other in [(2, 1, 1), (1 + 2**32, 1, 1), (1, 2, 1), (1, 1, 2)]:
        assert (reference(*other, 0, 1000, "gaussian") == base).mean() < 0.01


@pytest.mark.parametrize("dimension", [1, 2, 10, 7850, 200_003])
def test_a_direction_on_the_sphere_has_norm_1(dimension: int) -> None:
    z = reference(1, 2, 3, 0, dimension, "sphere", dimension=dimension).astype(np.float64)
    assert abs(np.sqrt((z * z).sum()) - 1) < 1e-6 + 1e-5 / dimension


def test_the_sphere_is_the_gaussian_times_one_float() -> None:
    gaussian = reference(1, 2, 3, 100, 900, "gaussian")
    scale = definition.sphere_scale(1, 2, 3, 7850)
    assert scale.dtype == np.float32
    sphere = reference(1, 2, 3, 100, 900, "sphere", dimension=7850)
    assert np.array_equal(bits(sphere), bits(gaussian * scale))


def test_the_norm_is_summed_in_integers_from_squares_on_the_grid() -> None:
    """Each float32 z^2 in units of 2^-20, rounded half up, added as Python integers."""
    z = reference(1, 2, 3, 0, 3000, "gaussian")
    units = 0
    for value in z:
        square = np.float32(value * value)
        units += int(np.floor(np.float32(np.float32(square * np.float32(2**20)) + np.float32(0.5))))
    assert definition.squared_norm_units(z) == units
    assert definition.sphere_scale(1, 2, 3, 3000) == np.float32(1 / np.sqrt(units / 2**20))


@pytest.mark.parametrize("dimension", [1, 1023, 1024, 1025, 7850, 100_003])
def test_the_scale_is_the_same_from_any_shards_in_any_order_and_from_the_kernel(
    dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (5, 6, 7)
    key = tuple(np.uint64(v) for v in place)
    whole = definition.squared_norm_units(reference(*place, 0, dimension, "gaussian"))
    cuts = sorted(
        {0, dimension // 7, dimension // 3, dimension // 3 + 1, dimension - 1, dimension} & set(range(dimension + 1))
    )
    shards = list(itertools.pairwise(cuts))[::-1]
    assert sum(int(numba_kernels.squared_norm_units(a, b, key[0], key[1], key[2])) for a, b in shards) == whole
    scale = definition.scale_from_units(whole)
    for chunk in (1 << 20, 1000, 77 + dimension // 5):
        assert definition.sphere_scale(*place, dimension, chunk=chunk) == scale
    for threads in (1, 2, 3, 7):
        monkeypatch.setenv("CYBER0_THREADS", str(threads))
        engine.sphere_scale.cache_clear()
        assert engine.sphere_scale(*place, dimension, "cpu") == scale


def test_the_sphere_without_its_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="dimension"):
        reference(1, 2, 3, 0, 10, "sphere")


def test_coordinates_beyond_the_dimension_of_the_sphere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"11 .* 10"):
        reference(1, 2, 3, 1, 10, "sphere", dimension=10)


def test_an_unknown_distribution_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"gaussian, sphere, rademacher.*'normal'"):
        reference(1, 2, 3, 0, 10, "normal")
    with pytest.raises(ValueError, match=r"gaussian, sphere, rademacher.*'normal'"):
        filled(0, 10, 1, 2, 3, "normal")


@pytest.mark.parametrize(("start", "count"), [(-1, 10), (0, -1)])
def test_a_negative_start_or_count_is_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        reference(1, 2, 3, start, count, "gaussian")


@pytest.mark.parametrize(("seed", "round", "index"), [(2**64, 0, 0), (-1, 0, 0), (0, 2**32, 0), (0, 0, 2**24)])
def test_what_does_not_fit_the_counter_is_refused(seed: int, round: int, index: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        filled(0, 10, seed, round, index, "gaussian")
    with pytest.raises(ValueError, match="must be in"):
        reference(seed, round, index, 0, 10, "gaussian")


def test_the_last_row_counts_when_the_index_is_checked() -> None:
    with pytest.raises(ValueError, match="index"):
        engine.fill(torch.empty(2, 10), 0, 0, 0, 2**24 - 1, DirectionSpace("gaussian", 10))


def test_only_contiguous_float32_is_filled() -> None:
    for out in (torch.empty(10, dtype=torch.float64), torch.empty(10, 10).T[:, :5], torch.empty(20)[::2]):
        with pytest.raises((ValueError, RuntimeError)):
            engine.fill(out, 0, 1, 2, 3, DirectionSpace("gaussian", 10))


def test_nothing_is_filled_into_nothing() -> None:
    assert engine.fill(torch.empty(0), 0, 1, 2, 3, DirectionSpace("gaussian", 10)).numel() == 0
    assert engine.fill(torch.empty(3, 0), 0, 1, 2, 3, DirectionSpace("sphere", 10)).numel() == 0


def test_filling_a_view_leaves_its_neighbours_alone() -> None:
    whole = torch.full((4000,), 9.0)
    engine.fill(whole[1000:2500], 77, 1, 2, 3, DirectionSpace("gaussian", D))
    assert (whole[:1000] == 9).all() and (whole[2500:] == 9).all()
    assert np.array_equal(bits(whole[1000:2500]), bits(reference(1, 2, 3, 77, 1500, "gaussian")))


SHOW = """
import numpy, torch
from cyber0.directions import DirectionSpace, engine, reference
z = engine.fill(torch.empty(8), 0, 1, 2, 3, DirectionSpace("gaussian", 8)).numpy()
print(numpy.array_equal(z, reference(1, 2, 3, 0, 8, "gaussian")))
"""


@pytest.mark.slow
def test_a_change_of_the_definition_reaches_kernels_that_were_compiled_before(tmp_path: Path) -> None:
    """An update that leaves the file of the kernels as it is must not go on with the kernels of the old definition."""
    ignored = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(Path(definition.__file__).parents[1], tmp_path / "cyber0", ignore=ignored)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    source = package / "directions" / "definition.py"
    for polynomial in ("0x1.043c58p-14", "0x1.143c58p-14"):
        source.write_text(source.read_text().replace("0x1.043c58p-14", polynomial))
        shown = subprocess.run(
            [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout.strip() == "True", polynomial
