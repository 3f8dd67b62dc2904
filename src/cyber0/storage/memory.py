"""A disk in memory: for ledgers without a file, tests, and simulated worlds in which the power fails.

disk = MemoryDisk()
ledger = Ledger.create("ledger.bin", header, disk=disk, durability="always")
disk.room = 100            # bytes that still fit: what is written beyond them is lost, as on a full disk
disk.cut_power(kept=7)     # what was not synced is gone, but for 7 bytes of it; nothing is open any more
"""

from __future__ import annotations

import errno
import io
import os

from cyber0.storage.disk import AnyPath


class _Content:
    """What a file holds, however often it is open."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = len(data)
        """How many of the bytes a power cut leaves."""
        self.writer: MemoryFile | None = None


class MemoryDisk:
    """Files by name, with what was forced to the disk apart from what was only written."""

    def __init__(self) -> None:
        self.room: int | None = None
        """How many bytes can still be written; None: any number."""
        self._files: dict[str, _Content] = {}

    def open(self, path: AnyPath, *, writable: bool = False, create: bool = False) -> MemoryFile:
        name = os.fspath(path)
        if name not in self._files:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            self._files[name] = _Content()
        return MemoryFile(self, self._files[name], writable=writable)

    def create(self, path: AnyPath, data: bytes) -> MemoryFile:
        name = os.fspath(path)
        if name in self._files:
            raise FileExistsError(errno.EEXIST, "it exists already", name)
        self._files[name] = _Content(data)
        file = MemoryFile(self, self._files[name], writable=True)
        file.lock()
        return file

    def contents(self, path: AnyPath) -> bytes:
        """Return what a file holds."""
        return bytes(self._files[os.fspath(path)].data)

    def cut_power(self, kept: int = 0) -> None:
        """Lose what was not synced, but for the first `kept` bytes of it in each file; let go of all locks."""
        for content in self._files.values():
            del content.data[content.synced + kept :]
            content.synced, content.writer = len(content.data), None


class MemoryFile(io.RawIOBase):
    """An open file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, content: _Content, *, writable: bool) -> None:
        self._disk, self._content, self._writable, self._place = disk, content, writable, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return self._writable

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        end = len(self._content.data) if size < 0 else self._place + size
        data = bytes(self._content.data[self._place : end])
        self._place += len(data)
        return data

    def readinto(self, buffer: bytearray, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._content.data)}[whence]
        self._place = base + place
        return self._place

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        room = len(data) if self._disk.room is None else min(len(data), self._disk.room)
        self._content.data[self._place : self._place + room] = data[:room]
        self._content.synced = min(self._content.synced, self._place)
        self._place += room
        if self._disk.room is not None:
            self._disk.room -= room
        return room

    def truncate(self, size: int | None = None, /) -> int:
        size = self._place if size is None else size
        del self._content.data[size:]
        self._content.synced = min(self._content.synced, size)
        return size

    def size(self) -> int:
        return len(self._content.data)

    def sync(self) -> None:
        self._content.synced = len(self._content.data)

    def lock(self) -> None:
        if self._content.writer not in (None, self):
            raise BlockingIOError(errno.EWOULDBLOCK, "another writer has it")
        self._content.writer = self

    def close(self) -> None:
        if self._content.writer is self:
            self._content.writer = None
        super().close()
