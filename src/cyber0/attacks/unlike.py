"""Attacks that hide among clients whose data differ: ours, against rules that look for outliers or for copies."""

from __future__ import annotations

import numpy as np

from cyber0.attacks.knowledge import NOISE, Attack, Knowledge, Matrix, from_honest, mean_of, victims
from cyber0.config.registry import attack
from cyber0.errors import ConfigError


@attack(needs_own=False)
def mirror() -> Attack:
    """Send the reverse of an honest client's scalars, every Byzantine client that of another, so that they cancel.

    The victims are the same in every round, evenly spaced among the honest clients. What only they know is not learned
    by any rule that treats the two of a pair alike, and within a round nothing tells the victim from its mirror image.

    Ours.
    """

    def craft(honest: Matrix, known: Knowledge) -> Matrix:
        return -victims(honest, known.byzantine)

    return from_honest(craft)


@attack(needs_own=False)
def decorrelated_ipm(cosine: float = 0.7) -> Attack:
    """Send the reversed honest mean as `ipm` does, each Byzantine client with noise of its own.

        -(u sqrt(cosine) + n_i sqrt(1 - cosine)) * (median length of the honest rows)

    u is the honest mean and n_i a random direction, both of length 1, orthogonal to each other as far as there are
    columns. So the rows are as long as honest ones, and the cosine of the angle between two of them is `cosine`: less
    than what a rule against copies looks for.

    Ours, against `reputation` and FoolsGold (Fung et al., RAID 2020).
    """
    if not 0 < cosine <= 1:
        raise ConfigError(f"cosine = {cosine!r} is impossible; it must be above 0 and at most 1")

    def craft(honest: Matrix, known: Knowledge) -> Matrix:
        mean, length = mean_of(honest), float(np.median(np.linalg.norm(honest, axis=1)))
        toward = _unit(mean)
        noise = known.generator(NOISE).standard_normal((known.byzantine, len(mean)))
        basis = [toward]
        for row in noise:  # Gram-Schmidt; once the columns are used up, only the mean is left out
            against = basis if len(basis) < len(mean) else [toward]
            for other in against:
                row -= (row @ other) * other
            basis.append(_unit(row))
        rows: Matrix = np.sqrt(cosine) * toward + np.sqrt(1.0 - cosine) * np.stack(basis[1:])
        return -length * rows

    return from_honest(craft)


def _unit(row: Matrix) -> Matrix:
    length = float(np.linalg.norm(row))
    return row / length if length > 0 else row
