"""What one certificate may take of a federator: streams at a time, bytes per second, lines in the log.

    usage = Usage()
    usage.enter(key)                            # False: it has as many streams as it may have
    usage.delay(key, sent, ledger.size, now)    # how long it has to wait before it is sent more
    usage.leave(key)

A key is the fingerprint of a certificate. No I/O, and no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from cyber0.serve.operations import EventLog
from cyber0.storage.disk import Clock

# A participant needs one stream, and a second while the first is found to be dead; several processes may follow with
# one certificate.
MAX_STREAMS = 4
BYTES_PER_SECOND = 256 << 10
FREE_BYTES = 4 << 20  # before a certificate has to wait
FREE_READINGS = 2  # of the whole ledger, besides
CALL_BYTES = 16 << 10  # that a call counts as, at least: what it costs to answer

MAX_LINES = 20  # of the log, for one certificate in so many seconds
WINDOW_SECONDS = 60.0


@dataclass(slots=True)
class _Account:
    streams: int = 0
    spent: float = 0.0
    """Bytes that it was sent and that time has not made up for."""
    at: float = 0.0


class Usage:
    """Counts what each certificate uses, and forgets those that are gone."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._forgot_at = 0.0

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, key: str) -> bool:
        """Count one more stream; return False, and count nothing, if there are as many as there may be."""
        account = self._accounts.setdefault(key, _Account())
        if account.streams >= MAX_STREAMS:
            return False
        account.streams += 1
        return True

    def leave(self, key: str) -> None:
        """Count one stream less."""
        self._accounts[key].streams -= 1

    def delay(self, key: str, amount: int, ledger_bytes: int, now: float) -> float:
        """Count bytes that are sent, and return how many seconds to wait before more are.

        Reading the ledger as it is now `FREE_READINGS` times costs no time; beyond that a certificate gets
        `BYTES_PER_SECOND`, over all of its streams.
        """
        self._forget(now)
        account = self._accounts.setdefault(key, _Account(at=now))
        account.spent = _left(account, now) + amount
        account.at = now
        return max(0.0, (account.spent - FREE_BYTES - FREE_READINGS * ledger_bytes) / BYTES_PER_SECOND)

    def _forget(self, now: float) -> None:
        """Drop, once a minute, whoever has no stream and nothing to make up for."""
        if now - self._forgot_at < WINDOW_SECONDS:
            return
        self._forgot_at = now
        self._accounts = {key: a for key, a in self._accounts.items() if a.streams or _left(a, now)}


def _left(account: _Account, now: float) -> float:
    return max(0.0, account.spent - BYTES_PER_SECOND * (now - account.at))


@dataclass(slots=True)
class _Window:
    end: float
    lines: int = 0


class LimitedLog:
    """Logs what participants do, `MAX_LINES` a minute for each, and afterwards how many lines were left out."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._windows: dict[str, _Window] = {}  # by certificate, in the order in which they end

    def __call__(self, key: str, event: str, **details: object) -> None:
        """Log an event of the participant with this key, unless there were too many of them."""
        now = self._clock()
        self._close(now)
        window = self._windows.setdefault(key, _Window(now + WINDOW_SECONDS))
        window.lines += 1
        if window.lines <= MAX_LINES:
            self._log(event, **details)

    def close(self) -> None:
        """Log how many lines are left out so far."""
        self._close(float("inf"))

    def _close(self, now: float) -> None:
        while self._windows and self._windows[key := next(iter(self._windows))].end <= now:
            left_out = self._windows.pop(key).lines - MAX_LINES
            if left_out > 0:
                self._log("suppressed", participant=key[:16], lines=left_out, seconds=WINDOW_SECONDS)
