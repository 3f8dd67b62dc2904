"""Which files of the user's a run was started with: remembered with the run, and compared before they are imported.

Tasks, rules, attacks, partitions and schedules may be a user's, named by a path.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cyber0.config import doors
from cyber0.config.paths import DOORS, agreed, paths
from cyber0.config.schema import Config, for_header, to_dict
from cyber0.errors import ConfigError
from cyber0.storage import CONFIG, SERVED, SOURCES, TASK_DIGEST, write_text


def remember(config: Config, folder: Path) -> None:
    """Write which files of the user's a run was started with, if any."""
    found = sources(config, folder)
    if found:
        write_text(folder / SOURCES, json.dumps(found, indent=2) + "\n")


def warn_if_changed(config: Config, folder: Path, *, given_task: bool = False) -> None:
    """Warn where a file of the user's is not what it was when the run began; a task given in Python has none."""
    before, changed = _remembered(folder), dict[tuple[str, str, str], list[str]]()
    for key, now in sources(config, folder).items():
        was, file = before.get(key, {}).get("sha256", ""), doors.short(now["path"]).rpartition(":")[0]
        if was and now["sha256"] not in ("", was) and not (key == "task.name" and given_task):
            changed.setdefault((file, was, now["sha256"]), []).append(key)
    for (file, was, is_now), keys in changed.items():
        warnings.warn(
            f"{file} ({', '.join(keys)}) has changed since the run began (SHA-256 {was[:16]} then, {is_now[:16]} now): "
            "the rounds to come use it as it is now",
            RuntimeWarning,
            stacklevel=2,
        )


def refuse_unknown(
    config: Config, folder: Path, header: Mapping[str, Any] | None, keys: Collection[str], remedy: str
) -> None:
    """Refuse to import what the config of a run's folder names, unless it is what the run was started with.

    A folder may come from somebody else, and `cyber0 serve` begins one with what a header says. So the name has to be
    that of the ledger's header, the file the one that was remembered when the run began, and none that lies in the
    folder itself. This does not protect against a folder that was prepared with care, whose sources.json is theirs too:
    whoever received a folder should name an own copy, which is imported unchecked.

    Args:
        config: As read from the folder.
        folder: The run's.
        header: The settings in its ledger's header; None where it has no ledger.
        keys: The settings by which something would be imported.
        remedy: How to name a copy, with {key} for the setting.
    """
    recorded, remembered = agreed(for_header(config)), _remembered(folder)
    for key, path in paths(config).items():
        if key not in keys:
            continue
        section, _, name = key.rpartition(".")
        mine, place = recorded[section][name], doors.source(path)
        table = {name: mine} if header is None else header.get(section)
        theirs = table.get(name) if isinstance(table, Mapping) else None
        was, is_now = remembered.get(key, {}).get("sha256", ""), doors.sha256(path) or ""
        if mine != theirs:
            fault = f"and the ledger's header {theirs!r}"
        elif place is None and path.rpartition(":")[0].endswith(".py"):
            continue  # there is nothing to import, and importing it gives the best error
        elif place is not None and place.resolve().is_relative_to(folder.resolve()):
            fault = "a file in the run's folder, which may have come with it from somebody else"
        elif not was:
            fault = f"and no {SOURCES} says that the run was started with it"
        elif not is_now:
            fault = "which can't be found from here"
        elif was != is_now:
            fault = f"which is not what the run was started with (SHA-256 {was[:16]} then, {is_now[:16]} now)"
        else:
            continue
        raise ConfigError(
            f"{folder / CONFIG} names {key} = {doors.short(path)!r}, {fault}: it is not imported; name your copy with "
            f"{remedy.format(key=key)}"
        )


def refuse_of_header(config: Config, path: Path, named: Collection[str]) -> None:
    """Refuse a config file that `cyber0 serve` wrote from a header, where it names code and nobody else did."""
    remembered = _remembered(path.parent)
    for key, name in paths(config).items():
        if path.name == CONFIG and (path.parent / SERVED).exists() and key not in {*named, *remembered}:
            raise ConfigError(
                f"{path} has {key} = {doors.short(name)!r} from a header, which never makes anybody import code; name "
                f"your copy with --set {key}=FILE.py:NAME"
            )


def with_remembered_paths(config: Config, folder: Path) -> Config:
    """Return a config as recorded elsewhere, without folders, with the paths of the user's files from this folder."""
    remembered = _remembered(folder)

    def found(key: str, path: str) -> str:
        here = remembered.get(key, {}).get("path", "")
        return here if doors.short(here) == path else path

    tables = to_dict(config)
    for section, name in DOORS:
        tables[section][name] = found(f"{section}.{name}", tables[section][name])
    return Config.recorded(tables)


def _remembered(folder: Path) -> dict[str, dict[str, str]]:
    """Return the path and the SHA-256 of each of the user's files when the run began, by its setting."""
    found: dict[str, dict[str, str]] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):  # earlier versions stored that of the task by itself
        found["task.name"] = {"sha256": (folder / TASK_DIGEST).read_text(encoding="utf-8").split()[0]}
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        stored = json.loads((folder / SOURCES).read_text(encoding="utf-8"))
        found |= {key: {"path": str(one["path"]), "sha256": str(one["sha256"])} for key, one in stored.items()}
    return found


def sources(config: Config, folder: Path) -> dict[str, dict[str, str]]:
    """Return what a config names by a path: by its setting, the path from a folder and the SHA-256 of the file."""
    return {key: {"path": doors.relative(path, folder), "sha256": doors.sha256(path) or ""}
            for key, path in paths(config).items()}  # fmt: skip
