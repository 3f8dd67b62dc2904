"""The engine of a study: workers that fail, die or are interrupted, and results that survive it."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import quick_worker
from studies import GRID, cells_of, plan_of, rows_of

from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.study import Cell, Result, Study, StudyProgress
from cyber0.study import engine as engine_module
from cyber0.study.worker_pool import StudyError


def without_seconds(path: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows_of(path)]


@pytest.mark.slow
def test_results_come_in_the_order_of_the_cells_whatever_the_order_of_the_runs(quick: Path) -> None:
    cells = plan_of(GRID).cells
    one, three = (Study(cells, Path(f"w{n}"), n).run() for n in (1, 3))
    assert [r.cell for r in one] == [r.cell for r in three] == cells
    for r in three:
        assert r.status == "done" and r.accuracy == quick_worker.accuracy_of(r.cell.config)
        assert r.figures["best_accuracy"] == r.accuracy + 0.25
        assert (Path("w3") / r.folder / "summary.json").exists()
    assert without_seconds(Path("w1/results.csv")) == without_seconds(Path("w3/results.csv"))
    row = rows_of(Path("w3/results.csv"))[3]
    assert (row["aggregation.rule"], row["federation.attack"], row["seed"], row["status"]) == (
        "mean",
        "alie",
        "1",
        "done",
    )
    assert (row["uplink_bytes"], row["downlink_bytes"], row["rounds"], row["model_digest"]) == (
        "8",
        "16",
        "2",
        "ab" * 32,
    )


@pytest.mark.slow
def test_what_is_finished_is_not_run_again_and_what_is_new_is(quick: Path) -> None:
    cells = plan_of(GRID).cells
    Study(cells[:5], Path("out"), 2).run()
    study = Study(cells, Path("out"), 2)
    assert study.finished() == 5
    study.run()
    assert Counter(quick.read_text().split("\n")).most_common(1)[0][1] == 1 and len(quick.read_text().split("\n")) == 13
    before = (Path("out/results.csv")).read_bytes()
    Study(cells, Path("out"), 2).run()
    assert Path("out/results.csv").read_bytes() == before and len(quick.read_text().split("\n")) == 13


@pytest.mark.slow
def test_a_run_whose_files_are_not_whole_or_not_its_own_is_not_taken_for_finished(quick: Path) -> None:
    cells = cells_of(seeds=2)
    folders = [Path("out") / r.folder for r in Study(cells, Path("out"), 1).run()]
    (folders[0] / "summary.json").write_text("{")
    (folders[1] / "config.toml").write_text((folders[2] / "config.toml").read_text())
    assert Study(cells, Path("out"), 1).finished() == 2


@pytest.mark.slow
def test_runs_are_found_again_under_other_labels_and_equal_cells_are_one_run(quick: Path) -> None:
    first = cells_of(rules=("mean",))
    Study(first, Path("out"), 1).run()
    renamed = [Cell({"name": label}, cell.config) for label in ("a", "b") for cell in first]
    results = Study(renamed, Path("out"), 1).run()
    assert [r.status for r in results] == ["done"] * 4 and len(quick.read_text().splitlines()) == 2
    assert len(list(Path("out/runs").iterdir())) == 2


@pytest.mark.slow
def test_a_cell_that_fails_is_recorded_and_the_others_go_on_and_it_is_tried_again(quick: Path) -> None:
    cells = [*cells_of(rules=("mean",)), *cells_of(f"method.lr={quick_worker.FAILS}", rules=("krum",), seeds=1)]
    for _ in range(2):
        results = Study(cells, Path("out"), 2).run()
        assert [r.status for r in results] == ["done", "done", "failed"]
        assert results[2].error == "no such luck" and results[2].accuracy is None
        assert rows_of(Path("out/results.csv"))[2]["error"] == "no such luck"
    assert sorted(quick.read_text().split()).count("krum") == 2


@pytest.mark.slow
def test_the_death_of_a_worker_costs_nothing_and_two_deaths_fail_the_cell(quick: Path) -> None:
    cells = [*cells_of(f"method.lr={quick_worker.DIES_ONCE}", rules=("mean",)), *cells_of(rules=("krum",)),
             *cells_of(f"method.lr={quick_worker.DIES}", rules=("median",), seeds=1)]  # fmt: skip
    results = Study(cells, Path("out"), 2).run()
    assert [r.status for r in results] == ["done"] * 4 + ["failed"]
    assert "died twice (signal 9)" in results[4].error


@pytest.mark.slow
def test_a_worker_that_can_not_start_ends_the_study(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(StudyError, match=r"could not start \(exit code 1\).*workers.log says why"):
        Study(cells_of(), Path("out"), 2).run()
    assert "no torch here" in Path("out/workers.log").read_text()
    assert [row["status"] for row in rows_of(Path("out/results.csv"))] == ["open"] * 4


@pytest.mark.slow
def test_an_interrupt_stops_the_workers_and_loses_nothing(quick: Path) -> None:
    cells = [
        *cells_of(rules=("mean",), seeds=3),
        *cells_of(f"method.lr={quick_worker.HANGS}", rules=("krum",), seeds=1),
    ]
    workers: list[int] = []

    def interrupt(progress: StudyProgress) -> None:
        if progress.done == 3 and progress.running:
            found = subprocess.run(
                ["pgrep", "-P", str(os.getpid()), "-f", "quick_worker"], capture_output=True, text=True
            )
            workers.extend(map(int, found.stdout.split()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Study(cells, Path("out"), 2).run(interrupt)
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert [row["status"] for row in rows_of(Path("out/results.csv"))] == ["done"] * 3 + ["open"]


@pytest.mark.slow
def test_two_studies_do_not_share_a_folder(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SECONDS_FOR_LOCK", 0.0)
    refusals: list[str] = []

    def second(progress: StudyProgress) -> None:
        if not refusals:
            with pytest.raises(ConfigError, match="in use by another process") as error:
                Study(cells_of(), Path("out"), 1, b"second").run()
            refusals.append(str(error.value))

    Study(cells_of(), Path("out"), 1, b"first").run(second)
    assert refusals and Path("out/study.toml").read_bytes() == b"first"
    assert Study(cells_of(), Path("out"), 1).run()


@pytest.mark.slow
def test_progress_counts_up_to_all_cells(quick: Path) -> None:
    seen: list[StudyProgress] = []
    Study(cells_of()[:1], Path("out"), 2).run()
    Study(cells_of(), Path("out"), 2).run(seen.append)
    assert (seen[0].done, seen[0].found, seen[-1].done, seen[-1].cells) == (1, 1, 4, 4)
    assert [p.ended.cell.label for p in seen if p.ended] and sum(p.ended is not None for p in seen) == 3


@pytest.mark.parametrize(
    ("cells", "workers", "message"),
    [([], 1, "nothing to run"), (cells_of(), 0, "workers = 0"),
     ([Cell({"a": 1}, Config()), Cell({"b": 1}, Config(seed=1))], 1, "same axes")],
)  # fmt: skip
def test_impossible_studies_are_refused(cells: list[Cell], workers: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Study(cells, tmp_path / "out", workers)


@pytest.mark.slow
def test_cells_that_follow_from_results_run_in_the_same_call(quick: Path) -> None:
    first, *later = cells_of(rules=("mean",), seeds=4)

    def more(results: list[Result]) -> list[Cell]:
        done = sum(result.status == "done" for result in results)
        return later[:done]  # one more after each

    results = Study([first], Path("out"), 2).run(more=more)
    assert [(r.cell, r.status) for r in results] == [(cell, "done") for cell in (first, *later)]
    again = Study([first], Path("out"), 2)
    assert len(again.run(more=more)) == 4 and len(quick.read_text().split()) == 4 * 3  # nothing ran twice


@pytest.mark.slow
def test_workers_that_wait_for_more_cells_stop_when_the_last_one_fails(quick: Path) -> None:
    cells = [*cells_of(rules=("mean",), seeds=1), *cells_of(f"method.lr={quick_worker.DIES}", rules=("krum",), seeds=1)]
    results = Study(cells, Path("out"), 2).run(more=lambda results: [])
    assert [result.status for result in results] == ["done", "failed"]


@pytest.mark.slow
def test_a_study_that_is_out_of_time_leaves_its_cells_open(quick: Path) -> None:
    cells = cells_of(f"method.lr={quick_worker.HANGS}", rules=("mean",), seeds=2)
    assert [result.status for result in Study(cells, Path("out"), 1).run(seconds=0.0)] == ["open", "open"]
    assert [result.status for result in Study(cells, Path("out"), 1).run(seconds=0.5)] == ["open", "open"]
    assert rows_of(Path("out/results.csv"))[0]["status"] == "open"
