"""How good a defence is: as good as it is under the attack that hurts it most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from cyber0.study.cells import ACCURACY, Measure, Result, measure_of, short, shown


@dataclass(frozen=True)
class Layout:
    """Which axes of a study are defences, attacks, and the circumstances of both.

    Without such an axis it is the rule or the attack of the config.
    """

    defence: tuple[str, ...] = ()
    attack: tuple[str, ...] = ()
    circumstances: tuple[str, ...] = ()

    def defence_of(self, result: Result) -> str:
        """Return the name of the row: the rule, or whatever else defends against Byzantine clients."""
        return ", ".join(shown(result.cell.axes[name]) for name in self.defence) or result.cell.config.aggregation.rule

    def attack_of(self, result: Result) -> str:
        """Return the name of the column."""
        federation = result.cell.config.federation
        usual = federation.attack if federation.byzantine else "none"
        return ", ".join(shown(result.cell.axes[name]) for name in self.attack) or usual

    def circumstances_of(self, result: Result) -> str:
        """Return the name of the panel; empty if nothing else varies."""
        axes = result.cell.axes
        return ", ".join(f"{short(name)} = {shown(axes[name])}" for name in self.circumstances)


@dataclass(frozen=True)
class Score:
    """One defence under one attack: the final accuracies (0 to 1) of its seeds, or another measure."""

    defence: str
    attack: str
    circumstances: str
    accuracies: tuple[float, ...]
    done: int
    """How many runs finished, including those without an accuracy."""
    runs: int
    harmless: bool
    """There is no attack, or no Byzantine client."""
    measure: Measure = ACCURACY

    @property
    def mean(self) -> float | None:
        """The mean over the seeds that finished."""
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for a single seed."""
        finite = all(map(math.isfinite, self.accuracies))
        return stdev(self.accuracies) if len(self.accuracies) > 1 and finite else None

    @property
    def complete(self) -> bool:
        """Whether every seed finished."""
        return self.done == self.runs


@dataclass(frozen=True)
class WorstCase:
    """A defence under its worst attack."""

    defence: str
    circumstances: str
    worst: Score | None
    unattacked: Score | None
    complete: bool
    """Whether all its runs finished; otherwise a worse attack may still be found."""


def scores(results: Sequence[Result], layout: Layout) -> list[Score]:
    """Return one score for each combination, in the order of the grid."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    measure = measure_of(results)
    for result in results:
        key = (layout.defence_of(result), layout.attack_of(result), layout.circumstances_of(result))
        groups.setdefault(key, []).append(result)
    return [
        Score(
            *key,
            accuracies=tuple(v for v in (r.value(measure) for r in group) if v is not None),
            done=sum(r.status == "done" for r in group),
            runs=len(group),
            harmless=all(_unattacked(r) for r in group),
            measure=measure,
        )
        for key, group in groups.items()
    ]


def judge(table: Sequence[Score]) -> list[WorstCase]:
    """Return every defence's worst case, by circumstances and then from the best defence to the worst."""
    worst_cases: list[WorstCase] = []
    for circumstances in dict.fromkeys(s.circumstances for s in table):
        here = [s for s in table if s.circumstances == circumstances]
        worst_cases += ranked([_worst_case(d, circumstances, here) for d in dict.fromkeys(s.defence for s in here)])
    return worst_cases


def judge_overall(table: Sequence[Score]) -> list[WorstCase]:
    """Return every defence's worst case over all circumstances, from the best defence to the worst."""
    return ranked([_worst_case(d, "", table) for d in dict.fromkeys(s.defence for s in table)])


def ranked(worst_cases: list[WorstCase]) -> list[WorstCase]:
    """Sort from best to worst; a rule whose runs are not all done can't win because of that."""
    return sorted(worst_cases, key=lambda v: (not v.complete, -_goodness(v.worst) if v.worst else math.inf))


def worst_of(some: Sequence[Score]) -> Score | None:
    """Return the score with the worst mean; scores without an attack count only if there are no others."""
    counted = [s for s in some if not s.harmless] or some
    return min((s for s in counted if s.mean is not None), key=_goodness, default=None)


def _worst_case(defence: str, circumstances: str, table: Sequence[Score]) -> WorstCase:
    own = [s for s in table if s.defence == defence]
    peaceful = [s for s in own if s.harmless and s.mean is not None]
    unattacked = min(peaceful, key=_goodness, default=None)
    return WorstCase(defence, circumstances, worst_of(own), unattacked, all(s.complete for s in own))


def _goodness(score: Score) -> float:
    assert score.mean is not None
    return score.measure.goodness(score.mean)


def _unattacked(result: Result) -> bool:
    federation = result.cell.config.federation
    return federation.attack == "none" or federation.byzantine == 0
