"""What the paper shows, made again: one file for each table, figure or theorem.

`cyber0 reproduce NAME` looks a name up here, imports its module and calls its function:

    def reproduce(order: Order) -> Path

It writes NAME.png, NAME.svg, NAME.csv (tidy: one row an observation) and NAME.md (the comparison), with `outputs`, and
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


class Order(NamedTuple):
    """What is wanted."""

    out: Path
    """The folder to write into, made by the caller; several reproductions may share it."""
    seeds: int | None = None
    """How many repetitions; None: as many as is usual for it."""
    quick: bool = False
    """A first look: the same files in a few seconds."""
    progress: Progress = print
    """Takes a line for the person who waits."""
    overrides: tuple[str, ...] = ()
    """Settings of all its runs that replace the paper's, as `cyber0 run --set` takes them."""


Function = Callable[[Order], Path]


class Reproduction(NamedTuple):
    """Where to find one, and what it shows."""

    module: str
    text: str
    function: str = "reproduce"
    by_runs: bool = False
    """Whether it is made of ordinary runs, whose settings can be replaced."""


REPRODUCTIONS: dict[str, Reproduction] = {
    "fig1a": Reproduction("fig1", "MNIST: accuracy over scalars sent, k = 1 to 64 and FedAvg", "over_scalars", True),
    "fig1b": Reproduction("fig1", "the same over steps", "over_steps", True),
    "fig1c": Reproduction("fig1", "MNIST: five attacks on k = 64, a quarter lies, non-IID", "attacks", True),
    "table1": Reproduction("table1", "MNIST: Krum, trimmed mean and CyBeR-0 under attack, m = 40", by_runs=True),
    "communication": Reproduction("communication", "MNIST: bytes until a target accuracy, all methods", by_runs=True),
    "readings": Reproduction("table1", "table1 as it could be read otherwise", "readings", True),
    "theorem1": Reproduction("theorem1", "robustness error against n, m, beta and k, beside Delta"),
    "theorem2": Reproduction("theorem2", "distance to the minimiser for mu = 0, beside the bound"),
    "theorem3": Reproduction("theorem3", "the same for mu > 0, and whether sqrt(d) remains as k grows"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "mnist": ("fig1a", "fig1b", "fig1c", "table1", "communication"),
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
    found = REPRODUCTIONS[name]
    function: Function = getattr(import_module(f"cyber0.paper.{found.module}"), found.function)
    return function
