"""A bad network: a proxy that delays bytes and cuts connections. For chaos.py and tests/cli/test_deploy.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import Self

DELAYED_SHARE, DELAY_SECONDS = 0.01, 0.2
ACCEPT_SECONDS = 10.0


class Storm:
    """A proxy on loopback, in a thread of its own, from here to a port.

    Args:
        target: The port that connections are passed on to.
        cut_every_s: A connection is cut so often; None: only by `cut`.
        seed: Of what is delayed and cut.
    """

    def __init__(self, target: int, *, cut_every_s: float | None = None, seed: int = 1) -> None:
        self.target = target
        self.cuts = self.delays = 0
        self.calm = False
        """No cuts and delays any more."""
        self._cut_every_s = cut_every_s
        self._generator = random.Random(seed)
        self._open: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(ACCEPT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(ACCEPT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Cut every connection there is."""

        def all_of_them() -> None:
            for writer in list(self._open):
                self._abort(writer)

        self._loop.call_soon_threadsafe(all_of_them)

    async def _start(self) -> int:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self._cutting = asyncio.ensure_future(self._cut_now_and_then())
        return int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut_now_and_then(self) -> None:
        while self._cut_every_s is not None:
            await asyncio.sleep(self._cut_every_s)
            if self._open and not self.calm:
                self._abort(self._generator.choice(self._open))

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        self.cuts += 1
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("localhost", self.target)
        except OSError:  # nobody is there now
            writer.close()
            return
        self._open.append(writer)
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self._open.remove(writer)
            writer.close()
            far_writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if not self.calm and self._generator.random() < DELAYED_SHARE:
                    self.delays += 1
                    await asyncio.sleep(DELAY_SECONDS)
                target.write(data)
                await target.drain()
        target.close()
