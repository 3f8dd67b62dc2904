"""The processor: numba kernels, with the coordinates split over threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions.backends import moment_kernels
from cyber0.directions.backends import numba_kernels as kernels
from cyber0.directions.backends.base import NO_PROBE, Backend, PackedProbe, PackedRule, PackedSteps, code_of
from cyber0.directions.backends.factors import Piece, piece_of, pieces
from cyber0.directions.backends.low_rank_kernels import NO_FACTORS
from cyber0.directions.backends.rounding import BFLOAT16, FLOAT16
from cyber0.directions.definition import Directions
from cyber0.directions.low_rank import LowRankLayout
from cyber0.directions.space import DirectionSpace
from cyber0.kernels import threads

Tensor = torch.Tensor

_STORAGE_CODES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_U64 = np.uint64

FACTOR_BYTES = 32 << 20  # numbers of low-rank directions that are in memory at a time
SHARED_BYTES = 1 << 19  # of these, what all rows of a matrix share: it should stay in a core's cache


class CpuBackend(Backend):
    """The processor that runs Python."""

    hardware = "processor"
    host = True

    def fill(self, out: Tensor, start: int, z: Directions, space: DirectionSpace, scales: NDArray[np.float32]) -> None:
        rows, count = out.shape
        code = code_of(space.distribution, kernels.CODES, "CPU")
        flat, key, t, j = out.detach().numpy(), _U64(z.seed), _U64(z.round), _U64(z.first)
        factors = NO_FACTORS
        if space.layout is not None:
            piece = piece_of(space.layout, start, start + count)
            numbers = np.empty((rows, piece.width), np.float32)
            _draw(numbers, piece, np.array([key]), np.array([t]), np.array([j]))
            factors = piece.parts, numbers, space.layout.scale

        def part(low: int, high: int, a: int, b: int) -> None:
            kernels.fill(flat, start, low, high, key, t, j, code, scales, factors, a, b)

        if rows == 1:
            threads.run_in_threads(lambda low, high: part(low, high, 0, 1), threads.split(start, count, count))
        else:
            threads.run_in_threads(lambda a, b: part(0, count, a, b), threads.split_rows(rows, rows * count))

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
        code, storage = code_of(space.distribution, kernels.CODES, "CPU"), _STORAGE_CODES.get(source.dtype)
        w, o = _flat(source, storage), _flat(out, storage)
        kernel, more = (kernels.apply32, ()) if storage is None else (kernels.apply16, (storage,))
        for part in _parts(space, start, len(w), *prepared):
            x, y = (w if part.first == 0 else o)[part.low : part.high], o[part.low : part.high]
            arrays, settings = (x, y, start + part.low), (tuple(part.steps), tuple(part.probe), code, part.factors)
            cuts = threads.split(start + part.low, len(x), len(x) * (part.steps.coefficients.size + 1))
            threads.run_in_threads(partial(_run_piece, kernel, arrays, (*settings, *more)), cuts)

    def advance(
        self,
        pieces: Sequence[tuple[Tensor, int]],
        vectors: Sequence[Tensor],
        steps: PackedSteps,
        rule: PackedRule,
        space: DirectionSpace,
    ) -> None:
        code, rule_code = code_of(space.distribution, kernels.CODES, "CPU"), moment_kernels.CODES[rule.name]
        for stored, start in pieces:
            storage = _STORAGE_CODES.get(stored.dtype)
            weights = _flat(stored, storage)
            kernel, more = (moment_kernels.advance32, ()) if storage is None else (moment_kernels.advance16, (storage,))
            for part in _parts(space, start, len(weights), steps, NO_PROBE):
                count, begin = part.high - part.low, start + part.low
                arrays = (weights[part.low : part.high], *(_beside(vectors, i, begin, count) for i in range(2)), begin)
                constants = rule.constants[part.first :][: len(part.steps.keys)]
                settings = (tuple(part.steps), rule_code, constants, code, part.factors, *more)
                cuts = threads.split(begin, count, count * (part.steps.coefficients.size + 1))
                threads.run_in_threads(partial(_run_piece, kernel, arrays, settings), cuts)

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

    def perturb(self, stored: Tensor, out: Tensor, z: Tensor, coefficient: float) -> None:
        w, o, row = (t.detach().numpy() for t in (stored, out, z))
        pieces = threads.split(0, len(w), len(w) // 8)
        threads.run_in_threads(lambda a, b: kernels.perturb32(w, o, a, b, row, np.float64(coefficient)), pieces)

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


class _Part(NamedTuple):
    """Weights [low, high) of those given, and consecutive steps, from step `first` on, that one launch takes."""

    low: int
    high: int
    first: int
    steps: PackedSteps
    probe: PackedProbe
    factors: Any


def _parts(
    space: DirectionSpace, start: int, count: int, steps: PackedSteps, probe: PackedProbe
) -> Iterator[_Part]:  # fmt: skip
    """Cut a pass so that the numbers of low-rank directions that it needs stay in the caches; others need none."""
    if space.layout is None:
        yield _Part(0, count, 0, steps, probe, NO_FACTORS)
        return
    S, K = steps.coefficients.shape
    probing = bool(probe.probing)
    for piece in pieces(space.layout, start, start + count, FACTOR_BYTES // (4 * max(K, 1))):
        fit = min(FACTOR_BYTES // max(4 * K * piece.width, 1), SHARED_BYTES // max(4 * K * piece.widest, 1))
        each = max(fit, 1)
        for first in range(0, max(S, 1), each):
            some = PackedSteps(*(part[first : first + each] for part in steps))
            last = first + each >= S
            here, there = piece.begin - start, piece.end - start
            factors = _factors(space.layout, piece, some, probe if probing and last else NO_PROBE)
            yield _Part(here, there, first, some, probe if last else NO_PROBE, factors)


def _factors(layout: LowRankLayout, piece: Piece, steps: PackedSteps, probe: PackedProbe) -> Any:
    """Return what the kernels need to make the coordinates of a piece; the probe's numbers are the last row."""
    rows = steps.coefficients.size
    numbers = np.empty((rows + bool(probe.probing), piece.width), np.float32)
    if rows:
        _draw(numbers[:rows], piece, steps.keys, steps.rounds, steps.firsts)
    if probe.probing:
        _draw(numbers[rows:], piece, *(np.array([n]) for n in (probe.key, probe.round, probe.index)))
    return piece.parts, numbers, layout.scale


def _draw(numbers: NDArray[np.float32], piece: Piece, keys: Any, rounds: Any, firsts: Any) -> None:
    cuts = threads.split_rows(len(numbers), numbers.size)
    threads.run_in_threads(lambda a, b: kernels.draw(numbers, piece.draws, keys, rounds, firsts, a, b), cuts)


def _flat(t: Tensor, storage: int | None) -> Any:
    """Return stored weights as the kernels see them: float32, or the patterns of 16 bits."""
    flat = t.detach().view(-1)
    return (flat if storage is None else flat.view(torch.uint16)).numpy()


def _beside(vectors: Sequence[Tensor], i: int, start: int, count: int) -> NDArray[np.float32]:
    """Return the coordinates start, start + 1, ... of vector i; nothing where there is no such vector."""
    if i >= len(vectors):
        return np.empty(0, np.float32)
    found: NDArray[np.float32] = vectors[i][start : start + count].numpy()
    return found


def _run_piece(kernel: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], low: int, high: int) -> None:
    kernel(*arrays, low, high, *settings)


BACKEND = CpuBackend()
