"""Distances between rows, and sums of rows, that never need more memory than a block of columns.

Everything that the rules of selection.py and centres.py need to know about rows of d scalars is the n x n matrix of
their inner products: taken once, block by block in float64, it makes each later step independent of d.

Numbers are confined to +-1e140, so that no square overflows; float32 has none beyond. A Byzantine client that sends
more is still farther away than any honest client can be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate.rule import AggregationError, Matrix
from cyber0.config.tolerance import PAIRWISE_ROWS

Float64Array = NDArray[np.float64]

_LARGEST = 1e140
# Numbers of a block of columns in float64: 1 MB, which stays in the cache of a core.
_ELEMENTS_PER_BLOCK = 1 << 17
# Up to so many differences are taken one by one, which is exact where an inner product rounds.
_EXACT_DIFFERENCES = 1 << 20


def blocks(rows: Matrix) -> list[slice]:
    """Return the columns to work on at once."""
    count, columns = rows.shape
    width = max(1, _ELEMENTS_PER_BLOCK // max(1, count))
    return [slice(start, min(start + width, columns)) for start in range(0, columns, width)]


def doubles(rows: Matrix, columns: slice, centre: Matrix | None = None) -> Float64Array:
    """Return a block of columns in float64, relative to a centre."""
    block = rows[:, columns]
    if rows.dtype == np.float64:
        block = np.clip(block, -_LARGEST, _LARGEST)
    if centre is None:
        return block.astype(np.float64, copy=False)
    middle = np.clip(centre[columns].astype(np.float64), -_LARGEST, _LARGEST)
    return np.subtract(block, middle, dtype=np.float64)


def weighted_sum(rows: Matrix, weights: Float64Array) -> Float64Array:
    """Return sum_i weights_i x_i."""
    values = np.empty(rows.shape[1], np.float64)
    used = np.flatnonzero(weights)
    if len(used) == 1:
        values[:] = rows[used[0]]
        values *= weights[used[0]]
        return values
    for columns in blocks(rows):
        values[columns] = weights @ doubles(rows, columns)
    return values


def mix(rows: Matrix, weights: Float64Array) -> Matrix:
    """Return the rows sum_i weights_ji x_i, in the type of the old ones."""
    mixed = np.empty((len(weights), rows.shape[1]), rows.dtype)
    for columns in blocks(rows):
        mixed[:, columns] = weights @ doubles(rows, columns)
    return mixed


def squared_norms(rows: Matrix, centre: Matrix | None = None) -> Float64Array:
    """Return ||x_i - centre||^2."""
    norms = np.zeros(len(rows))
    for columns in blocks(rows):
        block = doubles(rows, columns, centre)
        norms += np.einsum("ij,ij->i", block, block)
    return norms


def inner_products(rows: Matrix, centre: Matrix | None = None) -> Float64Array:
    """Return <x_i - centre, x_j - centre> for every pair of rows."""
    if len(rows) > PAIRWISE_ROWS:
        raise AggregationError(
            f"{len(rows)} rows have too many pairs to compare: use a coordinate-wise rule "
            f"(trimmed_mean, median, meamed), or at most {PAIRWISE_ROWS} clients a round"
        )
    products = np.zeros((len(rows), len(rows)))
    for columns in blocks(rows):
        block = doubles(rows, columns, centre)
        products += block @ block.T
    return products


def typical_row(rows: Matrix) -> Matrix:
    """Return the row of median size: a centre that a minority can't make large.

    Relative to it the inner products of honest rows that have much in common lose no digits, and a Byzantine client in
    its place is no larger than some honest row, so it costs at most one binary digit.
    """
    if rows.shape[1] == 0:
        return np.zeros(0, rows.dtype)
    size = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    middle: Matrix = rows[np.argsort(size, kind="stable")[(len(rows) - 1) // 2]]
    return middle


def squared_distances(rows: Matrix) -> Float64Array:
    """Return ||x_i - x_j||^2 for every pair of rows, symmetric, with zeros on the diagonal."""
    count, columns = rows.shape
    if count * count * columns <= _EXACT_DIFFERENCES:
        block = doubles(rows, slice(None))
        differences = block[:, None, :] - block[None, :, :]
        squares: Float64Array = np.einsum("ijk,ijk->ij", differences, differences)
        return squares
    return distances_from(inner_products(rows, typical_row(rows)))


def distances_from(products: Float64Array) -> Float64Array:
    """Return squared distances from inner products: <x, x> + <y, y> - 2 <x, y>."""
    norms = products.diagonal()
    squares = np.maximum(norms[:, None] + norms[None, :] - (products + products.T), 0.0)
    np.fill_diagonal(squares, 0.0)
    return squares
