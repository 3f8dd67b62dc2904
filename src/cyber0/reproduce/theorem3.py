"""Theorem 3: distance to the minimiser of the smoothed loss for mu > 0, beside its bound.

Three parts: logistic regression, whose smoothed minimiser w*_mu is known by quadrature, over rounds for several k and
mu; rounds against the dimension, for one direction and for many, with the learning rate of the theorem and with that of
`theory.theorem3_independent`; and the term of the proof from which the paper's residual sqrt(d) comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.reproduce import Request
from cyber0.reproduce.federations import (
    FederationSetup,
    Losses,
    distances,
    exponent,
    rounds_until,
    simulate,
    sphere,
    starts,
)
from cyber0.reproduce.outputs import Row, gather, markdown_table, write_all
from cyber0.reproduce.theorem2 import dimension_axis, distance_rows, holds, isotropic, pool, x_of
from cyber0.tasks.convex import Logistic
from cyber0.theory import theorems as theory

Array = NDArray[np.float64]

NAME = "theorem3"
SEEDS, QUICK_SEEDS = 16, 4
DISTANCE = 2.0
LEVEL = 0.1
GROUP = 100  # directions of whose pairs the cross term is taken
MU = 0.1  # mu, for rounds against the dimension; a quadratic is not affected by it
DIMENSION, SAMPLES, PENALTY = 20, 200, 0.2  # of the logistic regression


def reproduce(request: Request) -> Path:
    """Measure distances over rounds and plot them beside the bound."""
    quick = request.quick
    seeds = request.seeds or (QUICK_SEEDS if quick else SEEDS)
    parts: dict[str, tuple[str, Callable[[], list[Row]]]] = {
        "logistic": ("logistic regression", lambda: _curves(quick, seeds)),
        "dimension": ("rounds against d", lambda: _dimensions(quick, seeds)),
        "cross": ("the cross term of the proof", lambda: _cross_terms(quick, seeds)),
    }
    rows = gather(request, NAME, seeds, parts)
    return write_all(request.out, NAME, rows, _figure(rows), _comparison(rows, seeds))


def logistic_pool(task: Logistic) -> Losses:
    """Return the losses of one client that holds every sample of the task."""
    return Losses(task.inputs[None, None], task.targets[None, None], task.penalty, logistic=True)


def smoothed_minimiser(task: Logistic, mu: float) -> Array:
    """Return w*_mu: the penalty's average over the ball differs from itself by a constant, the fit's by quadrature."""
    nodes, weights = theory.ball_marginal(task.dimension)
    return task.smoothed_minimiser(mu * float(np.linalg.norm(task.inputs[0])) * nodes, weights)


def _curves(quick: bool, seeds: int) -> list[Row]:
    task = Logistic(DIMENSION, SAMPLES, PENALTY)
    d, rows = task.dimension, []
    for mu in (0.1, 2.0) if quick else (0.01, 0.3, 3.0):
        point = smoothed_minimiser(task, mu)
        for k in (1, 8) if quick else (1, 8, 32):
            rate = theory.theorem3(d, k, task.strong_convexity, task.smoothness, mu)
            rounds = {1: 1200, 8: 400, 32: 300}[k] // (20 if quick else 1)
            setup = FederationSetup(rounds, k, rate.eta, mu=mu, seed=k)
            begin = starts(3, seeds if k < 32 else max(4, seeds // 2), point, DISTANCE)
            found = distances(simulate(logistic_pool(task), begin, setup), point)
            own = theory.theorem3_independent(d, k, task.strong_convexity, task.smoothness, mu)
            extra = {
                "mu": mu, "mu_bias": rate.mu_bias, "independent_bias": own.mu_bias,
                "stated_bias": theory.stated_mu_bias(d, k, task.strong_convexity, task.smoothness, mu),
                "shift": float(np.linalg.norm(point - task.minimiser)),
                "shift_bound": theory.minimiser_shift(d, task.strong_convexity, task.smoothness, mu),
            }  # fmt: skip
            rows += [{**row, **extra} for row in distance_rows("logistic", d, k, found, rate)]
    return rows


def _dimensions(quick: bool, seeds: int) -> list[Row]:
    """Count the rounds until a tenth of the distance is left on the isotropic quadratic, two-point estimates."""
    rows: list[Row] = []
    for d in (16, 36) if quick else (16, 36, 64, 100):
        task = isotropic(d)
        for name, k in (("theorem 3", 1), ("theorem 3", 4 * d), ("independent", 4 * d)):  # for k = 1 both are one
            make = theory.theorem3 if name == "theorem 3" else theory.theorem3_independent
            rate = make(d, k, task.strong_convexity, task.smoothness, MU)
            # mu_bias is for losses in general; a quadratic has none, and the bound without it is the one to test.
            expected = math.ceil(math.log(LEVEL) / math.log(rate.contraction))
            begin = starts(4, seeds if k == 1 else max(4, seeds // 2), task.minimiser, DISTANCE)
            setup = FederationSetup(expected, k, rate.eta, mu=MU, seed=d)
            found = distances(simulate(pool(task), begin, setup), task.minimiser) / DISTANCE
            rows.append({"part": "dimension", "d": d, "k": k, "k_is": "1" if k == 1 else "4d", "rate": name,
                         "tau": rate.tau, "rounds": rounds_until(found.mean(axis=1), LEVEL),
                         "bound": expected})  # fmt: skip
    return rows


def _cross_terms(quick: bool, seeds: int) -> list[Row]:
    """Measure E<g(w, z_1), g(w, z_2)> / ||grad F||^2 for independent directions, beside the paper's 1 + sqrt(d)."""
    rows: list[Row] = []
    for d in (10, 50) if quick else (10, 30, 100):
        task = Logistic(d, max(SAMPLES, d), PENALTY)
        w = starts(5, 1, task.minimiser, DISTANCE)
        gradient = _gradient(task, w[0])
        found = []
        for t in range(10 * seeds):
            z = sphere(d, t, 1, GROUP, d)[0]
            estimates = d * logistic_pool(task).slopes(w, z[None], MU)[0, 0][:, None] * z
            total = estimates.sum(axis=0)  # <g_r, g_s> summed over all pairs r != s of the group
            found.append((total @ total - (estimates**2).sum()) / (GROUP * (GROUP - 1)) / (gradient @ gradient))
        rows.append({"part": "cross", "d": d, "mean": float(np.mean(found)), "directions": GROUP * len(found),
                     "error": float(np.std(found) / math.sqrt(len(found))), "bound": 1 + math.sqrt(d)})  # fmt: skip
    return rows


