"""Reports that are kept: every decision can be made again, and nothing that is damaged or missing goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Blobs, config, one_thread  # noqa: F401

from cyber0 import runs
from cyber0.errors import LedgerError
from cyber0.ledger import Ledger, Reports
from cyber0.runs import Run

ROUNDS, NUMBERS = 6, 5
SETTINGS = (f"rounds={ROUNDS}", "serve.keep_reports=true", f"method.k={NUMBERS}", "federation.attack=nonfinite")


@pytest.fixture(autouse=True)
def blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cyber0.simulation.make_task", lambda _: Blobs())
    for name in ("accuracy_picture", "suspects_picture", "partition_picture"):
        monkeypatch.setattr(runs.plots, name, lambda *_, **__: None)


def check(folder: Path) -> int:
    return runs.check_decisions(folder, Ledger.open(folder / runs.LEDGER))


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "geometric_median"])
@pytest.mark.parametrize("attack", ["nonfinite", "full_knowledge"])
def test_every_decision_can_be_made_again(rule: str, attack: str, tmp_path: Path) -> None:
    Run.start(config(*SETTINGS, f"aggregation.rule={rule}", f"federation.attack={attack}"), tmp_path / "run").play()
    assert check(tmp_path / "run") == ROUNDS


@pytest.mark.parametrize("codec", ["bfloat16", "log8"])
def test_decisions_are_made_again_as_they_were_decoded(codec: str, tmp_path: Path) -> None:
    settings = (*SETTINGS, f"serve.codec={codec}", "serve.seed_mode=chained")
    summary = Run.start(config(*settings), tmp_path / "run").play()
    assert check(tmp_path / "run") == ROUNDS
    assert runs.rebuild(tmp_path / "run")[1].digest() == summary["model_digest"]


def test_a_report_that_was_changed_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).play()
    path = folder / runs.REPORTS
    entries = list(Reports(path, NUMBERS))
    path.unlink()
    forged = Reports(path, NUMBERS, rounds=0)
    for number, rows in entries:
        forged.append(number, rows * np.float32(1 + (number == 4)))
    forged.close()
    with pytest.raises(LedgerError, match="reports of round 4 give another decision"):
        check(folder)


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).play()
    data = bytearray((folder / runs.REPORTS).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / runs.REPORTS).write_bytes(data)
    with pytest.raises(LedgerError, match=r"CRC-32|does not hold"):
        check(folder)


def test_a_run_without_reports_says_how_to_keep_them(tmp_path: Path) -> None:
    Run.start(config("rounds=1"), tmp_path / "run").play()
    with pytest.raises(LedgerError, match="keep_reports"):
        check(tmp_path / "run")


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_run_that_was_cut_off_keeps_its_reports(cut: int, tmp_path: Path) -> None:
    """The reports may be ahead of the ledger by a whole entry or by a part of one."""
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).play()
    whole = (folder / runs.REPORTS).read_bytes()
    ledger = (folder / runs.LEDGER).read_bytes()
    (folder / runs.LEDGER).write_bytes(ledger[: -len(ledger) // 8])
    (folder / runs.REPORTS).write_bytes(whole[:-cut])
    Run.resume(folder).play()
    assert check(folder) == ROUNDS
    assert (folder / runs.REPORTS).read_bytes() == whole


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 6))
def test_what_is_written_is_read_and_what_is_ahead_is_cut(counts: list[int], kept: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports.bin"
        writer = Reports(path, 3, rounds=0)
        tables = [np.full((n, 3), i, np.float32) for i, n in enumerate(counts)]
        for number, rows in enumerate(tables):
            writer.append(number, rows + 1)
            writer.append(number, rows)  # the record could not be written: the round is decided again
        writer.close()
        assert [(n, r.tolist()) for n, r in Reports(path, 3)] == [(n, r.tolist()) for n, r in enumerate(tables)]
        Reports(path, 3, rounds=kept).close()
        assert [n for n, _ in Reports(path, 3)] == list(range(min(kept, len(tables))))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"something else altogether")
    with pytest.raises(LedgerError, match="not a file of reports"):
        Reports(tmp_path / "x", 3)
    with pytest.raises(LedgerError, match="can't open"):
        Reports(tmp_path / "absent", 3)
