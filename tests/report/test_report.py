"""The report: made from a run's folder, whole or broken, with text that is shown and never obeyed."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import make_folder
from synthetic import After, one_thread  # noqa: F401
from synthetic import own_config as blobs_config

from cyber0.cli import main as cli
from cyber0.config.files import load
from cyber0.config.schema import Config
from cyber0.errors import DataError
from cyber0.report import page
from cyber0.report.contents import contents
from cyber0.report.folder import read
from cyber0.report.headline import byte_text, command
from cyber0.report.thin import thin
from cyber0.report.writer import ReportWriter
from cyber0.runs import environment
from cyber0.runs.run import Run

ASSETS = Path(page.__file__).parent / "assets"


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accuracy_picture", "suspects_picture", "partition_picture"):
        monkeypatch.setattr(f"cyber0.report.plots.{name}", lambda *_, **__: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "run")


class Parts(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._script = tag == "script"

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts.append(data)
            self._script = False

    @property
    def data(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.scripts[0])
        return result


def parts_of(path: Path) -> Parts:
    return Parts(path.read_text(encoding="utf-8"))


def test_a_run_ends_with_its_report_and_its_environment(tmp_path: Path, no_pictures: None) -> None:
    run = Run.start(blobs_config("rounds=6", "evaluate_every=2"), tmp_path / "run")
    summary = run.run([ReportWriter()])
    (shown,) = parts_of(tmp_path / "run/report.html").data["runs"]
    assert shown["curve"]["columns"]["round"] == [0, 2, 4, 6]
    assert shown["curve"]["columns"]["accuracy"][-1] == pytest.approx(summary["final_accuracy"], rel=1e-5)
    trimmed = {row[0]: (row[1], row[2], row[3]) for row in shown["clients"]["rows"]}
    assert trimmed == {i: (bool(byzantine), sent, cut) for i, byzantine, sent, cut in run.suspects()}
    assert [row[3:] for row in shown["partition"]["rows"]] == run.simulation.label_counts().tolist()
    assert shown["clients"]["expected"] == pytest.approx(0.5)
    assert {"python", "torch", "numpy", "cyber0", "platform", "cpu_count", "torch_threads"} <= set(
        summary["environment"]
    )
    assert dict(shown["environment"])["torch"] == summary["environment"]["torch"]


def test_who_resumes_a_run_that_has_ended_has_not_run_it(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.start(blobs_config("rounds=2"), tmp_path / "run").run()
    here = json.loads((tmp_path / "run/summary.json").read_text())["environment"]
    monkeypatch.setattr(environment, "describe", lambda device: {"cyber0": "elsewhere"})
    assert Run.resume(tmp_path / "run").run()["environment"] == here


def test_the_digest_of_the_source_covers_every_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment.source_digest()
    shutil.copytree(environment.PACKAGE, tmp_path / "cyber0")
    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "cyber0")
    assert environment.source_digest.__wrapped__() == before
    for room in ("directions", "report"):
        file = tmp_path / "cyber0" / room / "__init__.py"
        text = file.read_text()
        file.write_text(text + "# changed")
        assert environment.source_digest.__wrapped__() != before
        file.write_text(text)


def test_the_commit_of_a_checkout_is_read_without_git(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert environment._commit(tmp_path) is None
    for order in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c", "--allow-empty"],
                  ["worktree", "add", "-q", "side"]):  # fmt: skip
        subprocess.run(["git", *order], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "side/pyproject.toml").touch()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    assert environment._commit(tmp_path) == environment._commit(tmp_path / "side") == head
    subprocess.run(["git", "pack-refs", "--all"], cwd=tmp_path, check=True)
    assert environment._commit(tmp_path) == environment._commit(tmp_path / "side") == head


def test_the_page_needs_nothing_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    parts = parts_of(page.write([folder], tmp_path / "report.html"))
    for tag, attributes in parts.tags:
        assert "src" not in attributes and tag not in ("iframe", "object", "embed", "base")
        assert attributes.get("href", "data:,") == "data:,"
    policy = next(a["content"] for t, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;@@data@@\u2028--><b>"


def test_text_of_a_run_is_shown_and_never_obeyed(tmp_path: Path) -> None:
    plain = parts_of(page.write([make_folder(tmp_path / "run")], tmp_path / "plain.html"))
    name = HOSTILE.replace("/", "\u2215")
    hostile = make_folder(tmp_path / name, data=HOSTILE, environment={HOSTILE: HOSTILE})
    parts = parts_of(page.write([hostile], tmp_path / "report.html"))
    assert [tag for tag, _ in parts.tags] == [tag for tag, _ in plain.tags]
    assert parts.scripts[1:] == plain.scripts[1:]
    (run,) = parts.data["runs"]
    assert run["name"] == name
    assert HOSTILE in [item["value"] for item in run["config"]]
    assert [HOSTILE, HOSTILE] in run["environment"]


def test_the_assets_are_the_ones_that_are_named() -> None:
    promised = re.findall(r"^([0-9a-f]{64})  (\S+)$", (ASSETS / "README.md").read_text(), re.MULTILINE)
    assert len(promised) == 2
    for digest, name in promised:
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
    assert "Permission is hereby granted" in (ASSETS / "uplot.LICENSE").read_text()
    for script in ("uplot.min.js", "report.js"):
        assert "</script" not in (ASSETS / script).read_text().lower()


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=400),
    st.integers(6, 50),
)
def test_thinning_keeps_the_ends_and_every_extreme(rows: list[tuple[float, float]], most: int) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    kept = thin(columns, most)
    assert kept == sorted(set(kept)) and len(kept) <= most
    assert kept[0] == 0 and kept[-1] == len(rows) - 1
    if len(rows) <= most:
        assert kept == list(range(len(rows)))
    for column in columns:
        finite = [value for value in column if math.isfinite(value)]
        if finite:
            shown = [column[i] for i in kept if math.isfinite(column[i])]
            assert (min(shown), max(shown)) == (min(finite), max(finite))


@pytest.mark.slow
def test_a_run_of_20_000_evaluations_makes_a_small_report(tmp_path: Path) -> None:
    out = page.write([make_folder(tmp_path / "long", rounds=20_000, clients=5_000)], tmp_path / "report.html")
    assert out.stat().st_size < 3_000_000
    (run,) = parts_of(out).data["runs"]
    assert run["curve"]["evaluations"] == 20_001 and len(run["curve"]["columns"]["round"]) <= 2_000
    assert run["clients"]["total"] == 5_000 and len(run["clients"]["rows"]) < 500
    shares = [row[3] / row[2] for row in run["clients"]["rows"]]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.slow
def test_a_hundred_long_runs_still_make_a_small_report(tmp_path: Path) -> None:
    text = page.page([read(make_folder(tmp_path / "0", rounds=700))] * 100)
    assert len(text) < 6_000_000
    assert {len(run["curve"]["columns"]["round"]) for run in Parts(text).data["runs"]} <= set(range(100, 401))


@pytest.mark.parametrize("lost", ["config.toml", "metrics.csv", "clients.csv", "partition.csv", "summary.json"])
@pytest.mark.parametrize("how", ["gone", "empty", "garbage", "cut"])
def test_what_is_missing_or_broken_is_said(folder: Path, tmp_path: Path, lost: str, how: str) -> None:
    whole = (folder / lost).read_bytes()
    if how == "gone":
        (folder / lost).unlink()
    else:
        broken = {"empty": b"", "garbage": b"\xff\x00=[,\nx,y\n\xfe", "cut": whole[: len(whole) * 2 // 3]}
        (folder / lost).write_bytes(broken[how])
    (run,) = parts_of(page.write([folder], tmp_path / "report.html")).data["runs"]
    told = any(lost in note for note in run["notes"])
    # A TOML or CSV file that was cut may by chance end at the end of a line; that is no fault to be found.
    assert told or (how == "cut" and lost.endswith((".csv", ".toml"))) or (how == "empty" and lost == "config.toml")
    assert run["ended"] == (lost != "summary.json")


def test_a_run_that_goes_on_is_told_from_one_that_has_ended(folder: Path) -> None:
    (folder / "summary.json").unlink()
    (run,) = contents([read(folder)])["runs"]
    assert not run["ended"] and "of 50 rounds" not in run["sentence"]
    shutil.copy(folder / "metrics.csv", folder / "m")
    (folder / "metrics.csv").write_text("".join((folder / "m").read_text().splitlines(keepends=True)[:10]))
    (run,) = contents([read(folder)])["runs"]
    assert "after 8 of 50 rounds" in run["sentence"]


def test_who_was_trimmed_so_far_comes_from_the_ledger(tmp_path: Path, no_pictures: None) -> None:
    run = Run.start(blobs_config("rounds=8"), tmp_path / "run")

    with pytest.raises(KeyboardInterrupt):
        run.run([After(5, KeyboardInterrupt())])
    found = read(tmp_path / "run")
    assert [tuple(row) for row in found.clients] == [tuple(row) for row in run.suspects()]
    assert any("summary.json" in note for note in found.notes)


def test_losses_that_are_no_numbers_are_gaps_and_are_mentioned(folder: Path, tmp_path: Path) -> None:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    for row in rows[20:]:
        row[2] = "nan" if int(row[0]) % 2 else "inf"
    with (folder / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (run,) = parts_of(page.write([folder], tmp_path / "report.html")).data["runs"]
    assert run["curve"]["columns"]["loss"][19:] == [None] * 32
    assert any("not a finite number" in note and "round 19" in note for note in run["notes"])


def test_a_deployment_does_not_know_who_lies(folder: Path) -> None:
    lines = [line.split(",") for line in (folder / "clients.csv").read_text().splitlines()]
    (folder / "clients.csv").write_text("\n".join(",".join([a, *rest]) for a, _, *rest in lines))
    assert {row.byzantine for row in read(folder).clients} == {None}


SETTINGS = ["seed=18446744073709551615", "method.lr=1e-7", "federation.attack=sign_flip", "federation.accept_risk=true",
            "task.data=/some where/it's \"here\" = $HOME", "federation.partition=dirichlet", "method.k=7"]  # fmt: skip


@pytest.mark.parametrize("count", range(len(SETTINGS) + 1))
def test_the_command_repeats_the_run_to_the_letter(folder: Path, count: int) -> None:
    from cyber0.config.files import to_toml

    config = Config().with_overrides(SETTINGS[:count])
    (folder / "config.toml").write_text(to_toml(config))
    program, verb, *rest = shlex.split(command(read(folder)))
    assert (program, verb) == ("cyber0", "run") and set(rest[::2]) <= {"--set"}
    assert load(None, rest[1::2]) == config


DEV = {"task": "sst2", "dev_accuracy": 0.9, "dev_loss": 0.3, "test_accuracy": 0.8125, "test_loss": 0.4321}


def named_figures(run: dict[str, Any]) -> dict[str, str]:
    return {f["label"]: f["text"] for f in run["figures"] if f["key"] in ("accuracy", "loss")}


@pytest.mark.parametrize("recorded", [{"evaluated_on": "dev"}, {}], ids=["now", "before it was recorded"])
def test_figures_of_the_dev_set_are_called_so_and_stand_beside_those_of_the_test_set(
    tmp_path: Path, recorded: dict[str, str]
) -> None:
    (run,) = contents([read(make_folder(tmp_path / "run", task="sst2", more=DEV | recorded))])["runs"]
    last = f"{100 * run['curve']['columns']['accuracy'][-1]:.2f} %"
    assert run["set"] == "dev"
    assert f"has {last} dev accuracy (81.25 % on the test set) after 50 rounds" in run["sentence"]
    shown = named_figures(run)
    assert list(shown) == ["dev accuracy", "test accuracy", "dev loss", "test loss"]
    assert (shown["dev accuracy"], shown["test accuracy"], shown["test loss"]) == (last, "81.25 %", "0.4321")


@pytest.mark.parametrize(
    ("task", "more"),
    [("mnist", {}), ("trec", {"test_accuracy": 0.9, "test_loss": 0.3}), ("sst2", {"test_accuracy": 0.9})],
)
def test_a_task_with_a_test_set_alone_has_one_accuracy(tmp_path: Path, task: str, more: dict[str, Any]) -> None:
    (run,) = contents([read(make_folder(tmp_path / "run", task=task, more=more))])["runs"]
    assert run["set"] == "test" and list(named_figures(run)) == ["test accuracy", "test loss"]
    assert re.search(r"has \S+ % test accuracy after 50 rounds", run["sentence"])


@pytest.mark.parametrize(
    ("task", "data", "evaluated"),
    [("sst2", "", "dev"), ("sst2", "/own", None), ("snli", "", "test"), ("mnist", "/own", "test")],
)
def test_a_run_that_goes_on_names_the_set_unless_a_folder_of_the_users_decides_it(
    tmp_path: Path, task: str, data: str, evaluated: str | None
) -> None:
    folder = make_folder(tmp_path / "run", task=task, data=data)
    (folder / "summary.json").unlink()
    (run,) = contents([read(folder)])["runs"]
    assert run["set"] == evaluated
    label = f"{evaluated} accuracy" if evaluated else "accuracy"
    assert label in named_figures(run) and f" % {label} after 50 rounds" in run["sentence"]


def test_a_folder_without_settings_does_not_guess_the_set(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (folder / "config.toml").unlink()
    assert read(folder).evaluated_on is None


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [make_folder(tmp_path / name) for name in ("a/x/run", "b/x/run", "other")]
    assert [run["name"] for run in contents([read(p) for p in paths])["runs"]] == ["a/x/run", "b/x/run", "other"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (51200, "51.2 kB"), (12_560_000, "12.56 MB")])
def test_bytes_can_be_read_at_a_glance(count: int, text: str) -> None:
    assert byte_text(count) == text


def test_a_folder_without_a_run_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "nowhere", "there is no folder"), (tmp_path / "empty", "holds no run"),
                        (folder / "config.toml", "is a file"), (folder.parent, "of its folders do")):  # fmt: skip
        with pytest.raises(DataError, match=words):
            read(path)


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["cyber0", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code if isinstance(stop.value.code, int) else 0


def test_the_command_writes_beside_one_run_and_here_for_several(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    other = make_folder(tmp_path / "other")
    assert report(monkeypatch, folder) == 0 and (folder / "report.html").exists()
    assert report(monkeypatch, "run", "other") == 0 and (tmp_path / "report.html").exists()
    assert len(parts_of(tmp_path / "report.html").data["runs"]) == 2
    capsys.readouterr()
    assert report(monkeypatch, other, "other", "run/../other", "--out", "sub/o.html") == 0
    assert "of the 3 folders given, 1 differ" in capsys.readouterr().err
    assert len(parts_of(tmp_path / "sub/o.html").data["runs"]) == 1


def test_the_command_overwrites_reports_and_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<h1>mine</h1>")
    assert report(monkeypatch, folder, "--out", mine) == 2
    assert "choose another name" in capsys.readouterr().err and mine.read_text() == "<h1>mine</h1>"
    assert report(monkeypatch, folder, "--out", tmp_path) == 2
    assert "name the file" in capsys.readouterr().err
    for _ in range(2):
        assert report(monkeypatch, folder, "--out", tmp_path / "new.html") == 0
    assert not list(tmp_path.glob(".*"))


def test_a_report_that_can_not_be_written_is_named_with_the_remedy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("")
    assert report(monkeypatch, folder, "--out", tmp_path / "file" / "r.html") == 2
    first = capsys.readouterr().err
    assert f"{tmp_path}/file/r.html can't be written: " in first and "--out FILE" in first and "Errno" not in first
    monkeypatch.setattr(Path, "write_text", refuse)  # who runs tests may write anywhere
    assert report(monkeypatch, folder) == 2
    expected = f"error: {folder}/report.html can't be written: Permission denied; choose another with --out FILE\n"
    assert capsys.readouterr().err == expected


def test_a_report_is_not_blamed_for_an_input_that_can_not_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path / "metrics.csv"))

    monkeypatch.setattr(page, "read", refuse)
    assert report(monkeypatch, folder) == 2
    expected = f"error: {folder}/metrics.csv can't be read for the report: Permission denied\n"
    assert capsys.readouterr().err == expected
