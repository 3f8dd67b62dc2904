"""What the paper shows, made again: one file for each table, figure or theorem.

`cyber0 reproduce NAME` looks a name up here, imports its module and calls its function:

    def reproduce(out: Path, seeds: int | None, quick: bool, progress: Progress) -> Path

`out` is the folder to write into (made by the caller), `seeds` how many repetitions (None: the module's own default),
`quick` asks for a few seconds' worth with the same files, `progress` takes a line for the person who waits. It
writes NAME.png, NAME.svg, NAME.csv (tidy: one row an observation) and NAME.md (the comparison), with `outputs`, and
returns the path of the last. What takes over a minute is cut into parts (`outputs.part`), so that it can be resumed.
To add one, write the module and a line in REPRODUCTIONS. This file loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from cyber0.errors import ConfigError
from cyber0.settings import closest

Progress = Callable[[str], None]
Function = Callable[[Path, "int | None", bool, Progress], Path]


class Reproduction(NamedTuple):
    """Where to find one, and what it shows."""

    module: str
    text: str


REPRODUCTIONS: dict[str, Reproduction] = {
    "theorem1": Reproduction("theorem1", "robustness error against n, m, beta and k, beside Delta"),
    "theorem2": Reproduction("theorem2", "distance to the minimiser for mu = 0, beside the bound"),
    "theorem3": Reproduction("theorem3", "the same for mu > 0, and whether sqrt(d) remains as k grows"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "theory": ("theorem1", "theorem2", "theorem3"),
    "all": tuple(REPRODUCTIONS),
}


def names(name: str) -> tuple[str, ...]:
    """Return the reproductions that a name or the name of a group stands for."""
    if name in REPRODUCTIONS:
        return (name,)
    if name in GROUPS:
        return GROUPS[name]
    known = [*REPRODUCTIONS, *GROUPS]
    near = closest(name, known)
    remedy = f"did you mean {near!r}?" if near else f"possible are {', '.join(known)}"
    raise ConfigError(f"nothing to reproduce is called {name!r}; {remedy}")


def find(name: str) -> Function:
    """Return the function that reproduces it."""
    function: Function = import_module(f"cyber0.paper.{REPRODUCTIONS[name].module}").reproduce
    return function
