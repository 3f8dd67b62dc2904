"""Repair: it says what is good, changes nothing unasked, and loses nothing that it has not copied."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from synthetic import one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.federation.methods import FEDERATIONS
from cyber0.ledger import Ledger
from cyber0.runs import repair
from cyber0.runs import replay as replays
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run

SETTINGS = ("rounds=8", "evaluate_every=4", "serve.keep_reports=true")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run."""
    Run.start(config(*SETTINGS), tmp_path / "run").run()
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def answer(monkeypatch: pytest.MonkeyPatch, word: str | None) -> None:
    """Sit at a terminal and answer like that; None: there is no terminal."""

    def reply(_: str) -> str:
        assert word is not None, "it must not ask"
        return word

    monkeypatch.setattr("sys.stdin.isatty", lambda: word is not None)
    monkeypatch.setattr("builtins.input", reply)


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_a_whole_run_has_nothing_to_repair(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    assert repair.command(run, yes=True) == 0
    assert contents(run) == before
    out = capsys.readouterr().out
    for line in ("ledger.bin: 8 records are good", "config.toml: can be read", "w0.safetensors: the starting weights",
                 "reports.bin: the reports up to round 7 are good", "metrics.csv: 3 evaluations\n",
                 "summary.json: the run has ended, after 8 rounds", "nothing to repair"):  # fmt: skip
        assert line in out


@pytest.mark.parametrize("word", [None, "", "n", "no"])
def test_nothing_is_changed_before_the_operator_agrees(
    word: str | None, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / "ledger.bin", -300)
    before = contents(run)
    answer(monkeypatch, word)
    assert repair.command(run, yes=False) == 1
    assert contents(run) == before
    assert "nothing was changed; --yes repairs without asking" in capsys.readouterr().out


@pytest.mark.parametrize("yes", [True, False])
def test_the_records_before_a_damaged_one_are_kept_and_the_lost_rounds_are_computed_again(
    yes: bool, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = contents(run)
    answer(monkeypatch, None if yes else "y")
    ledger = Ledger.open(run / "ledger.bin")
    damage(run / "ledger.bin", ledger._offsets[5] + 20)
    damaged = (run / "ledger.bin").read_bytes()
    with pytest.raises(LedgerError, match=r"record 5 .*cyber0 repair \S*run"):
        Run.resume(run)
    assert repair.command(run, yes=yes) == 0
    out = capsys.readouterr().out
    assert "5 records are good" in out and "record 5 does not verify: its CRC-32 is wrong" in out
    assert "losing about 3 rounds" in out and "a copy of this ledger.bin that reaches further" in out
    assert "computes the lost rounds again" in out
    assert (run / "ledger.bin.damaged").read_bytes() == damaged
    assert (run / "reports.bin.damaged").read_bytes() == whole["reports.bin"]
    assert (run / "summary.json.damaged").read_bytes() == whole["summary.json"] and not (run / "summary.json").exists()
    assert (run / "ledger.bin").read_bytes() == whole["ledger.bin"][: ledger._offsets[5]]
    Run.resume(run).run()
    for name in ("ledger.bin", "reports.bin", "config.toml", "w0.safetensors"):
        assert (run / name).read_bytes() == whole[name], name


def test_older_copies_are_never_overwritten(run: Path) -> None:
    ledger = Ledger.open(run / "ledger.bin")
    seen = []
    for records in (6, 4, 2):
        damage(run / "ledger.bin", ledger._offsets[records] + 3)
        seen.append((run / "ledger.bin").read_bytes())
        assert repair.command(run, yes=True) == 0
        assert len(Ledger.open(run / "ledger.bin")) == records
    copies = [run / f"ledger.bin.damaged{end}" for end in ("", ".1", ".2")]
    assert [copy.read_bytes() for copy in copies] == seen


def test_a_copy_that_can_not_be_written_leaves_the_ledger_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(run / "ledger.bin", -300)
    before = (run / "ledger.bin").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DataError, match=r"ledger\.bin\.damaged can't be written: No space left"):
        repair.command(run, yes=True)
    assert (run / "ledger.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("tail", "said"),
    [(b"\x01\x08\0\0\0half a record", "are a record that was not finished"), (bytes(7000), "were never written")],
)
def test_an_unfinished_tail_is_cut_off_and_said_to_be_harmless(
    tail: bytes, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = contents(run)
    (run / "ledger.bin").write_bytes(whole["ledger.bin"] + tail)
    assert repair.command(run, yes=True) == 0
    out = capsys.readouterr().out
    assert f"the last {len(tail):,} {said}" in out and "losing" not in out
    assert contents(run) == {**whole, "ledger.bin.damaged": whole["ledger.bin"] + tail}


@pytest.mark.filterwarnings("ignore:.* lacks the reports of")
def test_damaged_reports_are_cut_off_and_the_run_can_be_resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = contents(run)
    damage(run / "reports.bin", len(whole["reports.bin"]) // 2)
    (run / "summary.json").unlink()
    with pytest.raises(LedgerError, match=r"reports of round \d .*cyber0 repair"):
        Run.resume(run)
    assert repair.command(run, yes=True) == 0
    assert "can't be decided again (`cyber0 verify --decisions`)" in capsys.readouterr().out
    assert len((run / "reports.bin.damaged").read_bytes()) == len(whole["reports.bin"])
    assert whole["reports.bin"].startswith((run / "reports.bin").read_bytes())
    Run.resume(run).run()
    with pytest.raises(LedgerError, match=r"does not hold the reports of round [34]"):
        replays.check_decisions(run, Ledger.open(run / "ledger.bin"))


def clear(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def tamper_weights(path: Path) -> None:
    damage(path, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [("config.toml", clear, "not valid TOML"), ("config.toml", Path.unlink, "is missing"),
     ("w0.safetensors", clear, "can't be read as safetensors"), ("w0.safetensors", tamper_weights, "digest differs"),
     ("summary.json", clear, "can't be read as a summary"), ("metrics.csv", clear, "what follows is damaged")],
)  # fmt: skip
def test_what_follows_from_the_ledger_is_made_again(
    name: str, harm: Callable[[Path], None], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, digest = contents(run), json.loads((run / "summary.json").read_text())["model_digest"]
    harm(run / name)
    left = (run / name).read_bytes() if (run / name).exists() else None
    assert repair.command(run, yes=True) == 0
    assert said in capsys.readouterr().out
    if left is not None and name != "metrics.csv":
        assert (run / f"{name}.damaged").read_bytes() == left
    Run.resume(run).run()
    assert rebuild(run)[1].digest() == digest
    if name in ("config.toml", "w0.safetensors"):
        assert (run / name).read_bytes() == whole[name]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cyber0", "fedavg", "mezo"])
@pytest.mark.parametrize("change", ["", "lr = 0.5", None, "rounds = "])
def test_a_config_that_is_not_the_runs_is_named_and_restored(
    change: str | None, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file is valid TOML: it has all settings at their defaults."""
    folder = tmp_path / "run"
    Run.start(config("rounds=2", "federation.byzantine=0", f"method.name={method}"), folder).run()
    assert repair.command(folder, yes=False) == 0
    file = folder / "config.toml"
    whole = file.read_text()
    if change is None:
        file.unlink()
    else:
        file.write_text(re.sub(r"(?m)^lr = .*$", change, whole) if change.startswith("lr") else change)
        left = file.read_bytes()
    with pytest.raises((ConfigError, LedgerError), match=rf"cyber0 repair {folder}"):
        Run.resume(folder)
    assert repair.command(folder, yes=True) == 0
    out = capsys.readouterr().out
    assert "config.toml from the settings in" in out
    if change == "lr = 0.5":
        assert "method.lr (now 0.5, on record" in out
    if method != "mezo":  # whose ledger records the one client that it has
        assert file.read_text() == whole
    if change is not None:
        assert (folder / "config.toml.damaged").read_bytes() == left
    Run.resume(folder).run()


@pytest.mark.parametrize("harm", [tamper_weights, clear])
def test_resuming_writes_damaged_starting_weights_again(harm: Callable[[Path], None], run: Path) -> None:
    whole = (run / "w0.safetensors").read_bytes()
    harm(run / "w0.safetensors")
    with pytest.warns(RuntimeWarning, match=r"w0\.safetensors was damaged and is written again"):
        Run.resume(run).run()
    assert (run / "w0.safetensors").read_bytes() == whole


def test_a_single_ledger_file_is_repaired(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = (run / "ledger.bin").rename(tmp_path / "tuning.ledger")
    place = Ledger.open(path)._offsets[5]
    damage(path, place + 20)
    damaged = path.read_bytes()
    with pytest.raises(LedgerError, match=rf"cyber0 repair {path}"):
        Ledger.open(path)
    assert repair.command(path, yes=False) == 1 and path.read_bytes() == damaged
    assert repair.command(path, yes=True) == 0
    assert "cut tuning.ledger off after round 4" in capsys.readouterr().out
    assert (tmp_path / "tuning.ledger.damaged").read_bytes() == damaged and path.read_bytes() == damaged[:place]


def test_an_empty_ledger_is_said_to_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "tuning.ledger"
    path.touch()
    for read in (Ledger.open, lambda path: repair.command(path, yes=True)):
        with pytest.raises(LedgerError, match=r"is empty: nothing was written to it, so it can be deleted$"):
            read(path)


def test_a_tail_of_zeros_is_not_called_a_torn_record(run: Path) -> None:
    path = run / "ledger.bin"
    path.write_bytes(path.read_bytes() + bytes(7000))
    assert Ledger.open(path).tail == "7000 bytes at the end that were never written"


def test_reports_that_are_gone_are_missed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "reports.bin").unlink()
    ledger = Ledger.open(run / "ledger.bin")
    with pytest.raises(LedgerError, match="though the run stored its reports: rounds 0 to 7 can't be checked"):
        replays.check_decisions(run, ledger)
    assert repair.command(run, yes=True) == 1
    assert "reports.bin: is missing: none of the 8 rounds can be decided again" in capsys.readouterr().out
    damage(run / "ledger.bin", ledger._offsets[5] + 20)
    repair.command(run, yes=True)
    with pytest.warns(RuntimeWarning, match="lacks the reports of 5 of the ledger's 5 rounds"):
        Run.resume(run).run()
    capsys.readouterr()
    assert repair.command(run, yes=True) == 1
    assert "up to round 7 are good" in (out := capsys.readouterr().out) and "those of 5 of the 8 rounds are" in out
    with pytest.raises(LedgerError, match="rounds 0 to 4 can't be checked"):
        replays.check_decisions(run, Ledger.open(run / "ledger.bin"))


def test_a_ledger_without_a_readable_header_can_not_be_repaired(run: Path) -> None:
    damage(run / "ledger.bin", 40)
    before = contents(run)
    with pytest.raises(LedgerError, match=r"header .* CRC-32 is wrong\. .*nothing to repair: restore ledger\.bin"):
        repair.command(run, yes=True)
    assert contents(run) == before


def test_a_run_that_is_going_on_is_not_repaired(tmp_path: Path) -> None:
    for method in ("cyber0", "fedavg"):
        going = Run.start(config("rounds=2", f"method.name={method}"), tmp_path / method)
        with pytest.raises(LedgerError, match="being written by another process"):
            repair.command(tmp_path / method, yes=True)
        going.run()
        assert repair.command(tmp_path / method, yes=True) == 0


def test_a_broken_state_is_put_aside_and_the_run_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    digest = Run.start(config("rounds=2", "method.name=fedavg"), folder).run()["model_digest"]
    (folder / "state.safetensors").write_bytes((folder / "state.safetensors").read_bytes()[:-5])
    assert repair.command(folder, yes=True) == 0
    assert "starts from the first round" in capsys.readouterr().out
    assert (folder / "state.safetensors.damaged").exists() and not (folder / "state.safetensors").exists()
    assert Run.resume(folder).run()["model_digest"] == digest


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """A finished run of a method without a ledger."""
    Run.start(config("rounds=2", "method.name=fedavg"), tmp_path / "run").run()
    return tmp_path / "run"


@pytest.mark.parametrize("harm", [clear, Path.unlink])
def test_the_config_of_a_run_without_a_ledger_is_restored_from_its_state(
    harm: Callable[[Path], None], baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (baseline / "config.toml").read_bytes()
    harm(baseline / "config.toml")
    assert repair.command(baseline, yes=True) == 0
    assert "write config.toml from the settings in state.safetensors" in capsys.readouterr().out
    assert (baseline / "config.toml").read_bytes() == before


def rewrite_state(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Write the metadata of a checkpoint anew."""
    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata())
    change(about)
    save_file(load_file(path), path, metadata=about)


@pytest.mark.parametrize("place", [-1, -40])
def test_a_flipped_bit_in_the_weights_of_a_state_is_found_and_put_aside(
    place: int, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = json.loads((baseline / "summary.json").read_text())["model_digest"]
    damage(baseline / "state.safetensors", place)
    with pytest.raises(DataError, match=r"state\.safetensors was changed after it was written.*cyber0 repair \S*run"):
        Run.resume(baseline)
    assert repair.command(baseline, yes=True) == 0
    assert "its digest is wrong" in capsys.readouterr().out
    assert (baseline / "state.safetensors.damaged").exists()
    assert Run.resume(baseline).run()["model_digest"] == digest


def test_changed_counters_of_a_state_are_found(baseline: Path) -> None:
    def change(about: dict[str, str]) -> None:
        about["progress"] = about["progress"].replace('"round": 2', '"round": 1')

    rewrite_state(baseline / "state.safetensors", change)
    with pytest.raises(DataError, match="its digest is wrong"):
        Run.resume(baseline)


def test_the_state_of_an_earlier_version_has_no_digest_and_is_read(baseline: Path) -> None:
    digest = json.loads((baseline / "summary.json").read_text())["model_digest"]
    rewrite_state(baseline / "state.safetensors", lambda about: about.pop("digest") and None)
    assert repair.command(baseline, yes=True) == 0
    assert Run.resume(baseline).run()["model_digest"] == digest


def test_a_ledger_that_is_gone_is_said_to_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "ledger.bin").unlink()
    before = contents(run)
    assert repair.command(run, yes=True) == 1
    out = capsys.readouterr().out
    assert "ledger.bin: is missing: the decisions of the run are lost" in out
    assert "can't be repaired: ledger.bin" in out and "nothing to repair" not in out
    assert contents(run) == before


def test_what_is_left_as_it_is_makes_the_exit_code_1_also_beside_a_repair(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "ledger.bin").unlink()
    clear(run / "summary.json")
    clear(run / "config.toml")
    assert repair.command(run, yes=True) == 1
    out = capsys.readouterr().out
    assert "done: rename summary.json" in out and "can't be repaired: config.toml, ledger.bin" in out


@pytest.mark.parametrize("ended", [True, False])
def test_a_state_that_is_gone_is_a_loss_unless_the_run_has_ended(
    ended: bool, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cyber0 reproduce` removes the weights of runs that have ended."""
    (baseline / "state.safetensors").unlink()
    if not ended:
        (baseline / "summary.json").unlink()
    assert repair.command(baseline, yes=True) == (0 if ended else 1)
    out = capsys.readouterr().out
    assert "state.safetensors: is missing" in out and ("the figures do not need" in out) == ended


def test_a_run_that_was_cut_off_before_it_began_has_nothing_to_repair(baseline: Path) -> None:
    for file in baseline.iterdir():
        if file.name != "config.toml":
            file.unlink()
    assert repair.command(baseline, yes=True) == 0


def test_repair_knows_which_methods_keep_a_ledger() -> None:
    assert set(repair.LEDGER_METHODS) == {name for name, kind in FEDERATIONS.items() if kind.state_file == "ledger.bin"}


def test_a_federators_folder_is_told_what_its_clients_will_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "served.json").write_text("{}")
    damage(run / "ledger.bin", -300)
    repair.command(run, yes=False)
    out = capsys.readouterr().out
    assert "Clients that have seen one of the lost rounds will refuse it" in out and "run --resume" not in out


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="holds no run"):
            repair.command(folder, yes=True)
