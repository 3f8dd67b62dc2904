"""`cyber0 study` on the command line, with workers that train nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import quick_worker
from studies import GRID, call, rows_of

from cyber0 import __version__
from cyber0.runs import environment


@pytest.mark.slow
def test_the_command_runs_a_file_and_shows_the_worst_cases(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(GRID)
    assert call(monkeypatch, "mine.toml", "--dry-run") == 0
    assert "12 runs" in capfd.readouterr().out and not Path("runs").exists()
    assert call(monkeypatch, "mine.toml", "--workers", "2") == 0
    out, err = capfd.readouterr()
    assert (
        "12/12  " in out
        and "12 runs in " in out
        and "Each rule by its worst attack" in out
        and "\x1b" not in out
        and err == ""
    )
    folder = Path("runs/study-mine")
    assert {p.name for p in folder.iterdir()} >= {
        "study.toml",
        "results.csv",
        "summary.csv",
        "summary.md",
        "plots",
        "runs",
    }
    assert (folder / "study.toml").read_text() == GRID
    assert call(monkeypatch, "mine.toml", "--quiet") == 0
    assert capfd.readouterr() == ("", "") and len(quick.read_text().splitlines()) == 12


@pytest.mark.slow
def test_the_command_prints_runs_and_worst_cases_as_json(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(GRID)
    assert call(monkeypatch, "mine.toml", "--dry-run", "--json") == 0
    assert len(json.loads(capfd.readouterr().out)["runs"]) == 12
    assert call(monkeypatch, "mine.toml", "--workers", "2", "--json") == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert len(found["runs"]) == 12 and found["folder"] == "runs/study-mine" and "12/12" in err
    assert {case["rule"] for case in found["worst_cases"]} == {"mean", "krum"}
    assert found["worst_cases"][0]["worst"]["attack"] in ("alie", "ipm")


@pytest.mark.slow
def test_the_command_names_what_failed_and_ends_with_1(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(f"[study.grid]\nmethod.lr = [0.01, {quick_worker.FAILS}]\n")
    assert call(monkeypatch, "mine.toml", "--workers", "1") == 1
    err = capfd.readouterr().err
    assert "failed: 0.5, seed 0: no such luck" in err and "1 of 2 runs failed" in err
    assert "run them again with: cyber0 study mine.toml --workers 1" in err


def test_a_folder_that_holds_something_else_is_refused(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(GRID)
    assert call(monkeypatch, "mine.toml", "--out", ".") == 2
    assert "holds no study" in capfd.readouterr().err
    assert call(monkeypatch, "mine.toml", "--out", "mine.toml") == 2


@pytest.mark.slow
def test_an_interrupted_command_says_how_to_resume(quick: Path) -> None:
    Path("mine.toml").write_text(f"[study.grid]\nmethod.lr = [0.01, {quick_worker.HANGS}]\n")
    code = (
        "import sys; from cyber0.study import worker_pool; "
        f"worker_pool.WORKER = (sys.executable, {quick_worker.__file__!r}); "
        "from cyber0.cli.main import main; sys.argv = ['cyber0', 'study', 'mine.toml']; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while len(quick.read_text().splitlines()) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted after 1 of 2 runs; resume with: cyber0 study mine.toml" in err


@pytest.mark.slow
def test_runs_of_other_code_are_named_and_run_again_only_if_asked(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.toml").write_text(GRID)
    monkeypatch.setenv("SOURCE", "old")
    assert call(monkeypatch, "s.toml", "--out", "out") == 0
    monkeypatch.delenv("SOURCE")
    first = {path.name for path in Path("out/runs").iterdir()}
    capsys.readouterr()
    assert call(monkeypatch, "s.toml", "--out", "out") == 0
    said = capsys.readouterr().out
    assert f"12 of the finished runs were made by another version than this one, {environment.code()}" in said
    assert f"(12 by {__version__}+old); they are reused; --rerun runs them again" in said
    assert {row["code"] for row in rows_of(Path("out/results.csv"))} == {f"{__version__}+old"}
    assert len(quick.read_text().splitlines()) == 12
    assert call(monkeypatch, "s.toml", "--out", "out", "--rerun") == 0
    assert "they are run again, and the old ones moved to out/earlier" in capsys.readouterr().out
    assert len(quick.read_text().splitlines()) == 24
    assert (
        {path.name for path in Path("out/earlier").iterdir()} == first == {p.name for p in Path("out/runs").iterdir()}
    )
    assert {row["code"] for row in rows_of(Path("out/results.csv"))} == {environment.code()}
    assert call(monkeypatch, "s.toml", "--out", "out", "--rerun") == 0
    assert "another version" not in capsys.readouterr().out and len(quick.read_text().splitlines()) == 24
