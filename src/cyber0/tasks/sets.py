"""Which set of samples a task is evaluated on, and what its figures are called."""

from __future__ import annotations

from collections.abc import Container

from cyber0.config import doors
from cyber0.config.choices import TEXT_TASKS

SETS = ("dev", "test")
"""The sets of samples that accuracy can be measured on."""


def evaluated_on(task: str, sets: Container[str]) -> str:
    """Return the set that a task of these sets is evaluated on in the course of a run.

    It is the test set, of SST-2 the dev set, as in MeZO; the other one where that is missing.
    """
    first, second = ("dev", "test") if task == "sst2" else ("test", "dev")
    return second if second in sets and first not in sets else first


def evaluated_by_name(task: str, data: str = "") -> str | None:
    """Return the same of a task whose sets are not at hand; None where a folder of the user's decides it."""
    return None if (task in TEXT_TASKS and data) or doors.is_own(task) else evaluated_on(task, ())


def of_set(which: str | None, what: str) -> str:
    """Name a figure by the set it was measured on, as far as that is known: "dev accuracy"."""
    return f"{which} {what}" if which else what
