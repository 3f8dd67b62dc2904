"""benchmarks/startup.py: its program, which no type checker reads, runs a round."""

from __future__ import annotations

from pathlib import Path

import startup
from processes import write_digits


def test_the_first_round_is_run_in_a_new_process(tmp_path: Path) -> None:
    assert all(seconds > 0 for seconds in startup.first_round(f"task.data={write_digits(tmp_path / 'digits')}"))
