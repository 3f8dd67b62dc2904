"""Table 1: Krum, trimmed mean and CyBeR-0 under attack, 40 clients; and the table under other readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from cyber0.config.keys import Value
from cyber0.reproduce import Request
from cyber0.reproduce.cells import plus_minus, run_cells
from cyber0.reproduce.mnist import finish, make_cells, settings_line
from cyber0.reproduce.outputs import Row, latex_table, markdown_table, write_csv
from cyber0.study import Result

CLIENT_COUNT = 40
ALPHAS = (0.125, 0.25, 0.375)
PAPER: Mapping[str, tuple[tuple[float, float], ...]] = {
    "Krum": ((69.2, 1.6), (10.2, 1.2), (6.9, 2.5)),
    "Trimmed mean": ((86.6, 0.3), (74.8, 1.1), (36.0, 4.1)),
    "CyBeR-0": ((87.1, 0.8), (80.8, 1.0), (60.3, 2.9)),
}
"""Mean and deviation at each alpha, in percent."""
# The readings that fit the paper's table best: IID, each method under the attack designed for it; the attack on the
# trimmed mean knows the sign of the noise-free gradient.
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "Krum": ("method.name=krum", "federation.attack=fang_krum"),
    "Trimmed mean": (
        "method.name=trimmed_mean", "federation.attack=fang_trimmed_mean", "federation.attack_sign=truth",
    ),
    "CyBeR-0": ("federation.attack=full_knowledge", "federation.attack_reading=accepted"),
}  # fmt: skip
VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "accepted, IID": ("CyBeR-0", ("federation.attack_reading=accepted",)),
    "literal, IID": ("CyBeR-0", ("federation.attack_reading=literal",)),
    "accepted, non-IID": ("CyBeR-0", ("federation.attack_reading=accepted", "federation.partition=by_label")),
    "literal, non-IID": ("CyBeR-0", ("federation.attack_reading=literal", "federation.partition=by_label")),
    "sign of the honest mean, IID": ("Trimmed mean", ("federation.attack_sign=honest",)),
    "sign of the true gradient, IID": ("Trimmed mean", ("federation.attack_sign=truth",)),
    "sign of the true gradient, non-IID": (
        "Trimmed mean", ("federation.attack_sign=truth", "federation.partition=by_label"),
    ),
    "Krum, sign of the honest mean, IID": ("Krum", ("federation.attack_sign=honest",)),
    "Krum, sign of the true gradient, IID": ("Krum", ("federation.attack_sign=truth",)),
    "Krum, non-IID": ("Krum", ("federation.attack_sign=honest", "federation.partition=by_label")),
}  # fmt: skip
COMMON_SETTINGS = (f"federation.clients={CLIENT_COUNT}", "evaluate_every=50")


def reproduce(request: Request) -> Path:
    """Run the table's nine cells and compare them with the paper's."""
    wanted = [(_place("method", name, alpha), [*COMMON_SETTINGS, *_byzantine(alpha), *settings])
              for name, settings in ALGORITHMS.items() for alpha in ALPHAS]  # fmt: skip
    results = run_cells(request, make_cells(request, wanted))
    ours = _collect(results)
    rows = _rows(ours)
    write_csv(request.out / "table1.csv", [_tidy(result) for result in results])
    columns = ["algorithm", *(f"alpha = {a:g}" for a in ALPHAS)]
    cells = [[name, *(plus_minus(ours[name, a]) for a in ALPHAS)] for name in ALGORITHMS]
    (request.out / "table1.tex").write_text(latex_table(columns, cells), encoding="utf-8")
    head = ["algorithm", "alpha", "paper", "ours", "difference", "within the paper's deviation"]
    beside = [[row["method"], row["alpha"], f"{row['paper']:.1f} ± {row['paper_deviation']:.1f}",
               plus_minus(ours[row["method"], row["alpha"]]), f"{row['difference']:+.1f}",
               _within(row["difference"], row["paper_deviation"])] for row in rows]  # fmt: skip
    return finish(request, "table1", [
        "# Table 1: final accuracy (%) on MNIST, m = 40", "",
        markdown_table(columns, cells), "",
        "## Beside the paper", "",
        markdown_table(head, beside), "",
        markdown_table(["order of the three", "paper", "ours", "the same"], [_order_row(ours, a) for a in ALPHAS]), "",
        settings_line(request),
    ])  # fmt: skip


def readings(request: Request) -> Path:
    """Run the table's rows under other readings of the paper."""
    wanted = [(_place("reading", name, alpha), [*COMMON_SETTINGS, *_byzantine(alpha), *ALGORITHMS[method], *settings])
              for name, (method, settings) in VARIANTS.items() for alpha in ALPHAS]  # fmt: skip
    results = run_cells(request, make_cells(request, wanted))
    write_csv(request.out / "readings.csv", [_tidy(result) for result in results])
    ours = _collect(results, "reading")
    rows = []
    for name, (method, _) in VARIANTS.items():
        misses = [abs(fmean(ours[name, a]) - p) / d for a, (p, d) in zip(ALPHAS, PAPER[method], strict=True)]
        rows.append([method, name, *(plus_minus(ours[name, a]) for a in ALPHAS), f"{max(misses):.1f}"])
    paper = [[name, "**paper**", *(f"{mean:.1f} ± {dev:.1f}" for mean, dev in PAPER[name]), "–"] for name in PAPER]
    table = [row for pair in ([p, *[r for r in rows if r[0] == p[0]]] for p in paper) for row in pair]
    columns = ["algorithm", "reading", *(f"alpha = {a:g}" for a in ALPHAS),
               "largest difference, in the paper's deviations"]  # fmt: skip
    (request.out / "readings.tex").write_text(latex_table(columns, table), encoding="utf-8")
    return finish(request, "readings", [
        "# Table 1 under other readings: final accuracy (%), m = 40", "",
        markdown_table(columns, table), "",
        settings_line(request),
    ])  # fmt: skip


