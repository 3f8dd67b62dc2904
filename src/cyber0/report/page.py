"""The report: one HTML file that needs nothing but a browser.

Everything is inside: the data as JSON, the script that draws it, uPlot, the styles. The script builds the page by
textContent alone, and the page's content security policy forbids other scripts and any fetch, so HTML in a run's name
or settings is shown as text, never executed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cyber0.errors import DataError
from cyber0.report.contents import contents
from cyber0.report.folder import read
from cyber0.runs.folder import RunFolder
from cyber0.storage import naming, write_text

GENERATOR = '<meta name="generator" content="cyber0">'
_MARK = re.compile(r"@@([a-z_]+)@@")


def write(folders: Sequence[Path], out: Path, *, remedy: str = "") -> Path:
    """Write the report of one or several runs, completely or not at all; `remedy`: what to do if that fails."""
    try:
        text = page([read(folder) for folder in folders])
    except OSError as error:
        place = error.filename or ", ".join(map(str, folders))
        raise DataError(f"{place} can't be read for the report: {error.strerror or error}") from error
    with naming(out, remedy):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text, durable=False, remedy=remedy)
    return out


def check_out(out: Path) -> None:
    """Refuse to overwrite anything but a report."""
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; name the file, for example {out / 'report.html'}")
    if out.exists() and GENERATOR not in out.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise DataError(f"--out {out} exists and is no report of cyber0, so it is left alone; choose another name")


def page(runs: Sequence[RunFolder], *, live: dict[str, Any] | None = None) -> str:
    """Return the whole page; a live one polls the server it came from."""
    data = contents(runs, live=live)
    names = ", ".join(run["name"] for run in data["runs"])
    plain = [f"{run['name']}: {run['sentence']}" for run in data["runs"]]
    return document(f"{names[:200]} - cyber0", plain, data, "report.js", connects=live is not None)


def document(
    title: str, plain: Sequence[str], data: Mapping[str, Any], script: str, *, connects: bool,
    styles: Sequence[str] = ("report.css",),
) -> str:  # fmt: skip
    """Return a page of ours as one HTML file.

    Args:
        title: Of the window.
        plain: Paragraphs for a viewer that runs no script.
        data: What the script draws.
        script: The asset that draws it.
        connects: Whether it may talk to the server it came from.
        styles: The assets that it is styled by.
    """
    scripts = [_asset(name) for name in ("uplot.min.js", "common.js", script)]
    allowed = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    return _filled(
        _asset("page.html"),
        {
            "generator": GENERATOR,
            "policy": f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
            f"connect-src '{'self' if connects else 'none'}'; base-uri 'none'; form-action 'none'",
            "title": html.escape(title),
            "licence": html.escape(_asset("uplot.LICENSE")),
            "styles": "\n".join(map(_asset, ("uplot.min.css", *styles))),
            "plain": "\n".join(f"<p>{html.escape(line)}</p>" for line in plain),
            "data": to_json(data),
            "scripts": "\n".join(f"<script>{text}</script>" for text in scripts),
        },
    )


def to_json(data: Mapping[str, Any]) -> str:
    """Return data as JSON that is safe inside a script element: nothing in it can end that element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Fill a template in one pass, so that the text of a value is never taken for a placeholder."""
    return _MARK.sub(lambda mark: values[mark[1]], template)


@cache
def _asset(name: str) -> str:
    return (files("cyber0.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
