"""The finite differences, each written once, and how many evaluations of the loss an estimator takes."""

from __future__ import annotations

from typing import Any, TypeVar, cast

_T = TypeVar("_T")  # a float, an array of numpy's or a tensor: what losses come as


def two_point(above: _T, below: _T, mu: float, factor: float = 1.0) -> _T:
    """Return factor * (f(w + mu z) - f(w - mu z)) / 2 mu from the losses at both ends, element by element."""
    return _difference(above, below, 2 * mu, factor)


def one_sided(above: _T, at_w: _T, mu: float, factor: float = 1.0) -> _T:
    """Return factor * (f(w + mu z) - f(w)) / mu from the losses at the probe and at w, element by element.

    It is off by mu/2 z'Hz, H the Hessian, which `two_point` cancels, and rounding of the losses shows twice as much.
    """
    return _difference(above, at_w, mu, factor)


def _difference(far: _T, near: _T, distance: float, factor: float) -> _T:
    slopes: Any = cast(Any, far) - cast(Any, near)  # a new array, which the rest overwrites
    if factor != 1.0:
        slopes *= factor
    slopes /= distance
    return cast(_T, slopes)


def evaluations(estimator: str, k: int) -> int:
    """Return how often the loss of a batch is evaluated to estimate its slopes along k directions."""
    return {"two_point": 2 * k, "one_sided": k + 1, "forward": k, "gradient": 1}[estimator]
