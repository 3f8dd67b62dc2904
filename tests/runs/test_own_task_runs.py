"""A task of one's own by its path: in runs, studies and deployments, and whose code is imported when."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from own_tasks import Pictures
from processes import many_processes

import cyber0 as library
from cyber0.cli import main as cli
from cyber0.config import doors
from cyber0.config.schema import agreed, load
from cyber0.diagnose.federation import diagnose
from cyber0.errors import ConfigError, Cyber0Error, LedgerError
from cyber0.ledger import Ledger
from cyber0.report import page
from cyber0.report.folder import read
from cyber0.runs.inference import evaluate
from cyber0.runs.run import Row as MetricsRow
from cyber0.runs.run import Run, best_round, rebuild
from cyber0.serve import server
from cyber0.study.cells import FIGURES, Cell, Measure, Result, measure_of
from cyber0.study.engine import Study
from cyber0.study.grid import read_plan
from cyber0.study.judge import Layout, judge, scores
from cyber0.study.report import write_report

HERE = Path(__file__).parents[1]
SETTINGS = "rounds = 8\nevaluate_every = 4\n[federation]\nclients = 8\nbyzantine = 2\n[method]\nk = 8\nbatch_size = 8\n"
WRONG = """
import cyber0, torch
from torch import nn

class Shapes(cyber0.Task):
    def model(self): return nn.Linear(4, 2)
    def train_data(self): return torch.zeros(40, 3), torch.arange(40) % 2

class Nobody(Shapes):
    def train_data(self): return torch.zeros(0, 4), torch.zeros(0).long()

class Unequal(Shapes):
    def train_data(self): return torch.zeros(40, 4), torch.arange(39) % 2

class Mean(Shapes):
    def train_data(self): return torch.zeros(40, 4), torch.arange(40) % 2
    def losses(self, outputs, targets): return nn.functional.cross_entropy(outputs, targets)

