"""The files that a config names: the user's objects (`file.py:name`) and task.weights, relative or absolute."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cyber0.config import doors
from cyber0.config.keys import full_name
from cyber0.config.registry import OPTIMIZERS
from cyber0.config.schema import Config, MethodConfig, to_dict
from cyber0.storage import WEIGHTS

DOORS = (("task", "name"), ("aggregation", "rule"), ("federation", "attack"), ("federation", "partition"),
         ("method", "lr_schedule"))  # fmt: skip
"""The settings that may name an object by its path."""


def located_tables(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tables with the whole paths of the user's files, which are relative to a folder.

    task.model and task.data stay as they are: they are relative to the working directory, and may be names on a hub.
    """
    return _with_weights(with_paths(data, partial(doors.located, folder=folder)), partial(located_file, folder=folder))


def paths(config: Config) -> dict[str, str]:
    """Return what a config names by a path, by the name of its setting."""
    named = {full_name(section, name): getattr(getattr(config, section), name) for section, name in DOORS}
    return {key: path for key, path in named.items() if doors.is_path(path)}


def located_file(path: str, folder: Path) -> str:
    """Return the whole path of a file that is relative to a folder; symbolic links stay, as does the empty path."""
    return os.path.abspath(folder / Path(path).expanduser()) if path else path


def _relative_file(path: str, folder: Path) -> str:
    """Return the path of a file as it is written in a file of that folder."""
    if not os.path.isabs(path):
        return path
    try:
        return Path(os.path.relpath(path, folder.absolute())).as_posix()
    except ValueError:  # on another drive of Windows
        return path


def _with_weights(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a config with the path of task.weights changed."""
    section = data.get("task")
    if not isinstance(section, Mapping) or not isinstance(section.get("weights"), str):
        return dict(data)
    return {**data, "task": {**section, "weights": change(section["weights"])}}


def with_paths(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a config with the paths of objects changed."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for section, name in DOORS:
        found = result.get(section)
        if isinstance(found, dict) and isinstance(found.get(name), str):
            found[name] = change(found[name])
    return result


def agreed(config: Config) -> dict[str, Any]:
    """Return the config as a header stores it: the user's files by their names, without folders.

    Of task.weights it stores only that there is such a file: the digests identify its contents. Of the optimizer it
    states every option.
    """
    tables = _with_weights(with_paths(to_dict(config), doors.short), lambda path: path and WEIGHTS)
    method = config.method
    if method.optimizer != MethodConfig.optimizer:
        defaults = {name: one.default for name, one in OPTIMIZERS.entry(method.optimizer).arguments.items()}
        if options := defaults | method.optimizer_options:
            tables["method"] = {**tables["method"], "optimizer_options": options}
    return tables


def relative_tables(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tables with the paths of the user's files as they are written in a file of that folder."""
    tables = with_paths(data, partial(doors.relative, folder=folder))
    return _with_weights(tables, partial(_relative_file, folder=folder))
