"""What a federator counts: rounds, reports, refusals and bytes, for whoever watches it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """What is counted for one client, in bytes unless noted otherwise."""

    reports: int = 0
    """Reports that counted."""
    misses: int = 0
    """Rounds that ended without its report, though it was waited for."""
    payload_in: int = 0
    payload_out: int = 0
    message_in: int = 0
    message_out: int = 0
    wire_in: int = 0
    wire_out: int = 0


@dataclass
class Figures:
    """What is counted for a federation."""

    clients: list[Traffic] = field(default_factory=list)
    """Indexed by client."""
    others: Traffic = field(default_factory=Traffic)
    """Of followers, and of streams that were refused."""
    decided: int = 0
    abandoned: int = 0
    alarms: int = 0
    """Comparisons of digests that found a client outside the majority."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reports and streams that were refused, by reason."""
    seconds: dict[str, float] = field(default_factory=lambda: {"collect": 0.0, "decide": 0.0, "announce": 0.0})

    @property
    def deadline_misses(self) -> int:
        """How many reports were waited for in vain."""
        return self.total("misses")

    def total(self, name: str) -> int:
        """Return the sum of one count over all clients."""
        return sum(getattr(client, name) for client in self.clients)

    def a_round(self, kind: str) -> tuple[float, float] | None:
        """Return the bytes of that kind which a client sends and receives per report; None if they are not known."""
        reports, up, down = self.total("reports"), self.total(f"{kind}_in"), self.total(f"{kind}_out")
        return (up / reports, down / reports) if reports and up and down else None
