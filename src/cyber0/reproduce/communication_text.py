"""Bytes until a target accuracy with a language model: CyBeR-0 beside methods that send d scalars per round.

The paper: "a million-fold saving in terms of communication compared to uncompressed transmission". IID data, no
Byzantine clients. FedAvg's steps are gradients, which tolerate a learning rate that is larger by orders of magnitude
and need fewer rounds; several rates are tried, and CyBeR-0 is compared with the one that needs the fewest bytes.
FedZO's clients have directions of their own, so a round has as many as there are clients: its rate is larger and its
rounds are fewer by that factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cyber0.config.schema import Config
from cyber0.reproduce import Request
from cyber0.reproduce import text as lm
from cyber0.reproduce import text_results as tr
from cyber0.reproduce.cells import Curve, curves
from cyber0.reproduce.outputs import Row, markdown_table, write_csv
from cyber0.reproduce.text import NO_BYZANTINE, TITLES, Wanted
from cyber0.reproduce.text_results import TextResults

TARGETS = (50, 60, 70, 75, 80, 85, 90, 95)  # percent
FEDAVG_RATES, FEDAVG_SHARE = (10, 100, 1000), 1 / 40
"""Factors on the learning rate of the zero-order methods; the fraction of their steps."""


def reproduce(request: Request) -> Path:
    """Run every method and count its bytes."""
    tasks = lm.tasks_of(request, ("sst2",))
    cells = lm.make_cells(request, [one for task in tasks for one in _wanted(task)])
    results = TextResults(request, lm.run(request, cells), cells)
    head = ["set", "target", "method", "rounds", "sent by a client (bytes)", "as many as CyBeR-0's"]
    rows: list[Row] = []
    for task in tasks:
        of_task = [result for result in results.done if result.cell.axes["task"] == TITLES[task]]
        rows += _count(task, curves(request, of_task, "method"))
    shown = [[row["task"], f"{row['target']} %", row["method"], _number(row["rounds"]), _number(row["uplink_bytes"]),
              _times(row["factor"])] for row in rows]  # fmt: skip
    write_csv(request.out / "communication_text.csv", [{**row, "model": results.model} for row in rows])
    write_csv(request.out / "communication_text.evaluations.csv", results.evaluations())
    tr.write_latex(results, "communication_text", (head, shown))
    per_round = [
        f"{config.method.k:,} number(s) of {int(d):,}: {d / config.method.k:,.3g} times fewer than the weights."
        for config, d in [(results.cells[0].config, results.figures("dimension")[0])]
    ]
    claim = '"A million-fold saving compared to uncompressed transmission", the paper says. A round of CyBeR-0 sends '
    return tr.finish(results, "communication_text", "Bytes until a target accuracy", [
        claim + per_round[0], "", markdown_table(head, shown), "", _sentence(rows), "",
        "Mean curve over the seeds, as evaluated; targets that no method reaches, or all start above, are left out.",
    ])  # fmt: skip


def _wanted(task: str) -> list[Wanted]:
    clients = Config().with_overrides([f"task.name={task}"]).federation.clients

    def one(method: str, *settings: str, share: float = 1.0, lr_factor: float = 1.0) -> Wanted:
        return Wanted({"task": TITLES[task], "method": method}, task, (*NO_BYZANTINE, *settings), share, lr_factor)

    return [
        one("CyBeR-0"),
        *(one(f"FedAvg, lr x {rate}", "method.name=fedavg", share=FEDAVG_SHARE, lr_factor=rate)
          for rate in FEDAVG_RATES),
        one("FedZO", "method.name=fedzo", share=1 / clients, lr_factor=clients),
    ]  # fmt: skip


def _count(task: str, found: Sequence[Curve]) -> list[Row]:
    """Return the bytes that each method needs for each target that one of them reaches by training."""
    rows: list[Row] = []
    for target in TARGETS:
        places: Mapping[str, int | None] = {curve.name: curve.reached(target) for curve in found}
        if not any(places.values()):  # reached by no method, or already by the untrained model
            continue
        sent = {c.name: None if (place := places[c.name]) is None else c.uplink[place] for c in found}
        base = sent.get("CyBeR-0")
        for curve in found:
            place, up = places[curve.name], sent[curve.name]
            rows.append({"task": TITLES[task], "target": target, "method": curve.name,
                         "rounds": None if place is None else curve.rounds[place], "uplink_bytes": up,
                         "factor": up / base if up and base else None})  # fmt: skip
    return rows


def _sentence(rows: Sequence[Row]) -> str:
    """Return how much is saved over the best FedAvg and over FedZO at the highest target that both reach."""
    parts = []
    for other in ("FedAvg", "FedZO"):
        known = [row for row in rows if row["method"].startswith(other) and row["factor"]]
        if known:
            highest = max(row["target"] for row in known)
            least = min((row for row in known if row["target"] == highest), key=lambda row: row["factor"])
            parts.append(f"{least['method']} sends {least['factor']:,.3g} times as much until {highest} %")
        else:
            parts.append(f"no target is reached by both {other} and CyBeR-0")
    return f"{'; '.join(parts)}."


def _number(count: int | None) -> str:
    return "not reached" if count is None else f"{count:,}"


def _times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:,.3g} x"
