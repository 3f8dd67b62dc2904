"""Estimates along low-rank directions against bare forward passes, and against the path of Gaussian directions.

python benchmarks/low_rank.py [--quick] [--device cuda] [--dtype bfloat16]

A bare forward pass is the model's own, on as many samples, without gradients. All ratios are of one run; on a CPU
everything uses one thread. Memory on a CPU is the largest resident set of a process that does nothing else, above that
of one which has only made model and samples.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import Figure, interleaved, seconds
from torch import nn
from torch.nn import functional

from cyber0.bench.subjects import MeanSquare, encoder, plain_layers
from cyber0.directions import Directions
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.model.vector import Parameters

MU = 1e-3


class SmallSquares(MeanSquare):
    """The same of vectors."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean(1)


class Block(nn.Module):
    """A transformer layer as language models write it: samples first, one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, width)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def blocks(layers: int, width: int, heads: int) -> nn.Module:
    return nn.Sequential(*(Block(width, heads) for _ in range(layers))).eval()


def perceptron(layers: int, width: int, heads: int) -> nn.Module:
    """Layers without attention, over the same samples."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*parts).eval()


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "blocks": blocks, "nn.TransformerEncoder": encoder, "perceptron": perceptron
}  # fmt: skip


class Case:
    """A model with its samples, and everything that is compared."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        width, layers = (128, 2) if options.quick else (options.width, options.layers)
        self.model = MODELS[name](layers, width, width // 64).to(self.device, dtype)
        self.inputs = torch.randn(options.samples, options.tokens, width, device=self.device, dtype=dtype)
        self.batch = Batch(self.inputs, torch.zeros(options.samples, device=self.device), np.array([options.samples]))
        self.k, self.rows = options.k, options.rows

    def estimate(self, distribution: str, model: nn.Module | None = None) -> Callable[[], object]:
        """Return the estimate of a round along k directions, of a copy of the model if none is given."""
        model = copy.deepcopy(self.model) if model is None else model
        evaluator = Evaluator(Parameters(model, distribution), MeanSquare(), "two_point", MU,
                              rows_in_flight=self.rows)  # fmt: skip
        evaluator.estimate(self.batch, Directions(1, 0, self.k))
        rounds = iter(range(1, 10**6))
        return lambda: evaluator.estimate(self.batch, Directions(1, next(rounds), self.k))

    @torch.no_grad()
    def passes(self) -> None:
        """2k bare forward passes, one after the other."""
        for _ in range(2 * self.k):
            MeanSquare().losses(self.model(self.inputs), self.batch.targets)
        self._wait()

    @torch.no_grad()
    def inference(self) -> None:
        """The same rows in passes of as many rows as are in flight."""
        rows = 2 * self.k * len(self.inputs)
        each = min(rows, max(1, self.rows // (2 * len(self.inputs))) * 2 * len(self.inputs))
        x = self.inputs.repeat(each // len(self.inputs), 1, 1)
        for begin in range(0, rows, each):
            MeanSquare().losses(self.model(x[: rows - begin]), self.batch.targets)
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all(self) -> dict[str, Callable[[], object]]:
        return {"passes": self.passes, "inference": self.inference, "low_rank": self.estimate("low_rank"),
                "gaussian": self.estimate("gaussian")}  # fmt: skip


def peak(case: Case, call: Callable[[], object]) -> int:
    """Return the most bytes in use while something runs, above those in use before."""
    if case.device.type == "cuda":
        call()
        torch.cuda.synchronize(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        call()
        torch.cuda.synchronize(case.device)
        return torch.cuda.max_memory_allocated(case.device)
    call()
    call()
    status = Path("/proc/self/status").read_text()  # getrusage would count what the parent had before
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def memory(name: str, what: str, argv: list[str]) -> int:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, *argv, "--memory", what, "--models", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def figures(name: str, options: argparse.Namespace, argv: list[str]) -> list[Figure]:
    case = Case(name, options)
    weights = sum(p.numel() for p in case.model.parameters())
    note = f"{name}, {weights / 1e6:.1f} M weights, {options.samples} x {options.tokens} tokens, k = {options.k}"
    with plain_layers():
        times = interleaved(case.all(), 2 if options.quick else 5, seconds)
    found = [
        Figure("estimate / 2k bare passes", times["low_rank"] / times["passes"], "x", note=note),
        Figure("share of inference throughput with as many rows in flight", times["inference"] / times["low_rank"],
               "x", 0.9, at_least=True, note=note),
        Figure("Gaussian / 2k bare passes", times["gaussian"] / times["passes"], "x", note=note),
    ]  # fmt: skip
    del case
    used = {what: memory(name, what, argv) for what in ("nothing", "passes", "inference", "low_rank", "gaussian")}
    for what, against in (("low_rank", "inference"), ("gaussian", "passes")):
        none = used["nothing"] if options.device == "cpu" else 0
        ratio = (used[what] - none) / (used[against] - none)
        megabytes = ", ".join(f"{key} {value / 1e6:,.0f} MB" for key, value in used.items())
        found.append(Figure(f"memory, {what} / {against}", ratio, "x", 1.05, note=megabytes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few repeats")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1024, help="the most rows in flight")
    parser.add_argument("--memory", choices=["nothing", "passes", "inference", "low_rank", "gaussian"],
                        help=argparse.SUPPRESS)  # fmt: skip
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        case = Case(options.models[0], options)
        with plain_layers():
            small = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).to(case.device)  # which loads what estimates need
            task = Evaluator(Parameters(small, "low_rank"), SmallSquares(), "two_point", MU)
            task.estimate(Batch(torch.randn(2, 2, device=case.device), case.batch.targets[:2], np.array([2])),
                          Directions(1, 0, 2))  # fmt: skip
            bare = {"nothing": lambda: None, "passes": case.passes, "inference": case.inference}
            call = bare.get(options.memory) or case.estimate(options.memory, case.model)
            print(peak(case, call))
        return
    argv = list(sys.argv[1:])
    if "--models" in argv:
        begin = argv.index("--models")
        argv = argv[:begin] + argv[begin + 1 + len(options.models) :]
    for name in options.models:
        for figure in figures(name, options, argv):
            target = "" if figure.target is None else f" (goal {figure.target})"
            print(f"{figure.name:58s} {figure.value:6.2f}{figure.unit}{target}  {figure.note}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
