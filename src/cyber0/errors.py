"""Errors that a user can act on: what was wrong, with what value, and what to do."""

from __future__ import annotations


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
