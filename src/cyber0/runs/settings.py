"""The settings of a new run, from what a person or a program gives: a name, a file, a dictionary. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyber0.config import doors
from cyber0.config.choices import TASKS
from cyber0.config.files import load, located
from cyber0.config.overrides import overridden
from cyber0.config.schema import Config
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError
from cyber0.storage import CONFIG, SERVED

ConfigLike = Config | Mapping[str, Any] | str | Path | None
"""What `settings_of` takes."""


def settings_of(config: ConfigLike) -> Config:
    """Return the settings of a new run; relative paths in a dictionary start at the working directory.

    Raises:
        ConfigError: it is none of these, or a setting in it is unknown or impossible.
    """
    if isinstance(config, Config):
        return _located(config)
    if isinstance(config, Mapping):
        return _located(located(Config.from_dict(config)))
    if config is None or isinstance(config, str | Path):
        return named_settings(config)
    raise ConfigError(
        f"config = {config!r} can't be read as settings; give a Config, a dictionary of settings, or the path of a "
        "TOML file"
    )


def named_settings(name: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """Return the settings that the command's argument stands for, some replaced by `section.key=value`.

    Args:
        name: The path of a TOML file, a task, or the path of the user's own, file.py:Name; None: the default run.
        overrides: As after --set.
    """
    return _located(load_named(name, overrides))


def load_named(name: str | Path | None, overrides: Iterable[str] = (), *, trusted: bool = False) -> Config:
    """Return the same with model and data as they are written.

    A config that a federator wrote from a header may name code; it is refused unless `trusted`, as it would be
    imported.
    """
    path = None if name is None else Path(name)
    task = str(path) if path is not None and _is_task(path) else ""
    if path is not None and not task:
        _check_is_config(path)
    overrides = [*([f"task.name={task}"] if task else []), *overrides]
    config = load(None if task else path, overrides)
    if not trusted and path is not None and (path.parent / SERVED).exists():
        from cyber0.federation.user_code import refuse_of_header

        refuse_of_header(config, path, overridden(overrides))
    return config


def _is_task(path: Path) -> bool:
    """Return whether a name stands for a task; files and the folders of runs go first."""
    if str(path) in TASKS:
        return not (path.is_file() or (path / CONFIG).is_file())
    return doors.is_path(str(path)) and not path.exists()


def _check_is_config(path: Path) -> None:
    """Refuse what is often given in place of a config file: a Python file, the folder of a run, a mistyped task."""
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a Python file; name the task in it: cyber0 run {path}:NAME")
    if (path / CONFIG).is_file():
        task = f"; the task of that name is run by --set task.name={path}" if str(path) in TASKS else ""
        raise ConfigError(f"{path} is the folder of a run; repeat it by `cyber0 run {path / CONFIG}`, or resume it by "
                          f"`cyber0 run --resume {path}`{task}")  # fmt: skip
    if not path.suffix and len(path.parts) == 1 and not path.exists():
        raise ConfigError(f"there is no config file or task {str(path)!r}; {suggestion(str(path), TASKS)}")


def _located(config: Config) -> Config:
    """Return the config with absolute paths of model and data if they exist here: it may be resumed elsewhere."""

    def whole(path: str) -> str:
        here = Path(path).expanduser()
        return str(here.resolve()) if path and here.exists() else path

    return replace(config, task=replace(config.task, model=whole(config.task.model), data=whole(config.task.data)))
