"""CUDA gives the bits of the definition: directions, norms, commits, looks, digests."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from by_hand import HUGE, meeting_its_threshold, near_the_edge
from torch import Tensor, nn

from cyber0 import ZeroOrder
from cyber0.directions import DISTRIBUTIONS, Probe, Step, definition, engine, reference
from cyber0.errors import ModelError
from cyber0.model.blocks import perturbed
from cyber0.model.vector import Parameters

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU on this machine"),
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TILES = {"float32": 1024, "float16": 4096, "bfloat16": 4096}  # coordinates that one program owns
SOME_PROBE = Probe(2**63 + 5, 2**31, 77, 1e-3)
SPECIAL32 = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
             0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x3F800000, 0x33800000, 0x477FE000]  # fmt: skip


def bits(values: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().contiguous()
        values = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16).numpy()
    return values.view(np.uint32 if values.itemsize == 4 else np.uint16)


def assert_same_bits(got: np.ndarray | Tensor, expected: np.ndarray | Tensor) -> None:
    a, b = bits(got).reshape(-1), bits(expected).reshape(-1)
    wrong = np.flatnonzero(a != b)
    assert a.shape == b.shape
    assert not len(wrong), (
        f"{len(wrong)} of {len(a)} differ, first at {wrong[0]}: got {a[wrong[0]]:#x}, expected {b[wrong[0]]:#x}"
    )


def some_step(round: int, k: int = 2, size: float = 1e-3, rounding: int = 0, seed: int = 2**64 - 3) -> Step:
    c = np.float32(np.random.default_rng(round).normal(size=k) * size)
    return Step(seed, round, c, first=5, rounding=rounding)


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
    engine.apply(source, out, start, steps, probe, distribution, dimension=dimension)
    expected = definition.apply(stored, storage, start, steps, probe, distribution, dimension=dimension)
    assert_same_bits(out, expected)
    assert_same_bits(source, stored)
    assert (guard[:32] == 3).all() and (guard[32 + count :] == 3).all(), "written outside of out"
    engine.apply(source, source, start, steps, probe, distribution, dimension=dimension)
    assert_same_bits(source, expected)


# Directions.


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("count", [1, 2, 31, 127, 1023, 1024, 1025, 4095, 4097, 70 * 1024 + 13])
def test_directions_have_the_bits_of_the_definition(distribution: str, count: int) -> None:
    for start in (0, 1, 16, 1023, 1024, 12_345):
        place = (2**64 - 1 - count, 2**32 - 1, 2**24 - 1)
        out = torch.full((count,), torch.nan, device=DEVICE)
        engine.fill(out, start, *place, distribution, dimension=start + count)
        assert_same_bits(out, reference(*place, start, count, distribution, dimension=start + count))


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("start", [2**31 - 700, 2**32 - 700, 2**34 - 700, 2**34 + 12_345, 2**39 - 700, 2**41 - 3])
def test_far_coordinates_have_the_bits_of_the_definition(distribution: str, start: int) -> None:
    out = torch.empty(3000, device=DEVICE)
    engine.fill(out, start, 6, 7, 8, distribution, dimension=start + 3000)
    assert_same_bits(out, reference(6, 7, 8, start, 3000, distribution))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("round", [0, 1, 2**31, 2**32 - 1])
def test_every_part_of_the_counter_and_the_key_counts(seed: int, round: int) -> None:
    for index in (0, 1, 2**24 - 1):
        out = engine.fill(torch.empty(1500, device=DEVICE), 7, seed, round, index, "gaussian", dimension=2000)
        assert_same_bits(out, reference(seed, round, index, 7, 1500, "gaussian"))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_many_rows_are_the_single_directions(distribution: str) -> None:
    matrix = engine.fill(torch.empty(7, 5001, device=DEVICE), 1021, 9, 8, 2**24 - 7, distribution, dimension=7000)
    for r in range(7):
        expected = reference(9, 8, 2**24 - 7 + r, 1021, 5001, distribution, dimension=7000)
        assert_same_bits(matrix[r], expected)


@pytest.mark.parametrize("dimension", [1, 2, 1023, 1024, 1025, 7850, 1_000_003])
def test_norms_and_scales_are_those_of_the_definition(dimension: int) -> None:
    for seed, round, index in [(0, 0, 0), (1, 1, 1), (2**64 - 1, 2**32 - 1, 2**24 - 1)]:
        engine.sphere_scale.cache_clear()
        scale = engine.sphere_scale(seed, round, index, dimension, DEVICE)
        assert scale.dtype == np.float32
        assert scale == definition.sphere_scale(seed, round, index, dimension)


# Commits and looks.

WHAT: dict[str, tuple[list[Step], Probe | None]] = {
    "one step": ([some_step(1)], None),
    "a step of one direction": ([some_step(2, k=1)], None),
    "a look": ([], SOME_PROBE),
    "three steps and a look": ([some_step(1), some_step(2, rounding=9), some_step(2**32 - 1, seed=1)], SOME_PROBE),
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
    if distribution == "gaussian" and what == "three steps and a look":
        places += [(0, tile), (1, tile - 1), (16, tile), (16, 3 * tile + 7)]
    for start, count in places:
        check_apply(storage, start, count, *WHAT[what], distribution, dimension=20_000)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize(("shift", "tail"), [(0, 0), (0, 777), (1, 1), (16, 0), (1000, 777)])
def test_whole_tiles_without_a_mask_agree_too(storage: str, distribution: str, shift: int, tail: int) -> None:
    """Beyond 64 tiles the whole ones are launched without a mask, the first and the last with one."""
    if distribution != "gaussian" and (shift, tail) not in [(0, 0), (1000, 777)]:
        pytest.skip("how tiles are launched does not depend on the distribution")
    tile = TILES[storage]
    count = 70 * tile + tail
    check_apply(storage, 3 * tile + shift, count, *WHAT["three steps and a look"], distribution, dimension=80 * tile)


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


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-9, 1e-5, 1e-3, 1.0, 1e4, 1e38])
def test_every_16_bit_pattern_with_updates_of_every_size(storage: str, size: float) -> None:
    steps = [some_step(3, k=3, size=size), some_step(4, k=3, size=size)]
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
            engine.apply(w, w, 33, made, None, distribution, dimension=1 << 17)
            assert_same_bits(w, definition.apply(stored, storage, 33, made, None, distribution))
            assert w.isfinite().all()


@pytest.mark.parametrize("size", [1e-46, 3e38, 3.5e38, 1e300])
def test_a_look_goes_as_far_as_on_the_cpu_however_far_that_is(size: float) -> None:
    """The coefficient of a look is rounded to float32 without being clamped: w + c z may be infinite."""
    with np.errstate(over="ignore"):
        check_apply("float32", 5, 3000, [], Probe(1, 2, 3, size), "rademacher")


@pytest.mark.parametrize(("storage", "at"), [("float16", "normal"), ("float16", "subnormal"), ("bfloat16", "bfloat16")])
def test_a_word_that_equals_the_threshold_rounds_as_defined(storage: str, at: str) -> None:
    i, x = meeting_its_threshold(storage, at)
    step = Step(9, 3, -x * reference(9, 3, 0, i, 1, "rademacher"), rounding=2)
    stored = np.zeros(1, np.uint16)
    w = on_device(stored, storage)
    engine.apply(w, w, i, [step], None, "rademacher", dimension=1 << 23)
    assert_same_bits(w, definition.apply(stored, storage, i, [step], None, "rademacher"))


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


# Models.


class Transformer(nn.Module):
    """A small language model: tied embedding and output, attention, layer norms, a weight used functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(12, 32) * 0.02)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 70, batch_first=True) for _ in range(3)])
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


