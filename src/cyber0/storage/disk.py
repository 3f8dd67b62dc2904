"""The disk and the clock that a ledger is handed: what it needs of them, and the real ones.

memory.py has a disk in memory for tests and simulated worlds. A file is locked by whoever writes it: one writer, any
number of readers.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from cyber0.errors import LedgerError

try:
    import fcntl
except ImportError:  # not on Windows, where writers are then not kept apart
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
"""Whether this system keeps writers apart."""

AnyPath = str | os.PathLike[str]
Clock = Callable[[], float]
"""Seconds that never go back."""
MONOTONIC: Clock = time.monotonic


class DiskFile(Protocol):
    """An open file. A failure is an OSError."""

    @property
    def closed(self) -> bool: ...

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, fewer at the end of the file."""
        ...

    def readinto(self, buffer: bytearray, /) -> int | None: ...

    def seek(self, place: int, /) -> int: ...

    def write(self, data: bytes, /) -> int:
        """Write in one piece; return how many bytes there was room for."""
        ...

    def truncate(self, size: int, /) -> int: ...

    def size(self) -> int: ...

    def sync(self) -> None:
        """Force everything written so far to the disk."""
        ...

    def lock(self) -> None:
        """Become the file's only writer, until it is closed; BlockingIOError: there is another."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Where files are."""

    def open(self, path: AnyPath, *, writable: bool = False, create: bool = False) -> DiskFile:
        """Open a file; one that is not there is an error, or is made empty if `create`."""
        ...

    def create(self, path: AnyPath, data: bytes) -> DiskFile:
        """Return a new file, open and locked, that holds `data` on the disk, all of it or nothing.

        Raises:
            FileExistsError: there is one already, which stays as it is.
        """
        ...


class OSFile(io.FileIO):
    """A file of the operating system."""

    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def sync(self) -> None:
        os.fsync(self.fileno())

    def lock(self) -> None:
        lock_handle(self.fileno())


class OSDisk:
    """The disk of this machine."""

    def open(self, path: AnyPath, *, writable: bool = False, create: bool = False) -> OSFile:
        if create:
            with contextlib.suppress(FileExistsError), OSFile(path, "x"):
                pass
        return OSFile(path, "r+" if writable else "r")

    def create(self, path: AnyPath, data: bytes) -> OSFile:
        path = Path(path)
        if path.exists():
            raise FileExistsError(errno.EEXIST, "it exists already", str(path))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        file = OSFile(temporary, "w+")
        try:
            file.lock()
            file.write(data)
            file.sync()
            try:
                os.link(temporary, path)  # unlike a rename, fails if somebody else was faster
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                os.rename(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except BaseException:
            file.close()
            raise
        return file


OS_DISK = OSDisk()


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems can't open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def lock_handle(handle: int, *, by_process: bool = False) -> None:
    """Lock an open file or folder until it is closed; BlockingIOError: somebody else has the lock.

    Args:
        handle: Of the file or folder.
        by_process: Lock it for this process, which may then open it again, and pass over a file system that has no
            locks; otherwise the lock is this handle's alone, and without it nothing is written.
    """
    if fcntl is None:
        return
    try:
        (fcntl.lockf if by_process else fcntl.flock)(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if by_process and not isinstance(error, (BlockingIOError, PermissionError)):
            return
        raise BlockingIOError(error.errno, error.strerror) from error


@contextlib.contextmanager
def locked(path: AnyPath) -> Iterator[None]:
    """Hold the lock that a run has on its ledger, or on its folder; refuse if somebody has it."""
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            lock_handle(handle)
        except BlockingIOError as error:
            raise in_use(path) from error
        yield
    finally:
        os.close(handle)


def in_use(path: AnyPath) -> LedgerError:
    """Return the error of a file or folder that somebody else writes."""
    return LedgerError(f"{path} is being written by another process or object: wait for it or close it")
