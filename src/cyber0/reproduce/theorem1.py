"""Theorem 1: how far Byzantine clients can move the robust estimate from that of the population, beside Delta.

The population is ridge regression with Gaussian samples, where v and the gradient are known. The Byzantine clients see
everything and make the worst attack: a trimmed mean rises with each of its values, so the worst is to send, for each
direction, the largest or the smallest honest value (further out changes nothing), and of the 2^k choices the one that
makes the error of the whole estimate longest; for k > 1 it is searched greedily, one direction at a time.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0.aggregate import trimmed_mean
from cyber0.attacks import always_large, always_small
from cyber0.reproduce import Request
from cyber0.reproduce.federations import GaussianRidge, Losses, decide, exponent, generator, sphere
from cyber0.reproduce.outputs import Row, markdown_table, part, write_all
from cyber0.theory import theorems as theory

Array = NDArray[np.float64]

NAME = "theorem1"
SEEDS, QUICK_SEEDS = 20, 2
DIMENSION = 20
POINTS = 32  # points w, with k directions each, at which each data set is tried
FAILURE = 0.01  # probability, of the bound for one point
SWEEPS = 3  # of the search for the worst choice


class Case(NamedTuple):
    """One setting: n samples for each of m clients, of which `byzantine` are Byzantine and trimmed; k directions."""

    n: int = 100
    m: int = 20
    byzantine: int = 5
    k: int = 1

    @property
    def beta(self) -> float:
        return self.byzantine / self.m


def reproduce(request: Request) -> Path:
    """Measure the robustness error over n, m, beta and k, and plot it beside Delta."""
    seeds = request.seeds or (QUICK_SEEDS if request.quick else SEEDS)
    rows: list[Row] = []
    for name, cases in sweeps(request.quick).items():
        request.progress(f"theorem1: robustness error against {name}, {seeds} seeds")
        settings = {"seeds": seeds, "cases": cases, "points": POINTS, "dimension": DIMENSION}
        rows += part(request.out, f"{NAME}-{name}", settings, partial(_sweep, name, cases, seeds))
    return write_all(request.out, NAME, rows, _figure(rows), _comparison(rows, seeds))


def sweeps(quick: bool) -> dict[str, list[Case]]:
    """Return the settings of each panel, with Byzantine clients and, over n and m, also without."""
    case = Case()
    over_n = [10, 100] if quick else [10, 30, 100, 300, 1000]
    over_m = [8, 40] if quick else [8, 20, 40, 80, 160]
    byzantine = [0, 4, 16] if quick else [0, 1, 2, 4, 8, 12, 16, 19]
    over_k = [1, 4] if quick else [1, 4, 16, 64]
    return {
        "n": [case._replace(n=n, byzantine=b) for b in (5, 0) for n in over_n],
        "m": [case._replace(m=m, byzantine=b * m // 4) for b in (1, 0) for m in over_m],
        "beta": [case._replace(m=40, byzantine=b) for b in byzantine],
        "k": [case._replace(k=k) for k in over_k],
    }


def population(dimension: int = DIMENSION) -> GaussianRidge:
    """Return the population: isotropic, so that lambda = L_F, with a truth of norm 1 inside a ball of radius 2."""
    return GaussianRidge(np.ones(dimension), np.full(dimension, 1 / np.sqrt(dimension)))


def errors(case: Case, seed: int) -> Array:
    """Return ||(1/k) sum_r (ghat(w, z_r) - g(w, z_r)) z_r|| at POINTS points for one draw of the data."""
    people = population()
    rng = generator(seed, 1)
    losses = people.draw(rng, 1, case.m - case.byzantine, case.n)
    w = rng.standard_normal((POINTS, people.d))
    w *= people.radius * rng.random((POINTS, 1)) / np.linalg.norm(w, axis=1, keepdims=True)
    z = sphere(seed, 0, POINTS, case.k, people.d)
    low, high = extremes(losses, case, w, z)
    truth = people.d * np.einsum("sd,skd->sk", people.gradient(w), z)
    return worst_norm(low - truth, high - truth, z)


def extremes(losses: Losses, case: Case, w: Array, z: Array) -> tuple[Array, Array]:
    """Return the smallest and the largest decision that the Byzantine clients can bring about."""
    honest, rule = w.shape[1] * losses.slopes(w, z), trimmed_mean(case.beta)
    low, high = (decide(rule, honest, case.byzantine, attack()) for attack in (always_small, always_large))
    return low, high


def worst_norm(low: Array, high: Array, z: Array) -> Array:
    """Return the largest ||(1/k) sum_r e_r z_r|| found with each e_r at one of its two ends: S errors."""
    gram = z @ z.transpose(0, 2, 1)
    chosen = np.where(np.abs(low) > np.abs(high), low, high)
    for _ in range(SWEEPS if z.shape[1] > 1 else 0):
        for r in range(z.shape[1]):
            others = np.einsum("sk,sk->s", gram[:, r], chosen) - gram[:, r, r] * chosen[:, r]
            gains = [gram[:, r, r] * e * e + 2 * e * others for e in (low[:, r], high[:, r])]
            chosen[:, r] = np.where(gains[0] > gains[1], low[:, r], high[:, r])
    return np.asarray(np.linalg.norm(np.einsum("sk,skd->sd", chosen, z), axis=1) / z.shape[1])


def bound(case: Case) -> theory.Robustness:
    """Return Delta for this setting."""
    people = population()
    return theory.delta(
        n=case.n, m=case.m, beta=case.beta, v=people.v, d=people.d, diameter=2 * people.radius,
        lipschitz=people.lipschitz,
    )  # fmt: skip


def stated(case: Case) -> float:
    """Return the leading term of Delta as the paper states it, with the largest epsilon that beta allows."""
    people = population()
    return theory.stated_delta(
        n=case.n, m=case.m, beta=case.beta, v=people.v, d=people.d, diameter=2 * people.radius,
        lipschitz=people.lipschitz, epsilon=0.5 - case.beta,
    )  # fmt: skip


def pointwise(case: Case) -> float:
    """Return the bound for one w and z, which may fail for one data set in a hundred."""
    return theory.pointwise_delta(n=case.n, m=case.m, beta=case.beta, v=population().v, failure=FAILURE)


def _sweep(name: str, cases: list[Case], seeds: int) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        found = np.concatenate([errors(case, seed) for seed in range(seeds)])
        limit = bound(case)
        rows.append({
            "over": name, **case._asdict(), "beta": case.beta, "seeds": seeds, "mean": float(found.mean()),
            "largest": float(found.max()), "delta": limit.value, "probability": limit.probability,
            "exceeded": int((found > limit.value).sum()), "stated": stated(case), "pointwise": pointwise(case),
            "pointwise_exceeded": float((found > pointwise(case)).mean()),
        })  # fmt: skip
    return rows


def _series(rows: list[Row], over: str) -> dict[str, list[Row]]:
    """Return the rows of one panel, those with Byzantine clients and those without apart."""
    mine = [row for row in rows if row["over"] == over]
    if over in ("beta", "k"):
        return {"Byzantine": mine}
    return {
        "a quarter Byzantine": [row for row in mine if row["byzantine"]],
        "none Byzantine": [row for row in mine if not row["byzantine"]],
    }


def _figure(rows: list[Row]) -> Any:
    from cyber0.report.plots import BLUE, ORANGE, new_figure, plain

    figure = new_figure("Theorem 1: error of the robust estimate, and its bounds", width=11, height=7.6)
    panels = figure.subplots(2, 2, sharey=True)
    labels = {"n": "n, samples of a client", "m": "m, clients", "beta": "beta, share that is Byzantine and trimmed",
              "k": "k, directions"}  # fmt: skip
    styles: dict[str, tuple[str, dict[str, Any]]] = {
        "delta": ("Delta, for all w and z at once", {"linestyle": "--"}),
        "pointwise": ("bound for one w and z (99 %)", {"linestyle": ":"}),
        "largest": ("largest measured", {"marker": "o", "markersize": 5}),
        "mean": ("mean measured", {"marker": "o", "markersize": 4, "markerfacecolor": "white", "linewidth": 1}),
    }
    for axes, (over, label) in zip(panels.flat, labels.items(), strict=True):
        for (name, mine), colour in zip(_series(rows, over).items(), (ORANGE, BLUE), strict=False):
            x = [row[over] for row in mine]
            for key, (text, style) in styles.items():
                axes.plot(x, [row[key] for row in mine], color=colour, label=f"{text}; {name}", **style)
        axes.set_yscale("log")
        if over != "beta":
            axes.set_xscale("log")
        axes.set_xlabel(label)
        plain(axes)
    for axes in panels[:, 0]:
        axes.set_ylabel("Error of the estimate")
    handles, texts = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, texts, frameon=False, fontsize=9, ncols=2, loc="outside lower center")
    return figure


def _times(rows: list[Row], key: str) -> str:
    ratios = [row[key] / row["largest"] for row in rows]
    return f"{min(ratios):.3g} to {max(ratios):,.0f} times"


def _comparison(rows: list[Row], seeds: int) -> str:
    cells = [
        [row["over"], row["n"], row["m"], f"{row['beta']:.3g}", row["k"], row["mean"], row["largest"],
         row["pointwise"], f"{row['pointwise_exceeded']:.1%}", row["stated"], row["delta"],
         row["delta"] / row["largest"], row["exceeded"] == 0]
        for row in rows
    ]  # fmt: skip
    head = ["over", "n", "m", "beta", "k", "mean error", "largest", "one w and z", "above it", "Delta's leading term",
            "Delta", "Delta / largest", "holds"]  # fmt: skip
    shapes = []
    for over in ("n", "m"):
        for name, mine in _series(rows, over).items():
            x = [row[over] for row in mine]
            measured, predicted = (exponent(x, [row[key] for row in mine]) for key in ("mean", "delta"))
            shapes.append([over, name, f"{measured:.2f}", f"{predicted:.2f}"])
    people = population()
    return (
        f"# Theorem 1\n\nRidge regression on Gaussian samples, d = {people.d}, v = {people.v:.3g}, "
        f"D = {2 * people.radius:g}; the worst attack; {seeds} draws of the data, {POINTS} points each."
        "\n\n"
        f"{markdown_table(head, cells)}\n\nDelta is {_times(rows, 'delta')} the largest error, the bound for one w and "
        f"z {_times(rows, 'pointwise')}.\n\nHow the error falls, as a power of n or m:\n\n"
        f"{markdown_table(['over', 'setting', 'mean error', 'Delta'], shapes)}\n"
    )
