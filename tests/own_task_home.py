"""A user's folder with a task of one's own, and the command run there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


SETTINGS = "rounds = 8\nevaluate_every = 4\n[federation]\nclients = 8\nbyzantine = 2\n[method]\nk = 8\nbatch_size = 8\n"


def write_config(home: Path, name: str, more: str = "") -> Path:
    path = home / "config.toml"
    path.write_text(f'{SETTINGS}[task]\nname = "{name}"\n{more}\n')
    return path


def cyber0(*arguments: object, cwd: Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "cyber0", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
