"""The processor: numba kernels, with the coordinates split over threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions.backends import moment_kernels
from cyber0.directions.backends import numba_kernels as kernels
from cyber0.directions.backends.base import Backend, PackedProbe, PackedRule, PackedSteps, code_of
from cyber0.directions.backends.rounding import BFLOAT16, FLOAT16
from cyber0.directions.definition import Directions
from cyber0.directions.space import DirectionSpace
from cyber0.kernels import threads

Tensor = torch.Tensor

_STORAGE_CODES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_U64 = np.uint64


class CpuBackend(Backend):
    """The processor that runs Python."""

    hardware = "processor"
    host = True

    def fill(self, out: Tensor, start: int, z: Directions, space: DirectionSpace, scales: NDArray[np.float32]) -> None:
        rows, count = out.shape
        code = code_of(space.distribution, kernels.CODES, "CPU")
        flat, key, t, j = out.detach().numpy(), _U64(z.seed), _U64(z.round), _U64(z.first)
        if rows == 1:
            pieces = threads.split(start, count, count)
            threads.run_in_threads(lambda a, b: kernels.fill(flat, start, a, b, key, t, j, code, scales, 0, 1), pieces)
        else:
            pieces = threads.split_rows(rows, rows * count)
            threads.run_in_threads(
                lambda a, b: kernels.fill(flat, start, 0, count, key, t, j, code, scales, a, b), pieces
            )

    def squared_norm_units(self, dimension: int, seed: int, round: int, index: int, device: torch.device) -> int:
        def part(low: int, high: int) -> int:
            return int(kernels.squared_norm_units(low, high, _U64(seed), _U64(round), _U64(index)))

        return sum(threads.run_in_threads(part, threads.split(0, dimension, dimension)))

    def prepare(
        self, steps: PackedSteps, probe: PackedProbe, device: torch.device
    ) -> tuple[PackedSteps, PackedProbe]:  # fmt: skip
        return steps, probe

    def apply(
        self, source: Tensor, out: Tensor, start: int, prepared: tuple[PackedSteps, PackedProbe], space: DirectionSpace
    ) -> None:
        if out.dtype != source.dtype:  # rounded to nearest: a pass of its own, for a type that processors rarely use
            whole = torch.empty_like(source)
            self.apply(source, whole, start, prepared, space)
            out.copy_(whole)
            return
        count, code = source.numel(), code_of(space.distribution, kernels.CODES, "CPU")
        pieces = threads.split(start, count, count * (prepared[0].coefficients.size + 1))
        storage = _STORAGE_CODES.get(source.dtype)
        steps, probe = map(tuple, prepared)
        if storage is None:
            w, o = source.detach().view(-1).numpy(), out.detach().view(-1).numpy()
            threads.run_in_threads(lambda a, b: kernels.apply32(w, o, start, a, b, steps, probe, code), pieces)
            return
        w, o = (t.detach().view(-1).view(torch.uint16).numpy() for t in (source, out))
        threads.run_in_threads(lambda a, b: kernels.apply16(w, o, start, a, b, steps, probe, code, storage), pieces)

    def advance(
        self,
        pieces: Sequence[tuple[Tensor, int]],
        vectors: Sequence[Tensor],
        steps: PackedSteps,
        rule: PackedRule,
        space: DirectionSpace,
    ) -> None:
        code, packed = code_of(space.distribution, kernels.CODES, "CPU"), tuple(steps)
        for stored, start in pieces:
            count, storage = stored.numel(), _STORAGE_CODES.get(stored.dtype)
            flat = stored.detach().view(-1)
            weights = (flat if storage is None else flat.view(torch.uint16)).numpy()
            kernel, more = (moment_kernels.advance32, []) if storage is None else (moment_kernels.advance16, [storage])
            beside = (_beside(vectors, i, start, count) for i in range(2))
            arrays = (weights, *beside, start)
            settings = (packed, moment_kernels.CODES[rule.name], rule.constants, code, *more)
            cuts = threads.split(start, count, count * (steps.coefficients.size + 1))
            threads.run_in_threads(partial(_advance_piece, kernel, arrays, settings), cuts)

    def scale(self, stored: Tensor, factor: np.float32) -> None:
        storage = _STORAGE_CODES.get(stored.dtype)
        if storage is None:
            kernels.scale32(stored.detach().view(-1).numpy(), factor)
        else:
            kernels.scale16(stored.detach().view(-1).view(torch.uint16).numpy(), factor, storage)

    def move(self, stored: Tensor, z: Tensor, coefficients: NDArray[np.float32]) -> None:
        w, rows, c = stored.detach().numpy(), z.numpy(), np.ascontiguousarray(coefficients, dtype=np.float32)
        pieces = threads.split(0, len(w), rows.size // 8)  # reading is that much cheaper than drawing
        threads.run_in_threads(lambda a, b: kernels.move32(w, a, b, rows, c), pieces)

    def device_count(self) -> int:
        return 1

    def device_name(self, device: torch.device) -> str:
        return "cpu"

    def free_memory(self, device: torch.device) -> int:
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration, ValueError):
            return 1 << 60


def _beside(vectors: Sequence[Tensor], i: int, start: int, count: int) -> NDArray[np.float32]:
    """Return the coordinates start, start + 1, ... of vector i; nothing where there is no such vector."""
    if i >= len(vectors):
        return np.empty(0, np.float32)
    found: NDArray[np.float32] = vectors[i][start : start + count].numpy()
    return found


def _advance_piece(kernel: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], low: int, high: int) -> None:
    kernel(*arrays, low, high, *settings)


BACKEND = CpuBackend()
