"""What every reproduction writes: a tidy CSV, a figure as PNG and SVG, a comparison in Markdown; and its parts."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.errors import ConfigError
from cyber0.report.plots import DPI
from cyber0.reproduce import Request
from cyber0.runs import environment
from cyber0.storage import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
PNG_COLOURS = 256  # a palette takes a third of the bytes of full colour, and a plot has few colours
UNFINISHED = "runs are not done"  # marks a table that lacks some


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write one row per observation; columns in order of first appearance, empty where a row has no value."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_figure(folder: Path, name: str, figure: Figure) -> None:
    """Write NAME.png and NAME.svg; the same figure gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    FigureCanvasAgg(figure)
    for axes in figure.axes:  # on logarithmic axes they are many, and take most of the time
        axes.minorticks_off()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(PNG_COLOURS).save(folder / f"{name}.png", optimize=True)
    figure.set_layout_engine("none")  # keep the layout of the first format
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; floats have three digits."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines)


def latex_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the same table in LaTeX, for the package booktabs."""

    def line(cells: Sequence[Any]) -> str:
        return " & ".join(_latex(_cell(cell)) for cell in cells) + r" \\"

    body = [line(row) for row in rows]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(head)}}}", r"\toprule", line(head), r"\midrule", *body,
                      r"\bottomrule", r"\end{tabular}"]) + "\n"  # fmt: skip


def part(out: Path, name: str, settings: Mapping[str, Any], compute: Callable[[], list[Row]]) -> list[Row]:
    """Return what `compute` gives, or what it gave for the same settings in an earlier call.

    Rows are stored in OUT/parts/NAME.json, so that an interrupted reproduction resumes with the first missing part. A
    change of the settings or of any file of cyber0 makes it start again.
    """
    path = out / "parts" / f"{name}.json"
    wanted = json.loads(json.dumps({**settings, "source": environment.source_digest()}))
    try:
        kept = json.loads(path.read_text())
        if kept["settings"] == wanted:
            rows: list[Row] = kept["rows"]
            return rows
    except (OSError, ValueError, KeyError, TypeError):  # missing, damaged, or of another kind
        pass
    rows = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"settings": wanted, "rows": rows}))
    return rows


def gather(
    request: Request, name: str, seeds: int, parts: Mapping[str, tuple[str, Callable[[], list[Row]]]]
) -> list[Row]:
    """Return the rows of all parts; each is given by a description and the function that computes it."""
    rows: list[Row] = []
    for key, (text, compute) in parts.items():
        request.progress(f"{name}: {text}, {seeds} seeds")
        rows += part(request.out, f"{name}-{key}", {"seeds": seeds, "quick": request.quick}, compute)
    return rows


def drawn_from(request: Request, runs: int, wanted: int) -> None:
    """Record from how many of the wanted runs a reproduction is about to be drawn, and with which options.

    Refuses to redraw one from fewer runs than it shows: a forgotten option would otherwise overwrite a finished table.
    """
    if not request.name:
        return
    path, table = request.out / "parts" / f"{request.name}.runs.json", request.out / f"{request.name}.md"
    shown, options = _shown(path, table, wanted)
    if request.redraw and runs < shown:
        made_with = f" ({shlex.join(options)})" if options else ""
        raise ConfigError(
            f"--redraw finds {runs} runs, and {table} shows {shown}; repeat the options it was made with"
            f"{made_with}, or remove {table} to replace it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": runs, "options": _options(request)}), encoding="utf-8")


def _shown(path: Path, table: Path, wanted: int) -> tuple[int, list[str]]:
    """Return how many runs the existing table shows, 0 if there is none, and the options it was made with."""
    if not table.exists():
        return 0, []
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return int(kept["runs"]), list(map(str, kept["options"]))
    except (OSError, ValueError, KeyError, TypeError):  # written by an earlier version, which recorded nothing
        return (0 if UNFINISHED in table.read_text(encoding="utf-8") else wanted), []


def _options(request: Request) -> list[str]:
    text = request.text
    given: dict[str, object] = {"--seeds": request.seeds, "--steps": text.steps, "--tasks": ",".join(text.tasks),
                                "--model": text.model, "--data": text.data,
                                "--passes": request.search.passes}  # fmt: skip
    pairs = [(name, str(value)) for name, value in given.items() if value]
    pairs += [("--set", setting) for setting in request.overrides]
    return [word for pair in pairs for word in pair] + (["--quick"] if request.quick else [])


def write_all(out: Path, name: str, rows: Sequence[Row], figure: Figure, comparison: str) -> Path:
    """Write NAME.csv, NAME.png, NAME.svg and NAME.md, and return the path of the last."""
    write_csv(out / f"{name}.csv", rows)
    write_figure(out, name, figure)
    path = out / f"{name}.md"
    path.write_text(comparison, encoding="utf-8")
    return path


def _latex(text: str) -> str:
    for plain, escaped in (("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("±", r"$\pm$"), ("–", "--"), ("**", "")):
        text = text.replace(plain, escaped)
    return text


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
