"""Rules that weigh whole rows by their distance from a centre: geometric median, centred clipping.

The centre is always a weighted sum of the rows, so both work on its weights: with the inner products G of the rows,
the squared distance of row i from sum_j a_j x_j is G_ii - 2 (G a)_i + a' G a, whatever the length of a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cyber0.aggregate.columns import median
from cyber0.aggregate.distances import (
    Float64Array,
    distances_from,
    inner_products,
    squared_norms,
    typical_row,
    weighted_sum,
)
from cyber0.aggregate.rule import AggregationError, Matrix, Outcome, Rule
from cyber0.config.registry import rule
from cyber0.errors import ConfigError

_STEPS = 1000
_PLAIN_STEPS = 100  # of them before Newton\'s are tried
_HALVINGS = 20  # of a step that goes too far
_TINY = float(np.finfo(np.float64).tiny)
_TOLERANCE = 1e-10  # length of the last step, in harmonic mean distances of the rows


@rule(pairwise=True)
def geometric_median(beta: float = 0.0, *, iterations: int | None = None, nu: float = 0.1) -> Rule:
    """Find the point whose distances from the rows have the least sum.

        argmin over z of sum_i ||x_i - z||

    By Weiszfeld's steps z <- sum_i x_i / ||x_i - z|| / sum_i 1 / ||x_i - z||, from the best row to convergence (Vardi
    and Zhang, PNAS 2000, for a z that is a row); where several rows are best, and with them all between, their mean.
    Byzantine clients move it from any point c by at most 2 (m - b) / (m - 2 b) times the largest honest ||x_i - c||.

    With `iterations`, the smoothed steps of Pillutla et al., "Robust aggregation for federated learning", 2022: that
    many of them from zero, with no distance taken as less than nu. Neither shift nor scale then carries over.

    Args:
        beta: the share of Byzantine clients among the invited to guard against. It does not change the result, only how
            many rows are insisted on, as for the median.
        iterations: how many smoothed steps; to convergence unless given.
        nu: the least distance of a smoothed step.

    Examples:
        >>> geometric_median()(np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [900.0, 900.0]]))
        array([0., 0.])
    """
    if iterations is not None and (iterations < 1 or not nu > 0):
        raise ConfigError(f"iterations = {iterations} with nu = {nu} is impossible: use at least 1 step and nu above 0")

    def combine(rows: Matrix, b: int, round: int) -> Outcome:
        weights = _converged(rows) if iterations is None else _smoothed(inner_products(rows), iterations, nu)
        return Outcome(weighted_sum(rows, weights), np.zeros(len(rows), np.int64))

    return Rule("geometric_median", beta, combine)


@rule(pairwise=True)
def centered_clipping(
    beta: float = 0.0, *, radius: float | None = None, iterations: int = 3, start: ArrayLike | None = None
) -> Rule:
    """Walk from a start towards the rows, none of which pulls farther than a radius.

        v <- v + (1 / m) sum_i (x_i - v) min(1, radius / ||x_i - v||)

    Karimireddy, He and Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021. A step is never
    longer than the radius. There the start is the result of the last round; a rule here remembers nothing, so give it
    that as `start`, or it begins anew at the median of each column.

    Args:
        beta: the share of Byzantine clients among the invited to guard against. It does not change the result, only how
            many rows are insisted on, as for the median.
        radius: how far a row can pull; unless given, the median distance of the rows from the start.
        iterations: how many steps.
        start: where to begin, one number per column or one for all.
    """
    if iterations < 1 or (radius is not None and not radius >= 0):
        raise ConfigError(
            f"iterations = {iterations} with radius = {radius} is impossible: use at least 1 step and a radius of at "
            "least 0"
        )
    begin = None if start is None else np.asarray(start, np.float64)

    def combine(rows: Matrix, b: int, round: int) -> Outcome:
        origin = median()(rows) if begin is None else _origin(begin, rows.shape[1])
        weights = _clipped(rows, origin, radius, iterations)
        values = weighted_sum(rows, weights) + (1.0 - weights.sum()) * origin
        return Outcome(values, np.zeros(len(rows), np.int64))

    return Rule("centered_clipping", beta, combine)


def _distances(products: Float64Array, weights: Float64Array) -> Float64Array:
    """Return how far each row is from the sum of the rows by the weights."""
    toward = products @ weights
    return np.sqrt(np.maximum(products.diagonal() - 2.0 * toward + weights @ toward, 0.0))


def _smoothed(products: Float64Array, iterations: int, nu: float) -> Float64Array:
    weights = np.zeros(len(products))
    for _ in range(iterations):
        pull = 1.0 / np.maximum(_distances(products, weights), nu)
        weights = pull / pull.sum()
    return weights


def _converged(rows: Matrix) -> Float64Array:
    """Return the weights of the rows in their geometric median."""
    products = inner_products(rows, typical_row(rows))
    distances = np.sqrt(distances_from(products))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        pulls = np.where(distances > 0, 1.0 / distances, 0.0)
        # How hard the others pull at each row, as weights of the rows; its own copies hold it with a force of one each.
        away = pulls - np.diag(pulls.sum(axis=1))
        force = np.sqrt(np.maximum(np.einsum("ij,ij->i", away @ products, away), 0.0))
    held = np.count_nonzero(distances == 0, axis=1)
    best = force <= held * (1 + 1e-9)
    if best.any():
        alike = np.where(best, 1.0 / held, 0.0)  # copies of a row count as one
        return np.asarray(alike / alike.sum(), np.float64)
    first = int(np.argmin(distances.sum(axis=1)))
    stay = min(1.0, float(held[first] / force[first])) if np.isfinite(force[first]) else 0.0
    weights = (1.0 - stay) * pulls[first] / pulls[first].sum()
    weights[first] += stay
    return _weiszfeld(products, weights)


def _weiszfeld(products: Float64Array, weights: Float64Array) -> Float64Array:
    """Step until the steps are short; where they shorten without arriving, as near a row or a line, by Newton's."""
    for number in range(_STEPS):
        pull = 1.0 / np.maximum(_distances(products, weights), _TINY)
        step = pull / pull.sum() - weights
        if number >= _PLAIN_STEPS:
            step = _newton(products, weights, pull, step)
        weights = weights + step
        if np.sqrt(max(float(step @ products @ step), 0.0)) * pull.sum() <= _TOLERANCE * len(products):
            break
    return weights


