"""The settings of what is diagnosed, or why it can't be: checked before anything heavy is loaded."""

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

DIAGNOSABLE = ("cyber0", "mezo")  # the methods whose rounds are k scalars


def settings_of(source: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a run's folder, a config file or a user's task, with overrides.

    For a folder only paths to code can be overridden, by a copy of the same code: the one that it names is imported
    only if it is still what the run started with.
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
            f"method.name = {config.method.name!r} can't be diagnosed, since its rounds are not k scalars; "
            f"possible are {', '.join(DIAGNOSABLE)}"
        )
    if folder and not (source / LEDGER).exists():
        raise LedgerError(f"{source} has no {LEDGER}: give {source / CONFIG} to measure at the start of the run")
    if folder and paths(config):
        from cyber0.federation.user_code import refuse_unknown
        from cyber0.ledger import read_opening

        with (source / LEDGER).open("rb") as file:
            header = read_opening(file, source / LEDGER)[0]
        refuse_unknown(config, source, header.config, paths(config).keys() - named, "--set {key}=FILE.py:NAME")
    return config


def _check_replaced(run: Config, folder: Path, overrides: Sequence[str]) -> None:
    """Refuse to override settings of an existing run, except where its code is."""
    own = {*paths(run), *(["task.name"] if doors.is_own(run.task.name) else [])}
    for override in overrides:
        if not overridden([override]) <= own:
            raise ConfigError(f"--set {override} can't change an existing run; give {folder / CONFIG} instead")
