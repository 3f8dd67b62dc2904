"""`cyber0 bench`: the speed of this machine beside that of ours."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyber0.cli import display as screen
from cyber0.cli import options
from cyber0.cli.output import Reply, with_json

if TYPE_CHECKING:
    from rich.table import Table

    from cyber0.bench.machines import Machine
    from cyber0.bench.timing import Figure


@with_json
def bench(device: Annotated[str, options.device_option("What to measure.")] = "cpu") -> Reply:
    """Measure how fast this machine is, in about a minute at most, and show it beside our machines.

    Let the machine do nothing else meanwhile: a slow one measures each figure fewer than five times. Ratios are of
    calls that are timed in turn, so other work disturbs them least.
    """
    from cyber0.bench import figures, machines
    from cyber0.directions.backends import check_device
    from cyber0.kernels.memory import keep_freed_memory

    check_device(device)
    keep_freed_memory()
    console, found = screen.new_console(), []
    with console.status("measuring") as status:
        for figure in figures.measure(device, figures.shapes_for(device)):
            found.append(figure)
            status.update(f"measuring; {figure.name}: {shown(figure.value)} {figure.unit}")
    mine = machines.this_machine(device, found)
    return Reply({"machines": [asdict(mine)]}, lambda: console.print(table(found, mine, machines.load())))


def table(figures: list[Figure], mine: Machine, ours: list[Machine]) -> Table:
    """Return the figures of this machine beside those that others have of the same name."""
    from rich.table import Table

    made = Table(caption="Less is better for ratios (x), more for all others.", caption_justify="left")
    made.add_column("figure")
    made.add_column(f"this machine\n{mine.name}", justify="right")
    for one in ours:
        made.add_column(f"{one.name}\n{one.date}", justify="right")
    made.add_column("unit")
    made.add_column("of")
    for figure in figures:
        others = [shown(one.figures.get(figure.name)) for one in ours]
        made.add_row(figure.name, shown(figure.value), *others, figure.unit, figure.note)
    return made


def shown(value: float | None) -> str:
    """Return a number by three digits; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
