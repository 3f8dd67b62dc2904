"""What happens to freed memory: kept in the process, or returned to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
_KEPT_BYTES = 256 << 20


@cache
def keep_freed_memory() -> None:
    """Ask glibc not to return freed blocks of up to 256 MiB to the system.

    A simulated round allocates the same megabytes as the one before; mapping them again, page by page, takes longer
    than some of the arithmetic done in them. It changes the whole process, so the command line calls it, not a library.
    """
    _call("mallopt", _MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
    _call("mallopt", _TRIM_THRESHOLD, _KEPT_BYTES)


@cache
def share_one_arena() -> None:
    """Ask glibc to serve all threads from one heap.

    Otherwise every thread of gRPC gets its own heap, and memory that one thread allocates for a connection and another
    frees is fragmented: a fifth more memory with a thousand clients. Call it before threads are started.
    """
    _call("mallopt", _ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Ask glibc to return free memory to the system."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of glibc; other C libraries are left as they are."""
    if not sys.platform.startswith("linux"):
        return
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return
    function(*arguments)
