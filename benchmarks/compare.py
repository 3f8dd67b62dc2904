"""Compare this checkout's speed with another one's: the same benchmark in both, in turn.

    git worktree add ../before HEAD~1
    python benchmarks/compare.py ../before cpu.py --only mnist --repeats 5
    python benchmarks/compare.py ../before gpu_step.py --only step --json compared.json

Every repetition is a process of its own (before, after, before, after, ...). A figure is within the spread if the
ranges of both checkouts overlap. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
Figures = dict[str, list[float]]


def measure(checkout: Path, script: str, options: list[str], figures: Figures) -> None:
    """Run one benchmark of a checkout once, and add its figures to those of earlier repetitions."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        command = [sys.executable, str(checkout / "benchmarks" / script), "--json", str(result), *options]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.DEVNULL, check=False)
        for figure in json.loads(result.read_text())["figures"]:
            if figure["value"] is not None:
                name = f"{figure['section']}: {figure['name']} [{figure['unit']}]"
                figures.setdefault(name, []).append(figure["value"])


def spread(values: list[float]) -> str:
    """Return the median of the repetitions and their range, to be read."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> int:
    """Measure, print a table, and exit with 1 if some figure is outside the spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("script", help="a benchmark that takes --json, such as cpu.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    arguments, options = parser.parse_known_args()
    before: Figures = {}
    after: Figures = {}
    for _ in range(arguments.repeats):
        measure(arguments.before.resolve(), arguments.script, options, before)
        measure(HERE, arguments.script, options, after)
    shared = [name for name in before if name in after]
    outside = [n for n in shared if min(before[n]) > max(after[n]) or min(after[n]) > max(before[n])]
    for name in shared:
        mark = "OUT" if name in outside else "ok "
        print(f"{mark} {name:<60} before {spread(before[name]):<32} after {spread(after[name])}", flush=True)
    if arguments.json:
        rows = {name: {"before": before[name], "after": after[name], "within": name not in outside} for name in shared}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(bool(outside) or not shared)


if __name__ == "__main__":
    sys.exit(main())
