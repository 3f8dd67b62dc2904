"""Theorem 2: distance to the minimiser for mu = 0, beside its bound.

Four parts: the isotropic quadratic, where the rate is tight; ridge regression with condition number 10; rounds against
the dimension, for few and for many directions; and Byzantine clients, with Delta and with the error actually made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate import trimmed_mean
from cyber0.attacks import full_knowledge
from cyber0.reproduce import Request
from cyber0.reproduce.federations import (
    FederationSetup,
    GaussianRidge,
    Losses,
    distances,
    exponent,
    generator,
    rounds_until,
    simulate,
    starts,
)
from cyber0.reproduce.outputs import Row, gather, markdown_table, write_all
from cyber0.tasks.convex import Ridge
from cyber0.theory import theorems as theory

Array = NDArray[np.float64]

NAME = "theorem2"
SEEDS, QUICK_SEEDS = 48, 16
ERRORS = 4  # standard errors that a mean may be above a bound on the expectation: many rounds are compared
DISTANCE = 1.0  # of the starting points from the minimiser
LEVEL = 0.1  # of the distance, for rounds against d
ACCURACY, QUICK_ACCURACY = 0.02, 0.2  # of the distance, at which the curves end


def reproduce(request: Request) -> Path:
    """Measure distances over rounds and plot them beside the bound."""
    quick = request.quick
    seeds = request.seeds or (QUICK_SEEDS if quick else SEEDS)
    parts: dict[str, tuple[str, Callable[[], list[Row]]]] = {
        "isotropic": ("isotropic quadratic", lambda: _curves("isotropic", 1.0, quick, seeds)),
        "ridge": ("ridge, condition 10", lambda: _curves("ridge", 10.0, quick, seeds)),
        "dimension": ("rounds against d", lambda: _dimensions(quick, seeds)),
        "byzantine": ("a quarter Byzantine", lambda: _byzantine(quick, seeds)),
    }
    rows = gather(request, NAME, seeds, parts)
    return write_all(request.out, NAME, rows, _figure(rows), _comparison(rows, seeds))


def pool(task: Ridge) -> Losses:
    """Return the losses of one client that holds every sample of the task: its slope is that of F."""
    return Losses(task.inputs[None, None], task.targets[None, None], task.penalty)


def isotropic(d: int, condition: float = 1.0) -> Ridge:
    """Return ridge regression with as few samples as there can be."""
    return Ridge(d, d, condition)


def _curves(name: str, condition: float, quick: bool, seeds: int) -> list[Row]:
    """Run until the bound is at ACCURACY, for several k."""
    rows: list[Row] = []
    for d in (50,) if quick or condition > 1 else (50, 100):
        task = isotropic(d, condition)
        for k in (1, 10) if quick else (1, 4, 10, d, 4 * d):
            rate = theory.theorem2(d, k, task.strong_convexity, task.smoothness)
            rounds = rate.rounds_to((QUICK_ACCURACY if quick else ACCURACY) * DISTANCE, DISTANCE)
            replicas = max(8, seeds // 4) if k > 10 else seeds
            begin = starts(0, replicas, task.minimiser, DISTANCE)
            found = distances(simulate(pool(task), begin, FederationSetup(rounds, k, rate.eta, seed=k)), task.minimiser)
            rows += distance_rows(name, d, k, found, rate)
    return rows


def distance_rows(name: str, d: int, k: int, found: Array, rate: theory.Rate, delta: float = 0.0) -> list[Row]:
    """Return one row per round, but at most about 200."""
    step = max(1, len(found) // 200)
    return [
        {"part": name, "d": d, "k": k, "round": t, "seeds": found.shape[1], "mean": float(found[t].mean()),
         "rms": float(np.sqrt((found[t] ** 2).mean())), "bound": rate.bound(t, float(found[0].mean()), delta),
         "tau": rate.tau, "contraction": rate.contraction, "rms_contraction": rate.rms_contraction}
        for t in range(0, len(found), step)
    ]  # fmt: skip


def _dimensions(quick: bool, seeds: int) -> list[Row]:
    """Count the rounds until a tenth of the distance is left, for one direction, a few, and as many as dimensions."""
    rows: list[Row] = []
    for d in (25, 50) if quick else (25, 50, 100, 200):
        task = isotropic(d)
        for label, k in (("1", 1), ("16", 16), ("d", d)):
            rate = theory.theorem2(d, k, task.strong_convexity, task.smoothness)
            expected = rate.rounds_to(LEVEL, DISTANCE)
            begin = starts(1, max(8, seeds // 4), task.minimiser, DISTANCE)
            longer = math.ceil(1.2 * expected)  # a mean of few seeds may cross a little later than the expectation
            found = distances(simulate(pool(task), begin, FederationSetup(longer, k, rate.eta, seed=d)), task.minimiser)
            rows.append({
                "part": "dimension", "d": d, "k": k, "k_is": label, "seeds": found.shape[1], "bound": expected,
                "rounds": rounds_until(found.mean(axis=1), LEVEL), "mean": float(found[expected].mean()),
                "rms": float(np.sqrt((found[expected] ** 2).mean())),
            })  # fmt: skip
    return rows


def _byzantine(quick: bool, seeds: int) -> list[Row]:
    """Run with Byzantine clients against the trimmed mean; each seed has data of its own."""
    d, m, byzantine, n = 20, 20, 5, 200
    people = GaussianRidge(np.ones(d), np.full(d, 1 / math.sqrt(d)))
    replicas = max(4, seeds // 4)
    losses = people.draw(generator(0, 2), replicas, m - byzantine, n)
    limit = theory.delta(n=n, m=m, beta=byzantine / m, v=people.v, d=d, diameter=2 * people.radius,
                         lipschitz=people.lipschitz).value  # fmt: skip
    rows: list[Row] = []
    for k in (1, 16):
        rate = theory.theorem2(d, k, people.strong_convexity, people.smoothness)
        rounds = (60 if quick else 400) if k == 1 else (20 if quick else 100)
        setup = FederationSetup(rounds, k, rate.eta, rule=trimmed_mean(byzantine / m), byzantine=byzantine,
                                attack=full_knowledge("accepted"), radius=people.radius, seed=k)  # fmt: skip
        found, worst = [], 0.0
        for state in simulate(losses, starts(2, replicas, people.minimiser, DISTANCE), setup):
            found.append(np.linalg.norm(state.w - people.minimiser, axis=1))
            worst = max(worst, _robustness_error(people, state.w, state.z, state.decided))
        mine = distance_rows("byzantine", d, k, np.stack(found), rate, limit)
        rows += [{**row, "delta": limit, "worst_error": worst, "measured_delta_bound":
                  rate.bound(row["round"], DISTANCE, worst)} for row in mine]  # fmt: skip
    return rows


def _robustness_error(people: GaussianRidge, w: Array, z: Array, decided: Array) -> float:
    """Return the largest left-hand side of Theorem 1 among the replicas."""
    if z.shape[1] == 0:
        return 0.0
    truth = people.d * np.einsum("sd,skd->sk", people.gradient(w), z)
    error = np.einsum("sk,skd->sd", decided - truth, z) / z.shape[1]
    return float(np.linalg.norm(error, axis=1).max())


def groups_of(rows: list[Row], name: str) -> dict[tuple[int, int], list[Row]]:
    """Return the rows of one part by (d, k)."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row["part"] == name:
            groups.setdefault((row["d"], row["k"]), []).append(row)
    return groups


