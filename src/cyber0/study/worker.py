"""A worker of a study: plays one run after the other in a process of its own.

It reads jobs from its standard input and answers on its standard output, one JSON object a line:

    <- {"ready": true}
    -> {"folder": "runs/a", "config": {...}}
    <- {"round": 12, "rounds": 400, "accuracy": 0.31}       now and then
    <- {"done": true}   or   {"failed": "what was wrong"}

It ends when there is nothing left to read or nobody left to answer. A run's folder bears being killed at any moment.
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
Say = Callable[[dict[str, Any]], None]


class Reporter:
    """Tells the study how far a run has come, a callback."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def on_start(self, run: Run) -> None:
        self._run = run
        self._report(None)

    def on_round(self, record: Record) -> None:
        if time.monotonic() - self._last >= SECONDS_BETWEEN_REPORTS:
            accuracy = self._run.last_row.accuracy
            self._report(accuracy if math.isfinite(accuracy) else None)

    def _report(self, accuracy: float | None) -> None:
        self._last = time.monotonic()
        self._say({"round": self._run.round, "rounds": self._run.rounds, "accuracy": accuracy})


def play(job: dict[str, Any], say: Say) -> None:
    """Play one run to its end, from wherever it stands."""
    from cyber0.config.schema import Config
    from cyber0.runs.run import Run
    from cyber0.storage import CONFIG
    from cyber0.study.cells import Cell, check_folder

    folder, config = Path(job["folder"]), Config.from_dict(job["config"])
    check_folder(Cell({}, config), folder)
    resumed = (folder / CONFIG).exists()
    # No report and no copy of the model: a study has many runs, and `cyber0 run --resume` writes both for one.
    run = Run.resume(folder, export=False) if resumed else Run.start(config, folder, export=False)
    run.run([Reporter(say)])
    if config.task.model:  # the next run needs the memory that this one's cycles still hold
        del run
        gc.collect()


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is for the log

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    from cyber0.errors import Cyber0Error
    from cyber0.runs import run as runs  # noqa: F401  (an installation that is broken shows before the first job)
    from cyber0.tasks.text import model_cache as shelf

    shelf.put_up()

    say({"ready": True})
    for line in sys.stdin:
        try:
            play(json.loads(line), say)
        except BrokenPipeError:  # the study is gone
            raise
        except Cyber0Error as error:
            say({"failed": str(error)})
        except Exception as error:
            traceback.print_exc()
            say({"failed": f"{type(error).__name__}: {error}"})
        else:
            say({"done": True})


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the run's folder needs no farewell, and the pipe can't be flushed
