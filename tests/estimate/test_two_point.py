"""One two-point formula for floats, arrays and tensors: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cyber0.estimate.two_point import two_point

RNG = np.random.default_rng(0)
ABOVE, BELOW = RNG.normal(size=50), RNG.normal(size=50)


@pytest.mark.parametrize("factor", [1.0, 7850.0])
def test_floats_arrays_and_tensors_give_the_bits_of_the_formula(factor: float) -> None:
    mu = float(np.float32(1e-3))
    expected = [factor * (a - b) / (2 * mu) for a, b in zip(ABOVE.tolist(), BELOW.tolist(), strict=True)]
    assert [two_point(a, b, mu, factor) for a, b in zip(ABOVE.tolist(), BELOW.tolist(), strict=True)] == expected
    assert two_point(ABOVE, BELOW, mu, factor).tolist() == expected
    assert two_point(torch.from_numpy(ABOVE), torch.from_numpy(BELOW), mu, factor).tolist() == expected


def test_the_losses_are_left_as_they_are() -> None:
    above, below = ABOVE.copy(), BELOW.copy()
    two_point(above, below, 1e-3, 3.0)
    assert np.array_equal(above, ABOVE) and np.array_equal(below, BELOW)
