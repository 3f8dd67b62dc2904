"""The GPU figures of docs/RESULTS.md as one table, each beside its target. Needs CUDA and triton.

    python benchmarks/gpu.py                                         all of them, under three minutes on an H200
    PYTHONPATH=src python benchmarks/gpu.py --json figures.json      without installing cyber0; the figures as a file
    python benchmarks/gpu.py --only memory                           one section
    python benchmarks/gpu.py --quick                                 a smoke run with few weights

Times are medians by triton.testing.do_bench, of contestants in turn. A section that fails is named in the table and
does not cost the others.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from measure import Call, Figure, interleaved, main

from cyber0.bench.subjects import MeanSquare, encoder, plain_layers, step_against_forwards
from cyber0.directions import Directions, DirectionSpace, Probe, Step, engine
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.model.digests import digest_of
from cyber0.model.vector import Parameters

DEVICE = "cuda"
REPEATS = 3
COEFFICIENT = 1e-6
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PERTURB_TARGETS = {"fp32": 1.1, "fp16": 1.8, "bf16": 1.8}


def _size(quick: bool) -> int:
    """The number of weights of RoBERTa-large, or fewer; a multiple of every kernel's block."""
    return (1 << 24 if quick else 355_000_000) // 4096 * 4096


def _milliseconds(call: Call) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=25, rep=100, return_mode="median"))


def _compare(calls: dict[str, Call]) -> dict[str, float]:
    return interleaved(calls, REPEATS, _milliseconds)


def perturb(quick: bool) -> Iterator[Figure]:
    """One pass w + c z over all weights, in units of a device copy of the same bytes."""
    for name in DTYPES:
        yield from _perturb(name, _size(quick))


def _perturb(name: str, n: int) -> Iterator[Figure]:
    import randn

    w = torch.randn(n, device=DEVICE).to(DTYPES[name])
    out = torch.empty_like(w)

    def ours(distribution: str) -> Call:
        probe = Probe(7, 0, 0, 1e-3)
        return lambda: engine.apply(w, out, 0, [], probe, DirectionSpace(distribution, n))

    times = _compare(
        {
            "copy": lambda: out.copy_(w),
            "gaussian": ours("gaussian"),
            "rademacher": ours("rademacher"),
            "sphere": ours("sphere"),
            "tl.randn": lambda: randn.perturb(w, out, 1e-3, 7, four_at_once=False),
            "tl.randn4x": lambda: randn.perturb(w, out, 1e-3, 7, four_at_once=True),
        }
    )
    copy = times.pop("copy")
    yield Figure(f"{name} copy of {n / 1e6:.0f} M weights", copy, "ms", note=f"{2 * w.nbytes / copy / 1e9:.2f} TB/s")
    for kind, taken in times.items():
        target = PERTURB_TARGETS[name] if kind == "gaussian" else None
        note = {"sphere": "its norm known", "tl.randn": "for comparison", "tl.randn4x": "for comparison"}.get(kind, "")
        yield Figure(f"{name} {kind} / copy", taken / copy, "x", target, note=note)


def commit(quick: bool) -> Iterator[Figure]:
    """Committing 64 directions, and replaying 200 rounds of one, in one pass over the weights."""
    for name in ("fp32", "bf16"):
        yield from _commit(name, _size(quick))


def _commit(name: str, n: int) -> Iterator[Figure]:
    k, rounds = 64, 200
    w = torch.randn(n, device=DEVICE).to(DTYPES[name])
    wide = [Step(7, 0, np.full(k, COEFFICIENT, np.float32))]
    narrow = [Step(7, t, np.full(1, COEFFICIENT, np.float32)) for t in range(rounds)]

    gaussian = DirectionSpace("gaussian", n)
    low_rank = DirectionSpace.of("low_rank", [(1024, 1024)] * (n >> 20) + [(n % (1 << 20),)])

    def move(steps: list[Step], space: DirectionSpace = gaussian) -> Call:
        return lambda: engine.apply(w, w, 0, steps, None, space)

    by_16 = [replace(step, bits=16) for step in narrow]
    many = [replace(by_16[0], round=t) for t in range(2000)]
    times = _compare({"commit": move(wide), "replay": move(narrow), "one": move(narrow[:1]), "by 16": move(by_16),
                      "low_rank": move(many, low_rank)})  # fmt: skip
    yield Figure(f"{name} commit of {k} directions", times["commit"], "ms", 36.0)
    yield Figure(f"{name} replay, {rounds} rounds of k = 1 in one pass", times["replay"] / rounds, "ms/round")
    yield Figure(f"{name} the same one by one", times["one"], "ms/round")
    goal, note = 0.1 if name == "fp32" else 0.2, f"{len(many)} rounds of k = 1, rounded by 16 bits"
    yield Figure(f"{name} replay along low-rank directions", times["low_rank"] / len(many), "ms/round", goal, note=note)
    if name != "fp32":
        yield Figure(f"{name} replay by 16 random bits a weight / by 32", times["by 16"] / times["replay"], "x")


