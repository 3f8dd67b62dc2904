"""An event loop on a virtual clock: seconds pass without sleeping, and the same way every time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

PATIENCE = 60.0  # virtual seconds that `run` gives its work
TURN = 1e-4


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose seconds do not depend on the machine, so that no deadline passes because it is busy.

    Its clock moves a little with every turn of the loop, and to the next timer when nothing else is left to do.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()
        self._poll, self._selector.select = self._selector.select, self._pass  # type: ignore[attr-defined, has-type]

    def time(self) -> float:
        return self._now

    def _pass(self, timeout: float | None) -> Any:
        assert timeout is not None, "everybody waits for somebody else"
        self._now += max(timeout, TURN)
        return self._poll(0)


def run(work: Awaitable[Any], patience: float = PATIENCE) -> Any:
    """Run to the end, in virtual time."""

    async def limited() -> Any:
        async with asyncio.timeout(patience):
            return await work

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())
