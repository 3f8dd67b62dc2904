"""What the paper shows, made again: one file for each table, figure or theorem.

`cyber0 reproduce NAME` looks a name up here, imports its module and calls its function:

    def reproduce(order: Order) -> Path

It writes NAME.png, NAME.svg, NAME.csv (tidy: one row an observation) and NAME.md (the comparison), with `outputs`, and
returns the path of the last. What takes over a minute is cut into parts (`outputs.part`), so that it can be resumed.
To add one, write the module and a line in REPRODUCTIONS. This file loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError

Progress = Callable[[str], None]


class TextOrder(NamedTuple):
    """What is wanted of a language model."""

    model: str = ""
    """A name on the hub, a folder or a .gguf file; empty: the paper's."""
    steps: int | None = None
    """In place of the paper's 20,000; what took more or fewer steps there does so in proportion."""
    tasks: tuple[str, ...] = ()
    """Of sst2, trec, snli; none: those that the paper shows."""
    data: Path | None = None
    """The folder that holds the folders sst2, trec and snli; None: from the hub."""
    workers: int = 1
    """Runs at a time."""


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
    redraw: bool = False
    """Show what the runs that are done give, and play none."""
    text: TextOrder = TextOrder()
    """What is wanted of the language models' reproductions."""
    name: str = ""
    """Which reproduction it is: what was drawn from more runs is then not redrawn from fewer."""
    rerun: bool = False
    """Play again what another version of cyber0 finished."""


Function = Callable[[Order], Path]


class Reproduction(NamedTuple):
    """Where to find one, and what it shows."""

    module: str
    text: str
    function: str = "reproduce"
    made_of: Literal["computations", "runs", "text runs"] = "computations"
    """Runs are ordinary ones, whose settings can be replaced; text runs are those of a language model."""
    sets: tuple[str, ...] = ()
    """The only text sets that it shows; none: any."""


REPRODUCTIONS: dict[str, Reproduction] = {
    "fig1a": Reproduction("fig1", "MNIST: accuracy over scalars sent, k = 1 to 64 and FedAvg", "over_scalars", "runs"),
    "fig1b": Reproduction("fig1", "the same over steps", "over_steps", "runs"),
    "fig1c": Reproduction("fig1", "MNIST: five attacks on k = 64, a quarter lies, non-IID", "attacks", "runs"),
    "table1": Reproduction("table1", "MNIST: Krum, trimmed mean and CyBeR-0 under attack, m = 40", made_of="runs"),
    "communication": Reproduction("communication", "MNIST: bytes until a target accuracy, all methods", made_of="runs"),
    "readings": Reproduction("table1", "table1 as it could be read otherwise", "readings", "runs"),
    "table2": Reproduction(
        "table2", "a language model on SST-2, TREC, SNLI: IID or not, attacked or not", made_of="text runs"
    ),
    "fig2": Reproduction(
        "fig2", "SST-2: training loss over steps, of table2's runs", "on_sst2", "text runs", ("sst2",)
    ),
    "fig3": Reproduction("fig2", "TREC and SNLI: the same", "on_trec_and_snli", "text runs", ("trec", "snli")),
    "table3": Reproduction(
        "table3", "SST-2 under attack, non-IID: k = 1 to 8, and 8 to 32 clients", made_of="text runs"
    ),
    "table3_lr": Reproduction(
        "table3", "table3's k with the learning rate scaled by k", "scaled_lr", made_of="text runs"
    ),
    "table6": Reproduction("table6", "SST-2 under attack, non-IID: 1 to 100 local epochs", made_of="text runs"),
    "communication_text": Reproduction(
        "communication_text",
        "a language model: bytes until a target accuracy, beside FedAvg and FedZO",
        made_of="text runs",
    ),
    "theorem1": Reproduction("theorem1", "robustness error against n, m, beta and k, beside Delta"),
    "theorem2": Reproduction("theorem2", "distance to the minimiser for mu = 0, beside the bound"),
    "theorem3": Reproduction("theorem3", "the same for mu > 0, and whether sqrt(d) remains as k grows"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "mnist": ("fig1a", "fig1b", "fig1c", "table1", "communication"),
    "text": ("table2", "fig2", "fig3", "table3", "table6"),
    "theory": ("theorem1", "theorem2", "theorem3"),
    "all": tuple(REPRODUCTIONS),
}


def names(name: str, tasks: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the reproductions that a name or the name of a group stands for, as far as they show these text sets."""
    chosen = [one for one in _known(name) if not REPRODUCTIONS[one].sets or not tasks
              or set(tasks) & set(REPRODUCTIONS[one].sets)]  # fmt: skip
    if not chosen:
        shown = ", ".join(REPRODUCTIONS[name].sets)
        raise ConfigError(f"{name} shows {shown}, and --tasks {','.join(tasks)} names none of them")
    return tuple(chosen)


def _known(name: str) -> tuple[str, ...]:
    if name in REPRODUCTIONS:
        return (name,)
    if name in GROUPS:
        return GROUPS[name]
    raise ConfigError(f"nothing to reproduce is called {name!r}; {suggestion(name, [*REPRODUCTIONS, *GROUPS])}")


def find(name: str) -> Function:
    """Return the function that reproduces it."""
    found = REPRODUCTIONS[name]
    function: Function = getattr(import_module(f"cyber0.reproduce.{found.module}"), found.function)
    return function
