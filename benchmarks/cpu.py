"""The CPU figures of docs/RESULTS.md as one table, each beside its target.

    make bench                                       all of them, a few minutes
    make bench ARGS=--quick                          a smoke run
    python benchmarks/cpu.py --only directions       one section
    python benchmarks/cpu.py --json figures.json     the figures as a file too

Ratios are taken within one run, from medians of interleaved repetitions. Run it on an idle machine. MNIST is fetched
on first use.
"""

from __future__ import annotations

import sys

import federation
import kernels
import startup
import transformer
from measure import main

from cyber0.kernels.memory import keep_freed_memory
from cyber0.kernels.threads import thread_count

SECTIONS = {
    "directions": kernels.directions,
    "mnist": federation.mnist,
    "start-up": startup.start_up,
    "scale": federation.scale,
    "trimmed mean": kernels.trimmed_mean,
    "commit": kernels.commit,
    "low rank": kernels.low_rank,
    "evaluation": transformer.evaluation,
}

if __name__ == "__main__":
    keep_freed_memory()  # as the command line does
    sys.exit(main(__doc__, SECTIONS, {"threads": thread_count()}))
