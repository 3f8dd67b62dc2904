"""How w changes: committed steps, many of them in one pass, and the projection onto a ball."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from cyber0.directions import Probe, Step, engine
from cyber0.directions.engine import WeightPass
from cyber0.directions.steps import STEPS_PER_PASS
from cyber0.model.cuda_graphs import CapturedMove
from cyber0.model.drawn import KEPT_BYTES, AnyPass, DrawnDirection, DrawnPass
from cyber0.model.moments import ScaledPass
from cyber0.model.stored import StoredWeights

Tensor = torch.Tensor

BALL_GRID = 2.0**40  # (||w|| / R)^2 is summed in units of 1 / grid
BALL_LIMIT = 2.0**12  # a single (w / R)^2 counts at most this much: 1,024 of them fit 64 bits
BALL_PASSES = 64  # more than it takes to bring the largest float32 into the smallest ball


class CommittedWeights(StoredWeights):
    """Weights that move by steps, with the same bits on every machine."""

    def __init__(self, model: nn.Module, distribution: str, rank: int = 1) -> None:
        super().__init__(model, distribution, rank)
        self._moves: dict[tuple[int, int], CapturedMove] = {}
        plain = self.space.layout is None and all(s.buffer.dtype == torch.float32 for s in self.segments)
        kept = self.backend.host and plain and 4 * self.dimension <= KEPT_BYTES
        self._kept = DrawnDirection(self.dimension, self.fill) if kept else None
        """The direction of the last probe; None: it is drawn anew whenever it is needed."""

    def weight_pass(self, probe: Probe | None, steps: Sequence[Step] = ()) -> AnyPass:
        """Return the pass over w that takes steps and then perturbs by a probe, all along the optimizer's directions.

        Only a commit takes steps along plain directions: what scales them is part of its rule.
        """
        if self.moments.scaling:
            return ScaledPass(self.moments, partial(self._plain_pass, None), self.fill, probe, steps)
        if self._kept is not None and probe is not None and not steps:
            return DrawnPass(self._kept, probe)
        return self._plain_pass(probe, steps)

    def _plain_pass(self, probe: Probe | None, steps: Sequence[Step]) -> WeightPass:
        return WeightPass(steps, probe, self.space, self.device)

    def commit(self, step: Step, radius: float | None = None) -> None:
        """Move w by one step, all its directions in one pass over memory; then onto the ball of `radius`."""
        self.replay([step], radius)

    def replay(self, steps: Sequence[Step], radius: float | None = None) -> None:
        """Move w by many steps. Without a ball, thousands of them in one pass over memory."""
        self.check_attached()
        size = STEPS_PER_PASS if radius is None else 1
        self._torn = True  # until all segments have moved: an interrupt in between must be noticed
        for begin in range(0, len(steps), size):
            part = steps[begin : begin + size]
            if part[0].elementwise is not None:
                self._advance(part)
            elif not self._move_by_drawn(part):
                self._move(part)
            if radius is not None:
                self.project(radius)
        self._bound = self._bound_after(steps)
        self._torn = False  # last: until here, an interrupt must be noticed

    def _move(self, steps: Sequence[Step]) -> None:
        """Move all segments; a single step is captured where it can be, because launching takes longer than moving."""
        if len(steps) == 1 and self.backend.captures:
            shape = len(steps[0].coefficients), steps[0].bits
            if shape not in self._moves:
                self._moves[shape] = CapturedMove(self.segments, self._plain_pass(None, steps))
            self._moves[shape](steps)
            return
        weight_pass = self._plain_pass(None, steps)
        for s in self.segments:
            weight_pass.run(s.buffer, s.buffer, s.start)

    def _advance(self, steps: Sequence[Step]) -> None:
        """Move w and the vectors beside it."""
        self._drawn = None
        pieces, vectors = [(s.buffer, s.start) for s in self.segments], list(self.moments.vectors.values())
        engine.advance(pieces, vectors, steps, self.space)

    def _move_by_drawn(self, steps: Sequence[Step]) -> bool:
        """Move w by the step whose directions are still in memory, if that is the one: the same bits, sooner."""
        if len(steps) == 1 and self._kept is not None and self._kept.holds(steps[0]):
            (step,) = steps
            for s in self.segments:
                z = self._kept.part((step.seed, step.round, step.first), s.start, s.count)
                engine.move(s.buffer, z.view(1, -1), step.coefficients)
            return True
        if self._drawn is None or len(steps) != 1:
            return False
        (step,), (drawn, parts) = steps, self._drawn
        if drawn != (step.seed, step.round, step.first, len(step.coefficients)):
            return False
        if any(s.buffer.dtype != torch.float32 for s in self.segments):
            return False
        for weights, part in zip(self.tensors, parts, strict=True):
            engine.move(weights.detach().view(-1), part, step.coefficients)
        self._drawn = None
        return True

    def saturated(self) -> int:
        """Return how many weights are at the largest finite value of their type, where a commit clamps them.

        The weights are only read where, by the steps since they were last read, one of them can be that large.
        """
        if self._bound is not None and self._bound < min(torch.finfo(s.buffer.dtype).max for s in self.segments):
            return 0
        count, bound = 0, 0.0
        for s in self.segments:
            reach = float(torch.linalg.vector_norm(s.buffer, math.inf)) if s.count else 0.0
            bound, largest = max(bound, reach), torch.finfo(s.buffer.dtype).max
            if reach >= largest:
                count += sum(int((part.abs() >= largest).sum()) for part in torch.split(s.buffer, 1 << 20))
        self._bound = bound
        return count

    def carried(self) -> float:
        """Return the largest number in the vectors beside w: for momentum, how far w moves by earlier rounds alone."""
        return max((float(torch.linalg.vector_norm(v, math.inf)) for v in self.moments.vectors.values()), default=0.0)

    def fullness(self) -> float:
        """Return the largest |w| as a part of the largest value of its type; 1: a weight is clamped."""
        reaches = ((float(torch.linalg.vector_norm(s.buffer, math.inf)), s) for s in self.segments if s.count)
        return max((reach / torch.finfo(s.buffer.dtype).max for reach, s in reaches), default=0.0)

    def _bound_after(self, steps: Sequence[Step]) -> float | None:
        """Return a bound on every |w| after one more step; after many it is cheaper to read w.

        None after a step with vectors: how far that moves w depends on them.
        """
        if self._bound is None or len(steps) != 1 or steps[0].elementwise is not None:
            return self._bound if not steps else None
        reach = self.space.reach * float(np.abs(steps[0].coefficients.astype(np.float64)).sum())
        coarsest = max(torch.finfo(s.buffer.dtype).eps for s in self.segments)
        return (self._bound + reach) * (1 + coarsest)

    def project(self, radius: float) -> None:
        """Project w onto the ball of that radius around 0 (the paper's W). The norm is summed in integers."""
        for _ in range(BALL_PASSES):
            units = sum(squared_norm_units(s.buffer, radius) for s in self.segments)
            if units <= BALL_GRID:  # inside
                return
            for s in self.segments:
                engine.scale(s.buffer, 1.0 / math.sqrt(units / BALL_GRID))
            if units < BALL_LIMIT * BALL_GRID:  # no weight can have been counted for less than it is
                return

    @contextlib.contextmanager
    def excursion(self) -> Iterator[None]:
        """Let w change within this context and put its very bits back afterwards, at the cost of one copy."""
        self.check_attached()
        kept = [s.buffer.clone() for s in self.segments]
        try:
            yield
        finally:
            self._write(kept)


def squared_norm_units(w: Tensor, radius: float) -> int:
    """Return (||w|| / radius)^2 in units of 1 / BALL_GRID: every square rounded to the grid, the sum in integers."""
    total = 0
    for begin in range(0, w.numel(), 1 << 22):
        x = w[begin : begin + (1 << 22)].double() * (1.0 / radius)  # a GPU divides by multiplying: do so everywhere
        units = (x * x).nan_to_num_(nan=0.0).clamp_(max=BALL_LIMIT).mul_(BALL_GRID).add_(0.5).to(torch.int64)
        units = nn.functional.pad(units, (0, -units.numel() % 1024)).view(-1, 1024).sum(1)
        total += int((units >> 32).sum()) << 32
        total += int((units & 0xFFFFFFFF).sum())
    return total
