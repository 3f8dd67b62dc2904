"""A study: the grid, the verdicts, and an engine that bears failures, deaths and interrupts."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import quick_worker
from hypothesis import given
from hypothesis import strategies as st
from synthetic import one_thread  # noqa: F401
from synthetic import own_config as blob_config

from cyber0 import __version__
from cyber0.cli import main as cli
from cyber0.config.schema import Config, load, to_dict
from cyber0.errors import ConfigError
from cyber0.report.heatmap import Panel, heatmap_figure
from cyber0.runs import environment
from cyber0.runs.run import Run
from cyber0.study import Cell, Layout, Result, Score, Study, StudyProgress, identity, judge, read_plan, scores, worker
from cyber0.study import engine as engine_module
from cyber0.study import worker_pool as floor_module
from cyber0.study.cells import write_csv
from cyber0.study.display import notes
from cyber0.study.judge import judge_overall
from cyber0.study.report import markdown, write_report
from cyber0.study.worker_pool import StudyError

GRID = """
rounds = 2
[study]
seeds = 2
[study.grid]
aggregation.rule = ["mean", "krum"]
federation.attack = ["none", "alie", "ipm"]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let workers play nothing, and return the file in which they note whom they would have played."""
    monkeypatch.setattr(floor_module, "WORKER", (sys.executable, quick_worker.__file__))
    monkeypatch.setenv("PLAYED", str(here / "played"))
    (here / "played").touch()
    return here / "played"


def plan_of(text: str) -> Any:
    Path("s.toml").write_text(text)
    return read_plan("s.toml")


def cells_of(*overrides: str, rules: tuple[str, ...] = ("mean", "krum"), seeds: int = 2) -> list[Cell]:
    return [
        Cell({"rule": rule}, Config().with_overrides([*overrides, f"aggregation.rule={rule}", f"seed={seed}"]))
        for rule in rules
        for seed in range(seeds)
    ]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The grid.


def test_a_grid_is_every_combination_with_the_last_axis_and_then_the_seeds_fastest(here: Path) -> None:
    plan = plan_of(GRID)
    found = [(*cell.axes.values(), cell.config.seed) for cell in plan.cells]
    assert found == [(r, a, s) for r in ("mean", "krum") for a in ("none", "alie", "ipm") for s in (0, 1)]
    for cell in plan.cells:
        assert cell.config.aggregation.rule == cell.axes["aggregation.rule"]
        assert cell.config.federation.attack == cell.axes["federation.attack"]
        assert cell.config.rounds == 2
    assert plan.name == "s" and plan.layout == Layout(("aggregation.rule",), ("federation.attack",), ())
    assert len({cell.folder_name for cell in plan.cells}) == 12


def test_quoted_dotted_and_nested_keys_mean_the_same(here: Path) -> None:
    spellings = ('"federation.clients" = [6, 8]', "federation.clients = [6, 8]", "federation = { clients = [6, 8] }")
    plans = [plan_of(f"[study.grid]\n{spelling}\n") for spelling in spellings]
    assert plans[0].cells == plans[1].cells == plans[2].cells
    assert [cell.config.federation.clients for cell in plans[0].cells] == [6, 8]


def test_seeds_are_a_list_or_so_many_from_the_files_own_seed(here: Path) -> None:
    grid = "[study.grid]\nrounds = [1]\n"
    assert plan_of(f"seed = 7\n{grid}").seeds == [7]
    assert plan_of(f"seed = 7\n[study]\nseeds = 3\n{grid}").seeds == [7, 8, 9]
    assert plan_of(f"[study]\nseeds = [5, 2]\n{grid}").seeds == [5, 2]


def test_a_share_of_liars_sets_their_number_and_beta(here: Path) -> None:
    plan = plan_of("[study.grid]\nbyzantine_share = [0.125, 0.29]\nfederation.clients = [40, 100]\n")
    found = [(c.config.federation.byzantine, c.config.aggregation.beta) for c in plan.cells]
    assert found == [(5, 0.125), (12, 0.125), (11, 0.29), (29, 0.29)]
    assert plan.layout.circumstances == ("byzantine_share", "federation.clients")


@pytest.mark.parametrize("beta", ["[aggregation]\nbeta = 0.4\n", "[study.grid.aggregation]\nbeta = [0.4]\n"])
def test_a_beta_that_is_set_stays_beside_a_share_of_liars(beta: str, here: Path) -> None:
    plan = plan_of(f"{beta}[study.grid]\nbyzantine_share = [0.25]\n")
    assert [(c.config.federation.byzantine, c.config.aggregation.beta) for c in plan.cells] == [(3, 0.4)]


def test_values_that_belong_together_are_one_axis_and_one_that_attacks_is_known_as_such(here: Path) -> None:
    plan = plan_of("""
    [study.grid]
    defence = [{ label = "own", aggregation.rule = "krum", "method.k" = 8 }, { aggregation = { rule = "mean" } }]
    foe = [{ label = "loud", federation.attack = "gaussian" }, { federation.attack = "alie", federation.byzantine = 2 }]
    """)
    assert [tuple(cell.axes.values()) for cell in plan.cells] == [
        ("own", "loud"), ("own", "alie, 2"), ("mean", "loud"), ("mean", "alie, 2")]  # fmt: skip
    assert [(c.config.method.k, c.config.federation.byzantine) for c in plan.cells] == [
        (8, 3),
        (8, 2),
        (64, 3),
        (64, 2),
    ]
    assert plan.layout == Layout(("defence",), ("foe",), ())


def test_skip_leaves_out_what_meets_all_of_a_condition(here: Path) -> None:
    skip = 'skip = [{ aggregation.rule = "mean", "federation.attack" = ["alie", "ipm"] }]'
    plan = plan_of(GRID.replace("seeds = 2", f"seeds = 2\n{skip}"))
    assert [tuple(c.axes.values()) for c in plan.cells[::2]] == [
        ("mean", "none"), ("krum", "none"), ("krum", "alie"), ("krum", "ipm")]  # fmt: skip
    assert plan.skipped == 2


IMPOSSIBLE = (
    "[study]\n{}\n[study.grid]\nfederation.clients = [5, 12]\naggregation = {{rule = ['krum'], beta = [0.4]}}\n"
)


def test_an_impossible_combination_is_refused_by_name_or_left_out(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 combination of the grid is impossible:\s+federation.clients = 5, .*"
                                          r"krum.*needs 7 reports(.|\n)*skip_impossible"):  # fmt: skip
        plan_of(IMPOSSIBLE.format(""))
    plan = plan_of(IMPOSSIBLE.format("skip_impossible = true"))
    assert [cell.config.federation.clients for cell in plan.cells] == [12]
    assert len(plan.impossible) == 1 and "needs 7 reports" in plan.impossible[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 3", r"has no \[study\] table"),
        ("study = 3", r"has no \[study\] table"),
        ("[study]", r"\[study.grid\] says what varies"),
        ("[study]\nsed = 3\n[study.grid]\nrounds = [1]", "unknown key study.sed; did you mean 'seeds'"),
        ("[study]\nrounds = 3\n[study.grid]\nrounds = [1]", r"unknown key study.rounds; settings .* stand outside"),
        ("[study]\nseeds = 0\n[study.grid]\nrounds = [1]", "study.seeds = 0 must be how many"),
        ("[study]\nseeds = [1, 1]\n[study.grid]\nrounds = [1]", "has a seed twice"),
        ("[study]\nseeds = [-1]\n[study.grid]\nrounds = [1]", "seed = -1 is impossible"),
        ("[study]\nname = 'a/b'\n[study.grid]\nrounds = [1]", "a name that a folder can have"),
        ("[study]\nskip_impossible = 1\n[study.grid]\nrounds = [1]", "must be true or false"),
        ("rouns = 1\n[study.grid]\nrounds = [1]", "unknown key 'rouns'.*did you mean 'rounds'"),
        ("[study.grid]\nattack = ['alie']", "did you mean 'federation.attack'"),
        ("[study.grid]\nfederation.attack = ['alei']", "'alei' is not a choice; did you mean 'alie'"),
        ("[study.grid]\nfederation.attack = 'alie'", "must be a list"),
        ("[study.grid]\nfederation.attack = []", "is empty"),
        ("[study.grid]\nrounds = [1, 1]", "has 1 twice"),
        ("[study.grid]\nrounds = [[1]]", "must be a whole number"),
        ("[study.grid]\nseed = [1]", "set study.seeds"),
        ("[study.grid]\nbyzantine_shares = [0.1]", "did you mean 'byzantine_share'"),
        ("[study.grid]\nbyzantine_share = [1.0]", "must be a share of the clients"),
        ("[study.grid]\nbyzantine_share = [0.6]", "aggregation.beta = 0.6 is impossible"),
        ("[study.grid]\nbyzantine_share = [0.1]\nfederation.byzantine = [1]", "both set federation.byzantine"),
        ("[study.grid]\nx = [{ k = 3 }]", "did you mean 'method.k'"),
        ("[study.grid]\nx = [{ method.k = 3 }, 5]", "mixes tables with other values"),
        ("[study.grid]\nx = [{ label = 5, method.k = 3 }]", "label = 5 must be a name"),
        ("[study.grid]\nx = [{ seed = 3 }]", "set study.seeds"),
        ("[study.grid]\nx = [{ method.k = 3, 'method.k' = 4 }]", "method.k is set twice"),
        ("[study.grid]\nstatus = [{ rounds = 3 }]", "'status' is taken"),
        ("[study.grid.foo]\nrounds = [3]", "study.grid.foo is a table"),
        ("[study]\nskip = 3\n[study.grid]\nrounds = [1]", "must be a list of tables"),
        ("[study]\nskip = [{rounds = 2}]\n[study.grid]\nrounds = [1]", "is not in the grid; its values are 1"),
        ("[study]\nskip = [{rounds = {a = 2}}]\n[study.grid]\nrounds = [1]", "must be a value or a list"),
        ("[study]\nskip = [{seed = 2}]\n[study.grid]\nrounds = [1]", "no combination has"),
        ("[study]\nskip = [{rounds = 1}]\n[study.grid]\nrounds = [1]", "no combination to run: 1 are skipped"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_a_remedy(text: str, message: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(text)


def test_the_example_is_what_its_header_says() -> None:
    example = Path(__file__).parents[2] / "examples/study.toml"
    plan = read_plan(example)
    assert len(plan.cells) == 120 and plan.name == "rules-and-attacks"
    with pytest.raises(ConfigError, match="run it by: cyber0 study"):
        load(example)


# The verdicts.


def result(rule: str, attack: str, seed: int, accuracy: float | None, **axes: Any) -> Result:
    config = Config().with_overrides([f"aggregation.rule={rule}", f"federation.attack={attack}", f"seed={seed}"])
    cell = Cell({"rule": rule, "attack": attack, **axes}, config)
    if accuracy is None:
        return Result(cell, "failed", "f", {}, "lost")
    return Result(cell, "done", "f", {"final_accuracy": accuracy})


HAND_MADE = [
    result("mean", "none", 0, 0.90), result("mean", "none", 1, 0.92),
    result("mean", "alie", 0, 0.80), result("mean", "alie", 1, 0.82),
    result("mean", "ipm", 0, 0.10), result("mean", "ipm", 1, 0.14),
    result("krum", "none", 0, 0.30), result("krum", "none", 1, 0.32),
    result("krum", "alie", 0, 0.60), result("krum", "alie", 1, 0.70),
    result("krum", "ipm", 0, 0.90), result("krum", "ipm", 1, 0.20),
]  # fmt: skip
LAYOUT = Layout(("rule",), ("attack",))


def test_a_rule_is_judged_by_its_worst_attack_and_no_attack_is_none() -> None:
    verdicts = judge(scores(HAND_MADE, LAYOUT))
    assert [(v.defence, v.worst.attack if v.worst else "") for v in verdicts] == [("krum", "ipm"), ("mean", "ipm")]
    krum, mean = verdicts
    assert krum.worst and krum.worst.mean == pytest.approx(0.55) and krum.worst.deviation == pytest.approx(0.7 / 2**0.5)
    assert mean.worst and mean.worst.mean == pytest.approx(0.12)
    assert krum.unattacked and krum.unattacked.mean == pytest.approx(0.31)
    assert krum.complete and mean.complete


def test_where_nobody_lies_the_least_accuracy_counts() -> None:
    verdict = judge(scores([result("mean", "none", 0, 0.9)], LAYOUT))[0]
    assert verdict.worst and verdict.worst.attack == "none" and verdict.worst.deviation is None


def test_a_failed_run_is_not_counted_and_makes_a_verdict_incomplete() -> None:
    some = [result("mean", "alie", 0, 0.5), result("mean", "alie", 1, None), result("krum", "alie", 0, None),
            result("krum", "none", 0, 0.9), result("mda", "alie", 0, 0.1)]  # fmt: skip
    mda, mean, krum = judge(scores(some, LAYOUT))
    assert mda.defence == "mda" and mda.complete
    assert mean.worst and mean.worst.mean == 0.5 and not mean.complete
    assert krum.defence == "krum" and krum.worst is None and not krum.complete


def test_circumstances_are_judged_apart_and_together() -> None:
    some = [result("mean", "alie", 0, 0.5, m=1), result("mean", "alie", 0, 0.25, m=2),
            result("krum", "alie", 0, 0.4, m=1), result("krum", "alie", 0, 0.3, m=2)]  # fmt: skip
    table = scores(some, Layout(("rule",), ("attack",), ("m",)))
    assert [(v.circumstances, v.defence) for v in judge(table)] == [
        ("m = 1", "mean"), ("m = 1", "krum"), ("m = 2", "krum"), ("m = 2", "mean")]  # fmt: skip
    assert [(v.defence, v.worst.circumstances if v.worst else "") for v in judge_overall(table)] == [
        ("krum", "m = 2"), ("mean", "m = 2")]  # fmt: skip


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.randoms())
def test_the_worst_does_not_depend_on_the_order_of_the_attacks(means: list[float], dice: Any) -> None:
    table = [Score("mean", f"a{i}", "", (mean,), 1, 1, False) for i, mean in enumerate(means)]
    dice.shuffle(table)
    worst = judge(table)[0].worst
    assert worst is not None and worst.mean == min(means)


def test_the_page_and_the_tables_say_what_the_figures_say(tmp_path: Path) -> None:
    files = write_report(HAND_MADE, LAYOUT, tmp_path, "by hand")
    page = (tmp_path / "summary.md").read_text()
    assert "| 1 | krum | ipm | 55.00 ± 49.50 | 31.00 ± 1.41 |" in page
    assert "| 2 | mean | ipm | 12.00 ± 2.83 | 91.00 ± 1.41 |" in page
    assert "| mean | 91.00 ± 1.41 | 81.00 ± 1.41 | **12.00 ± 2.83** |" in page
    rows = rows_of(tmp_path / "summary.csv")
    assert [(r["rule"], r["attack"]) for r in rows if r["worst_attack"] == "1"] == [("mean", "ipm"), ("krum", "ipm")]
    assert [float(r["mean_accuracy"]) for r in rows] == pytest.approx([0.91, 0.81, 0.12, 0.31, 0.65, 0.55])
    assert {file.name for file in files} == {"summary.csv", "summary.md", "heatmap.png", "heatmap.svg"}
    assert (tmp_path / "plots/heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plots/heatmap.svg").read_text()
    again = write_report(HAND_MADE, LAYOUT, tmp_path / "again", "by hand")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]


@pytest.mark.parametrize(
    ("tasks", "called"),
    [(["mnist"], "Final test accuracy"), (["sst2"], "Final dev accuracy"), (["mnist", "sst2"], "Final accuracy")],
)
def test_the_page_names_the_set_if_all_runs_are_evaluated_on_the_same(tasks: list[str], called: str) -> None:
    some = []
    for task in tasks:
        found = result("median", "none", 0, 0.9, task=task)
        config = found.cell.config.with_overrides([f"task.name={task}", *(["task.model=m"] if task == "sst2" else [])])
        some.append(dataclasses.replace(found, cell=dataclasses.replace(found.cell, config=config)))
    assert f"{called} in percent" in markdown(some, scores(some, LAYOUT), "sets")


@pytest.mark.parametrize(("columns", "panels"), [(1, 1), (2, 1), (3, 3), (9, 3)])
@pytest.mark.parametrize("name", ["study", "a name that goes on and on " * 4, "x" * 150])
def test_nothing_that_a_heat_map_says_is_cut_off(columns: int, panels: int, name: str) -> None:
    from matplotlib.text import Text

    def panel(number: int) -> Panel:
        attacks = ["none", "full_knowledge", "fang_trimmed_mean", *"abcdef"][:columns]
        return Panel(f"partition = dirichlet, clients = {number}, {name}", ["mean", "geometric_median"], attacks,
                     [[0.5] * columns, [None] * columns], [[0.01] * columns, [None] * columns], [0, None])  # fmt: skip

    title = f"{name}: final test accuracy (%), mean ± sample deviation over 3 seeds"
    figure = heatmap_figure([panel(number) for number in range(panels)], title)
    figure.canvas.draw()
    shown = {text.get_text(): text.get_window_extent() for text in figure.findobj(Text) if text.get_text().strip()}
    assert "".join(title.split()) in {"".join(text.split()) for text in shown}
    assert "not run, or failed" in shown
    for text, box in shown.items():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text


@pytest.mark.parametrize(("columns", "boxes"), [(1, 0), (2, 1)])
def test_the_worst_attack_is_boxed_where_there_is_more_than_one(columns: int, boxes: int) -> None:
    from matplotlib.patches import Rectangle

    means: list[list[float | None]] = [[0.5, 0.6][:columns]]
    panel = Panel("", ["mean"], ["none", "alie"][:columns], means, [[None] * columns], [0])
    figure = heatmap_figure([panel], "one attack or two")
    frames = [patch for axes in figure.axes for patch in axes.findobj(Rectangle) if patch.get_linewidth() == 2.4]
    assert len(frames) == boxes
    said = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert any("hurts the rule most" in text for text in said) == bool(boxes)


def test_the_page_names_what_failed() -> None:
    some = [result("mean", "alie", 0, 0.5), result("mean", "alie", 1, None)]
    page = markdown(some, scores(some, LAYOUT), "half")
    assert "1 done, 1 failed" in page and "- mean, alie, seed 1: lost" in page
    assert "| – | mean | alie (runs are missing) | 50.00 (incomplete) | – |" in page


# The engine, with workers that play nothing.


def without_seconds(path: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows_of(path)]


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


def test_what_is_finished_is_not_played_again_and_what_is_new_is(quick: Path) -> None:
    cells = plan_of(GRID).cells
    Study(cells[:5], Path("out"), 2).run()
    study = Study(cells, Path("out"), 2)
    assert study.finished() == 5
    study.run()
    assert Counter(quick.read_text().split("\n")).most_common(1)[0][1] == 1 and len(quick.read_text().split("\n")) == 13
    before = (Path("out/results.csv")).read_bytes()
    Study(cells, Path("out"), 2).run()
    assert Path("out/results.csv").read_bytes() == before and len(quick.read_text().split("\n")) == 13


def test_a_run_whose_files_are_not_whole_or_not_its_own_is_not_taken_for_finished(quick: Path) -> None:
    cells = cells_of(seeds=2)
    folders = [Path("out") / r.folder for r in Study(cells, Path("out"), 1).run()]
    (folders[0] / "summary.json").write_text("{")
    (folders[1] / "config.toml").write_text((folders[2] / "config.toml").read_text())
    assert Study(cells, Path("out"), 1).finished() == 2


def test_runs_are_found_again_under_other_labels_and_equal_cells_are_one_run(quick: Path) -> None:
    first = cells_of(rules=("mean",))
    Study(first, Path("out"), 1).run()
    renamed = [Cell({"name": label}, cell.config) for label in ("a", "b") for cell in first]
    results = Study(renamed, Path("out"), 1).run()
    assert [r.status for r in results] == ["done"] * 4 and len(quick.read_text().splitlines()) == 2
    assert len(list(Path("out/runs").iterdir())) == 2


# Which run is which.


def text_cells(place: Path, *, data: str = "", seeds: int = 2) -> list[Cell]:
    given = ["task.name=sst2", f"task.model={place}", f"task.data={data}"]
    return [Cell({"model": "m"}, Config().with_overrides([*given, f"seed={seed}"])) for seed in range(seeds)]


def rename_by_path(out: Path) -> None:
    """Name the folders of runs as an earlier version did: by the paths of their models."""
    for folder in list((out / "runs").iterdir()):
        key = identity.digest_by_path(load(folder / "config.toml"))
        folder.rename(folder.with_name(f"{folder.name.rpartition('-')[0]}-{key}"))


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_moved_model_is_the_same_model_and_a_changed_one_is_not(kind: str, earlier: bool, quick: Path) -> None:
    Path("a").mkdir()
    place = Path("a/m.gguf").resolve()
    file = place if kind == "file" else place / "weights"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"weights" * 1000)
    data = Path("data").resolve()
    data.mkdir()
    (data / "train.tsv").write_text("text")
    Study(text_cells(place, data=str(data)), Path("out"), 1).run()
    if earlier:
        rename_by_path(Path("out"))
        assert Study(text_cells(place, data=str(data)), Path("out"), 1).finished() == 2
    Path("b/c").mkdir(parents=True)
    moved, moved_data = (path.rename(Path("b/c") / path.name).resolve() for path in (place, data))
    study = Study(text_cells(moved, data=str(moved_data)), Path("out"), 1)
    assert study.finished() == 2 and len(study.run()) == 2 and len(quick.read_text().splitlines()) == 2
    assert len(study.by_name) == (2 if earlier else 0)  # an earlier version kept nothing to compare it with
    assert len(notes(study, rerun=False)) == (1 if earlier else 0)
    if not earlier:
        (moved if kind == "file" else moved / "weights").write_bytes(b"Weights" * 1000)
        assert Study(text_cells(moved, data=str(moved_data)), Path("out"), 1).finished() == 0


def name_by_name_and_content(out: Path) -> None:
    """Name the folders of runs as an earlier version did: by the names of their models and data and their contents."""
    for folder in list((out / "runs").iterdir()):
        tables = to_dict(load(folder / "config.toml"))
        for key in ("model", "data"):
            path = Path(tables["task"][key])
            tables["task"][key] = f"{path.name}, {identity.content(str(path))}"
        digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:10]
        folder.rename(folder.with_name(f"{folder.name.rpartition('-')[0]}-{digest}"))


@pytest.mark.parametrize("earlier", [False, True])
def test_a_renamed_model_and_data_are_the_same_and_changed_ones_are_not(earlier: bool, quick: Path) -> None:
    Path("m.gguf").write_bytes(b"weights")
    Path("mn").mkdir()
    Path("mn/train.tsv").write_text("text")
    Study(text_cells(Path("m.gguf"), data="mn"), Path("out"), 1).run()
    if earlier:
        name_by_name_and_content(Path("out"))
        assert Study(text_cells(Path("m.gguf"), data="mn"), Path("out"), 1).finished() == 2
    Path("m.gguf").rename("n.gguf")
    Path("mn").rename("data")
    study = Study(text_cells(Path("n.gguf"), data="data"), Path("out"), 1)
    assert [r.status for r in study.run()] == ["done", "done"] and len(quick.read_text().splitlines()) == 2
    assert not study.by_name
    Path("data/train.tsv").write_text("Text")
    assert Study(text_cells(Path("n.gguf"), data="data"), Path("out"), 1).finished() == 0


def test_data_that_is_changed_in_place_is_other_data(quick: Path) -> None:
    Path("a/mn").mkdir(parents=True)
    Path("a/mn/train.tsv").write_text("text")
    Study(text_cells(Path("org/m"), data="a/mn"), Path("out"), 1).run()
    Path("a/mn/train.tsv").write_text("Text")
    assert Study(text_cells(Path("org/m"), data="a/mn"), Path("out"), 1).finished() == 0


@pytest.mark.parametrize("data", ["mn", "a/mn"])
def test_finished_rows_stay_when_the_data_is_gone_and_missing_runs_fail_alone(data: str, quick: Path) -> None:
    Path(data).mkdir(parents=True)
    Path(data, "train.tsv").write_text("text")
    Study(text_cells(Path("m"), data=data), Path("out"), 1).run()
    before = rows_of(Path("out/results.csv"))
    Path(data).rename("elsewhere")
    assert [r.status for r in Study(text_cells(Path("m"), data=data), Path("out"), 1).run()] == ["done", "done"]
    assert rows_of(Path("out/results.csv")) == before
    failing = Config().with_overrides(["task.name=sst2", f"task.data={data}", f"method.lr={quick_worker.FAILS}"])
    cells = [*text_cells(Path("m"), data=data), Cell({"model": "m"}, failing)]
    assert [r.status for r in Study(cells, Path("out"), 1).run()] == ["done", "done", "failed"]


def test_a_run_that_was_cut_off_stays_where_it_is_while_its_data_is_gone(quick: Path) -> None:
    data = Path("mn").resolve()
    data.mkdir()
    cells = text_cells(Path("org/m"), data=str(data), seeds=1)
    folder = Path("out") / Study(cells, Path("out"), 1).run()[0].folder
    (folder / "summary.json").unlink()
    data.rmdir()
    Study(text_cells(Path("org/m"), data=str(data), seeds=1), Path("out"), 1)._set_aside()
    assert folder.exists()


def test_a_copy_of_the_model_is_the_same_and_another_of_its_name_is_not(quick: Path) -> None:
    for folder, text in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        Path(folder).mkdir()
        Path(folder, "m.gguf").write_bytes(text)
    Study(text_cells(Path("a/m.gguf").resolve()), Path("out"), 1).run()
    for _ in range(2):
        assert Study(text_cells(Path("b/m.gguf").resolve()), Path("out"), 1).finished() == 2
        assert Study(text_cells(Path("c/m.gguf").resolve()), Path("out"), 1).finished() == 0
        rename_by_path(Path("out"))


def test_models_of_one_name_are_not_mixed_up_when_nothing_can_be_compared(quick: Path) -> None:
    places = [Path(folder, "m.gguf").resolve() for folder in ("a", "b")]
    for place in places:
        place.parent.mkdir()
        place.write_text(str(place))
    Study([cell for place in places for cell in text_cells(place)], Path("out"), 1).run()
    rename_by_path(Path("out"))
    elsewhere = [place.parent.rename(f"{place.parent}x").resolve() / "m.gguf" for place in places]
    both = Study([cell for place in elsewhere for cell in text_cells(place)], Path("out"), 1)
    assert both.finished() == 0 and Study(text_cells(elsewhere[0]), Path("out"), 1).finished() == 0


def test_finished_runs_are_found_where_the_model_is_not(quick: Path) -> None:
    place = Path("m.gguf").resolve()
    place.write_text("weights")
    Study(text_cells(place), Path("out"), 1).run()
    place.unlink()
    assert Study(text_cells(place), Path("out"), 1).finished() == 2
    assert Study(text_cells(Path("/elsewhere/m.gguf")), Path("out"), 1).finished() == 2
    assert Study(text_cells(Path("/elsewhere/n.gguf")), Path("out"), 1).finished() == 0


def test_a_run_that_was_cut_off_before_its_model_was_moved_is_kept_and_begun_anew(quick: Path) -> None:
    place = Path("m.gguf").resolve()
    place.write_text("weights")
    folder = Path("out") / Study(text_cells(place, seeds=1), Path("out"), 1).run()[0].folder
    (folder / "summary.json").unlink()
    (folder / "ledger.bin").write_text("half a run")
    moved = place.rename("n").rename(Path("out/m.gguf")).resolve()
    assert [r.status for r in Study(text_cells(moved, seeds=1), Path("out"), 1).run()] == ["done"]
    assert (Path("out/earlier") / folder.name / "ledger.bin").read_text() == "half a run"
    assert load(folder / "config.toml").task.model == str(moved)


@pytest.mark.parametrize("damaged", [b"rounds = ", b"\xff\xfe\x00" * 9, b'rounds = "many"', b""])
def test_a_run_whose_config_is_damaged_fails_alone(damaged: bytes, quick: Path) -> None:
    """Its settings can't be compared with the cell's; an empty file has the settings of another run."""
    folder = Path("out") / Study(cells_of(), Path("out"), 1).run()[1].folder
    (folder / "summary.json").unlink()
    (folder / "config.toml").write_bytes(damaged)
    results = Study(cells_of(), Path("out"), 1).run()
    assert [r.status for r in results] == ["done", "failed", "done", "done"] and "config.toml" in results[1].error


def moved_study(cells: int, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a study all that is asked before it begins, half of its runs done with data that has moved."""
    home, out = Path(f"{cells}").resolve(), Path(f"out{cells}")
    (home / "data").mkdir(parents=True)
    (home / "data" / "train.tsv").write_text("text")
    for cell in text_cells(Path("m"), data=str(home / "data"), seeds=cells // 2):
        quick_worker.play(out / "runs" / cell.folder_name, cell.config)
    rename_by_path(out)
    (home / "moved").mkdir()
    data = (home / "data").rename(home / "moved" / "data")
    study = Study(text_cells(Path("m"), data=str(data), seeds=cells), out, 1)
    with monkeypatch.context() as patch:
        for module, name in ((identity, "portable"), (engine_module, "load"), (engine_module, "read_figures")):
            plain = getattr(module, name)

            def counted(*given: Any, plain: Any = plain, name: str = name) -> Any:
                calls[name] += 1
                return plain(*given)

            patch.setattr(module, name, counted)
        assert study.finished() == len(study.by_name) == cells // 2
        notes(study, rerun=False)
        assert study.finished() == cells // 2
        study._set_aside()
        assert len(study._results().open) == cells // 2


def test_what_is_known_before_a_study_begins_takes_as_many_steps_as_it_has_cells(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: Counter[str] = Counter()
    large: Counter[str] = Counter()
    moved_study(8, small, monkeypatch)
    moved_study(32, large, monkeypatch)
    assert small["read_figures"] == small["load"] == 4
    assert large == Counter({name: 4 * count for name, count in small.items()})


def test_a_run_that_is_changed_meanwhile_is_read_again(quick: Path) -> None:
    study = Study(cells_of(), Path("out"), 1)
    folder = Path("out") / study.run()[0].folder
    assert study.finished() == 4
    (folder / "summary.json").write_text("{}")
    assert study.finished() == 3
    (folder / "summary.json").unlink()
    assert study.finished() == 3


def test_a_table_that_can_not_be_written_leaves_the_older_one_and_nothing_else(here: Path) -> None:
    write_csv(Path("x.csv"), ["a"], [{"a": 1}])
    for rows in ([{"a": 2}, {"b": 3}], [{"a": 2}, {"a": "\ud800"}]):
        with pytest.raises(ValueError):
            write_csv(Path("x.csv"), ["a"], rows)
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {"x.csv": b"a\n1\n"}


def test_a_large_file_is_told_from_another_by_blocks_all_over_it(tmp_path: Path) -> None:
    size = (identity.SAMPLES + 300) * identity.BLOCK + 5
    found = set()
    for place in (None, 0, size // 2, size - 1):
        with (tmp_path / f"m{place}").open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place // identity.BLOCK * identity.BLOCK)
                file.write(b"x" * min(2 * identity.BLOCK, size - file.tell()))
        found.add(identity.content(str(tmp_path / f"m{place}")))
    assert len(found) == 4 and identity.content("FacebookAI/roberta-large") is None


def test_a_study_without_paths_has_the_digests_it_always_had() -> None:
    config = Config().with_overrides(["task.name=sst2", "task.model=FacebookAI/roberta-large", "seed=3"])
    for one in (config, Config()):
        text = json.dumps(to_dict(one), sort_keys=True).encode()
        assert Cell({}, one).digest == identity.digest_by_path(one) == hashlib.sha256(text).hexdigest()[:10]


# Which code made a run.


def test_runs_of_other_code_are_named_and_run_again_only_if_asked(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.toml").write_text(GRID)
    monkeypatch.setenv("SOURCE", "old")
    assert call(monkeypatch, "s.toml", "--out", "out") == 0
    monkeypatch.delenv("SOURCE")
    first = {path.name for path in Path("out/runs").iterdir()}
    capsys.readouterr()
    assert call(monkeypatch, "s.toml", "--out", "out") == 0
    said = capsys.readouterr().out
    assert f"12 of the finished runs were made by other code than this, {environment.code()}" in said
    assert f"(12 by {__version__}+old); they are used as they are; --rerun runs them again" in said
    assert {row["code"] for row in rows_of(Path("out/results.csv"))} == {f"{__version__}+old"}
    assert len(quick.read_text().splitlines()) == 12
    assert call(monkeypatch, "s.toml", "--out", "out", "--rerun") == 0
    assert "they are run again, and kept in out/earlier" in capsys.readouterr().out
    assert len(quick.read_text().splitlines()) == 24
    assert (
        {path.name for path in Path("out/earlier").iterdir()} == first == {p.name for p in Path("out/runs").iterdir()}
    )
    assert {row["code"] for row in rows_of(Path("out/results.csv"))} == {environment.code()}
    assert call(monkeypatch, "s.toml", "--out", "out", "--rerun") == 0
    assert "other code" not in capsys.readouterr().out and len(quick.read_text().splitlines()) == 24


def test_the_page_names_the_versions_if_there_are_several() -> None:
    results = [result("mean", "none", 0, 0.5), result("mean", "none", 1, 0.5)]
    made = [dataclasses.replace(r, figures={**r.figures, "code": code}) for r, code in zip(results, "ab", strict=True)]
    assert "a (1 runs), b (1 runs)" in markdown(made, scores(made, Layout()), "s")
    assert "versions" not in markdown(made[:1], scores(made[:1], Layout()), "s")


def test_a_cell_that_fails_is_recorded_and_the_others_go_on_and_it_is_tried_again(quick: Path) -> None:
    cells = [*cells_of(rules=("mean",)), *cells_of(f"method.lr={quick_worker.FAILS}", rules=("krum",), seeds=1)]
    for _ in range(2):
        results = Study(cells, Path("out"), 2).run()
        assert [r.status for r in results] == ["done", "done", "failed"]
        assert results[2].error == "no such luck" and results[2].accuracy is None
        assert rows_of(Path("out/results.csv"))[2]["error"] == "no such luck"
    assert sorted(quick.read_text().split()).count("krum") == 2


def test_the_death_of_a_worker_costs_nothing_and_two_deaths_fail_the_cell(quick: Path) -> None:
    cells = [*cells_of(f"method.lr={quick_worker.DIES_ONCE}", rules=("mean",)), *cells_of(rules=("krum",)),
             *cells_of(f"method.lr={quick_worker.DIES}", rules=("median",), seeds=1)]  # fmt: skip
    results = Study(cells, Path("out"), 2).run()
    assert [r.status for r in results] == ["done"] * 4 + ["failed"]
    assert "died twice (signal 9)" in results[4].error


def test_a_worker_that_can_not_start_ends_the_study(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(StudyError, match=r"could not start \(exit code 1\).*workers.log says why"):
        Study(cells_of(), Path("out"), 2).run()
    assert "no torch here" in Path("out/workers.log").read_text()
    assert [row["status"] for row in rows_of(Path("out/results.csv"))] == ["open"] * 4


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


def test_two_studies_do_not_share_a_folder(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SECONDS_FOR_LOCK", 0.0)
    refusals: list[str] = []

    def second(progress: StudyProgress) -> None:
        if not refusals:
            with pytest.raises(ConfigError, match="being worked on by another process") as error:
                Study(cells_of(), Path("out"), 1, b"second").run()
            refusals.append(str(error.value))

    Study(cells_of(), Path("out"), 1, b"first").run(second)
    assert refusals and Path("out/study.toml").read_bytes() == b"first"
    assert Study(cells_of(), Path("out"), 1).run()


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


# The command, with workers that play nothing.


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cyber0", "study", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code if isinstance(stop.value.code, int) else 0


def test_the_command_runs_a_file_and_shows_the_verdicts(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(GRID)
    assert call(monkeypatch, "mine.toml", "--dry-run") == 0
    assert "12 runs" in capfd.readouterr().out and not Path("runs").exists()
    assert call(monkeypatch, "mine.toml", "--workers", "2") == 0
    out, err = capfd.readouterr()
    assert (
        "12/12  " in out
        and "12 runs in " in out
        and "Each rule by its worst attack" in out
        and "\x1b" not in out
        and err == ""
    )
    folder = Path("runs/study-mine")
    assert {p.name for p in folder.iterdir()} >= {
        "study.toml",
        "results.csv",
        "summary.csv",
        "summary.md",
        "plots",
        "runs",
    }
    assert (folder / "study.toml").read_text() == GRID
    assert call(monkeypatch, "mine.toml", "--quiet") == 0
    assert capfd.readouterr() == ("", "") and len(quick.read_text().splitlines()) == 12


def test_the_command_names_what_failed_and_ends_with_1(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(f"[study.grid]\nmethod.lr = [0.01, {quick_worker.FAILS}]\n")
    assert call(monkeypatch, "mine.toml", "--workers", "1") == 1
    err = capfd.readouterr().err
    assert "failed: 0.5, seed 0: no such luck" in err and "1 of 2 runs failed" in err
    assert "run them again with: cyber0 study mine.toml --workers 1" in err


def test_a_folder_that_holds_something_else_is_refused(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(GRID)
    assert call(monkeypatch, "mine.toml", "--out", ".") == 2
    assert "holds no study" in capfd.readouterr().err
    assert call(monkeypatch, "mine.toml", "--out", "mine.toml") == 2


def test_an_interrupted_command_says_how_to_go_on(quick: Path) -> None:
    Path("mine.toml").write_text(f"[study.grid]\nmethod.lr = [0.01, {quick_worker.HANGS}]\n")
    code = (
        "import sys; from cyber0.study import worker_pool; "
        f"worker_pool.WORKER = (sys.executable, {quick_worker.__file__!r}); "
        "from cyber0.cli.main import main; sys.argv = ['cyber0', 'study', 'mine.toml']; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while len(quick.read_text().splitlines()) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted after 1 of 2 runs; go on with: cyber0 study mine.toml" in err


# A worker that plays.


def test_a_worker_goes_on_with_a_run_that_was_cut_off_and_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = blob_config("rounds=9", "evaluate_every=3")
    whole = Run.start(settings, tmp_path / "whole").run()
    half = Run.start(settings, tmp_path / "half")
    for _ in range(4):
        half.simulation.run_round()
    half.simulation.ledger.close()
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "SECONDS_BETWEEN_REPORTS", 0.0)
    worker.play({"folder": str(tmp_path / "half"), "config": to_dict(settings)}, said.append)
    assert [message["round"] for message in said] == [4, 5, 6, 7, 8, 9]
    assert json.loads((tmp_path / "half/summary.json").read_text())["model_digest"] == whole["model_digest"]
    assert not (tmp_path / "half/plots").exists() and not (tmp_path / "whole/plots").exists()


def test_a_worker_refuses_a_folder_of_another_run(tmp_path: Path) -> None:
    Run.start(blob_config("rounds=1"), tmp_path / "run").run()
    with pytest.raises(ConfigError, match=r"config.toml was changed"):
        worker.play({"folder": str(tmp_path / "run"), "config": to_dict(blob_config("rounds=2"))}, lambda _: None)


def test_a_study_says_that_a_run_was_lengthened_and_does_not_ask_to_delete_it(tmp_path: Path) -> None:
    folder, config = tmp_path / "runs" / "cell", blob_config("rounds=2")
    Run.start(config, folder, export=False).run()
    Run.resume(folder, rounds=3, export=False).run()
    with pytest.raises(ConfigError, match=r"lengthened to 3 rounds, .* have 2: move the folder out of .*runs") as said:
        worker.play({"folder": str(folder), "config": to_dict(config)}, lambda _: None)
    assert not {"remove", "delete", "changed"} & set(str(said.value).split())


@pytest.mark.mnist
def test_a_study_of_real_runs_ends_as_the_runs_themselves_do(here: Path) -> None:
    settings = ["rounds=2", "method.k=4", "evaluate_every=1"]
    cells = [
        Cell({"beta": beta}, Config().with_overrides([*settings, f"aggregation.beta={beta}"])) for beta in (0.25, 0.1)
    ]
    cells.append(Cell({"beta": "none"}, Config().with_overrides([*settings, "task.data=/nowhere"])))
    results = Study(cells, Path("out"), 1).run()
    assert [r.status for r in results] == ["done", "done", "failed"] and "/nowhere" in results[2].error
    alone = Run.start(cells[1].config, here / "alone").run()
    assert results[1].figures["model_digest"] == alone["model_digest"]
    assert results[1].accuracy == alone["final_accuracy"]


def test_a_share_of_liars_counts_the_tasks_own_clients(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[task]\nname = "sst2"\nmodel = "x"\n[study]\nname = "s"\nseeds = 1\n[study.grid]\nbyzantine_share = [0.25]\n'
    )
    (cell,) = read_plan(file).cells
    assert (cell.config.federation.clients, cell.config.federation.byzantine) == (8, 2)
