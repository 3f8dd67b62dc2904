"""The experiments on MNIST (Section 4.2 and Appendix A.2): what they have in common.

Logistic regression, 400 steps, learning rate 0.01, batches of 64, mu 0.001: the defaults of a config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.reproduce import Request
from cyber0.reproduce.cells import check_overrides
from cyber0.study import Cell

ROUNDS, QUICK_ROUNDS = 400, 40
SEEDS, QUICK_SEEDS = 3, 1


def seeds_of(request: Request) -> int:
    """Return how many seeds are wanted."""
    return request.seeds or (QUICK_SEEDS if request.quick else SEEDS)


def make_cells(request: Request, wanted: Iterable[tuple[Mapping[str, Value], Sequence[str]]]) -> list[Cell]:
    """Return a cell for each seed of each (place on the axes, settings); `--set` overrides these."""
    check_overrides(request)
    length = f"rounds={QUICK_ROUNDS if request.quick else ROUNDS}"
    return [
        Cell(axes, Config().with_overrides([length, f"seed={seed}", *settings, *request.overrides]))
        for axes, settings in wanted
        for seed in range(seeds_of(request))
    ]


def settings_line(request: Request) -> str:
    """Return how it was made, for the end of a comparison."""
    rounds = QUICK_ROUNDS if request.quick else ROUNDS
    changed = f"; changed by --set: {', '.join(request.overrides)}" if request.overrides else ""
    return f"{seeds_of(request)} seed(s), {rounds} steps{changed}. Means ± sample deviation over seeds."


def finish(request: Request, name: str, lines: Sequence[str]) -> Path:
    """Write the comparison; a quick one begins with a warning."""
    title, *rest = lines
    warning = ["", f"**A preview of {QUICK_ROUNDS} steps: not comparable with the paper.**"] if request.quick else []
    path = request.out / f"{name}.md"
    path.write_text("\n".join([title, *warning, *rest]) + "\n", encoding="utf-8")
    return path
