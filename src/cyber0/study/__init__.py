"""Many runs as one: a grid of settings, run in parallel processes, and each rule judged by its worst attack.

    plan = read_plan("examples/study.toml")                      # raises if anything in the file is wrong
    results = Study(plan.cells, Path("runs/mine")).run()        # resumes what the folder already holds
    write_report(results, plan.layout, Path("runs/mine"), plan.name)

`Study` takes any cells, not only those of a grid. Nothing here loads torch: the workers do.
"""

from __future__ import annotations

from cyber0.study.cells import Cell, Result
from cyber0.study.engine import Study
from cyber0.study.grid import StudyPlan, read_plan
from cyber0.study.judge import Layout, Score, WorstCase, judge, scores
from cyber0.study.report import write_report
from cyber0.study.worker_pool import StudyProgress

__all__ = ["Cell", "Layout", "Result", "Score", "Study", "StudyPlan", "StudyProgress", "WorstCase", "judge",
           "read_plan", "scores", "write_report"]  # fmt: skip
