"""Vectors beside w: one float32 number a weight each, which some optimizers keep from round to round.

One of them, if the optimizer has it, scales all directions: `Moments.scale_directions` is the only place that does so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from cyber0.directions import Probe, Step
from cyber0.directions.engine import WeightPass
from cyber0.directions.moments import CURVATURE
from cyber0.errors import ModelError

Tensor = torch.Tensor

CHUNK = 1 << 22  # coordinates of a scaled direction that are in memory at a time


class Moments:
    """The vectors of an optimizer, on the device of the weights.

    Args:
        starts: Their names, in order, each with the value that all its numbers start with.
        dimension: d, how many numbers each has.
        device: Where the weights are.
    """

    def __init__(self, starts: Mapping[str, float], dimension: int, device: torch.device) -> None:
        self.starts = dict(starts)
        self.vectors = {
            name: torch.full((dimension,), value, dtype=torch.float32, device=device) for name, value in starts.items()
        }

    @property
    def scaling(self) -> bool:
        """Whether directions are scaled."""
        return CURVATURE in self.vectors

    def scale_directions(self, z: Tensor, start: int) -> Tensor:
        """Scale the coordinates start, start + 1, ... of directions, the rows of z or one as a vector, in place."""
        if self.scaling:
            z.div_(self.vectors[CURVATURE][start : start + z.shape[-1]].sqrt())
        return z

    def reset(self) -> None:
        """Fill every vector with the value it starts with."""
        for name, value in self.starts.items():
            self.vectors[name].fill_(value)

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite all vectors; `check` comes first."""
        for name, vector in self.vectors.items():
            vector.copy_(given[name])

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Refuse other vectors than these: by name, size or type."""
        expected = {name: (tuple(v.shape), v.dtype) for name, v in self.vectors.items()}
        found = {name: (tuple(v.shape), v.dtype) for name, v in given.items()}
        if found != expected:
            raise ModelError(f"the optimizer's vectors are {found or 'absent'}, and must be {expected or 'absent'}")


class ScaledPass:
    """A pass over stored weights along scaled directions, like engine.WeightPass.

    It is a measurement, not a commit: its last bits may depend on the machine, and weights are rounded to nearest. What
    it launches can't be captured.

    Args:
        moments: What the directions are scaled by.
        weight_pass: Returns the pass of some steps along plain directions.
        fill: Draws directions: (out, start, seed, round, first), scaled already.
        probe: Where the loss is measured.
        steps: Steps before that.
    """

    def __init__(
        self,
        moments: Moments,
        weight_pass: Callable[[Sequence[Step]], WeightPass],
        fill: Callable[[Tensor, int, int, int, int], Tensor],
        probe: Probe | None,
        steps: Sequence[Step],
    ) -> None:
        self._moments, self._fill, self._probe = moments, fill, probe
        self._passes = [weight_pass([step]) for step in steps]

    def renew(self, steps: Sequence[Step], probe: Probe | None) -> None:
        """Refuse: nothing that is captured may be used again."""
        raise NotImplementedError("a pass along scaled directions is never captured")

    def run(self, source: Tensor, out: Tensor, start: int) -> Tensor:
        """Write to `out` the stored weights `source` (coordinates start, ...) after this pass."""
        for begin in range(0, source.numel(), CHUNK):
            x = source[begin : begin + CHUNK].to(torch.float32, copy=True)
            by = torch.empty_like(x)
            for one in self._passes:  # over zeros: minus the step
                x += self._moments.scale_directions(one.run(by.zero_(), by, start + begin), start + begin)
            if self._probe is not None:
                place = self._probe.seed, self._probe.round, self._probe.index
                x += self._fill(by, start + begin, *place).mul_(self._probe.coefficient)
            out[begin : begin + CHUNK].copy_(x)
        return out
