"""Every accepted report of a run, kept beside the ledger so that anybody can compute its decisions again.

    file     magic | entry | entry | ...
    entry    u32 round | u32 count | count x n x float32 | u32 CRC-32

An entry is written before the ledger's record of its round, rows in the order of the clients that the record says have
reported. What the ledger does not have yet is cut off when the file is opened for writing; an entry that the ledger
needs and that is damaged is an error. Every record has an entry, so the round of a damaged one follows from those
before it, and what its own head says is not trusted. Whole entries may skip rounds: those that `cyber0 repair` cut off.
"""

from __future__ import annotations

import contextlib
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import LedgerError
from cyber0.ledger.log import Ledger, force_to_disk, only_zeros
from cyber0.ledger.opening import WORD
from cyber0.storage.disk import OS_DISK, AnyPath, Disk

REPORTS_MAGIC = b"cyber0 reports 1\n"
_HEAD = struct.Struct("<II")


class Fault(NamedTuple):
    """Where the good entries of a file end, and why."""

    round: int
    place: int
    """Of the entry in the file, in bytes."""
    text: str
    torn: bool
    """Whether it may be an entry that was being written: it ends with the file, or in zeros up to its end."""


class Reports:
    """The reports of a run, as a file.

    Args:
        path: The file; made if it is not there and `rounds` is given.
        scalars: n, how many scalars a report has.
        rounds: Open for writing, after so many rounds of the ledger; None: for reading.
        disk: Where the file is.
    """

    def __init__(self, path: AnyPath, scalars: int, *, rounds: int | None = None, disk: Disk = OS_DISK) -> None:
        self._name, self._scalars = os.fspath(path), scalars
        self.lacking = rounds or 0
        """Of how many of the ledger's rounds the file has no reports, if it is open for writing."""
        self.fault: Fault | None = None
        """Why the last iteration ended before the end of the file, if it did."""
        writable = rounds is not None
        try:
            self._file = disk.open(path, writable=writable, create=writable)
        except OSError as error:
            raise LedgerError(f"can't open the reports {self._name}: {error.strerror}") from error
        try:
            self._end = self._last = len(REPORTS_MAGIC)
            if writable and not self._file.size():
                self._write(REPORTS_MAGIC, 0)
            self._file.seek(0)
            if self._file.read(len(REPORTS_MAGIC)) != REPORTS_MAGIC:
                raise LedgerError(f"{self._name} is not a file of reports")
            if rounds is not None:
                self._cut_off_after(rounds)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def beside(cls, ledger: Ledger, path: AnyPath, *, disk: Disk = OS_DISK) -> Reports:
        """Open a file for writing beside its ledger: no record reaches the disk before the reports of its round."""
        reports = cls(path, ledger.header.scalars, rounds=len(ledger), disk=disk)
        ledger.sync_before(reports.sync)
        if reports.lacking:
            warnings.warn(
                f"{os.fspath(path)} lacks the reports of {reports.lacking} of the ledger's {len(ledger)} rounds, which "
                "can't be decided again (`cyber0 verify --decisions`)", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        return reports

    def _cut_off_after(self, rounds: int) -> None:
        for number, rows in self._entries():
            if number >= rounds:
                break
            self._end = self._last = self._end + _size_of(rows)
            self.lacking -= 1
        else:
            if self.fault is not None and self.fault.round < rounds:
                raise self.damage(
                    f"the ledger has {rounds} rounds, so these are needed. `cyber0 repair "
                    f"{os.path.dirname(self._name) or '.'}` says what can be kept"
                )
        self._file.truncate(self._end)

    def damage(self, remedy: str) -> LedgerError:
        """Return what ended the last iteration as an error."""
        assert self.fault is not None
        return LedgerError(f"the reports of round {self.fault.round} in {self._name} {self.fault.text}: {remedy}")

    def append(self, round: int, rows: NDArray[np.float32]) -> None:
        """Write the reports of a round; one that is written again, as its record could not be, replaces the first."""
        body = _HEAD.pack(round, len(rows)) + rows.astype("<f4", copy=False).tobytes()
        if self._last != self._end and self._round_at(self._last) == round:
            self._file.truncate(self._last)
            self._end = self._last
        self._last = self._end
        self._write(body + WORD.pack(zlib.crc32(body)), self._end)
        self._end += len(body) + WORD.size

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (round, rows) up to the end, or to an entry that was cut off."""
        yield from self._entries()
        if self.fault is not None and not self.fault.torn:
            raise self.damage("the file was changed after it was written")

    def _entries(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (round, rows) up to the end, or to what is wrong with the next entry, which `fault` then says."""
        self.fault = None
        size, place, expected = self._file.size(), len(REPORTS_MAGIC), 0
        self._file.seek(place)
        while place < size:
            head = self._file.read(_HEAD.size)
            number, count = _HEAD.unpack(head) if len(head) == _HEAD.size else (expected, 0)
            length = _HEAD.size + 4 * count * self._scalars + WORD.size
            if length > size - place:  # nothing of that size is read, or room made for it
                claim = f"claim {count:,} rows, but the file ends before" if count else "are cut off"
                self.fault = Fault(expected, place, claim, torn=True)
                return
            data = head + self._file.read(length - _HEAD.size)
            if WORD.unpack(data[-WORD.size :])[0] != zlib.crc32(data[: -WORD.size]):
                torn = data[-1] == 0 and only_zeros(self._file) is not None
                text = "end in zeros" if torn else "are damaged, their CRC-32 is wrong"
                self.fault = Fault(expected, place, text, torn)
                return
            if number < expected:
                self.fault = Fault(expected, place, f"are not there: those of round {number} follow again", torn=False)
                return
            place, expected = place + length, number + 1
            yield (
                number,
                np.frombuffer(data[_HEAD.size : -WORD.size], "<f4").astype(np.float32).reshape(count, self._scalars),
            )
            self._file.seek(place)

    def sync(self) -> None:
        """Force everything appended so far to the disk."""
        if not self._file.closed:
            force_to_disk(self._file, self._name)

    def survey(self) -> tuple[list[int], int]:
        """Return the rounds whose reports are good and where they end; `fault` says what follows."""
        found, end = [], len(REPORTS_MAGIC)
        for number, rows in self._entries():
            found.append(number)
            end += _size_of(rows)
        return found, end

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def _round_at(self, place: int) -> int:
        self._file.seek(place)
        return int(_HEAD.unpack(self._file.read(_HEAD.size))[0])

    def _write(self, data: bytes, place: int) -> None:
        self._file.seek(place)
        try:
            written, reason = self._file.write(data), "the disk took only a part of it"
        except OSError as error:
            written, reason = -1, str(error.strerror)
        if written != len(data):
            with contextlib.suppress(OSError):  # else it is cut off on the next open
                self._file.truncate(self._end)
            raise LedgerError(f"reports can't be written to {self._name}: {reason}; make room and resume the run")


def _size_of(rows: NDArray[np.float32]) -> int:
    """Return how many bytes the entry of these rows has."""
    return _HEAD.size + rows.nbytes + WORD.size
