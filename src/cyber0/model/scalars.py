"""Scalars that a user passes, of Python, numpy or torch, as plain Python numbers; anything else is refused by name."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, cast

import numpy as np
import torch

Scalar = Any
"""A number: of Python, of numpy, or a tensor that holds one."""


def number_of(value: Scalar) -> float | None:
    """Return a scalar as a float, None if it is not a number."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def positive(name: str, value: Scalar) -> float:
    """Return a finite number above 0."""
    found = number_of(value)
    if found is None or not (math.isfinite(found) and found > 0):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return found


def not_negative(name: str, value: Scalar) -> float:
    """Return a finite number from 0 on."""
    found = number_of(value)
    if found is None or not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
    return found


def whole(name: str, value: Scalar) -> int:
    """Return a whole number."""
    try:
        if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(cast(Any, value))
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
