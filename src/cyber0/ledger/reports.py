"""Every accepted report of a run, kept beside the ledger so that anybody can compute its decisions again.

    file     magic | entry | entry | ...
    entry    u32 round | u32 count | count x n x float32 | u32 CRC-32

An entry is written before the ledger's record of its round, rows in the order of the clients that the record says have
reported. What the ledger does not have yet is cut off when the file is opened for writing.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import LedgerError
from cyber0.ledger.header import WORD

MAGIC = b"cyber0 reports 1\n"
_HEAD = struct.Struct("<II")


class Reports:
    """The reports of a run, as a file.

    Args:
        path: The file; made if it is not there and `rounds` is given.
        numbers: n, how many numbers a report has.
        rounds: Open for writing, after so many rounds of the ledger; None: for reading.
    """

    def __init__(self, path: str | os.PathLike[str], numbers: int, *, rounds: int | None = None) -> None:
        self._name, self._numbers = os.fspath(path), numbers
        writable = rounds is not None
        try:
            self._file = io.FileIO(path, "a+" if writable else "r")
        except OSError as error:
            raise LedgerError(f"can't open the reports {self._name}: {error.strerror}") from error
        self._end = self._last = len(MAGIC)
        if writable and not os.fstat(self._file.fileno()).st_size:
            self._write(MAGIC)
        self._file.seek(0)
        if self._file.read(len(MAGIC)) != MAGIC:
            raise LedgerError(f"{self._name} is not a file of reports")
        if rounds is not None:
            for number, _ in self:
                if number >= rounds:
                    break
                self._end = self._last = self._file.tell()
            self._file.truncate(self._end)

    def append(self, round: int, rows: NDArray[np.float32]) -> None:
        """Write the reports of a round; one that is written again, as its record could not be, replaces the first."""
        body = _HEAD.pack(round, len(rows)) + rows.astype("<f4", copy=False).tobytes()
        if self._last != self._end and self._round_at(self._last) == round:
            self._file.truncate(self._last)
            self._end = self._last
        self._last = self._end
        self._write(body + WORD.pack(zlib.crc32(body)))
        self._end += len(body) + WORD.size

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (round, rows) up to the end, or to an entry that was cut off."""
        self._file.seek(len(MAGIC))
        while len(head := self._file.read(_HEAD.size)) == _HEAD.size:
            number, count = _HEAD.unpack(head)
            size = 4 * count * self._numbers
            body = self._file.read(size)
            check = self._file.read(WORD.size)
            if len(body) < size or len(check) < WORD.size:
                return
            if WORD.unpack(check)[0] != zlib.crc32(head + body):
                raise LedgerError(f"the reports of round {number} in {self._name} are damaged: their CRC-32 is wrong")
            yield number, np.frombuffer(body, "<f4").astype(np.float32).reshape(count, self._numbers)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def _round_at(self, place: int) -> int:
        self._file.seek(place)
        return int(_HEAD.unpack(self._file.read(_HEAD.size))[0])

    def _write(self, data: bytes) -> None:
        try:
            written, reason = self._file.write(data), "the disk took only a part of it"
        except OSError as error:
            written, reason = -1, str(error.strerror)
        if written != len(data):
            with contextlib.suppress(OSError):  # else it is cut off on the next open
                self._file.truncate(self._end)
            raise LedgerError(f"reports can't be written to {self._name}: {reason}")
