"""How many files a federator may have open, and so how many connections: each of them is an open file."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]  # a module is typed as one, and can't be absent

RESERVE = 64  # files for the ledger, the figures, /metrics, the live page
_SPARE = 2048  # connections beyond those of participants: 25 kB each before its handshake, 100 kB after it
_LARGE = (1 << 16, 10_240)  # tried where the hard limit is infinite, which some systems then refuse


def raise_limit() -> int | None:
    """Let this process open as many files as it may; return how many, None if there is no limit."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    for limit in _LARGE if hard == resource.RLIM_INFINITY else (hard,):
        if limit > soft:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return soft


def max_connections(limit: int | None, participants: int, addresses: int = 1) -> int:
    """Return how many connections to accept on each of the addresses, so that files are left for everything else.

    Each participant may have a second one while its first is found to be dead.
    """
    wanted = 2 * participants + _SPARE
    return wanted if limit is None else max(1, min(wanted, (limit - RESERVE) // addresses))


def shortage(limit: int | None, participants: int) -> str:
    """Return a warning if not all participants can be connected at once; empty if they can."""
    needed = participants + RESERVE
    if limit is None or limit >= needed:
        return ""
    return (
        f"{participants} clients and followers need {needed} open files, and this process may have {limit}: raise the "
        "hard limit by `ulimit -n`, or LimitNOFILE in the systemd unit; until then some are refused"
    )
