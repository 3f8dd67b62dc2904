"""What `make docs` makes itself: the pages that follow from the code, and copies of what lies outside docs/.

mkdocs calls the functions named on_...; the others are what the tests call, too.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/*.*", "examples/flower/*")
KINDS = {"int": "N", "float": "NUMBER", "Path": "PATH"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)[^)\s]+(?=\))")
FETCHED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]*)"')
FENCE = re.compile(r"^ *(```|~~~)")


def on_files(files: Any, config: Any) -> Any:
    """Add copies of the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated, and make a page that reads well on a code host read well here, too."""
    if page.file.src_uri in GENERATED:
        return GENERATED[page.file.src_uri]()
    return for_site(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Refuse a site of which a page would fetch something from the network."""
    from mkdocs.exceptions import PluginError

    for page in Path(config.site_dir).rglob("*.html"):
        if found := FETCHED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page} fetches {found[1]}; keep a copy in docs/assets and name that")


def for_site(markdown: str, uri: str) -> str:
    """Return a page with links as they are in the site, and lists as mkdocs reads them.

    A link that leaves docs/ leads to the copy in the site. What belongs to an item of a list is indented by two spaces
    in our files; Python-Markdown wants four.
    """
    at_root = "/" not in uri and (ROOT / uri).exists()
    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced ^= bool(FENCE.match(line))
        if not fenced:
            line = re.sub(
                r"(?<=\]\()(?!https?:|#|mailto:)([^)\s]+)(?=\))", lambda m: _in_site(m[1], uri, at_root), line
            )
            line = re.sub(r"^  (?=[^ ])", "    ", line)
        lines.append(line)
    return "\n".join(lines)


def _in_site(link: str, uri: str, at_root: bool) -> str:
    """Return where a link leads in the site."""
    path, mark, anchor = link.partition("#")
    here = ROOT if at_root else (ROOT / "docs" / uri).parent
    found = Path(os.path.normpath(here / path))
    base = ROOT / "docs" if found.is_relative_to(ROOT / "docs") else ROOT
    name = found.relative_to(base).as_posix()
    if base == ROOT and name == "README.md":
        name = "index.md"
    return os.path.relpath(name, Path(uri).parent) + mark + anchor


def settings_page() -> str:
    """Return the page of every setting, from what `cyber0 list` shows."""
    from cyber0.config.choices import ADAPTERS, TASKS
    from cyber0.config.keys import SECTIONS, describe, toml_value
    from cyber0.config.presets import of_adapter, of_task

    lines = ["# Settings", "", "Keys of a config file, or `--set SECTION.KEY=VALUE` on the command line. `cyber0 list` "
             "shows the same, and every run's `config.toml` holds all of them."]  # fmt: skip
    named: dict[str, Mapping[str, str]] = {}
    section = None
    for key in describe():
        above, _, _ = key.name.rpartition(".")
        if above != section:
            section = above
            about = inspect.getdoc(SECTIONS[section]) if section else "The run as a whole."
            lines += ["", f"## {f'[{section}]' if section else 'At the top'}", "", f"{about}", ""]
            lines += ["| setting | default | meaning |", "|---|---|---|"]
        meaning = key.text + (f" ({key.limits})" if key.limits else "")
        if key.choices:
            named[key.name] = key.choices
            meaning += f": [one of {len(key.choices)}](#{key.name.replace('.', '')}-choices)"
        lines.append(f"| `{key.name}` | `{toml_value(key.default)}` | {_cell(meaning)} |")
    lines += ["", "## Names that can be chosen"]
    for name, choices in named.items():
        lines += ["", f"### {name} {{ #{name.replace('.', '')}-choices }}", "", "| name | meaning |", "|---|---|"]
        lines += [f"| `{choice}` | {_cell(text + _options(choices, choice))} |" for choice, text in choices.items()]
    lines += ["", "## Defaults that depend on another setting", "", "| where | other defaults |", "|---|---|"]
    found = {f'task.name = "{task}"': of_task(task) for task in TASKS}
    found |= {f'task.adapter = "{adapter}"': of_adapter(adapter) for adapter in ADAPTERS}
    for where, values in found.items():
        if values:
            lines.append(f"| `{where}` | {', '.join(f'`{key} = {toml_value(v)}`' for key, v in values.items())} |")
    return "\n".join(lines) + "\n"


def _options(choices: Mapping[str, str], name: str) -> str:
    """Return the options that a name takes, as a sentence."""
    from cyber0.config.registry import Registry

    taken = choices.entry(name).shown_options if isinstance(choices, Registry) else ""
    return f" Options: `{taken}`." if taken else ""


def command_line_page() -> str:
    """Return the page of every command, from the command line itself."""
    from typer.main import get_command

    from cyber0.cli.main import app

    group: Any = get_command(app)
    lines = ["# Command line", "", group.help, "", "Exit codes are listed in [Exit codes and JSON]"
             "(../CLI.md#exit-codes). `cyber0 --install-completion` lets the shell complete commands, options, "
             "settings and their values."]  # fmt: skip
    for name, command in group.commands.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        usage = " ".join(["cyber0", name, *([] if not options else ["[OPTIONS]"]), *map(_argument, arguments)])
        lines += ["", f"## cyber0 {name}", "", command.help or "", "", f"    {usage}", ""]
        rows = [(_argument(p), p) for p in arguments] + [(_option(p), p) for p in options]
        if rows:
            lines += ["| argument or option | meaning |", "|---|---|"]
            lines += [f"| `{shown}` | {_cell((p.help or '') + _default(p))} |" for shown, p in rows]
    return "\n".join(lines) + "\n"


def _argument(parameter: Any) -> str:
    """Write an argument as the usage does."""
    shown = (parameter.metavar or parameter.name.upper()) + ("..." if parameter.nargs == -1 else "")
    return str(shown if parameter.required else f"[{shown}]")


def _option(parameter: Any) -> str:
    """Write an option with the value that it takes."""
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return names
    return f"{names} {parameter.metavar or _kind(parameter)}"


def _kind(parameter: Any) -> str:
    """Return what stands for the value of an option that names none itself."""
    annotation = str(parameter.type_descriptor.annotation)
    return next((word for part, word in KINDS.items() if part in annotation), "TEXT")


def _default(parameter: Any) -> str:
    """Write the default of a parameter, if there is one to show that its text does not."""
    default = parameter.default
    if getattr(parameter, "is_flag", False) or default in (None, "", [], ()) or callable(default):
        return ""
    return f" (default: `{default}`)"


def _cell(text: str) -> str:
    """Return a text that can stand in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


GENERATED = {"reference/settings.md": settings_page, "reference/command_line.md": command_line_page}
"""Pages whose files in docs/ only say so: their text follows from the code, so it can't go stale."""
