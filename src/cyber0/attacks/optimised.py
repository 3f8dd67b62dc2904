"""Attacks that go as far as a condition on the honest rows allows: min-max, min-sum, and those of Fang et al."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cyber0.aggregate.distances import distances_from
from cyber0.attacks.knowledge import (
    PLACES,
    Attack,
    Knowledge,
    Matrix,
    Vector,
    against,
    deviation_of,
    from_honest,
    mean_of,
)
from cyber0.config.registry import attack
from cyber0.errors import ConfigError

PERTURBATIONS = ("std", "unit", "sign", "signed_std")
SIGN_SOURCES = ("honest", "truth")
SMALLEST_STEP = 1e-5  # Fang et al.'s threshold: below it the search for a step is given up


def _by_truth(options: Mapping[str, Any]) -> bool:
    return options.get("sign_from") == "truth"


@attack(needs_own=False)
def min_max(perturbation: str = "std") -> Attack:
    """Send mean + gamma p with the largest gamma at which no honest row is too far away.

        max_i ||mean + gamma p - g_i|| <= max_ij ||g_i - g_j||

    For every i this is a quadratic inequality in gamma, so the bisection of the paper is not needed. The perturbation p
    is one of the paper's, "std" -deviation, "unit" -mean / ||mean|| (the default of its authors' code), "sign"
    -sign(mean); or ours, "signed_std" -sign(mean) * deviation. Scalars along random directions are as often positive as
    negative, and "std" shifts them all the same way, which is little more than noise; "signed_std" always works against
    their mean.

    Shejwalkar and Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and defenses for
    federated learning", NDSS 2021.
    """

    def strength(honest: Matrix, p: Vector) -> float:
        away = mean_of(honest) - honest
        half, square = away @ p, float(p @ p)
        room = squared_distances(honest).max() - (away * away).sum(axis=1)
        return float(((np.sqrt(half * half + square * np.maximum(room, 0.0)) - half) / square).min())

    return _along(perturbation, strength)


@attack(needs_own=False)
def min_sum(perturbation: str = "std") -> Attack:
    """Send mean + gamma p with the largest gamma at which the honest rows together are not too far away.

        sum_i ||mean + gamma p - g_i||^2 <= max_i sum_j ||g_i - g_j||^2

    The left side is gamma^2 m ||p||^2 + sum_i ||mean - g_i||^2. Perturbations and reference as in `min_max`. This is
    the bound of the paper; its authors' code takes the least of the sums on the right, which is less.
    """

    def strength(honest: Matrix, p: Vector) -> float:
        away = mean_of(honest) - honest
        room = squared_distances(honest).sum(axis=1).max() - (away * away).sum()
        return float(np.sqrt(max(room, 0.0) / (len(honest) * float(p @ p))))

    return _along(perturbation, strength)


def perturbed(name: str, honest: Matrix) -> Vector:
    """Return the perturbation of that name; zeros where there is nothing to work against."""
    mean = mean_of(honest)
    if name == "std":
        return -deviation_of(honest)
    if name == "unit":
        length = float(np.linalg.norm(mean))
        return -mean / length if length > 0 else np.zeros_like(mean)
    return -against(mean) * (deviation_of(honest) if name == "signed_std" else 1.0)


def _along(perturbation: str, strength: Callable[[Matrix, Vector], float]) -> Attack:
    if perturbation not in PERTURBATIONS:
        raise ConfigError(f"perturbation = {perturbation!r} must be one of {', '.join(PERTURBATIONS)}")

    def craft(honest: Matrix, known: Knowledge) -> Vector:
        p = perturbed(perturbation, honest)
        gamma = strength(honest, p) if np.any(p) else 0.0
        return mean_of(honest) + gamma * p

    return from_honest(craft)


@attack(needs_own=False, needs_truth=_by_truth, strength="b")
def fang_trimmed_mean(b: float = 2.0, sign_from: str = "honest") -> Attack:
    """Send values beyond the honest range, on the side against the honest direction, drawn close to its end.

    Where the honest direction is >= 0 every Byzantine client draws uniformly between min and min * b (min / b if min >
    0), elsewhere between max and max * b (max / b if max < 0).

    Args:
        b: how far beyond; the paper's 2.
        sign_from: whose sign the honest direction is: that of the mean of the "honest" reports of this round, or of
            the "truth", the scalars without the noise of batches.

    Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020.
    """
    if not b > 1:
        raise ConfigError(f"b = {b!r} reaches nothing beyond the honest range; it must be above 1")
    _check_sign(sign_from)

    def craft(honest: Matrix, known: Knowledge) -> Matrix:
        low, high = honest.min(axis=0), honest.max(axis=0)
        sign = against(_direction(sign_from, honest, known))
        near = np.where(sign > 0, low, high)
        outwards = near * sign <= 0  # the end lies on the far side of 0: going outwards is growing
        far = np.where(outwards, near * b, near / b)
        places = known.generator(PLACES).random((known.byzantine, honest.shape[1]))
        sent: Matrix = near + places * (far - near)
        return sent

    return from_honest(craft)


def _check_sign(sign_from: str) -> None:
    if sign_from not in SIGN_SOURCES:
        raise ConfigError(f"sign_from = {sign_from!r} must be one of {', '.join(SIGN_SOURCES)}")


def _direction(sign_from: str, honest: Matrix, known: Knowledge) -> Vector:
    if sign_from == "honest":
        return mean_of(honest)
    if known.truth is None:
        raise ConfigError('sign_from = "truth" needs the scalars without noise, which were not computed; use "honest"')
    return known.truth


@attack(needs_own=False, needs_truth=_by_truth)
def fang_krum(sign_from: str = "honest") -> Attack:
    """Send -lambda * sign(honest direction), all the same row, with the largest lambda found at which Krum picks it.

    lambda starts at the paper's bound, with m clients, c Byzantine clients and d scalars,

        sqrt(min_i sum of the m - c - 2 smallest ||g_i - g_l||^2 / ((m - 2c - 1) d)) + max_i ||g_i|| / sqrt(d)

    and is halved until Krum picks a Byzantine client or it falls below 1e-5. The paper's w_Re is where a round starts:
    its local models w_Re - lr g become rows g here. `sign_from` and reference as in `fang_trimmed_mean`.
    """
    _check_sign(sign_from)

    def craft(honest: Matrix, known: Knowledge) -> Vector:
        step = -against(_direction(sign_from, honest, known))
        between, norms = squared_distances(honest), (honest * honest).sum(axis=1)
        size = _largest_step(between, norms, honest.shape[1], known.byzantine)
        while size >= SMALLEST_STEP:
            away = np.maximum(norms - 2 * size * (honest @ step) + size * size * honest.shape[1], 0.0)
            if _krum_picks_a_byzantine_row(between, away, known):
                break
            size /= 2
        return size * step

    return from_honest(craft)


def _largest_step(between: Matrix, norms: Vector, columns: int, byzantine: int) -> float:
    honest = len(between)
    near = np.sort(between, axis=1)[:, 1 : 1 + max(honest - 2, 1)].sum(axis=1).min()  # m - c - 2 of the others
    spread = float(near) / (max(honest - byzantine - 1, 1) * columns)
    return float(np.sqrt(spread) + np.sqrt(norms.max() / columns))


def _krum_picks_a_byzantine_row(between: Matrix, away: Vector, known: Knowledge) -> bool:
    """Return whether Krum picks the row that all Byzantine clients send, `away` (squared) from the honest."""
    # m - b - 1 others with the b in force, as our rule counts. With one fewer, as Blanchard et al. do, the rule would
    # often not pick the Byzantine client that the simulated one did.
    byzantine = known.byzantine
    neighbours = max(len(between) + byzantine - known.tolerated - 1, 1)
    to_byzantine = np.repeat(away[:, None], byzantine, axis=1)
    others = np.sort(np.concatenate([between, to_byzantine], axis=1), axis=1)[:, 1:]  # without the row itself
    score = others[:, :neighbours].sum(axis=1).min()
    theirs = np.sort(np.concatenate([np.zeros(byzantine - 1), away]))[:neighbours].sum()
    return bool(theirs < score)


def squared_distances(rows: Matrix) -> Matrix:
    """Return the squared distances between all rows; centred first, so that a common offset costs no digits."""
    centred = rows - mean_of(rows)
    return distances_from(centred @ centred.T)