def digest(quick: bool) -> Iterator[Figure]:
    """Hashing weights where copying and hashing overlap, in units of SHA-256 alone."""
    n = _size(quick)
    here = torch.zeros(n, dtype=torch.bfloat16)
    there, gigabytes = here.to(DEVICE), here.nbytes / 1e9
    calls = {"gpu": lambda: digest_of([there]), "host": lambda: digest_of([here])}
    times = interleaved(calls, REPEATS)
    yield Figure("digest of weights on the GPU", times["gpu"] / gigabytes, "s/GB", note=f"{gigabytes:.2f} GB")
    yield Figure("the same / SHA-256 in host memory", times["gpu"] / times["host"], "x", 1.05)


def directions(quick: bool) -> Iterator[Figure]:
    """Drawing one direction, against torch's generator, and the norm that the sphere needs."""
    n = _size(quick)
    out, indices = torch.empty(n, device=DEVICE), count()

    def draw(distribution: str) -> Call:
        return lambda: engine.fill(out, 0, 7, 0, 0, DirectionSpace(distribution, n))

    times = _compare(
        {
            "normal_": out.normal_,
            "gaussian": draw("gaussian"),
            "rademacher": draw("rademacher"),
            # A new direction each time: a norm is kept once it is known.
            "norm": lambda: engine.sphere_scale(7, 1, next(indices), n, str(out.device)),
        }
    )
    for kind in ("normal_", "gaussian", "rademacher"):
        label = "torch normal_" if kind == "normal_" else f"{kind} fill"
        yield Figure(f"{label}, {n / 1e6:.0f} M", times[kind], "ms", note=f"{n / times[kind] / 1e6:,.0f} G/s")
    yield Figure("speed of gaussian fill / normal_", times["normal_"] / times["gaussian"], "x")
    yield Figure("norm of a sphere direction", times["norm"], "ms")


def evaluation(quick: bool) -> Iterator[Figure]:
    """A zero-order step against the two forward passes it contains, for a model of RoBERTa-large's shape."""
    layers, width = (2, 256) if quick else (24, 1024)
    for name, batch, tokens, goal in (("fp32", 8, 128, 1.1), ("bf16", 64, 128, 1.1), ("bf16", 64, 32, 0.4),
                                      ("bf16", 512, 128, 1.1)):  # fmt: skip
        model = encoder(layers, width, 16).to(DEVICE, DTYPES[name])
        inputs = torch.randn(batch, tokens, width, device=DEVICE, dtype=DTYPES[name])
        for z in ("gaussian", "low_rank"):
            ratios = step_against_forwards(model, inputs, REPEATS, _milliseconds, distribution=z)
            for call, ratio in ratios.items():
                target = goal if "batch" in call else None
                title, note = f"{name} {z} ZeroOrder.{call}", f"{batch} x {tokens} tokens"
                yield Figure(f"{title} / two plain forwards", ratio, "x", target, note=note)
        del model, inputs


def memory(quick: bool) -> Iterator[Figure]:
    """Peak memory of one estimate (k = 1), in units of that of inference; weights included."""
    layers, width = (2, 256) if quick else (24, 1024)
    model, batch = encoder(layers, width, 16).to(DEVICE), 8
    parameters = Parameters(model)
    inputs = torch.randn(batch, 128, width, device=DEVICE)
    samples = Batch(inputs, torch.zeros(batch, dtype=torch.int64, device=DEVICE), np.array([batch]))

    @torch.no_grad()
    def infer() -> None:
        MeanSquare().losses(model(inputs), samples.targets).sum().item()

    def estimate(name: str) -> Call:
        evaluator = Evaluator(parameters, MeanSquare(), name, mu=1e-3)
        return lambda: evaluator.estimate(samples, Directions(7, 0, 1))

    inference = _peak_bytes(infer)
    weights = 4 * parameters.dimension
    note = f"{weights / 2**20:,.0f} MiB of weights, {batch} x 128 tokens, fp32"
    yield Figure("inference", inference / 2**20, "MiB", note=note)
    with plain_layers():
        yield Figure("inference without fused layers / inference", _peak_bytes(infer) / inference, "x")
    for name, target in (("two_point", None), ("forward", 2.0), ("gradient", None)):
        peak = _peak_bytes(estimate(name))
        yield Figure(f"{name} / inference", peak / inference, "x", target, note=f"{peak / 2**20:,.0f} MiB")


def _peak_bytes(call: Call) -> int:
    """Return the most memory that tensors took at any moment of a call, after one to warm up."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


# Memory comes first: nothing that another section left behind can then be counted.
SECTIONS = {
    "memory": memory,
    "perturb": perturb,
    "commit": commit,
    "digest": digest,
    "directions": directions,
    "evaluation": evaluation,
}

if __name__ == "__main__":
    machine = {"GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    sys.exit(main(__doc__, SECTIONS, machine))
