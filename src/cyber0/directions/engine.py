"""One way to call the kernels: torch tensors in, the right kernel for their device and type.

The definition of every bit is in definition.py; this file only chooses who computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from cyber0.directions.backends import numba_kernels as cpu
from cyber0.directions.backends import rounding
from cyber0.directions.definition import DISTRIBUTIONS, Probe, Step, scale_from_units
from cyber0.directions.philox import check_counter
from cyber0.errors import ModelError
from cyber0.kernels import threads

STORAGE_OF = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_CODES = {"gaussian": cpu.GAUSSIAN, "rademacher": cpu.RADEMACHER, "sphere": cpu.SPHERE}
_STORAGE_CODES = {torch.float16: rounding.FLOAT16, torch.bfloat16: rounding.BFLOAT16}


class _Steps(NamedTuple):
    """Steps as the kernels read them: one entry a step, one column a direction."""

    keys: Any
    rounds: Any
    firsts: Any
    roundings: Any
    coefficients: Any
    scales: Any


class _PackedProbe(NamedTuple):
    probing: bool
    key: Any
    round: Any
    index: Any
    factor: Any
    scale: Any


_NO_PROBE = _PackedProbe(False, np.uint64(0), np.uint64(0), np.uint64(0), np.float64(0), np.float32(1))
_U64 = np.uint64


def storage_name(dtype: torch.dtype) -> str:
    """Return the name of a storage type, or refuse it."""
    if dtype not in STORAGE_OF:
        raise ModelError(f"weights of type {dtype} can't be trained; use float32, float16 or bfloat16")
    return STORAGE_OF[dtype]


def _code(distribution: str) -> int:
    if distribution not in _CODES:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    return _CODES[distribution]


@lru_cache(maxsize=1 << 16)
def sphere_scale(seed: int, round: int, index: int, dimension: int, device: str) -> np.float32:
    """Return 1 / ||z|| of a Gaussian direction; the sum is in integers, so any device gives the same."""
    if device.startswith("cuda"):
        from cyber0.directions.backends import triton_kernels as cuda

        return scale_from_units(cuda.squared_norm_units(dimension, seed, round, index, torch.device(device)))

    def part(low: int, high: int) -> int:
        return int(cpu.squared_norm_units(low, high, _U64(seed), _U64(round), _U64(index)))

    return scale_from_units(sum(threads.run_in_threads(part, threads.split(0, dimension, dimension))))


def _scale(seed: int, round: int, index: int, distribution: str, dimension: int, device: torch.device) -> np.float32:
    if distribution != "sphere":
        return np.float32(1)
    return sphere_scale(seed, round, index, dimension, str(device))


def fill(
    out: torch.Tensor, start: int, seed: int, round: int, first: int, distribution: str, *, dimension: int
) -> torch.Tensor:
    """Write coordinates start, start + 1, ... of directions first, first + 1, ... to the rows of `out`.

    `out` is a contiguous float32 tensor, (directions x coordinates), or one direction as a vector.
    """
    matrix = out.view(1, -1) if out.dim() == 1 else out
    rows, count = matrix.shape
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"directions are written to a contiguous float32 tensor, got {out.dtype}")
    check_counter(seed, round, first + max(rows, 1) - 1)
    code = _code(distribution)
    if out.numel() == 0:
        return out
    scales = np.array(
        [_scale(seed, round, first + r, distribution, dimension, out.device) for r in range(rows)], dtype=np.float32
    )
    if out.is_cuda:
        from cyber0.directions.backends import triton_kernels as cuda

        cuda.fill(matrix, start, seed, round, first, code, torch.from_numpy(scales).to(out.device))
        return out
    flat, key, t, j = matrix.detach().numpy(), _U64(seed), _U64(round), _U64(first)
    if rows == 1:
        pieces = threads.split(start, count, count)
        threads.run_in_threads(lambda a, b: cpu.fill(flat, start, a, b, key, t, j, code, scales, 0, 1), pieces)
    else:
        pieces = threads.split_rows(rows, rows * count)
        threads.run_in_threads(lambda a, b: cpu.fill(flat, start, 0, count, key, t, j, code, scales, a, b), pieces)
    return out


def _pack_steps(steps: Sequence[Step], distribution: str, dimension: int, device: torch.device) -> _Steps:
    width = len(steps[0].coefficients) if steps else 0
    if any(len(s.coefficients) != width for s in steps):
        raise ValueError("all steps of one pass must have the same number of directions")
    scales = np.ones((len(steps), width), dtype=np.float32)
    if distribution == "sphere":
        for i, s in enumerate(steps):
            scales[i] = [_scale(s.seed, s.round, s.first + r, distribution, dimension, device) for r in range(width)]
    for s in steps:
        check_counter(s.seed, s.round, s.rounding)
    return _Steps(
        np.array([s.seed for s in steps], dtype=np.uint64),
        np.array([s.round for s in steps], dtype=np.uint64),
        np.array([s.first for s in steps], dtype=np.uint64),
        np.array([s.rounding for s in steps], dtype=np.uint64),
        np.array([s.coefficients for s in steps], dtype=np.float32).reshape(len(steps), width),
        scales,
    )


class WeightPass:
    """A pass over stored weights: all steps, then a look; made once and used for every piece of them.

    On CUDA its numbers lie in device memory, so that a recorded pass can be replayed with others: see `renew`.
    """

    def __init__(
        self, steps: Sequence[Step], probe: Probe | None, distribution: str, *, dimension: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.code, self._distribution, self._dimension, self._device = (
            _code(distribution),
            distribution,
            dimension,
            device,
        )
        self._packed = self._pack(steps, probe)
        self._table: Any = None
        if device.type == "cuda":
            from cyber0.directions.backends import triton_kernels as cuda

            self._table = cuda.LaunchTable(*self._packed, device)

    def _pack(self, steps: Sequence[Step], probe: Probe | None) -> tuple[_Steps, _PackedProbe]:
        packed = _pack_steps(steps, self._distribution, self._dimension, self._device)
        if probe is None:
            return packed, _NO_PROBE
        check_counter(probe.seed, probe.round, probe.index)
        scale = _scale(probe.seed, probe.round, probe.index, self._distribution, self._dimension, self._device)
        factor = np.float64(probe.coefficient)
        return packed, _PackedProbe(True, _U64(probe.seed), _U64(probe.round), _U64(probe.index), factor, scale)

    def renew(self, steps: Sequence[Step], probe: Probe | None) -> None:
        """Prepare another pass of the same shape in the same place."""
        self._packed = self._pack(steps, probe)
        if self._table is not None:
            self._table.write(*self._packed)

    def run(self, source: torch.Tensor, out: torch.Tensor, start: int) -> torch.Tensor:
        """Write to `out` the stored weights `source` (coordinates start, ...) after this pass; it may be `source`."""
        storage_name(source.dtype)
        if out.dtype != source.dtype or out.numel() != source.numel() or out.device != source.device:
            raise ValueError("source and out must agree in type, size and device")
        if source.numel() == 0:
            return out
        if source.is_cuda:
            from cyber0.directions.backends import triton_kernels as cuda

            cuda.apply(source, out, start, self._table, self.code)
        else:
            _apply_on_cpu(source, out, start, *self._packed, self.code)
        return out


def apply(
    source: torch.Tensor,
    out: torch.Tensor,
    start: int,
    steps: Sequence[Step],
    probe: Probe | None,
    distribution: str,
    *,
    dimension: int,
) -> torch.Tensor:
    """Write to `out` the stored weights `source` (coordinates start, ...) after all steps, seen through `look`.

    `out` may be `source`. One pass over memory whatever the number of steps and directions.
    """
    return WeightPass(steps, probe, distribution, dimension=dimension, device=source.device).run(source, out, start)


def _apply_on_cpu(
    source: torch.Tensor, out: torch.Tensor, start: int, packed: _Steps, seen: _PackedProbe, code: int
) -> None:
    count = source.numel()
    pieces = threads.split(start, count, count * (packed.coefficients.size + 1))
    storage = _STORAGE_CODES.get(source.dtype)
    steps, probe = tuple(packed), tuple(seen)
    if storage is None:
        w, o = source.detach().view(-1).numpy(), out.detach().view(-1).numpy()
        threads.run_in_threads(lambda a, b: cpu.apply32(w, o, start, a, b, steps, probe, code), pieces)
        return
    w, o = (t.detach().view(-1).view(torch.uint16).numpy() for t in (source, out))
    threads.run_in_threads(lambda a, b: cpu.apply16(w, o, start, a, b, steps, probe, code, storage), pieces)


def move(stored: torch.Tensor, z: torch.Tensor, coefficients: Any) -> None:
    """Move float32 weights on the CPU by a step whose directions, the rows of `z`, have been drawn already."""
    w, rows, c = stored.detach().numpy(), z.numpy(), np.ascontiguousarray(coefficients, dtype=np.float32)
    pieces = threads.split(0, len(w), rows.size // 8)  # reading is that much cheaper than drawing
    threads.run_in_threads(lambda a, b: cpu.move32(w, a, b, rows, c), pieces)


def coefficients(lr: float, values: Any, k: int) -> Any:
    """Return c_j = fp32(fp64(lr) * values_j / k), clamped to the finite range of float32."""
    return cpu.coefficients(np.float64(lr), np.ascontiguousarray(values, dtype=np.float64), np.float64(k))


def scale(stored: torch.Tensor, factor: float) -> None:
    """Multiply stored weights by one float32 factor, rounded to nearest even, in place."""
    if stored.is_cuda:
        scaled = stored.float().mul_(float(np.float32(factor)))
        stored.copy_(scaled.masked_fill_(scaled.isnan(), torch.nan))  # one NaN, as everywhere
        return
    storage = _STORAGE_CODES.get(stored.dtype)
    if storage is None:
        cpu.scale32(stored.detach().view(-1).numpy(), np.float32(factor))
    else:
        cpu.scale16(stored.detach().view(-1).view(torch.uint16).numpy(), np.float32(factor), storage)
