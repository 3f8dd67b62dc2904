"""A task of one's own by its path: run, refused, resumed, and whose code is imported when."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from own_task_home import HERE, cyber0, summary_of, write_config

from cyber0.cli import main as cli
from cyber0.config import doors
from cyber0.config.files import load
from cyber0.errors import ConfigError, Cyber0Error, LedgerError
from cyber0.ledger import Ledger
from cyber0.report import page
from cyber0.report.folder import read
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run

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


def test_a_config_names_a_file_relative_to_itself_and_a_runs_folder_does_too(home: Path) -> None:
    run = Run.start(load(home / "config.toml"), home / "runs" / "one")
    run.run()
    kept = (home / "runs" / "one" / "config.toml").read_text()
    assert 'name = "../../my_task.py:Pictures"' in kept and str(home) not in kept
    assert load(home / "runs" / "one" / "config.toml") == load(home / "config.toml")
    assert run.simulation.ledger.header.config["task"]["name"] == "my_task.py:Pictures"  # type: ignore[attr-defined]
    digest = doors.sha256(f"{home / 'my_task.py'}:Pictures")
    kept = json.loads((home / "runs" / "one" / "sources.json").read_text())
    assert kept == {"task.name": {"path": "../../my_task.py:Pictures", "sha256": digest}}
    assert summary_of(home / "runs" / "one")["task"] == "my_task.py:Pictures"


@pytest.mark.slow
def test_the_command_line_takes_a_path_relative_to_where_it_is_run(home: Path) -> None:
    printed = cyber0("run", "my_task.py:Line", "--set", "rounds=2", "--out", "out", cwd=home)
    assert "my_task.py:Line, 12 clients" in printed and "train loss" in printed and "accuracy" not in printed
    assert (home / "out" / "plots" / "loss.png").exists()
    shown = read(home / "out")
    assert shown.notes == [] and shown.evaluated_on == "train"
    assert {"error", "rows"} == set(shown.evaluations[-1].metrics)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Pictures", "Line", "Codes"])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(task: str, home: Path) -> None:
    write_config(home, f"my_task.py:{task}")
    Run.start(load(home / "config.toml"), home / "whole").run()
    cut = Run.start(load(home / "config.toml"), home / "cut")
    for _ in range(3):
        cut.simulation.run_round()
    cut.simulation.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.resume(home / "cut").run()
    whole, again = summary_of(home / "whole"), summary_of(home / "cut")
    assert whole["model_digest"] == again["model_digest"] == rebuild(home / "cut")[1].digest()
    assert whole["metrics"] == again["metrics"] and whole["best_round"] == again["best_round"]
    assert ("accuracy" in whole["metrics"]) == (task == "Pictures")
    shown = (page.write([home / "cut"], home / "report.html") or home / "report.html").read_text()
    assert f"my_task.py:{task} learned by 8 clients, 2 of them Byzantine" in shown


KILLED = """
import os, signal, sys
from pathlib import Path
from cyber0.config import load
from cyber0.runs.run import Run

class Stop:
    def on_round(self, record):
        if record.round == 4: os.kill(os.getpid(), signal.SIGKILL)

