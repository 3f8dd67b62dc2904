"""Which run is which: finished runs are found again wherever their model and data are."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import quick_worker
from studies import cells_of, rows_of

from cyber0.config.files import load
from cyber0.config.schema import Config, to_dict
from cyber0.study import Cell, Study, identity
from cyber0.study import engine as engine_module
from cyber0.study.cells import write_csv
from cyber0.study.display import notes


def text_cells(place: Path, *, data: str = "", seeds: int = 2) -> list[Cell]:
    given = ["task.name=sst2", f"task.model={place}", f"task.data={data}"]
    return [Cell({"model": "m"}, Config().with_overrides([*given, f"seed={seed}"])) for seed in range(seeds)]


def rename_by_path(out: Path) -> None:
    """Name the folders of runs as an earlier version did: by the paths of their models."""
    for folder in list((out / "runs").iterdir()):
        key = identity.digest_by_path(load(folder / "config.toml"))
        folder.rename(folder.with_name(f"{folder.name.rpartition('-')[0]}-{key}"))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_data_that_is_changed_in_place_is_other_data(quick: Path) -> None:
    Path("a/mn").mkdir(parents=True)
    Path("a/mn/train.tsv").write_text("text")
    Study(text_cells(Path("org/m"), data="a/mn"), Path("out"), 1).run()
    Path("a/mn/train.tsv").write_text("Text")
    assert Study(text_cells(Path("org/m"), data="a/mn"), Path("out"), 1).finished() == 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_that_was_cut_off_stays_where_it_is_while_its_data_is_gone(quick: Path) -> None:
    data = Path("mn").resolve()
    data.mkdir()
    cells = text_cells(Path("org/m"), data=str(data), seeds=1)
    folder = Path("out") / Study(cells, Path("out"), 1).run()[0].folder
    (folder / "summary.json").unlink()
    data.rmdir()
    Study(text_cells(Path("org/m"), data=str(data), seeds=1), Path("out"), 1)._set_aside()
    assert folder.exists()


@pytest.mark.slow
def test_a_copy_of_the_model_is_the_same_and_another_of_its_name_is_not(quick: Path) -> None:
    for folder, text in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        Path(folder).mkdir()
        Path(folder, "m.gguf").write_bytes(text)
    Study(text_cells(Path("a/m.gguf").resolve()), Path("out"), 1).run()
    for _ in range(2):
        assert Study(text_cells(Path("b/m.gguf").resolve()), Path("out"), 1).finished() == 2
        assert Study(text_cells(Path("c/m.gguf").resolve()), Path("out"), 1).finished() == 0
        rename_by_path(Path("out"))


@pytest.mark.slow
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


@pytest.mark.slow
def test_finished_runs_are_found_where_the_model_is_not(quick: Path) -> None:
    place = Path("m.gguf").resolve()
    place.write_text("weights")
    Study(text_cells(place), Path("out"), 1).run()
    place.unlink()
    assert Study(text_cells(place), Path("out"), 1).finished() == 2
    assert Study(text_cells(Path("/elsewhere/m.gguf")), Path("out"), 1).finished() == 2
    assert Study(text_cells(Path("/elsewhere/n.gguf")), Path("out"), 1).finished() == 0


@pytest.mark.slow
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


@pytest.mark.slow
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
        quick_worker.run_job(out / "runs" / cell.folder_name, cell.config)
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


@pytest.mark.slow
def test_what_is_known_before_a_study_begins_takes_as_many_steps_as_it_has_cells(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: Counter[str] = Counter()
    large: Counter[str] = Counter()
    moved_study(8, small, monkeypatch)
    moved_study(32, large, monkeypatch)
    assert small["read_figures"] == small["load"] == 4
    assert large == Counter({name: 4 * count for name, count in small.items()})


@pytest.mark.slow
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


@pytest.mark.slow
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
