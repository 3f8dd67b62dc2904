"""Directions, commit, replay and trimmed mean on the CPU, without a federation.

python benchmarks/cpu.py --only directions --only commit --only "trimmed mean"
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np
import torch
from measure import Call, Figure, interleaved

from cyber0 import aggregate
from cyber0.bench.subjects import Flat
from cyber0.directions import DirectionSpace, Step, engine
from cyber0.kernels.threads import thread_count
from cyber0.model.vector import Parameters

SMOLLM2 = 134_515_008
"""Weights of SmolLM2-135M."""


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch and our kernels use that many threads."""
    before, wanted = torch.get_num_threads(), os.environ.get("CYBER0_THREADS")
    torch.set_num_threads(number)
    os.environ["CYBER0_THREADS"] = str(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if wanted is None:
            del os.environ["CYBER0_THREADS"]
        else:
            os.environ["CYBER0_THREADS"] = wanted


def directions(quick: bool) -> Iterator[Figure]:
    """Drawing a direction against torch.Tensor.normal_ on the same buffer, with the same number of threads."""
    n = 1 << 22
    buffer, rounds = torch.empty(n), count()
    targets = {"gaussian": 1.0, "rademacher": 3.0, "sphere": None}

    def draw(distribution: str) -> torch.Tensor:
        # A new round each time: the norm of a sphere direction is kept once it is known.
        return engine.fill(buffer, 0, 1, next(rounds), 0, DirectionSpace(distribution, n))

    for number in sorted({1, thread_count()}):
        calls = {"normal_": buffer.normal_, **{name: (lambda name=name: draw(name)) for name in targets}}
        with threads(number):
            times = interleaved(calls, 3 if quick else 15)
        label = f"{number} thread{'s' if number > 1 else ''}"
        yield Figure(f"torch normal_, {label}", n / times["normal_"] / 1e6, "M/s")
        for name, target in targets.items():
            note = "norm and coordinates: drawn twice" if name == "sphere" else ""
            yield Figure(f"{name}, {label}", n / times[name] / 1e6, "M/s")
            yield Figure(
                f"{name} / normal_, {label}", times["normal_"] / times[name], "x", target, at_least=True, note=note
            )


def commit(quick: bool) -> Iterator[Figure]:
    """Committing a round of 64 directions, and replaying many rounds, in one pass over the weights."""
    k, small = 64, 7_850
    for n in (small, 1_000_000 if quick else 10_000_000):
        parameters, z = Parameters(Flat(n)), torch.empty(n)
        w, step = torch.zeros(n), Step(1, 0, np.full(k, 1e-6, np.float32))

        def plain(w: torch.Tensor = w, z: torch.Tensor = z) -> None:
            for _ in range(k):
                w.add_(z.normal_(), alpha=-1e-6)

        calls = {"ours": lambda p=parameters, s=step: p.commit(s), "plain": plain}
        times = interleaved(calls, 2 if quick or n > small else 15)
        yield Figure(f"commit of {k} directions, {n:,} weights", 1e3 * times["ours"], "ms")
        yield Figure(
            f"the same by {k} x (normal_, add_)", times["plain"] / times["ours"], "x", note="times slower than ours"
        )
    yield from _replay(100 if quick else 1_000, 1_000_000)
    yield from _rounded_replay(20 if quick else 200, 1_000_000 if quick else 10_000_000)
    yield from _digest(10_000_000 if quick else 500_000_000)


def _rounded_replay(rounds: int, n: int) -> Iterator[Figure]:
    """What rounding costs, by 32 and by 16 random bits a weight."""
    full, half = Parameters(Flat(n)), Parameters(Flat(n, dtype=torch.bfloat16))
    steps = {bits: [Step(1, t, np.full(1, 1e-6, np.float32), bits=bits) for t in range(rounds)] for bits in (32, 16)}
    calls = {"fp32": lambda: full.replay(steps[32]), "32": lambda: half.replay(steps[32]),
             "16": lambda: half.replay(steps[16])}  # fmt: skip
    times, note = interleaved(calls, 5), f"{n:,} weights, k = 1, {rounds} rounds in one pass"
    yield Figure("bf16 replay by 32 random bits / fp32", times["32"] / times["fp32"], "x", note=note)
    yield Figure("bf16 replay by 16 random bits / by 32", times["16"] / times["32"], "x", note=note)


def cpu_seconds(call: Call) -> float:
    """Return the seconds of all threads' processor time that a call takes: others' work counts less."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _digest(n: int) -> Iterator[Figure]:
    parameters = Parameters(Flat(n, dtype=torch.bfloat16))
    taken = interleaved({"digest": parameters.digest}, 3)["digest"]
    yield Figure("digest", taken / (2 * n / 1e9), "s/GB", note=f"SHA-256 of {2 * n / 1e9:.2g} GB on one core")


def _replay(rounds: int, n: int) -> Iterator[Figure]:
    parameters = Parameters(Flat(n))
    steps = [Step(1, t, np.full(1, 1e-6, np.float32)) for t in range(rounds)]

    def one_by_one() -> None:
        for step in steps:
            parameters.commit(step)

    times = interleaved({"pass": lambda: parameters.replay(steps), "one by one": one_by_one}, 3)
    yield Figure(f"replay of {rounds:,} rounds, k = 1, {n:,} weights", times["pass"], "s", note="in one pass")
    yield Figure("the same one by one", times["one by one"] / times["pass"], "x", note="times slower than in one pass")


def low_rank(quick: bool) -> Iterator[Figure]:
    """Replaying rounds along low-rank directions against Gaussian ones, over matrices of 576 columns."""
    shapes, rounds = [(1536, 576)] * (2 if quick else 8), 64
    spaces = {name: DirectionSpace.of(name, shapes) for name in ("gaussian", "low_rank")}
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 32), (torch.bfloat16, 16)):
        w = torch.randn(spaces["low_rank"].dimension).to(dtype)
        steps = [Step(1, t, np.full(1, 1e-6, np.float32), bits=bits) for t in range(rounds)]
        calls = {name: partial(engine.apply, w, w, 0, steps, None, space) for name, space in spaces.items()}
        times = interleaved(calls, 5, cpu_seconds)
        each = times["low_rank"] / rounds / w.numel()
        name = str(dtype).removeprefix("torch.") + (", rounded by 16 bits" if bits == 16 else "")
        yield Figure(f"{name}: a weight and round", 1e9 * each, "ns of CPU")
        yield Figure(
            f"{name}: verifying 1,500 rounds of SmolLM2", each * SMOLLM2 * 1500 / 60, "min of CPU", 3.0,
            note=f"{SMOLLM2 / 1e6:.1f} M weights, scaled from {w.numel() / 1e6:.0f} M",
        )  # fmt: skip
        yield Figure(f"{name}: time / Gaussian directions", times["low_rank"] / times["gaussian"], "x")


def trimmed_mean(quick: bool) -> Iterator[Figure]:
    """The trimmed mean of a million clients, and of twelve."""
    rule, k = aggregate.trimmed_mean(0.25), 64
    generator = np.random.default_rng(0)
    for clients, target in ((12, None), (1_000_000, 3.0)):
        matrix = generator.standard_normal((clients, k), dtype=np.float32)
        taken = interleaved({"decide": lambda m=matrix: rule.decide(m)}, 2 if quick else 5)["decide"]
        name = f"{clients:,} clients x {k} numbers"
        yield Figure(name, taken, "s", target) if target else Figure(name, 1e6 * taken, "µs")
