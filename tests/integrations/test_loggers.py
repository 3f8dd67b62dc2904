"""The loggers, with stand-ins for wandb and trackio: what they get, from a run, a resumed run and a failed one."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Logged
from synthetic import one_thread  # noqa: F401

import cyber0
from cyber0.errors import ConfigError
from cyber0.integrations.loggers import TrackioCallback, WandbCallback

CONFIG = {"rounds": 4, "evaluate_every": 2, "task": {"name": "logistic"}, "method": {"k": 4, "lr": 0.1}}


@pytest.fixture(params=["wandb", "trackio"])
def begun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Logged]:
    runs: list[Logged] = []

    def init(**arguments: Any) -> Logged:
        runs.append(Logged(**arguments))
        return runs[-1]

    module = types.ModuleType(request.param)
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, module)
    return runs


@pytest.fixture
def make(begun: list[Logged], request: pytest.FixtureRequest) -> Any:
    return WandbCallback if request.node.callspec.params["begun"] == "wandb" else TrackioCallback


def test_every_evaluation_is_logged_once_by_its_round(begun: list[Logged], make: Any, tmp_path: Path) -> None:
    summary = cyber0.run(CONFIG, out=tmp_path / "a", callbacks=[make(project="p")])
    (run,) = begun
    assert list(run.entries) == [0, 2, 4] and run.ended is not None
    assert run.entries[4]["test/loss"] == summary["final_loss"] and "test/accuracy" in run.entries[0]
    assert run.arguments["project"] == "p" and run.arguments["name"] == "a"
    assert run.arguments["config"]["method"]["k"] == 4
    cyber0.run({**CONFIG, "rounds": 6}, out=tmp_path / "a", resume=True, callbacks=[make(project="p", name="again")])
    assert list(begun[1].entries) == [0, 2, 4, 6] and begun[1].arguments["name"] == "again"


def test_options_of_init_are_passed_on(begun: list[Logged], make: Any, tmp_path: Path) -> None:
    cyber0.run(CONFIG, out=tmp_path / "a", callbacks=[make(project="p", group="g")])
    assert begun[0].arguments["group"] == "g"


def test_a_run_that_fails_ends_the_logged_one(begun: list[Logged], make: Any, tmp_path: Path) -> None:
    class Fault:
        def on_round(self, record: Any) -> None:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"), make(project="p") as logger:
        cyber0.run(CONFIG, out=tmp_path / "a", callbacks=[logger, Fault()])
    assert begun[0].ended in ({"exit_code": 1}, {}) and list(begun[0].entries) == [0]


@pytest.mark.parametrize("begun", ["wandb"], indirect=True)
def test_weights_and_biases_are_offline_and_in_the_folder_unless_told_otherwise(
    begun: list[Logged], tmp_path: Path
) -> None:
    summary = cyber0.run(CONFIG, out=tmp_path / "a", callbacks=[WandbCallback(project="p")])
    assert begun[0].arguments["mode"] == "offline" and begun[0].arguments["dir"] == str(tmp_path / "a")
    assert begun[0].summary["cyber0/chain"] == summary["chain"]
    cyber0.run(CONFIG, out=tmp_path / "b", callbacks=[WandbCallback(project="p", mode="disabled", dir="elsewhere")])
    assert begun[1].arguments["mode"] == "disabled" and begun[1].arguments["dir"] == "elsewhere"
    with pytest.raises(ConfigError, match="mode = 'local' is not a mode"):
        WandbCallback(project="p", mode="local")


@pytest.mark.parametrize(("make", "package"), [(WandbCallback, "wandb"), (TrackioCallback, "trackio")])
def test_a_missing_package_is_named_with_the_remedy(
    make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{make.__name__} needs the package {package}.*: pip install {package}"):
        make(project="p")
