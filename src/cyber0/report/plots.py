"""Pictures of a run. matplotlib is loaded when one is drawn, without pyplot and its global state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyber0.storage import naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Okabe and Ito's colours, told apart with any kind of colour vision.
BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8C8C8C", "#222222"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DPI = 150
MOST_BARS = 40
MOST_ROWS = 40
MOST_NUMBERED_CELLS = 40 * 12


def accuracy_picture(
    metrics: Sequence[Mapping[str, Any]], path: str | Path, title: str, *, evaluated_on: str = "test"
) -> Path:
    """Draw accuracy over rounds and over the bytes that each client sent.

    Args:
        metrics: one row an evaluation, with round, accuracy (0 to 1), loss, uplink_bytes and downlink_bytes.
        path: where the PNG goes; its folder is made.
        title: the line above the panels.
        evaluated_on: the set that accuracy was measured on.
    """
    accuracy = [100 * float(row["accuracy"]) for row in metrics]
    return _picture_over(metrics, accuracy, path, title, f"{evaluated_on.capitalize()} accuracy (%)", _accuracy_panel)


def loss_picture(
    metrics: Sequence[Mapping[str, Any]], path: str | Path, title: str, *, evaluated_on: str = "test"
) -> Path:
    """Draw the loss over rounds and bytes as `accuracy_picture` does, where no accuracy is measured."""
    losses = [float(row["loss"]) for row in metrics]
    return _picture_over(metrics, losses, path, title, f"{evaluated_on.capitalize()} loss", _curve)


def _picture_over(
    metrics: Sequence[Mapping[str, Any]], values: list[float], path: str | Path, title: str, label: str,
    panel: Callable[[Axes, list[float], list[float], str], None],
) -> Path:  # fmt: skip
    """Draw one value an evaluation over rounds and over the bytes that each client sent."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(title, width=9.6, height=4.0)
    over_rounds, over_bytes = figure.subplots(1, 2, sharey=True)
    rounds = [float(row["round"]) for row in metrics]
    panel(over_rounds, rounds, values, "Round")
    over_rounds.set_xlim(0, max([1.0, *rounds]))
    over_rounds.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    over_rounds.set_ylabel(label)
    # The evaluation before anything was sent has no place on a logarithmic axis.
    bytes_sent = [float(row["uplink_bytes"]) for row in metrics]
    shown = [place for place, count in enumerate(bytes_sent) if count > 0]
    x = [bytes_sent[place] for place in shown]
    panel(over_bytes, x, [values[place] for place in shown], "Bytes sent by each client")
    _byte_axis(over_bytes, x)
    return save(figure, path)


def suspects_picture(
    trim_share: Sequence[float],
    byzantine: Sequence[bool] | None,
    path: str | Path,
    *,
    expected: float | None = None,
    title: str = "How often each client's scalars were trimmed",
) -> Path:
    """Draw how often each client was trimmed: Byzantine clients are trimmed more often than others.

    Args:
        trim_share: for each client the share (0 to 1) of its scalars that were trimmed.
        byzantine: which clients are Byzantine, where that is known.
        path: where the PNG goes; its folder is made.
        expected: the share if nobody stood out, 2 b / m; drawn as a line.
        title: the line above the picture.
    """
    clients = len(trim_share)
    order = sorted(range(clients), key=lambda client: -trim_share[client])[:MOST_BARS]
    if clients <= MOST_BARS:
        order = list(range(clients))
    else:
        title += f" (the {MOST_BARS} most trimmed of {clients:,})"
    figure = new_figure(title, width=9.6, height=4.0)
    axes = figure.subplots()
    marked = [bool(byzantine[client]) if byzantine is not None else False for client in order]
    for mark in sorted(set(marked)):
        places = [place for place, one in enumerate(marked) if one is mark]
        label = "Byzantine" if mark else "honest" if byzantine is not None else None
        heights = [100 * trim_share[order[place]] for place in places]
        _bars(axes, places, heights, byzantine=mark, label=label)
    if expected is not None:
        axes.axhline(100 * expected, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="expected, 2b/m")
    axes.set_xticks(range(len(order)), [str(client) for client in order], fontsize=9 if len(order) <= 24 else 7)
    axes.set_xlim(-0.7, len(order) - 0.3)
    axes.set_xlabel("Client")
    axes.set_ylabel("Scalars trimmed (%)")
    axes.set_ylim(0, max(5.0, 115 * max([*trim_share, expected or 0.0])))
    plain(axes)
    if byzantine is not None or expected is not None:
        axes.legend(frameon=False, ncols=3, loc="upper right")
    return save(figure, path)


