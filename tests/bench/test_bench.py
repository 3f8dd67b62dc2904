"""`cyber0 bench`: what it measures on tiny shapes, what it prints, and the file that it compares with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cyber0.bench import figures, machines, timing
from cyber0.bench.figures import Shape, measure, shapes_for
from cyber0.bench.machines import Machine, replaced, this_machine
from cyber0.bench.timing import Figure, interleaved
from cyber0.cli.main import app

TINY = Shape(1, 16, 2, 8, 4, torch.float32, (50, 100), 2, repeats=1)


@pytest.fixture(scope="module")
def measured() -> list[Figure]:
    return list(measure("cpu", [TINY]))


def test_every_figure_is_a_number_and_says_what_it_is_of(measured: list[Figure]) -> None:
    assert all(f.value is not None and math.isfinite(f.value) and f.value > 0 and f.note for f in measured)
    names = [f.name for f in measured]
    assert len(set(names)) == len(names)
    replays = [f"replay of 0.005 M weights, {z}, {kind}" for z in ("gaussian", "low_rank")
               for kind in ("fp32", "bf16", "bf16, stochastic16")]  # fmt: skip
    steps = (
        "federated step / two bare",
        "ZeroOrder.step(loss_fn, batch) / two eager",
        "ZeroOrder.step(closure) / two eager",
    )
    for part in (*steps, *replays, "commit of", "digest of", "default run"):
        assert any(name.startswith(part) for name in names), part


def test_ratios_are_better_when_smaller_and_speeds_when_larger(measured: list[Figure]) -> None:
    assert {(f.unit, f.at_least) for f in measured} == {("x", False), ("rounds/s", True), ("GB/s", True)}


def test_a_gpu_is_measured_with_large_shapes_too() -> None:
    assert shapes_for("cpu") == [figures.SMALL] and shapes_for("cuda:1") == [figures.SMALL, figures.LARGE]


def test_compared_calls_are_made_in_turn_after_one_call_each() -> None:
    made: list[str] = []

    def timer(call: Any) -> float:
        call()
        return {"a": 1.0, "b": 5.0}[made[-1]]

    calls = {name: (lambda name=name: made.append(name)) for name in "ab"}  # type: ignore[misc]
    assert interleaved(calls, 3, timer) == {"a": 1.0, "b": 5.0}
    assert made == ["a", "b"] * 4


def test_no_further_turn_begins_after_the_limit_but_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(len(made)))

    def timer(call: Any) -> float:
        call()
        return 1.0

    calls = {name: (lambda name=name: made.append(name)) for name in "ab"}  # type: ignore[misc]
    interleaved(calls, 5, timer, limit_s=5.0)
    assert made == ["a", "b"] * 3  # a warm-up and two turns; then 6 seconds have passed
    made.clear()
    interleaved(calls, 5, timer, limit_s=0.0)
    assert made == ["a", "b"] * 2


def test_a_call_on_a_device_is_timed_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "synchronise", lambda device: events.append(f"wait for {device}"))
    timing.timer_of("cuda:1")(lambda: events.append("call"))
    one, five = ["wait for cuda:1", "call", "wait for cuda:1"], ["call"] * 5
    assert events == [*one, "wait for cuda:1", *five, "wait for cuda:1"]
    assert timing.timer_of("cpu") is timing.seconds


def test_the_machines_that_come_with_the_package_are_named_and_dated() -> None:
    ours = machines.load()
    assert {one.device for one in ours} >= {"cpu"} and all(one.name and one.figures for one in ours)
    assert all(len(one.date) == 10 and one.about["torch"] for one in ours)


def test_the_machines_of_the_package_have_no_figures_that_are_not_measured_any_more(measured: list[Figure]) -> None:
    """A figure that is renamed must be measured again: benchmarks/machine.py."""

    def kinds(names: Iterable[str]) -> set[str]:
        """The names without the shapes, which tests make smaller."""
        return {re.sub(r"[\d.]+ M ", "", name) for name in names}

    for one in machines.load():
        assert kinds(one.figures) <= kinds(f.name for f in measured)


def test_a_machine_is_measured_again_in_its_place_or_added() -> None:
    a, b = Machine("a", "2026-01-01", "cpu", {"x": 1.0}), Machine("b", "2026-01-01", "cuda", {"x": 2.0})
    again, new = Machine("a", "2026-02-02", "cpu", {"x": 3.0}), Machine("c", "2026-02-02", "cpu", {})
    assert replaced([a, b], again) == [again, b] and replaced([a, b], new) == [a, b, new]


def test_a_file_gives_back_the_machines_that_were_written(tmp_path: Path) -> None:
    mine = this_machine("cpu", [Figure("speed", 1234.5678, "x"), Figure("failed", None, "x")])
    assert mine.figures == {"speed": 1235.0} and mine.name.endswith("cores") and mine.about["cpu"]
    path = tmp_path / "machines.json"
    path.write_text(machines.text_of([mine]))
    assert machines.load(path) == [mine]


def test_the_command_prints_this_machine_beside_ours_or_as_json(
    monkeypatch: pytest.MonkeyPatch, measured: list[Figure]
) -> None:
    ours = Machine("Deep Thought", "2001-05-11", "cpu", {measured[0].name: 42.125})
    monkeypatch.setattr(machines, "load", lambda: [ours])
    monkeypatch.setattr(figures, "measure", lambda device, shapes: iter(measured))
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 0, result.output
    assert "Deep Thought" in result.output and "2001-05-11" in result.output and "this machine" in result.output
    first = next(line for line in result.output.splitlines() if measured[0].name in line)
    assert "42.1" in first
    last = next(line for line in result.output.splitlines() if measured[-1].name in line)
    assert "–" in last  # a figure that the other machine does not have
    (written,) = json.loads(CliRunner().invoke(app, ["bench", "--json"]).stdout)["machines"]
    assert written["figures"].keys() == {f.name for f in measured} and written["device"] == "cpu"


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "--device", "cuda"])
    assert result.exit_code != 0 and "CUDA" in str(result.exception)