class Data(Shapes):
    def train_data(self): return {}["price"]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: a task, and a config beside it that names it."""
    shutil.copy(HERE / "own_tasks.py", tmp_path / "my_task.py")
    write_config(tmp_path, "my_task.py:Pictures", "options = {width = 3}")
    return tmp_path


def write_config(home: Path, name: str, more: str = "") -> Path:
    path = home / "config.toml"
    path.write_text(f'{SETTINGS}[task]\nname = "{name}"\n{more}\n')
    return path


def cyber0(*arguments: object, cwd: Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "cyber0", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_config_names_a_file_relative_to_itself_and_a_runs_folder_does_too(home: Path) -> None:
    run = Run.start(load(home / "config.toml"), home / "runs" / "one", pictures=False)
    run.run()
    kept = (home / "runs" / "one" / "config.toml").read_text()
    assert 'name = "../../my_task.py:Pictures"' in kept and str(home) not in kept
    assert load(home / "runs" / "one" / "config.toml") == load(home / "config.toml")
    assert run.simulation.ledger.header.config["task"]["name"] == "my_task.py:Pictures"  # type: ignore[attr-defined]
    digest = doors.sha256(f"{home / 'my_task.py'}:Pictures")
    kept = json.loads((home / "runs" / "one" / "sources.json").read_text())
    assert kept == {"task.name": {"path": "../../my_task.py:Pictures", "sha256": digest}}
    assert summary_of(home / "runs" / "one")["task"] == "my_task.py:Pictures"


def test_the_command_line_takes_a_path_relative_to_where_it_is_run(home: Path) -> None:
    printed = cyber0("run", "my_task.py:Line", "--set", "rounds=2", "--out", "out", cwd=home)
    assert "my_task.py:Line, 12 clients" in printed and "train loss" in printed and "accuracy" not in printed
    assert (home / "out" / "plots" / "loss.png").exists()
    shown = read(home / "out")
    assert shown.notes == [] and shown.evaluated_on == "train"
    assert {"error", "rows"} == set(shown.evaluations[-1].metrics)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:Spam"], "there is no file"),
        (["no_such_module:Spam"], "there is no module no_such_module"),
        (["my_task.py:Picture"], "has no 'Picture'; did you mean 'Pictures'?"),
        (["my_task.py:neither"], "task.name = 'my_task.py:neither' is a str, not a class derived from cyber0.Task"),
        (["my_task.py:blobs"], "is a function, not a class derived from cyber0.Task"),
        (["broken.py:Spam"], "broken.py can't be imported: ZeroDivisionError: division by zero (broken.py, line 2)"),
        (["typo.py:Spam"], "typo.py can't be imported: SyntaxError"),
        (["my_task.py:Pictures", "--set", "task.options.widht=3"], "takes no such option; did you mean 'width'?"),
        (["needs.py:Spam"], "task.options.size is missing: Spam takes size"),
        (["my_task.py:Pictures", "--set", "task.options.width=-1"], "Pictures: model() failed: RuntimeError"),
        (["my_task.py"], "my_task.py is a Python file; name the task in it: cyber0 run my_task.py:NAME"),
        (["--set", "task.name=my_task.py"], "file.py:name or package.module:name"),
        (["--set", "task.options.width=3"], "task.name = 'mnist' takes none"),
        (["my_task.py:Pictures", "--set", "task.data=x"], "set task.options.data"),
        (["wrong.py:Shapes"], "wrong.py:Shapes: the model failed: RuntimeError: mat1 and mat2 shapes cannot be"),
        (["wrong.py:Nobody"], "wrong.py:Nobody: train_data() holds no samples"),
        (["wrong.py:Unequal"], "wrong.py:Unequal: train_data(): there are 40 inputs and 39 targets"),
        (["wrong.py:Mean"], "wrong.py:Mean: losses() returned 1 number for 2 samples; return one number per sample"),
        (["wrong.py:Data"], "wrong.py:Data: train_data() failed: KeyError: 'price' (wrong.py, line"),
        (["wrong.py:Data", "--set", "federation.partition=dirichlet"], "train_data() failed"),
        (["my_task.py:Line", "--set", "federation.partition=dirichlet"], "deals samples by their classes"),
        (["my_task.py:Codes", "--set", "federation.attack=label_flip"], "0 classes"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_refused_in_one_line_and_nothing_is_written(
    arguments: list[str], message: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "broken.py").write_text("import cyber0\n1 / 0\n")
    (home / "typo.py").write_text("class Spam(:\n")
    (home / "needs.py").write_text(
        "import cyber0\nclass Spam(cyber0.Task):\n    def __init__(self, size): self.size = size\n"
    )
    (home / "wrong.py").write_text(WRONG)
    before = sorted(path.name for path in home.iterdir())
    monkeypatch.chdir(home)
    with pytest.raises(Cyber0Error) as refused:
        cli.app(["run", *arguments], standalone_mode=False)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    shutil.rmtree(home / "__pycache__", ignore_errors=True)
    assert sorted(path.name for path in home.iterdir()) == before


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


def test_a_federator_refuses_a_task_that_can_not_be_made_before_anything_is_written(home: Path) -> None:
    config = write_config(home, "my_task.py:Pictures", "options = {widht = 3}")
    with pytest.raises(ConfigError, match=r"^the header can't be made: task.options.widht = 3: .*mean 'width'"):
        server.prepare(config, home / "out", [], resume=False)
    assert not (home / "out").exists()


@pytest.mark.parametrize("task", ["Pictures", "Line", "Codes"])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(task: str, home: Path) -> None:
    write_config(home, f"my_task.py:{task}")
    Run.start(load(home / "config.toml"), home / "whole", pictures=False).run()
    cut = Run.start(load(home / "config.toml"), home / "cut", pictures=False)
    for _ in range(3):
        cut.simulation.run_round()
    cut.simulation.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.resume(home / "cut", pictures=False).run()
    whole, again = summary_of(home / "whole"), summary_of(home / "cut")
    assert whole["model_digest"] == again["model_digest"] == rebuild(home / "cut")[1].digest()
    assert whole["metrics"] == again["metrics"] and whole["best_round"] == again["best_round"]
    assert ("accuracy" in whole["metrics"]) == (task == "Pictures")
    shown = (page.write([home / "cut"], home / "report.html") or home / "report.html").read_text()
    assert f"my_task.py:{task} learned by 8 clients, 2 of them Byzantine" in shown


KILLED = """
import os, signal, sys
from pathlib import Path
from cyber0.config.schema import load
from cyber0.runs.run import Run

