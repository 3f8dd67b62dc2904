"""A task of one's own beyond runs: in studies, deployments, diagnoses, verify and replay."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from own_task_home import HERE, cyber0, summary_of, write_config
from processes import many_processes

from cyber0.cli import main as cli
from cyber0.config.files import load
from cyber0.config.paths import agreed
from cyber0.diagnose.federation import diagnose
from cyber0.errors import ConfigError
from cyber0.report import page
from cyber0.report.folder import read
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run
from cyber0.serve import server
from cyber0.study.cells import FIGURES, Cell, Measure, Result, measure_of
from cyber0.study.engine import Study
from cyber0.study.grid import read_plan
from cyber0.study.judge import Layout, judge, scores
from cyber0.study.report import write_report


@pytest.mark.parametrize(
    ("task", "line"),
    [("Pictures", '"my_task.py:Picturs"'), ("Pictures", '"nowhere.py:Pictures"'), ("Pictures", '"typo.py:Pictures"'),
     ("Pictures", '"no_such_module:Pictures"')],
)  # fmt: skip
def test_a_study_refuses_a_task_that_can_not_be_found_before_anything_is_written(
    task: str, line: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "typo.py").write_text("class Pictures(:\n")
    text = (home / "config.toml").read_text().replace(f'"my_task.py:{task}"', line)
    (home / "study.toml").write_text(f'{text}[study.grid]\naggregation.rule = ["median"]\n')
    monkeypatch.chdir(home)
    before = sorted(home.iterdir())
    with pytest.raises(ConfigError) as refused:
        cli.app(["study", "study.toml"], standalone_mode=False)
    words = {"Picturs": "has no 'Picturs'; did you mean 'Pictures'?", "nowhere": "there is no file",
             "typo": "can't be imported: SyntaxError", "no_such": "there is no module"}  # fmt: skip
    assert any(name in line and said in str(refused.value) for name, said in words.items()), refused.value
    assert sorted(home.iterdir()) == before


@pytest.mark.slow
def test_a_federator_refuses_a_task_that_can_not_be_made_before_anything_is_written(home: Path) -> None:
    config = write_config(home, "my_task.py:Pictures", "options = {widht = 3}")
    with pytest.raises(ConfigError, match=r"^cyber0 init can't create .*: task.options.widht = 3: .*mean 'width'"):
        server.prepare(config, home / "out", [], resume=False)
    assert not (home / "out").exists()


def test_verifying_replaying_and_reporting_import_no_task(home: Path) -> None:
    run = Run.start(load(home / "config.toml"), home / "out")
    run.run()
    (home / "my_task.py").write_text("raise SystemExit('imported')\n")
    assert rebuild(home / "out")[1].digest() == summary_of(home / "out")["model_digest"]
    page.write([home / "out"], home / "report.html")
    (home / "out" / "w0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"a header never makes cyber0 import code; .* --task FILE.py:NAME"):
        rebuild(home / "out")
    shutil.copy(HERE / "own_tasks.py", home / "mine.py")
    mine = rebuild(home / "out", task=f"{home / 'mine.py'}:Pictures")[1]
    assert mine.digest() == summary_of(home / "out")["model_digest"]


@pytest.mark.slow
def test_a_run_is_diagnosed_with_a_copy_of_its_task_that_has_another_name(home: Path) -> None:
    config = write_config(home, "my_task.py:Line")
    cyber0("run", config, "--out", home / "out", "--set", "rounds=2", "--quiet", cwd=home)
    (home / "mine.py").write_text((home / "my_task.py").read_text())
    cyber0("diagnose", home / "out", "--task", f"{home / 'mine.py'}:Line", "--round", 0, "--rounds", 1, cwd=home)


def test_a_task_of_ones_own_is_diagnosed(home: Path) -> None:
    found = diagnose(write_config(home, "my_task.py:Line"), trials=2)
    assert found["guessing"] is None and found["dimension"] == 4


@pytest.mark.slow
def test_a_study_runs_a_task_of_ones_own_and_finds_it_again_by_its_content(home: Path) -> None:
    text = (home / "config.toml").read_text().replace("rounds = 8", "rounds = 4")
    file = home / "study.toml"
    file.write_text(f'{text}[study]\nseeds = 2\n[study.grid]\naggregation.rule = ["median"]\n')
    plan = read_plan(file)
    results = Study(plan.cells, home / "study", workers=1).run()
    assert [r.status for r in results] == ["done", "done"] and all(r.accuracy is not None for r in results)
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    shutil.move(home / "my_task.py", elsewhere / "my_task.py")
    shutil.move(file, elsewhere / "study.toml")
    moved = read_plan(elsewhere / "study.toml")
    assert Study(moved.cells, home / "study").finished() == 2
    (elsewhere / "my_task.py").write_text((elsewhere / "my_task.py").read_text() + "# changed\n")
    assert Study(read_plan(elsewhere / "study.toml").cells, home / "study").finished() == 0


@pytest.mark.slow
def test_a_study_of_a_task_without_accuracy_has_its_metrics(home: Path) -> None:
    config = load(write_config(home, "my_task.py:Line"), ["rounds=2"])
    (result,) = Study([Cell({"rule": "median"}, config)], home / "study", workers=1).run()
    assert result.status == "done" and result.accuracy is None
    assert measure_of([result]) == Measure("error", higher=False)
    with (home / "study" / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (
        row["final_accuracy"] == ""
        and float(row["final_error"]) == summary_of(home / "study" / row["folder"])["metrics"]["error"]
    )


class Scored(NamedTuple):
    """A finished run of a study: its attack, and what its summary says."""

    attack: str
    rule: str
    figures: dict[str, Any]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("best", "column", "ranks", "worst"),
    [
        ("", "loss", ["median", "mean"], {"median": "ipm", "mean": "alie"}),
        ("-error", "error", ["mean", "median"], {"median": "ipm", "mean": "ipm"}),
        ("f1", "f1", ["median", "mean"], {"median": "alie", "mean": "alie"}),
    ],
)
def test_a_study_ranks_by_what_the_task_calls_best_and_by_the_loss_where_there_is_no_accuracy(
    best: str, column: str, ranks: list[str], worst: dict[str, str], home: Path
) -> None:
    runs = [Scored("ipm", "median", {"loss": 2.0, "error": 9.0, "f1": 0.8}),
            Scored("alie", "median", {"loss": 1.0, "error": 1.0, "f1": 0.7}),
            Scored("ipm", "mean", {"loss": 1.0, "error": 8.0, "f1": 0.6}),
            Scored("alie", "mean", {"loss": "", "error": 7.0, "f1": 0.1})]  # fmt: skip
    results = [
        Result(
            Cell({"federation.attack": run.attack, "aggregation.rule": run.rule},
                 load(None, [f"federation.attack={run.attack}", f"aggregation.rule={run.rule}"])),
            "done", "", {**dict.fromkeys(FIGURES, ""), "best_metric": best,
                         **{f"final_{name}": value for name, value in run.figures.items()}},
        ) for run in runs
    ]  # fmt: skip
    layout = Layout(("aggregation.rule",), ("federation.attack",))
    verdicts = judge(scores(results, layout))
    assert [verdict.defence for verdict in verdicts] == ranks
    assert {v.defence: v.worst.attack for v in verdicts if v.worst} == worst
    write_report(results, layout, home / "report", "mine")
    with (home / "report" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["aggregation.rule"]: row["federation.attack"] for row in rows if row["worst_attack"] == "1"} == worst
    assert [row[f"mean_{column}"] for row in rows] == [str(run.figures[column] or "inf") for run in runs]
    text = (home / "report" / "summary.md").read_text()
    assert f"Final test {column}, mean" in text and f"| {column} | without attack |" in text
    assert f"| 1 | {ranks[0]} |" in text and "percent" not in text


MEASURES_MORE = """
from my_task import Pictures


