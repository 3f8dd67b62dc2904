"""What stops a process: signals, on every system."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cyber0.serve.operations import on_stop_signals

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def handlers_kept() -> Iterator[None]:
    before = [signal.getsignal(name) for name in SIGNALS]
    yield
    for name, handler in zip(SIGNALS, before, strict=True):
        signal.signal(name, handler)


@pytest.mark.parametrize("by_loop", [True, False])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_stops_the_process_also_where_the_loop_handles_none(
    name: signal.Signals, by_loop: bool, handlers_kept: None
) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError  # as on Windows

    async def work() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        if not by_loop:
            loop.add_signal_handler = refuse  # type: ignore[method-assign, assignment]
        on_stop_signals(stopped.set)
        signal.raise_signal(name)
        async with asyncio.timeout(60):
            await stopped.wait()

    asyncio.run(work())
    if not by_loop and os.name == "posix":
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(name)  # after the loop: as ever
