"""--json and exit codes: one mechanism and one table for all commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import FAST, Answer, Command, refused
from typer.testing import CliRunner

from cyber0.cli import main as cli
from cyber0.cli import output
from cyber0.errors import ExitCode

DOCS = Path(__file__).parents[2] / "docs"


def data_of(answer: Answer, code: int = 0) -> Any:
    """Return what a command has printed, which must be JSON from the first character to the last."""
    assert answer.code == code, answer.err
    return json.loads(answer.out)


def test_the_codes_of_the_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (DOCS / "CLI.md").read_text(encoding="utf-8"), flags=re.M)
    assert [(int(code), text) for code, text in rows] == [(int(code), code.meaning) for code in ExitCode]


def test_the_page_names_every_command_that_prints_json() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    able = {name for name, command in commands.items() if any("--json" in p.opts for p in command.params)}
    section = (DOCS / "CLI.md").read_text(encoding="utf-8").partition("## JSON")[2].partition("\n## ")[0]
    assert able == set(re.findall(r"^\| `(\w+)` \|", section, flags=re.M))


def replying(reply: output.Reply, work: Any = lambda: None) -> Any:
    """Return a command line of one command that works and replies."""

    def command(times: int = 1) -> output.Reply:
        work()
        return reply

    app = typer.Typer()
    app.command()(output.with_json(command))
    return app


def test_without_json_a_reply_is_shown_and_with_it_printed_as_data() -> None:
    app = replying(output.Reply({"a": Path("b"), "c": (1, 2)}, lambda: print("for people"), ExitCode.FAULTS))
    shown, printed = CliRunner().invoke(app, []), CliRunner().invoke(app, ["--json", "--times", "3"])
    assert (shown.exit_code, shown.stdout) == (1, "for people\n")
    assert (printed.exit_code, json.loads(printed.stdout)) == (1, {"a": "b", "c": [1, 2]})


def test_what_is_printed_during_the_work_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print("from Python")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)

    with pytest.raises(SystemExit):
        replying(output.Reply([1]), work)(["--json"])
    out, err = capfd.readouterr()
    assert json.loads(out) == [1] and "from Python" in err and "from a child" in err


def test_numbers_that_are_not_finite_are_null_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": [float("nan"), 1.0], "b": float("inf")})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": [None, 1.0], "b": None} and "not finite" in err


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str], cyber0: Command) -> None:
    refused(cyber0("verify", "nowhere", "--json"), "nowhere")
    print("again")
    assert capfd.readouterr().out == "again\n"


def test_list_prints_every_setting_as_data(cyber0: Command) -> None:
    found = data_of(cyber0("list", "--json"))
    by_name = {one["name"]: one for one in found["settings"]}
    assert by_name["method.k"]["default"] == 64 and by_name["method.k"]["meaning"]
    assert "trimmed_mean" in {choice["name"] for choice in by_name["aggregation.rule"]["choices"]}
    assert "table1" in found["reproductions"] and found["defaults_by_task"]
    paper = data_of(cyber0("list", "--settings", "--json"))
    assert [row["MNIST"] for row in paper[0]["rows"] if row["setting"] == "method.lr"] == ["0.01"]


def test_theory_prints_numbers_as_data(cyber0: Command) -> None:
    found = data_of(cyber0("theory", "--d", "7850", "--json"))
    assert found["setting"]["d"] == 7850 and 0 < found["in_practice"]["lr"] < 1
    assert found["choices"][0]["name"] == "lr" and found["quantities"]


@pytest.mark.slow
def test_a_run_and_what_looks_into_it_print_data(cyber0: Command) -> None:
    trained = data_of(cyber0("run", *FAST, "--out", "run", "--json"))
    assert trained["folder"] == "run" and trained["rounds"] == 12
    assert trained["model_digest"] == json.loads(Path("run/summary.json").read_text())["model_digest"]
    for command in (["verify", "run"], ["replay", "run", "--out", "w.safetensors"], ["evaluate", "run"]):
        assert data_of(cyber0(*command, "--json"))["model_digest"] == trained["model_digest"], command
    verified = data_of(cyber0("verify", "run", "--json"))
    assert (verified["records"], verified["decided"], verified["ended"]) == (12, 12, True)
    assert verified["learning_rates"] == "checked" and verified["exported"] == "model.safetensors"
    diagnosed = data_of(cyber0("diagnose", "run", "--round", 0, "--rounds", 1, "--json"))
    assert diagnosed["verdict"]["headline"] and diagnosed["verdict"]["findings"][0]["text"]
    assert json.loads(Path("run/diagnostics.json").read_text())["stations"] == diagnosed["stations"]


@pytest.mark.slow
def test_a_run_that_learned_nothing_prints_data_and_keeps_its_code(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "method.lr=1e-30", "--out", "run", "--json")
    assert data_of(answer, ExitCode.NOTHING_LEARNED)["rounds"] == 12 and "nothing was learned" in answer.err
