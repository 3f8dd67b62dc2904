"""What can be chosen, and what to choose: `cyber0 list`, `cyber0 theory`, `cyber0 data`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from cyber0.cli import completion
from cyber0.cli import display as screen
from cyber0.errors import ConfigError


def list_(
    settings: Annotated[
        bool, typer.Option("--settings", help="Show the paper's settings (its Tables 4 and 5) instead.")
    ] = False,
) -> None:
    """Show every setting and every name that can be chosen."""
    if settings:
        _show_paper_settings()
        return
    _show_settings()
    _show_reproductions()


def _show_paper_settings() -> None:
    from rich.table import Table

    from cyber0.reproduce.settings import tables

    for shown in tables():
        table = Table(*shown.head, title=shown.title)
        for row in shown.rows:
            table.add_row(*row)
        screen.new_console().print(table)


def _show_settings() -> None:
    from rich.table import Table

    from cyber0.config.choices import TASKS
    from cyber0.config.keys import describe
    from cyber0.config.presets import of_task

    console = screen.new_console()
    table = Table("setting", "default", "meaning", title="Settings (TOML keys, and --set SECTION.KEY=VALUE)")
    for key in describe():
        meaning = key.text + (f" ({key.limits})" if key.limits else "")
        if key.choices:
            meaning += "".join(f"\n  {name}: {text}{_options(key.choices, name)}" for name, text in key.choices.items())
        table.add_row(key.name, repr(key.default), meaning)
    console.print(table)
    table = Table("where", "other defaults", title="Defaults that depend on another setting")
    for task in filter(of_task, TASKS):
        table.add_row(f"task.name = {task!r}", "\n".join(f"{k} = {v!r}" for k, v in of_task(task).items()))
    console.print(table)


def _options(choices: Mapping[str, str], name: str) -> str:
    """Return the options that a name takes, as a sentence; empty if it takes none."""
    from cyber0.config.registry import Registry

    taken = choices.entry(name).shown_options if isinstance(choices, Registry) else ""
    return f" Options: {taken}." if taken else ""


def _show_reproductions() -> None:
    from rich.table import Table

    from cyber0.reproduce import GROUPS, REPRODUCTIONS

    table = Table("name", "what it shows", title="What `cyber0 reproduce NAME` reproduces")
    for name, reproduction in REPRODUCTIONS.items():
        table.add_row(name, reproduction.text)
    for name, members in GROUPS.items():
        table.add_row(name, ", ".join(members))
    screen.new_console().print(table)


def _whole(text: str | int) -> int:
    """Read a whole number, which may be written as 1e6."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():  # infinity is not one either
            raise ValueError(f"{text} is not a whole number") from None
        return int(float(text))


def theory(
    d: Annotated[int, typer.Option("--d", parser=_whole, metavar="N", help="Dimension: number of weights, as 1e6.")],
    k: Annotated[int, typer.Option("--k", parser=_whole, metavar="N", help="Directions per round.")] = 64,
    m: Annotated[int, typer.Option("--m", parser=_whole, metavar="N", help="Clients.")] = 12,
    n: Annotated[int, typer.Option("--n", parser=_whole, metavar="N", help="Samples of each client.")] = 1000,
    byzantine: Annotated[int | None, typer.Option(help="Byzantine clients. (default: floor(beta m))")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Share trimmed at each end. (default: byzantine / m, or 0.25)")
    ] = None,
    mu: Annotated[float, typer.Option(help="Probing step; 0: projected gradients.")] = 0.001,
    strong_convexity: Annotated[float, typer.Option("--lambda", help="Least curvature of the loss.")] = 0.1,
    smoothness: Annotated[float, typer.Option("--smoothness", help="L_F, largest curvature.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Deviation of one sample's slope; v = d times it, unless --v.")] = 1.0,
    v: Annotated[float | None, typer.Option("--v", help="Sub-exponential parameter of one sample's scalar.")] = None,
    diameter: Annotated[float, typer.Option(help="D, of the set that holds the weights.")] = 10.0,
    lipschitz: Annotated[
        float | None, typer.Option(help="L_w + L_z of a sample's scalar. (default: d L_F (1 + D))")
    ] = None,
    distance: Annotated[float | None, typer.Option(help="||w0 - w*||. (default: D / 2)")] = None,
    error: Annotated[float | None, typer.Option(help="Distance to reach. (default: a tenth of --distance)")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the bound over rounds for several k.")] = None,
) -> None:
    """Suggest lr, k and rounds: rules of thumb, and what the paper's theorems guarantee."""
    from cyber0.report import advice

    setting = advice.make_setting(
        d=d, k=k, m=m, n=n, byzantine=byzantine, beta=beta, mu=mu, strong_convexity=strong_convexity,
        smoothness=smoothness, noise=noise, v=v, diameter=diameter, lipschitz=lipschitz, distance=distance, error=error,
    )  # fmt: skip
    if plot is not None:
        advice.check_picture(plot)
    from rich.table import Table

    console = screen.new_console()
    title = (
        f"d = {d:,}, k = {k:,}, m = {m}, n = {n:,}, {setting.byzantine} Byzantine, beta = {setting.beta:g}, mu = {mu:g}"
    )
    console.print(title, style="bold")
    bound = f"for the bound (Theorem {setting.number})"
    answer = Table("choose", "in practice", bound, "where the practical value comes from")
    for choice in advice.choices(setting):
        answer.add_row(*choice)
    console.print(answer)
    for line in advice.caveats(setting):
        console.print(f"- {line}", soft_wrap=True)
    details = Table("quantity", "value", "what it means", title="What the theorems say")
    for row in advice.table(setting):
        details.add_row(*row)
    console.print(details)
    for line in advice.dominating(setting):
        console.print(f"- {line}", soft_wrap=True)
    if plot is not None:
        print(f"{advice.picture(setting, plot)}: the bound over rounds for several k, with its floor")


def data(
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=completion.data_sets, help="mnist, sst2, snli or trec")
    ],
    force: Annotated[bool, typer.Option("--force", help="Fetch it again even if it is cached.")] = False,
) -> None:
    """Fetch a data set into the user's cache folder, or show where it is."""
    from cyber0.config.choices import DATASETS
    from cyber0.tasks import mnist

    if name not in DATASETS:
        raise ConfigError(f"unknown data set {name!r}; possible are {', '.join(DATASETS)}")
    if name != "mnist":
        from cyber0.tasks.text import sentences

        print(f"{name}: {sentences.fetch(name, force)}")
        return
    fetched = mnist.fetch(force)
    print(f"{fetched.path}: {fetched.summary}")