def _gradient(task: Logistic, w: Array) -> Array:
    """Return grad F at w, coordinate by coordinate."""
    return np.asarray(logistic_pool(task).slopes(w[None], np.eye(task.dimension)[None])[0, 0])


def _groups(rows: list[Row]) -> dict[tuple[float, int], list[Row]]:
    groups: dict[tuple[float, int], list[Row]] = {}
    for row in rows:
        if row["part"] == "logistic":
            groups.setdefault((row["mu"], row["k"]), []).append(row)
    return groups


def _dimension_series(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["part"] == "dimension":
            series.setdefault((row["k_is"], row["rate"]), []).append(row)
    return series


def _figure(rows: list[Row]) -> Any:
    from cyber0.report.plots import COLOURS, GREY, new_figure, plain

    figure = new_figure(
        "Theorem 3 (mu > 0): measured (solid), bound (dashed), bound without its term in mu (dotted)",
        width=11,
        height=7.6,
    )
    (over_k, over_mu), (dimension_panel, cross_panel) = figure.subplots(2, 2)
    groups = _groups(rows)
    smallest, fewest = min(mu for mu, _ in groups), sorted({k for _, k in groups})
    for k, colour in zip(fewest, COLOURS, strict=False):
        _curve(over_k, groups[smallest, k], colour, f"k = {k}")
    over_k.set_title(f"logistic regression, d = {DIMENSION}, mu = {smallest:g}", fontsize=10, loc="left")
    middle = fewest[len(fewest) // 2]
    for mu, colour in zip(sorted({mu for mu, _ in groups}), COLOURS, strict=False):
        _curve(over_mu, groups[mu, middle], colour, f"mu = {mu:g}")
    over_mu.set_title(f"logistic regression, d = {DIMENSION}, k = {middle}", fontsize=10, loc="left")
    for axes in (over_k, over_mu):
        axes.set(yscale="log", xlabel="Round", ylabel="E ||w - w*_mu||")
    for ((label, name), mine), colour in zip(_dimension_series(rows).items(), COLOURS, strict=False):
        x = [row["d"] for row in mine]
        text = f"k = {label}, eta of " + ("Theorem 3" if name == "theorem 3" else "independent directions")
        dimension_panel.plot(x, [row["rounds"] for row in mine], "o-", color=colour, label=text)
        dimension_panel.plot(x, [row["bound"] for row in mine], "--", color=colour, linewidth=1)
    dimension_panel.set(xscale="log", yscale="log", xlabel="Dimension d", ylabel="Rounds to a tenth of the distance")
    dimension_panel.set_title("rounds against d, isotropic quadratic", fontsize=10, loc="left")
    cross = [row for row in rows if row["part"] == "cross"]
    x = [row["d"] for row in cross]
    cross_panel.errorbar(x, [row["mean"] for row in cross], [2 * row["error"] for row in cross], fmt="o-",
                         color=COLOURS[0], capsize=3, label="measured, logistic regression")  # fmt: skip
    cross_panel.plot(x, [row["bound"] for row in cross], "--", color=COLOURS[1], label="the paper's 1 + sqrt(d)")
    cross_panel.axhline(1.0, color=GREY, linewidth=1, label="1, by independence")
    cross_panel.set(xlabel="Dimension d", ylabel="E <g(z1), g(z2)> / ||grad F||^2", ylim=(0, None))
    cross_panel.set_title("where the residual sqrt(d) comes from", fontsize=10, loc="left")
    dimension_axis(dimension_panel, x_of(rows))
    for axes in (over_k, over_mu, dimension_panel, cross_panel):
        axes.legend(frameon=False, fontsize=8, loc="lower left" if axes in (over_k, over_mu) else "best")
        plain(axes)
    return figure


def _curve(axes: Any, rows: list[Row], colour: str, label: str) -> None:
    x = [row["round"] for row in rows]
    axes.plot(x, [row["mean"] for row in rows], color=colour, label=label)
    axes.plot(x, [row["bound"] for row in rows], "--", color=colour, linewidth=1)
    axes.plot(x, [row["bound"] - row["mu_bias"] for row in rows], ":", color=colour, linewidth=1)


def _comparison(rows: list[Row], seeds: int) -> str:
    text = f"# Theorem 3\n\nmu > 0, sphere directions, two-point estimates, {seeds} seeds.\n\n"
    cells = []
    for (mu, k), mine in _groups(rows).items():
        last = mine[-1]
        cells.append([f"{mu:g}", k, last["round"], last["mean"], last["bound"], last["mu_bias"], last["stated_bias"],
                      last["independent_bias"], holds(mine)])  # fmt: skip
    text += f"Logistic regression, d = {DIMENSION}, distance to w*_mu, started at {DISTANCE:g}:\n\n" + markdown_table(
        ["mu", "k", "rounds", "distance", "bound", "of it mu", "as stated", "ours (independent)", "holds"], cells
    )
    shifts = {mu: mine[0] for (mu, _), mine in _groups(rows).items()}
    text += "\n\nHow far smoothing moves the minimiser:\n\n" + markdown_table(
        ["mu", "distance of w*_mu from w*", "bound (ours)", "holds"],
        [[f"{mu:g}", r["shift"], r["shift_bound"], r["shift"] <= r["shift_bound"]] for mu, r in shifts.items()],
    )
    text += "\n\nRounds to a tenth of the distance, isotropic quadratic:\n\n"
    cells, powers = [], []
    for (label, name), mine in _dimension_series(rows).items():
        cells += [[row["d"], row["k"], name, row["tau"], f"{row['rounds']:.1f}", row["bound"],
                   row["rounds"] <= row["bound"]] for row in mine]  # fmt: skip
        x = [row["d"] for row in mine]
        powers.append([label, name, *(f"{exponent(x, [row[key] for row in mine]):.2f}" for key in ("rounds", "bound"))])
    text += markdown_table(["d", "k", "eta and bound of", "tau", "measured", "bound", "holds"], cells)
    text += "\n\nAs a power of d:\n\n" + markdown_table(["k", "eta and bound of", "measured", "bound"], powers)
    text += "\n\nE<g(z1), g(z2)> / ||grad F||^2, logistic regression:\n\n" + markdown_table(
        ["d", "directions", "measured", "standard error", "paper's bound, 1 + sqrt(d)"],
        [
            [row["d"], row["directions"], row["mean"], row["error"], row["bound"]]
            for row in rows
            if row["part"] == "cross"
        ],
    )
    return text + "\n"
