"""What the screen shows of a run: its progress, its result, and what looks wrong with it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import FAST, Command
from rich.console import Console

from cyber0.cli import display as screen
from cyber0.config.schema import Config
from cyber0.report import outcome
from cyber0.report.headline import rate_text
from cyber0.runs.folder import ClientRow
from cyber0.tasks.metrics import MetricsRow


def test_a_slow_run_is_said_in_seconds_a_round_and_a_fast_one_in_rounds_a_second() -> None:
    speeds = (0.0, 0.0021, 0.4, 0.99, 1.0, 3.21, 57.3, 1016.4)
    texts = ["", "476 s/round", "2.5 s/round", "1.0 s/round", "1.0 rounds/s", "3.2 rounds/s", "57 rounds/s",
             "1,016 rounds/s"]  # fmt: skip
    assert list(map(rate_text, speeds)) == texts


def row(round: int, accuracy: float = 0.5, loss: float = 1.0) -> MetricsRow:
    return MetricsRow(round, accuracy, loss, 0, 0, round, 1.0)


def shown_by(
    width: int, rounds: int, speed: float, *done: tuple[int, MetricsRow], terminal: bool = False, before: int = 0
) -> str:
    """Return what is shown of a run, of which is said how many rounds are done and what the last evaluation was."""
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, highlight=False)
    run: Any = SimpleNamespace(round=before, rounds=rounds, rounds_per_second=speed, is_due=lambda round: False,
                               simulation=SimpleNamespace(evaluated_on="test"))  # fmt: skip
    with screen.Display(console) as display:
        display.show_progress(run)
        for run.round, run.last_row in done:
            display.on_round(None)  # type: ignore[arg-type]
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_progress_line_shows_an_evaluation_once_and_names_its_round() -> None:
    rows = {5: row(4, 0.75, 0.5), 10: row(8, 0.875, 0.25), 20: row(20, 1.0, 0.125)}
    text = shown_by(100, 20, 0.25, *((r, rows[max((e for e in rows if e <= r), default=5)]) for r in range(1, 21)))
    lines = text.splitlines()
    assert "round 2/20  accuracy 0.7500  loss 0.5000 (at round 4)  4.0 s/round" in lines  # of a row, whatever it is
    assert "round 4/20  4.0 s/round" in lines and "round 8/20  4.0 s/round" in lines
    assert "round 10/20  accuracy 0.8750  loss 0.2500 (at round 8)  4.0 s/round" in lines
    assert "round 20/20  accuracy 1.0000  loss 0.1250  4.0 s/round" in lines
    assert text.count("accuracy") == 3 and "rounds/s" not in text


def test_the_evaluation_of_the_start_is_no_progress() -> None:
    assert shown_by(100, 10, 2.0, (1, row(0))) == "round 1/10  2.0 rounds/s\n"


def test_the_bar_names_the_round_of_the_evaluation_and_a_slow_speed_in_seconds() -> None:
    text = shown_by(200, 20, 0.1, (7, row(4, 0.75, 0.5)), terminal=True)
    assert "accuracy 0.750  loss 0.500 (at round 4)  10.0 s/round" in text


def test_the_bar_of_a_resumed_run_begins_where_the_run_stands() -> None:
    assert " 7/20" in shown_by(200, 20, 0.1, terminal=True, before=7)


def test_clients_that_are_trimmed_alike_are_said_to_be_in_a_sentence() -> None:
    def said(*shares: float, byzantine: tuple[int, ...] = ()) -> str:
        rows = [ClientRow(i, i in byzantine, 100, round(100 * share)) for i, share in enumerate(shares)]
        this = SimpleNamespace(suspects=lambda: rows, config=Config().with_overrides(["federation.byzantine=3"]))
        return screen._suspects(this)  # type: ignore[arg-type]

    assert said(0.5, 0.5, 0.5, 0.5) == "none stands out: each had 50% of the scalars trimmed"
    assert said(0.5, 0.5, 0.5, 0.5, 0.25) == "none stands out: 4 of 5 clients had 50% of the scalars trimmed"
    assert said(0.5, 0.25, 0.75, 0.1, byzantine=(2,)) == "2 (75% of its scalars, Byzantine), 0 (50%), 1 (25%)"
    assert said(0, 0, 0, 0) == ""


@pytest.mark.slow
def test_a_run_whose_rounds_were_all_abandoned_ends_with_3_and_points_to_diagnose(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "serve.quorum=12", "--set", "federation.attack=nonfinite", "--out", "r d")
    assert answer.code == 3
    assert "error: nothing was learned: every one of the 12 rounds was abandoned" in answer.err
    assert "cyber0 diagnose 'r d'" in answer.err and "Result" in answer.out


@pytest.mark.slow
def test_a_run_that_diverged_ends_with_3_also_when_quiet(cyber0: Command) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of losses that are not finite
        answer = cyber0("run", *FAST, "--set", "method.lr=1e38", "--set", "federation.attack=none", "--set",
                        "method.estimator=gradient", "--out", "run", "--quiet")  # fmt: skip
    assert (answer.code, answer.out) == (3, "")
    assert "the loss is not a finite number at the end" in answer.err and "cyber0 diagnose run" in answer.err
    assert json.loads(Path("run/summary.json").read_text())["final_loss"] is None


@pytest.mark.slow
def test_a_run_that_changed_no_weight_ends_with_3(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "method.lr=1e-30", "--out", "run")
    assert answer.code == 3 and "12 rounds were decided, and none of them changed a weight" in answer.err


@pytest.mark.slow
def test_a_run_that_learned_is_not_warned_of_and_one_that_lost_it_again_is(cyber0: Command) -> None:
    assert "warning" not in cyber0("run", *FAST, "--set", "federation.byzantine=0", "--out", "good").out
    answer = cyber0("run", *FAST, "--set", "method.lr=300", "--set", "federation.byzantine=0", "--out", "bad")
    assert answer.code == 0 and "warning: the run diverged, its loss rose:" in answer.out
    assert "`cyber0 diagnose bad` says whether it is the learning rate" in answer.out
    assert cyber0("run", *FAST, "--set", "rounds=0", "--out", "none").code == 0


@pytest.mark.parametrize(
    ("evaluations", "abandoned", "doubt"),
    [
        ([row(0, 0.1, 2.0), row(5, 0.9, 0.5), row(10, 0.1, 1.9)], 0, "accuracy fell from 90.00% at round 5 to 10.00%"),
        ([row(0, 0.1, 2.0), row(10, 0.2, 2.0)], 0, "the loss did not fall: 2 at the start, 2 at the end"),
        ([row(0, 0.1, 2.0), row(10, 0.8, 1.0)], 6, "6 of 10 rounds were abandoned"),
        ([row(0, 0.1, 2.0), row(5, 0.92, 1.0), row(10, 0.9, 0.9)], 4, ""),
    ],
)
def test_what_looks_wrong_with_a_run_is_said(evaluations: list[MetricsRow], abandoned: int, doubt: str) -> None:
    summary = {"rounds": 10, "abandoned_rounds": abandoned, "final_loss": 1.0}
    found = outcome.judge(summary, evaluations, unchanged=False)
    assert found == ("", [doubt] if doubt else [])


def test_a_method_that_can_not_be_diagnosed_is_not_sent_to_diagnose() -> None:
    assert "diagnose" not in outcome.remedy("fedavg", "run") and "diagnose run" in outcome.remedy("mezo", "run")


@pytest.mark.parametrize("quiet", [False, True])
def test_slow_steps_say_what_they_do_unless_all_is_to_be_quiet(quiet: bool, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import logging; from cyber0.cli import display, main; main._show_progress(); "
        f"display.new_console({quiet}); logging.getLogger('cyber0.progress').info('fetching %s ...', 'MNIST')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capfd.readouterr().err == ("" if quiet else "fetching MNIST ...\n")
