"""One way to call the kernels: torch tensors in, the backend for their device does the work.

The definition of every bit is in definition.py; this file packs what the kernels read and picks the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cyber0.directions.backends import backend_of
from cyber0.directions.backends.base import NO_PROBE, PackedProbe, PackedRule, PackedSteps
from cyber0.directions.definition import HALF_WORDS, Directions, Probe, Step, scale_from_units
from cyber0.directions.moments import RULES, rule_of
from cyber0.directions.philox import check_counter
from cyber0.directions.space import DirectionSpace
from cyber0.errors import ModelError

STORAGE_OF = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_U64, _ONE = np.uint64, np.float32(1)


def storage_name(dtype: torch.dtype) -> str:
    """Return the name of a storage type, or refuse it."""
    if dtype not in STORAGE_OF:
        raise ModelError(f"weights of type {dtype} can't be trained; use float32, float16 or bfloat16")
    return STORAGE_OF[dtype]


@lru_cache(maxsize=1 << 16)
def sphere_scale(seed: int, round: int, index: int, dimension: int, device: str) -> np.float32:
    """Return 1 / ||z|| of a Gaussian direction; the sum is in integers, so any device gives the same."""
    where = torch.device(device)
    return scale_from_units(backend_of(where).squared_norm_units(dimension, seed, round, index, where))


def _scales(
    seed: int, round: int, first: int, count: int, space: DirectionSpace, device: torch.device
) -> Any:  # fmt: skip
    """Return by what each of some directions is multiplied once it is drawn."""
    if not space.known.normalized:
        return np.ones(count, dtype=np.float32)
    d, where = space.dimension, str(device)
    return np.array([sphere_scale(seed, round, first + r, d, where) for r in range(count)], dtype=np.float32)


def fill(
    out: torch.Tensor, start: int, seed: int, round: int, first: int, space: DirectionSpace
) -> torch.Tensor:  # fmt: skip
    """Write coordinates start, start + 1, ... of directions first, first + 1, ... to the rows of `out`.

    `out` is a contiguous float32 tensor, (directions x coordinates), or one direction as a vector.
    """
    matrix = out.view(1, -1) if out.dim() == 1 else out
    rows = len(matrix)
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"directions are written to a contiguous float32 tensor, got {out.dtype}")
    check_counter(seed, round, first + max(rows, 1) - 1)
    scales = _scales(seed, round, first, rows if out.numel() else 0, space, out.device)
    if out.numel():
        backend_of(out.device).fill(matrix, start, Directions(seed, round, rows, first), space, scales)
    return out


def _pack_steps(steps: Sequence[Step], space: DirectionSpace, device: torch.device) -> PackedSteps:
    width = len(steps[0].coefficients) if steps else 0
    if any(len(s.coefficients) != width for s in steps):
        raise ValueError("all steps of one pass must have the same number of directions")
    if len({s.bits for s in steps}) > 1:
        raise ValueError("all steps of one pass must round by the same number of bits")
    scales = np.ones((len(steps), width), dtype=np.float32)
    if space.known.normalized:
        for i, s in enumerate(steps):
            scales[i] = _scales(s.seed, s.round, s.first, width, space, device)
    for s in steps:
        check_counter(s.seed, s.round, s.rounding)
    return PackedSteps(
        np.array([s.seed for s in steps], dtype=np.uint64),
        np.array([s.round for s in steps], dtype=np.uint64),
        np.array([s.first for s in steps], dtype=np.uint64),
        np.array([s.rounding | (HALF_WORDS if s.bits == 16 else 0) for s in steps], dtype=np.uint64),
        np.array([s.coefficients for s in steps], dtype=np.float32).reshape(len(steps), width),
        scales,
    )


class WeightPass:
    """A pass over stored weights: all steps, then a probe; prepared once and used for every segment of them.

    A captured launch reads what is prepared from fixed places, so it can be replayed for another pass: see `renew`.
    """

    def __init__(
        self, steps: Sequence[Step], probe: Probe | None, space: DirectionSpace, device: torch.device
    ) -> None:  # fmt: skip
        self._space, self._device = space, device
        self._backend = backend_of(device)
        self._prepared = self._backend.prepare(*self._pack(steps, probe), device)

    def _pack(self, steps: Sequence[Step], probe: Probe | None) -> tuple[PackedSteps, PackedProbe]:
        if any(s.elementwise is not None for s in steps):
            raise ValueError("a step with vectors changes them: it can only be committed, by `advance`")
        packed = _pack_steps(steps, self._space, self._device)
        if probe is None:
            return packed, NO_PROBE
        check_counter(probe.seed, probe.round, probe.index)
        scale = _ONE
        if self._space.known.normalized:
            scale = sphere_scale(probe.seed, probe.round, probe.index, self._space.dimension, str(self._device))
        factor = np.float64(probe.coefficient)
        return packed, PackedProbe(True, _U64(probe.seed), _U64(probe.round), _U64(probe.index), factor, scale)

    def renew(self, steps: Sequence[Step], probe: Probe | None) -> None:
        """Prepare another pass of the same shape in the same place."""
        packed = self._pack(steps, probe)
        self._prepared = self._backend.prepare_again(self._prepared, *packed, self._device)

    def run(self, source: torch.Tensor, out: torch.Tensor, start: int) -> torch.Tensor:
        """Write to `out` the stored weights `source` (coordinates start, ...) after this pass; it may be `source`.

        Float32 weights may be written to 16 bits: they are then rounded to nearest, once.
        """
        storage_name(source.dtype)
        fits = out.dtype == source.dtype or (source.dtype == torch.float32 and storage_name(out.dtype) != "float32")
        if not fits or out.numel() != source.numel() or out.device != source.device:
            raise ValueError("source and out must agree in type, size and device")
        if source.numel():
            self._backend.apply(source, out, start, self._prepared, self._space)
        return out


def apply(
    source: torch.Tensor,
    out: torch.Tensor,
    start: int,
    steps: Sequence[Step],
    probe: Probe | None,
    space: DirectionSpace,
) -> torch.Tensor:
    """Write to `out` the stored weights `source` (coordinates start, ...) after all steps, perturbed by the probe.

    `out` may be `source`. One pass over memory whatever the number of steps and directions.
    """
    return WeightPass(steps, probe, space, source.device).run(source, out, start)


def advance(
    pieces: Sequence[tuple[torch.Tensor, int]],
    vectors: Sequence[torch.Tensor],
    steps: Sequence[Step],
    space: DirectionSpace,
) -> None:
    """Move all of w, given in pieces with their first coordinates, and the vectors beside it by steps that state how.

    All steps state the same rule.
    """
    constants = [rule_of(step.elementwise)[1] for step in steps]
    names = {step.elementwise.name for step in steps if step.elementwise is not None}
    if len(names) != 1 or len(vectors) != len(RULES[next(iter(names))].starts):
        raise ValueError(f"steps of {', '.join(sorted(names)) or 'no rule'} don't fit {len(vectors)} vectors")
    for stored, _ in pieces:
        storage_name(stored.dtype)
    device = vectors[0].device
    packed = _pack_steps(steps, space, device)
    rule = PackedRule(names.pop(), np.array(constants, dtype=np.float32))
    backend_of(device).advance([(s, i) for s, i in pieces if s.numel()], vectors, packed, rule, space)


def move(stored: torch.Tensor, z: torch.Tensor, coefficients: Any) -> None:
    """Move float32 weights by a step whose directions, the rows of `z`, have been drawn already; on the host only."""
    backend_of(stored.device).move(stored, z, coefficients)


def perturb(stored: torch.Tensor, out: torch.Tensor, z: torch.Tensor, coefficient: float) -> None:
    """Write float32 weights after a probe along a direction that has been drawn already; on the host only."""
    backend_of(stored.device).perturb(stored, out, z, coefficient)


def scale(stored: torch.Tensor, factor: float) -> None:
    """Multiply stored weights by one float32 factor, rounded to nearest even, in place."""
    backend_of(stored.device).scale(stored, np.float32(factor))
