"""The files in a run's folder: what they hold, and how they are written."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import DUE, SETTINGS, results_of, rows_of, summary_of
from synthetic import OTHER_BLOBS, OWN_BLOBS, After, one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.errors import DataError
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Record
from cyber0.model.tensors import save_tensors
from cyber0.report.writer import ReportWriter
from cyber0.runs import export as exports
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run
from cyber0.storage import give_normal_modes, write_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    Run.start(config(*SETTINGS), folder).run([ReportWriter()])
    return folder


@pytest.mark.slow
def test_the_folder_holds_what_is_promised(finished: Path) -> None:
    files = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    assert files == {"config.toml", "w0.safetensors", "ledger.bin", "partition.csv", "metrics.csv", "clients.csv",
                     "sources.json", "summary.json", "report.html", "model.safetensors",
                     "plots/accuracy.png", "plots/suspects.png", "plots/partition.png"}  # fmt: skip
    for picture in finished.glob("plots/*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_the_partition_is_saved(finished: Path) -> None:
    with (finished / "partition.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    simulation = Simulation(config(*SETTINGS))
    assert list(rows[0]) == ["client", "byzantine", "samples", "label_0", "label_1", "label_2", "label_3"]
    for client, row in enumerate(rows):
        share = simulation.task.labels[simulation.shares[client]]
        assert int(row["samples"]) == len(share)
        assert [int(row[f"label_{label}"]) for label in range(4)] == np.bincount(share, minlength=4).tolist()
        assert bool(int(row["byzantine"])) == simulation.byzantine[client]


def test_the_summary_says_what_the_run_came_to(finished: Path) -> None:
    summary = summary_of(finished)
    simulation = Simulation(config(*SETTINGS))
    while simulation.round < 23:
        simulation.run_round()
    loss, accuracy, _ = simulation.evaluate()
    assert summary["final_accuracy"] == accuracy and summary["final_loss"] == loss
    assert (summary["rounds"], summary["abandoned_rounds"], summary["dimension"]) == (23, 0, 68)
    assert summary["uplink_bytes_per_client"] == summary["downlink_bytes_per_client"] == 23 * 4 * 8
    assert summary["model_digest"] == simulation.parameters.digest()
    assert summary["wall_seconds"] > 0
    assert summary["rounds_per_second"] == pytest.approx(23 / summary["wall_seconds"])


def test_there_is_one_row_an_evaluation_from_the_start_to_the_end(finished: Path) -> None:
    rows = rows_of(finished)
    assert [int(row["round"]) for row in rows] == DUE
    assert [int(row["uplink_bytes"]) for row in rows] == [t * 32 for t in DUE]
    assert [int(row["decided"]) for row in rows] == DUE
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert float(rows[-1]["accuracy"]) == summary_of(finished)["final_accuracy"]


def test_the_clients_file_gives_byzantine_clients_away(finished: Path) -> None:
    with (finished / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["client"]) for row in rows] == list(range(12))
    assert sum(int(row["byzantine"]) for row in rows) == 3
    assert all(int(row["sent"]) == 23 * 8 for row in rows)
    assert sum(int(row["trimmed"]) for row in rows) == 23 * 8 * 6
    assert all(float(row["share"]) == int(row["trimmed"]) / int(row["sent"]) for row in rows)
    worst = max(rows, key=lambda row: float(row["share"]))
    assert worst["byzantine"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "umask"), [("cyber0", 0o022), ("fedavg", 0o027)], indirect=["umask"])
def test_every_file_has_the_mode_that_the_umask_asks_for(method: str, umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reports = str(method == "cyber0").lower()
    Run.start(config("rounds=2", f"method.name={method}", f"serve.keep_reports={reports}"), folder).run(
        [ReportWriter()]
    )
    if method == "cyber0":
        exports.save_weights(rebuild(folder)[1], folder / "replayed.safetensors")
    files = {p.name: oct(p.stat().st_mode & 0o777) for p in folder.rglob("*") if p.is_file()}
    assert len(files) >= 11 and set(files.values()) == {oct(0o666 & ~umask)}, files


def test_a_file_is_forced_to_the_disk_by_a_handle_that_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses others."""
    fcntl = pytest.importorskip("fcntl", reason="handles can't be asked here")
    modes = []
    monkeypatch.setattr("os.fsync", lambda handle: modes.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE))
    write_text(tmp_path / "x", "words")
    assert modes == [os.O_RDWR] and (tmp_path / "x").read_text() == "words"


def test_a_file_system_without_modes_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refused)
    write_text(tmp_path / "x", "words")
    give_normal_modes(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [("I/O error: No space left on device (os error 28)", "No space left on device; free some space"),
     ("I/O error: Permission denied (os error 13)", "Permission denied; make sure that it can be written to"),
     ("Some tensors\n  share memory", "Some tensors share memory$")],
)  # fmt: skip
def test_weights_that_can_not_be_written_are_an_error_that_gives_the_reason(
    reason: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr("cyber0.model.tensors.save_file", refuse)
    with pytest.raises(DataError, match=rf"x\.safetensors can't be written: {said}"):
        save_tensors({"w": torch.zeros(2)}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_dev_full
def test_a_full_disk_is_an_error_that_names_the_metrics_file(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run.start(config(*SETTINGS), folder)

    class Fill:
        def on_round(self, record: Record) -> None:
            if record.round == 6:
                (folder / "metrics.csv").unlink()
                (folder / "metrics.csv").symlink_to("/dev/full")

    with pytest.raises(DataError, match=r"run/metrics\.csv can't be written: No space left.*free some space.*--resume"):
        run.run([Fill()])
    (folder / "metrics.csv").unlink()
    assert Run.resume(folder).run()["model_digest"] == summary_of(finished)["model_digest"]
    assert results_of(folder) == results_of(finished)


@pytest.mark.slow
@needs_dev_full
@pytest.mark.parametrize("name", ["config.toml", "partition.csv", "clients.csv", "summary.json", "plots/accuracy.png",
                                  "report.html"])  # fmt: skip
def test_a_full_disk_is_an_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    """Each file is written beside its place first, where /dev/full is in the way; pictures are written in place."""
    folder, place = tmp_path / "run", Path(name)
    hidden = folder / place.parent / (place.name if place.suffix == ".png" else f".{place.name}.{os.getpid()}")
    hidden.parent.mkdir(parents=True)
    hidden.symlink_to("/dev/full")
    with pytest.raises(DataError, match=rf"run/{name} can't be written: No space left on device; free some space"):
        Run.start(config("rounds=1"), folder).run([ReportWriter()])
    hidden.unlink(missing_ok=True)
    if name == "config.toml":  # nothing was started
        Run.start(config("rounds=1"), folder).run()
    Run.resume(folder).run()
    assert (folder / "summary.json").stat().st_size > 0


def test_weights_that_can_not_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    in_the_way = tmp_path / f"run/.w0.safetensors.{os.getpid()}"
    in_the_way.mkdir(parents=True)
    with pytest.raises(DataError, match=r"run/w0\.safetensors can't be written: "):
        Run.start(config("rounds=1"), tmp_path / "run")
    in_the_way.rmdir()
    Run.resume(tmp_path / "run").run()
    assert (tmp_path / "run/w0.safetensors").exists()
