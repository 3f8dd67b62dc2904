"""The best learning rate by successive halving, as a pure function of the losses measured so far.

Rates are centre * 2^e, and an exponent e stands for one. Every rung trains longer than the one before: the first tries
the whole grid, each later one half as many, the best ones. A rung whose best rate is its lowest or highest is widened
on that side, so the best is always between two that are worse. This also follows a best rate that falls as runs become
longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

START = (-2, -1, 0, 1, 2)
"""The grid that every search begins with."""
FARTHEST = 14
"""Exponents beyond this are not tried: there the centre is wrong, or the loss does not depend on the rate."""

Losses = Mapping[int, float]
"""Loss by exponent; a run that diverged or failed has an infinite one."""


class Search(NamedTuple):
    """What a search wants next: the exponents that each rung it has reached needs, and the best one once it is done."""

    wanted: tuple[tuple[int, ...], ...]
    best: int | None = None


def search(measured: Sequence[Losses], start: Sequence[int] = START) -> Search:
    """Return what is to be measured, given the losses of each rung so far.

    Args:
        measured: For each rung, the losses measured in it; empty if it has not begun.
        start: The exponents of the first rung.
    """
    grid, reached, kept = set(start), [], len(start)
    for losses in measured:
        grid = _widened(grid, losses)
        reached.append(tuple(sorted(grid)))
        if not grid <= losses.keys():
            return Search(tuple(reached))
        kept = math.ceil(kept / 2)  # of the grid as it began: widening does not make later rungs wider
        grid = set(best_of({e: losses[e] for e in grid}, kept))
    return Search(tuple(reached), best_of({e: measured[-1][e] for e in reached[-1]}, 1)[0])


def best_of(losses: Losses, count: int) -> list[int]:
    """Return the exponents with the lowest losses, the best first; of equal ones, the lower rate."""
    return sorted(losses, key=lambda e: (losses[e], e))[:count]


def _widened(grid: set[int], losses: Losses) -> set[int]:
    """Return the grid with what it needs until its best is no longer at an edge; unmeasured, it stays as it is."""
    grid = set(grid)
    while grid <= losses.keys():
        (best,) = best_of({e: losses[e] for e in grid}, 1)
        outward = {min(grid): -1, max(grid): 1}.get(best)
        if outward is None or abs(best + outward) > FARTHEST:
            return grid
        grid.add(best + outward)
    return grid


def lowered(best: int, losses: Losses) -> Search:
    """Return which rates full runs are to try, given their losses so far, and the best one once that is known.

    Short runs have the better losses at higher rates: there is less time for the noise of the steps to add up. So full
    runs begin with the rate that the search found and half of it, and go on downwards as long as the loss falls.
    """
    wanted = [best, best - 1]
    while all(e in losses for e in wanted):
        *_, previous, last = wanted
        if losses[last] >= losses[previous] or last < -FARTHEST:
            return Search((tuple(wanted),), previous)
        wanted.append(last - 1)
    return Search((tuple(wanted),))
