"""Errors that a user can act on: what was wrong, with what value, and what to do."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """How a command ends, with what it means; docs/CLI.md has the same table."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    DONE = 0, "done; if the result looks wrong (the loss did not fall, the accuracy fell), a warning says so"
    FAULTS = (
        1,
        "some runs of a study failed, `repair` left something unrepaired, or `doctor` found a fault; also if nobody "
        "reads the output any more, and if cyber0 itself fails, with a traceback",
    )
    REFUSED = 2, "something was refused, or could not be read or written; the error says what to change"
    NOTHING_LEARNED = (
        3,
        "the run ended but certainly learned nothing: every round was abandoned, the loss is not finite, or no weight "
        "changed",
    )
    INTERRUPTED = 130, "interrupted"


class Cyber0Error(Exception):
    """Base of every error that cyber0 raises on purpose."""


class ConfigError(Cyber0Error, ValueError):
    """A setting is unknown, impossible, or contradicts another."""


class DataError(Cyber0Error):
    """A data set can't be obtained or is not what it should be."""


class LedgerError(Cyber0Error):
    """A ledger does not verify, or does not belong to this model or run."""


class ModelError(Cyber0Error):
    """A model can't be trained as it is, or differs from the one that was agreed on."""


class ModelMissingError(ModelError):
    """A language model can't be loaded by the given name; `reason` explains why, without the name."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def by_option(self, what: str) -> ModelMissingError:
        """Return the same error for a command that has an option --model, but no settings to change."""
        remedy = "Give its place with --model: a folder, a .gguf file, or a name on the Hugging Face hub"
        return ModelMissingError(f"{what} could not be loaded: {self.reason}\n{remedy}", self.reason)


class ProtocolError(Cyber0Error):
    """A message is malformed or does not fit the state of the round."""
