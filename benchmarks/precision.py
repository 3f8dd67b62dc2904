"""How much of a measured slope is rounding, by the type that a language model computes in.

    python benchmarks/precision.py --model FILE.gguf --data DIR --task trec --set KEY=VALUE --json figures.json

Slopes of one batch along the same directions, with weights stored in float32 and computed with in float32, float16 and
bfloat16. The noise is the root mean square of the difference from float32; the signal is that of the slopes in float32.
It runs on the CPU; float16 is slow there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from cyber0.config.schema import Config
from cyber0.directions import Directions
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.model.vector import Parameters
from cyber0.tasks.text.task import Text

TYPES = ("bfloat16", "float16")


def slopes(task: Text, compute: str, options: argparse.Namespace) -> np.ndarray:
    """Return the slopes of one client's batch along k directions."""
    kind = None if compute == "float32" else getattr(torch, compute)
    parameters = Parameters(task.model(0), compute=kind)
    n = options.samples
    batch = Batch(task.train_inputs[:n], task.train_targets[:n], np.array([n]))
    found = Evaluator(parameters, task, options.estimator, options.mu).estimate(batch, Directions(0, 0, options.k))
    return np.asarray(found[0])


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a .gguf file, or a name on the hub")
    parser.add_argument("--data", default="", help="folder with the set's files")
    parser.add_argument("--task", default="trec", choices=["trec", "sst2", "snli"])
    parser.add_argument("--set", action="append", default=[], help="another setting of the task, as task.template=...")
    parser.add_argument("--estimator", default="one_sided", choices=["one_sided", "two_point"])
    parser.add_argument("--samples", type=int, default=36)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--mu", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="append the figures to this file, a JSON list")
    options = parser.parse_args()
    settings = [f"task.name={options.task}", f"task.model={options.model}", f"task.data={options.data}", *options.set]
    task = Text(Config().with_overrides(settings).task)
    task = task.keep(np.random.default_rng(0).permutation(len(task.labels))[: options.samples])
    rows, right = [], slopes(task, "float32", options)
    for compute in TYPES:
        noise = rms(slopes(task, compute, options) - right)
        row = {"task": options.task, "estimator": options.estimator, "compute": compute, "signal": rms(right),
               "noise": noise, "samples": options.samples, "k": options.k, "mu": options.mu}  # fmt: skip
        rows.append(row)
        print(f"{options.task} {compute}: slopes {row['signal']:.3g}, noise {noise:.3g}", flush=True)
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps(before + rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