def slope(rows: list[Row], key: str) -> float:
    """Return the slope of the logarithm of a column over rounds."""
    return float(np.polyfit([row["round"] for row in rows], np.log([row[key] for row in rows]), 1)[0])


def holds(rows: list[Row]) -> bool:
    """Return whether the mean stays below the bound, within a few standard errors."""
    return all(row["mean"] <= row["bound"] * (1 + 1e-9) + ERRORS * standard_error(row) for row in rows)


def standard_error(row: Row) -> float:
    """Return the standard error of a row's mean."""
    return float(math.sqrt(max(0.0, row["rms"] ** 2 - row["mean"] ** 2) / row["seeds"]))


def _figure(rows: list[Row]) -> Any:
    from cyber0.report.plots import COLOURS, new_figure, plain

    figure = new_figure("Theorem 2 (mu = 0): measured (solid) and bound (dashed)", width=11, height=7.6)
    (isotropic_panel, ridge_panel), (dimension_panel, byzantine_panel) = figure.subplots(2, 2)
    for axes, name, title in ((isotropic_panel, "isotropic", "isotropic quadratic, d = 50: the bound is tight"),
                              (ridge_panel, "ridge", "ridge, condition number 10, d = 50")):  # fmt: skip
        groups = {key: mine for key, mine in groups_of(rows, name).items() if key[0] == 50}
        for ((_, k), mine), colour in zip(groups.items(), COLOURS, strict=False):
            x = [row["round"] + 1 for row in mine]
            axes.plot(x, [row["mean"] for row in mine], color=colour, label=f"k = {k}")
            axes.plot(x, [row["bound"] for row in mine], "--", color=colour, linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="Round + 1", ylabel="E ||w - w*||", ylim=(1e-3, 1.3))
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(frameon=False, fontsize=9)
        plain(axes)
    for label, colour in zip(("1", "16", "d"), COLOURS, strict=False):
        mine = [row for row in rows if row["part"] == "dimension" and row["k_is"] == label]
        x = [row["d"] for row in mine]
        dimension_panel.plot(x, [row["rounds"] for row in mine], "o-", color=colour, label=f"k = {label}")
        dimension_panel.plot(x, [row["bound"] for row in mine], "--", color=colour, linewidth=1)
    dimension_panel.set(xscale="log", yscale="log", xlabel="Dimension d", ylabel="Rounds to a tenth of the distance")
    dimension_panel.set_title("k removes the dependence on d", fontsize=10, loc="left")
    dimension_axis(dimension_panel, x_of(rows))
    for ((_, k), mine), colour in zip(groups_of(rows, "byzantine").items(), COLOURS, strict=False):
        x = [row["round"] for row in mine]
        for key, style, text in (("mean", "-", "measured"), ("bound", "--", "bound with Delta"),
                                 ("measured_delta_bound", ":", "bound with the largest error made")):  # fmt: skip
            byzantine_panel.plot(x, [row[key] for row in mine], style, color=colour, label=f"k = {k}, {text}")
    byzantine_panel.set(yscale="log", xlabel="Round", ylabel="E ||w - w*||", ylim=(0.03, None))
    byzantine_panel.set_title("5 of 20 clients Byzantine, trimmed mean, d = 20", fontsize=10, loc="left")
    dimension_panel.legend(frameon=False, fontsize=9)
    byzantine_panel.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.94))  # below the bound
    plain(dimension_panel)
    plain(byzantine_panel)
    return figure


