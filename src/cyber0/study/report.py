"""The report of a study: summary.csv, summary.md, plots/heatmap.png and .svg."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cyber0.report.heatmap import Panel, heatmap_picture
from cyber0.study.cells import Result, measure_of, shown, write_csv
from cyber0.study.judge import Layout, Score, WorstCase, judge, judge_overall, scores, worst_of
from cyber0.tasks import evaluated_by_name, of_set

SUMMARY_CSV, SUMMARY_MD, HEATMAP = "summary.csv", "summary.md", "heatmap"


def write_report(results: Sequence[Result], layout: Layout, out: Path, name: str) -> list[Path]:
    """Write tables and plots of the results, and return the files."""
    table = scores(results, layout)
    out.mkdir(parents=True, exist_ok=True)
    files = [_write_summary_csv(results, table, layout, out / SUMMARY_CSV), out / SUMMARY_MD]
    files[-1].write_text(markdown(results, table, name), encoding="utf-8")
    panels = [_panel(table, circumstances) for circumstances in dict.fromkeys(s.circumstances for s in table)]
    pictures = [out / "plots" / f"{HEATMAP}.{kind}" for kind in ("png", "svg")]
    seeds = max(score.runs for score in table)
    what = f"mean ± sample deviation over {seeds} seeds" if seeds > 1 else "one seed"
    unit = " (%)" if measure_of(results).in_percent else ""
    heatmap_picture(panels, pictures, f"{name}: final {_accuracy(results)}{unit}, {what}")
    return [*files, *pictures]


def percent(score: Score | None, digits: int = 2) -> str:
    """Format a mean and its deviation; an accuracy is in percent."""
    if score is None or score.mean is None:
        return "–"

    def written(value: float) -> str:
        return f"{100 * value:.{digits}f}" if score.measure.in_percent else f"{value:.{digits + 2}g}"

    deviation = "" if score.deviation is None else f" ± {written(score.deviation)}"
    return f"{written(score.mean)}{deviation}{'' if score.complete else ' (incomplete)'}"


def _accuracy(results: Sequence[Result]) -> str:
    """Return the name of the measure, with the set it was measured on if that is known and the same for all."""
    tasks = (r.cell.config.task for r in results)
    sets = {evaluated_by_name(task.name, task.data) for task in tasks}
    return of_set(sets.pop() if len(sets) == 1 else None, measure_of(results).name)


def _write_summary_csv(results: Sequence[Result], table: Sequence[Score], layout: Layout, path: Path) -> Path:
    """Write one row per combination, over all its seeds."""
    axes = {(layout.defence_of(r), layout.attack_of(r), layout.circumstances_of(r)): r.cell.axes for r in results}
    worst = {id(v.worst) for v in judge(table)}
    mean = f"mean_{measure_of(results).name}"
    columns = ["runs", "done", mean, "deviation", "lowest", "highest", "worst_attack"]
    rows = []
    for score in table:
        place = axes[score.defence, score.attack, score.circumstances]
        row: dict[str, Any] = {name: shown(value) for name, value in place.items()}
        row |= {"runs": score.runs, "done": score.done, mean: _number(score.mean),
                "deviation": _number(score.deviation), "lowest": min(score.accuracies, default=""),
                "highest": max(score.accuracies, default=""), "worst_attack": int(id(score) in worst)}  # fmt: skip
        rows.append(row)
    return write_csv(path, [*results[0].cell.axes, *columns], rows)


def markdown(results: Sequence[Result], table: Sequence[Score], name: str) -> str:
    """Return the study as Markdown: each rule's worst case, then every mean; without attacks, the means alone."""
    failed, measure = [r for r in results if r.status == "failed"], measure_of(results)
    seeds = len({r.cell.config.seed for r in results})
    peaceful = all(s.harmless for s in table)
    judged = "A rule is judged by its worst attack: the one with the {} mean."
    lines = [
        f"# {name}",
        "",
        f"{len(results)} runs, {seeds} seed{'s' if seeds > 1 else ''}: {sum(r.status == 'done' for r in results)} "
        f"done, {len(failed)} failed. Final {_accuracy(results)}{' in percent' if measure.in_percent else ''}, mean ± "
        "sample deviation over the seeds. "
        + ("Nobody attacks." if peaceful else judged.format("lowest" if measure.higher else "highest")),
    ]
    made = Counter(str(r.figures.get("code", "")) or "an unknown version" for r in results if r.status == "done")
    if len(made) > 1:
        listed = ", ".join(f"{code} ({count} runs)" for code, count in made.items())
        lines += ["", f"Different versions of cyber0 made these runs: {listed}."]
    places = [] if peaceful else list(dict.fromkeys(s.circumstances for s in table))
    if peaceful:
        settings = [[s.defence, s.circumstances or "–", percent(s)] for s in table]
        lines += ["", *_table(["rule", "settings", measure.name], settings)]
    if len(places) > 1:
        lines += ["", "## Over all settings", "", *_worst_case_lines(judge_overall(table), everywhere=True)]
    worst_cases = judge(table)
    for place in places:
        lines += ["", f"## {place}"] if place else []
        lines += ["", *_worst_case_lines([v for v in worst_cases if v.circumstances == place], everywhere=False)]
        lines += ["", *_score_lines([s for s in table if s.circumstances == place])]
    if failed:
        lines += ["", "## Failed", "", *(f"- {r.cell.label}: {r.error}" for r in failed)]
    return "\n".join(lines) + "\n"


