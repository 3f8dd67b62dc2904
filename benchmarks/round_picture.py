"""A round under attack, step by step, drawn from a round that is really run.

python benchmarks/gallery.py round      # writes docs/images/round.png
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.demo.trial import CLIENTS, Settings, Trial
from cyber0.directions import reference
from cyber0.report import plots
from cyber0.tasks.mnist import Mnist

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUND = 10  # the round that is drawn: early, so that the loss still falls steeply
CLIENT, DIRECTION = 0, 0
REACH = 0.02  # how far the loss is drawn along the direction, on both sides
GREEN = plots.COLOURS[2]
Scalars = NDArray[np.float64]


class Round(NamedTuple):
    """What is known of a round: what the federator sees, and what only a simulation can know."""

    number: int
    reports: Scalars
    """(clients x scalars), as sent."""
    byzantine: NDArray[np.bool_]
    decided: Scalars
    truth: Scalars
    """The slopes of the honest clients' mean loss over all their samples."""
    losses: tuple[Scalars, Scalars]
    """How far along the direction, and the loss of one honest client there."""
    trimmed: int
    """b, how many of the largest and of the smallest are dropped."""


def measured(number: int = ROUND, task: Mnist | None = None) -> Round:
    """Run so many rounds of the demo's federation, and look closely at the next one."""
    settings = Settings()
    trial = Trial(0, settings, number + 1, task or Mnist())
    for _ in range(number):
        trial.advance()
    losses, truth = _losses_along(trial), _truth(trial)
    trial.advance()
    record = trial.ledger.last
    assert record is not None and record.values is not None
    return Round(
        number, trial.reports.astype(np.float64), trial.byzantine, record.values.astype(np.float64), truth, losses,
        settings.tolerated,
    )  # fmt: skip


def _truth(trial: Trial) -> Scalars:
    """Return the slopes along the round's directions without the noise of batches and without lies."""
    honest = np.flatnonzero(~trial.byzantine)
    weights = np.zeros(len(trial.task.train_inputs), np.float32)
    for client in honest.tolist():
        weights[trial.shares[client]] = 1.0 / (len(honest) * len(trial.shares[client]))
    shares = torch.from_numpy(weights)
    return trial.truth(trial.gradients.of_all(trial.task.train_inputs, trial.task.train_targets, shares))


def _losses_along(trial: Trial) -> tuple[Scalars, Scalars]:
    """Return the loss of one client's batch along one direction of the coming round."""
    config, d = trial.config, trial.parameters.dimension
    z = torch.from_numpy(reference(config.seed, trial.round, DIRECTION, 0, d, config.method.distribution))
    batch = trial.samples.batch(np.array([CLIENT]), trial.round)
    steps = np.linspace(-REACH, REACH, 41)
    found = []
    for step in steps.tolist():
        model, begin = copy.deepcopy(trial.parameters.model), 0
        with torch.no_grad():
            for weight in model.parameters():
                weight += step * z[begin : begin + weight.numel()].view(weight.shape)
                begin += weight.numel()
            outputs = trial.task.outputs(model, batch.inputs)
            found.append(float(trial.task.losses(outputs, batch.targets).double().mean()))
    return steps, np.array(found)


def draw(seen: Round, path: Path) -> Path:
    """Draw the four steps of a round."""
    title = f"Round {seen.number} of a federation in which {int(seen.byzantine.sum())} of {CLIENTS} clients lie"
    figure = plots.new_figure(title, width=9.8, height=7.6)
    for axes, step in zip(figure.subplots(2, 2).flat, (_measure, _send, _trim, _move), strict=True):
        step(axes, seen)
        axes.title.set(fontsize=10.5, color=plots.INK)
    return plots.save(figure, path)


