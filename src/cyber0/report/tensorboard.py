"""TensorBoard event files of a run, for those who keep their curves there."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any, Self

from cyber0.errors import ConfigError
from cyber0.storage import TENSORBOARD

if TYPE_CHECKING:
    from cyber0.runs.run import Row, Run

TAGS = {
    "{set}/accuracy": "accuracy",
    "{set}/loss": "loss",
    "traffic/sent_by_each_client": "uplink_bytes",
    "traffic/received_by_each_client": "downlink_bytes",
}


class Events:
    """TensorBoard event files in the run's folder, a callback: each evaluation once, those before a resume included.

    Use it as a context manager: the file is then closed also when the run is interrupted.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "TensorBoard event files need the package tensorboard, which is not installed: pip install tensorboard"
            )
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def on_start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        home = run.folder / TENSORBOARD
        for old in home.glob("events.out.tfevents.*"):  # every row is written anew
            old.unlink()
        self._run, self._writer = run, SummaryWriter(str(home))
        for round in sorted(run.rows):
            self._write(run.rows[round])

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
        self._write(self._run.rows[round])

    def on_end(self, summary: dict[str, Any]) -> None:
        self.__exit__()

    def _write(self, row: Row) -> None:
        which = self._run.simulation.evaluated_on
        for tag, name in TAGS.items():
            value = getattr(row, name)
            if name != "accuracy" or not math.isnan(value):
                self._writer.add_scalar(tag.format(set=which), value, row.round)
        for name, value in row.metrics.items():
            self._writer.add_scalar(f"{which}/{name}", value, row.round)
