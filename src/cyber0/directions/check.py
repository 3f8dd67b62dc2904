"""Whether the kernels of a device give the bits of definition.py: a quick check on a few coordinates."""

from __future__ import annotations

import numpy as np
import torch

from cyber0.directions import definition, engine
from cyber0.directions.definition import DISTRIBUTIONS, Probe, Step
from cyber0.directions.space import DirectionSpace

SHAPES = ((40, 50), (3,))  # more than a tile of the kernels
START, COUNT = 1021, 37  # across the border of two tiles
SEED, ROUND, FIRST = 7, 11, 2


def wrong_bits(device: str) -> list[str]:
    """Return what the kernels of a device compute differently from the definition; whatever they raise is passed on."""
    wrong = []
    for distribution in DISTRIBUTIONS:
        space = DirectionSpace.of(distribution, SHAPES)
        drawn = engine.fill(torch.empty(2, COUNT, device=device), START, SEED, ROUND, FIRST, space)
        defined = [space.coordinates(SEED, ROUND, FIRST + r, START, COUNT) for r in range(2)]
        if drawn.cpu().numpy().tobytes() != np.stack(defined).tobytes():
            wrong.append(f"{distribution} directions")
    space = DirectionSpace.of("gaussian", SHAPES)
    step = Step(SEED, ROUND, np.array([0.01, -0.02], dtype=np.float32))
    probe = Probe(SEED, ROUND, FIRST, 0.001)
    for dtype, storage in engine.STORAGE_OF.items():
        weights = torch.linspace(-2.0, 2.0, COUNT).to(dtype)
        stored = weights.numpy() if storage == "float32" else weights.view(torch.uint16).numpy()
        defined_bits = definition.apply(stored, storage, START, [step], probe, space).tobytes()
        moved = weights.to(device)
        engine.apply(moved, moved, START, [step], probe, space)
        if moved.cpu().view(torch.uint8).numpy().tobytes() != defined_bits:
            wrong.append(f"steps of {storage} weights")
    return wrong
