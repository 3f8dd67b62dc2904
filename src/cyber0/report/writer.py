"""The report and the pictures of a run, written at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyber0.report import page, plots
from cyber0.storage import PLOTS, REPORT

if TYPE_CHECKING:
    from cyber0.runs.run import Run


class ReportWriter:
    """A callback that draws plots/*.png and writes report.html, which takes about a second."""

    def on_start(self, run: Run) -> None:
        self._run = run

    def on_end(self, summary: dict[str, Any]) -> None:
        run = self._run
        _draw_curve(run)
        _draw_clients(run)
        page.write([run.folder], run.folder / REPORT)


def curve_picture(run: Run) -> str:
    """Return the name of the picture of what was measured over the rounds."""
    return "accuracy.png" if run.has_accuracy else "loss.png"


def _draw_curve(run: Run) -> None:
    rows = [vars(run.rows[round]) for round in sorted(run.rows)]
    draw = plots.accuracy_picture if run.has_accuracy else plots.loss_picture
    draw(rows, run.folder / PLOTS / curve_picture(run), run.title(), evaluated_on=run.simulation.evaluated_on)


def _draw_clients(run: Run) -> None:
    simulation, config = run.simulation, run.simulation.config
    byzantine = [bool(one) for one in simulation.byzantine]
    trims = run.config.aggregation.rule == "trimmed_mean"
    plots.suspects_picture(
        [row.share for row in run.suspects()],
        byzantine,
        run.folder / PLOTS / "suspects.png",
        expected=2 * config.borne / simulation.federator.invited_count if trims else None,
    )
    plots.partition_picture(
        simulation.label_counts().tolist(),
        byzantine,
        run.folder / PLOTS / "partition.png",
        title=f"Samples of each client, {config.federation.partition_title}",
        labelled=bool(simulation.task.classes),
    )
