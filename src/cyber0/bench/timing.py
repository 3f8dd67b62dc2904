"""Timing: compared things in turn (A B A B ...) after a warm-up, by medians, so that a slow moment slows down all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Call = Callable[[], Any]
Timer = Callable[[Call], float]

LONG_S = 0.2  # calls on a device that take longer are timed one by one


@dataclass(frozen=True)
class Figure:
    """One measured number; `value` is None when its measurement failed, and `note` says why."""

    name: str
    value: float | None
    unit: str
    target: float | None = None
    at_least: bool = False
    """Whether more is better; a target is then to be reached from above, and otherwise from below."""
    note: str = ""

    @property
    def reached(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def seconds(call: Call, at_least_s: float = 0.02) -> float:
    """Return the seconds one call takes, from as many calls as fill `at_least_s`."""
    calls, spent, begin = 0, 0.0, time.perf_counter()
    while spent < at_least_s:
        call()
        calls += 1
        spent = time.perf_counter() - begin
    return spent / calls


def synchronise(device: str) -> None:
    """Wait until a device has done what was asked of it."""
    import torch

    torch.get_device_module(device).synchronize()


def wall_seconds(call: Call, times: int = 1, *, device: str) -> float:
    """Return the seconds a call takes, from the first to the end of all that so many of them asked of the device."""
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    synchronise(device)
    return (time.perf_counter() - begin) / times


def wall_seconds_in_a_row(call: Call, *, device: str) -> float:
    """Return what a call takes among others: steps of a run follow one another, as do forward passes."""
    return wall_seconds(call, 1 if wall_seconds(call, device=device) > LONG_S else 5, device=device)


def timer_of(device: str) -> Timer:
    """Return what times calls that compute on a device."""
    return seconds if device == "cpu" else partial(wall_seconds_in_a_row, device=device)


def interleaved(
    calls: Mapping[str, Call], repeats: int, timer: Timer = seconds, *, warm_up: bool = True, limit_s: float = math.inf
) -> dict[str, float]:
    """Time the calls in turn, `repeats` times after a warm-up of one call each, and return each one's median.

    No further turn begins after `limit_s` seconds, the warm-up counted; one is always made.
    """
    begin = time.perf_counter()
    for call in calls.values() if warm_up else ():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        if turn and time.perf_counter() - begin > limit_s:
            break
        for name, call in calls.items():
            times[name].append(timer(call))
    return {name: statistics.median(values) for name, values in times.items()}
