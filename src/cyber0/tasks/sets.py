"""Which set of samples a task is evaluated on, and what its figures are called."""

from __future__ import annotations

from collections.abc import Container

from cyber0.config import doors
from cyber0.config.choices import TEXT_TASKS

SETS = ("dev", "test")
"""The sets of samples that accuracy can be measured on."""


def evaluated_on(task: str, sets: Container[str]) -> str:
    """Return the set that a task is evaluated on during a run, given the sets it has.

    It is the test set, for SST-2 the dev set, as in MeZO; if that is missing, the other one.
    """
    first, second = ("dev", "test") if task == "sst2" else ("test", "dev")
    return second if second in sets and first not in sets else first


def evaluated_by_name(task: str, data: str = "") -> str | None:
    """Return the same without knowing the sets; None if it depends on the user's data."""
    return None if (task in TEXT_TASKS and data) or doors.is_own(task) else evaluated_on(task, ())


def of_set(which: str | None, what: str) -> str:
    """Name a figure by the set it was measured on, if known: "dev accuracy"."""
    return f"{which} {what}" if which else what
