"""The logic of the Triton kernels, run in numpy: every coordinate is computed, with the bits of the definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_triton
import numpy as np
import pytest
import torch
from perturbed_norms import perturbed_norm
from spaces import some_space

from cyber0.directions import DirectionSpace, Probe, Step, definition, engine
from cyber0.directions.backends.base import NO_PROBE, PackedProbe, PackedSteps
from cyber0.directions.definition import DISTRIBUTIONS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")
PROBE = Probe(2**63 + 5, 6, 2, 1e-2)


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[Any, ...]]:
    with fake_triton.kernels() as found:
        yield found


def bits(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16).numpy().view(f"u{t.element_size()}").copy()


def packed(steps: list[Step], probe: Probe | None, space: DirectionSpace) -> tuple[PackedSteps, PackedProbe]:
    return engine.WeightPass([], None, space, CPU)._pack(steps, probe)


def some_steps(count: int, k: int = 2, bits: int = 32) -> list[Step]:
    rng = np.random.default_rng(3)
    return [Step(2**40 + t, t, np.float32(rng.normal(size=k) * 1e-2), t, t % 2, bits=bits) for t in range(count)]


def assert_applied(
    modules: tuple[Any, ...], space: DirectionSpace, storage: str, start: int, steps: list[Step],
    probe: Probe | None, w: torch.Tensor,
) -> None:  # fmt: skip
    kernels, _, low_rank, *_ = modules
    stored = w.numpy().copy() if storage == "float32" else bits(w)
    expected = definition.apply(stored, storage, start, steps, probe, space)
    table, out = kernels.LaunchTable(*packed(steps, probe, space), CPU), torch.empty_like(w)
    if space.layout is None:
        kernels.apply(w, out, start, table, kernels.CODES[space.distribution])
    else:
        low_rank.apply(w, out, start, table, space.layout)
    np.testing.assert_array_equal(bits(out), expected.view(f"u{w.element_size()}"))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("what", ["probe", "step", "three steps", "three steps, 16 bits", "three steps and a probe"])
def test_a_pass_has_the_bits_of_the_definition(
    modules: tuple[Any, ...], what: str, storage: str, distribution: str
) -> None:
    steps = some_steps({"probe": 0, "step": 1}.get(what, 3), bits=16 if "16 bits" in what else 32)
    probe = PROBE if "probe" in what else None
    space = some_space(distribution, 6000)
    w = (torch.randn(4500, generator=torch.Generator().manual_seed(1)) * 0.1).to(DTYPES[storage])
    assert_applied(modules, space, storage, 1021, steps, probe, w)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("limit", [1 << 26, 1 << 13])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_low_rank_passes_may_be_cut(
    modules: tuple[Any, ...], storage: str, limit: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules[2], "FACTOR_BYTES", limit)
    space = some_space("low_rank", 6000, rank)
    w = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.1).to(DTYPES[storage])
    for probe in (None, PROBE):
        assert_applied(modules, space, storage, 700, some_steps(5), probe, w)


@pytest.mark.parametrize("coefficients", [[3e38, -2e38], [1e26, -2e25], [-3e38]])
@pytest.mark.parametrize(("storage", "bits"), [("float32", 32), ("float16", 16), ("bfloat16", 16), ("bfloat16", 32)])
def test_weights_that_leave_the_finite_range_are_clamped(
    modules: tuple[Any, ...], storage: str, bits: int, coefficients: list[float]
) -> None:
    space = DirectionSpace.of("low_rank", [(60, 152)], 1)
    w = torch.randn(9120, generator=torch.Generator().manual_seed(1)).to(DTYPES[storage])
    w[::7], w[5], w[8], w[9] = torch.finfo(w.dtype).max, torch.nan, -torch.inf, -0.0
    huge = [Step(1, t, np.float32(coefficients), bits=bits) for t in range(4)]
    assert_applied(modules, space, storage, 0, huge, None, w)


@pytest.mark.parametrize("coefficients", [[1e-45], [-1e-44], [1e-45, -1e-45]])
@pytest.mark.parametrize("storage", DTYPES)
def test_zeros_keep_their_sign_where_a_step_underflows(
    modules: tuple[Any, ...], storage: str, coefficients: list[float]
) -> None:
    space = DirectionSpace.of("low_rank", [(24, 256), (40,)], 1)
    w = torch.full((6184,), -0.0).to(DTYPES[storage])
    w[::2] = 0.0
    for count in (1, 4):
        steps = [Step(1, t, np.float32(coefficients)) for t in range(count)]
        assert_applied(modules, space, storage, 0, steps, None, w)


@pytest.mark.parametrize("bits", [16, 32])
def test_a_bfloat16_weight_at_the_end_of_its_range_stays_finite(modules: tuple[Any, ...], bits: int) -> None:
    space, w = DirectionSpace.of("low_rank", [(24, 256)], 1), torch.zeros(6144, dtype=torch.bfloat16)
    w[::3], w[1::3] = torch.finfo(w.dtype).max, -torch.finfo(w.dtype).max
    steps = [Step(1, t, np.float32([1e35]), bits=bits) for t in range(8)]  # a small step, rounded up past the largest
    assert_applied(modules, space, "bfloat16", 0, steps, None, w)


def test_a_float32_pass_may_be_rounded_to_16_bits_at_its_end(
    modules: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules[2], "FACTOR_BYTES", 1 << 12)
    space, steps = some_space("low_rank", 3000), some_steps(4)
    w, out = torch.randn(3000, generator=torch.Generator().manual_seed(1)), torch.empty(3000, dtype=torch.bfloat16)
    exact = definition.apply(w.numpy().copy(), "float32", 0, steps, PROBE, space)
    modules[2].apply(w, out, 0, modules[0].LaunchTable(*packed(steps, PROBE, space), CPU), space.layout)
    np.testing.assert_array_equal(bits(out), definition.narrow(exact, "bfloat16"))


@pytest.mark.parametrize("rank", [1, 3])
def test_rows_of_directions_have_the_bits_of_the_definition(modules: tuple[Any, ...], rank: int) -> None:
    space, out = some_space("low_rank", 5000, rank), torch.empty(3, 3100)
    ones = np.ones((1, 3), np.float32)
    place = (np.array([n], np.uint64) for n in (2**63 + 9, 8, 5, 0))
    table = modules[0].LaunchTable(PackedSteps(*place, ones, ones), NO_PROBE, CPU)
    modules[2].fill(out, 1500, table, space.layout)
    for r in range(3):
        expected = space.coordinates(2**63 + 9, 8, 5 + r, 1500, 3100)
        np.testing.assert_array_equal(bits(out[r].contiguous()), expected.view(np.uint32))


@pytest.mark.parametrize("begin, end", [(0, None), (16, -8), (301, 16384)])
@pytest.mark.parametrize("half_words, k", [(16, 1), (32, 2)])
@pytest.mark.parametrize("storage", DTYPES)
def test_matrices_whose_rows_begin_with_a_block_of_words_are_moved_by_rows_and_columns(
    modules: tuple[Any, ...], storage: str, half_words: int, begin: int, end: int | None, k: int
) -> None:
    space = DirectionSpace.of("low_rank", [(64, 256), (16,), (40, 24), (33, 136), (16, 17)])
    end = space.dimension if end is None else end % space.dimension
    w = (torch.randn(end - begin, generator=torch.Generator().manual_seed(1)) * 0.1).to(DTYPES[storage])
    w[[5, 3000]] = torch.tensor([np.inf, np.nan]).to(w.dtype)
    assert_applied(modules, space, storage, begin, some_steps(4, k=k, bits=half_words), None, w)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("k", [1, 3, 8, 12, 64])
@pytest.mark.parametrize(
    ("storage", "half_words"), [("float32", 32)] + [(name, n) for name in ("float16", "bfloat16") for n in (16, 32)]
)
def test_directions_whose_factors_are_read_at_once_are_added_in_order(
    modules: tuple[Any, ...], storage: str, half_words: int, k: int, rank: int
) -> None:
    assert modules[2].together(k, rank) == {1: 1, 3: 1, 8: 8 // rank, 12: 4, 64: 8 // rank}[k]
    space = DirectionSpace.of("low_rank", [(16, 128), (11,), (9, 17)], rank)
    w = (torch.randn(space.dimension, generator=torch.Generator().manual_seed(1)) * 0.1).to(DTYPES[storage])
    w[700] = torch.inf  # in float32 its tile is computed a second time, one direction after the other
    for steps, probe in ((2, None), (1, PROBE)):
        assert_applied(modules, space, storage, 0, some_steps(steps, k, half_words), probe, w)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_gets_what_its_perturbed_weights_would_give(
    modules: tuple[Any, ...], biased: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    directions, distances, rows, width, out = 3, 2, 5, 600, 530  # more than one program reads at a time
    x, y = drawn(directions * distances * rows, width), drawn(directions * distances * rows, out)
    inner, outer, z = drawn(directions, 1, width), drawn(directions, 1, out), drawn(directions, out)
    scaled = torch.tensor([[1e-2, -1e-2], [0.0, 0.0], [2e-2, -1e-2]])
    right = y.clone().float().view(directions, distances, rows, out)
    for d in range(directions):
        for s in range(distances):
            moved = x.float().view(directions, distances, rows, width)[d, s] @ inner[d].float().T @ outer[d].float()
            right[d, s] += scaled[d, s] * (moved + (z[d].float() if biased else 0.0))
    assert modules[3].add_product(y, x, inner, outer, scaled, (z, scaled) if biased else None)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(y.float().view(right.shape), right, rtol=tolerance, atol=tolerance)


def test_layers_leave_what_they_have_no_kernel_for_to_torch(modules: tuple[Any, ...]) -> None:
    x, y, factors = torch.ones(4, 3), torch.zeros(4, 5), torch.ones(1, 2, 3)
    assert not modules[3].add_product(y, x, factors, torch.ones(1, 2, 5), torch.ones(1, 1), None)
    assert not modules[3].add_product(y.T, x, factors[:, :1], torch.ones(1, 1, 5), torch.ones(1, 1), None)
    assert not modules[3].add_product(y.double(), x, factors[:, :1], torch.ones(1, 1, 5), torch.ones(1, 1), None)
    assert not y.any()


NORM = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("distances", "rows", "width"), [(1, 3, 70), (2, 5, 64), (2, 1, 5000)])
def test_a_norm_has_the_weight_of_each_group(
    modules: tuple[Any, ...], distances: int, rows: int, width: int, centred: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight = (3 * drawn(3 * distances * rows, 2, width)).to(dtype), drawn(width).to(dtype)
    z, c = drawn(3, width + 9).to(dtype)[:, 4:-5], torch.linspace(-0.1, 0.2, 3 * distances).view(3, distances)
    bias = (drawn(width).to(dtype), drawn(3, width).to(dtype)) if centred else None
    found = modules[3].norm(x, (weight, z), bias, c, 1e-3, centred=centred)
    right = perturbed_norm(x, (weight, z), bias, c, 1e-3, centred=centred)
    assert found.dtype == dtype and found.shape == x.shape
    torch.testing.assert_close(found.double(), right.view(x.shape), rtol=NORM[dtype], atol=NORM[dtype])


def test_norms_leave_what_they_have_no_kernel_for_to_torch(modules: tuple[Any, ...]) -> None:
    def norm(x: torch.Tensor, w: torch.Tensor, z: torch.Tensor, bias: Any = None) -> torch.Tensor | None:
        found: torch.Tensor | None = modules[3].norm(x, (w, z), bias, torch.ones(1, 1), 1e-5, centred=False)
        return found

    x, w, z, wide = torch.ones(4, 6), torch.ones(6), torch.ones(1, 6), modules[3].NORM_WIDTH + 1
    assert norm(x, w, z) is not None and norm(x, w, z, (w, z)) is not None
    assert norm(torch.ones(6, 4).T, w, z) is None and norm(x[:0], w, z) is None
    assert norm(x, w.double(), z) is None and norm(x, torch.ones(12)[::2], z) is None
    assert norm(x, w, z, (w, z.double())) is None and norm(x, w, z, (torch.ones(12)[::2], z)) is None
    assert norm(torch.ones(1, wide), torch.ones(wide), torch.ones(1, wide)) is None
