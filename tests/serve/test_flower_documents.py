"""The commands of docs/DEPLOY.md that try the Flower app on one machine, as they are written there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower in an environment of its own: see docs/DEPLOY.md")
pytest.importorskip("ray", reason="Flower simulates nodes with it; the extra flower brings it")

ROOT = Path(__file__).parents[2]
PORT = 39091  # of the SuperLink that `flwr run` starts


def commands() -> list[str]:
    page = (ROOT / "docs/DEPLOY.md").read_text(encoding="utf-8").partition("**Try it**")[2]
    (block,) = re.findall(r"```\n(.*?)```", page, re.DOTALL)[:1]
    return block.splitlines()


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A user with an empty home; the SuperLink that Flower leaves in the background ends with the test."""
    with socket.socket() as one:
        if one.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"a local SuperLink listens on port {PORT} already: stop it")
    home = tmp_path / "home"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    yield {**os.environ, "FLWR_HOME": str(home), "PATH": path, "FLWR_TELEMETRY_ENABLED": "0",
           "FLWR_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "200"}  # fmt: skip
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(home).encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGTERM)
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", PORT)) != 0:
                break
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.mnist
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the SuperLink by /proc")
def test_the_app_runs_in_flowers_simulation_by_the_commands_of_the_page(
    environment: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples/flower", tmp_path / "examples/flower")
    run, verify = commands()
    assert run.startswith("flwr run examples/flower") and verify.startswith("cyber0 verify")
    said = [subprocess.run(command, shell=True, cwd=tmp_path, env=environment, text=True, timeout=900,
                           capture_output=True, check=False) for command in (run, verify)]  # fmt: skip
    for done in said:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all is well" in said[1].stdout
    held = re.findall(r"holds client=\d+ digest=([0-9a-f]{64})", said[0].stdout + said[0].stderr)
    assert len(held) == 2 and set(held) == set(re.findall(r"^digest ([0-9a-f]{64})", said[1].stdout, re.MULTILINE))