def _worst_case_lines(worst_cases: Sequence[WorstCase], *, everywhere: bool) -> list[str]:
    what = next((v.worst.measure.name for v in worst_cases if v.worst), "accuracy")
    head = ["rank", "rule", "worst attack", *(["where"] if everywhere else []), what, "without attack"]
    rows = []
    for rank, worst_case in enumerate(worst_cases, 1):
        worst = worst_case.worst
        where = [worst.circumstances if worst else "–"] if everywhere else []
        attack = "–" if worst is None else worst.attack if worst_case.complete else f"{worst.attack} (runs are missing)"
        rows.append(
            [
                str(rank) if worst_case.complete else "–",
                worst_case.defence,
                attack,
                *where,
                percent(worst),
                percent(worst_case.unattacked),
            ]
        )
    return _table(head, rows, right=1)


def _score_lines(here: Sequence[Score]) -> list[str]:
    """Return a table of rules (rows) and attacks (columns); each rule's worst is bold."""
    attacks = list(dict.fromkeys(s.attack for s in here))
    rows = []
    for defence in dict.fromkeys(s.defence for s in here):
        own = {s.attack: s for s in here if s.defence == defence}
        worst = worst_of(list(own.values()))
        texts = [percent(own.get(attack)) for attack in attacks]
        marked = [f"**{t}**" if own.get(a) is worst and worst else t for a, t in zip(attacks, texts, strict=True)]
        rows.append([defence, *marked])
    return _table(["rule", *attacks], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> list[str]:
    rule = ["---:" if place < right else "---" for place in range(len(head))]
    return [f"| {' | '.join(text.replace('|', '/') for text in cells)} |" for cells in (head, rule, *rows)]


def _panel(table: Sequence[Score], circumstances: str) -> Panel:
    """Return the heatmap's panel for one set of circumstances."""
    rows, columns = (list(dict.fromkeys(names)) for names in ((s.defence for s in table), (s.attack for s in table)))
    here = {(s.defence, s.attack): s for s in table if s.circumstances == circumstances}
    worst = {v.defence: v.worst.attack for v in judge(list(here.values())) if v.worst}
    cells = [[here.get((row, column)) for column in columns] for row in rows]
    return Panel(
        title=circumstances,
        rows=rows,
        columns=columns,
        means=[[s.mean if s else None for s in line] for line in cells],
        deviations=[[s.deviation if s else None for s in line] for line in cells],
        marked=[columns.index(worst[row]) if row in worst else None for row in rows],
        in_percent=table[0].measure.in_percent,
        higher=table[0].measure.higher,
    )


def _number(value: float | None) -> float | str:
    return "" if value is None else round(value, 9)