def partition_picture(
    counts: Sequence[Sequence[int]],
    byzantine: Sequence[bool] | None,
    path: str | Path,
    *,
    title: str = "Samples of each client",
    labelled: bool = True,
) -> Path:
    """Draw who holds how many samples of each label, one row a client.

    Args:
        counts: for each client its number of samples of each label.
        byzantine: which clients are Byzantine, where that is known; their rows are marked.
        path: where the PNG goes; its folder is made.
        title: the line above the picture.
        labelled: whether there are labels; without them there is one column, of all samples.
    """
    clients = len(counts)
    shown = list(range(clients))
    if clients > MOST_ROWS:  # evenly spread: neighbours in the order of the clients look alike
        shown = [place * (clients - 1) // (MOST_ROWS - 1) for place in range(MOST_ROWS)]
        title += f", {MOST_ROWS} of {clients:,} clients"
    figure = new_figure(title, width=9.6, height=1.5 + (0.3 if len(shown) <= 24 else 0.19) * max(len(shown), 4))
    cells, totals = figure.subplots(1, 2, sharey=True, width_ratios=(10, 3))
    rows = [list(counts[client]) for client in shown]
    image = _heat_map(cells, rows)
    if not labelled:
        cells.set_xlabel("Samples")
        cells.set_xticks([])
    if not cells.texts:  # no room for the counts
        figure.colorbar(image, ax=[cells, totals], label="Samples of a label", pad=0.02, aspect=40, fraction=0.04)
    marked = [byzantine is not None and bool(byzantine[client]) for client in shown]
    for place, (row, mark) in enumerate(zip(rows, marked, strict=True)):
        color = ORANGE if mark else BLUE
        totals.barh(place, sum(row), height=0.75, color=color, hatch="///" if mark else None, edgecolor="white")
    size = 9 if len(shown) <= 24 else 7
    names = [f"{client} (Byzantine)" if mark else str(client) for client, mark in zip(shown, marked, strict=True)]
    cells.set_yticks(range(len(shown)), names, fontsize=size)
    for text, mark in zip(cells.get_yticklabels(), marked, strict=True):
        text.set_color(ORANGE if mark else INK)
    cells.set_ylabel("Client")
    totals.set_xlabel("Samples in all")
    totals.tick_params(left=False, labelleft=False)
    plain(totals, grid="x")
    totals.spines["left"].set_visible(False)
    totals.locator_params(axis="x", nbins=3)
    return save(figure, path)


def _heat_map(axes: Axes, rows: list[list[int]]) -> AxesImage:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    labels, highest = len(rows[0]), max(1, *(max(row) for row in rows))
    image = axes.imshow(
        rows, cmap=LinearSegmentedColormap.from_list("samples", ["white", BLUE]), vmin=0, vmax=highest, aspect="auto"
    )
    axes.set_xlabel("Label")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(labels, 20), integer=True))
    axes.spines[:].set_color(GREY)
    axes.tick_params(colors=INK, length=0)
    if len(rows) * labels <= MOST_NUMBERED_CELLS and labels <= 20:
        size = 8 if len(rows) <= 24 and labels <= 12 else 6.5
        for y, row in enumerate(rows):
            for x, count in enumerate(row):
                if count:
                    color = "white" if count > 0.55 * highest else INK
                    axes.text(x, y, f"{count:,}", ha="center", va="center", fontsize=size, color=color)
    return image


def new_figure(title: str, *, width: float, height: float) -> Figure:
    """Return an empty figure with a title, in the style of all pictures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    return figure


def _accuracy_panel(axes: Axes, x: list[float], accuracy: list[float], label: str) -> None:
    _curve(axes, x, accuracy, label)
    if x:
        _mark_last(axes, x[-1], accuracy[-1])
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20))


def _curve(axes: Axes, x: list[float], values: list[float], label: str) -> None:
    if x:
        # Single points are marked as long as they can be told apart.
        marker = "o" if len(x) <= 25 else ""
        axes.plot(x, values, color=BLUE, linewidth=1.8, marker=marker, markersize=4, clip_on=False, zorder=3)
    axes.set_xlabel(label)
    plain(axes)


def _mark_last(axes: Axes, x: float, accuracy: float) -> None:
    axes.plot([x], [accuracy], color=ORANGE, marker="o", markersize=6, clip_on=False, zorder=4)
    above = accuracy < 92  # a learning curve comes from below; near the top there is no room above it
    axes.annotate(
        f"{accuracy:.1f} %",
        (x, accuracy),
        xytext=(0, 7 if above else -9),
        textcoords="offset points",
        ha="left" if x == 0 else "right",
        va="bottom" if above else "top",
        color=ORANGE,
        fontweight="bold",
    )


def _byte_axis(axes: Axes, sent: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    if len(set(sent)) <= 1:  # matplotlib chooses no range for one point or none
        middle = sent[0] if sent else 1000.0
        axes.set_xlim(middle / 10, middle * 10)
    decades = math.log10(sent[-1] / sent[0]) if sent else 1.0
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def _bars(axes: Axes, places: list[int], heights: list[float], *, byzantine: bool, label: str | None) -> None:
    axes.bar(
        places,
        heights,
        width=0.75,
        color=ORANGE if byzantine else BLUE,
        edgecolor="white",
        linewidth=0.6,
        hatch="///" if byzantine else None,
        label=label,
        zorder=2,
    )


def plain(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    """Give axes the style of all pictures."""
    axes.grid(axis=grid, color="#E3E3E3", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, which="both")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file, whose folder is made; its suffix sets the format (png, svg, pdf)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=DPI)
    return path
