"""How large the report of a long run is, how soon it is made, and how soon a browser has drawn it.

python benchmarks/report.py [DIR]      # DIR: a run's folder; none: 20,000 rounds, each evaluated, are made up
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cyber0.config.files import to_toml
from cyber0.config.schema import Config
from cyber0.report import page

ROUNDS, REPEATS = 20_000, 5


def main() -> None:
    """Print the three figures."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _made_up(Path(home) / "run")
        out = Path(home) / "report.html"
        print(f"made in {_median(lambda: page.write([folder], out)):.3f} s")
        print(f"size {out.stat().st_size:,} bytes")
        browser = shutil.which("chromium")
        if browser is None:
            print("not opened: no chromium is installed")
            return
        drawn = [_open(browser, out) for _ in range(REPEATS)]
        print(f"drawn in {statistics.median(drawn):.2f} s (slowest {max(drawn):.2f} s)")


def _open(browser: str, out: Path) -> float:
    """Return the seconds from asking for the page to its charts being drawn, as the page itself measures them."""
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", out.as_uri()],
                          capture_output=True, text=True, check=True)  # fmt: skip
    drawn = re.search(r'<html[^>]* data-drawn="(\d+)"', done.stdout)
    if drawn is None or done.stdout.count("<canvas") != 4:
        raise RuntimeError("the page has not drawn its four charts")
    return int(drawn[1]) / 1000


def _median(what: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _made_up(folder: Path) -> Path:
    """Write the two files without which there is no curve."""
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(Config().with_overrides([f"rounds={ROUNDS}", "evaluate_every=1"])))
    lines = ["round,accuracy,loss,uplink_bytes,downlink_bytes,decided,seconds"]
    for t in range(ROUNDS + 1):
        noise, left = 0.01 * math.sin(12.9898 * t), math.exp(-5 * t / ROUNDS)
        lines.append(f"{t},{0.9 - 0.8 * left + noise},{0.4 + 1.9 * left + noise},{256 * t},{256 * t},{t},{0.01 * t}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


if __name__ == "__main__":
    main()
