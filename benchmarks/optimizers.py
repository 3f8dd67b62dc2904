"""What each optimizer costs over sgd: memory beside the weights, a commit, a replayed round, a probe.

    python benchmarks/optimizers.py --json docs/results/optimizers_cost.json
    python benchmarks/optimizers.py --device cuda --json docs/results/optimizers_cost.json

Times are ratios to those of sgd, measured in turn within one run. The optimizers from sgd to rank do the same work
after the scalars: how far their ratios are from 1 is the noise of the measurement. A file that holds results of another
device keeps them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import interleaved, seconds

from cyber0 import optimizers
from cyber0.directions import Probe, Step
from cyber0.directions.backends import device_name
from cyber0.kernels.threads import thread_count
from cyber0.model.blocks import perturbed
from cyber0.model.vector import Parameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REPLAYED = 16  # rounds of a replay that goes through the weights once


class Subject:
    """A model of d weights in eight blocks, as one optimizer trains it."""

    def __init__(self, name: str, d: int, k: int, dtype: torch.dtype, device: str) -> None:
        before = _allocated(device)
        width = round((d / 8) ** 0.5)
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(8)])
        self.parameters = Parameters(model.to(device, dtype))
        self.optimizer = optimizers.make(name)
        self.parameters.hold_vectors(self.optimizer.vectors)
        held = [s.buffer for s in self.parameters.segments] + list(self.parameters.moments.vectors.values())
        on_gpu = None if before is None else (_allocated(device) or 0) - before
        size = sum(t.nbytes for t in held) if on_gpu is None else on_gpu
        self.bytes_per_weight = size / self.parameters.dimension
        self._state, self._round, self._k = self.optimizer.start(), 0, k
        self._rng, self._device = np.random.default_rng(0), device

    def _steps(self, count: int) -> list[Step]:
        made = []
        for _ in range(count):
            values = self._rng.normal(size=self._k).astype(np.float32)
            update = self.optimizer.step(self._state, 1e-6, values, self._k)
            made.append(Step(1, self._round, update.coefficients, elementwise=update.elementwise))
            self._state, self._round = update.state, self._round + 1
        return made

    def commit(self) -> None:
        self.parameters.commit(self._steps(1)[0])
        _finish(self._device)

    def replay(self) -> None:
        self.parameters.replay(self._steps(REPLAYED))
        _finish(self._device)

    def probe(self) -> None:
        weight_pass = self.parameters.weight_pass(Probe(1, self._round, 0, 1e-3))
        for segment in self.parameters.segments:
            perturbed(segment, weight_pass)
        _finish(self._device)

    def peak_per_weight(self) -> float | None:
        """Return what a commit takes in passing, in bytes a weight; on a GPU alone."""
        if self._device == "cpu":
            return None
        self.commit()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.commit()
        return (torch.cuda.max_memory_allocated() - before) / self.parameters.dimension


def _allocated(device: str) -> int | None:
    return None if device == "cpu" else torch.cuda.memory_allocated()


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(d: int, k: int, dtype: str, device: str, repeats: int) -> dict[str, Any]:
    """Return the cost of every optimizer."""
    subjects = {name: Subject(name, d, k, DTYPES[dtype], device) for name in optimizers.OPTIMIZERS}
    calls: dict[str, Callable[[Subject], None]] = {
        "commit": Subject.commit, "replayed round": Subject.replay, "probe": Subject.probe
    }  # fmt: skip
    times = {
        what: interleaved({name: (lambda s=s, call=call: call(s)) for name, s in subjects.items()}, repeats, seconds)
        for what, call in calls.items()
    }
    found = {}
    for name, subject in subjects.items():
        found[name] = {
            "bytes_per_weight": round(subject.bytes_per_weight, 2),
            "bytes_over_sgd": round(subject.bytes_per_weight - subjects["sgd"].bytes_per_weight, 2),
            "peak_bytes_per_weight_in_a_commit": subject.peak_per_weight(),
            **{f"{what}, of sgd's time": round(each[name] / each["sgd"], 2) for what, each in times.items()},
        }
    milliseconds = {what: round(1e3 * each["sgd"], 3) for what, each in times.items()}
    milliseconds["replayed round"] = round(milliseconds["replayed round"] / REPLAYED, 3)
    return {"weights": next(iter(subjects.values())).parameters.dimension, "k": k, "dtype": dtype,
            "sgd_ms": milliseconds, "optimizers": found}  # fmt: skip


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = []
    for dtype in DTYPES:
        for k in (2, 16):
            results.append(measure(arguments.weights, k, dtype, arguments.device, arguments.repeats))
            print(json.dumps(results[-1], indent=1), flush=True)
    machine = {"device": device_name(arguments.device), "torch": torch.__version__, "threads": thread_count()}
    if arguments.json is not None:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        kept[arguments.device] = {"machine": machine, "results": results}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
