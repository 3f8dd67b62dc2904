"""What a federator does every second beside its rounds: revocations, expired certificates, figures, memory."""

from __future__ import annotations

import asyncio
import errno
import math
import stat
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyber0.errors import ConfigError, Cyber0Error, DataError
from cyber0.kernels.memory import return_freed_memory
from cyber0.serve.admission import read_revoked, unknown_revocations
from cyber0.serve.hub import Hub
from cyber0.serve.identity import expiry_warning
from cyber0.serve.operations import EventLog, described
from cyber0.serve.stats import ServerStats
from cyber0.serve.tls import Credentials
from cyber0.storage.disk import Clock

POLL_SECONDS = 1.0
_SAVE_SECONDS = 5.0
# Between returns of memory that handshakes and streams have freed to the system; one takes milliseconds.
_TRIM_SECONDS = 10.0
_DAY_SECONDS = 86_400.0
_LONGEST_LIST = 16 << 20  # bytes of revoked.txt


class RevocationFile:
    """revoked.txt: the list of who is refused, read again whenever it changes.

    A list that can't be read leaves the last one in force. So does a file that was deleted: a mistake with files must
    not let a revoked client in; an empty file revokes nobody.
    """

    def __init__(self, path: Path, hub: Hub, log: EventLog) -> None:
        self._path, self._hub, self._log = path, hub, log
        self._read_state: tuple[int, ...] | None = None

    def start(self) -> None:
        """Read the list if there is one; refuse to start with one that can't be read."""
        try:
            self._read()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{self._path} can't be read: {error.strerror}; make it readable to this user, because without it "
                "revoked clients would be let in"
            ) from None

    def poll(self) -> None:
        """Read the list if it has changed; raises `DataError` if that fails, and then tries again at the next call."""
        kept = "the list read last still applies"
        try:
            self._read()
        except FileNotFoundError:
            self._read_state = None
            if self._hub.revoked:
                raise DataError(
                    f"{self._path} is gone: {kept} until the federator is restarted; to revoke nobody, make it empty"
                ) from None
        except OSError as error:
            self._read_state = None
            raise DataError(f"{self._path} can't be read: {error.strerror}; {kept}") from None

    def _read(self) -> None:
        status = self._path.stat()
        state = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        if state == self._read_state:
            return
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # a pipe would halt all rounds
            raise OSError(errno.EINVAL, "Not a file")
        if status.st_size > _LONGEST_LIST:
            raise OSError(errno.EFBIG, f"It has more than {_LONGEST_LIST >> 20} MB")
        revoked = read_revoked(self._path.read_text(encoding="utf-8-sig", errors="replace"))
        self._read_state = state  # of before: what is written meanwhile is read next time
        added = revoked - self._hub.revoked
        self._hub.revoke(revoked)
        for entry in sorted(unknown_revocations(added, self._hub.federator.clients)):
            self._log("warning", text=f"{self._path}: {entry!r} revokes nobody; it is neither a client's number nor the"
                      " SHA-256 fingerprint of a certificate (64 hexadecimal digits)")  # fmt: skip


@dataclass
class Chore:
    """Something that is done again and again, however often it fails."""

    name: str
    work: Callable[[], None]
    every: float = 0.0
    """Seconds between two times; 0: at every poll."""
    due: float = -math.inf
    failing: str = ""
    """Why it failed last time; empty if it did not."""


class Chores:
    """Does each chore when it is due. One that fails is logged, once per reason, and tried again; the others go on."""

    def __init__(self, chores: list[Chore], log: EventLog, clock: Clock) -> None:
        self._chores, self._log, self._clock = chores, log, clock

    async def run(self) -> None:
        """Do them until cancelled."""
        while True:
            self.do()
            await asyncio.sleep(POLL_SECONDS)

    def do(self) -> None:
        """Do those that are due."""
        now = self._clock()
        for chore in self._chores:
            if now < chore.due:
                continue
            chore.due = now + chore.every
            try:
                chore.work()
            except Exception as error:  # broad: whatever fails here must not end the others
                if (text := described(error)) != chore.failing:
                    chore.failing = text
                    if isinstance(error, Cyber0Error):
                        self._log("warning", text=text)
                    else:
                        self._log("task_failed", task=chore.name, error=text)
            else:
                if chore.failing:
                    self._log("task_recovered", task=chore.name)
                chore.failing = ""


def chores_of(
    hub: Hub,
    stats: ServerStats,
    revocations: RevocationFile,
    credentials: Credentials | None,
    log: EventLog,
    clock: Clock,
    wall_clock: Clock,
) -> Chores:
    """Return a federator's chores.

    Certificates expire by `wall_clock` (seconds since 1970), as TLS judges them: who is cut off could not connect anew.
    """

    def save() -> None:
        try:
            stats.save()
        except OSError as error:
            raise DataError(f"figures can't be written: {error}") from None

    def warn_of_expiry() -> None:
        if credentials is not None and (warning := expiry_warning(credentials, wall_clock())):
            raise DataError(warning)

    return Chores(
        [
            Chore("revocations", revocations.poll),
            Chore("expiry", lambda: hub.expire(wall_clock())),
            Chore("own certificate", warn_of_expiry, _DAY_SECONDS),
            Chore("traffic", hub.count_wire),
            Chore("figures", save, _SAVE_SECONDS),  # at once: served.json says whose folder this is
            Chore("memory", return_freed_memory, _TRIM_SECONDS),
        ],
        log,
        clock,
    )


def watched(
    name: str, work: Coroutine[Any, Any, None], log: EventLog, on_end: Callable[[], None]
) -> asyncio.Task[None]:
    """Run something in the background; log the error that ends it, and call `on_end` when it ends by itself."""

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log("task_failed", task=name, error=described(error))
        on_end()

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task