def _place(axis: str, name: str, alpha: float) -> Mapping[str, Value]:
    return {axis: name, "alpha": alpha}


def _byzantine(alpha: float) -> list[str]:
    return [f"federation.byzantine={round(alpha * CLIENT_COUNT)}", f"aggregation.beta={alpha}"]


def _collect(results: Sequence[Result], axis: str = "method") -> dict[tuple[str, float], list[float]]:
    found: dict[tuple[str, float], list[float]] = {}
    for result in results:
        assert result.accuracy is not None
        place = str(result.cell.axes[axis]), float(result.cell.axes["alpha"])
        found.setdefault(place, []).append(100 * result.accuracy)
    return found


def _rows(ours: Mapping[tuple[str, float], list[float]]) -> list[Row]:
    return [
        {"method": name, "alpha": alpha, "paper": mean, "paper_deviation": spread,
         "difference": fmean(ours[name, alpha]) - mean}
        for name in ALGORITHMS
        for alpha, (mean, spread) in zip(ALPHAS, PAPER[name], strict=True)
    ]  # fmt: skip


def _within(difference: float, spread: float) -> str:
    if abs(difference) <= spread:
        return "yes"
    return f"no: {abs(difference) / spread:.1f} deviations"


def _order_row(ours: Mapping[tuple[str, float], list[float]], alpha: float) -> list[str]:
    theirs = {name: PAPER[name][ALPHAS.index(alpha)][0] for name in PAPER}
    mine = {name: fmean(ours[name, alpha]) for name in ALGORITHMS}
    a, b = (" > ".join(sorted(values, key=lambda n: -values[n])) for values in (theirs, mine))
    return [f"alpha = {alpha:g}", a, b, "yes" if a == b else "**no**"]


def _tidy(result: Result) -> Row:
    return {**result.cell.axes, "seed": result.cell.config.seed, "accuracy": result.accuracy,
            "loss": result.figures["final_loss"], "uplink_bytes": result.figures["uplink_bytes"],
            "model_digest": result.figures["model_digest"]}  # fmt: skip
