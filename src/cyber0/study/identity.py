"""Which run is which: by its settings, and by what its model and data are, wherever they lie.

A run is found again by the digest of its settings. Files and folders, that of a user's own task too, count by name and
content, so that a study whose
model file was moved does not run again.

Of a file above 32 MiB only SAMPLES blocks spread over it are read. A fine-tuned copy differs in nearly all of them, so
it is told apart; but an equal digest is no proof that two large files are equal: a change between the blocks goes
unnoticed, and the run of the other file is reused. A study that must not rest on this is run in a new folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cyber0 import doors
from cyber0.config import DOORS, Config, agreed, to_dict, with_paths
from cyber0.tasks import loading

BLOCK, SAMPLES = 2**16, 2**9  # files up to 32 MiB are read whole
PLACES = ("model", "data")  # the keys of [task] that may be paths
DIGITS = 10


def digest(config: Config) -> str:
    """Return what tells a run from all others: equal settings, equal model, equal data, equal digest.

    The reverse is as good as the sampling of large files: see above.
    """
    return _digest(_identity(config))


def digest_by_path(config: Config) -> str:
    """Return the same with paths as they are written, by which earlier versions named their folders."""
    return _digest(to_dict(config))


def digest_by_name(config: Config) -> str:
    """Return the same with names of files and folders in place of their contents: equal where `portable` is."""
    return _digest(to_dict(portable(config)))


def portable(config: Config) -> Config:
    """Return the config with files by name alone: equal for runs that may differ in where these lie."""
    if any(doors.is_path(getattr(getattr(config, section), name)) for section, name in DOORS):
        config = Config.recorded(agreed(config))
    task = config.task
    name = loading.portable(task.name)
    if not (task.model or task.data) and name == task.name:
        return config
    return replace(config, task=replace(task, name=name, model=Path(task.model).name, data=Path(task.data).name))


def same_content(one: Config, other: Config) -> bool | None:
    """Tell whether two configs that are portably equal have the same model and data; None if that can't be known.

    Files above 32 MiB are compared by samples, so True is no proof for them.
    """
    pairs = [(getattr(one.task, key), getattr(other.task, key)) for key in PLACES]
    known = [(content(a), content(b)) for a, b in pairs if a != b]
    return None if any(None in pair for pair in known) else all(a == b for a, b in known)


def lacks_files(config: Config) -> bool:
    """Tell whether the config names a file or folder by a path at which there is none."""
    places = [*(getattr(config.task, key) for key in PLACES), loading.file_in(config.task.name)]
    return any(Path(place).is_absolute() and not Path(place).exists() for place in places if place)


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
    """Return the digest of a file's size and blocks; all cells of a study ask for the same few files."""
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
    if (found := loading.digest_of(config.task.name)) is not None:
        tables["task"]["name"] = f"{loading.portable(config.task.name)}, {found}"
    for key in PLACES:
        found = content(tables["task"][key])
        if found is not None:
            tables["task"][key] = f"{Path(tables['task'][key]).name}, {found}"
    return with_paths(
        tables, lambda path: f"{doors.short(path)}, {doors.sha256(path)}" if doors.is_path(path) else path
    )


def _digest(tables: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:DIGITS]