def _newton(products: Float64Array, weights: Float64Array, pull: Float64Array, plain: Float64Array) -> Float64Array:
    """Return Newton's step, halved until the sum of distances falls; the plain step if none makes it fall.

    With p = sum_j w_j x_j, a_i = 1 / ||x_i - p|| and A = sum_i a_i the gradient is A p - sum_i a_i x_i, the Hessian
    A I - sum_i a_i^3 (p - x_i)(p - x_i)^T; both are written in weights of the rows, like p.
    """
    offsets = weights - np.eye(len(weights))
    gradient = pull.sum() * weights - pull
    with np.errstate(over="ignore", invalid="ignore"):
        hessian = pull.sum() * np.eye(len(weights)) - (offsets.T * pull**3) @ offsets @ products
    if not np.isfinite(hessian).all():
        return plain
    step: Float64Array = np.linalg.lstsq(hessian, -gradient, rcond=None)[0]
    here = _distances(products, weights).sum()
    for _ in range(_HALVINGS):
        if _distances(products, weights + step).sum() < here:
            return step
        step = step / 2
    return plain


def _origin(start: Float64Array, columns: int) -> Float64Array:
    if start.shape not in ((), (columns,)):
        raise AggregationError(f"start has the shape {start.shape}, and the rows have {columns} numbers")
    return np.broadcast_to(start, (columns,))


def _clipped(rows: Matrix, origin: Float64Array, radius: float | None, iterations: int) -> Float64Array:
    """Return the weights of the rows, relative to the origin, at the end of the walk."""
    weights = np.zeros(len(rows))
    # One step needs the distances from the origin alone, far fewer than those between the rows.
    products = np.zeros((0, 0)) if iterations == 1 else inner_products(rows, origin)
    distances = np.sqrt(squared_norms(rows, origin) if iterations == 1 else products.diagonal())
    reach = float(np.median(distances)) if radius is None else radius
    for step in range(iterations):
        distances = _distances(products, weights) if step else distances
        share = np.where(distances > reach, reach / np.where(distances > 0, distances, 1.0), 1.0)
        weights = weights + (share - share.sum() * weights) / len(rows)
    return weights
