"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cyber0.cli import completion
from cyber0.errors import ConfigError

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
RerunOption = Annotated[
    bool,
    typer.Option("--rerun", help="Run again what another version of cyber0 finished; the old runs move to 'earlier'."),
]


def set_option(help: str) -> Any:
    """Return the option --set, which overrides settings."""
    return typer.Option("--set", metavar="SECTION.KEY=VALUE", autocompletion=completion.settings, help=help)


def device_option(help: str) -> Any:
    """Return the option --device."""
    return typer.Option(metavar="cpu|cuda|cuda:N", autocompletion=completion.devices, help=help)


SetOption = Annotated[list[str] | None, set_option("Override one setting; may be repeated.")]
DeviceOption = Annotated[
    str | None,
    device_option("Where losses are computed."),
]
ReplayDeviceOption = Annotated[
    str,
    device_option("Where to compute; the bits are the same."),
]
ConfigArgument = Annotated[
    Path,
    typer.Argument(metavar="CONFIG.toml|TASK|FILE.py:NAME", help="Settings of the run, a task, or one of your own."),
]


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that can't be created or written to, before anything is written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{option} {folder} can't be a folder: {there} is a file; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} can't be used: {there} can't be written to; choose another")
