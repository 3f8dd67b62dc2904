"""What a run's header and records say of its decisions: the learning rate of each round, and how large a scalar may be.

A replay takes the learning rate of each record as it is. Participants and `cyber0 verify` compare it with the one that
was agreed on, so that a federator can't choose another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cyber0.config import doors
from cyber0.config.registry import SCHEDULES
from cyber0.config.schedules import FREE, learning_rate
from cyber0.config.schema import ServeConfig
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger.header import Header
from cyber0.ledger.record import Decision, Record

# As a part of the rate, or of the header's lr where the schedule has lowered it to almost nothing. Platforms differ in
# the last bits of a cosine, and 1 + cos(x) loses the others.
TOLERANCE = 1e-9

_INDEPENDENT_OF_ROUNDS = ("constant",)


class AgreedRates:
    """The learning rate of each round, as the header and the records determine it.

    Args:
        header: What was agreed on.
        schedule: Where the run's schedule is, if it is not built in: file.py:name. A header never makes anybody import
            code, so without it the rates of such a run can't be computed.

    Raises:
        ConfigError: `schedule` can't be loaded, or the run's own is built in.
    """

    def __init__(self, header: Header, schedule: str = "") -> None:
        self._header, named = header, header.lr_schedule
        self._options = _section(header, "method").get("lr_options", {})
        self._schedule = named if named in SCHEDULES else ""
        self._rounds = -1
        self._lr_at: Callable[[int], float] | None = None
        if schedule:
            self._schedule = _checked_path(schedule, named)
            self.of_run(max(header.rounds, 1))  # imported now, before anything depends on it

    @property
    def free(self) -> bool:
        """Whether nothing was agreed on: the run is that of a `ZeroOrder`, whose user sets the learning rate."""
        return self._header.lr_schedule == FREE or not self._header.settings

    @property
    def unknown(self) -> str:
        """Why the rates can't be computed; empty if they can."""
        named = self._header.lr_schedule
        if not self._schedule:
            return f"method.lr_schedule = {named!r} is not built in: name your copy of it with --schedule FILE.py:NAME"
        if self._header.format == 1 and self._schedule not in _INDEPENDENT_OF_ROUNDS:
            return f"method.lr_schedule = {named!r} depends on the number of rounds, which format 1 does not record"
        return ""

    def of_run(self, rounds: int) -> Callable[[int], float]:
        """Return the learning rate as a function of the round, in a run of so many rounds."""
        if not self._schedule:
            raise ConfigError(f"the learning rates are not known: {self.unknown}")
        if self._lr_at is None or rounds != self._rounds:
            if not isinstance(self._options, Mapping):
                raise LedgerError(f"method.lr_options = {self._options!r} in a ledger's header must be a table")
            lr_at = learning_rate(self._header.lr, self._schedule, rounds, self._options)
            self._rounds, self._lr_at = rounds, lr_at
        return self._lr_at

    def fault(self, decision: Decision | Record) -> str:
        """Return what is wrong with the learning rate of a decision; empty if nothing is.

        It is called with all decisions in order: a rate that depends on earlier ones can be computed here.
        """
        lr = decision.lr
        if self.free:
            return ""
        if self.unknown:
            fine = math.isfinite(lr) and lr >= 0
            return "" if fine else f"the learning rate is {lr!r}, and a finite one of at least 0 was agreed on"
        agreed = self._agreed(decision)
        if math.isclose(lr, agreed, rel_tol=TOLERANCE, abs_tol=TOLERANCE * self._header.lr):
            return ""
        return (
            f"the learning rate is {lr!r}, and {agreed!r} was agreed on (lr = {self._header.lr!r} with the schedule "
            f"{self._header.lr_schedule!r} over {decision.rounds} rounds)"
        )

    def share(self, decision: Decision | Record, rounds: int) -> float:
        """Return which part a decision's rate is of that in a run of so many rounds; 1 if no less, or not known."""
        if self.free or self.unknown or decision.rounds == rounds:
            return 1.0
        reference = learning_rate(self._header.lr, self._schedule, rounds, self._options)(decision.round)
        return min(1.0, decision.lr / reference) if reference > 0 else 1.0

    def _agreed(self, decision: Decision | Record) -> float:
        """Return the agreed rate of a decision, over as many rounds as its record says that the run is to have."""
        lr_at = self.of_run(decision.rounds)
        return doors.called(f"the schedule {self._schedule} in round {decision.round}", lambda: lr_at(decision.round))


def scalar_limit(header: Header) -> float:
    """Return the largest magnitude of a decided scalar; a run that was never served, without an id, has no limit."""
    if not header.id:
        return math.inf
    stated = _section(header, "serve").get("scalar_limit", ServeConfig.scalar_limit)
    if isinstance(stated, bool) or not isinstance(stated, (int, float)) or not 0 < stated < math.inf:
        raise LedgerError(f"serve.scalar_limit = {stated!r} in a ledger's header must be a finite number above 0")
    return float(stated)


def scalar_fault(decision: Decision | Record, limit: float) -> str:
    """Return what is wrong with the scalars of a decision; empty if nothing is."""
    largest = 0.0 if decision.values is None else float(np.abs(decision.values).max(initial=0.0))
    return "" if largest <= limit else f"a scalar has the magnitude {largest:g}, and at most {limit:g} was agreed on"


def _section(header: Header, name: str) -> Mapping[str, Any]:
    found = header.settings.get(name, {})
    return found if isinstance(found, dict) else {}


def _checked_path(given: str, named: str) -> str:
    if not doors.is_path(given):
        raise ConfigError(f"--schedule {given} must be a path, file.py:name or package.module:name")
    if named in SCHEDULES or named == FREE:
        raise ConfigError(
            f"--schedule {given} is for schedules that are not built in, and this run's is {named!r}: leave it out"
        )
    return doors.located(given, Path.cwd())
