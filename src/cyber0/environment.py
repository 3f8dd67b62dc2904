"""On what a run ran: what another person needs to know to get the same numbers. No host name, no user, no path."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cyber0 import __version__

PACKAGES = ("torch", "numpy", "numba", "triton", "safetensors")


def describe(device: str) -> dict[str, str | int]:
    """Return versions and machine of this process, which computes losses on `device`."""
    found: dict[str, str | int] = {"cyber0": __version__}
    commit = _commit(Path(__file__).resolve().parents[2])
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
        found["device"] = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
    return found


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
