"""The last direction of a model of moderate size, kept in memory on a CPU.

Both probes of a direction, and the commit if it is the only one, read it there, so that it is drawn once and not three
times: drawing is most of the work of a probe. A direction depends on its seed, round and index alone, so what is kept
never goes stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cyber0.directions import Probe, Step, engine
from cyber0.directions.engine import WeightPass
from cyber0.model.moments import ScaledPass

Tensor = torch.Tensor

KEPT_BYTES = 64 << 20  # of a direction; a process that has loaded torch takes several times as much before any model


class DrawnDirection:
    """Coordinates of one direction, drawn when they are first asked for.

    Args:
        dimension: d.
        fill: Draws directions: (out, start, seed, round, first).
    """

    def __init__(self, dimension: int, fill: Callable[[Tensor, int, int, int, int], Tensor]) -> None:
        self._dimension, self._fill = dimension, fill
        self._of: tuple[int, int, int] | None = None
        self._z: Tensor | None = None
        self._there: dict[int, int] = {}
        """How many coordinates have been drawn, by the first of them."""

    def part(self, of: tuple[int, int, int], start: int, count: int) -> Tensor:
        """Return coordinates start, start + 1, ... of the direction of this seed, round and index."""
        if of != self._of:
            self._there.clear()
            self._of = of
        if self._z is None:
            self._z = torch.empty(self._dimension)
        z = self._z[start : start + count]
        if self._there.get(start) != count:
            self._fill(z, start, *of)
            self._there[start] = count
        return z

    def holds(self, step: Step) -> bool:
        """Return whether a step goes along this direction alone, and some of it has been drawn."""
        return len(step.coefficients) == 1 and (step.seed, step.round, step.first) == self._of


class DrawnPass:
    """A pass over stored weights that perturbs them by a kept direction, like engine.WeightPass.

    Args:
        direction: What is kept.
        probe: Where the loss is measured.
    """

    def __init__(self, direction: DrawnDirection, probe: Probe) -> None:
        self._direction, self._probe = direction, probe

    def renew(self, steps: Sequence[Step], probe: Probe | None) -> None:
        """Prepare another probe in the same place."""
        if steps or probe is None:
            raise ValueError("a pass along a kept direction takes a probe and no steps")
        self._probe = probe

    def run(self, source: Tensor, out: Tensor, start: int) -> Tensor:
        """Write to `out` the stored weights `source` (coordinates start, ...) after this pass."""
        of = self._probe.seed, self._probe.round, self._probe.index
        if source.numel():
            whole = out if out.dtype == source.dtype else torch.empty_like(source)
            engine.perturb(source, whole, self._direction.part(of, start, source.numel()), self._probe.coefficient)
            if whole is not out:
                out.copy_(whole)
        return out


AnyPass = WeightPass | ScaledPass | DrawnPass
