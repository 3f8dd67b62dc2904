"""The Markdown tables of docs/RESULTS.md, from the files that the benchmarks write.

python benchmarks/tables.py docs/results/cpu.json docs/results/gpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def number(value: float) -> str:
    """Write a number in three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figure_table(figures: list[dict[str, Any]]) -> list[str]:
    """Return one line a figure, the section named where it begins."""
    lines, last = ["| | figure | value | target | |", "|---|---|---|---|---|"], None
    for figure in figures:
        value = "failed" if figure["value"] is None else f"{number(figure['value'])} {figure['unit']}".strip()
        target = figure["target"]
        sign = "≥" if figure["at_least"] else "≤"
        goal = "" if target is None else f"{sign} {number(target)} {figure['unit']}".strip()
        mark = {True: "reached", False: "**missed**", None: ""}[figure["reached"]]
        remark = "; ".join(part for part in (mark, figure["note"]) if part)
        section = "" if figure["section"] == last else figure["section"]
        lines.append(f"| {section} | {figure['name']} | {value} | {goal} | {remark} |")
        last = figure["section"]
    return lines


if __name__ == "__main__":
    for name in sys.argv[1:] or ["docs/results/cpu.json"]:
        found = json.loads(Path(name).read_text())
        machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        print(f"{name} ({machine})\n\n" + "\n".join(figure_table(found["figures"])) + "\n")
