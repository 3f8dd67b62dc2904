"""A transformer evaluated at perturbed weights, on the CPU here and on the GPU in gpu.py.

python benchmarks/cpu.py --only evaluation
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from measure import Call, Figure, interleaved, seconds

from cyber0 import ZeroOrder


def encoder(layers: int, width: int, heads: int) -> torch.nn.Module:
    """Return a stack of transformer layers with four times as wide feed-forward parts, in eval mode."""
    layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


class MeanSquare:
    """An objective that costs nothing beside the model: each sample's mean squared output."""

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs)

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.float().square().mean((1, 2))


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Switch torch's fused inference layer off, which exists for unperturbed weights only: like against like."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def step_against_forwards(
    model: torch.nn.Module, inputs: torch.Tensor, repeats: int, timer: Callable[[Call], float] = seconds
) -> dict[str, float]:
    """Return what zero-order steps (k = 1, commit included) cost in units of two plain forward passes."""
    optimizer = ZeroOrder(model, lr=1e-6, mu=1e-3, k=1)

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().square().mean()

    @torch.no_grad()
    def two_forwards() -> None:
        loss_fn(inputs).item()
        loss_fn(inputs).item()

    calls = {
        "step(loss_fn, batch)": lambda: optimizer.step(loss_fn, inputs),
        "step(closure)": lambda: optimizer.step(lambda: loss_fn(inputs)),
        "forwards": two_forwards,
    }
    with plain_layers():
        times = interleaved(calls, repeats, timer)
    forwards = times.pop("forwards")
    return {name: time / forwards for name, time in times.items()}


def evaluation(quick: bool) -> Iterator[Figure]:
    """A zero-order step, which leaves w alone until it commits, against the two forward passes that it contains."""
    layers, batch, tokens = (2 if quick else 6), 8, 64
    model = encoder(layers, 384, 6)
    weights = sum(p.numel() for p in model.parameters())
    ratios = step_against_forwards(model, torch.randn(batch, tokens, 384), 3 if quick else 9)
    note = f"{weights / 1e6:.1f} M weights, {batch} x {tokens} tokens, k = 1"
    for name, ratio in ratios.items():
        yield Figure(f"ZeroOrder.{name} / two plain forwards", ratio, "x", 1.3, note=note)
