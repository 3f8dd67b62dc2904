"""Attacks from the literature in closed form: reversed, shifted, copied, noisy and non-finite scalars."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from cyber0.attacks.knowledge import (
    NOISE,
    Attack,
    Knowledge,
    Matrix,
    Vector,
    against,
    deviation_of,
    from_honest,
    mean_of,
)
from cyber0.config.registry import ATTACKS, attack
from cyber0.errors import ConfigError

BROKEN = (np.nan, np.inf, -np.inf, 1e38)


@attack(strength="scale")
def sign_flip(scale: float = 4.0) -> Attack:
    """Send the own honest scalars reversed: -scale * g_i.

    Li et al., "RSA: Byzantine-robust stochastic aggregation methods for distributed learning from heterogeneous
    datasets", AAAI 2019, with their scale of 4. ByzFL's attack of this name sends the honest mean times -1.

    Examples:
        >>> from cyber0.attacks import Knowledge, sign_flip
        >>> honest, own = np.ones((3, 2)), np.array([[0.5, -1.0]])
        >>> known = Knowledge(honest, own, byzantine=1, invited=4, tolerated=1, round=0)
        >>> sign_flip(scale=2.0)(known)
        array([[-1.,  2.]])
    """
    return lambda known: -scale * known.own


@attack(needs_own=False, strength="epsilon")
def ipm(epsilon: float | None = None) -> Attack:
    """Manipulate the inner product: send -epsilon * (honest mean).

    The plain mean turns against the honest one when epsilon > honest / Byzantine clients (the paper's first theorem),
    the default is twice that; robust rules are rather deceived by a small epsilon, such as 0.1 or
    0.5.

    Xie et al., "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019. ByzFL's
    default of 2 slows the mean of 12 clients of which 3 are Byzantine, and does not turn it.
    """

    def craft(honest: Matrix, known: Knowledge) -> Vector:
        strength = 2 * len(honest) / known.byzantine if epsilon is None else epsilon
        return -strength * mean_of(honest)

    return from_honest(craft)


@attack(needs_own=False, strength="z")
def alie(z: float | None = None) -> Attack:
    """A little is enough: send mean - z * sign(mean) * deviation, all of it of the honest rows.

    The strength, unless given, is the largest that lets the Byzantine clients and the s honest rows beyond them be a
    majority:

        z = Phi^-1((n - f - s) / (n - f)),   s = floor(n / 2 + 1) - f

    with n invited and f Byzantine clients; at least 0, and finite also where the Byzantine clients are a majority by
    themselves. It grows with their share: 0.14 for 3 of 12, 1.43 for 24 of 50; ByzFL's default is 1.5 for any. The side
    is the one against the mean in each column.

    Baruch et al., "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019.
    """

    def craft(honest: Matrix, known: Knowledge) -> Vector:
        mean = mean_of(honest)
        strength = alie_strength(len(honest) + known.byzantine, known.byzantine) if z is None else z
        return mean - strength * against(mean) * deviation_of(honest)

    return from_honest(craft)


def alie_strength(clients: int, byzantine: int) -> float:
    """Return the z of `alie` for so many clients, Byzantine clients included."""
    honest = clients - byzantine
    supporters = clients // 2 + 1 - byzantine
    share = min((honest - supporters) / honest, 1 - 0.5 / honest)
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


@attack(needs_own=False)
def mimic() -> Attack:
    """Copy one honest client, so that it counts for many: the one furthest out along the top principal direction.

        i* = argmax_i |<g_i - mean, v>|,   v the direction in which the honest rows vary most

    Within a round; the original keeps v and i* over the rounds of a warm-up.

    Karimireddy et al., "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022.
    """

    def craft(honest: Matrix, known: Knowledge) -> Vector:
        centred = honest - mean_of(honest)
        # The projections on v are, up to a factor, the top eigenvector of the rows' inner products: m x m, not d x d.
        projections = np.linalg.eigh(centred @ centred.T)[1][:, -1]
        chosen: Vector = honest[np.argmax(np.abs(projections))]
        return chosen

    return from_honest(craft)


@attack(needs_own=False, strength="scale")
def gaussian(scale: float = 200.0) -> Attack:
    """Send noise: scale * N(0, I), drawn anew by every Byzantine client.

    Blanchard et al., "Machine learning with adversaries: Byzantine tolerant gradient descent", NeurIPS 2017, with their
    mean of 0 and deviation of 200.
    """

    def craft(honest: Matrix, known: Knowledge) -> Matrix:
        return scale * known.generator(NOISE).standard_normal((known.byzantine, honest.shape[1]))

    return from_honest(craft)


@attack(needs_own=False)
def nonfinite() -> Attack:
    """Send rows of NaN, inf, -inf and 1e38, in turn from Byzantine client to Byzantine client and from round to round.

    What is not a number must be rejected at the door; 1e38 is one, and passes it.
    """

    def craft(known: Knowledge) -> Matrix:
        kinds = (np.arange(known.byzantine) + known.round) % len(BROKEN)
        return np.tile(np.array(BROKEN)[kinds, None], (1, known.honest.shape[1]))

    return craft


@attack
def sleeper(after: int = 100, attack: str = "full_knowledge") -> Attack:
    """Act honestly for the first rounds, then attack: against rules that judge clients by their past.

    Args:
        after: the round in which the attack starts.
        attack: what is done from then on, by its name, with the options it has by default.
    """
    if after < 0:
        raise ConfigError(f"after = {after} is impossible; it must be at least 0")
    entry = ATTACKS.entry(attack)
    if entry.own or entry.traits["flips_labels"]:
        raise ConfigError(
            f"attack = {attack!r} must be a built-in attack that does not flip labels, which would start in round 0; "
            "name another"
        )
    later: Attack = ATTACKS.make(attack)
    return lambda known: known.own if known.round < after else later(known)
