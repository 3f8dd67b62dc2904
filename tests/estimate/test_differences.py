"""One formula for each finite difference of floats, arrays and tensors: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cyber0.config.choices import ESTIMATORS
from cyber0.estimate.differences import evaluations, one_sided, two_point

RNG = np.random.default_rng(0)
ABOVE, BELOW = RNG.normal(size=50), RNG.normal(size=50)


@pytest.mark.parametrize("factor", [1.0, 7850.0])
def test_floats_arrays_and_tensors_give_the_bits_of_the_formula(factor: float) -> None:
    mu = float(np.float32(1e-3))
    expected = [factor * (a - b) / (2 * mu) for a, b in zip(ABOVE.tolist(), BELOW.tolist(), strict=True)]
    assert [two_point(a, b, mu, factor) for a, b in zip(ABOVE.tolist(), BELOW.tolist(), strict=True)] == expected
    assert two_point(ABOVE, BELOW, mu, factor).tolist() == expected
    assert two_point(torch.from_numpy(ABOVE), torch.from_numpy(BELOW), mu, factor).tolist() == expected


@pytest.mark.parametrize("factor", [1.0, 7850.0])
def test_the_one_sided_formula_gives_the_same_bits_and_may_share_the_loss_at_w(factor: float) -> None:
    mu, at_w = float(np.float32(1e-3)), float(BELOW[0])
    expected = [factor * (a - at_w) / mu for a in ABOVE.tolist()]
    assert [one_sided(a, at_w, mu, factor) for a in ABOVE.tolist()] == expected
    assert one_sided(ABOVE, BELOW[:1], mu, factor).tolist() == expected
    assert one_sided(torch.from_numpy(ABOVE), torch.from_numpy(BELOW[:1]), mu, factor).tolist() == expected


@pytest.mark.parametrize("difference", [two_point, one_sided])
def test_the_losses_are_left_as_they_are(difference: Any) -> None:
    above, below = ABOVE.copy(), BELOW.copy()
    difference(above, below, 1e-3, 3.0)
    assert np.array_equal(above, ABOVE) and np.array_equal(below, BELOW)


def test_every_estimator_has_its_number_of_evaluations() -> None:
    counts = {"two_point": 128, "one_sided": 65, "gradient": 1, "forward": 64}
    assert {name: evaluations(name, 64) for name in ESTIMATORS} == counts
