"""The two-point estimate, written once."""

from __future__ import annotations

from typing import Any, TypeVar, cast

_T = TypeVar("_T")  # a float, an array of numpy's or a tensor: what losses come as


def two_point(above: _T, below: _T, mu: float, factor: float = 1.0) -> _T:
    """Return factor * (f(w + mu z) - f(w - mu z)) / 2 mu from the losses at both ends, element by element."""
    slopes: Any = cast(Any, above) - cast(Any, below)  # a new array, which the rest overwrites
    if factor != 1.0:
        slopes *= factor
    slopes /= 2 * mu
    return cast(_T, slopes)
