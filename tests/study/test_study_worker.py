"""A worker of a study executes real runs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import own_config as blob_config

from cyber0.config.schema import Config, to_dict
from cyber0.errors import ConfigError
from cyber0.federation.simulation import Simulation
from cyber0.runs.run import Run
from cyber0.study import Cell, Study, worker


def test_a_worker_resumes_an_interrupted_run_and_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = blob_config("rounds=9", "evaluate_every=3")
    whole = Run.start(settings, tmp_path / "whole").run()
    half = Run.start(settings, tmp_path / "half")
    for _ in range(4):
        half.simulation.run_round()
    half.simulation.ledger.close()
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "SECONDS_BETWEEN_REPORTS", 0.0)
    worker.run_job({"folder": str(tmp_path / "half"), "config": to_dict(settings)}, said.append)
    assert [message["round"] for message in said] == [4, 5, 6, 7, 8, 9]
    assert json.loads((tmp_path / "half/summary.json").read_text())["model_digest"] == whole["model_digest"]
    assert not (tmp_path / "half/plots").exists() and not (tmp_path / "whole/plots").exists()


def test_a_worker_refuses_a_folder_of_another_run(tmp_path: Path) -> None:
    Run.start(blob_config("rounds=1"), tmp_path / "run").run()
    with pytest.raises(ConfigError, match=r"config.toml was changed"):
        worker.run_job({"folder": str(tmp_path / "run"), "config": to_dict(blob_config("rounds=2"))}, lambda _: None)


def test_a_worker_keeps_nothing_of_a_run_that_has_ended(tmp_path: Path) -> None:
    gc.collect()
    before = {id(found) for found in gc.get_objects() if isinstance(found, Simulation)}
    gc.disable()  # what a run leaves in cycles would stay until it happened to be collected
    try:
        worker.run_job({"folder": str(tmp_path), "config": to_dict(blob_config("rounds=2"))}, lambda _: None)
        assert not [found for found in gc.get_objects() if isinstance(found, Simulation) and id(found) not in before]
    finally:
        gc.enable()


def test_a_study_says_that_a_run_was_lengthened_and_does_not_ask_to_delete_it(tmp_path: Path) -> None:
    folder, config = tmp_path / "runs" / "cell", blob_config("rounds=2")
    Run.start(config, folder, export=False).run()
    Run.resume(folder, rounds=3, export=False).run()
    with pytest.raises(ConfigError, match=r"lengthened to 3 rounds, .* have 2: move the folder out of .*runs") as said:
        worker.run_job({"folder": str(folder), "config": to_dict(config)}, lambda _: None)
    assert not {"remove", "delete", "changed"} & set(str(said.value).split())


@pytest.mark.slow
@pytest.mark.mnist
def test_a_study_of_real_runs_ends_as_the_runs_themselves_do(here: Path) -> None:
    settings = ["rounds=2", "method.k=4", "evaluate_every=1"]
    cells = [
        Cell({"beta": beta}, Config().with_overrides([*settings, f"aggregation.beta={beta}"])) for beta in (0.25, 0.1)
    ]
    cells.append(Cell({"beta": "none"}, Config().with_overrides([*settings, "task.data=/nowhere"])))
    results = Study(cells, Path("out"), 1).run()
    assert [r.status for r in results] == ["done", "done", "failed"] and "/nowhere" in results[2].error
    alone = Run.start(cells[1].config, here / "alone").run()
    assert results[1].figures["model_digest"] == alone["model_digest"]
    assert results[1].accuracy == alone["final_accuracy"]
