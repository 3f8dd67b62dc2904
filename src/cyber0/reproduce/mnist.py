"""The experiments on MNIST (Section 4.2 and Appendix A.2): what they have in common.

Logistic regression, 400 steps, learning rate 0.01, batches of 64, mu 0.001: the defaults of a config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cyber0.config.keys import Value
from cyber0.config.schema import Config
from cyber0.reproduce import Order
from cyber0.reproduce.cells import check_overrides
from cyber0.study import Cell

ROUNDS, QUICK_ROUNDS = 400, 40
SEEDS, QUICK_SEEDS = 3, 1


def seeds_of(order: Order) -> int:
    """Return how many seeds are wanted."""
    return order.seeds or (QUICK_SEEDS if order.quick else SEEDS)


def make_cells(order: Order, wanted: Iterable[tuple[Mapping[str, Value], Sequence[str]]]) -> list[Cell]:
    """Return a cell for each seed of each (place on the axes, settings); `--set` has the last word."""
    check_overrides(order)
    length = f"rounds={QUICK_ROUNDS if order.quick else ROUNDS}"
    return [
        Cell(axes, Config().with_overrides([length, f"seed={seed}", *settings, *order.overrides]))
        for axes, settings in wanted
        for seed in range(seeds_of(order))
    ]


def settings_line(order: Order) -> str:
    """Say how it was made, for the end of a comparison."""
    rounds = QUICK_ROUNDS if order.quick else ROUNDS
    changed = f"; changed by --set: {', '.join(order.overrides)}" if order.overrides else ""
    return f"{seeds_of(order)} seed(s), {rounds} steps{changed}. Means ± sample deviation over seeds."


def finish(order: Order, name: str, lines: Sequence[str]) -> Path:
    """Write the comparison; a quick one says first that it is none."""
    title, *rest = lines
    warning = (
        ["", f"**A quick look at {QUICK_ROUNDS} steps: not to be compared with the paper.**"] if order.quick else []
    )
    path = order.out / f"{name}.md"
    path.write_text("\n".join([title, *warning, *rest]) + "\n", encoding="utf-8")
    return path
