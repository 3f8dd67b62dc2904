"""`cyber0.run` is the command's equal, and callbacks are told what happens, in order, whatever they do."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from documents import DOCS, blocks
from own_tasks import Line, Pictures
from synthetic import After, one_thread  # noqa: F401

import cyber0
from cyber0.cli import main as cli
from cyber0.config.files import load
from cyber0.errors import ConfigError, Cyber0Error, LedgerError
from cyber0.ledger import Ledger, Record
from cyber0.report.tensorboard import Events
from cyber0.runs.callbacks import HOOKS
from cyber0.runs.run import Run
from cyber0.runs.settings import settings_of

SETTINGS: dict[str, Any] = {
    "rounds": 7,
    "evaluate_every": 3,
    "task": {"name": "logistic"},
    "federation": {"clients": 6, "byzantine": 1, "attack": "sign_flip"},
    "method": {"k": 4, "lr": 0.1, "batch_size": 8},
}
TOML = (
    'rounds = 7\nevaluate_every = 3\n[task]\nname = "logistic"\n[federation]\nclients = 6\nbyzantine = 1\n'
    'attack = "sign_flip"\n[method]\nk = 4\nlr = 0.1\nbatch_size = 8\n'
)
DUE = [0, 3, 6, 7]
TIMES = ("wall_seconds", "rounds_per_second")


@pytest.fixture(autouse=True)
def here(folder_without_pictures: Path) -> Path:
    return folder_without_pictures


def with_settings(**changes: Any) -> dict[str, Any]:
    return {**SETTINGS, **changes}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["cyber0", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


def summary_of(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return found


def untimed(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in TIMES}


def rows_of(folder: str | Path) -> list[dict[str, str]]:
    with Path(folder, "metrics.csv").open(newline="") as file:
        return [{name: v for name, v in row.items() if name != "seconds"} for row in csv.DictReader(file)]


class Diary:
    """A callback that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.records: list[Record] = []
        self.metrics: list[dict[str, float]] = []

    def on_start(self, run: Run) -> str:
        self.run, self.at_start = run, (run.round, run.rounds)
        self.calls.append(("start", run.round))
        return "what is returned is ignored"

    def on_round(self, record: Record) -> bool:
        assert self.run.round == record.round + 1
        self.calls.append(("round", record.round))
        self.records.append(record)
        return False

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> bool:
        assert self.run.rows[round].loss == metrics["loss"]
        self.calls.append(("evaluate", round))
        self.metrics.append(metrics)
        return False

    def on_end(self, summary: dict[str, Any]) -> None:
        assert summary_of(self.run.folder) == summary
        self.calls.append(("end", summary["rounds"]))


# The command's equal.


@pytest.mark.slow
def test_whatever_the_settings_come_in_the_run_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("settings.toml").write_text(TOML)
    command(monkeypatch, "run", "settings.toml", "--out", "commanded", "--quiet")
    forms = {"path": Path("settings.toml"), "text": "settings.toml", "dict": SETTINGS,
             "config": cyber0.Config.from_dict(SETTINGS)}  # fmt: skip
    for name, config in forms.items():
        summary = cyber0.run(config, out=name)
        assert summary == summary_of(name)
        assert untimed(summary) == untimed(summary_of("commanded"))
        for file in ("ledger.bin", "config.toml", "clients.csv", "partition.csv", "w0.safetensors"):
            assert Path(name, file).read_bytes() == Path("commanded", file).read_bytes(), (name, file)
        assert rows_of(name) == rows_of("commanded")
        assert {path.name for path in Path(name).iterdir()} == {path.name for path in Path("commanded").iterdir()}


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    cyber0.run(SETTINGS, out="out")
    assert capfd.readouterr() == ("", "")


def test_without_a_folder_a_new_one_under_runs_is_taken() -> None:
    cyber0.run(with_settings(rounds=0))
    cyber0.run(with_settings(rounds=0))
    cyber0.run(with_settings(rounds=0), task=Pictures())
    names = sorted(re.sub(r"-\d{8}-\d{6}(-\d)?$", "", path.name) for path in Path("runs").iterdir())
    assert names == ["logistic", "logistic", "pictures"]


