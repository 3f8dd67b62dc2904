"""The paper's tables, figures and theorems, reproduced: one file for each.

`cyber0 reproduce NAME` looks a name up here, imports its module and calls its function:

    def reproduce(request: Request) -> Path

It writes NAME.png, NAME.svg, NAME.csv (tidy: one row per observation) and NAME.md (the comparison), with `outputs`, and
returns the path of the last. What takes over a minute is split into parts (`outputs.part`), so that it can be resumed.
To add one, write the module and a line in REPRODUCTIONS. This file loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError


class TextRequest(NamedTuple):
    """The options that concern language models."""

    model: str = ""
    """A name on the hub, a folder or a .gguf file; empty: the paper's."""
    steps: int | None = None
    """Steps in place of the paper's 20,000; other lengths are scaled in proportion."""
    tasks: tuple[str, ...] = ()
    """Some of sst2, trec, snli; empty: those that the paper shows."""
    data: Path | None = None
    """The folder that contains the folders sst2, trec and snli; None: use the hub."""
    workers: int = 1
    """Parallel runs."""


class SearchRequest(NamedTuple):
    """The options of a study that searches learning rates."""

    passes: float | None = None
    """Forward passes over the training samples in a full run; None: each task's own budget."""
    only: tuple[str, ...] = ()
    """What to run, as task/variant, with wildcards; empty: everything."""
    minutes: float | None = None
    """Stop after this time; None: when everything is done."""
    targets: tuple[str, ...] = ()
    """Accuracies in percent to count the forward passes to, as task=percent."""


class Request(NamedTuple):
    """What to reproduce, and how."""

    out: Path
    """The folder to write to, created by the caller; several reproductions may share it."""
    seeds: int | None = None
    """How many repetitions; None: the reproduction's default."""
    quick: bool = False
    """A preview: the same files in a few seconds."""
    progress: Callable[[str], None] = print
    """Called with a line of progress."""
    overrides: tuple[str, ...] = ()
    """Settings that override the paper's in all its runs, as for `cyber0 run --set`."""
    redraw: bool = False
    """Draw from the finished runs, and run nothing."""
    text: TextRequest = TextRequest()
    """The options that concern language models."""
    name: str = ""
    """Which reproduction it is; if given, one that shows more runs is not redrawn from fewer."""
    rerun: bool = False
    """Run again what another version of cyber0 finished."""
    search: SearchRequest = SearchRequest()
    """The options of a study that searches learning rates."""


ReproduceFunction = Callable[[Request], Path]


class Reproduction(NamedTuple):
    """Where a reproduction is defined, and what it shows."""

    module: str
    text: str
    function: str = "reproduce"
    made_of: Literal["computations", "runs", "text runs"] = "computations"
    """Runs are ordinary ones, whose settings can be overridden; text runs are those of a language model."""
    sets: tuple[str, ...] = ()
    """The text data sets that it shows; empty: any."""


REPRODUCTIONS: dict[str, Reproduction] = {
    "fig1a": Reproduction("fig1", "MNIST: accuracy over scalars sent, k = 1 to 64 and FedAvg", "over_scalars", "runs"),
    "fig1b": Reproduction("fig1", "the same over steps", "over_steps", "runs"),
    "fig1c": Reproduction("fig1", "MNIST: five attacks on k = 64, a quarter Byzantine, non-IID", "attacks", "runs"),
    "table1": Reproduction("table1", "MNIST: Krum, trimmed mean and CyBeR-0 under attack, m = 40", made_of="runs"),
    "communication": Reproduction("communication", "MNIST: bytes until a target accuracy, all methods", made_of="runs"),
    "readings": Reproduction("table1", "table1 under other readings of the paper", "readings", "runs"),
    "table2": Reproduction(
        "table2", "a language model on SST-2, TREC, SNLI: IID or not, attacked or not", made_of="text runs"
    ),
    "fig2": Reproduction(
        "fig2", "SST-2: training loss over steps, from table2's runs", "on_sst2", "text runs", ("sst2",)
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
    "optimizers": Reproduction(
        "optimizers", "the optimizers at equal forward passes: MNIST, ridge and language models", made_of="text runs"
    ),
    "theorem1": Reproduction("theorem1", "robustness error against n, m, beta and k, beside Delta"),
    "theorem2": Reproduction("theorem2", "distance to the minimiser for mu = 0, beside the bound"),
    "theorem3": Reproduction("theorem3", "the same for mu > 0, and whether sqrt(d) remains as k grows"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "mnist": ("fig1a", "fig1b", "fig1c", "table1", "communication"),
    "text": ("table2", "fig2", "fig3", "table3", "table6"),
    "theory": ("theorem1", "theorem2", "theorem3"),
    "all": tuple(name for name in REPRODUCTIONS if name != "optimizers"),  # which is not the paper's
}


def names(name: str, tasks: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the reproductions that a name or group stands for, restricted to those that show these text sets."""
    chosen = [one for one in _known(name) if not REPRODUCTIONS[one].sets or not tasks
              or set(tasks) & set(REPRODUCTIONS[one].sets)]  # fmt: skip
    if not chosen:
        shown = ", ".join(REPRODUCTIONS[name].sets)
        raise ConfigError(f"{name} shows {shown}, and --tasks {','.join(tasks)} names none of these")
    return tuple(chosen)


def _known(name: str) -> tuple[str, ...]:
    if name in REPRODUCTIONS:
        return (name,)
    if name in GROUPS:
        return GROUPS[name]
    raise ConfigError(f"unknown reproduction {name!r}; {suggestion(name, [*REPRODUCTIONS, *GROUPS])}")


def find(name: str) -> ReproduceFunction:
    """Return the function of a reproduction."""
    found = REPRODUCTIONS[name]
    function: ReproduceFunction = getattr(import_module(f"cyber0.reproduce.{found.module}"), found.function)
    return function
