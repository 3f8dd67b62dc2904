"""A transformer evaluated at perturbed weights, on the CPU here and on the GPU in gpu.py.

python benchmarks/cpu.py --only evaluation
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Figure

from cyber0.bench.subjects import encoder, step_against_forwards


def evaluation(quick: bool) -> Iterator[Figure]:
    """A zero-order step, which leaves w alone until it commits, against the two forward passes that it contains."""
    layers, batch, tokens = (2 if quick else 6), 8, 64
    model = encoder(layers, 384, 6)
    weights = sum(p.numel() for p in model.parameters())
    ratios = step_against_forwards(model, torch.randn(batch, tokens, 384), 3 if quick else 9)
    note = f"{weights / 1e6:.1f} M weights, {batch} x {tokens} tokens, k = 1"
    for name, ratio in ratios.items():
        yield Figure(f"ZeroOrder.{name} / two plain forwards", ratio, "x", 1.3, note=note)