Run.start(load("config.toml"), Path("killed")).run([Stop()])
"""


@pytest.mark.slow
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
    cut = Run.start(load(home / "config.toml"), home / "out")
    cut.simulation.close()
    file = home / "my_task.py"
    file.write_text(file.read_text() + "# changed\n")
    with pytest.warns(RuntimeWarning, match=r"^my_task\.py \(task\.name\) has changed since the run began"):
        Run.resume(home / "out").simulation.close()
    file.write_text(file.read_text().replace("nn.Linear(16 * self.width, CLASSES)", "nn.Linear(16 * self.width, 5)"))
    with (
        pytest.warns(RuntimeWarning, match="has changed"),
        pytest.raises(LedgerError, match="it differs in the names, shapes or types"),
    ):
        Run.resume(home / "out")


def test_a_folder_of_an_earlier_version_keeps_the_digest_of_its_task_in_a_file_of_its_own(home: Path) -> None:
    cut = Run.start(load(home / "config.toml"), home / "out")
    cut.simulation.close()
    digest = json.loads((home / "out" / "sources.json").read_text())["task.name"]["sha256"]
    (home / "out" / "sources.json").unlink()
    (home / "out" / "task.sha256").write_text(f"{digest}  ../my_task.py\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.resume(home / "out").simulation.close()
    (home / "my_task.py").write_text((home / "my_task.py").read_text() + "# changed\n")
    with pytest.warns(RuntimeWarning, match=rf"my_task\.py \(task\.name\) has changed .*SHA-256 {digest[:16]} then"):
        Run.resume(home / "out").simulation.close()


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_task_file_elsewhere_imports_modules_of_its_folder_and_of_the_working_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as the installed command: Python adds no working directory itself
    (home / "tasks").mkdir()
    (home / "tasks" / "beside_it.py").write_text("width = 3\n")
    (home / "tasks" / "mine.py").write_text("import beside_it\nfrom my_task import Pictures\n")
    cyber0("run", "tasks/mine.py:Pictures", "--set", "rounds=0", "--out", "out", cwd=home)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("Pictures", "width=wide", "task.options.width = 'wide' has the wrong type: Pictures takes width: int = 4"),
        ("Pictures", "samples=2.5", "task.options.samples = 2.5 has the wrong type: Pictures takes samples: int = 160"),
        ("Pictures", "widht=3", "task.options.widht = 3: Pictures takes no such option; did you mean 'width'?"),
        ("Pictures", "self=3", "task.options.self = 3: Pictures takes no such option"),
        ("Line", "any=3", "task.options.any = 3: Line takes no such option; it takes none"),
    ],
)
def test_options_of_a_task_are_checked_by_name_and_type(name: str, setting: str, message: str, home: Path) -> None:
    said = cyber0("run", f"my_task.py:{name}", "--set", f"task.options.{setting}", "--out", "out", cwd=home, code=2)
    assert said.startswith(f"error: {message}") and not (home / "out").exists()


def test_a_run_whose_task_file_was_moved_says_what_to_edit(home: Path) -> None:
    Run.start(load(home / "config.toml"), home / "out").simulation.close()
    (home / "moved").mkdir()
    shutil.move(home / "my_task.py", home / "moved" / "my_task.py")
    with pytest.raises(
        ConfigError, match=r"no file .*my_task\.py; .* If it was moved, edit task\.name in .*config\.toml"
    ):
        Run.resume(home / "out")
    kept = home / "out" / "config.toml"
    kept.write_text(kept.read_text().replace("../my_task.py", "../moved/my_task.py"))
    Run.resume(home / "out").simulation.close()


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
    Run.start(load(home / "config.toml"), home / "out").simulation.close()
    source = (home / "my_task.py").read_text()
    assert old in source
    (home / "my_task.py").write_text(source.replace(old, new))
    with pytest.raises(LedgerError, match=f"the model is not the one that the run was started with: .* in {differs}"):
        Run.resume(home / "out")


@pytest.mark.slow
def test_fewer_rounds_than_are_done_are_refused_with_a_command_that_works(home: Path) -> None:
    Run.start(load(home / "config.toml", ["rounds=3"]), home / "out").run()
    with pytest.raises(ConfigError, match=r"rounds = 2, and the run in .* has 3 already") as refused:
        Run.resume(home / "out", rounds=2)
    command = str(refused.value).split("`")[1].removeprefix("cyber0 ").replace("FILE", str(home / "then"))
    assert "after 2 rounds" in cyber0(*command.split(), cwd=home)


@pytest.mark.slow
def test_a_task_without_classes_shows_how_many_samples_each_client_has_and_no_labels(home: Path) -> None:
    printed = cyber0("run", "my_task.py:Line", "--set", "rounds=2", "--out", "out", cwd=home)
    assert "samples of each label" not in printed and "samples" in printed
    with (home / "out" / "partition.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["client", "byzantine", "samples"] and {row["samples"] for row in rows} == {"8"}
    shown = read(home / "out")
    assert shown.labels == ["samples"] and [share.counts for share in shown.partition] == [[8]] * 12


@pytest.mark.slow
def test_the_end_of_a_run_names_the_best_round_with_its_value_and_all_files(home: Path) -> None:
    printed = cyber0("run", "my_task.py:Line", "--set", "rounds=2", "--out", "out", cwd=home)
    best = summary_of(home / "out")["best_round"]
    with (home / "out" / "metrics.csv").open() as file:
        error = next(float(row["error"]) for row in csv.DictReader(file) if int(row["round"]) == best)
    assert f"{best} (error {error:.4f})" in printed and "sources.json" in printed
    again = cyber0("run", "--resume", "out", cwd=home)
    assert "all 2 rounds are done" in again and "resuming after" not in again
