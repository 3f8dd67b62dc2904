"""The trained model: what is written, when, and what it may replace."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from headers import make_header
from own_tasks import Pictures, blobs
from safetensors.torch import load_file, load_model
from synthetic import FEATURES, OTHER_BLOBS, OWN_BLOBS, After, Tied, one_thread  # noqa: F401
from torch import nn
from typer.testing import CliRunner

import cyber0
from cyber0.cli import main as cli
from cyber0.config.files import load
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.ledger import Ledger
from cyber0.runs import export as exports
from cyber0.runs.run import Run
from cyber0.study.cells import Cell
from cyber0.study.engine import Study

HERE = Path(__file__).parents[1]


SETTINGS = "rounds = 4\nevaluate_every = 2\n[federation]\nclients = 5\nbyzantine = 1\n[method]\nk = 4\nbatch_size = 8\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: a task with batch normalisation, and a config that names it."""
    shutil.copy(HERE / "own_tasks.py", tmp_path / "my_task.py")
    (tmp_path / "config.toml").write_text(f'{SETTINGS}[task]\nname = "my_task.py:Pictures"\n')
    return tmp_path


def start(home: Path, *overrides: str, **more: Any) -> Run:
    return Run.start(load(home / "config.toml", overrides), home / "run", **more)


def cyber0_(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_trained_model_loads_into_the_module_with_its_buffers(home: Path) -> None:
    run = start(home)
    digest = run.run()["model_digest"]
    model = Pictures().model()
    model.load_state_dict(load_file(home / "run/model.safetensors"))  # strict: nothing is missing
    trained = run.simulation.parameters.model
    assert all(torch.equal(t, trained.state_dict()[name]) for name, t in model.state_dict().items())
    again = Run.start(load(home / "config.toml", [f"task.weights={home / 'run/model.safetensors'}"]), home / "next")
    assert again.simulation.parameters.digest() == digest
    assert again.simulation.parameters.rest_digest() == run.simulation.parameters.rest_digest()
    again.simulation.close()
    assert [path.name for path in (home / "run").glob(".*")] == []  # nothing of how it was written is left


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    inputs = blobs(60, 1)[0].view(-1, FEATURES)
    task = cyber0.Task.of(Tied(), (inputs, torch.arange(60) % 4))
    run = Run.start(Config().with_overrides(["rounds=2", "method.k=4"]), tmp_path / "run", task=task)
    run.run()
    assert "second.weight" not in load_file(tmp_path / "run/model.safetensors")
    model = Tied()
    load_model(model, tmp_path / "run/model.safetensors")
    assert torch.equal(model.second.weight, run.simulation.parameters.model.get_parameter("first.weight"))


def test_a_method_without_a_ledger_leaves_its_model_too(home: Path) -> None:
    run = start(home, "method.name=fedavg", "federation.byzantine=0")
    run.run()
    model = Pictures().model()
    model.load_state_dict(load_file(home / "run/model.safetensors"))
    assert torch.equal(model[0].weight, run.simulation.parameters.model.get_parameter("0.weight"))


@pytest.mark.slow
def test_no_export_leaves_the_model_out_and_otherwise_a_line_says_where_it_is(home: Path) -> None:
    printed = cyber0_("run", home / "config.toml", "--out", home / "with")
    assert f"trained model: {home / 'with/model.safetensors'}" in printed
    printed = cyber0_("run", home / "config.toml", "--out", home / "without", "--no-export")
    assert "trained model" not in printed and not (home / "without/model.safetensors").exists()
    cyber0_("run", "--resume", home / "without", "--no-export")
    assert not (home / "without/model.safetensors").exists()
    cyber0_("run", "--resume", home / "without")
    assert (home / "without/model.safetensors").read_bytes() == (home / "with/model.safetensors").read_bytes()


def test_a_run_resumed_at_its_end_writes_the_model_only_where_it_is_not_whole(home: Path) -> None:
    start(home).run()
    path = home / "run/model.safetensors"
    written, content = path.stat(), path.read_bytes()
    Run.resume(home / "run").run()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    for damage in (path.unlink, lambda: path.write_bytes(content[:-4] + b"    "), lambda: path.write_bytes(b"")):
        damage()
        Run.resume(home / "run").run()
        assert path.read_bytes() == content


def test_verify_refuses_a_model_that_is_not_what_the_ledger_gives(home: Path) -> None:
    start(home).run()
    assert "model.safetensors: the weights that w0 and the ledger give" in cyber0_("verify", home / "run")
    shutil.copy(home / "run/w0.safetensors", home / "run/model.safetensors")
    with pytest.raises(LedgerError, match=r"model.safetensors is not the model that w0 and the ledger give; delete it"):
        cyber0_("verify", home / "run")


@pytest.mark.slow
def test_the_runs_of_a_study_have_no_copy_of_their_model(home: Path) -> None:
    study = Study([Cell({}, load(home / "config.toml"))], home / "study", workers=1)
    (result,) = study.run()
    assert result.status == "done"
    assert not list((home / "study").rglob("model.safetensors")) and list((home / "study").rglob("w0.safetensors"))


def test_a_module_of_transformers_in_a_task_of_ones_own_is_written_as_its_weights(tmp_path: Path) -> None:
    class Saving(nn.Linear):
        def save_pretrained(self, _: object) -> None:
            raise AssertionError("only a text task's model goes with a tokenizer and a card")

    task = cyber0.Task.of(Saving(3, 2), (torch.eye(3).repeat(20, 1), torch.arange(60) % 2))
    run = Run.start(Config().with_overrides(["rounds=2", "method.k=4"]), tmp_path / "run", task=task)
    digest = run.run()["model_digest"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["model_digest"] == digest
    assert set(load_file(tmp_path / "run/model.safetensors")) == {"weight", "bias"}


@pytest.mark.parametrize("export", [True, False])
def test_a_model_that_is_not_of_the_run_is_never_in_its_way(export: bool, tmp_path: Path) -> None:
    """Nor when the run itself leaves its model out: who resumes it may not."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_text("precious")
    with pytest.raises(ConfigError, match=r"model\.safetensors exists already.* choose another folder"):
        Run.start(Config(rounds=2), tmp_path / "run", export=export)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "run" / "model.safetensors").read_text() == "precious"


class Exported:
    """A language model, as far as exporting goes: it writes as safetensors does, with a mode of its own."""

    save_pretrained = True

    def __init__(self, weights: str) -> None:
        self.weights, self.model = weights, self

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(self.weights)
            (folder / name).chmod(0o600)
        if self.weights == "broken":
            raise DataError("no tokenizer")


@pytest.mark.parametrize("umask", [0o022], indirect=True)
def test_an_exported_model_replaces_another_in_whole_or_not_at_all(
    umask: int, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cyber0.tasks.text.task.export", lambda config, parameters, out, **_: parameters.model.write(out)
    )
    out = tmp_path / "tuned"
    exports.check_replaceable(out)
    assert exports.export(ledger, Exported("first"), out)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tuned is a folder that holds files already.*--force"):
        exports.check_replaceable(out)
    exports.check_replaceable(out, force=True)
    (out / "adapter_model.safetensors").write_text("of the first")
    with pytest.raises(DataError, match="no tokenizer"):
        exports.export(ledger, Exported("broken"), out)  # type: ignore[arg-type]
    assert {p.name: p.read_text() for p in out.iterdir()} == {
        "config.json": "first", "model.safetensors": "first", "adapter_model.safetensors": "of the first"}  # fmt: skip
    exports.export(ledger, Exported("second"), out)  # type: ignore[arg-type]
    assert {p.name: p.read_text() for p in out.iterdir()} == {"config.json": "second", "model.safetensors": "second"}
    assert {oct(p.stat().st_mode & 0o777) for p in out.iterdir()} == {"0o644"}
    assert [p.name for p in tmp_path.iterdir()] == ["tuned"]


def exported(out: Path, *more: str) -> Path:
    """Make a folder as an export leaves it, and files that it does not write."""
    for name in (
        "config.json",
        "model.safetensors",
        "base/config.json",
        "additional_chat_templates/tools.jinja",
        *more,
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    return out


@pytest.mark.parametrize("stranger", ["src/thesis.tex", "thesis.tex", "base/thesis.tex", "src/config.json",
                                      "a/b/model.safetensors", "my-model.safetensors"])  # fmt: skip
def test_force_replaces_no_folder_that_holds_anything_but_a_model(stranger: str, tmp_path: Path) -> None:
    exports.check_replaceable(exported(tmp_path / "tuned"), force=True)
    out = exported(tmp_path / "proj", stranger)
    with pytest.raises(ConfigError, match=rf"proj holds {stranger.partition('/')[0]}.*--force would delete; move it"):
        exports.check_replaceable(out, force=True)


def test_no_model_replaces_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for out in (Path(), Path("..")):
        with pytest.raises(ConfigError, match="is the current folder or holds it"):
            exports.check_replaceable(out, force=True)


@pytest.mark.parametrize("out", ["base", "models", "base/new.safetensors", "link", "models/../base"])
def test_no_replay_writes_over_the_model_that_the_run_began_with(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = exported(tmp_path / "models")
    (tmp_path / "base").symlink_to(exported(models / "base"))
    (tmp_path / "link").symlink_to(models / "base")
    (tmp_path / "run").mkdir()
    task = {"task": {"name": "sst2", "model": str(tmp_path / "base")}}
    header = replace(make_header(clients=12, k=3), settings=task)
    Ledger.create(tmp_path / "run" / "ledger.bin", header).close()
    with pytest.raises(ConfigError, match=r"the model that the run started from, which replaying needs; name another"):
        exports.check_not_base(tmp_path / "run", Path(out))
    exports.check_not_base(tmp_path / "run", Path("tuned"))
    exports.check_not_base(tmp_path / "run", Path("base"), model="elsewhere")
    exports.check_not_base(tmp_path / "no_run", Path("base"))


@pytest.fixture
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Return the ledger of a run of a language model, which `Exported` stands for."""
    header = replace(make_header(clients=12, k=3), settings={"task": {"name": "sst2", "model": "somewhere"}})
    return Ledger.create(tmp_path_factory.mktemp("run") / "ledger.bin", header)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cyber0.tasks.text.task.export", lambda config, parameters, out, **_: parameters.model.write(out)
    )


@pytest.mark.usefixtures("writes")
def test_an_export_that_fails_leaves_a_new_place_empty(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        exports.export(ledger, Exported("broken"), tmp_path / "tuned")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("writes")
def test_an_export_replaces_a_file_and_leaves_nothing_behind(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("older")
    exports.check_replaceable(tmp_path / "tuned", force=True)
    assert exports.export(ledger, Exported("new"), tmp_path / "tuned")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["tuned"] and (tmp_path / "tuned" / "config.json").exists()


@pytest.mark.usefixtures("writes")
def test_an_export_through_a_link_replaces_what_it_points_to(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(exported(tmp_path / "tuned"))
    assert exports.export(ledger, Exported("new"), tmp_path / "link")  # type: ignore[arg-type]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "tuned" / "config.json").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "tuned"]


@pytest.mark.usefixtures("writes")
def test_an_export_that_can_not_be_moved_into_place_puts_the_older_one_back(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = exported(tmp_path / "tuned"), Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(DataError, match=r"tuned can't be written: Input/output error"):
        exports.export(ledger, Exported("new"), out)  # type: ignore[arg-type]
    assert (out / "config.json").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["tuned"]


@pytest.mark.parametrize("force", [False, True])
def test_a_device_is_never_replaced_by_a_model(force: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        exports.check_replaceable(tmp_path / "pipe.safetensors", force=force)
