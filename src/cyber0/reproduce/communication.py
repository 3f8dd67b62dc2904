"""The communication table: bytes until a target accuracy, which the paper only states to be few.

Every method on the same IID data with 12 clients: once without Byzantine clients, once with a quarter Byzantine, each
method then under the attack that is designed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cyber0.reproduce import Request
from cyber0.reproduce.cells import Curve, curves, run_cells
from cyber0.reproduce.mnist import finish, make_cells, settings_line
from cyber0.reproduce.outputs import Row, latex_table, markdown_table, write_csv

TARGETS = (70.0, 80.0, 85.0, 88.0)
FEDAVG, TRIMMED = "FedAvg", "Trimmed mean"
HONEST: Mapping[str, tuple[str, ...]] = {
    FEDAVG: ("method.name=fedavg",),
    TRIMMED: ("method.name=trimmed_mean",),
    "Krum": ("method.name=krum",),
    "FedZO, k = 64": ("method.name=fedzo", "method.k=64"),
    **{f"CyBeR-0, k = {k}": (f"method.k={k}",) for k in (1, 4, 16, 64)},
}
ATTACKED: Mapping[str, tuple[str, ...]] = {
    FEDAVG: ("method.name=fedavg", "federation.attack=sign_flip"),
    TRIMMED: ("method.name=trimmed_mean", "federation.attack=fang_trimmed_mean"),
    "Krum": ("method.name=krum", "federation.attack=fang_krum"),
    **{f"CyBeR-0, k = {k}": (f"method.k={k}",) for k in (1, 4, 16, 64)},
}
NONE, QUARTER = "no Byzantine clients", "3 of 12 clients Byzantine"
PANELS = {NONE: HONEST, QUARTER: ATTACKED}


def reproduce(request: Request) -> Path:
    """Run every method and count its bytes."""
    wanted = [
        ({"setting": panel, "method": name}, ["evaluate_every=1", *settings, *([] if panel != NONE else
                                                                             ["federation.byzantine=0"])])
        for panel, methods in PANELS.items()
        for name, settings in methods.items()
    ]  # fmt: skip
    results = run_cells(request, make_cells(request, wanted))
    lines, rows, latex = ["# Bytes that a client sends and gets until a target accuracy is reached", ""], [], ""
    columns = ["target", "method", "up", "down", "saving over FedAvg", "saving over trimmed mean", "best accuracy (%)"]
    for panel in PANELS:
        of_panel = [result for result in results if result.cell.axes["setting"] == panel]
        found = {curve.name: curve for curve in curves(request, of_panel, "method")}
        table = []
        for target in TARGETS:
            for name, curve in found.items():
                row = _row(name, target, found)
                rows.append({"setting": panel, **row})
                table.append([f"{target:.0f} %", name, _bytes(row["uplink_bytes"]), _bytes(row["downlink_bytes"]),
                              _times(row["saving_over_fedavg"]), _times(row["saving_over_trimmed_mean"]),
                              f"{max(curve.mean):.1f}"])  # fmt: skip
        lines += [f"## {panel[0].upper()}{panel[1:]}", "",
                  markdown_table(columns, table), ""]  # fmt: skip
        latex += f"% {panel}\n{latex_table(columns, table)}"
    write_csv(request.out / "communication.csv", rows)
    (request.out / "communication.tex").write_text(latex, encoding="utf-8")
    payload = "Payload per client, up and down, mean curve over the seeds; the saving is in bytes up."
    return finish(request, "communication", [*lines, payload, settings_line(request)])


def _row(name: str, target: float, found: Mapping[str, Curve]) -> Row:
    def spent(curve: Curve) -> tuple[int, int] | None:
        place = curve.reached(target)
        return None if place is None else (curve.uplink[place], curve.downlink[place])

    mine = spent(found[name])
    savings = {}
    for key, other in (("saving_over_fedavg", FEDAVG), ("saving_over_trimmed_mean", TRIMMED)):
        theirs = spent(found[other])
        savings[key] = theirs[0] / mine[0] if mine and theirs and mine[0] else None
    up, down = mine or (None, None)
    return {"target": target, "method": name, "uplink_bytes": up, "downlink_bytes": down, **savings}


def _bytes(count: int | None) -> str:
    return "not reached" if count is None else f"{count:,}"


def _times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:,.3g} x"
