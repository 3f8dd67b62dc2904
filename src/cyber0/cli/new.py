"""`cyber0 new`: a folder with a task of one's own, its settings, its test and a README, which run as they are."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError

SUFFIX = ".txt"  # of the templates: they are not code of this package


@with_json
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the task: letters, digits, - and _.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write. (default: NAME)", show_default=False)
    ] = None,
) -> Reply:
    """Write a folder for a task of your own: task, settings, test and README, which run as they are.

    The task learns synthetic data with a small network; replace both with yours. Nothing is overwritten.
    """
    task, folder = class_name(name), out or Path(name)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists: choose another NAME or --out DIR; nothing was overwritten")
    texts = {path: text.replace("@CLASS@", task).replace("@NAME@", name) for path, text in _templates().items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8")
    return Reply({"folder": folder, "task": task, "files": sorted(texts)}, lambda: _show(folder, sorted(texts)))


def _show(folder: Path, files: list[str]) -> None:
    print(f"{folder}/: {', '.join(files)}")
    print(f"next: cd {folder} && cyber0 run config.toml")


def class_name(name: str) -> str:
    """Return the name of the task's class, `SpamFilter` for spam-filter.

    Raises:
        ConfigError: the name gives none.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ConfigError(
            f"NAME = {name!r} can't name a folder and a class: use letters, digits, - and _, and begin with a letter"
        )
    found = "".join(part[0].upper() + part[1:] for part in re.split(r"[-_]+", name) if part)
    if keyword.iskeyword(found):
        raise ConfigError(f"NAME = {name!r} gives the class {found}, which Python reserves; choose another")
    return found


def _templates() -> dict[str, str]:
    """Return the files by their names."""
    folder = resources.files("cyber0.cli") / "template"
    return {
        path.name.removesuffix(SUFFIX): path.read_text(encoding="utf-8")
        for path in folder.iterdir()
        if path.name.endswith(SUFFIX)
    }
