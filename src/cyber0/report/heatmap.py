"""The heat map of a study: a row for each rule, a column for each attack, a panel for each setting of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.report.plots import BLUE, DPI, GREY, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

CELL_WIDTH, CELL_HEIGHT = 0.78, 0.46  # inches
NARROWEST, WIDEST = 5.5, 16.0  # inches; more panels go below each other
MARGIN = 0.2  # inches, kept free beside titles
BETWEEN = 0.6  # inches, from panel to panel
GAP = 0.2  # of a cell, before the column of the worst
WORST = "worst attack"


@dataclass(frozen=True)
class Panel:
    """One heat map; accuracies are 0 to 1, other figures are unscaled, None where there is none."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    means: Sequence[Sequence[float | None]]
    deviations: Sequence[Sequence[float | None]]
    marked: Sequence[int | None]
    """For each row the column of its worst attack."""
    in_percent: bool = True
    """Whether the figures are accuracies; colours of other figures range from the worst to the best of the panel."""
    higher: bool = True
    """Whether more is better."""

    def shade(self, mean: float) -> float:
        """Return how good a mean is, 0 to 1."""
        if self.in_percent:
            return mean
        finite = [m for row in self.means for m in row if m is not None and math.isfinite(m)]
        if not math.isfinite(mean) or not finite:
            return 0.0
        low, high = min(finite), max(finite)
        place = (mean - low) / (high - low) if high > low else 1.0
        return place if self.higher or high == low else 1 - place

    def written(self, value: float) -> str:
        """Return a mean or deviation as a cell shows it."""
        return f"{100 * value:.1f}" if self.in_percent else f"{value:.3g}"


def heatmap_picture(panels: Sequence[Panel], paths: Sequence[Path], title: str) -> None:
    """Draw the panels as one picture and write it to every path, in the format of its suffix."""
    from matplotlib import rc_context

    figure = heatmap_figure(panels, title)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "cyber0"}):  # with that and without a date, equal results give equal files
            figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)


def heatmap_figure(panels: Sequence[Panel], title: str) -> Figure:
    """Return the panels as one figure, as wide as needed and at least NARROWEST; longer titles are wrapped."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = 0.085 * max(len(row) for panel in panels for row in panel.rows) + 0.3
    width = CELL_WIDTH * (max(len(panel.columns) for panel in panels) + 1 + GAP)
    height = CELL_HEIGHT * max(len(panel.rows) for panel in panels)
    heads = 0.055 * max(len(name) for panel in panels for name in (*panel.columns, WORST)) + 0.25  # they are slanted
    across = _across(len(panels), width, labels)
    down = math.ceil(len(panels) / across)
    whole = max(labels + across * (width + BETWEEN) + 0.4, NARROWEST)
    headline = _wrapped(title, 12, whole - MARGIN)
    names = [_wrapped(panel.title, 10.5, (whole - labels) / across - MARGIN, bold=True) for panel in panels]
    legend = _legend(panels)
    beside = _inches("    ".join(str(part.get_label()) for part in legend), 9) + 0.6 * len(legend) < whole - MARGIN
    more = 0.19 * headline.count("\n") + 0.17 * down * max(name.count("\n") for name in names)
    more += 0 if beside else 0.17 * (len(legend) - 1)
    figure = Figure(figsize=(whole, down * (height + heads + 0.4) + 0.8 + more), layout="constrained",
                    facecolor="white")  # fmt: skip
    figure.suptitle(headline, fontsize=12, color=INK, x=0.01, ha="left", parse_math=False)
    grid = figure.subplots(down, across, squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.06})
    for place, axes in enumerate(grid.flat):
        if place < len(panels):
            _draw(axes, panels[place], names[place], labelled=place % across == 0)
        else:
            axes.set_visible(False)
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend) if beside else 1, frameon=False,
                  fontsize=9, labelcolor=INK)  # fmt: skip
    FigureCanvasAgg(figure)
    return figure


def _inches(text: str, points: float, *, bold: bool = False) -> float:
    """Return the largest width of a line of text: in a PNG, letters are up to a twelfth wider."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=points, weight="bold" if bold else "normal")
    width: float = text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
    return width / 72 * 13 / 12


