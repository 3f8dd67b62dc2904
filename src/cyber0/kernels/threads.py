"""Splitting the coordinates over threads, which can't change a bit: a coordinate depends on its index alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

_T = TypeVar("_T")

TILE = 1024  # coordinates that a kernel works on at a time; threads are split at multiples of it
THREADED_FROM = 1 << 16  # coordinates times directions; below, handing out work costs more than it saves


def thread_count() -> int:
    """Return how many threads the kernels use: $CYBER0_THREADS, else the processors this process may use."""
    wanted = os.environ.get("CYBER0_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return available_cores()


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """One pool per process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="cyber0")


def run_in_threads(kernel: Callable[[int, int], Any], pieces: Sequence[tuple[int, int]]) -> list[Any]:
    """Call kernel(low, high) for every piece, as many at a time as there are threads; the results in order."""
    if len(pieces) == 1 or thread_count() == 1:
        return [kernel(low, high) for low, high in pieces]
    pool = _pool(thread_count(), os.getpid())
    futures = [pool.submit(kernel, low, high) for low, high in pieces]
    try:
        return [future.result() for future in futures]
    finally:  # after an interrupt no kernel may still be writing
        wait(futures)


@cache
def _aside(process: int) -> ThreadPoolExecutor:
    """A thread apart from the pool, so that what it does may use the pool."""
    return ThreadPoolExecutor(1, thread_name_prefix="cyber0-aside")


def start(work: Callable[[], _T]) -> Callable[[], _T]:
    """Start work in the background; calling what is returned waits for its result."""
    return work if thread_count() == 1 else _aside(os.getpid()).submit(work).result


def split(start: int, count: int, work: int) -> list[tuple[int, int]]:
    """Cut [0, count) for the threads, at multiples of the tile; one piece if `work` is small."""
    threads = thread_count() if work >= THREADED_FROM else 1
    if threads == 1 or count <= 2 * TILE:
        return [(0, count)]
    step = -(-count // (threads * TILE)) * TILE
    cuts = [0, *range(step - start % TILE, count, step), count]
    return list(pairwise(cuts))


def split_rows(rows: int, work: int) -> list[tuple[int, int]]:
    """Cut [0, rows) into one range a thread; one piece if `work` is small."""
    threads = min(rows, thread_count()) if work >= THREADED_FROM else 1
    cuts = [rows * i // threads for i in range(threads + 1)]
    return list(pairwise(cuts))
