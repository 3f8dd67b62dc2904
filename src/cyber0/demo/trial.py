"""One configuration that was tried: its settings, and its federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.config.registry import ATTACKS, RULES
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Record
from cyber0.protocol.messages import Announcement
from cyber0.tasks.mnist import Mnist

CLIENTS = 12
EVALUATE_EVERY = 4


@dataclass(frozen=True)
class Settings:
    """What can be changed on the page."""

    byzantine: tuple[int, ...] = (2, 5, 9)
    attack: str = "sign_flip"
    rule: str = "trimmed_mean"
    tolerated: int = 3
    """b, how many Byzantine clients the rule guards against."""

    def changed(self, given: Mapping[str, Any]) -> Settings:
        """Return these settings with those of a request in their place; refuse what makes no sense."""
        unknown = sorted(set(given) - set(asdict(self)))
        if unknown:
            raise ConfigError(f"{unknown[0]} can't be set; only {', '.join(asdict(self))} can")
        found = asdict(self) | dict(given)
        who = found["byzantine"]
        if not isinstance(who, (list, tuple)) or any(type(i) is not int or not 0 <= i < CLIENTS for i in who):
            raise ConfigError(f"byzantine = {who!r} must be a list of clients, from 0 to {CLIENTS - 1}")
        for name, known in (("attack", ATTACKS), ("rule", RULES)):  # no paths: a page must not have files imported
            if found[name] not in list(known):
                raise ConfigError(f"{name} = {found[name]!r} is not one of {', '.join(known)}")
        most = (CLIENTS - 1) // 2
        if type(found["tolerated"]) is not int or not 0 <= found["tolerated"] <= most:
            raise ConfigError(f"tolerated = {found['tolerated']!r} must be a whole number from 0 to {most}")
        if len(set(who)) == CLIENTS:
            raise ConfigError("all clients lie: leave at least one of them honest")
        return Settings(tuple(sorted(set(who))), found["attack"], found["rule"], found["tolerated"])

    def config(self, rounds: int) -> Config:
        """Return the settings of a run, by default those of `cyber0 run`."""
        return Config.from_dict({
            "rounds": rounds,
            "federation": {"clients": CLIENTS, "byzantine": len(self.byzantine), "attack": self.attack},
            "aggregation": {"rule": self.rule, "beta": self.tolerated / CLIENTS},
        })  # fmt: skip

    @property
    def name(self) -> str:
        """What to call it beside a line of the chart."""
        rule, attack = self.rule.replace("_", " "), self.attack.replace("_", " ")
        count = len(self.byzantine)
        lies = f"{attack} by {', '.join(map(str, self.byzantine))}" if count else "nobody lies"
        return f"{rule}, b = {self.tolerated}; {lies}"


class Trial(Simulation):
    """A federation whose reports can be looked at.

    Args:
        number: How many were tried before it.
        settings: Of the page.
        rounds: How many it is to have.
        task: What is learned.
    """

    def __init__(self, number: int, settings: Settings, rounds: int, task: Mnist) -> None:
        super().__init__(settings.config(rounds), task=task, byzantine=settings.byzantine)
        self.number, self.settings = number, settings
        self.curve: list[tuple[int, float]] = []
        self.error = ""
        self.last: dict[str, Any] | None = None
        self.model_digest = ""
        self.reports = np.zeros((CLIENTS, self.federator.scalars), np.float32)
        self._note_evaluation()

    @property
    def ended(self) -> bool:
        """Whether there is no round left to run."""
        return bool(self.error) or self.round >= self.config.rounds

    def advance(self) -> None:
        """Run one round, and evaluate where it is due; an error that a user can mend ends it."""
        try:
            record = self.run_round()
        except Cyber0Error as error:
            self.error = str(error)
            return
        self.last = self._first_direction(record)
        if self.round % EVALUATE_EVERY == 0 or self.ended:
            self._note_evaluation()

    def measure(self, announcement: Announcement, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        """Measure, and remember what these clients send; those who lie are corrected by `byzantine_reports`."""
        found = super().measure(announcement, clients)
        self.reports[clients] = self._as_sent(found)
        return found

    def byzantine_reports(
        self, honest: NDArray[np.int64], byzantine: NDArray[np.int64], *given: Any, **named: Any
    ) -> NDArray[np.float32]:
        """Return what these Byzantine clients send, and remember it."""
        found = super().byzantine_reports(honest, byzantine, *given, **named)
        self.reports[byzantine] = found
        return found

    def _first_direction(self, record: Record) -> dict[str, Any]:
        """Return what each client sent along the round's first direction, who was left out, and what was decided."""
        scalars = self.reports[:, 0].astype(np.float64)
        whole_rows = np.isin(record.trimmed, (0, self.federator.scalars)).all()
        if record.values is None or whole_rows:  # rules that choose among clients, not among scalars
            excluded = record.trimmed > 0
        else:
            usable = np.isfinite(self.reports).all(axis=1)
            excluded = np.zeros(CLIENTS, np.bool_)
            excluded[usable] = self.federator.rule.decide(self.reports[usable, :1], CLIENTS, record.round).excluded > 0
        return {
            "scalars": [float(v) if np.isfinite(v) else None for v in scalars],
            "excluded": (excluded | ~record.reported).tolist(),
            "decided": None if record.values is None else float(record.values[0]),
        }

    def _note_evaluation(self) -> None:
        self.curve.append((self.round, round(self.evaluate().accuracy, 4)))
        self.model_digest = self.parameters.digest()

    def line(self) -> dict[str, Any]:
        """Return what the chart shows of it."""
        rounds, accuracy = zip(*self.curve, strict=True)
        return {
            "number": self.number, "name": self.settings.name, "settings": asdict(self.settings), "round": self.round,
            "rounds": rounds, "accuracy": accuracy,
        }  # fmt: skip

    def details(self) -> dict[str, Any]:
        """Return what is shown of the one that is chosen."""
        sent, trimmed = self.federator.sent, self.federator.trimmed
        return {
            "number": self.number, "round": self.round, "ended": self.ended, "error": self.error, "last": self.last,
            "sent": sent.tolist(), "trimmed": trimmed.tolist(), "digest": self.model_digest,
            "evaluated": self.curve[-1][0], "accuracy": self.curve[-1][1], "abandoned": self.round - self.decided,
        }  # fmt: skip
