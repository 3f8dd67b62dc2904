"""How help is shown: no types for flags and arguments, paragraphs as wide as the terminal, commands in groups."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def flowing(text: str) -> str:
    """Return a docstring with the lines of each paragraph joined: typer keeps their breaks at any width of terminal."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


class _Plain:
    """What typer adds to its help is left out: `<bool>` beside a flag, `<path>` beside DIR, braces around {DIR}."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the class that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]  # as above
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in pieces]


class Command(_Plain, TyperCommand):
    """A command."""


class Group(_Plain, TyperGroup):
    """All commands together."""


def add(app: typer.Typer, command: Any, panel: str, name: str | None = None) -> None:
    """Add a command to the command line, in a panel of its help."""
    app.command(name, cls=Command, help=flowing(command.__doc__ or ""), rich_help_panel=panel)(command)
