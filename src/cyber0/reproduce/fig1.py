"""Figure 1, on MNIST: several k beside FedAvg over scalars sent (a) and over steps (b); five attacks (c)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cyber0.reproduce import Request
from cyber0.reproduce.cells import Curve, band, curves, plus_minus, run_cells, tidy
from cyber0.reproduce.mnist import finish, make_cells, settings_line
from cyber0.reproduce.outputs import markdown_table, write_csv, write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = (1, 4, 16, 64)
NO_BYZANTINE = ("federation.byzantine=0", "federation.partition=by_label", "aggregation.rule=mean", "evaluate_every=5")
ATTACK_TITLES = {
    "none": "no attack",
    "always_large": "always large",
    "always_small": "always small",
    "random_choice": "random choice",
    "label_flip": "label flipping",
    "full_knowledge": "full knowledge",
}
AXIS = (60.0, 95.0)  # of the paper's Figure 1c
TARGET_ACCURACY = 80.0  # percent; the accuracy at which the scalars needed are compared


def over_scalars(request: Request) -> Path:
    """Figure 1a."""
    return _by_directions(request, "fig1a", scalars=True)


def over_steps(request: Request) -> Path:
    """Figure 1b, from the same runs."""
    return _by_directions(request, "fig1b", scalars=False)


def attacks(request: Request) -> Path:
    """Figure 1c: k = 64, a quarter of the clients Byzantine, every client with labels of its own."""
    settings = ("federation.partition=by_label", "federation.attack_reading=literal", "evaluate_every=5")
    wanted = [({"attack": text}, [*settings, f"federation.attack={name}"]) for name, text in ATTACK_TITLES.items()]
    results = run_cells(request, make_cells(request, wanted))
    lines = curves(request, results, "attack")
    write_csv(request.out / "fig1c.csv", tidy(request, results))
    write_figure(request.out, "fig1c", _attack_figure(lines))
    ends = {line.name: line.mean[-1] for line in lines}
    damage = {name: ends["no attack"] - end for name, end in ends.items() if name != "no attack"}
    worst = max(damage, key=lambda name: damage[name])
    attacked = [end for name, end in ends.items() if name != "no attack"]
    return finish(request, "fig1c", [
        "# Figure 1c: behaviour of Byzantine clients (k = 64, alpha = beta = 0.25, non-IID)", "",
        markdown_table(["attack", "accuracy (%)", "lost against no attack"],
                       [[line.name, plus_minus([run[-1] for run in line.accuracy]),
                         f"{damage[line.name]:.1f}" if line.name in damage else "–"] for line in lines]), "",
        markdown_table(["the paper says or shows", "here"], [
            ["full knowledge does the most damage", f"{'yes' if worst == 'full knowledge' else '**no**'}: {worst}"],
            [f"all five curves end within {AXIS[0]:.0f} and {AXIS[1]:.0f} % (its axis)",
             f"{'yes' if all(AXIS[0] <= a <= AXIS[1] for a in attacked) else '**no**'}: "
             f"{min(attacked):.1f} to {max(attacked):.1f}"],
        ]), "", settings_line(request),
    ])  # fmt: skip


def _by_directions(request: Request, name: str, *, scalars: bool) -> Path:
    wanted = [({"method": f"k = {k}"}, [*NO_BYZANTINE, f"method.k={k}"]) for k in DIRECTIONS]
    wanted.append(({"method": "FedAvg"}, [*NO_BYZANTINE, "method.name=fedavg"]))
    results = run_cells(request, make_cells(request, wanted))
    lines = curves(request, results, "method")
    write_csv(request.out / f"{name}.csv", tidy(request, results))
    write_figure(request.out, name, _direction_figure(lines, scalars=scalars))
    *zero_order, fedavg = lines
    ends = [line.mean[-1] for line in zero_order]
    head = ["method", "accuracy (%)", "scalars sent by a client", f"scalars until {TARGET_ACCURACY:.0f} %"]
    rows = [[line.name, plus_minus([run[-1] for run in line.accuracy]), f"{line.uplink[-1] // 4:,}",
             _scalars_until(line)] for line in lines]  # fmt: skip
    gap = fedavg.mean[-1] - ends[-1]
    return finish(request, name, [
        f"# Figure 1{name[-1]}: impact of k (no Byzantine clients, non-IID, m = 12)", "",
        markdown_table(head, rows), "",
        markdown_table(["the paper says", "here"], [
            ["the larger k, the closer to SGD", f"{'yes' if ends == sorted(ends) else '**no**'}: "
             f"k = {DIRECTIONS[-1]} ends {gap:.1f} points below FedAvg, k = 1 {fedavg.mean[-1] - ends[0]:.1f}"],
        ]), "",
        "The paper shows curves without numbers.", "", settings_line(request),
    ])  # fmt: skip


def _scalars_until(line: Curve) -> str:
    place = line.reached(TARGET_ACCURACY)
    return "not reached" if place is None else f"{line.uplink[place] // 4:,}"


def _direction_figure(lines: list[Curve], *, scalars: bool) -> Figure:
    from cyber0.report.plots import COLOURS, INK, new_figure, plain

    figure = new_figure("", width=6.4, height=4.2)
    axes = figure.subplots()
    for line, colour in zip(lines, [*COLOURS[: len(lines) - 1], INK], strict=True):
        style = {"label": line.name, "color": colour, "linestyle": "--" if line.name == "FedAvg" else "-"}
        if scalars:
            sent = [up / 4 for up in line.uplink if up > 0]
            band(axes, sent, line.mean, line.deviation, **style)
        else:
            band(axes, [float(r) for r in line.rounds], line.mean, line.deviation, **style)
    if scalars:
        axes.set_xscale("log")
    axes.set_xlabel("Scalars sent by each client" if scalars else "Steps")
    axes.set_ylabel("Test accuracy (%)")
    axes.legend(frameon=False, loc="lower right")
    plain(axes)
    return figure


def _attack_figure(lines: list[Curve]) -> Figure:
    from cyber0.report.plots import COLOURS, GREY, new_figure, plain

    figure = new_figure("", width=6.4, height=4.2)
    axes = figure.subplots()
    for line, colour in zip(lines, [GREY, *COLOURS], strict=False):
        rounds = [float(r) for r in line.rounds]
        band(axes, rounds, line.mean, line.deviation, label=line.name, color=colour)
    axes.set_xlabel("Steps")
    axes.set_ylabel("Test accuracy (%)")
    axes.legend(frameon=False, loc="lower right")
    plain(axes)
    return figure