def _wrapped(text: str, points: float, width: float, *, bold: bool = False) -> str:
    """Break a text into lines of at most `width` inches, between words where possible."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if _inches(longer, points, bold=bold) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and _inches(lines[-1] + letter, points, bold=bold) > width:
                lines.append("")
            lines[-1] += letter
    return "\n".join(lines)


def _across(panels: int, width: float, labels: float) -> int:
    """Return how many panels are placed side by side: as many as fit, in lines of equal length."""
    most = max(1, int((WIDEST - labels) // (width + BETWEEN)))
    lines = math.ceil(panels / most)
    return math.ceil(panels / lines)


def _draw(axes: Axes, panel: Panel, title: str, *, labelled: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    colours = LinearSegmentedColormap.from_list("accuracy", ["#F1F6FA", "#9CCBE8", BLUE, "#003A5D"])
    last = len(panel.columns) + GAP  # the position of the column of the worst
    worst_means = [m for m in map(_worst, panel.means, panel.marked) if m is not None]
    best = max(worst_means, key=lambda m: m if panel.higher else -m, default=None)
    for y, row in enumerate(panel.means):
        worst = panel.marked[y]
        values = [(float(x), mean, panel.deviations[y][x]) for x, mean in enumerate(row)]
        if worst is not None:
            values.append((last, row[worst], panel.deviations[y][worst]))
        for x, mean, deviation in values:
            shade = colours(panel.shade(mean)) if mean is not None else "#F2F2F2"
            edge, hatch = ("white", None) if mean is not None else (GREY, "////")
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=shade, edgecolor=edge, linewidth=1.5, hatch=hatch))
            _write_in(axes, x, y, panel, mean, deviation, bold=x == last and mean == best)
        if worst is not None and len(panel.columns) > 1:  # with one attack there is nothing to mark
            frame = Rectangle(
                (worst + 0.04, y + 0.05), 0.92, 0.9, fill=False, edgecolor=ORANGE, linewidth=2.4, zorder=3
            )
            axes.add_patch(frame)
    axes.set_xlim(0, last + 1)
    axes.set_ylim(len(panel.rows), 0)
    axes.set_aspect(CELL_HEIGHT / CELL_WIDTH, anchor="NW")
    axes.xaxis.tick_top()
    places = [x + 0.35 for x in (*range(len(panel.columns)), last)]
    axes.set_xticks(places, [*panel.columns, WORST], rotation=35, ha="left", rotation_mode="anchor", fontsize=9.5)
    axes.get_xticklabels()[-1].set(color=ORANGE, fontweight="bold")
    axes.set_yticks([y + 0.5 for y in range(len(panel.rows))], panel.rows if labelled else [""] * len(panel.rows))
    axes.tick_params(length=0, colors=INK, axis="y", labelsize=10)
    axes.tick_params(length=0, axis="x", pad=4)
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(title, fontsize=10.5, color=INK, loc="left", pad=6, fontweight="bold", parse_math=False)


def _worst(means: Sequence[float | None], marked: int | None) -> float | None:
    return None if marked is None else means[marked]


def _write_in(
    axes: Axes, x: float, y: int, panel: Panel, mean: float | None, deviation: float | None, *, bold: bool
) -> None:
    if mean is None:
        return
    colour, weight = "white" if panel.shade(mean) > 0.52 else INK, "bold" if bold else "normal"
    middle = y + (0.5 if deviation is None else 0.4)
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": colour, "fontweight": weight}
    axes.text(x + 0.5, middle, panel.written(mean), fontsize=9.5, **style)
    if deviation is not None:
        axes.text(x + 0.5, y + 0.75, f"± {panel.written(deviation)}", fontsize=6.5, **style)


def _legend(panels: Sequence[Panel]) -> list[Patch]:
    from matplotlib.patches import Patch

    most = "the attack that hurts the rule most; bold: the best rule by it"
    parts = []
    if any(len(panel.columns) > 1 for panel in panels):
        parts.append(Patch(facecolor="white", edgecolor=ORANGE, linewidth=2.4, label=most))
    if any(mean is None for panel in panels for row in panel.means for mean in row):
        parts.append(Patch(facecolor="#F2F2F2", edgecolor=GREY, hatch="////", label="not run, or failed"))
    return parts
