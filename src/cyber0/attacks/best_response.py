"""The best response to the rule in force, found by search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cyber0.attacks.knowledge import Attack, Knowledge, Matrix, Vector, against, from_honest, mean_of
from cyber0.attacks.optimised import perturbed
from cyber0.config.registry import attack
from cyber0.errors import ConfigError, Cyber0Error

STEPS = 12  # of the coarse search along a direction, each twice as far as the one before
REFINEMENTS = 6  # halvings of the interval around the best of them


@attack(needs_own=False, strength="reach")
def best_response(reach: float = 100.0) -> Attack:
    """Send what moves the decision of the rule in force furthest against the honest mean.

    The Byzantine clients minimise <decide(honest rows, Byzantine clients' rows), honest mean>, all sending the same
    row. They try

        the i-th smallest honest value of every column, for each i, and values far out on either side;
        of all these the best for each column by itself, which is optimal among them where a rule works by column;
        mean + gamma p along -mean, -sign(mean) and -sign(mean) * deviation, for rules that look at whole rows: gamma
        doubled from a small one on, then refined around the best.

    Ours. It needs `Knowledge.decide`. It is a search, so another attack can now and then do a little better.

    Args:
        reach: how far out "far out" is, in units of the honest rows' largest deviation from their mean; the plain mean
            would follow the Byzantine clients anywhere.
    """

    def craft(honest: Matrix, known: Knowledge) -> Vector:
        search = _Search(honest, known)
        decisions = [(row, search.consider(row)) for row in _column_candidates(honest, reach)]
        usable = [(row, decided) for row, decided in decisions if decided is not None]
        if usable:
            gains = np.stack([decided * against(search.mean) for _, decided in usable])
            best = gains.argmin(axis=0)
            search.consider(np.stack([row for row, _ in usable])[best, np.arange(len(best))])
        for name in ("unit", "sign", "signed_std"):
            search.along(perturbed(name, honest), reach)
        return search.best

    return from_honest(craft)


def _column_candidates(honest: Matrix, reach: float) -> Iterator[Vector]:
    mean, ordered = mean_of(honest), np.sort(honest, axis=0)
    out = reach * np.abs(honest - mean).max(axis=0)
    yield from ordered
    yield np.where(mean >= 0, ordered[0], ordered[-1])  # what full_knowledge sends
    yield from (mean - out, mean + out)


class _Search:
    """The best row so far, and what the rule makes of others."""

    def __init__(self, honest: Matrix, known: Knowledge) -> None:
        if known.decide is None:
            raise ConfigError("best_response needs to know the rule in force: give Knowledge its `decide`")
        self.honest, self.byzantine, self.decide = honest, known.byzantine, known.decide
        self.mean = mean_of(honest)
        self.best, self.lowest = self.mean, np.inf

    def consider(self, row: Vector) -> Vector | None:
        """Return the decision if all send this row, None if there would be none; remember the best row."""
        try:
            decided = self.decide(np.concatenate([self.honest, np.tile(row, (self.byzantine, 1))]))
        except Cyber0Error:  # the rule refuses to decide, and the round would be abandoned
            return None
        if not np.isfinite(decided).all():
            return None
        value = float(decided @ self.mean)
        if value < self.lowest:
            self.best, self.lowest = row, value
        return decided

    def along(self, p: Vector, reach: float) -> None:
        """Search mean + gamma p over gamma."""
        length = float(np.linalg.norm(p))
        if length == 0:
            return
        spread = float(np.linalg.norm(self.honest - self.mean, axis=1).max()) or float(np.linalg.norm(self.mean))
        unit = reach * spread / length
        gammas = unit * 0.5 ** np.arange(STEPS)
        values = [self._value(gamma, p) for gamma in gammas]
        place = int(np.argmin(values))
        gamma, value, width = float(gammas[place]), values[place], float(gammas[place]) / 2
        for _ in range(REFINEMENTS):
            for candidate in (gamma - width, gamma + width):
                found = self._value(candidate, p)
                if found < value:
                    gamma, value = candidate, found
            width /= 2

    def _value(self, gamma: float, p: Vector) -> float:
        decided = self.consider(self.mean + gamma * p)
        return np.inf if decided is None else float(decided @ self.mean)
