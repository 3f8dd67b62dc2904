"""A worker of a study that trains nothing, so that tests of the study itself need no torch.

It writes what a finished run has, with figures that follow from the config, and logs the cells it got in $RUN_LOG. The
learning rate of a cell says how it behaves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from cyber0 import __version__
from cyber0.config.files import to_toml
from cyber0.config.schema import Config
from cyber0.errors import Cyber0Error
from cyber0.runs import environment
from cyber0.runs.folder import MetricsFile, write_summary
from cyber0.study.cells import Cell, check_folder
from cyber0.tasks.metrics import MetricsRow

FAILS, DIES_ONCE, DIES, HANGS = 0.5, 0.25, 0.125, 0.0625


def accuracy_of(config: Config) -> float:
    """Return an accuracy that tells seeds, rules and attacks apart."""
    return (len(config.aggregation.rule) * 100 + len(config.federation.attack) * 5 + config.seed) / 10000


def made_by() -> dict[str, str]:
    """Return which code the run is to have been made by: $SOURCE, or this."""
    return {"cyber0": __version__, "source": os.environ.get("SOURCE") or environment.source_digest()[:12]}


def run_job(folder: Path, config: Config) -> None:
    """Behave as the config says, or write the files of a finished run."""
    check_folder(Cell({}, config), folder)
    seen = (folder / "config.toml").exists()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    if config.method.lr == FAILS:
        raise RuntimeError("no such luck")
    if config.method.lr == DIES or (config.method.lr == DIES_ONCE and not seen):
        os.kill(os.getpid(), signal.SIGKILL)
    if config.method.lr == HANGS:
        time.sleep(600)
    accuracy = accuracy_of(config)
    summary = {"final_accuracy": accuracy, "final_loss": 1.5, "rounds": config.rounds, "uplink_bytes_per_client": 8,
               "downlink_bytes_per_client": 16, "wall_seconds": time.time() % 1000,
               "model_digest": "ab" * 32, "environment": made_by()}  # fmt: skip
    rows = [MetricsRow(0, accuracy + 0.25, 2.0, 0, 0, 0, 0.0), MetricsRow(2, accuracy, 1.5, 8, 16, 2, 0.1)]
    MetricsFile(folder / "metrics.csv").rewrite(rows)
    write_summary(folder, summary)


def main() -> None:
    """Serve until the input ends."""
    if os.environ.get("BROKEN"):
        sys.exit("no torch here")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        config = Config.from_dict(job["config"])
        with open(os.environ["RUN_LOG"], "a") as file:
            file.write(f"{config.aggregation.rule} {config.federation.attack} {config.seed}\n")
        print(json.dumps({"round": 0, "rounds": config.rounds, "accuracy": None}), flush=True)
        try:
            run_job(Path(job["folder"]), config)
            answer: dict[str, object] = {"done": True}
        except (RuntimeError, Cyber0Error) as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
