"""A study's report: each rule judged by its worst attack, tables and heat map."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import rows_of

from cyber0.config.schema import Config
from cyber0.report.heatmap import Panel, heatmap_figure
from cyber0.study import Cell, Layout, Result, Score, judge, scores
from cyber0.study.judge import judge_overall
from cyber0.study.report import markdown, write_report


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
    worst_cases = judge(scores(HAND_MADE, LAYOUT))
    assert [(v.defence, v.worst.attack if v.worst else "") for v in worst_cases] == [("krum", "ipm"), ("mean", "ipm")]
    krum, mean = worst_cases
    assert krum.worst and krum.worst.mean == pytest.approx(0.55) and krum.worst.deviation == pytest.approx(0.7 / 2**0.5)
    assert mean.worst and mean.worst.mean == pytest.approx(0.12)
    assert krum.unattacked and krum.unattacked.mean == pytest.approx(0.31)
    assert krum.complete and mean.complete


def test_where_nobody_attacks_the_least_accuracy_counts() -> None:
    worst_case = judge(scores([result("mean", "none", 0, 0.9)], LAYOUT))[0]
    assert worst_case.worst and worst_case.worst.attack == "none" and worst_case.worst.deviation is None


def test_a_failed_run_is_not_counted_and_makes_a_worst_case_incomplete() -> None:
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_page_names_the_versions_if_there_are_several() -> None:
    results = [result("mean", "none", 0, 0.5), result("mean", "none", 1, 0.5)]
    made = [dataclasses.replace(r, figures={**r.figures, "code": code}) for r, code in zip(results, "ab", strict=True)]
    assert "a (1 runs), b (1 runs)" in markdown(made, scores(made, Layout()), "s")
    assert "versions" not in markdown(made[:1], scores(made[:1], Layout()), "s")


def test_a_study_without_attacks_is_one_table_of_its_settings() -> None:
    quiet = [result("mean", "none", seed, 0.1 * rate, lr=rate) for rate in (1, 2) for seed in (0, 1)]
    layout = Layout(("rule",), ("attack",), ("lr",))
    page = markdown(quiet, scores(quiet, layout), "quiet")
    assert "Nobody attacks." in page and "worst attack" not in page and "##" not in page
    assert [line for line in page.splitlines() if line.startswith("| mean")] == [
        "| mean | lr = 1 | 10.00 ± 0.00 |", "| mean | lr = 2 | 20.00 ± 0.00 |"]  # fmt: skip
