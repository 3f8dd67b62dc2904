"""The settings of what is to be diagnosed, or why it can't be: known before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cyber0.api import load_named
from cyber0.config import Config
from cyber0.errors import ConfigError, LedgerError
from cyber0.files import CONFIG, LEDGER

METHODS = ("cyber0", "mezo")  # whose rounds are k numbers


def settings_of(source: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a run's folder, or those of a config file or a task of one's own, some replaced."""
    folder = source.is_dir()
    if folder and not (source / CONFIG).exists():
        raise ConfigError(f"{source} holds no run: it has no {CONFIG}; give a run's folder or a config file")
    if folder and overrides:
        raise ConfigError(f"--set {overrides[0]} can't change a run that was played; give {source / CONFIG} instead")
    config = load_named(source / CONFIG if folder else source, overrides)
    if config.method.name not in METHODS:
        raise ConfigError(
            f"method.name = {config.method.name!r} has no k numbers a round to diagnose; that is for "
            f"{', '.join(METHODS)}"
        )
    if folder and not (source / LEDGER).exists():
        raise LedgerError(f"{source} has no {LEDGER}: give {source / CONFIG} to measure where the run begins")
    return config
