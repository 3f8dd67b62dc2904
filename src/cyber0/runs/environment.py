"""On what a run ran: what another person needs to know to get the same numbers. No host name, no user, no path."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cyber0 import __version__
from cyber0.directions.backends import device_name

SOURCE_DIGITS = 12
PACKAGES = ("torch", "numpy", "numba", "triton", "safetensors")


def describe(device: str) -> dict[str, str | int]:
    """Return versions and machine of this process, which computes losses on `device`."""
    found: dict[str, str | int] = {"cyber0": __version__, "source": source_digest()[:SOURCE_DIGITS]}
    commit = _commit(Path(__file__).resolve().parents[3])
    if commit:
        found["git_commit"] = commit
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["platform"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found["cpu"] = _cpu_name()
    found["cpu_count"] = os.cpu_count() or 1
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        found["device"] = device_name(device)
    return found


@cache
def source_digest() -> str:
    """Return SHA-256 of all of cyber0's source: what other code computed need not be this code's result."""
    root = Path(__file__).parents[1]
    sha = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sha.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def code() -> str:
    """Return which code this process runs: its version and its source."""
    return f"{__version__}+{source_digest()[:SOURCE_DIGITS]}"


def code_of(summary: Mapping[str, Any]) -> str:
    """Return which code made the run of a summary, as far as that was recorded."""
    made = summary.get("environment")
    if not isinstance(made, Mapping) or "cyber0" not in made:
        return ""
    return f"{made['cyber0']}+{made['source']}" if "source" in made else str(made["cyber0"])


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _commit(root: Path) -> str | None:
    """Return the commit that a source checkout is at, read from its files: git may be absent, and is slow to start."""
    git = root / ".git"
    if not (root / "pyproject.toml").exists():
        return None
    try:
        if git.is_file():  # a worktree: its own HEAD, and refs in the folder that all worktrees share
            git = (root / git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        name = head.partition(":")[2].strip()
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
        return next((line[0] for line in packed if line[1:] == [name]), None)
    except OSError:
        return None
