"""A worker of a study: a process that executes one run after the other.

It reads jobs from its standard input and answers on its standard output, one JSON object a line:

    <- {"ready": true}
    -> {"folder": "runs/a", "config": {...}}
    <- {"round": 12, "rounds": 400, "accuracy": 0.31}       every quarter of a second
    <- {"done": true}   or   {"failed": "what was wrong"}

It exits at the end of its input, or when its output is closed. It may be killed at any moment: a run's folder survives.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyber0.ledger import Record
    from cyber0.runs.run import Run

SECONDS_BETWEEN_REPORTS = 0.25
Send = Callable[[dict[str, Any]], None]


class Reporter:
    """A callback that reports a run's progress to the study."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def on_start(self, run: Run) -> None:
        self._run = run
        self._report(None)

    def on_round(self, record: Record) -> None:
        if time.monotonic() - self._last >= SECONDS_BETWEEN_REPORTS:
            accuracy = self._run.last_row.accuracy
            self._report(accuracy if math.isfinite(accuracy) else None)

    def _report(self, accuracy: float | None) -> None:
        self._last = time.monotonic()
        self._send({"round": self._run.round, "rounds": self._run.rounds, "accuracy": accuracy})


def run_job(job: dict[str, Any], send: Send) -> None:
    """Execute one run to its end, resuming it if it was started before."""
    from cyber0.config.schema import Config
    from cyber0.diagnose.rate import measured_lr
    from cyber0.runs.run import Run
    from cyber0.storage import CONFIG
    from cyber0.study.cells import Cell, check_folder
    from cyber0.study.device_memory import DeviceMemory, held_bytes

    folder, config = Path(job["folder"]), Config.from_dict(job["config"])
    check_folder(Cell({}, config), folder)
    resumed, held = (folder / CONFIG).exists(), held_bytes(config.device)
    # No report and no copy of the model: a study has many runs, and `cyber0 run --resume` writes both for one.
    if resumed:
        run = Run.resume(folder, export=False, measure_lr=measured_lr)
    else:
        run = Run.start(config, folder, export=False, measure_lr=measured_lr)
    run.run([DeviceMemory(max(held, held_bytes(config.device, cached=True))), Reporter(send)])
    del run
    gc.collect()  # the next run needs the memory that this one's cycles still hold: a model, or a set of pictures


def main() -> None:
    """Execute jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    from cyber0.errors import Cyber0Error
    from cyber0.kernels.memory import keep_freed_memory
    from cyber0.runs import run as runs  # noqa: F401  (so that a broken installation fails before the first job)
    from cyber0.tasks.text.model_cache import MODELS

    MODELS.enable()
    keep_freed_memory()
    send({"ready": True})
    for line in sys.stdin:
        try:
            run_job(json.loads(line), send)
        except BrokenPipeError:  # the study is gone
            raise
        except Cyber0Error as error:
            send({"failed": str(error)})
        except Exception as error:
            traceback.print_exc()
            send({"failed": f"{type(error).__name__}: {error}"})
        else:
            send({"done": True})


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the run's folder needs no cleanup, and the pipe can't be flushed