def x_of(rows: list[Row]) -> list[int]:
    """Return the dimensions of the part that varies them."""
    return sorted({row["d"] for row in rows if row["part"] == "dimension"})


def dimension_axis(axes: Any, dimensions: list[int]) -> None:
    """Mark the dimensions that were tried, and no others."""
    axes.set_xticks(dimensions, [str(d) for d in dimensions])
    axes.set_xticks([], minor=True)


def _comparison(rows: list[Row], seeds: int) -> str:
    text = f"# Theorem 2\n\nmu = 0, sphere directions, eta = 1 / (tau L_F); up to {seeds} seeds.\n\n"
    cells = []
    for name in ("isotropic", "ridge"):
        for (d, k), mine in groups_of(rows, name).items():
            first = mine[0]
            rates = math.log(first["contraction"]), math.log(first["rms_contraction"])
            measured, rms = slope(mine, "mean"), slope(mine, "rms")
            cells.append([name, d, k, first["tau"], measured, rates[0], f"{measured / rates[0]:.3f}",
                          f"{rms / rates[1]:.3f}", holds(mine)])  # fmt: skip
    text += "Slope of log distance over rounds:\n\n" + markdown_table(
        ["loss", "d", "k", "tau", "measured", "theorem", "measured / theorem", "rms / rms_contraction", "bound holds"],
        cells,
    )
    text += (
        "\n\nRounds to a tenth of the distance, isotropic; holds: after the theorem's rounds the mean distance is a "
        f"tenth, within {ERRORS} standard errors:\n\n"
    )
    dimension = [row for row in rows if row["part"] == "dimension"]
    text += markdown_table(["d", "k", "measured", "theorem", "holds"], [
        [row["d"], row["k"], f"{row['rounds']:.1f}", row["bound"], row["mean"] <= LEVEL + ERRORS * standard_error(row)]
        for row in dimension
    ])  # fmt: skip
    powers = []
    for label in ("1", "16", "d"):
        mine = [row for row in dimension if row["k_is"] == label]
        x = [row["d"] for row in mine]
        powers.append([label, *(f"{exponent(x, [row[key] for row in mine]):.2f}" for key in ("rounds", "bound"))])
    text += "\n\nAs a power of d:\n\n" + markdown_table(["k", "measured", "theorem"], powers)
    cells = []
    for (_, k), mine in groups_of(rows, "byzantine").items():
        last = mine[-1]
        cells.append([k, last["round"], last["mean"], last["worst_error"], last["measured_delta_bound"], last["delta"],
                      last["bound"], holds(mine) and last["mean"] <= last["measured_delta_bound"]])  # fmt: skip
    text += "\n\n5 of 20 clients Byzantine (full_knowledge, accepted), 200 samples each, d = 20:\n\n" + markdown_table(
        [
            "k",
            "rounds",
            "distance",
            "largest error made",
            "bound with it",
            "Delta",
            "bound with Delta",
            "both hold",
        ],
        cells,
    )
    return text + "\n"