def test_the_name_of_a_task_is_a_run_of_it_and_a_file_of_that_name_goes_first(here: Path) -> None:
    assert settings_of("ridge").task.name == "ridge"
    Path("logistic").mkdir()
    assert settings_of("logistic").task.name == "logistic"
    Path("logistic", "config.toml").write_text("rounds = 1")
    with pytest.raises(ConfigError, match=r"logistic is the folder of a run.*--set task.name=logistic"):
        settings_of("logistic")
    Path("ridge").write_text('task.name = "logistic"')
    assert settings_of("ridge").task.name == "logistic"


def test_a_mistyped_task_is_named_with_the_nearest_one(here: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config file or task 'mnits'; did you mean 'mnist'"):
        settings_of("mnits")


@pytest.mark.parametrize(
    ("config", "words"),
    [({"rounds": -1}, "rounds = -1"), ({"method": {"lrr": 1}}, "did you mean 'method.lr'"),
     ({"method.lr": 0.1}, r"'method.lr' \(= 0.1\) belongs in its section: \{'method': \{'lr': ...\}\}"),
     ("missing.toml", "there is no config file missing.toml"),
     ("my_task.py", "name the task in it"), ("missing.py:Spam", "there is no file .*missing.py"),
     (["rounds=1"], r"config = \['rounds=1'\] can't be read as"), (7, "config = 7 can't be read as settings")],
)  # fmt: skip
def test_settings_that_can_not_be_are_refused_as_by_the_command(config: Any, words: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        cyber0.run(config, out="out")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("task", "words"),
    [(Pictures, r"task=Pictures is a class; give an instance: task=Pictures\(\)"),
     ("my_task.py:Spam", r"task='my_task.py:Spam' is a str; give an instance.*cyber0.Task.of"),
     (torch.nn.Linear(1, 1), "is a Linear; give an instance")],
)  # fmt: skip
def test_what_is_no_task_is_refused(task: Any, words: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        cyber0.run(SETTINGS, task=task, out="out")
    assert not list(here.iterdir())


def test_a_folder_that_holds_a_run_is_not_overwritten() -> None:
    cyber0.run(SETTINGS, out="out")
    before = Path("out/ledger.bin").read_bytes()
    with pytest.raises(ConfigError, match="out already holds a run"):
        cyber0.run(with_settings(seed=1), out="out")
    assert Path("out/ledger.bin").read_bytes() == before


def test_a_task_of_ones_own_and_its_metrics_reach_the_summary_and_the_callbacks() -> None:
    diary = Diary()
    config = {"rounds": 2, "evaluate_every": 1, "federation": {"partition": "iid", "byzantine": 0}}
    task = Line()
    summary = cyber0.run(config, task=task, out="out", callbacks=[diary])
    assert summary["task"] == "own_tasks:Line"
    assert summary["metrics"] == {"error": diary.metrics[-1]["error"], "rows": 96}
    assert [set(metrics) for metrics in diary.metrics] == [{"loss", "error", "rows"}] * 3  # no accuracy: there is none
    assert all(type(value) is float for metrics in diary.metrics for value in metrics.values())
    assert diary.run.task is task


# Resuming.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cyber0", "mezo", "fedavg"])
@pytest.mark.parametrize("config", [None, "the same"])
def test_a_run_that_was_stopped_is_resumed_to_the_same_bits(method: str, config: str | None) -> None:
    settings = with_settings(method={**SETTINGS["method"], "name": method}, federation={"clients": 6, "byzantine": 0})
    whole = cyber0.run(settings, out="whole")
    with pytest.raises(ZeroDivisionError):
        cyber0.run(settings, out="cut", callbacks=[After(4, ZeroDivisionError())])
    assert not Path("cut/summary.json").exists()
    summary = cyber0.run(settings if config else None, out="cut", resume=True)
    assert untimed(summary) == untimed(whole) and rows_of("cut") == rows_of("whole")
    if method != "fedavg":
        assert Path("cut/ledger.bin").read_bytes() == Path("whole/ledger.bin").read_bytes()


def test_resuming_tells_of_the_rounds_and_evaluations_that_are_left_alone() -> None:
    with pytest.raises(KeyboardInterrupt):
        cyber0.run(SETTINGS, out="out", callbacks=[After(4, KeyboardInterrupt())])
    diary = Diary()
    cyber0.run(out="out", resume=True, callbacks=[diary])
    assert diary.at_start == (4, 7)
    assert diary.calls == [("start", 4), ("round", 4), ("round", 5), ("evaluate", 6), ("round", 6), ("evaluate", 7),
                           ("end", 7)]  # fmt: skip
    assert sorted(diary.run.rows) == DUE


def test_an_evaluation_that_was_lost_is_made_again_and_told_of() -> None:
    cyber0.run(SETTINGS, out="out")
    lines = Path("out/metrics.csv").read_text().splitlines(keepends=True)
    Path("out/metrics.csv").write_text("".join([*lines[:2], *lines[3:]]))
    diary = Diary()
    cyber0.run(out="out", resume=True, callbacks=[diary])
    assert diary.calls == [("start", 7), ("evaluate", 3), ("evaluate", 7), ("end", 7)]


def test_a_task_given_in_python_is_given_again() -> None:
    task = cyber0.Task.of(torch.nn.Linear(3, 2), (torch.eye(3).repeat(20, 1), torch.arange(60) % 2))
    config = with_settings(task={})
    with pytest.raises(KeyboardInterrupt):
        cyber0.run(config, task, "out", callbacks=[After(2, KeyboardInterrupt())])
    with pytest.raises(Cyber0Error, match="give it again with task="):
        cyber0.run(out="out", resume=True)
    assert cyber0.run(config, task, "out", resume=True)["task"] == "own"


def test_what_can_not_be_resumed_is_refused_by_name(here: Path) -> None:
    with pytest.raises(ConfigError, match="resume=True needs the folder of the run to resume: out=DIR"):
        cyber0.run(SETTINGS, resume=True)
    for config in (None, SETTINGS):
        with pytest.raises(ConfigError, match="nowhere holds no run to resume"):
            cyber0.run(config, out="nowhere", resume=True)
    assert not list(here.iterdir())
    cyber0.run(SETTINGS, out="out")
    with pytest.raises(ConfigError, match=r"other settings: method.lr \(now 0.2, on record 0.1\), seed \(now 5, on re"):
        cyber0.run(with_settings(seed=5, method={**SETTINGS["method"], "lr": 0.2}), out="out", resume=True)


# What callbacks are told.


def test_callbacks_are_told_of_every_round_and_evaluation_in_order() -> None:
    diary = Diary()
    summary = cyber0.run(SETTINGS, out="out", callbacks=[diary])
    assert diary.calls == [
        ("start", 0), ("evaluate", 0), ("round", 0), ("round", 1), ("round", 2), ("evaluate", 3), ("round", 3),
        ("round", 4), ("round", 5), ("evaluate", 6), ("round", 6), ("evaluate", 7), ("end", 7),
    ]  # fmt: skip
    assert diary.at_start == (0, 7)
    run = diary.run
    assert (run.config, run.folder) == (load("out/config.toml"), Path("out"))
    assert run.simulation.parameters.digest() == summary["model_digest"] and run.task is run.simulation.task
    for record, kept in zip(diary.records, Ledger.open("out/ledger.bin"), strict=True):
        assert (record.round, record.lr, record.chain) == (kept.round, kept.lr, kept.chain)
        assert record.values is not None and kept.values is not None
        np.testing.assert_array_equal(record.values, kept.values)
        np.testing.assert_array_equal(record.trimmed, kept.trimmed)
    assert [float(row["loss"]) for row in rows_of("out")] == [metrics["loss"] for metrics in diary.metrics]
    assert [float(row["accuracy"]) for row in rows_of("out")] == [metrics["accuracy"] for metrics in diary.metrics]
    assert all(type(value) is float for metrics in diary.metrics for value in metrics.values())


def test_a_method_without_a_ledger_gives_records_of_d_numbers_and_no_chain() -> None:
    diary = Diary()
    summary = cyber0.run(with_settings(method={"name": "fedavg", "lr": 0.1}), out="out", callbacks=[diary])
    assert [record.round for record in diary.records] == list(range(7))
    for record in diary.records:
        assert record.values is not None and record.values.shape == (summary["dimension"],)
        assert record.chain == b"" and record.lr == 0.1 and record.reported.all()


def test_an_abandoned_round_is_told_of_by_a_record_without_values() -> None:
    diary = Diary()
    federation = {"clients": 6, "byzantine": 1, "attack": "nonfinite"}
    summary = cyber0.run(with_settings(federation=federation, serve={"quorum": 6}), out="out", callbacks=[diary])
    assert sum(record.values is None for record in diary.records) == summary["abandoned_rounds"] > 3


def test_several_callbacks_are_told_in_their_order_and_need_not_know_everything() -> None:
    told: list[str] = []
    first = SimpleNamespace(on_round=lambda record: told.append(f"first {record.round}"))
    second = SimpleNamespace(on_round=lambda record: told.append(f"second {record.round}"), anything="else")
    last = SimpleNamespace(on_end=lambda *summaries: told.append(f"end of {len(summaries)}"))
    cyber0.run(with_settings(rounds=2), out="out", callbacks=(callback for callback in (first, second, last)))
    assert told == ["first 0", "second 0", "first 1", "second 1", "end of 1"]


def test_a_run_without_rounds_starts_is_evaluated_and_ends() -> None:
    diary = Diary()
    cyber0.run(with_settings(rounds=0), out="out", callbacks=[diary])
    assert diary.calls == [("start", 0), ("evaluate", 0), ("end", 0)]


@pytest.mark.slow
def test_being_told_changes_no_bit_even_where_a_callback_writes_into_what_it_gets() -> None:
    class Scribbler:
        def on_round(self, record: Record) -> None:
            assert record.values is not None
            record.values[:] = 1e9
            record.trimmed[:] = 0

        def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
            metrics.clear()

        def on_end(self, summary: dict[str, Any]) -> None:
            summary["metrics"].clear()
            summary.clear()

    diary = Diary()
    for method in ("cyber0", "krum"):
        settings = with_settings(method={"name": method, "lr": 0.1, "k": 4})
        plain = cyber0.run(settings, out=f"{method} plain")
        told = cyber0.run(settings, out=f"{method} told", callbacks=[Scribbler(), diary])
        assert untimed(plain) == untimed(told) and rows_of(f"{method} plain") == rows_of(f"{method} told")
        assert diary.metrics[-1]["loss"] == told["final_loss"]


# What callbacks raise.


class OwnError(BaseException):
    """Nothing that the library could know."""


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine"), OwnError()])
@pytest.mark.parametrize("method", ["cyber0", "fedavg"])
def test_what_a_callback_raises_reaches_the_caller_and_the_run_can_be_resumed(
    hook: str, error: BaseException, method: str
) -> None:
    def raising(*arguments: object) -> None:
        raise error

    settings, diary = with_settings(rounds=4, method={"name": method, "lr": 0.1, "k": 4}), Diary()
    whole = cyber0.run(settings, out="whole")
    with pytest.raises(type(error)) as caught:
        cyber0.run(settings, out="cut", callbacks=[diary, SimpleNamespace(**{hook: raising})])
    assert caught.value is error
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "raising"
    assert ("end", 4) not in diary.calls or hook == "on_end"
    assert Path("cut/summary.json").exists() == (hook == "on_end")
    if method == "cyber0":
        with pytest.raises(LedgerError, match="is closed"):
            diary.run.simulation.run_round()
    summary = cyber0.run(out="cut", resume=True)  # which also needs the folder's lock
    assert summary["model_digest"] == whole["model_digest"] and rows_of("cut") == rows_of("whole")


# What is no callback.


def with_method(name: str, method: Callable[..., object] | None) -> object:
    return type("Mine", (), {name: method})()


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [([with_method("on_rounds", lambda self, record: None)], "the callback Mine has on_rounds, .* mean 'on_round'"),
     ([with_method("on_epoch_end", lambda self, x: None)], "Mine has on_epoch_end, which is never called; "),
     ([SimpleNamespace(on_round=print, on_evaluation=print)], "has on_evaluation, .* did you mean 'on_evaluate'"),
     ([object()], "<object object at .* has none of the methods on_start, on_round, on_evaluate, on_end"),
     ([print], "has none of the methods"), ([None], "the callback None has none of the methods"),
     ([Diary], r"the callback Diary is a class; give an instance: Diary\(\)"),
     ([Diary(), with_method("on_round", None)], "Mine.on_round of a callback is None; make it a method"),
     ([with_method("on_round", lambda self: None)], r"Mine.on_round can't be called as on_round\(record\): too many"),
     ([with_method("on_evaluate", lambda self, metrics: None)], r"as on_evaluate\(round, metrics\): too many"),
     ([with_method("on_end", lambda self, summary, more: None)], r"as on_end\(summary\): missing a req.*'more'"),
     (Diary(), r"callbacks = <.*Diary.*> is not a list of callbacks; put it in one: callbacks=\[...\]"),
     ("on_round", "callbacks = 'on_round' is not a list"), ({"on_round": print}, "is not a list of callbacks")],
)  # fmt: skip
def test_what_is_no_callback_is_refused_by_name_before_anything_is_written(
    callbacks: Any, words: str, here: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        cyber0.run(SETTINGS, out="out", callbacks=callbacks)
    assert not list(here.iterdir())


# The screen and TensorBoard.


def test_the_screen_is_a_callback_that_shows_what_the_command_shows(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from cyber0.cli.display import Display

    Path("settings.toml").write_text(TOML)
    command(monkeypatch, "run", "settings.toml", "--out", "one")
    commanded = capfd.readouterr().out
    cyber0.run("settings.toml", out="two", callbacks=[Display()])

    def without_times(text: str) -> list[str]:
        return [line for line in re.sub(r"[\d,.]+ (rounds/s|s/round)", "", text).splitlines() if " time " not in line]

    shown = capfd.readouterr().out
    assert without_times(shown.replace("two", "one")) == without_times(commanded)
    assert "round 7/7  accuracy" in shown and "Partition" in shown and "Result" in shown


def test_a_line_stands_at_its_evaluation_also_where_that_is_the_last_round(capfd: pytest.CaptureFixture[str]) -> None:
    from cyber0.cli.display import Display

    cyber0.run(SETTINGS, out="out", callbacks=[Display()])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in lines] == [f"{round}/7" for round in range(1, 8)]
    assert [("accuracy" in line, "(at round" in line) for line in lines] == [
        (round in DUE, False) for round in range(1, 8)
    ]


def test_event_files_hold_each_evaluation_once_and_are_closed_however_a_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for TensorBoard, which is not installed everywhere."""
    written: list[tuple[str, float, int]] = []
    closed: list[bool] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert Path(folder) == Path("out/tensorboard")
            written.clear()  # the files of an earlier part are removed

        def add_scalar(self, tag: str, value: float, round: int) -> None:
            written.append((tag, value, round))

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    with pytest.raises(KeyboardInterrupt), Events() as events:
        cyber0.run(SETTINGS, out="out", callbacks=[events, After(5, KeyboardInterrupt())])
    assert closed == [True]
    assert sorted({round for _, _, round in written}) == [0, 3]
    cyber0.run(out="out", resume=True, callbacks=[Events()])
    assert len(closed) == 2
    for tag, name in (("test/loss", "loss"), ("test/accuracy", "accuracy"),
                      ("traffic/sent_by_each_client", "uplink_bytes")):  # fmt: skip
        expected = [(int(row["round"]), float(row[name])) for row in rows_of("out")]
        found = [(round, float(value)) for found, value, round in written if found == tag]
        assert found == expected and [round for round, _ in found] == DUE, tag
    assert not any(math.isnan(value) for _, value, _ in written)


# Lightness and documents.


def test_cyber0_run_is_a_function_also_when_its_neighbours_are_loaded() -> None:
    import cyber0.runs.run

    assert callable(cyber0.run) and cyber0.run.__module__ == "cyber0.api"
    assert isinstance(cyber0.runs, types.ModuleType) and "run" in dir(cyber0) and "run" in cyber0.__all__


@pytest.mark.slow
def test_the_example_in_the_documents_runs(capfd: pytest.CaptureFixture[str]) -> None:
    found = blocks((DOCS / "PYTHON.md").read_text(encoding="utf-8"))
    (code,) = [block.code for block in found if "cyber0.run(" in block.code]
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "PYTHON.md", "exec"), space)
    assert re.search(r"^round 20: loss 0\.\d+", capfd.readouterr().out, re.MULTILINE)
    assert space["summary"] == summary_of("runs/stopped") and space["summary"]["rounds"] == 60
