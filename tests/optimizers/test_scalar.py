"""Optimizers that scale the decided scalars."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyber0 import optimizers
from cyber0.directions.definition import GAUSSIAN_REACH
from cyber0.errors import ConfigError
from cyber0.optimizers import OPTIMIZERS, full_options, make, state_digest

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
FOUR = st.lists(FINITE, min_size=4, max_size=4).map(lambda v: np.array(v, np.float32))
SCALARS = st.lists(FINITE, min_size=2, max_size=9).map(lambda v: np.array(v, np.float32))


def test_sgd_is_the_plain_step() -> None:
    found = make("sgd").step((), 0.3, np.array([1.0, -2.0], np.float32), 2)
    assert found.state == ()
    np.testing.assert_array_equal(found.coefficients, np.array([0.3 / 2, -0.3 * 2 / 2], np.float32))


def test_adaptive_divides_by_the_root_of_a_bias_corrected_running_mean() -> None:
    optimizer, state = make("adaptive", {"beta": 0.9}), make("adaptive").start()
    moment = 0.0
    for t, values in enumerate(([3.0, 4.0], [1.0, 0.0], [-2.0, 2.0])):
        moment = 0.9 * moment + (1 - 0.9) * (values[0] ** 2 + values[1] ** 2) / 2
        root = math.sqrt(moment / (1 - 0.9 ** (t + 1)))
        found = optimizer.step(state, 0.5, np.array(values, np.float32), 2)
        np.testing.assert_allclose(found.coefficients, 0.5 * np.array(values) / root / 2, rtol=1e-6)
        state = found.state


def test_the_first_adaptive_step_has_the_length_lr_whatever_the_scale_of_the_loss() -> None:
    optimizer = make("adaptive")
    for scale in (1e-20, 1.0, 1e20):
        c = optimizer.step(optimizer.start(), 0.25, np.array([3.0, -4.0, 1.0], np.float64) * scale, 3).coefficients
        assert math.isclose(math.sqrt(float(np.square(c.astype(np.float64)).mean())) * 3, 0.25, rel_tol=1e-6)


def test_normalized_divides_by_the_deviation_of_the_round() -> None:
    values = np.array([1.0, 2.0, 4.0], np.float32)
    c = make("normalized").step((), 0.1, values, 3).coefficients
    np.testing.assert_allclose(c, 0.1 * values / np.std(values, ddof=1) / 3, rtol=1e-6)


def test_zscores_have_mean_0_and_variance_1() -> None:
    c = make("zscore").step((), 1.0, np.array([1.0, 2.0, 4.0, 9.0], np.float32), 1).coefficients.astype(np.float64)
    assert abs(c.mean()) < 1e-7 and math.isclose(np.square(c).mean(), 1.0, rel_tol=1e-6)


def test_ranks_depend_on_the_order_alone_and_equal_scalars_have_equal_ranks() -> None:
    step = make("rank").step
    values = np.array([5.0, -1.0, 7.0, 5.0], np.float32)
    c = step((), 1.0, values, 1).coefficients
    np.testing.assert_array_equal(c, step((), 1.0, np.exp(values), 1).coefficients)
    assert c[0] == c[3] and c[1] < c[0] < c[2] and abs(c.sum()) < 1e-6


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@given(rounds=st.lists(FOUR, min_size=1, max_size=6), lr=st.floats(1e-9, 1e3))
@settings(max_examples=40, deadline=None)
def test_every_step_is_finite_repeatable_and_within_its_reach(name: str, rounds: list[np.ndarray], lr: float) -> None:
    optimizer, twin = make(name), make(name)
    state = other = optimizer.start()
    for values in rounds:
        found, again = optimizer.step(state, lr, values, 4), twin.step(other, lr, values, 4)
        assert np.isfinite(found.coefficients).all() and all(map(math.isfinite, found.state))
        np.testing.assert_array_equal(found.coefficients, again.coefficients)
        if found.elementwise is None or optimizer.carries:  # else see test_vectors.py
            total = float(np.abs(found.coefficients.astype(np.float64)).sum())
            assert GAUSSIAN_REACH * total <= optimizer.reach(lr, values, 4, GAUSSIAN_REACH) * (1 + 1e-6)
        state, other = found.state, again.state


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_scalars_that_are_all_0_move_nothing(name: str) -> None:
    optimizer = make(name)
    assert not optimizer.step(optimizer.start(), 1.0, np.zeros(3, np.float32), 3).coefficients.any()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_estimates_that_are_not_finite_are_not_scaled_and_leave_the_state(name: str) -> None:
    optimizer = make(name)
    found = optimizer.step(optimizer.start(), 1.0, np.array([1.0, np.inf, -2.0]), 1)
    largest = np.finfo(np.float32).max
    assert found.coefficients.tolist() == [1.0, float(largest), -2.0] and found.state == optimizer.start()


@given(values=SCALARS, order=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_the_scalars_does_not_change_what_they_become(values: np.ndarray, order: random.Random) -> None:
    places = list(range(len(values)))
    order.shuffle(places)
    for name in OPTIMIZERS:
        optimizer = make(name)
        straight = optimizer.step(optimizer.start(), 1.0, values, 1)
        shuffled = optimizer.step(optimizer.start(), 1.0, values[places], 1)
        np.testing.assert_array_equal(straight.coefficients[places], shuffled.coefficients)
        assert straight.state == shuffled.state


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("adaptiv", {}, "did you mean 'adaptive'"),
        ("adaptive", {"beta": 1.0}, "beta = 1.0 must be at least 0 and below 1"),
        ("adaptive", {"gamma": 1.0}, "takes no such option"),
        ("adaptive", {"beta": "x"}, "wrong type"),
        ("sgd", {"beta": 0.5}, "it takes none"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(name: str, options: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make(name, options)


def test_all_options_are_stated_with_their_defaults() -> None:
    assert full_options("sgd", {}) == {}
    assert full_options("adaptive", {}) == {"beta": 0.98}
    assert full_options("adaptive", {"beta": 0}) == {"beta": 0.0}


def test_a_state_changes_the_digest_and_none_leaves_that_of_the_weights() -> None:
    weights = "ab" * 32
    assert state_digest(weights, ()) == weights
    assert len({state_digest(weights, (0.0, 1.0)), state_digest(weights, (0.0, 0.5)), weights}) == 3
    assert optimizers.state_digest(weights, (0.0, 1.0)) == state_digest(weights, (0.0, 1.0))
