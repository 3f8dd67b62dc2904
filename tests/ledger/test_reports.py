"""Reports that are kept: every decision can be made again, and nothing that is damaged or missing goes unnoticed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.errors import LedgerError
from cyber0.ledger import Ledger, Record, Reports
from cyber0.ledger.reports import REPORTS_MAGIC
from cyber0.runs import replay as replays
from cyber0.runs.run import Run
from cyber0.storage import LEDGER, REPORTS

ROUNDS, NUMBERS = 6, 5
SETTINGS = (f"rounds={ROUNDS}", "serve.keep_reports=true", f"method.k={NUMBERS}", "federation.attack=nonfinite")


def check(folder: Path) -> int:
    return replays.check_decisions(folder, Ledger.open(folder / LEDGER)).rounds


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "geometric_median"])
@pytest.mark.parametrize("attack", ["nonfinite", "full_knowledge"])
def test_every_decision_can_be_made_again(rule: str, attack: str, tmp_path: Path) -> None:
    Run.start(config(*SETTINGS, f"aggregation.rule={rule}", f"federation.attack={attack}"), tmp_path / "run").run()
    assert check(tmp_path / "run") == ROUNDS


@pytest.mark.parametrize("codec", ["bfloat16", "log8"])
def test_decisions_are_made_again_as_they_were_decoded(codec: str, tmp_path: Path) -> None:
    settings = (*SETTINGS, f"serve.codec={codec}", "serve.seed_mode=chained")
    summary = Run.start(config(*settings), tmp_path / "run").run()
    assert check(tmp_path / "run") == ROUNDS
    assert replays.rebuild(tmp_path / "run")[1].digest() == summary["model_digest"]


def test_a_report_that_was_changed_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).run()
    path = folder / REPORTS
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
    Run.start(config(*SETTINGS), folder).run()
    data = bytearray((folder / REPORTS).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / REPORTS).write_bytes(data)
    with pytest.raises(LedgerError, match=r"CRC-32|does not hold"):
        check(folder)


def test_a_run_without_reports_says_how_to_keep_them(tmp_path: Path) -> None:
    Run.start(config("rounds=1"), tmp_path / "run").run()
    with pytest.raises(LedgerError, match="keep_reports"):
        check(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_run_that_was_cut_off_keeps_its_reports(cut: int, tmp_path: Path) -> None:
    """The reports may be ahead of the ledger by a whole entry or by a part of one."""
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).run()
    whole = (folder / REPORTS).read_bytes()
    ledger = (folder / LEDGER).read_bytes()
    (folder / LEDGER).write_bytes(ledger[: -len(ledger) // 8])
    (folder / REPORTS).write_bytes(whole[:-cut])
    Run.resume(folder).run()
    assert check(folder) == ROUNDS
    assert (folder / REPORTS).read_bytes() == whole


def entry_places(path: Path) -> list[int]:
    """Return where the entries of a file begin, and where the last one ends."""
    places = [len(REPORTS_MAGIC)]
    for _, rows in Reports(path, NUMBERS):
        places.append(places[-1] + 8 + rows.nbytes + 4)
    return places


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2, ROUNDS - 1])
@pytest.mark.parametrize("bit", [0, 2, 9, 20, 31])
def test_a_damaged_count_is_an_error_that_names_file_and_round(number: int, bit: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).run()
    path = folder / REPORTS
    damaged = bytearray(path.read_bytes())
    damaged[entry_places(path)[number] + 4 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    named = rf"the reports of round {number} in \S*reports\.bin (claim .* rows, but the file ends|are damaged)"
    with pytest.raises(LedgerError, match=named):
        check(folder)
    with pytest.raises(LedgerError, match=rf"{named}.*the ledger has {ROUNDS} rounds.*cyber0 repair"):
        Run.resume(folder)
    assert path.read_bytes() == damaged  # nothing is lost on the way
    Ledger.open(folder / LEDGER, writable=True).close()  # and the ledger was let go


HEADS = [bytes(255 * (i == at) for i in range(8)) for at in range(8)]
HEADS += [np.random.default_rng(seed).bytes(8) for seed in range(8)] + [bytes([0, 0, 0, 255] * 2), b"\xff" * 8]


@pytest.mark.parametrize("number", [0, 2, ROUNDS - 1])
@pytest.mark.parametrize("flips", HEADS, ids=bytes.hex)
def test_reports_that_the_ledger_needs_are_not_cut_off_whatever_the_head_of_an_entry_says(
    number: int, flips: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "reports.bin"
    writer = Reports(path, NUMBERS, rounds=0)
    for at in range(ROUNDS):
        writer.append(at, np.full((3, NUMBERS), at, np.float32))
    writer.close()
    place, damaged = entry_places(path)[number], bytearray(path.read_bytes())
    damaged[place : place + 8] = bytes(a ^ b for a, b in zip(damaged[place : place + 8], flips, strict=True))
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match=rf"the reports of round {number} .*the ledger has {ROUNDS} rounds"):
        Reports(path, NUMBERS, rounds=ROUNDS)
    assert path.read_bytes() == damaged
    reader = Reports(path, NUMBERS)
    assert reader.survey() == (list(range(number)), place) and reader.fault is not None and reader.fault.round == number
    Reports(path, NUMBERS, rounds=number).close()  # an entry that the ledger does not need yet is cut off as before
    assert path.read_bytes() == damaged[:place]


def test_an_entry_out_of_order_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "reports.bin"
    writer = Reports(path, NUMBERS, rounds=0)
    for number in (0, 1, 2, 1, 4):
        writer.append(number, np.ones((2, NUMBERS), np.float32))
    writer.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"the reports of round 3 .* are not there: those of round 1 follow again"):
        list(Reports(path, NUMBERS))
    with pytest.raises(LedgerError, match=r"the reports of round 3 .*the ledger has 5 rounds"):
        Reports(path, NUMBERS, rounds=5)
    assert path.read_bytes() == before


def test_a_run_goes_on_keeping_reports_after_a_repair_has_cut_some_off(tmp_path: Path) -> None:
    path = tmp_path / "reports.bin"
    for rounds, numbers in ((0, (0, 1)), (4, (4, 5)), (6, (6,))):  # rounds 2 and 3 were damaged, and cut off
        writer = Reports(path, NUMBERS, rounds=rounds)
        for number in numbers:
            writer.append(number, np.ones((2, NUMBERS), np.float32))
        writer.close()
    assert [number for number, _ in Reports(path, NUMBERS)] == [0, 1, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 3, 4, 30, 100])
def test_zeros_at_the_end_of_the_reports_are_cut_off_where_the_ledger_does_not_need_them(
    lost: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run.start(config(*SETTINGS), folder).run()
    whole, ledger = (folder / REPORTS).read_bytes(), (folder / LEDGER).read_bytes()
    last = entry_places(folder / REPORTS)[-2]
    size = Ledger.open(folder / LEDGER)._offsets[-2]
    zeroed = max(last, len(whole) - lost)
    for zeros in (0, 1, 5000):
        (folder / REPORTS).write_bytes(whole[:zeroed] + bytes(len(whole) - zeroed + zeros))
        with pytest.raises(LedgerError, match=f"the reports of round {ROUNDS - 1} "):
            Run.resume(folder)
        (folder / LEDGER).write_bytes(ledger[:size])
        Run.resume(folder).run()
        assert (folder / REPORTS).read_bytes() == whole
        assert (folder / LEDGER).read_bytes() == ledger


def test_no_record_is_forced_to_the_disk_before_the_reports_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave a ledger whose last rounds can't be decided again."""
    from headers import make_header

    ledger = Ledger.create(tmp_path / "ledger.bin", make_header(clients=2, k=3), durability="always")
    reports = Reports.beside(ledger, tmp_path / "reports.bin")
    forced: list[tuple[int, int]] = []

    def fsync(handle: int) -> None:
        forced.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    monkeypatch.setattr("os.fsync", fsync)
    reports.append(0, np.ones((2, 3), np.float32))
    ledger.append(Record(0, 0.1, np.ones(3, np.float32), np.ones(2, np.bool_), np.zeros(2, np.int64)))
    files = [(tmp_path / name).stat() for name in ("reports.bin", "ledger.bin")]
    assert forced == [(file.st_ino, file.st_size) for file in files]


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


@pytest.mark.parametrize("rest", range(1, 8))
def test_an_entry_that_is_cut_off_within_its_head_is_torn(rest: int, tmp_path: Path) -> None:
    path = tmp_path / "reports.bin"
    reports = Reports(path, NUMBERS, rounds=0)
    reports.append(0, np.ones((3, NUMBERS), np.float32))
    good = path.stat().st_size
    reports.append(1, np.ones((3, NUMBERS), np.float32))
    reports.close()
    os.truncate(path, good + rest)
    found = Reports(path, NUMBERS)
    assert [number for number, _ in found] == [0]
    assert found.fault is not None and found.fault.torn and found.fault.text == "are cut off"