class Stop:
    def on_round(self, record):
        if record.round == 4: os.kill(os.getpid(), signal.SIGKILL)

Run.start(load("config.toml"), Path("killed")).run([Stop()])
"""


def test_a_run_of_ones_own_network_is_killed_resumed_verified_replayed_reported_and_studied(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the commands that a user would give; test_four_processes_join_... serves it."""
    monkeypatch.chdir(home)

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cyber0", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capfd.readouterr()
        assert not stop.value.code, err
        return out

    done = subprocess.run([sys.executable, "-c", KILLED], check=False, cwd=home)
    assert done.returncode == -signal.SIGKILL and not (home / "killed" / "summary.json").exists()
    assert len(Ledger.open(home / "killed" / "ledger.bin")) == 5
    shutil.copytree(home / "killed", home / "runs" / "elsewhere")
    (home / "runs" / "my_task.py").write_bytes((home / "my_task.py").read_bytes())  # as the folder names it
    said("run", "config.toml", "--out", "whole", "--quiet")
    said("run", "--resume", "killed", "--quiet")
    said("run", "--resume", "runs/elsewhere", "--quiet")
    digest = summary_of(home / "whole")["model_digest"]
    assert summary_of(home / "killed")["model_digest"] == summary_of(home / "runs/elsewhere")["model_digest"] == digest
    (home / "my_task.py").rename(home / "kept.py")  # who verifies, replays or reports imports nothing
    assert "8 records verify" in (text := said("verify", "killed")) and "all is well" in text and digest in text
    assert digest in said("replay", "killed", "--out", "model.safetensors")
    assert said("report", "killed", "whole", "--out", "both.html") and (home / "both.html").stat().st_size > 10_000
    (home / "kept.py").rename(home / "my_task.py")
    (home / "study.toml").write_text(
        (home / "config.toml").read_text() + '[study]\nseeds = 2\n[study.grid]\naggregation.rule = ["trimmed_mean"]\n'
    )
    assert "2 runs" in said("study", "study.toml", "--out", "study", "--workers", "1")
    with (home / "study" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done", "done"]
    assert summary_of(home / "study" / rows[0]["folder"])["model_digest"] == digest  # its first seed is the run's


def test_a_changed_file_is_said_and_another_model_refused(home: Path) -> None:
    cut = Run.start(load(home / "config.toml"), home / "out", pictures=False)
    cut.simulation.close()
    file = home / "my_task.py"
    file.write_text(file.read_text() + "# changed\n")
    with pytest.warns(RuntimeWarning, match=r"^my_task\.py \(task\.name\) has changed since the run began"):
        Run.resume(home / "out", pictures=False).simulation.close()
    file.write_text(file.read_text().replace("nn.Linear(16 * self.width, CLASSES)", "nn.Linear(16 * self.width, 5)"))
    with (
        pytest.warns(RuntimeWarning, match="has changed"),
        pytest.raises(LedgerError, match="it differs in the names, shapes or types"),
    ):
        Run.resume(home / "out", pictures=False)


def test_a_folder_of_an_earlier_version_keeps_the_digest_of_its_task_in_a_file_of_its_own(home: Path) -> None:
    cut = Run.start(load(home / "config.toml"), home / "out", pictures=False)
    cut.simulation.close()
    digest = json.loads((home / "out" / "sources.json").read_text())["task.name"]["sha256"]
    (home / "out" / "sources.json").unlink()
    (home / "out" / "task.sha256").write_text(f"{digest}  ../my_task.py\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.resume(home / "out", pictures=False).simulation.close()
    (home / "my_task.py").write_text((home / "my_task.py").read_text() + "# changed\n")
    with pytest.warns(RuntimeWarning, match=rf"my_task\.py \(task\.name\) has changed .*SHA-256 {digest[:16]} then"):
        Run.resume(home / "out", pictures=False).simulation.close()


def test_the_file_of_a_module_in_a_package_is_found_without_importing_the_package(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = home / "some_package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "__init__.py").touch()
    shutil.copy(HERE / "own_tasks.py", package / "tasks.py")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    assert doors.sha256("some_package.inner.tasks:Pictures") == doors.sha256("my_task.py:Pictures") is not None
    assert doors.sha256("some_package.inner.nothing:Pictures") is None
    assert doors.sha256("some_package.inner.tasks.more:Pictures") is None
    with pytest.raises(ConfigError, match=r"task.name = .* some_package.inner.tasks can't be imported: SystemExit"):
        doors.load("some_package.inner.tasks:Pictures", "task.name")


def test_verifying_replaying_and_reporting_import_no_task(home: Path) -> None:
    run = Run.start(load(home / "config.toml"), home / "out", pictures=False)
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


def test_a_run_is_diagnosed_with_a_copy_of_its_task_that_has_another_name(home: Path) -> None:
    config = write_config(home, "my_task.py:Line")
    cyber0("run", config, "--out", home / "out", "--set", "rounds=2", "--quiet", cwd=home)
    (home / "mine.py").write_text((home / "my_task.py").read_text())
    cyber0("diagnose", home / "out", "--task", f"{home / 'mine.py'}:Line", "--round", 0, "--rounds", 1, cwd=home)


def test_a_task_of_ones_own_is_diagnosed(home: Path) -> None:
    found = diagnose(write_config(home, "my_task.py:Line"), trials=2)
    assert found["guessing"] is None and found["dimension"] == 4


def test_metrics_reach_the_files_and_the_best_round_follows_the_tasks_word(home: Path) -> None:
    run = Run.start(load(write_config(home, "my_task.py:Line"), ["method.lr=0.05"]), home / "out", pictures=False)
    run.run()
    with (home / "out" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-2:] == ["error", "rows"] and {row["accuracy"] for row in rows} == {""}
    summary = summary_of(home / "out")
    assert summary["final_accuracy"] is None and summary["metrics"]["error"] == float(rows[-1]["error"])
    assert summary["best_round"] == min((float(row["error"]), int(row["round"])) for row in rows)[1]
    text = (page.write([home / "out"], home / "report.html") or home / "report.html").read_text()
    assert '"error"' in text and "has a train loss of" in text


def test_the_best_round_is_the_first_of_the_lowest_loss_or_the_highest_metric() -> None:
    rows = [MetricsRow(r, a, loss, 0, 0, r, 0.0, None, {"f1": f}) for r, a, loss, f in
            [(0, 0.1, 2.0, 0.5), (4, 0.7, 1.0, 0.2), (8, 0.9, 1.0, 0.4), (12, 0.2, float("nan"), 0.3)]]  # fmt: skip
    assert [best_round(rows, name) for name in ("", "accuracy", "f1", "-f1", "none")] == [4, 8, 0, 4, None]


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
        digest, *others = {process.output().strip().rpartition(" ")[2] for process in clients}
        assert follower.output().strip() == f"8 rounds, digest {digest}" and not others
        assert {process.events("joining")[0]["samples"] for process in clients} == {40}
        assert server.kill(signal.SIGTERM) == 0
    shown = read(home / "out")
    assert [e.round for e in shown.evaluations] == [4, 8]
    watched = list(csv.DictReader((home / "f" / "metrics.csv").read_text().splitlines()))
    for found, row in zip(shown.evaluations, watched, strict=True):
        assert found.metrics == {"spread": float(row["spread"])} and found.accuracy == float(row["accuracy"])
    assert json.loads((home / "out" / "summary.json").read_text())["metrics"] == shown.evaluations[-1].metrics
    assert rebuild(home / "out", task=f"{home / 'my_task.py'}:Pictures")[1].digest() == digest


def test_what_a_header_holds_names_no_folder_of_this_machine(home: Path) -> None:
    config = load(home / "config.toml")
    assert str(home) in config.task.name
    assert str(home) not in json.dumps(agreed(config))


class Sized(Pictures):
    """A task whose samples follow from its constructor's arguments."""

    def __init__(self, samples: int = 160, shape: object = None, scale: float = 1.0) -> None:
        super().__init__(samples=samples)
        self.shape, self.scale = shape, scale


class Stop:
    """A callback that ends a run early."""

    def on_round(self, record: Any) -> None:
        if record.round == 1:
            raise KeyboardInterrupt


def started(folder: Path, task: library.Task) -> str:
    """Begin a run with a task given in Python, and return its model's digest as if it had not been interrupted."""
    config = {"rounds": 4, "method": {"k": 4}}
    with pytest.raises(KeyboardInterrupt):
        library.run(config, task=task, out=folder, callbacks=[Stop()])
    digest: str = library.run(config, task=task, out=folder.with_name("whole"))["model_digest"]
    return digest


def test_the_constructors_arguments_of_a_task_given_in_python_are_recorded(tmp_path: Path) -> None:
    digest = started(tmp_path / "out", Sized(100, scale=2))
    assert load(tmp_path / "out" / "config.toml").task.options == {"samples": 100, "scale": 2}
    assert library.run(out=tmp_path / "out", resume=True)["model_digest"] == digest


def changed() -> Sized:
    task = Sized()
    task.samples = 100
    return task


@pytest.mark.parametrize("make", [lambda: Sized(100, shape=(4, 4)), changed])
def test_a_task_whose_arguments_are_not_known_must_be_given_again(make: Any, tmp_path: Path) -> None:
    digest = started(tmp_path / "out", make())
    with pytest.raises(Cyber0Error, match="give it again by task="):
        library.run(out=tmp_path / "out", resume=True)
    with pytest.raises(Cyber0Error, match="give it again by task="):
        evaluate(tmp_path / "out")
    assert library.run(out=tmp_path / "out", task=make(), resume=True)["model_digest"] == digest


def test_a_run_is_not_resumed_with_a_task_made_with_other_arguments(tmp_path: Path) -> None:
    started(tmp_path / "out", Sized(100))
    with pytest.raises(LedgerError, match=r"differs in task\.options"):
        library.run(out=tmp_path / "out", task=Sized(120), resume=True)


def test_a_task_that_fails_in_the_middle_of_a_run_is_said_in_one_line_with_how_to_resume(home: Path) -> None:
    (home / "late.py").write_text(LATE)
    for name in ("Loss", "Forward"):
        said = cyber0("run", f"late.py:{name}", "--set", "rounds=9", "--set", "method.k=4", "--out", f"a {name}",
                      cwd=home, code=2)  # fmt: skip
        (line,) = said.splitlines()
        assert line.startswith(f"error: late.py:{name}: measuring losses in round ")
        assert "failed: ValueError: a bug (late.py, line " in line
        assert line.endswith(f"resume with: cyber0 run --resume 'a {name}'")


LATE = """
from my_task import Pictures
from torch import nn

class Loss(Pictures):
    calls = 0
    def losses(self, outputs, targets):
        Loss.calls += 1
        if Loss.calls > 7: raise ValueError("a bug")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

class Forward(Pictures):
    calls = 0
    def outputs(self, model, inputs):
        Forward.calls += 1
        if Forward.calls > 7: raise ValueError("a bug")
        return model(inputs)
"""


def test_a_task_file_elsewhere_imports_modules_of_its_folder_and_of_the_working_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as the installed command: Python adds no working directory itself
    (home / "tasks").mkdir()
    (home / "tasks" / "beside_it.py").write_text("width = 3\n")
    (home / "tasks" / "mine.py").write_text("import beside_it\nfrom my_task import Pictures\n")
    cyber0("run", "tasks/mine.py:Pictures", "--set", "rounds=0", "--out", "out", cwd=home)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("width=wide", "task.options.width = 'wide' has the wrong type: Pictures takes width: int = 4"),
        ("samples=2.5", "task.options.samples = 2.5 has the wrong type: Pictures takes samples: int = 160"),
        ("widht=3", "task.options.widht = 3: Pictures takes no such option; did you mean 'width'?"),
        ("self=3", "task.options.self = 3: Pictures takes no such option"),
    ],
)
def test_options_of_a_task_are_checked_by_name_and_type(setting: str, message: str, home: Path) -> None:
    said = cyber0("run", "my_task.py:Pictures", "--set", f"task.options.{setting}", "--out", "out", cwd=home, code=2)
    assert said.startswith(f"error: {message}") and not (home / "out").exists()
    said = cyber0("run", "my_task.py:Line", "--set", "task.options.any=3", "--out", "out", cwd=home, code=2)
    assert "task.options.any = 3: Line takes no such option; it takes none" in said


def test_a_task_given_in_python_must_be_given_again(tmp_path: Path) -> None:
    import torch

    task = library.Task.of(torch.nn.Linear(3, 2), (torch.eye(3).repeat(20, 1), torch.arange(60) % 2))
    config = load(None, ["rounds=2", "federation.attack=none"])
    run = Run.start(config, tmp_path / "out", task=task, pictures=False)
    run.simulation.close()
    with pytest.raises(Cyber0Error, match="give it again by task="):
        Run.resume(tmp_path / "out", pictures=False)
    assert Run.resume(tmp_path / "out", task=task, pictures=False).run()["task"] == "own"


def test_a_run_whose_task_file_was_moved_says_what_to_edit(home: Path) -> None:
    Run.start(load(home / "config.toml"), home / "out", pictures=False).simulation.close()
    (home / "moved").mkdir()
    shutil.move(home / "my_task.py", home / "moved" / "my_task.py")
    with pytest.raises(
        ConfigError, match=r"no file .*my_task\.py; .* If it was moved, edit task\.name in .*config\.toml"
    ):
        Run.resume(home / "out", pictures=False)
    kept = home / "out" / "config.toml"
    kept.write_text(kept.read_text().replace("../my_task.py", "../moved/my_task.py"))
    Run.resume(home / "out", pictures=False).simulation.close()


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("16 * self.width, CLASSES", "16 * self.width, CLASSES + 1", "the names, shapes or types of its weights"),
        ("nn.BatchNorm2d(self.width)", "nn.BatchNorm2d(self.width, eps=torch.rand(()).item())", "the values it starts"),
        ("running_mean.normal_()", "running_var.fill_(2.0)", "the values it starts from and frozen weights or buffers"),
    ],
)
@pytest.mark.filterwarnings("ignore:my_task")
def test_a_run_whose_model_has_changed_says_so(old: str, new: str, differs: str, home: Path) -> None:
    Run.start(load(home / "config.toml"), home / "out", pictures=False).simulation.close()
    source = (home / "my_task.py").read_text()
    assert old in source
    (home / "my_task.py").write_text(source.replace(old, new))
    with pytest.raises(LedgerError, match=f"the model is not the one that the run was started with: .* in {differs}"):
        Run.resume(home / "out", pictures=False)