class Watched(Pictures):
    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).float().mean(), "spread": outputs.std()}
"""


@pytest.mark.slow
def test_four_processes_join_a_run_of_ones_own_task_by_naming_it_themselves(home: Path) -> None:
    config = home / "config.toml"
    config.write_text(config.read_text().replace("clients = 8\nbyzantine = 2", "clients = 4\nbyzantine = 1"))
    for number in range(4):
        (home / f"site-{number}").mkdir()
        shutil.copy(home / "my_task.py", home / f"site-{number}" / "local.py")
    with many_processes(home) as start:
        server = start(
            "serve", "serve", config, "--listen", "127.0.0.1:0", "--insecure", "--out", home / "out", "--stay"
        )
        address = f"127.0.0.1:{server.await_event('listening')['port']}"
        refused = cyber0("join", address, "--insecure", "--client", 0, cwd=home, code=2)
        assert "my_task.py:Pictures, which is not built in" in refused and "--task FILE.py:NAME" in refused
        clients = [start(f"client-{i}", "join", address, "--insecure", "--client", i, "--task",
                         f"{home / f'site-{i}' / 'local.py'}:Pictures") for i in range(4)]  # fmt: skip
        (home / "watched.py").write_text(MEASURES_MORE)
        follower = start("follow", "follow", address, "--insecure", "--out", home / "f", "--evaluate-every", 4,
                         "--task", f"{home / 'watched.py'}:Watched")  # fmt: skip
        ended, *others = {process.output().strip().partition(": ")[2] for process in clients}
        assert follower.output().strip() == ended and ended.startswith("8 rounds, chain ") and not others
        assert {process.events("joining")[0]["samples"] for process in clients} == {40}
        assert server.kill(signal.SIGTERM) == 0
    shown = read(home / "out")
    assert [e.round for e in shown.evaluations] == [4, 8]
    watched = list(csv.DictReader((home / "f" / "metrics.csv").read_text().splitlines()))
    for found, row in zip(shown.evaluations, watched, strict=True):
        assert found.metrics == {"spread": float(row["spread"])} and found.accuracy == float(row["accuracy"])
    assert json.loads((home / "out" / "summary.json").read_text())["metrics"] == shown.evaluations[-1].figures()
    assert rebuild(home / "out", task=f"{home / 'my_task.py'}:Pictures")[1].digest() == ended.rpartition(" ")[2]


def test_what_a_header_holds_names_no_folder_of_this_machine(home: Path) -> None:
    config = load(home / "config.toml")
    assert str(home) in config.task.name
    assert str(home) not in json.dumps(agreed(config))


@pytest.mark.slow
def test_what_run_takes_can_be_diagnosed_and_served_too(home: Path) -> None:
    assert "d = 4" in cyber0("diagnose", "my_task.py:Line", "--rounds", 2, cwd=home)
    assert "d = 4" in cyber0("init", "my_task.py:Line", "--out", "header.bin", cwd=home)
    config, header = server._settings(Path("my_task.py:Line"), ["rounds=3"], [])
    assert config.task.name.endswith("my_task.py:Line") and config.rounds == 3 and header is None


@pytest.mark.slow
def test_a_study_of_a_task_without_accuracy_prints_a_rounded_loss(home: Path) -> None:
    config = write_config(home, "my_task.py:Line")
    file = home / "study.toml"
    text = config.read_text().replace("rounds = 8", "rounds = 2")
    file.write_text(f'{text}[study]\nseeds = 1\n[study.grid]\naggregation.rule = ["median"]\n')
    printed = cyber0("study", file, "--out", home / "study", "--workers", 1, cwd=home)
    assert re.search(r"1/1 .*  loss \d+\.\d{4}$", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_lengthened_run_says_so_when_it_is_verified(home: Path) -> None:
    Run.start(load(home / "config.toml", ["rounds=3"]), home / "out").run()
    Run.resume(home / "out", rounds=5).run()
    assert "ledger: lengthened from 3 to 5 rounds at round 3\n" in cyber0("verify", "out", cwd=home)


@pytest.mark.slow
def test_what_can_be_verified_of_a_folder_without_starting_weights_is_verified(home: Path) -> None:
    settings = ["serve.keep_reports=true", "rounds=3"]
    Run.start(load(home / "config.toml", settings), home / "out").run()
    (home / "out" / "w0.safetensors").unlink()
    command = [sys.executable, "-m", "cyber0", "verify", "out", "--decisions"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 2 and "--task FILE.py:NAME" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ledger: 3 records verify") and lines[1].startswith("decisions: 3 rounds decided again")
    assert lines[2].startswith("chain ") and lines[3].startswith("model: not verified") and len(lines) == 4
    assert "all is well" in cyber0("verify", "out", "--decisions", "--task", "my_task.py:Pictures", cwd=home)
