"""Vectors beside w: one float32 number a weight each, which some optimizers keep from round to round."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cyber0.errors import ModelError

Tensor = torch.Tensor


class Moments:
    """The vectors of an optimizer, on the device of the weights.

    Args:
        starts: Their names, in order, each with the value that all its numbers start with.
        dimension: d, how many numbers each has.
        device: Where the weights are.
    """

    def __init__(self, starts: Mapping[str, float], dimension: int, device: torch.device) -> None:
        self.starts = dict(starts)
        self.vectors = {name: torch.full((dimension,), value, device=device) for name, value in starts.items()}

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
