"""The demo's state: which configuration is wanted, those that were tried, and the loop that trains.

One thread trains, the one that calls `run`; the threads of the server change what is wanted and read snapshots. Each
configuration has a federation of its own that starts from the same weights. One that is chosen again continues where it
stopped, so nothing that was seen is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cyber0.config.registry import ATTACKS, RULES
from cyber0.demo.data import Source
from cyber0.demo.trial import CLIENTS, Settings, Trial
from cyber0.errors import ConfigError

MOST_TRIALS = 8  # lines of the chart; the one that was left longest ago makes room
FASTEST_S = 0.03  # of a round: slow enough to be watched
ACTIONS = ("pause", "resume", "clear")


class Session:
    """What the page shows and changes.

    Args:
        source: What is learned.
        rounds: How many rounds each configuration is to have.
    """

    def __init__(self, source: Source, rounds: int) -> None:
        self._source, self._rounds = source, rounds
        self._changed = threading.Condition()
        self._wanted, self._paused, self._version = Settings(), False, 0
        self._clear = False
        self._trials: list[Trial] = []  # the one that was chosen last is at the end; of the training thread alone
        self._made = 0
        self._lines: dict[int, dict[str, Any]] = {}
        self._details: dict[str, Any] | None = None
        self._trial(self._wanted)
        self._publish()

    # For the threads of the server.

    def choose(self, given: Mapping[str, Any]) -> None:
        """Change what is wanted; refuse what can't run."""
        with self._changed:
            wanted = self._wanted.changed(given)
            wanted.config(self._rounds)  # refuses a rule that needs more clients
            self._wanted, self._paused = wanted, False
            self._version += 1
            self._changed.notify_all()

    def control(self, action: object) -> None:
        """Pause, resume, or forget all that was tried."""
        if action not in ACTIONS:
            raise ConfigError(f"action = {action!r} is not one of {', '.join(ACTIONS)}")
        with self._changed:
            self._clear = self._clear or action == "clear"
            self._paused = action == "pause"
            self._version += 1
            self._changed.notify_all()

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data."""
        with self._changed:
            return {
                "version": self._version, "paused": self._paused, "settings": asdict(self._wanted),
                "trials": [self._lines[number] for number in sorted(self._lines)], "chosen": self._details,
            }  # fmt: skip

    def constants(self) -> dict[str, Any]:
        """Return what does not change while the demo runs."""
        trial = self._trials[-1]
        return {
            "clients": CLIENTS, "rounds": self._rounds, "source": self._source.text,
            "k": trial.federator.scalars, "dimension": trial.parameters.dimension,
            "attacks": _texts(ATTACKS), "rules": _texts(offered_rules()), "most_tolerated": (CLIENTS - 1) // 2,
            "most_trials": MOST_TRIALS,
        }  # fmt: skip

    # For the thread that trains.

    def run(self) -> None:
        """Train what is wanted, until an exception, such as Ctrl-C, ends it."""
        while True:
            started = time.monotonic()
            if self.step():
                time.sleep(max(0.0, started + FASTEST_S - time.monotonic()))
            else:
                with self._changed:
                    self._changed.wait_for(self._has_work, timeout=1.0)

    def step(self) -> bool:
        """Run one round of what is wanted; return False where there is nothing to do."""
        with self._changed:
            wanted, paused, clear, self._clear = self._wanted, self._paused, self._clear, False
        if clear:
            self._trials.clear()
        trial = self._trial(wanted)
        if not paused and not trial.ended:
            trial.advance()
            worked = True
        else:
            worked = clear
        self._publish()
        return worked

    def _has_work(self) -> bool:
        chosen = self._trials[-1]
        return self._clear or self._wanted != chosen.settings or not (self._paused or chosen.ended)

    def _trial(self, settings: Settings) -> Trial:
        """Return the federation of these settings, a new one if they were not tried yet."""
        found = next((trial for trial in self._trials if trial.settings == settings), None)
        if found is None:
            found = Trial(self._made, settings, self._rounds, self._source.task)
            self._made += 1
        self._trials = [*(trial for trial in self._trials if trial is not found), found][-MOST_TRIALS:]
        return found

    def _publish(self) -> None:
        lines, details = {trial.number: trial.line() for trial in self._trials}, self._trials[-1].details()
        with self._changed:
            self._lines, self._details = lines, details


def offered_rules() -> dict[str, str]:
    """Return the rules that can be chosen: there is no client here that could be trusted."""
    return {name: text for name, text in RULES.items() if not RULES.entry(name).traits["reference"]}


def _texts(registry: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "text": registry[name]} for name in registry]
