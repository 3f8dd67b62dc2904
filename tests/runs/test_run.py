"""A run's folder: its files are right, and a run may be killed at any moment."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from headers import make_header
from safetensors.torch import load_file, save_file
from synthetic import OTHER_BLOBS, OWN_BLOBS, After, one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.config.schedules import learning_rate
from cyber0.config.schema import load
from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Entry, Ledger, Record
from cyber0.model.tensors import save_tensors
from cyber0.report.writer import ReportWriter
from cyber0.runs import export as exports
from cyber0.runs import replay as replays
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run
from cyber0.storage import give_normal_modes, write_text

SETTINGS = ("rounds=23", "evaluate_every=5", "method.lr_schedule=cosine")
DUE = [0, 5, 10, 15, 20, 23]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    Run.start(config(*SETTINGS), folder).run([ReportWriter()])
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    return to


def summary_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def results_of(folder: Path) -> list[tuple[str, ...]]:
    """Return what must not depend on whether a run was interrupted: all but the seconds."""
    return [tuple(v for name, v in row.items() if name != "seconds") for row in rows_of(folder)]


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


def test_the_clients_file_gives_the_liars_away(finished: Path) -> None:
    with (finished / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["client"]) for row in rows] == list(range(12))
    assert sum(int(row["byzantine"]) for row in rows) == 3
    assert all(int(row["sent"]) == 23 * 8 for row in rows)
    assert sum(int(row["trimmed"]) for row in rows) == 23 * 8 * 6
    assert all(float(row["share"]) == int(row["trimmed"]) / int(row["sent"]) for row in rows)
    worst = max(rows, key=lambda row: float(row["share"]))
    assert worst["byzantine"] == "1"


def test_the_config_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    again = load(finished / "config.toml")
    assert again == config(*SETTINGS)
    summary = Run.start(again, tmp_path / "again").run()
    assert summary["model_digest"] == summary_of(finished)["model_digest"]
    assert results_of(tmp_path / "again") == results_of(finished)
    assert (tmp_path / "again/ledger.bin").read_bytes() == (finished / "ledger.bin").read_bytes()


def test_a_folder_that_holds_a_run_is_not_started_in(finished: Path) -> None:
    before = {p: p.read_bytes() for p in finished.iterdir() if p.is_file()}
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        Run.start(config(*SETTINGS), finished)
    assert {p: p.read_bytes() for p in finished.iterdir() if p.is_file()} == before


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ConfigError, match=r"the folder .* can't be made"):
            Run.start(config(), out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        Run.start(config("device=cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rounds", [0, 1])
def test_the_shortest_runs_have_a_whole_folder(rounds: int, tmp_path: Path) -> None:
    summary = Run.start(config(f"rounds={rounds}"), tmp_path / "run").run([ReportWriter()])
    assert summary["rounds"] == rounds
    assert [int(row["round"]) for row in rows_of(tmp_path / "run")] == [0, 1][: rounds + 1]
    assert (tmp_path / "run/plots/accuracy.png").exists()
    assert Run.resume(tmp_path / "run").run()["model_digest"] == summary["model_digest"]


# Interruptions.


class Killed(BaseException):
    pass


def test_a_run_cut_off_at_any_byte_of_any_file_ends_as_if_it_never_was(finished: Path, tmp_path: Path) -> None:
    ledger = Ledger.open(finished / "ledger.bin")
    opening = ledger._offsets[0]
    size, metrics = (finished / "ledger.bin").stat().st_size, (finished / "metrics.csv").read_bytes()
    dice = random.Random(1)
    cuts = [(opening, 0), (opening, len(metrics)), (opening + 1, 20), (size - 1, len(metrics)), (size, 0)]
    cuts += [(dice.randint(opening, size), dice.randint(0, len(metrics))) for _ in range(6)]
    for number, (length, kept) in enumerate(cuts):
        folder = copy_of(finished, tmp_path / str(number))
        (folder / "ledger.bin").write_bytes((finished / "ledger.bin").read_bytes()[:length])
        (folder / "metrics.csv").write_bytes(metrics[:kept])
        (folder / "summary.json").unlink()
        summary = Run.resume(folder).run()
        assert summary["model_digest"] == summary_of(finished)["model_digest"], (length, kept)
        assert (folder / "ledger.bin").read_bytes() == (finished / "ledger.bin").read_bytes()
        assert [r[0] for r in results_of(folder)] == [r[0] for r in results_of(finished)]
        # A row that was cut off within a number may not be taken for a whole one.
        assert results_of(folder) == results_of(finished), (length, kept)


@pytest.mark.parametrize("at", [0, 1, 5, 12, 22, 23])
def test_an_interrupted_run_goes_on_where_it_stopped(at: int, finished: Path, tmp_path: Path) -> None:
    run = Run.start(config(*SETTINGS), tmp_path / "run")

    with pytest.raises(Killed):
        run.run([After(at, Killed())])
    assert not (tmp_path / "run/summary.json").exists()
    rounds: list[Record] = []
    summary = Run.resume(tmp_path / "run").run([SimpleNamespace(on_round=rounds.append)])
    assert [record.round for record in rounds] == list(range(max(at, 1), 23))
    assert summary["model_digest"] == summary_of(finished)["model_digest"]
    assert results_of(tmp_path / "run") == results_of(finished)
    with (tmp_path / "run/clients.csv").open() as mine, (finished / "clients.csv").open() as theirs:
        assert mine.read() == theirs.read()


REJECTED = ("rounds=23", "evaluate_every=5", "federation.attack=nonfinite", "federation.participation=0.8",
            "federation.accept_risk=true", "aggregation.beta=0.3", "serve.quorum=8")  # fmt: skip


def test_rejected_reports_are_counted_alike_however_often_a_run_was_cut_off(tmp_path: Path) -> None:
    """Wherever the ledger and the metrics end: just before an evaluation, just after one, or both somewhere else."""
    whole = tmp_path / "whole"
    expected = Run.start(config(*REJECTED), whole).run()
    counted, ledger = expected["rejected_reports"], Ledger.open(whole / "ledger.bin")
    assert counted["not_finite"] == sum(9 - int(record.reported.sum()) for record in ledger) > 23
    assert 0 < expected["abandoned_rounds"] < 23  # whose rejected reports count as well
    lines = (whole / "metrics.csv").read_bytes().splitlines(keepends=True)
    for first, second, rows in ((0, 23, 1), (4, 6, 2), (5, 9, 2), (5, 9, 0), (22, 22, 6), (23, 23, 7)):
        folder = copy_of(whole, tmp_path / f"{first} {second} {rows}")
        (folder / "summary.json").unlink()
        for records in (first, second):
            (folder / "ledger.bin").write_bytes((whole / "ledger.bin").read_bytes()[: ledger._offsets[records]])
            (folder / "metrics.csv").write_bytes(b"".join(lines[:rows]))
            assert Run.resume(folder).run()["rejected_reports"] == counted, (first, second, rows)
        assert results_of(folder) == results_of(whole)


def test_rejected_reports_survive_a_real_kill(tmp_path: Path) -> None:
    whole = Run.start(config(*REJECTED), tmp_path / "whole").run()
    code = (
        "import os, signal, sys; from pathlib import Path; from test_runs import *\n"
        "class Stop:\n"
        "    def on_round(self, record):\n"
        "        if record.round == 12: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Run.start(config(*REJECTED), Path(sys.argv[1])).run([Stop()])"
    )
    here = Path(__file__).parent
    places = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": places}, check=False)
    assert done.returncode == -signal.SIGKILL and records_in(tmp_path / "run") == 13
    summary = Run.resume(tmp_path / "run").run()
    assert summary["rejected_reports"] == whole["rejected_reports"]
    assert summary["model_digest"] == whole["model_digest"]


@pytest.mark.parametrize("lost", ["metrics.csv", "w0.safetensors", "summary.json", "clients.csv", "partition.csv"])
def test_what_is_lost_beside_the_ledger_is_written_again(lost: str, finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    (folder / lost).unlink()
    Run.resume(folder).run()
    assert summary_of(folder)["model_digest"] == summary_of(finished)["model_digest"]
    assert results_of(folder) == results_of(finished)
    if lost in ("w0.safetensors", "partition.csv"):
        assert (folder / lost).read_bytes() == (finished / lost).read_bytes()


def test_resuming_a_finished_run_is_harmless(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    before = summary_of(folder)
    for _ in range(2):
        Run.resume(folder).run()
        assert summary_of(folder) == before
        assert rows_of(folder) == rows_of(finished)
        assert (folder / "ledger.bin").read_bytes() == (finished / "ledger.bin").read_bytes()


def test_a_last_row_that_was_changed_does_not_reach_the_summary(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    path = folder / "metrics.csv"
    *rest, last = path.read_text().splitlines()
    number, _, *others = last.split(",")
    path.write_text("\n".join([*rest, ",".join([number, "0.9999", *others])]) + "\n")
    Run.resume(folder).run()
    assert summary_of(folder) == summary_of(finished)
    assert results_of(folder) == results_of(finished)


@pytest.mark.parametrize("tail", [bytes(3), bytes(200_000), b"\xff\xfe", b'5,"0.9'])
def test_a_damaged_tail_of_the_metrics_is_measured_again(tail: bytes, finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    kept = b"".join((folder / "metrics.csv").read_bytes().splitlines(keepends=True)[:3])
    (folder / "metrics.csv").write_bytes(kept + tail)
    Run.resume(folder).run()
    assert results_of(folder) == results_of(finished)


def test_resuming_what_was_cut_off_before_the_ledger_starts_anew(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_bytes((finished / "config.toml").read_bytes())
    write_false_rows(finished, folder)  # of who knows which run
    assert Run.resume(folder).run()["model_digest"] == summary_of(finished)["model_digest"]
    assert results_of(folder) == results_of(finished)


def test_rows_that_are_ahead_of_the_ledger_are_measured_again(finished: Path, tmp_path: Path) -> None:
    """After a loss of power the metrics may have reached the disk before the ledger."""
    folder = copy_of(finished, tmp_path / "run")
    ledger = Ledger.open(finished / "ledger.bin")
    (folder / "ledger.bin").write_bytes((finished / "ledger.bin").read_bytes()[: ledger._offsets[9]])
    write_false_rows(finished, folder, after=9)
    Run.resume(folder).run()
    assert results_of(folder) == results_of(finished)


def write_false_rows(finished: Path, folder: Path, after: int = -1) -> None:
    """Write the metrics of the finished run with other accuracies after some round."""
    rows = rows_of(finished)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "accuracy": "0.125"} if int(row["round"]) > after else row for row in rows)


def test_resuming_where_there_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"holds no run to resume: it has no config\.toml"):
            Run.resume(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "changed", "named"),
    [("\nk = 8", "\nk = 9", r"method\.k \(now 9, on record 8\)\."),
     # These stand nowhere in the header but in its config.
     ("batch_size = 16", "batch_size = 17", r"method\.batch_size \(now 17, on record 16\)\."),
     ("evaluate_every = 5", "evaluate_every = 6", r"evaluate_every \(now 6, on record 5\)\."),
     ('partition = "iid"', 'partition = "shards"', r"federation\.partition \(now 'shards', on record 'iid'\)\.")],
)  # fmt: skip
def test_resuming_with_a_changed_config_is_refused(
    setting: str, changed: str, named: str, finished: Path, tmp_path: Path
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    text = (folder / "config.toml").read_text()
    assert setting in text
    (folder / "config.toml").write_text(text.replace(setting, changed))
    with pytest.raises(LedgerError, match=f"another run: it differs in {named} Settings can't change within a run"):
        Run.resume(folder)
    (folder / "config.toml").write_text(text)
    Run.resume(folder).run()  # and the ledger was let go


def test_a_run_that_is_going_on_can_not_be_resumed_by_another(tmp_path: Path) -> None:
    run = Run.start(config(*SETTINGS), tmp_path / "run")
    with pytest.raises(LedgerError, match="being written by another process"):
        Run.resume(tmp_path / "run")
    run.simulation.ledger.close()


# Rebuilding.


def test_the_ledger_rebuilds_the_model_of_every_round(finished: Path) -> None:
    simulation = Simulation(config(*SETTINGS))
    for t in range(24):
        if t:
            simulation.run_round()
        _, parameters = rebuild(finished, t)
        assert parameters.digest() == simulation.parameters.digest(), t
    assert rebuild(finished)[1].digest() == simulation.parameters.digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "attention", "frozen backbone"])
def test_models_of_all_kinds_are_rebuilt_from_their_folder(kind: str, dtype: str, tmp_path: Path) -> None:
    settings = ("rounds=4", f"task.options.kind={kind}", f"task.dtype={dtype}", "method.mu=0.05",
                "method.distribution=sphere", "method.lr=0.01")  # fmt: skip
    summary = Run.start(config(*settings, "method.projection_radius=3"), tmp_path / "run").run()
    ledger, parameters = rebuild(tmp_path / "run")
    assert parameters.digest() == summary["model_digest"] and len(ledger) == 4


@pytest.mark.parametrize("wrong", [-1, 24, 10**9])
def test_a_round_that_is_not_there_is_refused(wrong: int, finished: Path) -> None:
    with pytest.raises(LedgerError, match="use 0 to 23"):
        rebuild(finished, wrong)


def tamper_ledger(folder: Path) -> None:
    data = bytearray((folder / "ledger.bin").read_bytes())
    data[-200] ^= 1
    (folder / "ledger.bin").write_bytes(data)


def tamper_weights(folder: Path) -> None:
    weights = load_file(folder / "w0.safetensors")
    weights["weight"] = weights["weight"].clone()
    weights["weight"][0, 0] += 1e-6
    save_file(weights, folder / "w0.safetensors")


def rename_weights(folder: Path) -> None:
    weights = load_file(folder / "w0.safetensors")
    save_file({f"other.{name}": t for name, t in weights.items()}, folder / "w0.safetensors")


def reshape_weights(folder: Path) -> None:
    weights = load_file(folder / "w0.safetensors")
    save_file({**weights, "weight": weights["weight"].T.contiguous()}, folder / "w0.safetensors")


@pytest.mark.parametrize(
    ("tamper", "error", "message"),
    [(tamper_ledger, LedgerError, r"record 2\d of .*does not verify"), (tamper_weights, LedgerError, "starting point"),
     (rename_weights, LedgerError, "lack 'weight'"), (reshape_weights, LedgerError, "names, shapes or types"),
     (lambda f: (f / "w0.safetensors").write_bytes(b"junk"), DataError, "can't be read as safetensors"),
     (lambda f: (f / "ledger.bin").write_bytes(b"junk"), LedgerError, "not a ledger"),
     (lambda f: (f / "ledger.bin").unlink(), LedgerError, "holds no run")],
)  # fmt: skip
def test_a_folder_that_was_tampered_with_is_refused_and_says_where(
    tamper: Callable[[Path], Any], error: type[Exception], message: str, finished: Path, tmp_path: Path
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    tamper(folder)
    with pytest.raises(error, match=message):
        rebuild(folder)


@pytest.mark.parametrize(
    ("section", "key", "named"),
    [("task", "vision", r"unknown key 'task\.vision' \(= 'on'\)"), ("method", "momentum", r"unknown key 'method\.mom"),
     ("privacy", None, r"unknown key 'privacy'"), ("task", None, "task = 'on' must be a table")],
)  # fmt: skip
def test_a_setting_of_a_newer_version_in_the_header_is_named(
    section: str, key: str | None, named: str, finished: Path, tmp_path: Path
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    header = Ledger.open(finished / "ledger.bin").header
    changed = {**header.settings, section: {**header.settings.get(section, {}), key: "on"} if key else "on"}
    (folder / "ledger.bin").unlink()
    Ledger.create(folder / "ledger.bin", replace(header, settings=changed)).close()
    with pytest.raises(LedgerError, match=rf"{named}.*A newer version may have written it"):
        rebuild(folder)


def test_without_stored_weights_the_task_is_asked_for_them_and_only_the_right_ones_do(
    finished: Path, tmp_path: Path
) -> None:
    """As after a deployment, whose federator has no weights to store."""
    folder = copy_of(finished, tmp_path / "run")
    (folder / "w0.safetensors").unlink()
    assert rebuild(folder, task=OWN_BLOBS)[1].digest() == summary_of(finished)["model_digest"]
    with pytest.raises(DataError, match="starting weights"):
        rebuild(folder, task=OTHER_BLOBS)


# How files are written.


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


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


class Exported:
    """A language model, as far as exporting goes: it writes as safetensors does, with a mode of its own."""

    save_pretrained = True

    def __init__(self, weights: str) -> None:
        self.weights, self.model = weights, self

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(self.weights)
            (folder / name).chmod(0o600)
        if self.weights == "broken":
            raise DataError("no tokenizer")


@pytest.mark.parametrize("umask", [0o022], indirect=True)
def test_an_exported_model_replaces_another_in_whole_or_not_at_all(
    umask: int, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cyber0.tasks.text.task.export", lambda config, parameters, out, **_: parameters.model.write(out)
    )
    out = tmp_path / "tuned"
    exports.check_replaceable(out)
    assert exports.export(ledger, Exported("first"), out)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tuned is a folder that holds files already.*--force"):
        exports.check_replaceable(out)
    exports.check_replaceable(out, force=True)
    (out / "adapter_model.safetensors").write_text("of the first")
    with pytest.raises(DataError, match="no tokenizer"):
        exports.export(ledger, Exported("broken"), out)  # type: ignore[arg-type]
    assert {p.name: p.read_text() for p in out.iterdir()} == {
        "config.json": "first", "model.safetensors": "first", "adapter_model.safetensors": "of the first"}  # fmt: skip
    exports.export(ledger, Exported("second"), out)  # type: ignore[arg-type]
    assert {p.name: p.read_text() for p in out.iterdir()} == {"config.json": "second", "model.safetensors": "second"}
    assert {oct(p.stat().st_mode & 0o777) for p in out.iterdir()} == {"0o644"}
    assert [p.name for p in tmp_path.iterdir()] == ["tuned"]


def exported(out: Path, *more: str) -> Path:
    """Make a folder as an export leaves it, and files that it does not write."""
    for name in (
        "config.json",
        "model.safetensors",
        "base/config.json",
        "additional_chat_templates/tools.jinja",
        *more,
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    return out


@pytest.mark.parametrize("stranger", ["src/thesis.tex", "thesis.tex", "base/thesis.tex", "src/config.json",
                                      "a/b/model.safetensors", "my-model.safetensors"])  # fmt: skip
def test_force_replaces_no_folder_that_holds_anything_but_a_model(stranger: str, tmp_path: Path) -> None:
    exports.check_replaceable(exported(tmp_path / "tuned"), force=True)
    out = exported(tmp_path / "proj", stranger)
    with pytest.raises(ConfigError, match=rf"proj holds {stranger.partition('/')[0]}.*--force would delete; move it"):
        exports.check_replaceable(out, force=True)


def test_no_model_replaces_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for out in (Path(), Path("..")):
        with pytest.raises(ConfigError, match="is the current folder or holds it"):
            exports.check_replaceable(out, force=True)


@pytest.mark.parametrize("out", ["base", "models", "base/new.safetensors", "link", "models/../base"])
def test_no_replay_writes_over_the_model_that_the_run_began_with(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = exported(tmp_path / "models")
    (tmp_path / "base").symlink_to(exported(models / "base"))
    (tmp_path / "link").symlink_to(models / "base")
    (tmp_path / "run").mkdir()
    task = {"task": {"name": "sst2", "model": str(tmp_path / "base")}}
    header = replace(make_header(clients=12, k=3), settings=task)
    Ledger.create(tmp_path / "run" / "ledger.bin", header).close()
    with pytest.raises(ConfigError, match=r"the model that the run began with and is replayed from; name another"):
        exports.check_not_base(tmp_path / "run", Path(out))
    exports.check_not_base(tmp_path / "run", Path("tuned"))
    exports.check_not_base(tmp_path / "run", Path("base"), model="elsewhere")
    exports.check_not_base(tmp_path / "no_run", Path("base"))


@pytest.fixture
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Return the ledger of a run of a language model, which `Exported` stands for."""
    header = replace(make_header(clients=12, k=3), settings={"task": {"name": "sst2", "model": "somewhere"}})
    return Ledger.create(tmp_path_factory.mktemp("run") / "ledger.bin", header)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cyber0.tasks.text.task.export", lambda config, parameters, out, **_: parameters.model.write(out)
    )


