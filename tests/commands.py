"""The command line in tests: what a call returns, and what tests of several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from synthetic import OWN_BLOBS

BLOBS = f'[task]\nname = "{OWN_BLOBS}"\n'
FAST = ["--set", f"task.name={OWN_BLOBS}", "--set", "rounds=12", "--set", "method.k=4", "--set", "evaluate_every=4",
        "--set", "method.lr=0.1"]  # fmt: skip


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Answer]


def refused(answer: Answer, *words: str) -> None:
    """Check an answer to bad input: code 2, and an error in plain words."""
    assert answer.code == 2, answer
    assert "Traceback" not in answer.err and "Traceback" not in answer.out
    text = " ".join(answer.err.split())
    assert all(word in text for word in words), text


def rows_of_table(text: str) -> dict[str, str]:
    """Return the rows of the table of results by their names."""
    rows = [line.split("│")[1:3] for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in rows}
