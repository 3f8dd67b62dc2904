"""The weights of a model at another point than it is at, made one segment at a time, when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cyber0.directions.engine import Plan
from cyber0.segments import Segment

Tensor = torch.Tensor

CACHE_BYTES = 4 << 20  # segments kept beyond the one in use, so that small models are perturbed once
AHEAD_SHARE = 16  # a segment is made ahead of its use when it has at most one part in so many of all weights


class Blocks:
    """Segments as a plan makes them; each is kept until others are asked for.

    Args:
        segments: All of them.
        plan: What is done to them.
    """

    def __init__(self, segments: Sequence[Segment], plan: Plan) -> None:
        self.segments, self.plan = segments, plan
        self.made: list[int] = []
        """Which segments were made, in this order; one that is used again later is made again."""
        self._cache: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self._cache:
            self._make_room(self.segments[number].buffer.nbytes)
            with _disable_current_modes():
                self._cache[number] = self._make(number)
        return self._cache[number]

    def _make_room(self, size: int) -> None:
        while self._cache and sum(b.nbytes for b in self._cache.values()) + size > CACHE_BYTES:
            del self._cache[next(iter(self._cache))]

    def _make(self, number: int) -> Tensor:
        self.made.append(number)
        return perturbed(self.segments[number], self.plan)


class BlocksAhead(Blocks):
    """On a GPU: the next segment is made on a second stream while the model computes with the present one.

    Args:
        segments: All of them.
        plan: What is done to them.
        order: In which order they will be asked for, as far as is known; another order is right too, only slower.
    """

    def __init__(self, segments: Sequence[Segment], plan: Plan, order: Sequence[int]) -> None:
        super().__init__(segments, plan)
        self._order = list(order)
        self._side = torch.cuda.Stream(segments[0].buffer.device)  # type: ignore[no-untyped-call]
        self._ahead: tuple[int, Tensor, torch.cuda.Event] | None = None
        self._most = sum(s.buffer.nbytes for s in segments) // AHEAD_SHARE

    def _make(self, number: int) -> Tensor:
        ahead, self._ahead = self._ahead, None
        main = torch.cuda.current_stream()
        if ahead is not None:
            main.wait_event(ahead[2])  # also when it was made for nothing: its memory is given back now
        if ahead is not None and ahead[0] == number:
            self.made.append(number)
            block = ahead[1]
        else:
            block = super()._make(number)
        self._begin_next(main)
        return block

    def _begin_next(self, main: torch.cuda.Stream) -> None:
        """Begin with what follows, in memory of the main stream, once that has come to where it is free."""
        place = len(self.made)
        if place >= len(self._order) or self.made[-1] != self._order[place - 1]:
            return
        segment = self.segments[self._order[place]]
        if segment.buffer.nbytes > self._most:
            return
        out = torch.empty_like(segment.buffer)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self.plan.run(segment.buffer, out, segment.start)
            done = self._side.record_event()
        self._ahead = (self._order[place], out, done)

    def join(self) -> None:
        """Let the main stream wait for what was begun and not used."""
        torch.cuda.current_stream().wait_stream(self._side)
        self._ahead = None


def perturbed(segment: Segment, plan: Plan) -> Tensor:
    """Return the segment's weights as the plan makes them, in memory of their own."""
    with torch._C._DisableFuncTorch():  # a model may use its weights inside vmap or grad: stay a plain tensor
        return plan.run(segment.buffer, torch.empty_like(segment.buffer), segment.start)
