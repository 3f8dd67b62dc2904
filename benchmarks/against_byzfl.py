"""Our rules beside those of ByzFL 0.0.11: equal results, and the ratio of the times. n = 100, d = 1e6, f = 10.

ByzFL is not a dependency. It is run in an environment of its own, made once (torch of that very version, as another
one would fetch gigabytes; numba for our kernels):

    python -m venv /tmp/byzfl && /tmp/byzfl/bin/pip install -c constraints.txt torch==2.13.0 byzfl==0.0.11 numba rich
    PYTHONPATH=src /tmp/byzfl/bin/python benchmarks/against_byzfl.py            some minutes, 3 GB
    PYTHONPATH=src /tmp/byzfl/bin/python benchmarks/against_byzfl.py --quick    d = 1e4
    PYTHONPATH=src /tmp/byzfl/bin/python benchmarks/against_byzfl.py --json docs/results/byzfl.json

Both get the same array, ByzFL also as a torch tensor (which it turns into float32, so not in float64), call by call in
turn. A difference is the largest one between the results, relative to the largest number of ByzFL's, which adds up in
the type of the array, ours in float64. ByzFL's mixing copies n (n - f) d numbers, 36 GB: it is compared at d = 1e4,
and ours alone is run at full length. ByzFL's MDA tries every subset: it is compared at n = 12, f = 3. On a busy machine
set OPENBLAS_NUM_THREADS=1, whose threads otherwise wait for each other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from measure import Figure, interleaved, main
from numpy.typing import NDArray

from cyber0 import aggregate
from cyber0.aggregate import Rule

# ByzFL imports torchvision for its data sets, which no rule needs and which fails beside a torch of another build.
sys.modules["torchvision"] = mock.MagicMock()
byzfl = importlib.import_module("byzfl")

Theirs = Callable[[Any], Any]

ROUNDING = 1e-5  # largest relative difference that adding up a hundred numbers in float32 explains
N, F = 100, 10
REPEATS = 3


def vectors(n: int, d: int, f: int) -> NDArray[np.float32]:
    """Return n vectors that have something in common, f of which are Byzantine."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((n, d), dtype=np.float32)
    rows += generator.standard_normal(d, dtype=np.float32)
    rows[:f] *= 3
    return rows


def compared(name: str, rule: Rule, theirs: Theirs, rows: NDArray[Any], target: float, quick: bool) -> Iterator[Figure]:
    """Yield how much the results differ and the ratios of the times."""
    expected = np.asarray(theirs(rows), np.float64)
    difference = float(np.abs(rule(rows) - expected).max() / np.abs(expected).max())
    yield Figure(f"{name}: difference", difference, "", ROUNDING)
    calls = {"ours": lambda: rule(rows), "numpy": lambda: theirs(rows)}
    if rows.dtype == np.float32:
        tensor = torch.from_numpy(rows)
        calls["torch"] = lambda: theirs(tensor)
    times = interleaved(calls, 1 if quick else REPEATS, warm_up=False)
    ours = times.pop("ours")
    for way, taken in times.items():
        note = f"{ours:.3g} s, theirs {taken:.3g} s"
        yield Figure(f"{name}: time, ByzFL on {way}", ours / taken, "x", target if way == "numpy" else 1.0, note=note)


def rules(quick: bool) -> Iterator[Figure]:
    """Every rule that both have, on the same vectors."""
    rows, beta = vectors(N, 10_000 if quick else 1_000_000, F), F / N
    radius = float(np.sqrt(rows.shape[1]))
    pairs: list[tuple[str, Rule, Theirs, float]] = [
        ("mean", aggregate.mean(), byzfl.Average(), 1.0),
        ("median", aggregate.median(beta), byzfl.Median(), 1.0),
        ("trimmed mean", aggregate.trimmed_mean(beta), byzfl.TrMean(F), 0.5),
        ("Krum", aggregate.krum(beta), byzfl.Krum(F), 0.3),
        ("multi-Krum", aggregate.multi_krum(beta), byzfl.MultiKrum(F), 1.0),
        (
            "geometric median, 3 steps",
            aggregate.geometric_median(beta, iterations=3, nu=0.1),
            byzfl.GeometricMedian(nu=0.1, T=3),
            0.3,
        ),
        ("mean around the median", aggregate.meamed(beta), byzfl.Meamed(F), 1.0),
        # A new object for each call: ByzFL's remembers where the last one ended.
        (
            "centred clipping, 1 step",
            aggregate.centered_clipping(beta, radius=radius, iterations=1, start=0.0),
            lambda x: byzfl.CenteredClipping(L=1, tau=radius)(x),
            1.0,
        ),
        (
            "centred clipping, 3 steps",
            aggregate.centered_clipping(beta, radius=radius, iterations=3, start=0.0),
            lambda x: byzfl.CenteredClipping(L=3, tau=radius)(x),
            1.0,
        ),
    ]
    for name, rule, theirs, target in pairs:
        yield from compared(name, rule, theirs, rows, target, quick)
    taken = interleaved({"ours": lambda: aggregate.geometric_median(beta)(rows)}, 1)["ours"]
    yield Figure("geometric median, converged", taken, "s")


def doubles(quick: bool) -> Iterator[Figure]:
    """The rules of the targets in float64."""
    rows, beta = vectors(N, 10_000 if quick else 1_000_000, F).astype(np.float64), F / N
    pairs: list[tuple[str, Rule, Theirs, float]] = [
        ("mean", aggregate.mean(), byzfl.Average(), 1.0),
        ("median", aggregate.median(beta), byzfl.Median(), 1.0),
        ("trimmed mean", aggregate.trimmed_mean(beta), byzfl.TrMean(F), 0.5),
        ("Krum", aggregate.krum(beta), byzfl.Krum(F), 0.3),
        ("geometric median, 3 steps", aggregate.geometric_median(beta, iterations=3), byzfl.GeometricMedian(), 0.3),
    ]
    for name, rule, theirs, target in pairs:
        yield from compared(name, rule, theirs, rows, target, quick)


def subsets(quick: bool) -> Iterator[Figure]:
    """MDA where ByzFL can, and at full size."""
    theirs = byzfl.MDA(3)
    yield from compared("MDA, n = 12, f = 3", aggregate.mda(3 / 12), theirs, vectors(12, 1_000, 3), 1.0, quick)
    rows = vectors(N, 10_000 if quick else 1_000_000, F)
    taken = interleaved({"ours": lambda: aggregate.mda(F / N)(rows)}, 1)["ours"]
    yield Figure(f"MDA, n = {N}, f = {F}", taken, "s", note="ByzFL would try 1.7e13 subsets")


def mixing(quick: bool) -> Iterator[Figure]:
    """Nearest-neighbour mixing before the trimmed mean."""
    rule = aggregate.nnm(aggregate.trimmed_mean(F / N))
    mix, trim = byzfl.NNM(F), byzfl.TrMean(F)
    yield from compared("at d = 1e4", rule, lambda x: trim(mix(x)), vectors(N, 10_000, F), 1.0, quick)
    rows = vectors(N, 10_000 if quick else 1_000_000, F)
    taken = interleaved({"ours": lambda: rule(rows)}, 1)["ours"]
    yield Figure(f"at d = {rows.shape[1]:,}", taken, "s", note="ByzFL needs 36 GB at d = 1e6")


if __name__ == "__main__":
    sections = {"float32": rules, "float64": doubles, "subsets": subsets, "mixing": mixing}
    sys.exit(main(__doc__, sections, {"byzfl": "0.0.11"}))
