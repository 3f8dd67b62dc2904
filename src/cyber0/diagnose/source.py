"""The settings of what is to be diagnosed, or why it can't be: known before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cyber0.config import doors
from cyber0.config.files import load
from cyber0.config.overrides import overridden
from cyber0.config.paths import paths
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, LedgerError
from cyber0.runs.settings import load_named
from cyber0.storage import CONFIG, LEDGER

DIAGNOSABLE = ("cyber0", "mezo")  # whose rounds are k numbers


def settings_of(source: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a run's folder, or those of a config file or a task of one's own, some replaced.

    Of a folder only what it names by a path can be replaced: a copy of the same code, for the one that it names itself
    is imported only if the run was begun with it.
    """
    folder = source.is_dir()
    if folder and not (source / CONFIG).exists():
        raise ConfigError(f"{source} holds no run: it has no {CONFIG}; give a run's folder or a config file")
    named = overridden(overrides)
    config = load(source / CONFIG, overrides) if folder else load_named(source, overrides)
    if folder:
        _check_replaced(load(source / CONFIG), source, overrides)
    if config.method.name not in DIAGNOSABLE:
        raise ConfigError(
            f"method.name = {config.method.name!r} has no k numbers a round to diagnose; that is for "
            f"{', '.join(DIAGNOSABLE)}"
        )
    if folder and not (source / LEDGER).exists():
        raise LedgerError(f"{source} has no {LEDGER}: give {source / CONFIG} to measure where the run begins")
    if folder and paths(config):
        from cyber0.federation.user_code import refuse_unknown
        from cyber0.ledger import read_opening

        with (source / LEDGER).open("rb") as file:
            header = read_opening(file, source / LEDGER)[0]
        refuse_unknown(config, source, header.config, paths(config).keys() - named, "--set {key}=FILE.py:NAME")
    return config


def _check_replaced(played: Config, folder: Path, overrides: Sequence[str]) -> None:
    """Refuse to replace settings of a run that was played, but for where its code is."""
    own = {*paths(played), *(["task.name"] if doors.is_own(played.task.name) else [])}
    for override in overrides:
        if not overridden([override]) <= own:
            raise ConfigError(f"--set {override} can't change a run that was played; give {folder / CONFIG} instead")
