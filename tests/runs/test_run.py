"""A run: started, cut off at any moment, resumed, lengthened."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from finished_runs import SETTINGS, copy_of, results_of, rows_of, summary_of
from synthetic import OTHER_BLOBS, OWN_BLOBS, After, one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.config.files import load
from cyber0.config.schedules import learning_rate
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger import Ledger, Record
from cyber0.report.writer import ReportWriter
from cyber0.runs import replay as replays
from cyber0.runs.run import Run


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


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [0, 1])
def test_the_shortest_runs_have_a_whole_folder(rounds: int, tmp_path: Path) -> None:
    summary = Run.start(config(f"rounds={rounds}"), tmp_path / "run").run([ReportWriter()])
    assert summary["rounds"] == rounds
    assert [int(row["round"]) for row in rows_of(tmp_path / "run")] == [0, 1][: rounds + 1]
    assert (tmp_path / "run/plots/accuracy.png").exists()
    assert Run.resume(tmp_path / "run").run()["model_digest"] == summary["model_digest"]


class Killed(BaseException):
    pass


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_rejected_reports_survive_a_real_kill(tmp_path: Path) -> None:
    whole = Run.start(config(*REJECTED), tmp_path / "whole").run()
    code = (
        "import os, signal, sys; from pathlib import Path; from test_run import *\n"
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
