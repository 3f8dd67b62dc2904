"""Reads what gRPC's core writes to stderr, to count the TLS handshakes that failed by their reason.

The core verifies certificates and tells Python nothing of those that fail; all it does is write a line. So in `cyber0
serve` stderr leads through a pipe to a process of its own, which is this file: it counts these lines, does not pass
them on (an attacker can make thousands a second), and passes on everything else untouched. A process and not a thread:
it reads whatever the federator is busy with, so that nothing can wait in a circle, and it outlives a crash, whose last
words it still passes on. The federator's own log does not go through it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator

_PATTERNS = {
    "no_certificate": re.compile(rb"PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    "expired_certificate": re.compile(rb"certificate has expired"),
    "wrong_certificate": re.compile(rb"CERTIFICATE_VERIFY_FAILED|BAD_SIGNATURE|certificate signature failure"),
    "bad_handshake": re.compile(rb""),
}
"""What the line of a failed handshake says; the first that fits counts."""

REASONS = tuple(_PATTERNS)
_FAILED = re.compile(rb"ssl_transport_security\S* Handshake failed")
_COUNTS = struct.Struct(f"={len(REASONS)}Q")
_STDERR = 2
_CHUNK, _LONGEST_LINE = 1 << 16, 1 << 16
_END_SECONDS = 5.0


def reason_of(line: bytes) -> str | None:
    """Return why a handshake failed; None if the line is about something else."""
    if not _FAILED.search(line):
        return None
    return next(reason for reason, pattern in _PATTERNS.items() if pattern.search(line))


@contextlib.contextmanager
def failures_counted() -> Iterator[Callable[[], Counter[str]]]:
    """Lead stderr through a process that counts failed handshakes; gives a function that returns them by reason.

    Where there is no stderr, or it is not this process' own, everything stays as it is and nothing is counted.
    """
    with contextlib.ExitStack() as stack:
        try:
            counts = stack.enter_context(_led_through())
        except OSError:  # no stderr, no process to be had: handshakes are then counted without a reason
            counts = None
        yield lambda: Counter() if counts is None else _read(counts)


def _read(counts: mmap.mmap) -> Counter[str]:
    return +Counter(dict(zip(REASONS, _COUNTS.unpack_from(counts), strict=True)))


@contextlib.contextmanager
def _led_through() -> Iterator[mmap.mmap]:
    usual = sys.stderr
    if os.name != "posix" or usual is None or usual.fileno() != _STDERR:
        raise OSError("stderr is not ours to lead elsewhere")
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(tempfile.TemporaryFile())
        shared.truncate(_COUNTS.size)
        counts = stack.enter_context(mmap.mmap(shared.fileno(), _COUNTS.size))
        usual.flush()
        direct = stack.enter_context(
            open(os.dup(_STDERR), "w", encoding=usual.encoding, errors=usual.errors, buffering=1)
        )
        reading, writing = os.pipe()
        try:
            # In a session of its own: the terminal's signals are for the federator.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(shared.fileno())], stdin=reading,
                stdout=subprocess.DEVNULL, pass_fds=[shared.fileno()], start_new_session=True,
            )  # fmt: skip
            os.dup2(writing, _STDERR)
        finally:
            os.close(reading)
            os.close(writing)
        sys.stderr = direct
        try:
            yield counts
        finally:
            direct.flush()
            os.dup2(direct.fileno(), _STDERR)  # the process reads the end, and ends
            sys.stderr = usual
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)


def _pass_on(data: bytes) -> None:
    """Write all of it; if nobody takes it, it is lost, as it would be without us."""
    while data:
        try:
            data = data[os.write(_STDERR, data) :]
        except BlockingIOError:
            select.select([], [_STDERR], [])
        except OSError:
            return


def _count(counts: mmap.mmap) -> None:
    """Read stdin to its end."""
    numbers, rest = [0] * len(REASONS), b""
    while chunk := os.read(0, _CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        others = []
        for line in lines:
            if (reason := reason_of(line)) is None:
                others.append(line + b"\n")
            else:
                numbers[REASONS.index(reason)] += 1
        _COUNTS.pack_into(counts, 0, *numbers)
        if len(rest) > _LONGEST_LINE:
            others.append(rest)
            rest = b""
        _pass_on(b"".join(others))
    _pass_on(rest)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all of a service; the end is stdin's
    _count(mmap.mmap(int(sys.argv[1]), _COUNTS.size))
