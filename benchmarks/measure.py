"""What the benchmarks share: figures with their targets, the table and the JSON file. Timing is cyber0.bench.timing.

Not a script.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cyber0.bench.timing import Call, Figure, interleaved, seconds

__all__ = ["Call", "Figure", "Section", "interleaved", "main", "seconds"]

Section = Callable[[bool], Iterator[Figure]]
"""Yields figures; the argument asks for a quick look instead of a measurement."""


def main(description: str, sections: Mapping[str, Section], machine: Mapping[str, Any]) -> int:
    """Run the sections that the command line asks for, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", "--tiny", action="store_true", help="a smoke run: small shapes, few repetitions, figures mean little"
    )
    parser.add_argument(
        "--only",
        choices=sections,
        action="append",
        help="one section; may be repeated; others stay as they are in FILE",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures to FILE")
    arguments = parser.parse_args()
    chosen = {name: sections[name] for name in arguments.only or sections}
    machine = {**_versions(), **machine, "quick": arguments.quick}
    results: dict[str, list[Figure]] = {}
    for name, section in chosen.items():
        results[name] = list(_guarded(name, section, arguments.quick))
        if arguments.json is not None:  # after each: a long measurement that is stopped has not been for nothing
            _write(arguments.json, results, machine, renew=arguments.only is not None or len(results) > 1)
    _print_table(results, machine)
    return int(any(figure.value is None for found in results.values() for figure in found))


def _write(path: Path, results: Mapping[str, list[Figure]], machine: Mapping[str, Any], renew: bool) -> None:
    """Write the figures to a file; what it holds of other sections stays when only some are renewed."""
    kept = json.loads(path.read_text())["figures"] if renew and path.exists() else []
    kept = [figure for figure in kept if figure["section"] not in results]
    new = [
        {"section": name, **asdict(figure), "reached": figure.reached}
        for name, found in results.items()
        for figure in found
    ]
    path.write_text(json.dumps({"machine": machine, "figures": kept + new}, indent=2) + "\n")


def _guarded(name: str, section: Section, quick: bool) -> Iterator[Figure]:
    """Run a section; what it raises becomes a figure without a value, so that the other sections are not lost."""
    from rich.console import Console

    status = Console(stderr=True)
    begin = time.perf_counter()
    try:
        for figure in section(quick):
            status.print(f"[dim]{time.perf_counter() - begin:6.1f} s[/]  {name}: {figure.name}  {_shown(figure)}")
            yield figure
    except Exception as error:
        status.print_exception()
        yield Figure("failed", None, "", note=f"{type(error).__name__}: {error}"[:200])


def _print_table(results: Mapping[str, list[Figure]], machine: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    marks = {True: "[green]reached[/]", False: "[red]missed[/]", None: ""}
    table = Table(caption=", ".join(f"{name} {value}" for name, value in machine.items()))
    for heading in ("section", "figure", "value", "target", "", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left")
    for name, figures in results.items():
        for number, figure in enumerate(figures):
            sign = "≥" if figure.at_least else "≤"
            target = "" if figure.target is None else f"{sign} {_number(figure.target)} {figure.unit}"
            label = "" if number else name
            table.add_row(label, figure.name, _shown(figure), target, marks[figure.reached], figure.note)
        table.add_section()
    # Piped output has no width to fit into: a line is then as long as it needs to be.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def _shown(figure: Figure) -> str:
    return "[red]failed[/]" if figure.value is None else f"{_number(figure.value)} {figure.unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "numba", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
