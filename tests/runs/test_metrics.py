"""One schema of metrics: what is declared or measured in one place reaches every file and page."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from own_task_home import summary_of, write_config
from own_tasks import Pictures

import cyber0
from cyber0.config.files import load
from cyber0.errors import ModelError
from cyber0.federation.simulation import Federation
from cyber0.report import page
from cyber0.report.contents import contents
from cyber0.report.folder import read
from cyber0.report.tensorboard import Events
from cyber0.report.watch import LivePage, LiveServer
from cyber0.runs.folder import MetricsFile, read_metrics
from cyber0.runs.run import Run
from cyber0.tasks.metrics import COLUMNS, RESERVED, Column, MetricsRow, best_round

SETTINGS = {"rounds": 2, "evaluate_every": 1, "federation": {"attack": "none"}, "method": {"k": 2, "batch_size": 8}}


class Spread(Pictures):
    """A task of a user's own whose metric nothing else in the package knows."""

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {**super().metrics(outputs, targets), "spread of outputs": outputs.std()}


class Seen(SimpleNamespace):
    """Where the figures of a run ended up."""

    header: list[str]
    report: dict[str, Any]
    live: dict[str, Any]
    tags: set[str]
    told: list[dict[str, float]]
    summary: dict[str, Any]


def run_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Run a few rounds and return what the files, the pages and TensorBoard show of them."""
    tags: set[str] = set()
    told: list[dict[str, float]] = []
    writer = SimpleNamespace(add_scalar=lambda tag, value, step: tags.add(tag), close=lambda: None)
    stand_in = SimpleNamespace(SummaryWriter=lambda _: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr("cyber0.report.tensorboard.importlib", SimpleNamespace(util=SimpleNamespace(find_spec=id)))
    for name in ("accuracy_picture", "suspects_picture", "partition_picture"):
        monkeypatch.setattr(f"cyber0.report.plots.{name}", lambda *_, **__: None)
    with LiveServer() as server:
        pages: list[dict[str, Any]] = []

        def evaluated(round: int, metrics: dict[str, float]) -> None:
            told.append(metrics)
            pages.append(json.loads(server.data()))
            server._due = 0.0

        callbacks = [LivePage(server), Events(), SimpleNamespace(on_evaluate=evaluated)]
        summary = cyber0.run(SETTINGS, task=Spread(), out=folder, callbacks=callbacks, export=False)
        server._last_request = -60.0  # nobody is waited for
    with (folder / "metrics.csv").open() as file:
        header = list(next(csv.reader(file)))
    return Seen(header=header, report=contents([read(folder)]), live=pages[-1], tags=tags, told=told, summary=summary)


def test_a_metric_that_a_task_returns_appears_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "spread of outputs"
    seen = run_and_read(tmp_path / "run", monkeypatch)
    assert name in seen.header and name in seen.summary["metrics"] and f"test/{name}" in seen.tags
    assert all(math.isfinite(metrics[name]) for metrics in seen.told) and len(seen.told) == 3
    for data in (seen.report, seen.live):
        (run,) = data["runs"]
        assert {"title": f"{name} over rounds", "x": "round", "y": name, "unit": "", "of_set": True} in data["charts"]
        assert run["curve"]["columns"][name] == pytest.approx([metrics[name] for metrics in seen.told], rel=1e-5)
        assert f"test {name}" in [figure["label"] for figure in run["figures"]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run in which every built-in column has a value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "train_loss", lambda self: 0.5)
        return run_and_read(tmp_path_factory.mktemp("all") / "run", patch)


@pytest.mark.parametrize("column", COLUMNS, ids=[column.name for column in COLUMNS])
def test_a_built_in_column_appears_wherever_the_schema_says(column: Column, seen: Seen) -> None:
    assert column.name in seen.header
    assert not column.tag or column.tag.format(set="test") in seen.tags
    assert column.tag or column.name == "round"  # which is TensorBoard's own step
    assert all((column.name in metrics) == column.measured for metrics in seen.told)
    for data in (seen.report, seen.live):
        charts = [chart["x"] for chart in data["charts"] if chart["y"] == column.name]
        assert charts == list(column.axes)
        assert not charts or len(data["runs"][0]["curve"]["columns"][column.name]) == 3


@pytest.mark.parametrize("name", RESERVED)
def test_a_task_may_not_call_a_metric_as_a_built_in_column(name: str, tmp_path: Path) -> None:
    task = Pictures()
    task.metrics = lambda outputs, targets: {name: 1.0}  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=f"can't use '{name}' as the name of a metric; choose another"):
        cyber0.run(SETTINGS, task=task, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def row(round: int, **more: Any) -> MetricsRow:
    return MetricsRow(round, 0.5, 1.0, 8, 4, round, 0.25, **more)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = [row(0), row(1, train_loss=0.1), row(2, metrics={"f1": 0.3}),
            MetricsRow(3, 0.25, math.inf, 8, 4, None, 0.25)]  # fmt: skip
    MetricsFile(path).rewrite(rows)
    assert read_metrics(path) == (rows, "")


def test_a_row_is_appended_under_the_columns_that_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path, ("round", "loss")).append(row(0, metrics={"f1": 0.3}))
    MetricsFile(path).append(row(1, metrics={"other": 0.1, "f1": 0.4}))
    assert path.read_text().splitlines() == ["round,loss,f1", "0,1.0,0.3", "1,1.0,0.4"]


def test_a_file_cut_off_at_any_byte_gives_whole_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = [row(t, metrics={"f1": 0.125 + t}) for t in range(3)]
    MetricsFile(path).rewrite(rows)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        found, fault = read_metrics(path)
        assert found == rows[: len(found)] and (fault or data[:length].endswith(b"\n"))


def test_metrics_reach_the_files_and_the_best_round_follows_the_tasks_word(home: Path) -> None:
    run = Run.start(load(write_config(home, "my_task.py:Line"), ["method.lr=0.05"]), home / "out")
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
