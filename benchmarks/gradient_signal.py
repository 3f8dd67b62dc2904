"""Which layers of a language model carry signal: the mean gradient of all samples beside the gradients of single ones.

    python benchmarks/gradient_signal.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data trec --task trec \\
        --set $'task.template=Question: {text}\\nThe answer is a {mask}' --set 'task.label_words=DESC=description, ...'

A step along random directions moves the weights by the slopes that a batch has along them. Its size is bounded by the
sum of the curvatures, for which the mean squared gradient of a sample, n, stands here; what it gains is the part of
the slopes that is the mean gradient's, whose squared length is s. With batches of B samples a forward pass gains in
proportion to s^2 / ((s + n / B) n). The table shows that beside its value for all weights, at the starting weights and
after steps of gradient descent of a given length. Takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cyber0.config.schema import Config
from cyber0.tasks import text
from cyber0.tasks.text import layers

SAMPLES = 512
LENGTH, BATCH = 0.025, 48  # of a step, and the samples that it is measured on


def gradients(task: Any, model: torch.nn.Module, weights: list[torch.Tensor], rows: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradient of the mean loss of some samples."""
    rows = np.asarray(rows)
    targets = task.train_targets[torch.from_numpy(rows)]
    loss = task.losses(task.outputs(model, task.train_inputs.take(rows)), targets).mean()
    return torch.autograd.grad(loss, weights)


def shares(task: Any, model: torch.nn.Module, weights: list[torch.Tensor], rows: Any) -> list[tuple[float, float]]:
    """Return s, without bias, and n of every weight tensor, from the gradients of single samples."""
    sums, squares = [torch.zeros_like(w) for w in weights], [0.0] * len(weights)
    for row in rows:
        for i, g in enumerate(gradients(task, model, weights, [row])):
            sums[i] += g
            squares[i] += float(g.square().sum())
    m = len(rows)
    pairs = zip(sums, squares, strict=True)
    return [((float(s.square().sum()) - q) / (m * (m - 1)), q / m) for s, q in pairs]


def gain(found: list[tuple[float, float]], batch: int) -> float:
    """Return what a forward pass gains, up to a constant."""
    s, n = (max(sum(values), 0.0) for values in zip(*found, strict=True))  # without bias, s may be below 0
    return s**2 / ((s + n / batch) * n) if n else 0.0


def table(task: Any, model: Any, steps: list[int], samples: int) -> Iterator[str]:
    """Yield a line for the starting weights and for the weights after each number of steps."""
    blocks = layers.blocks_of(model)
    weights = list(model.parameters())
    depth = {id(p): number for number, block in enumerate(blocks, 1) for p in block.parameters()}
    cuts = [len(blocks) * part // 6 for part in (1, 2, 3, 4, 5)]
    yield f"| steps | s / n | all weights | {' | '.join(f'layers after {cut}' for cut in cuts)} |"
    yield "|---|---|---|" + "---|" * len(cuts)
    draw, taken, count = np.random.default_rng(0), 0, len(task.labels)
    for number, until in enumerate([0, *steps]):
        while taken < until:
            g = gradients(task, model, weights, draw.choice(count, min(BATCH, count), replace=False))
            norm = float(torch.stack([part.norm() for part in g]).norm())
            with torch.no_grad():
                for w, part in zip(weights, g, strict=True):
                    w -= LENGTH / norm * part
            taken += 1
        rows = np.arange(samples * number, samples * (number + 1)) % count
        found = shares(task, model, weights, rows)
        s, n = (sum(values) for values in zip(*found, strict=True))
        whole, cells = gain(found, 12), []
        for cut in cuts:
            upper = [f for w, f in zip(weights, found, strict=True) if depth.get(id(w), 0) > cut]
            cells.append(f"{gain(upper, 12) / whole:.2f}" if whole else "")
        yield f"| {until} | {s / n:.4f} | 1 | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path, help="folder of the set")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, nargs="*", default=[40, 80])
    parser.add_argument("--samples", type=int, default=96, help="whose gradients are compared")
    options = parser.parse_args()
    settings = [f"task.name={options.task}", f"task.model={options.model}", f"task.data={options.data}", *options.set]
    task = text.make(Config().with_overrides(settings).task)
    rng = np.random.default_rng(0)
    classes = [np.flatnonzero(task.labels == label) for label in range(task.classes)]
    few = np.concatenate([rng.permutation(rows)[: -(-SAMPLES // task.classes)] for rows in classes])
    task = task.keep(rng.permutation(few)[:SAMPLES])
    model = task.model(0).eval()
    for line in table(task, model, options.steps, options.samples):
        print(line, flush=True)


if __name__ == "__main__":
    main()
