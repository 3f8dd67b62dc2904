"""The best response to the rule in force, found by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from cyber0.attacks.field import alie, ipm, mimic, sign_flip
from cyber0.attacks.knowledge import Attack, Knowledge, Matrix, Vector, against, from_honest, mean_of
from cyber0.attacks.optimised import fang_krum, fang_trimmed_mean, min_max, min_sum, perturbed
from cyber0.attacks.paper import full_knowledge
from cyber0.attacks.unlike import decorrelated_ipm, mirror
from cyber0.config.registry import attack
from cyber0.errors import ConfigError, Cyber0Error

STEPS = 12  # of the coarse search along a direction, each twice as far as the one before
REST = 10  # rounds of good behaviour before an attack
REFINEMENTS = 6  # halvings of the interval around the best of them


@attack(needs_own=False, plans=True, strength="reach")
def best_response(reach: float = 100.0) -> Attack:
    """Send what moves the decision of the rule in force furthest against the honest mean.

    The Byzantine clients minimise <step(decide(honest rows, Byzantine clients' rows)), honest mean>. `step` is what the
    optimizer makes of a decision: where it normalises, a smaller decision does no harm, and only a turned one does.
    They try

        what full_knowledge, the attacks of Fang et al., alie, mimic, ipm, min_max and min_sum would send;
        the i-th smallest honest value of every column, for each i, and values far out on either side;
        of all these the best for each column by itself, which is optimal among them where a rule works by column;
        mean + gamma p along -mean, -sign(mean) and -sign(mean) * deviation, for rules that look at whole rows: gamma
        doubled from a small one on, then refined around the best.

    Except in the first line, all send the same row. Ours. It needs `Knowledge.decide`. Within a round none of these
    attacks does more harm by that measure.

    Where the rule has a history, what does most harm in a round may cost the Byzantine clients their reputation. They
    then plan: before rounds 5, 10, 20, 40, 60, ... they play up to 20 rounds again on a copy of what the rule
    remembers, with the honest reports of those rounds and each of the strategies

        mimic; the search above; full_knowledge; fang_krum; alie; min_max and min_sum with "signed_std"; mirror;
        sign_flip, in the rehearsal on the rows of honest clients, each that of another;
        ipm with epsilon 0.1, 0.5, 1 and 2; decorrelated_ipm with cosine 0.7 and 0.4;
        the best of these after 10 rounds of mimic

    and follow, until the next plan, the one under which the honest clients' mean loss falls least, to first order.
    Until the first plan they flip signs. That a client may be expelled (federation.expel) is not foreseen.

    Args:
        reach: how far out "far out" is, in units of the honest rows' largest deviation from their mean; the plain mean
            would follow the Byzantine clients anywhere.
    """

    def craft(honest: Matrix, known: Knowledge) -> Matrix:
        search = _Search(honest, known)
        for other in _others():
            search.consider(other(known))
        decisions = [(row, search.consider(row)) for row in _column_candidates(honest, reach)]
        usable = [(row, decided) for row, decided in decisions if decided is not None]
        if usable:
            gains = np.stack([decided * against(search.mean) for _, decided in usable])
            best = gains.argmin(axis=0)
            search.consider(np.stack([row for row, _ in usable])[best, np.arange(len(best))])
        for name in ("unit", "sign", "signed_std"):
            search.along(perturbed(name, honest), reach)
        return search.best

    return _planned(from_honest(craft))


def _planned(search: Attack) -> Attack:
    """Return an attack that follows the best strategy in rehearsals, and the search where there are none."""
    plan: dict[tuple[int, int], Attack] = {}

    def send(known: Knowledge) -> Matrix:
        if known.rehearse is None:
            return search(known)
        if known.rehearsed == 0:
            return sign_flip()(known)
        key = known.seed, known.rehearsed
        if key not in plan:
            plan.clear()
            plan[key] = _best(known.rehearse, search)
        return plan[key](replace(known, round=known.round - known.rehearsed))

    return send


def _best(rehearse: Callable[[Attack], float], search: Attack) -> Attack:
    """Return the strategy under which the honest loss falls least; the first of several."""
    strategies = [mimic(), search, *_strategies()]
    falls = [rehearse(strategy) for strategy in strategies]
    best = int(np.argmin(falls))
    rested = _after(REST, strategies[best])
    return rested if rehearse(rested) < falls[best] else strategies[best]


def _strategies() -> Iterator[Attack]:
    yield from (full_knowledge(), fang_krum(), alie(), min_max("signed_std"), min_sum("signed_std"), mirror())
    yield from (ipm(epsilon) for epsilon in (0.1, 0.5, 1.0, 2.0))
    yield from (decorrelated_ipm(cosine) for cosine in (0.7, 0.4))
    yield sign_flip()


def _after(rounds: int, attack: Attack) -> Attack:
    resting = mimic()
    return lambda known: (resting if known.round < rounds else attack)(known)


def _column_candidates(honest: Matrix, reach: float) -> Iterator[Vector]:
    mean, ordered = mean_of(honest), np.sort(honest, axis=0)
    out = reach * np.abs(honest - mean).max(axis=0)
    yield from ordered
    yield np.where(mean >= 0, ordered[0], ordered[-1])  # what full_knowledge sends
    yield from (mean - out, mean + out)


def _others() -> Iterator[Attack]:
    """Yield other attacks that look at the honest rows alone and work against their mean."""
    yield from (full_knowledge(), full_knowledge("literal"), fang_trimmed_mean(), fang_krum(), alie(), mimic())
    yield from (ipm(epsilon) for epsilon in (None, 0.1, 0.5, 1.0, 2.0))
    yield from (bound(name) for bound in (min_max, min_sum) for name in ("std", "unit", "sign", "signed_std"))


class _Search:
    """The best rows so far, and what the rule makes of others."""

    def __init__(self, honest: Matrix, known: Knowledge) -> None:
        if known.decide is None:
            raise ConfigError("best_response needs to know the rule in force: give Knowledge its `decide`")
        self.honest, self.byzantine, self.decide, self.step = honest, known.byzantine, known.decide, known.step
        self.mean = mean_of(honest)
        self.best, self.lowest = self._rows(self.mean), np.inf

    def _rows(self, rows: Matrix) -> Matrix:
        return np.broadcast_to(rows, (self.byzantine, self.honest.shape[1]))

    def consider(self, rows: Matrix) -> Vector | None:
        """Return the decision if they send these rows, or all of them this one; None if there would be none."""
        try:
            decided = self.decide(np.concatenate([self.honest, self._rows(rows)]))
        except Cyber0Error:  # the rule refuses to decide, and the round would be abandoned
            return None
        if not np.isfinite(decided).all():
            return None
        value = self._gain(decided)
        if value < self.lowest:
            self.best, self.lowest = self._rows(rows), value
        return decided

    def _gain(self, decided: Vector) -> float:
        """Return how much the honest loss falls by a decision, to first order."""
        return float((decided if self.step is None else self.step(decided)) @ self.mean)

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
        return np.inf if decided is None else self._gain(decided)
