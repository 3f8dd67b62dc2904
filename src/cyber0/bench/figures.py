"""The figures of `cyber0 bench`: small shapes that every machine computes, and large ones on a GPU alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cyber0.bench.subjects import (
    Flat,
    default_rounds,
    encoder,
    federated_step_against_forwards,
    step_against_forwards,
)
from cyber0.bench.timing import Call, Figure, interleaved, timer_of
from cyber0.directions import Step
from cyber0.model.vector import Parameters

CLIENTS = 8
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Shape:
    """A transformer with its batch, and a matrix of weights that are moved and hashed."""

    layers: int
    width: int
    heads: int
    sequences: int
    tokens: int
    dtype: torch.dtype
    matrix: tuple[int, int]
    rounds: int
    """How many rounds one replaying pass takes."""
    repeats: int = 5
    limit_s: float = 8.0
    """After so many seconds one of the four groups of figures is measured no more, however few repeats it has had."""


SMALL = Shape(6, 384, 6, 8, 64, torch.float32, (2500, 4000), 20)
LARGE = Shape(24, 1024, 16, 64, 32, torch.bfloat16, (17750, 20000), 200)


def shapes_for(device: str) -> list[Shape]:
    """Return the shapes that are measured on a device."""
    return [SMALL] if device == "cpu" else [SMALL, LARGE]


def measure(device: str, shapes: list[Shape]) -> Iterator[Figure]:
    """Yield the figures of a device, each with the shape that it is of in its name."""
    for shape in shapes:
        yield from _steps(device, shape)
        yield from _weights(device, shape)
    yield _default_run(device, shapes[0])


def _steps(device: str, shape: Shape) -> Iterator[Figure]:
    """Whole steps in units of the two forward passes that they contain."""
    torch.manual_seed(0)
    model = encoder(shape.layers, shape.width, shape.heads).to(shape.dtype)
    inputs = torch.randn(shape.sequences, shape.tokens, shape.width, dtype=shape.dtype)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} M {SHORT[shape.dtype]} weights"
    note, timer = f"{shape.sequences} x {shape.tokens} tokens", timer_of(device)
    settings = [f"device={device}", f"task.dtype={str(shape.dtype).removeprefix('torch.')}", "method.mu=0.01"]
    ratio = federated_step_against_forwards(model, inputs, CLIENTS, settings, shape.repeats, timer, shape.limit_s)
    yield Figure(f"federated step / two bare passes, {size}", ratio, "x", note=f"{note}, {CLIENTS} clients")
    ratios = step_against_forwards(model.to(device), inputs.to(device), shape.repeats, timer, shape.limit_s)
    for call, ratio in ratios.items():
        yield Figure(f"ZeroOrder.{call} / two eager passes, {size}", ratio, "x", note=note)


def _weights(device: str, shape: Shape) -> Iterator[Figure]:
    """What is done to all weights at once: commit, replay, digest."""
    n, timer = math.prod(shape.matrix), timer_of(device)
    steps = {bits: _some_steps(shape.rounds, bits) for bits in (32, 16)}
    replays = {
        f"{directions}, {SHORT[dtype]}{', stochastic16' if bits == 16 else ''}": partial(
            Parameters(Flat(*shape.matrix, dtype=dtype).to(device), directions).replay, steps[bits]
        )
        for directions in ("gaussian", "low_rank")
        for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 32), (torch.bfloat16, 16))
    }
    half = Parameters(Flat(*shape.matrix, dtype=torch.bfloat16).to(device))
    calls: dict[str, Call] = {**replays, "commit": lambda: half.commit(steps[32][0]), "digest": half.digest}
    times, size = interleaved(calls, shape.repeats, timer, limit_s=shape.limit_s), f"{n / 1e6:.3g} M"
    for name in replays:
        yield Figure(f"replay of {size} weights, {name}", shape.rounds / times[name], "rounds/s", at_least=True,
                     note=f"k = 1, {shape.rounds} rounds in one pass")  # fmt: skip
    gigabytes = 2 * n / 1e9
    yield Figure(f"commit of {size} bf16 weights", gigabytes / times["commit"], "GB/s", at_least=True, note="k = 1")
    yield Figure(f"digest of {size} bf16 weights", gigabytes / times["digest"], "GB/s", at_least=True, note="SHA-256")


def _some_steps(rounds: int, bits: int) -> list[Step]:
    return [Step(7, t, np.full(1, 1e-6, np.float32), bits=bits) for t in range(rounds)]


def _default_run(device: str, shape: Shape) -> Figure:
    """The default run, without what it evaluates and writes."""
    call, timer = default_rounds(device, 12_000), timer_of(device)
    taken = interleaved({"round": call}, shape.repeats, timer, limit_s=shape.limit_s)["round"]
    note = "12 clients, 3 of them Byzantine, k = 64; random samples of MNIST's shape"
    return Figure("default run (MNIST, 7,850 weights)", 1 / taken, "rounds/s", at_least=True, note=note)