@pytest.mark.usefixtures("writes")
def test_an_export_that_fails_leaves_a_new_place_empty(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        exports.export(ledger, Exported("broken"), tmp_path / "tuned")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("writes")
def test_an_export_replaces_a_file_and_leaves_nothing_behind(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("older")
    exports.check_replaceable(tmp_path / "tuned", force=True)
    assert exports.export(ledger, Exported("new"), tmp_path / "tuned")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["tuned"] and (tmp_path / "tuned" / "config.json").exists()


@pytest.mark.usefixtures("writes")
def test_an_export_through_a_link_replaces_what_it_points_to(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(exported(tmp_path / "tuned"))
    assert exports.export(ledger, Exported("new"), tmp_path / "link")  # type: ignore[arg-type]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "tuned" / "config.json").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "tuned"]


@pytest.mark.usefixtures("writes")
def test_an_export_that_can_not_be_moved_into_place_puts_the_older_one_back(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = exported(tmp_path / "tuned"), Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(DataError, match=r"tuned can't be written: Input/output error"):
        exports.export(ledger, Exported("new"), out)  # type: ignore[arg-type]
    assert (out / "config.json").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["tuned"]


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


# The real thing: MNIST, the real command, SIGKILL.

MNIST = ["--set", "rounds=40", "--set", "evaluate_every=4", "--set", "method.k=16"]
# All threads: a small model's results must not depend on them.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def command(*arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "cyber0.cli.main", *arguments]
    if not (Path(sys.executable).parent / "cyber0").exists():
        pytest.skip("cyber0 is not installed as a command")
    line[:3] = [str(Path(sys.executable).parent / "cyber0")]
    return subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def records_in(folder: Path) -> int:
    try:
        return len(Ledger.open(folder / "ledger.bin"))
    except LedgerError:
        return 0


def wait_and_kill(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not moment() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it had ended before it could be killed"


@pytest.mark.mnist
def test_after_kill_9_at_any_moment_resume_ends_with_the_same_model_and_metrics(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    finish(command("run", *MNIST, "--quiet", "--out", str(whole)))
    moments: list[Callable[[Path], bool]] = [
        lambda folder: (folder / "config.toml").exists(),
        lambda folder: records_in(folder) >= 1,
        lambda folder: records_in(folder) >= 21,
    ]
    for number, moment in enumerate(moments):
        folder = tmp_path / str(number)
        process = command("run", *MNIST, "--quiet", "--out", str(folder))
        wait_and_kill(process, lambda m=moment, f=folder: m(f))
        assert records_in(folder) < 40 and not (folder / "summary.json").exists()
        finish(command("run", "--resume", str(folder), "--quiet"))
        assert summary_of(folder)["model_digest"] == summary_of(whole)["model_digest"]
        assert results_of(folder) == results_of(whole)
        assert (folder / "ledger.bin").read_bytes() == (whole / "ledger.bin").read_bytes()


@pytest.mark.parametrize("force", [False, True])
def test_a_device_is_never_replaced_by_a_model(force: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        exports.check_replaceable(tmp_path / "pipe.safetensors", force=force)


# Lengthening.

CONSTANT = (*SETTINGS, "method.lr_schedule=constant")


@pytest.mark.parametrize("mode", ["shared", "chained"])
def test_a_lengthened_run_has_the_model_that_its_ledger_gives(mode: str, tmp_path: Path) -> None:
    """With chained keys even the first directions follow from the header, which says how many rounds were planned."""
    folder, mode = tmp_path / "run", f"serve.seed_mode={mode}"
    Run.start(config(*CONSTANT, "rounds=6", mode), folder).run()
    summary = Run.resume(folder, rounds=10).run()
    ledger, parameters = replays.rebuild(folder)
    assert len(ledger) == 10 and parameters.digest() == summary["model_digest"]
    assert Run.resume(folder).run()["model_digest"] == summary["model_digest"]


def test_a_finished_run_is_lengthened_to_the_bits_of_the_longer_one(tmp_path: Path) -> None:
    longer = Run.start(config(*CONSTANT, "rounds=31"), tmp_path / "longer").run()
    short = tmp_path / "short"
    Run.start(config(*CONSTANT, "rounds=12"), short).run()
    kept = (short / "ledger.bin").read_bytes()
    summary = Run.resume(short, rounds=31).run()
    assert summary["model_digest"] == longer["model_digest"] and summary["rounds"] == 31
    assert summary["final_loss"] == longer["final_loss"]
    ledger = Ledger.open(short / "ledger.bin")
    assert (short / "ledger.bin").read_bytes().startswith(kept)
    assert [record.rounds for record in ledger] == [12] * 12 + [31] * 19
    assert ledger.header.rounds == 12 and ledger.rounds == 31 and load(short / "config.toml").rounds == 31
    evaluated = [row["round"] for row in rows_of(short)]
    assert evaluated == ["0", "5", "10", "12", "15", "20", "25", "30", "31"]  # that of the first end stays
    assert Run.resume(short).run()["model_digest"] == longer["model_digest"]
    assert replays.rebuild(short)[1].digest() == longer["model_digest"]


def test_a_run_that_was_cut_off_while_it_was_lengthened_is_resumed_at_its_new_length(tmp_path: Path) -> None:
    whole = Run.start(config(*CONSTANT, "rounds=31"), tmp_path / "whole").run()
    folder = tmp_path / "run"
    Run.start(config(*CONSTANT, "rounds=12"), folder).run()
    with pytest.raises(KeyboardInterrupt):
        Run.resume(folder, rounds=31).run([After(20, KeyboardInterrupt())])
    assert not (folder / "summary.json").exists()  # the one of 12 rounds is not that of the run any more
    assert Run.resume(folder).run()["model_digest"] == whole["model_digest"]


@pytest.mark.parametrize("name", ["cyber0", "trimmed_mean"])
def test_rounds_that_are_done_are_not_undone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS, "rounds=12", f"method.name={name}", "method.lr=0.01"), folder).run()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"rounds = 7, and the run in .* has 12 already.*--round 7"):
        Run.resume(folder, rounds=7)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert Run.resume(folder, rounds=14).run()["rounds"] == 14


def test_a_schedule_goes_by_the_new_length_from_the_first_new_round_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS, "rounds=10", "method.lr_schedule=linear", "method.lr=0.1"), folder).run()
    Run.resume(folder, rounds=20).run()
    found = [record.lr for record in Ledger.open(folder / "ledger.bin")]
    expected = [learning_rate(0.1, "linear", 10)(t) for t in range(10)]
    assert found == expected + [learning_rate(0.1, "linear", 20)(t) for t in range(10, 20)]


@pytest.mark.parametrize(
    "names", [("",), ("a.",), ("a..b",), ("forward",), ("training",), ("__class__.x",), ("a", "a.b"), ("_weights", "1")]
)
def test_weights_of_any_name_are_rebuilt(names: tuple[str, ...], tmp_path: Path) -> None:
    weights = {name: torch.full((5,), float(i)) for i, name in enumerate(names)}
    digest = hashlib.sha256(torch.cat(list(weights.values())).numpy().tobytes()).hexdigest()
    layout = tuple(Entry(name, (5,), "float32", 5 * i) for i, name in enumerate(names))
    header = replace(make_header(), layout=layout, weights_digest=digest)
    Ledger.create(tmp_path / "ledger.bin", header).close()
    save_file(weights, tmp_path / "w0.safetensors")
    _, parameters = rebuild(tmp_path)
    assert parameters.layout == layout
    assert parameters.digest() == digest
    assert list(parameters.state()) == list(names)


@pytest.mark.parametrize("wrong", [torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.float64)])
def test_starting_weights_of_another_type_are_refused(wrong: torch.Tensor, tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.bin", replace(make_header(), layout=(Entry("w", (5,), "float32", 0),))).close()
    save_file({"w": wrong}, tmp_path / "w0.safetensors")
    with pytest.raises(LedgerError, match=f"shapes or types .*'w' is {wrong.dtype} of shape"):
        rebuild(tmp_path)
