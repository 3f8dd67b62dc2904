"""TensorBoard event files of a run."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Self

from cyber0.errors import ConfigError
from cyber0.storage import TENSORBOARD

if TYPE_CHECKING:
    from cyber0.runs.run import Run
    from cyber0.tasks.metrics import MetricsRow


class Events:
    """A callback that writes TensorBoard event files: each evaluation once, those before a resume included.

    Use it as a context manager, so that the file is closed also when the run is interrupted.
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
        for old in home.glob("events.out.tfevents.*"):  # every row is written again
            old.unlink()
        self._run, self._writer = run, SummaryWriter(str(home))
        for round in sorted(run.rows):
            self._write(run.rows[round])

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
        self._write(self._run.rows[round])

    def on_end(self, summary: dict[str, Any]) -> None:
        self.__exit__()

    def _write(self, row: MetricsRow) -> None:
        for tag, value in row.scalars(self._run.simulation.evaluated_on).items():
            self._writer.add_scalar(tag, value, row.round)
