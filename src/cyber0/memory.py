"""Keeping freed memory in the process."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_KEPT_BYTES = 256 << 20


@cache
def keep_freed_memory() -> None:
    """Ask glibc not to return freed blocks of up to 256 MiB to the system.

    A simulated round allocates the same megabytes as the one before; getting them anew, page by page, takes longer than
    some of the arithmetic done in them. Other C libraries are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