def _measure(axes: Axes, seen: Round) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, losses = seen.losses
    slope, middle = seen.reports[CLIENT, DIRECTION], losses[len(losses) // 2]
    axes.plot(steps, losses, color=plots.BLUE, linewidth=1.8, label=f"loss of client {CLIENT}")
    axes.plot(steps, middle + slope * steps, color=plots.INK, linewidth=1.2, linestyle="--",
              label=f"slope at w: {slope:.2f}")  # fmt: skip
    axes.set_title("1. Each client measures a slope\nof its loss along a shared direction z", loc="left")
    axes.set_xlabel("c, in w + c z")
    axes.legend(frameon=False, fontsize=9, loc="upper center")
    axes.set_ylim(top=losses.max() + 0.25 * np.ptp(losses))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    plots.plain(axes)


def _send(axes: Axes, seen: Round) -> None:
    column = seen.reports[:, DIRECTION]
    _lines(
        axes, {"the truth": (seen.truth[DIRECTION], GREEN, "--"), "the plain mean": (column.mean(), plots.GREY, ":")}
    )
    _dots(axes, column, seen.byzantine, np.zeros(CLIENTS, np.bool_))
    axes.set_title("2. It sends that one number;\nByzantine clients (orange) send others", loc="left")


def left_out(column: Scalars, b: int) -> NDArray[np.bool_]:
    """Return which numbers are among the b smallest or the b largest."""
    dropped, order = np.zeros(len(column), np.bool_), np.argsort(column)
    dropped[order[:b]] = dropped[order[len(order) - b :]] = True
    return dropped


def _trim(axes: Axes, seen: Round) -> None:
    column, b = seen.reports[:, DIRECTION], seen.trimmed
    dropped = left_out(column, b)
    inside = column[~dropped]
    axes.axvspan(inside.min(), inside.max(), color="#EAF3F9", zorder=0)
    _lines(
        axes, {"the truth": (seen.truth[DIRECTION], GREEN, "--"), "decided": (seen.decided[DIRECTION], plots.BLUE, "-")}
    )
    _dots(axes, column, seen.byzantine, dropped)
    axes.set_title(
        f"3. The federator drops the {b} smallest and the\n{b} largest (hollow) and averages the rest", loc="left"
    )


def _lines(axes: Axes, lines: dict[str, tuple[float, str, str]]) -> None:
    for label, (value, colour, style) in lines.items():
        axes.axvline(value, color=colour, linestyle=style, linewidth=1.8, zorder=1, label=f"{label}: {value:.2f}")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _dots(axes: Axes, column: Scalars, byzantine: NDArray[np.bool_], dropped: NDArray[np.bool_]) -> None:
    for client, value in enumerate(column.tolist()):
        colour = plots.ORANGE if byzantine[client] else plots.BLUE
        style: dict[str, Any] = {"marker": "s" if byzantine[client] else "o", "markeredgecolor": colour}
        axes.plot([value], [client], markersize=8, markeredgewidth=1.8, zorder=3, linestyle="none",
                  markerfacecolor="white" if dropped[client] else colour, **style)  # fmt: skip
    axes.set_yticks(range(CLIENTS))
    axes.set_ylim(CLIENTS - 0.3, -3.2)  # room for the legend
    axes.set_ylabel("client")
    axes.set_xlabel("number sent along z")
    plots.plain(axes, "x")


def _move(axes: Axes, seen: Round) -> None:
    plain = seen.reports.mean(axis=0)
    for values, colour, mark, label in (
        (plain, plots.GREY, "x", "plain mean"),
        (seen.decided, plots.BLUE, "o", "trimmed"),
    ):
        agree = int((np.sign(values) == np.sign(seen.truth)).sum())
        axes.plot(seen.truth, values, mark, color=colour, markersize=5, zorder=3,
                  label=f"{label}: {agree} of {len(values)} signs right")  # fmt: skip
    ends = np.array([seen.truth.min(), seen.truth.max()])
    axes.plot(ends, ends, color=GREEN, linestyle="--", linewidth=1.5, zorder=1, label="the truth")
    axes.set_title(f"4. Everyone moves w by the decided\nnumbers of all {len(seen.decided)} directions", loc="left")
    axes.set_xlabel("true slope")
    axes.set_ylabel("decided")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.35 * (high - low))
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    plots.plain(axes)
