"""What is timed: a transformer, bare weights, a federation, a ZeroOrder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from cyber0.bench.timing import Call, Timer, interleaved, seconds
from cyber0.config.schema import Config
from cyber0.estimate.batches import Batch
from cyber0.estimate.objective import client_means
from cyber0.federation.simulation import Simulation
from cyber0.tasks.base import Task
from cyber0.zero_order import ZeroOrder

Tensor = torch.Tensor


class Flat(nn.Module):
    """A model that is nothing but one tensor of weights: a vector, or the matrix that low-rank directions need."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(*shape, dtype=dtype))


def encoder(layers: int, width: int, heads: int) -> nn.Module:
    """Return a stack of transformer layers with four times as wide feed-forward parts, in eval mode."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


class MeanSquare:
    """An objective that costs nothing beside the model: each sample's mean squared output."""

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        found: Tensor = model(inputs)
        return found

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.float().square().mean((1, 2))


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Switch torch's fused inference layer off, which exists for unperturbed weights only: like against like."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


class BarePasses:
    """The forward passes that a round of a simulation contains, over the same batch, without perturbing anything."""

    def __init__(self, simulation: Simulation, clients: int) -> None:
        self.evaluator = simulation.client.evaluator
        self.batch: Batch = simulation.client.samples.batch(np.arange(clients), 0, 0)

    def forward(self) -> None:
        """One pass over everybody's batch at w itself, to the clients' means."""
        with torch.no_grad():
            client_means(self.evaluator.losses(self.batch, None)[None], self.batch.counts)

    def two_forwards(self) -> None:
        self.forward()
        self.forward()


def federated_step_against_forwards(
    model: nn.Module, inputs: Tensor, clients: int, settings: list[str], repeats: int, timer: Timer,
    limit_s: float = math.inf,
) -> float:  # fmt: skip
    """Return what a round (k = 1) costs in units of the two forward passes that it contains, recorded as it is."""
    task = Task.of(model, (inputs, torch.zeros(len(inputs), dtype=torch.int64)), losses=MeanSquare().losses)
    overrides = [f"federation.clients={clients}", "federation.byzantine=0", "method.k=1", "method.lr=1e-6",
                 f"method.batch_size={len(inputs) // clients}", *settings]  # fmt: skip
    simulation = Simulation(Config().with_overrides(overrides), task=task)
    bare = BarePasses(simulation, clients)
    with plain_layers():
        calls: dict[str, Call] = {"step": simulation.run_round, "forwards": bare.two_forwards}
        times = interleaved(calls, repeats, timer, limit_s=limit_s)
    return times["step"] / times["forwards"]


def step_against_forwards(
    model: nn.Module, inputs: Tensor, repeats: int, timer: Timer = seconds, limit_s: float = math.inf,
    distribution: str = "gaussian",
) -> dict[str, float]:  # fmt: skip
    """Return what steps of ZeroOrder (k = 1, commit included) cost in units of two plain forward passes.

    By how the step is called: with the data apart from the function, or with a closure.
    """
    mu = 1e-2 if inputs.element_size() == 2 else 1e-3
    optimizer = ZeroOrder(model, lr=1e-6, mu=mu, k=1, distribution=distribution)

    def loss_fn(batch: Tensor) -> Tensor:
        found: Tensor = model(batch).float().square().mean()
        return found

    @torch.no_grad()
    def two_forwards() -> None:
        loss_fn(inputs).item()
        loss_fn(inputs).item()

    calls: dict[str, Call] = {
        "step(loss_fn, batch)": lambda: optimizer.step(loss_fn, inputs),
        "step(closure)": lambda: optimizer.step(lambda: loss_fn(inputs)),
        "forwards": two_forwards,
    }
    with plain_layers():
        times = interleaved(calls, repeats, timer, limit_s=limit_s)
    forwards = times.pop("forwards")
    return {name: time / forwards for name, time in times.items()}


def default_rounds(device: str, samples: int) -> Call:
    """Return a round of the default run: logistic regression of MNIST's shape, on random samples."""
    torch.manual_seed(0)
    x, y = torch.rand(samples, 784), torch.randint(10, (samples,))
    simulation = Simulation(Config().with_overrides([f"device={device}"]), task=Task.of(nn.Linear(784, 10), (x, y)))
    return simulation.run_round
