"""Optimizers with vectors beside w: what they do at each coordinate of a round, in plain numpy.

This is the definition, as definition.py is of the rest: every operation is one IEEE operation in float32, in the order
written here. The kernels in backends/ must give these bits.

A new rule is an entry of RULES here and a branch in the kernels of each backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cyber0.directions.definition import F32, Elementwise, Step, moved_by, update
from cyber0.directions.space import DirectionSpace

LIMIT = 2.0**60
"""u is clamped to this magnitude, so that its square is finite: vectors that are finite stay so."""

CURVATURE = "h"
"""Where there is a vector of this name, directions are divided by its root: in probes, and in what w moves by."""

Vectors = tuple[F32, ...]


class Rule(NamedTuple):
    """One elementwise rule."""

    starts: Mapping[str, float]
    """The vectors that it needs, in order, each with the value that all its coordinates start with."""
    move: Callable[[F32, Vectors, F32], tuple[F32, Vectors]]
    """Takes u, the vectors and the round's constants; returns by what w moves, and the vectors after the round."""


def bounded(u: F32) -> F32:
    """Return u clamped to [-LIMIT, LIMIT], and 0 where it is not a number."""
    u = np.where(np.isnan(u), np.float32(0), u)
    u = np.where(u > LIMIT, np.float32(LIMIT), u)
    return np.asarray(np.where(u < -LIMIT, np.float32(-LIMIT), u), dtype=np.float32)


def _momentum(u: F32, vectors: Vectors, constants: F32) -> tuple[F32, Vectors]:
    (m,), (keep, take) = vectors, constants
    m = keep * m + take * u
    return m, (m,)


def _adam(u: F32, vectors: Vectors, constants: F32) -> tuple[F32, Vectors]:
    (m, v), (keep_m, take_m, keep_v, take_v, correct_m, correct_v, lr, eps) = vectors, constants
    m = keep_m * m + take_m * u
    v = keep_v * v + take_v * (u * u)
    return lr * (m * correct_m) / (np.sqrt(v * correct_v) + eps), (m, v)


def _hessian(u: F32, vectors: Vectors, constants: F32) -> tuple[F32, Vectors]:
    (h,), (keep, take, floor, lr) = vectors, constants
    step = bounded(np.asarray(u / np.sqrt(h), dtype=np.float32))
    return lr * step, (keep * h + take * (step * step + floor),)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "momentum": Rule({"m": 0.0}, _momentum),
        "adam": Rule({"m": 0.0, "v": 0.0}, _adam),
        "hessian": Rule({CURVATURE: 1.0}, _hessian),
    }
)
"""By name, all that a step can state."""


def advance(
    stored: npt.NDArray[np.generic],
    storage: str,
    start: int,
    vectors: Sequence[F32],
    steps: Sequence[Step],
    space: DirectionSpace,
) -> tuple[npt.NDArray[np.generic], Vectors]:
    """Return coordinates start, start + 1, ... of w and of the vectors after `steps`."""
    held = tuple(vectors)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for step in steps:
            rule, constants = rule_of(step.elementwise)
            u = bounded(update(step, start, len(stored), space))
            by, held = rule.move(u, held, constants)
            stored = moved_by(stored, storage, start, by, step)
    return stored, held


def rule_of(elementwise: Elementwise | None) -> tuple[Rule, F32]:
    """Return the rule that a step states and its constants."""
    if elementwise is None or elementwise.name not in RULES:
        raise ValueError(f"a step with vectors must state one of {', '.join(RULES)}, got {elementwise}")
    return RULES[elementwise.name], elementwise.constants
