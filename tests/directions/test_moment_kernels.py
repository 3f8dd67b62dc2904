"""Steps of optimizers with vectors: the kernels give the bits of the definition."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from spaces import some_space

from cyber0 import optimizers
from cyber0.directions import DISTRIBUTIONS, DirectionSpace, Step, engine, moments
from cyber0.directions.backends import moment_tensors
from cyber0.directions.definition import Elementwise
from cyber0.directions.moments import LIMIT, RULES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
D = 9000


def some_steps(rule: str, count: int, k: int = 3, size: float = 1.0) -> list[Step]:
    """Return steps that an optimizer of that rule makes of some scalars."""
    optimizer, rng = optimizers.make(rule), np.random.default_rng(7)
    state, steps = optimizer.start(), []
    for t in range(count):
        update = optimizer.step(state, 1e-2, np.float32(rng.normal(size=k) * size), k)
        steps.append(Step(2**63 + 11, t, update.coefficients, elementwise=update.elementwise))
        state = update.state
    return steps


def some_vectors(rule: str, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = RULES[rule].starts.values()
    return [(torch.rand(D, generator=generator) * 1e-2 if start == 0 else torch.full((D,), start)) for start in starts]


def as_numpy(w: torch.Tensor) -> np.ndarray:
    return w.numpy() if w.dtype == torch.float32 else w.view(torch.uint16).numpy()


def assert_as_defined(rule: str, w: torch.Tensor, steps: list[Step], distribution: str = "gaussian") -> None:
    """Compare w (from coordinate 777 on, in two pieces) and the vectors after steps with the definition."""
    vectors, here = some_vectors(rule), slice(777, 777 + len(w))
    expected, beside = moments.advance(
        as_numpy(w).copy(), next(name for name, dtype in DTYPES.items() if dtype == w.dtype), 777,
        [v[here].numpy().copy() for v in vectors], steps, some_space(distribution, D))  # fmt: skip
    engine.advance([(w[:1500], 777), (w[1500:], 2277)], vectors, steps, some_space(distribution, D))
    np.testing.assert_array_equal(as_numpy(w).view(f"u{w.element_size()}"), expected.view(f"u{w.element_size()}"))
    for mine, theirs in zip(vectors, beside, strict=True):
        np.testing.assert_array_equal(mine[here].numpy().view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_weights_and_vectors_have_the_bits_of_the_definition(rule: str, storage: str, distribution: str) -> None:
    w = torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(DTYPES[storage])
    before = w.clone()
    assert_as_defined(rule, w, some_steps(rule, 3), distribution)
    assert not torch.equal(w, before)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_weights_beside_vectors_are_rounded_by_16_bits_as_defined(rule: str, storage: str) -> None:
    steps = [dataclasses.replace(step, bits=16, rounding=2) for step in some_steps(rule, 3)]
    w = torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(DTYPES[storage])
    assert_as_defined(rule, w, steps)


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("size", [1e-45, 1e-20, 1e20, 3e38])
@pytest.mark.parametrize("rule", RULES)
def test_extreme_scalars_leave_everything_finite_with_the_bits_of_the_definition(
    rule: str, size: float, storage: str
) -> None:
    steps = [
        dataclasses.replace(step, coefficients=np.float32([size, -size, size]), first=first)
        for first, step in enumerate(some_steps(rule, 4))
    ]
    w = torch.randn(2500, generator=torch.Generator().manual_seed(1)).to(DTYPES[storage])
    assert_as_defined(rule, w, steps)
    vectors = some_vectors(rule)
    engine.advance([(w, 0)], vectors, steps, DirectionSpace("gaussian", D))
    assert torch.isfinite(w).all() and all(torch.isfinite(v).all() for v in vectors)


@pytest.mark.parametrize("rule", RULES)
def test_torchs_own_operations_have_the_bits_of_the_definition(rule: str) -> None:
    steps, vectors = some_steps(rule, 5), some_vectors(rule)
    held = tuple(v.numpy().copy() for v in vectors)
    rng = np.random.default_rng(0)
    for step in steps:
        u = np.float32(rng.normal(size=D) * np.exp(rng.normal(size=D) * 12))
        u[:3] = 0.0, 3e38, -3e38
        assert step.elementwise is not None
        with np.errstate(all="ignore"):
            by, held = RULES[rule].move(moments.bounded(u), held, step.elementwise.constants)
        found = moment_tensors.advance(
            rule, 0 - torch.from_numpy(u), vectors, [float(c) for c in step.elementwise.constants]
        )
        np.testing.assert_array_equal(found.numpy().view(np.uint32), by.view(np.uint32))
        for mine, theirs in zip(vectors, held, strict=True):
            np.testing.assert_array_equal(mine.numpy().view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("rule", RULES)
def test_a_user_who_flushes_denormals_gets_the_same_bits(rule: str) -> None:
    steps, found = some_steps(rule, 3, size=1e-37), []
    for flush in (True, False):
        w, vectors = torch.zeros(3000), some_vectors(rule)
        for vector, start in zip(vectors, RULES[rule].starts.values(), strict=True):
            vector.fill_(start)
        if torch.set_flush_denormal(flush) is False and flush:
            pytest.skip("this processor can't flush denormals")
        try:
            engine.advance([(w, 0)], vectors, steps, DirectionSpace("gaussian", D))
        finally:
            torch.set_flush_denormal(False)
        found.append([t.numpy().view(np.uint32) for t in (w, *vectors)])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_u_is_bounded_and_no_nan() -> None:
    found = moments.bounded(np.float32([np.nan, np.inf, -np.inf, 1.5, -0.0]))
    assert found.tolist() == [0.0, LIMIT, -LIMIT, 1.5, 0.0]


def test_steps_that_state_no_rule_or_do_not_fit_the_vectors_are_refused() -> None:
    w, (step,) = torch.zeros(10), some_steps("momentum", 1)
    unknown = dataclasses.replace(step, elementwise=Elementwise("unknown", np.float32([1])))
    for count, wrong in ((3, step), (1, unknown), (1, dataclasses.replace(step, elementwise=None))):
        with pytest.raises(ValueError, match="momentum"):
            engine.advance([(w, 0)], [torch.zeros(10)] * count, [wrong], DirectionSpace("gaussian", 10))
    with pytest.raises(ValueError, match="can only be committed"):
        engine.apply(w, w, 0, [step], None, DirectionSpace("gaussian", 10))
    assert not w.any()
