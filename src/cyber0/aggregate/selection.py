"""Rules that select whole rows by their distances: Krum, multi-Krum, minimum diameter averaging."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.distances import Float64Array, squared_distances, weighted_sum
from cyber0.aggregate.rule import Matrix, Outcome, Rule
from cyber0.config.registry import rule
from cyber0.config.tolerance import majority
from cyber0.errors import ConfigError

MDA_BYZANTINE = 20  # the exact search for the subset of least diameter takes up to 1.47^b steps for b Byzantine clients


@rule(pairwise=True)
def krum(beta: float) -> Rule:
    """Take the row whose m - b - 1 nearest others are nearest, b = floor(beta * invited).

        argmin over x_i of sum_{j in N_i} ||x_i - x_j||^2

    N_i are the m - b rows nearest to x_i, itself included. Blanchard et al., "Machine learning with adversaries:
    Byzantine tolerant gradient descent", NeurIPS 2017, who leave out one more (m - b - 2 others); the count here is
    that of Allouah et al., AISTATS 2023, and of ByzFL. Needs m >= 2 b + 3. Of equal scores the first row is taken.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).

    Examples:
        >>> krum(0.2)(np.array([[1.0, 1.0], [1.1, 0.9], [0.8, 1.2], [1.3, 0.8], [-50.0, 50.0]]))
        array([1., 1.])
    """
    return Rule("krum", beta, lambda rows, b, round: _select(rows, _best(rows, b, 1)), _needed_by_krum)


@rule(pairwise=True)
def multi_krum(beta: float) -> Rule:
    """Average the m - b rows of the best Krum scores, b = floor(beta * invited).

        sum_{i in S} x_i / (m - b)

    S are the m - b rows with the least sum_{j in N_i} ||x_i - x_j||^2, see `krum`. Blanchard et al., NeurIPS 2017.
    Needs m >= 2 b + 3. Of equal scores the first rows are taken.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
    """
    return Rule(
        "multi_krum", beta, lambda rows, b, round: _select(rows, _best(rows, b, len(rows) - b)), _needed_by_krum
    )


@rule(pairwise=True)
def mda(beta: float) -> Rule:
    """Average the m - b rows of least diameter, b = floor(beta * invited).

        S = argmin over |S| = m - b of max_{i, j in S} ||x_i - x_j||

    El-Mhamdi et al., "Genuinely distributed Byzantine machine learning", PODC 2020. Of equally good subsets the
    lexicographically first is taken. The search is exact: a diameter r is possible if the pairs farther apart than r
    can be broken up by leaving out b rows (a vertex cover), which takes at most about 1.47^b steps, not C(m, b). More
    than `MDA_LIARS` Byzantine clients are refused.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
    """
    return Rule("mda", beta, lambda rows, b, round: _select(rows, _tightest(rows, b)), _needed_by_mda)


def _needed_by_krum(b: int) -> int:
    return 2 * b + 3


def _needed_by_mda(b: int) -> int:
    if b > MDA_BYZANTINE:
        raise ConfigError(
            f"mda can't search for the best subset without {b} Byzantine clients: lower beta until at most "
            f"{MDA_BYZANTINE} are to be borne, or use the rule multi_krum"
        )
    return majority(b)


def _select(rows: Matrix, selected: NDArray[np.int64]) -> Outcome:
    """Average the selected rows; the others are left out in every column."""
    weights = np.zeros(len(rows))
    weights[selected] = 1.0 / len(selected)
    return Outcome(weighted_sum(rows, weights), np.where(weights > 0, 0, rows.shape[1]).astype(np.int64))


def _best(rows: Matrix, b: int, count: int) -> NDArray[np.int64]:
    """Return the `count` rows of the least Krum scores."""
    nearest = np.sort(squared_distances(rows), axis=1)[:, 1 : len(rows) - b]
    return np.argsort(nearest.sum(axis=1), kind="stable")[:count].astype(np.int64)


def _tightest(rows: Matrix, b: int) -> NDArray[np.int64]:
    """Return the m - b rows of least diameter."""
    squares = squared_distances(rows)
    diameters = np.unique(squares)
    low, high = 0, len(diameters) - 1  # the largest is always possible
    while low < high:
        middle = (low + high) // 2
        if _coverable(_conflicts(squares, diameters[middle]), (1 << len(rows)) - 1, b):
            high = middle
        else:
            low = middle + 1
    return _first_subset(_conflicts(squares, diameters[high]), len(rows), b)


def _conflicts(squares: Float64Array, limit: float) -> list[int]:
    """Return for each row, as a set of bits, the rows that are farther from it than the limit."""
    bits = np.packbits(squares > limit, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in bits]


def _first_subset(conflicts: list[int], count: int, b: int) -> NDArray[np.int64]:
    """Return the lexicographically first count - b rows of which no two are in conflict."""
    kept: list[int] = []
    undecided, budget = (1 << count) - 1, b
    for row in range(count):
        if len(kept) == count - b:
            break
        if not undecided >> row & 1:
            continue
        undecided &= ~(1 << row)
        out = conflicts[row] & undecided  # keeping the row leaves these out
        cost = out.bit_count()
        if cost <= budget and _coverable(conflicts, undecided & ~out, budget - cost):
            kept.append(row)
            undecided, budget = undecided & ~out, budget - cost
        else:
            budget -= 1
    return np.array(kept, np.int64)


def _coverable(conflicts: list[int], among: int, budget: int) -> bool:
    """Return whether leaving out at most `budget` of the rows `among` settles all conflicts between them."""
    while True:
        rows = [row for row in range(len(conflicts)) if among >> row & 1]
        degrees = {row: count for row in rows if (count := (conflicts[row] & among).bit_count())}
        if not degrees:
            return True
        most = max(degrees, key=degrees.__getitem__)
        degree = degrees[most]
        if sum(degrees.values()) > 2 * budget * degree:  # each row left out settles at most `degree` conflicts
            return False
        lone = next((row for row, count in degrees.items() if count == 1), None)
        if lone is not None:  # leaving out the only adversary is never worse
            among, budget = among & ~conflicts[lone], budget - 1
        elif degree == 2 or degree > budget:  # rings, where one row is as good as another; or no way around this row
            among, budget = among & ~(1 << most), budget - 1
        else:
            break
    if _coverable(conflicts, among & ~(1 << most), budget - 1):
        return True
    return _coverable(conflicts, among & ~(1 << most) & ~conflicts[most], budget - degree)
