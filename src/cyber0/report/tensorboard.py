"""TensorBoard event files of a run, for those who keep their curves there."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

from cyber0.errors import ConfigError
from cyber0.files import TENSORBOARD

TAGS = {
    "{set}/accuracy": "accuracy",
    "{set}/loss": "loss",
    "traffic/sent_by_each_client": "uplink_bytes",
    "traffic/received_by_each_client": "downlink_bytes",
}


def check_installed() -> None:
    """Refuse --tensorboard where TensorBoard is not installed, before anything runs."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard, which is not installed: pip install tensorboard"
        )


class Events:
    """Writes each evaluation of a run once, also those from before it was resumed."""

    def __init__(self, folder: Path, evaluated_on: str = "test") -> None:
        from torch.utils.tensorboard import SummaryWriter

        home = folder / TENSORBOARD
        for old in home.glob("events.out.tfevents.*"):  # every row is written anew
            old.unlink()
        self._writer = SummaryWriter(str(home))
        self._tags = {tag.format(set=evaluated_on): name for tag, name in TAGS.items()}
        self._set = evaluated_on
        self._written: set[int] = set()

    def update(self, rows: dict[int, Any]) -> None:
        """Write the evaluations that are not there yet: a run only ever adds to the end of its rows."""
        new = list(itertools.takewhile(lambda round: round not in self._written, reversed(rows)))
        for round in sorted(new):
            for tag, name in self._tags.items():
                value = getattr(rows[round], name)
                if name != "accuracy" or not math.isnan(value):
                    self._writer.add_scalar(tag, value, round)
            for name, value in rows[round].metrics.items():
                self._writer.add_scalar(f"{self._set}/{name}", value, round)
        self._written.update(new)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
