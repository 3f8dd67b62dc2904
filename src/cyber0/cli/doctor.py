"""`cyber0 doctor`: whether this installation works, and what is missing for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyber0.cli import display as screen
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console


@with_json
def doctor() -> Reply:
    """Check this installation: versions, devices, kernels, data caches, disks, and what is missing.

    The exit code is 0 if what the base install needs works, and 1 otherwise. The kernels of each device are compared
    with their definition, bit by bit; they are compiled the first time, which takes some seconds.
    """
    from cyber0.cli.health import examine

    console = screen.new_console()
    with console.status("looking") as status:
        found = examine(lambda what: status.update(f"checking {what}"))
    return Reply(found, lambda: show(found, console), ExitCode.DONE if found["ok"] else ExitCode.FAULTS)


def show(found: dict[str, Any], console: Console) -> None:
    """Print the findings, and last what to do."""
    from rich.table import Table

    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()), style="bold")
    table = Table("package", "version", "needs", "for", "state")
    for package in found["packages"]:
        table.add_row(package["name"], package["version"] or "–", package["needs"], ", ".join(package["needed_by"]),
                      package["state"], style=_style(package))  # fmt: skip
    for package in found["other_packages"]:
        state = "ok" if package["version"] else "missing"
        table.add_row(package["name"], package["version"] or "–", "", package["for"], state)
    console.print(table)
    table = Table("device", "name", "cores", "memory", "kernels")
    for device in found["devices"]:
        style = None if device["kernels"] == "ok" else "red"
        kernels = "compile, and give the defined bits" if device["kernels"] == "ok" else device["kernels"]
        table.add_row(device["device"], device["name"], str(device["cores"] or "–"), _size(device["memory_bytes"]),
                      kernels, style=style)  # fmt: skip
    console.print(table)
    table = Table("cache", "", "where")
    for cache in found["caches"]:
        table.add_row(cache["what"], "there" if cache["present"] else f"empty ({cache['remedy']})", str(cache["path"]))
    console.print(table)
    for disk in found["disks"]:
        locked = "" if disk["writable"] else ", and can't be written to"
        console.print(f"{disk['path']}: {_size(disk['free_bytes'])} free{locked}", soft_wrap=True, markup=False)
    for extra in found["extras"]:
        if extra["missing"]:
            console.print(f"for the extra {extra['name']} ({', '.join(extra['missing'])}): {extra['remedy']}",
                          soft_wrap=True, markup=False)  # fmt: skip
    for fault in found["faults"]:
        console.print(f"fault: {fault}", style="red", soft_wrap=True, markup=False)
    if found["ok"]:
        console.print("all that the base install needs works", style="green")


def _style(package: dict[str, Any]) -> str | None:
    """Return red for what the base install lacks, yellow for what is installed and can't be used."""
    if package["state"] == "ok":
        return None
    return "red" if "base" in package["needed_by"] else "yellow" if package["version"] else "dim"


def _size(count: int | None) -> str:
    """Return a number of bytes in GB."""
    return "–" if count is None else f"{count / 1e9:,.1f} GB"
