"""What can be chosen, and what to choose: `cyber0 list`, `cyber0 theory`, `cyber0 data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cyber0.cli import completion
from cyber0.cli import display as screen
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError

if TYPE_CHECKING:
    from cyber0.config.keys import KeyDescription
    from cyber0.report.advice import Setting


@with_json
def list_(
    settings: Annotated[
        bool, typer.Option("--settings", help="Show the paper's settings (its Tables 4 and 5) instead.")
    ] = False,
) -> Reply:
    """Show every setting and every name that can be chosen."""
    if settings:
        from cyber0.reproduce.settings import tables

        found = [{"title": t.title, "rows": [dict(zip(t.head, r, strict=True)) for r in t.rows]} for t in tables()]
        return Reply(found, _show_paper_settings)
    return Reply(_everything(), _show_everything)


def _everything() -> dict[str, Any]:
    """Return what `cyber0 list` shows."""
    from cyber0.config.choices import ADAPTERS, TASKS
    from cyber0.config.keys import describe
    from cyber0.config.presets import of_adapter, of_task
    from cyber0.reproduce import GROUPS, REPRODUCTIONS

    settings = [
        {
            "name": key.name,
            "default": key.default,
            "meaning": key.text,
            "limits": key.limits,
            "choices": [
                {"name": name, "meaning": text, "options": _options(key, name)} for name, text in key.choices.items()
            ],
        }
        for key in describe()
    ]
    return {
        "settings": settings,
        "defaults_by_task": {task: dict(of_task(task)) for task in TASKS if of_task(task)},
        "defaults_by_adapter": {name: dict(of_adapter(name)) for name in ADAPTERS if of_adapter(name)},
        "reproductions": {name: found.text for name, found in REPRODUCTIONS.items()},
        "groups_of_reproductions": {name: list(members) for name, members in GROUPS.items()},
    }


def _show_everything() -> None:
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

    from cyber0.config.choices import ADAPTERS, TASKS
    from cyber0.config.keys import describe
    from cyber0.config.presets import of_adapter, of_task

    console = screen.new_console()
    table = Table("setting", "default", "meaning", title="Settings (TOML keys, and --set SECTION.KEY=VALUE)")
    for key in describe():
        meaning = key.text + (f" ({key.limits})" if key.limits else "")
        if key.choices:
            meaning += "".join(f"\n  {name}: {text}{_taken(key, name)}" for name, text in key.choices.items())
        table.add_row(key.name, repr(key.default), meaning)
    console.print(table)
    table = Table("where", "other defaults", title="Defaults that depend on another setting")
    for task in filter(of_task, TASKS):
        table.add_row(f"task.name = {task!r}", "\n".join(f"{k} = {v!r}" for k, v in of_task(task).items()))
    for name in filter(of_adapter, ADAPTERS):
        table.add_row(f"task.adapter = {name!r}", "\n".join(f"{k} = {v!r}" for k, v in of_adapter(name).items()))
    console.print(table)


def _options(key: KeyDescription, name: str) -> str:
    """Return the options that a name takes; empty if it takes none."""
    from cyber0.config.registry import Registry

    return key.choices.entry(name).shown_options if isinstance(key.choices, Registry) else ""


def _taken(key: KeyDescription, name: str) -> str:
    """Return the options that a name takes, as a sentence."""
    options = _options(key, name)
    return f" Options: {options}." if options else ""


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


@with_json
def theory(
    d: Annotated[int, typer.Option("--d", parser=_whole, metavar="N", help="Dimension: number of weights, as 1e6.")],
    k: Annotated[int, typer.Option("--k", parser=_whole, metavar="N", help="Directions per round.")] = 64,
    m: Annotated[int, typer.Option("--m", parser=_whole, metavar="N", help="Clients.")] = 12,
    n: Annotated[int, typer.Option("--n", parser=_whole, metavar="N", help="Samples of each client.")] = 1000,
    byzantine: Annotated[
        int | None, typer.Option(metavar="N", help="Byzantine clients. (default: floor(beta m))")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(metavar="X", help="Share trimmed at each end. (default: byzantine / m, or 0.25)")
    ] = None,
    mu: Annotated[float, typer.Option(metavar="X", help="Probing step; 0: projected gradients.")] = 0.001,
    strong_convexity: Annotated[
        float, typer.Option("--lambda", metavar="X", help="Least curvature of the loss.")
    ] = 0.1,
    smoothness: Annotated[float, typer.Option("--smoothness", metavar="X", help="L_F, largest curvature.")] = 1.0,
    noise: Annotated[
        float, typer.Option(metavar="X", help="Deviation of one sample's slope; v = d times it, unless --v.")
    ] = 1.0,
    v: Annotated[
        float | None, typer.Option("--v", metavar="X", help="Sub-exponential parameter of one sample's scalar.")
    ] = None,
    diameter: Annotated[float, typer.Option(metavar="X", help="D, of the set that holds the weights.")] = 10.0,
    lipschitz: Annotated[
        float | None, typer.Option(metavar="X", help="L_w + L_z of a sample's scalar. (default: d L_F (1 + D))")
    ] = None,
    distance: Annotated[float | None, typer.Option(metavar="X", help="||w0 - w*||. (default: D / 2)")] = None,
    error: Annotated[
        float | None, typer.Option(metavar="X", help="Distance to reach. (default: a tenth of --distance)")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the bound over rounds for several k.")] = None,
) -> Reply:
    """Suggest lr, k and rounds: rules of thumb, and what the paper's theorems guarantee."""
    from cyber0.report import advice

    setting = advice.make_setting(
        d=d, k=k, m=m, n=n, byzantine=byzantine, beta=beta, mu=mu, strong_convexity=strong_convexity,
        smoothness=smoothness, noise=noise, v=v, diameter=diameter, lipschitz=lipschitz, distance=distance, error=error,
    )  # fmt: skip
    if plot is not None:
        advice.check_picture(plot)
        advice.picture(setting, plot)
    return Reply(advice.figures(setting), lambda: _show_advice(setting, plot))


def _show_advice(setting: Setting, plot: Path | None) -> None:
    from rich.table import Table

    from cyber0.report import advice

    console, s = screen.new_console(), setting
    title = (
        f"d = {s.d:,}, k = {s.k:,}, m = {s.m}, n = {s.n:,}, {s.byzantine} Byzantine, beta = {s.beta:g}, mu = {s.mu:g}"
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
        print(f"{plot}: the bound over rounds for several k, with its floor")


@with_json
def data(
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=completion.data_sets, help="mnist, sst2, snli or trec")
    ],
    force: Annotated[bool, typer.Option("--force", help="Fetch it again even if it is cached.")] = False,
) -> Reply:
    """Fetch a data set into the user's cache folder, or show where it is."""
    from cyber0.config.choices import DATASETS
    from cyber0.tasks import mnist

    if name not in DATASETS:
        raise ConfigError(f"unknown data set {name!r}; possible are {', '.join(DATASETS)}")
    if name != "mnist":
        from cyber0.tasks.text import sentences

        text = sentences.fetch(name, force)
        return Reply({"name": name, "summary": text}, lambda: print(f"{name}: {text}"))
    fetched = mnist.fetch(force)
    found = {"name": name, "summary": fetched.summary, "path": fetched.path}
    return Reply(found, lambda: print(f"{fetched.path}: {fetched.summary}"))
