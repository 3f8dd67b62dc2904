"""A task that is given in Python: what is recorded of it, and when it must be given again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_task_home import cyber0
from own_tasks import Pictures

import cyber0 as library
from cyber0.config.files import load
from cyber0.errors import Cyber0Error, LedgerError
from cyber0.runs.inference import evaluate
from cyber0.runs.run import Run


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


@pytest.mark.slow
def test_the_constructors_arguments_of_a_task_given_in_python_are_recorded(tmp_path: Path) -> None:
    digest = started(tmp_path / "out", Sized(100, scale=2))
    assert load(tmp_path / "out" / "config.toml").task.options == {"samples": 100, "scale": 2}
    assert library.run(out=tmp_path / "out", resume=True)["model_digest"] == digest


def changed() -> Sized:
    task = Sized()
    task.samples = 100
    return task


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Sized(100, shape=(4, 4)), changed])
def test_a_task_whose_arguments_are_not_known_must_be_given_again(make: Any, tmp_path: Path) -> None:
    digest = started(tmp_path / "out", make())
    with pytest.raises(Cyber0Error, match="give it again with task="):
        library.run(out=tmp_path / "out", resume=True)
    with pytest.raises(Cyber0Error, match="give it again with task="):
        evaluate(tmp_path / "out")
    assert library.run(out=tmp_path / "out", task=make(), resume=True)["model_digest"] == digest


@pytest.mark.slow
def test_a_run_is_not_resumed_with_a_task_made_with_other_arguments(tmp_path: Path) -> None:
    started(tmp_path / "out", Sized(100))
    with pytest.raises(LedgerError, match=r"differs in task\.options"):
        library.run(out=tmp_path / "out", task=Sized(120), resume=True)


def test_a_task_given_in_python_must_be_given_again(tmp_path: Path) -> None:
    import torch

    task = library.Task.of(torch.nn.Linear(3, 2), (torch.eye(3).repeat(20, 1), torch.arange(60) % 2))
    config = load(None, ["rounds=2", "federation.attack=none"])
    run = Run.start(config, tmp_path / "out", task=task)
    run.simulation.close()
    with pytest.raises(Cyber0Error, match="give it again with task="):
        Run.resume(tmp_path / "out")
    assert Run.resume(tmp_path / "out", task=task).run()["task"] == "own"


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    with pytest.raises(Cyber0Error, match="give it again with task="):
        library.run(out=tmp_path / "1", resume=True)
    longer = library.run({**settings, "rounds": 3}, out=tmp_path / "0", resume=True, export=False)
    assert longer["rounds"] == 3  # the task that the run has on record needs not be said again
