"""What the files of a run's folder are called (scripts rely on these names), and how a file is written."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cyber0.errors import DataError

CONFIG, WEIGHTS, LEDGER = "config.toml", "w0.safetensors", "ledger.bin"
STATE, REPORTS = "state.safetensors", "reports.bin"
METRICS, CLIENTS, PARTITION = "metrics.csv", "clients.csv", "partition.csv"
SUMMARY, REPORT, DIAGNOSTICS = "summary.json", "report.html", "diagnostics.json"
SERVED, TASK_DIGEST = "served.json", "task.sha256"
PLOTS, TENSORBOARD = "plots", "tensorboard"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context, what the system refuses is an error that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free some space" if error.errno in _FULL else "make sure that it can be written to"
        raise DataError(
            f"{path} can't be written: {error.strerror or error}; {remedy} and try again (a run continues by --resume)"
        ) from error


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a file to write to, which then replaces `path`: in whole or not at all.

    It gets the mode that the umask gives to new files, whatever whoever writes it would give it. Unless `durable`, a
    power cut may leave an empty file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
        try:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            temporary.chmod(mode)
            if durable:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file in whole or not at all."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def give_normal_modes(folder: Path) -> None:
    """Give all files in a folder the mode that the umask gives to new ones."""
    with naming(folder):
        probe = folder / f".mode.{os.getpid()}"
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for file in folder.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(mode)