def test_what_run_takes_can_be_diagnosed_and_served_too(home: Path) -> None:
    assert "d = 4" in cyber0("diagnose", "my_task.py:Line", "--rounds", 2, cwd=home)
    assert "d = 4" in cyber0("init", "my_task.py:Line", "--out", "header.bin", cwd=home)
    config, header = server._settings(Path("my_task.py:Line"), ["rounds=3"], [])
    assert config.task.name.endswith("my_task.py:Line") and config.rounds == 3 and header is None


def test_fewer_rounds_than_are_done_are_refused_with_a_command_that_works(home: Path) -> None:
    Run.start(load(home / "config.toml", ["rounds=3"]), home / "out", pictures=False).run()
    with pytest.raises(ConfigError, match=r"rounds = 2, and the run in .* has 3 already") as refused:
        Run.resume(home / "out", rounds=2, pictures=False)
    command = str(refused.value).split("`")[1].removeprefix("cyber0 ").replace("FILE", str(home / "then"))
    assert "after 2 rounds" in cyber0(*command.split(), cwd=home)


def test_a_task_without_classes_shows_how_many_samples_each_client_has_and_no_labels(home: Path) -> None:
    printed = cyber0("run", "my_task.py:Line", "--set", "rounds=2", "--out", "out", cwd=home)
    assert "samples of each label" not in printed and "samples" in printed
    with (home / "out" / "partition.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["client", "byzantine", "samples"] and {row["samples"] for row in rows} == {"8"}
    shown = read(home / "out")
    assert shown.labels == ["samples"] and [share.counts for share in shown.partition] == [[8]] * 12


def test_the_end_of_a_run_names_the_best_round_with_its_value_and_all_files(home: Path) -> None:
    printed = cyber0("run", "my_task.py:Line", "--set", "rounds=2", "--out", "out", cwd=home)
    best = summary_of(home / "out")["best_round"]
    with (home / "out" / "metrics.csv").open() as file:
        error = next(float(row["error"]) for row in csv.DictReader(file) if int(row["round"]) == best)
    assert f"{best} (error {error:.4f})" in printed and "sources.json" in printed
    again = cyber0("run", "--resume", "out", cwd=home)
    assert "all 2 rounds are done" in again and "resuming after" not in again


def test_a_study_of_a_task_without_accuracy_prints_a_rounded_loss(home: Path) -> None:
    config = write_config(home, "my_task.py:Line")
    file = home / "study.toml"
    text = config.read_text().replace("rounds = 8", "rounds = 2")
    file.write_text(f'{text}[study]\nseeds = 1\n[study.grid]\naggregation.rule = ["median"]\n')
    printed = cyber0("study", file, "--out", home / "study", "--workers", 1, cwd=home)
    assert re.search(r"1/1 .*  loss \d+\.\d{4}$", printed, re.MULTILINE)


def test_a_lengthened_run_says_so_when_it_is_verified(home: Path) -> None:
    Run.start(load(home / "config.toml", ["rounds=3"]), home / "out", pictures=False).run()
    Run.resume(home / "out", rounds=5, pictures=False).run()
    assert "ledger: lengthened from 3 to 5 rounds at round 3\n" in cyber0("verify", "out", cwd=home)


def test_what_can_be_verified_of_a_folder_without_starting_weights_is_verified(home: Path) -> None:
    settings = ["serve.keep_reports=true", "rounds=3"]
    Run.start(load(home / "config.toml", settings), home / "out", pictures=False).run()
    (home / "out" / "w0.safetensors").unlink()
    command = [sys.executable, "-m", "cyber0", "verify", "out", "--decisions"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 2 and "--task FILE.py:NAME" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ledger: 3 records verify") and lines[1].startswith("decisions: 3 rounds decided again")
    assert lines[2].startswith("chain ") and lines[3].startswith("model: not verified") and len(lines) == 4
    assert "all is well" in cyber0("verify", "out", "--decisions", "--task", "my_task.py:Pictures", cwd=home)


SCRIPT = """
import sys, torch
import cyber0

class Mine(cyber0.Task):
    def model(self): return torch.nn.Linear(3, 2)
    def train_data(self): return torch.eye(3).repeat(20, 1), torch.arange(60) % 2

if __name__ == "__main__":
    settings = {"rounds": 2, "federation": {"attack": "none"}, "method": {"k": 2}}
    cyber0.run(settings, task=Mine(), out="runs/s")
"""


def test_a_task_of_a_script_is_found_where_the_script_lies(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(SCRIPT.replace("torch.arange(60) % 2", "torch.zeros(60, dtype=int)"))
    done = subprocess.run(
        [sys.executable, "scripts/train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "runs/s/config.toml").task.name == f"{tmp_path.resolve()}/scripts/train.py:Mine"
    assert json.loads((tmp_path / "runs/s/sources.json").read_text())["task.name"]["sha256"]
    assert "loss" in cyber0("evaluate", tmp_path / "runs/s", cwd=tmp_path)


def test_a_task_that_was_changed_after_it_was_made_has_to_be_given_again(tmp_path: Path) -> None:
    from own_tasks import Changeable

    import cyber0 as library

    settings = {"rounds": 2, "federation": {"attack": "none"}, "method": {"k": 2}}
    for number, (task, recorded) in enumerate([(Changeable(), True), (Changeable(), False), (Changeable(), True)]):
        if not recorded:
            task.noise = 9.0
        task._cache = object()
        library.run(settings, task=task, out=tmp_path / str(number), export=False)
        name = load(tmp_path / str(number) / "config.toml").task.name
        assert (name == "own_tasks:Changeable") == recorded and (name == "own") != recorded
    with pytest.raises(Cyber0Error, match="give it again by task="):
        library.run(out=tmp_path / "1", resume=True)
    longer = library.run({**settings, "rounds": 3}, out=tmp_path / "0", resume=True, export=False)
    assert longer["rounds"] == 3  # the task that the run has on record needs not be said again
