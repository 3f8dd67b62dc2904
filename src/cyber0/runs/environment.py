"""Where a run ran: what others need to know to get the same figures. No host name, no user, no path."""

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

import cyber0
from cyber0 import __version__
from cyber0.directions.backends import device_name

SOURCE_DIGITS = 12
PACKAGE = Path(cyber0.__file__).parent
PACKAGES = ("torch", "numpy", "numba", "triton", "safetensors")


def describe(device: str) -> dict[str, str | int]:
    """Return the versions and the machine of this process, which computes losses on `device`."""
    result: dict[str, str | int] = {"cyber0": __version__, "source": source_digest()[:SOURCE_DIGITS]}
    commit = _commit(PACKAGE.resolve().parents[1])
    if commit:
        result["git_commit"] = commit
    result["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    result["platform"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    result["cpu"] = cpu_name()
    result["cpu_count"] = os.cpu_count() or 1
    torch = sys.modules.get("torch")
    if torch is not None:
        result["torch_threads"] = torch.get_num_threads()
        result["device"] = device_name(device)
    return result


@cache
def source_digest() -> str:
    """Return the SHA-256 of all of cyber0's source: other code may give other results."""
    sha = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        sha.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def code() -> str:
    """Return which code this process runs: its version and the digest of its source."""
    return f"{__version__}+{source_digest()[:SOURCE_DIGITS]}"


def code_of(summary: Mapping[str, Any]) -> str:
    """Return which code made a run, according to its summary; empty if that was not recorded."""
    made = summary.get("environment")
    if not isinstance(made, Mapping) or "cyber0" not in made:
        return ""
    return f"{made['cyber0']}+{made['source']}" if "source" in made else str(made["cyber0"])


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _commit(root: Path) -> str | None:
    """Return the commit of a source checkout, read from its files: git may be absent, and is slow to start."""
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
