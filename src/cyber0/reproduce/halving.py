"""The best learning rate by successive halving, as a pure function of the scores measured so far.

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

Score = tuple[float, ...]
"""How bad a run is: the first number counts, later ones decide between equals."""
Scores = Mapping[int, Score]
"""Score by exponent; that of a run which diverged or failed is infinite."""


class Search(NamedTuple):
    """What a search wants next: the exponents that each rung it has reached needs, and the best one once it is done."""

    wanted: tuple[tuple[int, ...], ...]
    best: int | None = None


def search(measured: Sequence[Scores], start: Sequence[int] = START) -> Search:
    """Return what is to be measured, given the scores of each rung so far.

    Args:
        measured: For each rung, the scores measured in it; empty if it has not begun.
        start: The exponents of the first rung.
    """
    grid, reached, kept = set(start), [], len(start)
    for scores in measured:
        grid = _widened(grid, scores)
        reached.append(tuple(sorted(grid)))
        if not grid <= scores.keys():
            return Search(tuple(reached))
        kept = math.ceil(kept / 2)  # of the grid as it began: widening does not make later rungs wider
        grid = set(best_of({e: scores[e] for e in grid}, kept))
    return Search(tuple(reached), best_of({e: measured[-1][e] for e in reached[-1]}, 1)[0])


def best_of(scores: Scores, count: int) -> list[int]:
    """Return the exponents with the lowest scores, the best first; of equal ones, the lower rate."""
    return sorted(scores, key=lambda e: (scores[e], e))[:count]


def _widened(grid: set[int], scores: Scores) -> set[int]:
    """Return the grid with what it needs until its best is no longer at an edge; unmeasured, it stays as it is."""
    grid = set(grid)
    while grid <= scores.keys():
        (best,) = best_of({e: scores[e] for e in grid}, 1)
        outward = {min(grid): -1, max(grid): 1}.get(best)
        if outward is None or abs(best + outward) > FARTHEST:
            return grid
        grid.add(best + outward)
    return grid


def bracketed(best: int, scores: Scores) -> Search:
    """Return which rates full runs are to try, given their scores so far, and the best one once that is known.

    Short runs do better at higher rates: there is less time for the noise of the steps to add up. So full runs begin
    with the rate that the search found and half of it. They are widened like a rung, until the best is between two
    that are not better; of equal ones, that nearer to the search's counts.
    """
    wanted = [best, best - 1]
    while all(e in scores for e in wanted):
        first = min(wanted, key=lambda e: (scores[e], abs(e - best)))
        outward = {min(wanted): -1, max(wanted): 1}.get(first)
        if outward is None or abs(first + outward) > FARTHEST:
            return Search((tuple(wanted),), first)
        wanted.append(first + outward)
    return Search((tuple(wanted),))
