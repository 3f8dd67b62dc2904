"""How many threads torch uses, and how it starts: both change bits and speed on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import torch

from cyber0.estimate import batched
from cyber0.model.vector import Parameters

LARGE_BACKBONE = 1 << 24  # frozen weights from which on a model has use for many threads, however few are trained


@contextlib.contextmanager
def own_threads(parameters: Parameters) -> Iterator[None]:
    """Keep torch to one thread for a small model on the CPU; the linear path's pieces go to our own threads.

    torch's threads would spin after each of many small operations, and on a busy machine wait for one another many
    times longer than the operations take; and what they compute need not be the same each time. Switching is best done
    around a whole round.
    """
    before, small = torch.get_num_threads(), parameters.dimension <= batched.BATCHED_DIMENSION
    if before == 1 or not small or not parameters.backend.host or _frozen(parameters) > LARGE_BACKBONE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def evaluating(parameters: Parameters) -> Iterator[None]:
    """Evaluate a model at w in eval mode, whether or not its task thinks of that."""
    with own_threads(parameters), parameters.perturbed(None):
        yield


def _frozen(parameters: Parameters) -> int:
    return sum(p.numel() for p in parameters.model.parameters()) - parameters.dimension


@cache
def make_first_calls() -> None:
    """Call torch's elementwise functions on the CPU once, from one thread.

    MKL chooses their code at the first call. When two threads made that call at once, one of them was seen to get code
    that is right to four digits only (2 of 59 processes on a busy machine), and a run was not repeatable.
    """
    for dtype in (torch.float32, torch.float64):
        few = torch.full((8,), 0.5, dtype=dtype)
        for name in ("exp", "log", "expm1", "log1p", "log2", "tanh", "erf", "sqrt", "rsqrt", "sin", "cos", "sigmoid"):
            getattr(torch, name)(few)
