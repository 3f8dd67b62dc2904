"""What the files of a run's folder are called (scripts rely on these names), and how a file is written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cyber0.errors import DataError

CONFIG, WEIGHTS, LEDGER = "config.toml", "w0.safetensors", "ledger.bin"
STATE, REPORTS = "state.safetensors", "reports.bin"
METRICS, CLIENTS, PARTITION = "metrics.csv", "clients.csv", "partition.csv"
SUMMARY, REPORT, DIAGNOSTICS = "summary.json", "report.html", "diagnostics.json"
SERVED, SOURCES, TASK_DIGEST = "served.json", "sources.json", "task.sha256"
PLOTS, TENSORBOARD = "plots", "tensorboard"
MODEL, MODEL_FOLDER = "model.safetensors", "model"

STATE_PROGRESS, STATE_DIGEST = "progress", "digest"
"""The metadata of STATE: how far the run has come, as JSON, and `state_digest`, which older files lack."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def naming(path: Path, remedy: str = "") -> Iterator[None]:
    """Within this context, what the system refuses is an error that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        first = "free some space" if error.errno in _FULL else "make sure that it can be written to"
        remedy = remedy or f"{first} and try again (a run continues by --resume)"
        raise DataError(f"{path} can't be written: {error.strerror or error}; {remedy}") from error


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True, private: bool = False, remedy: str = "") -> Iterator[Path]:
    """Yield a file to write to, which then replaces `path`: in whole or not at all.

    It gets the mode that the umask gives to new files, or if `private` one that nobody else can read, whatever mode the
    writer gives it. Unless `durable`, a power cut may leave an empty file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path, remedy):
        try:
            temporary.touch(0o600 if private else 0o666)
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            with contextlib.suppress(OSError):  # a file system without modes
                temporary.chmod(mode)
            if durable:
                with temporary.open("r+b") as file:  # Windows forces only what may be written to the disk
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True, private: bool = False, remedy: str = "") -> None:
    """Write a file in whole or not at all; see `replacing`."""
    with replacing(path, durable=durable, private=private, remedy=remedy) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield where to make a folder, which then replaces the file or folder at `path`, if any: in whole or not at all.

    On an error what was there stays, and what was made is removed.
    """
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    try:
        yield new
        with naming(path):
            if path.exists():
                path.rename(old)
            try:
                new.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise
    finally:
        _remove(new)
        if path.exists():  # else the old one could not be put back, and must be kept
            _remove(old)


def _remove(path: Path) -> None:
    """Remove a file or folder as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def give_normal_modes(folder: Path) -> None:
    """Give all files in a folder the mode that the umask gives to new ones."""
    with naming(folder):
        probe = folder / f".mode.{os.getpid()}"
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for file in folder.rglob("*"):
            if file.is_file() and not file.is_symlink():
                with contextlib.suppress(OSError):  # a file system without modes
                    file.chmod(mode)


def state_digest(progress: str, weights: Mapping[str, Any]) -> str:
    """Return the digest that detects a damaged checkpoint: SHA-256 of its progress and weights, by name."""
    sha = hashlib.sha256(progress.encode())
    for name in sorted(weights):
        sha.update(name.encode())
        sha.update(weights[name])
    return sha.hexdigest()
