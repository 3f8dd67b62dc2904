"""The weights of a model after a pass over them, computed one segment at a time, when they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cyber0.model.drawn import AnyPass
from cyber0.model.segments import Segment

Tensor = torch.Tensor

CACHE_BYTES = 4 << 20  # segments kept beyond the one in use, so that small models are perturbed once


class Blocks:
    """Segments after a pass; each is cached until others need the room.

    Args:
        segments: All of them.
        weight_pass: The pass.
        dtype: What the result is rounded to; None: as the weights are stored.
    """

    def __init__(self, segments: Sequence[Segment], weight_pass: AnyPass, dtype: torch.dtype | None = None) -> None:
        self.segments, self.weight_pass, self.dtype = segments, weight_pass, dtype
        self._cache: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        if index not in self._cache:
            self._make_room(self.segments[index].buffer.nbytes)
            with _disable_current_modes():
                self._cache[index] = perturbed(self.segments[index], self.weight_pass, self.dtype)
        return self._cache[index]

    def _make_room(self, size: int) -> None:
        while self._cache and sum(b.nbytes for b in self._cache.values()) + size > CACHE_BYTES:
            del self._cache[next(iter(self._cache))]


def perturbed(segment: Segment, weight_pass: AnyPass, dtype: torch.dtype | None = None) -> Tensor:
    """Return the segment's weights after a pass, in memory of their own, rounded to `dtype` if one is given."""
    with torch._C._DisableFuncTorch():  # a model may use its weights inside vmap or grad: stay a plain tensor
        return weight_pass.run(segment.buffer, torch.empty_like(segment.buffer, dtype=dtype), segment.start)