TOKENS = torch.arange(24).view(2, 12) % 50


def transformers(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The same model on the CPU and on the GPU."""
    torch.manual_seed(5)
    model = Transformer().to(dtype)
    return model, copy.deepcopy(model).to(DEVICE)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
def test_a_model_is_committed_replayed_and_perturbed_to_the_same_bits(storage: str, distribution: str) -> None:
    here, there = (Parameters(m, distribution) for m in transformers(DTYPES[storage]))
    assert here.digest() == there.digest() and here.rest_digest() == there.rest_digest()
    actions: list[Callable[[Parameters], None]] = [
        lambda p: p.commit(some_step(1, k=5)),
        lambda p: p.replay([some_step(t, k=3) for t in range(2, 12)]),
        lambda p: p.commit(some_step(12), radius=3.0),
        lambda p: p.replay([some_step(t) for t in range(13, 16)], radius=2.0),
        lambda p: p.project(1.5),
    ]
    digests = {here.digest()}
    for act in actions:
        act(here)
        act(there)
        assert here.digest() == there.digest()
        digests.add(here.digest())
    assert len(digests) == len(actions) + 1
    for a, b in zip(here.segments, there.segments, strict=True):
        steps = [some_step(1)]
        assert_same_bits(
            perturbed(b, there.weight_pass(SOME_PROBE, steps)), perturbed(a, here.weight_pass(SOME_PROBE, steps))
        )
    assert_same_bits(there.directions(1, 2, 3, 4), here.directions(1, 2, 3, 4))


@pytest.mark.parametrize("storage", DTYPES)
def test_a_look_computes_what_a_deep_copy_at_those_weights_computes(storage: str) -> None:
    model = transformers(DTYPES[storage])[1]
    twin = copy.deepcopy(model).eval()
    p = Parameters(model)
    digest, probe, named = p.digest(), Probe(1, 2, 3, 0.05), dict(twin.named_parameters())
    for e in p.layout:
        q = named[e.name]
        w = bits(q).reshape(-1)
        w = w.view(np.float32) if storage == "float32" else w
        new = definition.apply(w, storage, e.offset, [], probe, "gaussian")
        q.data.copy_(torch.from_numpy(np.ascontiguousarray(new)).view(q.dtype).view(q.shape))
    tokens = TOKENS.to(DEVICE)
    model.train()
    with torch.no_grad():
        expected = twin(tokens).float()
        with p.perturbed(probe):
            got = model(tokens).float()
        with p.perturbed(None):
            plain = model(tokens).float()
    # The copy may take PyTorch's fused path for attention, which rounds differently.
    tolerance = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[storage]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert (plain - expected).abs().max() > 3 * (got - expected).abs().max()
    assert p.digest() == digest


def test_an_exception_in_the_middle_of_a_look_leaves_every_bit() -> None:
    model = transformers(torch.bfloat16)[1]
    p = Parameters(model)
    digest = p.digest()
    with pytest.raises(KeyboardInterrupt), p.perturbed(SOME_PROBE):
        model(TOKENS.to(DEVICE))
        raise KeyboardInterrupt
    assert p.digest() == digest


def test_recurrent_layers_are_perturbed_through_cudnn_too() -> None:
    torch.manual_seed(6)
    model = nn.LSTM(8, 16, num_layers=2, batch_first=True).to(DEVICE)
    twin = copy.deepcopy(model).eval()
    p = Parameters(model)
    named = dict(twin.named_parameters())
    for e in p.layout:
        q = named[e.name]
        z = torch.from_numpy(reference(1, 2, 3, e.offset, e.size, "gaussian")).view(e.shape).to(DEVICE)
        q.data.copy_(q + np.float32(0.05) * z)
    x = torch.randn(3, 5, 8, device=DEVICE)
    with torch.no_grad(), p.perturbed(Probe(1, 2, 3, 0.05)):
        got = model(x)[0]
    torch.testing.assert_close(got, twin(x)[0], rtol=1e-3, atol=1e-4)


def test_stand_ins_take_no_more_memory_than_the_largest_block() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(DEVICE)
    p = Parameters(model)
    x = torch.randn(4, 2048, device=DEVICE)
    largest = max(s.buffer.nbytes for s in p.segments)

    def peak(probe: Probe | None) -> int:
        with torch.no_grad(), p.perturbed(probe):
            model(x)  # warm up: workspaces and compiled kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), p.perturbed(probe):
            model(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(SOME_PROBE) - peak(None) <= 1.1 * largest


def test_the_first_step_of_an_optimizer_needs_no_second_copy_either() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(DEVICE)
    optimizer, x = ZeroOrder(model, lr=1e-6, mu=1e-3), torch.randn(4, 2048, device=DEVICE)
    largest = max(s.buffer.nbytes for s in optimizer.parameters.segments)
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(lambda: model(x).square().mean())
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * largest  # of 8 blocks
    assert optimizer.parameters.substitutable


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_optimizer_meets_a_traced_model_and_notices_changes_from_outside(dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).to(DEVICE, DTYPES[dtype])
    twin, x = copy.deepcopy(model), torch.randn(32, 64, device=DEVICE, dtype=DTYPES[dtype])
    mine, plain = (ZeroOrder(m, lr=0.01, mu=0.05, k=3) for m in (model, twin))
    traced = torch.jit.trace(model, x)
    for _ in range(2):
        found = mine.step(lambda: traced(x).float().square().mean())
        expected = plain.step(lambda: twin(x).float().square().mean())
        np.testing.assert_allclose(found.slopes, expected.slopes, rtol=5e-2, atol=5e-2)
    model[2].weight.data.mul_(0.9)
    with pytest.raises(ModelError, match=r"through \.data"):
        mine.step(lambda: traced(x).float().square().mean())
