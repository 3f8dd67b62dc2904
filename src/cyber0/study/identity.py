"""What identifies a run: its settings, and the content of its model and data, wherever they are.

A run is found again by the digest of its settings. Files and folders, including a user's task, are identified by their
content, so a study whose model or data was moved or renamed does not run again.

Of a file above 32 MiB only SAMPLES blocks spread over it are read. A fine-tuned copy differs in nearly all of them, so
it is told apart; but an equal digest is no proof that two large files are equal: a change between the blocks goes
unnoticed, and the run of the other file is reused. Use a new folder for a study that must not rely on this.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cyber0.config import doors
from cyber0.config.paths import agreed, paths, with_paths
from cyber0.config.schema import Config, to_dict

BLOCK, SAMPLES = 2**16, 2**9  # files up to 32 MiB are read whole
PLACES = ("model", "data", "weights")  # the keys of [task] that may be paths
DIGITS = 10


def digest(config: Config) -> str:
    """Return a run's identity: equal settings, model and data give an equal digest.

    The converse holds as far as large files are sampled: see above.
    """
    return _digest(_identity(config))


def digest_by_path(config: Config) -> str:
    """Return the digest with paths as written, by which earlier versions named their folders."""
    return _digest(to_dict(config))


def digest_by_name(config: Config) -> str:
    """Return the digest with names of files and folders in place of their contents: equal where `portable` is."""
    return _digest(to_dict(portable(config)))


def digest_of_settings(config: Config) -> str:
    """Return the digest without model and data."""
    return _digest(_settings(config))


def portable(config: Config) -> Config:
    """Return the config with the paths of files reduced to their names."""
    config = Config.recorded(agreed(config)) if paths(config) else config
    task = config.task
    places: dict[str, Any] = {key: Path(getattr(task, key)).name for key in PLACES}
    return replace(config, task=replace(task, **places)) if any(places.values()) else config


def same_run(key: str, recorded: Config, wanted: Config) -> bool | None:
    """Return whether a folder holds the wanted run; None if only the names of its files agree.

    Files above 32 MiB are compared by samples, so True is no proof for them.

    Args:
        key: The digest in the name of the folder; an earlier version may have made it.
        recorded: The settings in the folder.
        wanted: The settings of the run.
    """
    if _settings(recorded) != _settings(wanted):
        return False
    if key in (digest(wanted), _digest_of_name_and_content(recorded, wanted)):
        return True
    by_path = key == digest_by_path(recorded)
    if recorded == wanted and (by_path or lacks_files(wanted) or not any(map(content, _places(wanted)))):
        return True  # identical paths, and no file whose content has changed
    same = _same_content(recorded, wanted) if by_path else None  # a digest of contents that differs is conclusive
    if same is None and portable(recorded) == portable(wanted) and (by_path or lacks_files(wanted)):
        return None
    return bool(same)


def _same_content(one: Config, other: Config) -> bool | None:
    """Return whether two configs have the same model and data; None if unknown."""
    known = [(content(a), content(b)) for a, b in zip(_places(one), _places(other), strict=True) if a != b]
    return None if any(None in pair for pair in known) else all(a == b for a, b in known)


def lacks_files(config: Config) -> bool:
    """Return whether the config names a file or folder that does not exist."""
    model, *files = _places(config)
    return any(place and content(place) is None for place in (*files, model if _is_path(model) else ""))


def _is_path(model: str) -> bool:
    """Return whether a model is certainly a path: a name on the hub can look like a relative one."""
    return model.startswith(("/", ".", "~")) or Path(model).is_absolute() or model.endswith(".gguf")


def _places(config: Config) -> tuple[str, ...]:
    return tuple(getattr(config.task, key) for key in PLACES)


def content(place: str) -> str | None:
    """Return a digest of the file or folder at a path; None if there is none, as for a name on the hub."""
    path = Path(place).expanduser()
    if not place or not path.exists():
        return None
    if path.is_file():
        return _content(path)
    files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
    listed = [f"{p.relative_to(path).as_posix()} {_content(p)}" for p in files]
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _content(path: Path) -> str:
    about = path.stat()
    return _of_file(str(path.resolve()), about.st_size, about.st_mtime_ns)


@cache
def _of_file(path: str, size: int, _changed: int) -> str:
    """Return the digest of a file's size and blocks; cached, since all cells of a study need the same few files."""
    blocks = -(-size // BLOCK)
    every = range(blocks) if blocks <= SAMPLES else [i * (blocks - 1) // (SAMPLES - 1) for i in range(SAMPLES)]
    sha = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for block in every:
            file.seek(block * BLOCK)
            sha.update(file.read(BLOCK))
    return sha.hexdigest()


def _identity(config: Config) -> dict[str, Any]:
    tables = to_dict(config)
    for key in PLACES:
        if key in tables["task"]:
            tables["task"][key] = content(tables["task"][key]) or tables["task"][key]
    return with_paths(
        tables, lambda path: f"{doors.short(path)}, {doors.sha256(path)}" if doors.is_path(path) else path
    )


def _digest_of_name_and_content(recorded: Config, wanted: Config) -> str:
    """Return the digest that an earlier version gave a folder if its paths had the contents of the wanted ones."""
    tables = to_dict(recorded)
    for key in PLACES:
        found = content(getattr(wanted.task, key))
        if found is not None:
            tables["task"][key] = f"{Path(tables['task'][key]).name}, {found}"
    return _digest(tables)


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings without model and data."""
    tables = to_dict(config)
    return {**tables, "task": {key: value for key, value in tables["task"].items() if key not in PLACES}}


def _digest(tables: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:DIGITS]
