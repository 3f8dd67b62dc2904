"""`cyber0 evaluate` and `cyber0 predict`: the model of a run's folder in use."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_tasks import Pictures, blobs
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cyber0.cli import main as cli
from cyber0.config.files import load
from cyber0.errors import ConfigError, Cyber0Error, DataError, LedgerError, ModelError
from cyber0.runs import trained as trained_models
from cyber0.runs.inference import evaluate, predict
from cyber0.runs.run import Run
from cyber0.runs.trained import InferenceOptions

HERE = Path(__file__).parents[1]
SETTINGS = "rounds = 4\nevaluate_every = 2\n[federation]\nclients = 5\nbyzantine = 1\n[method]\nk = 4\nbatch_size = 8\n"
NEEDS_DATA = """
import torch
import cyber0
from own_tasks import Pictures, blobs

class Elsewhere(Pictures):
    def __init__(self, data: str = "", seed: int = 3):
        super().__init__()
        self.data, self.seed = data, seed

    def test_data(self):
        return torch.load(self.data) if self.data else blobs(60, self.seed)

    def metrics(self, outputs, targets):
        return {**super().metrics(outputs, targets), "rows": len(targets)}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with tasks of several kinds."""
    shutil.copy(HERE / "own_tasks.py", tmp_path / "own_tasks.py")
    (tmp_path / "elsewhere.py").write_text(NEEDS_DATA)
    return tmp_path


def play(home: Path, name: str, *overrides: str, export: bool = True) -> Path:
    config = home / "config.toml"
    config.write_text(f'{SETTINGS}[task]\nname = "{name}"\n')
    folder = home / "run"
    Run.start(load(config, overrides), folder, export=export).run()
    return folder


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def cyber0_(*arguments: object, text: str | None = None) -> str:
    done = CliRunner().invoke(cli.app, list(map(str, arguments)), input=text)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


# Evaluating.


def agrees(found: dict[str, Any], summary: dict[str, Any]) -> bool:
    """Tell whether an evaluation gives a summary's figures, to the last bit."""
    metrics = {name: value for name, value in summary["metrics"].items() if name != "accuracy"}
    return (found["loss"], found["accuracy"], found["metrics"], found["model_digest"], found["evaluated_on"]) == (
        summary["final_loss"], summary["final_accuracy"], metrics, summary["model_digest"], summary["evaluated_on"]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("export", [True, False])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("own_tasks.py:Pictures", []), ("own_tasks.py:Line", []), ("own_tasks.py:Codes", []), ("ridge", []),
     ("own_tasks.py:Line", ["task.samples=40"]), ("own_tasks.py:Pictures", ["task.dtype=bfloat16"]),
     ("own_tasks.py:Pictures", ["method.name=mezo", "federation.byzantine=0"]),
     ("own_tasks.py:Pictures", ["method.name=fedavg", "federation.byzantine=0", "task.dtype=bfloat16"])],
)  # fmt: skip
def test_an_evaluation_of_the_runs_own_data_gives_the_summarys_figures(
    name: str, overrides: list[str], export: bool, home: Path
) -> None:
    folder = play(home, name, *overrides, export=export)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agrees(evaluate(folder), summary_of(folder))


def test_an_earlier_round_and_an_unfinished_run_are_evaluated_from_the_ledger(home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    rows = {int(row.split(",")[0]): row.split(",") for row in (folder / "metrics.csv").read_text().splitlines()[1:]}
    for round in (0, 2, 4):
        found = evaluate(folder, options=InferenceOptions(round=round))
        assert (str(found["accuracy"]), str(found["loss"])) == (rows[round][1], rows[round][2])
    with pytest.raises(LedgerError, match="there is no round 5: the ledger has 4 rounds; use 0 to 4"):
        evaluate(folder, options=InferenceOptions(round=5))
    cut = Run.start(load(home / "config.toml"), home / "cut")
    for _ in range(2):
        cut.simulation.run_round()
    cut.simulation.close()
    found = evaluate(home / "cut")
    assert found["round"] == 2 and str(found["loss"]) == rows[2][2]


def test_a_model_that_is_not_the_runs_is_not_used_and_it_is_said(home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    whole = load_file(folder / "model.safetensors")
    other_buffer = {**whole, "1.running_mean": torch.zeros(4)}
    for wrong in ({**whole, "0.bias": torch.zeros(4)}, other_buffer, {"0.bias": torch.zeros(4)}):
        save_file(wrong, folder / "model.safetensors")
        with pytest.warns(RuntimeWarning, match="w0 and the ledger are used instead"):
            found = evaluate(folder)
        assert agrees(found, summary_of(folder))


@pytest.mark.slow
def test_a_model_and_a_summary_that_were_changed_together_are_compared_with_the_ledger(home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    right = evaluate(folder)
    assert right["weights_from"] == "replay"
    assert "weights: replayed from w0 and the ledger" in cyber0_("evaluate", folder)
    run = Run.start(load(home / "config.toml", ["method.lr=0.5"]), home / "other")
    summary = {**summary_of(folder), "model_digest": run.run()["model_digest"]}
    (folder / "summary.json").write_text(json.dumps(summary))
    shutil.copy(home / "other/model.safetensors", folder / "model.safetensors")
    with pytest.warns(RuntimeWarning, match="claim another model than w0 and the ledger give; w0 and the ledger are"):
        assert evaluate(folder) == right


def test_where_replaying_takes_long_an_evaluation_says_that_its_weights_are_those_of_the_summary(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    monkeypatch.setattr(trained_models, "REPLAYED_COORDINATES", 0)
    monkeypatch.setattr(trained_models, "replay", lambda *_: pytest.fail("replayed"))
    found = evaluate(folder)
    assert found["weights_from"] == "export" and agrees(found, summary_of(folder))
    assert re.search("weights: the exported ones, .*`cyber0 verify .*` replays the ledger", cyber0_("evaluate", folder))
    monkeypatch.undo()
    monkeypatch.setattr(trained_models, "REPLAYED_COORDINATES", 0)
    (folder / "summary.json").write_text(json.dumps({**summary_of(folder), "chain": "ab" * 32}))
    with pytest.warns(RuntimeWarning, match=r"summary.json is of another ledger; w0 and the ledger are used instead"):
        assert evaluate(folder)["weights_from"] == "replay"


def test_other_data_of_a_task_of_ones_own_is_its_option_data_or_any_other_option(home: Path) -> None:
    folder = play(home, "elsewhere.py:Elsewhere")
    torch.save(blobs(33, 9), home / "other.pt")
    found = evaluate(folder, str(home / "other.pt"))
    assert found["samples"] == 33 == found["metrics"]["rows"] and found["loss"] != summary_of(folder)["final_loss"]
    assert evaluate(folder, options=InferenceOptions(overrides=["task.options.seed=9"]))["loss"] != found["loss"]
    with pytest.raises(ConfigError, match=r"task.options.data = 'x': Pictures takes no such option"):
        evaluate(folder, "x", InferenceOptions(task=f"{home / 'own_tasks.py'}:Pictures"))
    with pytest.raises(ConfigError, match=r"--set rounds=9 can't change what was trained"):
        evaluate(folder, options=InferenceOptions(overrides=["rounds=9"]))


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


EVIL = (
    "from pathlib import Path\nPath(__file__).with_name('imported').touch()\nfrom own_tasks import Pictures as Spam\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "predict", "diagnose"])
@pytest.mark.parametrize(
    ("tamper", "said"),
    [(lambda home, run: (home / "spam.py").write_text(EVIL + "# other"), r"SHA-256 \w{16} then, \w{16} now"),
     (lambda home, run: rewrite(run / "config.toml", "../spam.py", "../evil.py"), "and the ledger's header 'spam.py:"),
     (lambda home, run: (rewrite(run / "config.toml", "../spam.py", "spam.py"),
                         rewrite(run / "sources.json", "../", ""),
                         shutil.move(home / "spam.py", run / "spam.py")), "a file in the run's folder"),
     (lambda home, run: (run / "sources.json").unlink(), "no sources.json says")],
)  # fmt: skip
def test_what_a_folder_names_is_imported_only_if_the_run_was_begun_with_it(
    command: str, tamper: Callable[[Path, Path], object], said: str, home: Path
) -> None:
    for name in ("spam.py", "evil.py"):
        (home / name).write_text(EVIL)
    folder = play(home, "spam.py:Spam")
    np.save(home / "x.npy", blobs(3, 0)[0].numpy())
    more = {"evaluate": [], "predict": [home / "x.npy"], "diagnose": ["--rounds", 1, "--round", 0]}[command]
    cyber0_(command, folder, *more)
    tamper(home, folder)
    for mark in (home / "imported", folder / "imported"):
        mark.unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=f"{said}.*not imported; name your copy with --"):
        cyber0_(command, folder, *more)
    assert not list(home.rglob("imported"))
    (home / "copy").mkdir()
    (home / "copy/spam.py").write_text(EVIL)
    cyber0_(command, folder, *more, "--task", f"{home / 'copy/spam.py'}:Spam")


def test_a_module_in_the_folder_of_a_run_is_not_imported_from_within_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "module_of_run.py").write_text(EVIL)
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    folder = play(home, "module_of_run:Spam")
    evaluate(folder)
    (folder / "module_of_run.py").write_text(EVIL)
    (home / "module_of_run.py").unlink()
    (home / "imported").unlink()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "module_of_run")
    with pytest.raises(ConfigError, match="a file in the run's folder"):
        evaluate(Path("."))
    assert not list(home.rglob("imported"))


def test_a_folder_without_a_config_needs_the_task_to_be_named(home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    (folder / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"name your copy of it with --task FILE.py:NAME"):
        evaluate(folder)
    assert agrees(
        evaluate(folder, options=InferenceOptions(task=f"{home / 'own_tasks.py'}:Pictures")), summary_of(folder)
    )
    assert agrees(evaluate(folder, options=InferenceOptions(given=Pictures())), summary_of(folder))
    with pytest.raises(ConfigError, match="holds no run"):
        evaluate(home)


def test_another_model_than_the_runs_is_refused(home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures", export=False)
    (folder / "w0.safetensors").unlink()
    changed = (home / "own_tasks.py").read_text().replace("norm.running_mean.normal_()", "norm.running_mean.fill_(1)")
    (home / "own_tasks.py").write_text(changed)
    options = InferenceOptions(task=f"{home / 'own_tasks.py'}:Pictures")
    with pytest.raises(ModelError, match="frozen weights or buffers are not those of the run"):
        evaluate(folder, options=options)
    (home / "own_tasks.py").write_text(changed.replace("nn.Linear(16", "nn.Linear(17"))
    with pytest.raises(Cyber0Error) as refused:
        evaluate(folder, options=options)
    assert "\n" not in str(refused.value)


def test_the_command_prints_figures_or_json(home: Path) -> None:
    folder = play(home, "elsewhere.py:Elsewhere")
    summary = summary_of(folder)
    printed = cyber0_("evaluate", folder)
    assert f"after 4 rounds, on 60 samples (test)\nloss: {summary['final_loss']:.4f}" in printed
    assert f"accuracy: {summary['final_accuracy']:.2%}\nrows: 60.0000\ndigest {summary['model_digest']}" in printed
    assert agrees(json.loads(cyber0_("evaluate", folder, "--json")), summary)
    assert json.loads(cyber0_("evaluate", folder, "--json", "--round", 2, "--set", "task.options.seed=9"))["round"] == 2


# MNIST.


def write_idx(path: Path, array: np.ndarray) -> None:
    path.write_bytes(b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A folder of idx files: noise around one picture a digit."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 200, (10, 28, 28))
    (tmp_path / "digits").mkdir()
    for name, count in (("train", 200), ("t10k", 50)):
        labels = np.arange(count) % 10
        images = centres[labels] + rng.integers(0, 56, (count, 28, 28))
        write_idx(tmp_path / f"digits/{name}-images-idx3-ubyte", images.astype(np.uint8))
        write_idx(tmp_path / f"digits/{name}-labels-idx1-ubyte", labels.astype(np.uint8))
    return tmp_path / "digits"


@pytest.fixture
def trained(digits: Path, tmp_path: Path) -> Path:
    overrides = [f"task.data={digits}", "rounds=40", "method.k=32", "federation.byzantine=0"]
    Run.start(load(None, overrides), tmp_path / "mnist").run()
    return tmp_path / "mnist"


def test_digits_are_evaluated_on_the_runs_samples_or_on_a_folder_of_test_files(trained: Path, digits: Path) -> None:
    assert agrees(evaluate(trained), summary_of(trained))
    for file in digits.glob("train-*"):
        file.unlink()
    found = evaluate(trained, str(digits))
    assert found["samples"] == 50 and agrees(found, summary_of(trained))
    with pytest.raises(ConfigError, match=r"--data nowhere is not a folder; give one with t10k-images-idx3-ubyte"):
        evaluate(trained, "nowhere")
    with pytest.raises(DataError, match=r"mnist has no t10k-images-idx3-ubyte"):
        evaluate(trained, str(trained))


@pytest.mark.slow
def test_digits_are_predicted_from_pictures_idx_files_and_arrays(trained: Path, digits: Path, tmp_path: Path) -> None:
    from PIL import Image

    content = (digits / "t10k-images-idx3-ubyte").read_bytes()
    images = np.frombuffer(content, np.uint8, offset=16).reshape(50, 28, 28)
    found = predict(trained, str(digits / "t10k-images-idx3-ubyte"))
    accuracy = np.mean([row["class"] == i % 10 for i, row in enumerate(found)])
    assert len(found) == 50 and accuracy == summary_of(trained)["final_accuracy"] > 0.5
    assert all(abs(sum(row["probabilities"]) - 1) < 1e-5 for row in found)
    (tmp_path / "images.gz").write_bytes(gzip.compress(content))
    np.save(tmp_path / "three.npy", images[:3])
    np.save(tmp_path / "flat.npy", images[:3].reshape(3, 784))
    assert predict(trained, str(tmp_path / "images.gz")) == found
    three = predict(trained, str(tmp_path / "three.npy"))
    assert predict(trained, str(tmp_path / "flat.npy")) == three and len(three) == 3
    np.save(tmp_path / "one.npy", images[0])
    Image.fromarray(images[0]).save(tmp_path / "grey.png")
    Image.fromarray(np.stack([images[0]] * 3, -1)).save(tmp_path / "colour.png")
    one = predict(trained, str(tmp_path / "one.npy"))
    for row in (one[0], three[0]):  # as many samples at once, so many orders of a sum
        assert row["probabilities"] == pytest.approx(found[0]["probabilities"], rel=1e-4)
    for name in ("grey.png", "colour.png"):
        assert predict(trained, str(tmp_path / name)) == one, name
    printed = cyber0_("predict", trained, tmp_path / "grey.png")
    assert printed == f"0: {one[0]['class']}  {one[0]['probability']:.1%}\n"
    assert json.loads(cyber0_("predict", trained, tmp_path / "grey.png", "--json")) == one
    assert predict(trained, str(tmp_path / "grey.png"), InferenceOptions(round=0)) != one


@pytest.mark.slow
def test_inputs_that_are_no_digits_are_refused_with_the_remedy(trained: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.zeros((30, 28), np.uint8)).save(tmp_path / "large.png")
    np.save(tmp_path / "float.npy", np.zeros((28, 28)))
    np.save(tmp_path / "high.npy", np.full((28, 28), 256))
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0\0\x02\0\0\0\x1c\0\0\0\x1c123")
    for name, message in (
        ("large.png", r"holds images of shape \(30, 28\); MNIST's are 28 x 28 pixels"),
        ("float.npy", r"holds float64 values; pixels must be whole numbers from 0 to 255"),
        ("high.npy", r"pixels must be whole numbers from 0 to 255"),
        ("text.png", "can't be read as a picture, an idx file or an array"),
        ("cut-idx3-ubyte", "it may be truncated"),
        ("nowhere.png", "there is no such file of inputs"),
    ):
        with pytest.raises(DataError, match=message) as refused:
            predict(trained, str(tmp_path / name))
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_default_task_is_evaluated_and_asked(tmp_path: Path) -> None:
    config = load(None, ["rounds=6", "method.k=8", "evaluate_every=6"])
    Run.start(config, tmp_path / "run").run()
    assert agrees(evaluate(tmp_path / "run"), summary_of(tmp_path / "run"))


# Tasks of one's own.


def test_classes_are_predicted_from_arrays_in_files_of_every_kind(home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    inputs, targets = blobs(60, 3)
    np.save(home / "x.npy", inputs.double().numpy())  # NumPy's usual 64 bits
    np.savez(home / "x.npz", inputs.numpy())
    save_file({"inputs": inputs}, home / "x.safetensors")
    found = predict(folder, str(home / "x.npy"))
    right = np.mean([row["class"] == target for row, target in zip(found, targets.tolist(), strict=True)])
    assert right == pytest.approx(summary_of(folder)["final_accuracy"])
    assert predict(folder, str(home / "x.npz")) == predict(folder, str(home / "x.safetensors")) == found
    assert cyber0_("predict", folder, home / "x.npy").splitlines()[7].startswith(f"7: {found[7]['class']}  ")


def test_outputs_are_printed_where_there_are_no_classes(home: Path) -> None:
    folder = play(home, "own_tasks.py:Line")
    (home / "x.csv").write_text("a,b,c\n1,2,3\n0.5,0,-1\n")
    weights = load_file(folder / "model.safetensors")
    expected = torch.tensor([[1.0, 2, 3], [0.5, 0, -1]]) @ weights["weight"].T + weights["bias"]
    found = predict(folder, str(home / "x.csv"))
    torch.testing.assert_close(torch.tensor([row["outputs"] for row in found]), expected)
    assert cyber0_("predict", folder, home / "x.csv").splitlines()[1] == f"1: {found[1]['outputs'][0]:g}"


def test_a_dictionary_of_inputs_is_a_file_of_named_arrays(home: Path) -> None:
    folder = play(home, "own_tasks.py:Codes")
    left, right = np.ones((2, 2), np.float32), np.zeros((2, 4), np.float32)
    np.savez(home / "x.npz", left=left, right=right)
    save_file({"left": torch.from_numpy(left), "right": torch.from_numpy(right)}, home / "x.safetensors")
    found = predict(folder, str(home / "x.npz"))
    assert len(found[0]["outputs"]) == 6 and predict(folder, str(home / "x.safetensors")) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda home: None, "there is no such file of inputs"),
        (lambda home: np.save(home / "x.npy", np.zeros((2, 3))), "given inputs (2, 3) of"),
        (lambda home: np.save(home / "x.npy", np.zeros((0, 1, 4, 4))), "holds no samples"),
        (lambda home: np.save(home / "x.npy", np.array(["a", "b"])), "give a tensor or an array of numbers"),
        (lambda home: np.save(home / "x.npy", np.array([{}], object)), "can't be read"),
        (lambda home: (home / "x.npy").write_text("1,2"), "can't be read"),
        (lambda home: (home / "x.txt").write_text("1,2"), "must be a file .npy, .npz, .csv or .safetensors"),
        (lambda home: (home / "x.csv").write_text("a,b\n"), "holds no row of numbers"),
        (lambda home: (home / "x.csv").write_text("1,2\n3,x\n"), "x.csv, line 2, column 2: 'x' is not a number"),
        (lambda home: (home / "x.csv").write_text("1,x,3\n4,5,6\n"), "x.csv, line 1, column 2: 'x' is not a number"),
        (lambda home: (home / "x.csv").write_text("a,b\n\n1,\n"), "x.csv, line 3, column 2: '' is not a number"),
        (lambda home: (home / "x.csv").write_text("1;2\n3;4\n"), "line 2, column 1: '3;4' is not a number; give"),
        (lambda home: (home / "x.csv").write_text("1,2\n3\n"), "x.csv, line 2 holds 1 values, and line 1 holds 2"),
        (lambda home: np.save(home / "x.npy", np.zeros((2, 1, 4, 4), int)),
         "These are whole numbers: inputs int64; where the model takes fractions, write them as float32"),
        (lambda home: np.savez(home / "x.npz", a=np.zeros((2, 1)), b=np.zeros((3, 1))), "different lengths"),
        (lambda home: (home / "x.safetensors").write_text("no"), "can't be read"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused_in_one_line(write: Any, message: str, home: Path) -> None:
    folder = play(home, "own_tasks.py:Pictures")
    write(home)
    path = next(iter(home.glob("x.*")), home / "x.npy")
    with pytest.raises(Cyber0Error) as refused:
        predict(folder, str(path))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_synthetic_problem_predicts_nothing_and_has_no_other_data(home: Path) -> None:
    folder = play(home, "ridge")
    with pytest.raises(ConfigError, match=r"task.name = 'ridge' is a synthetic problem"):
        predict(folder, "x.npy")
    with pytest.raises(ConfigError, match=r"--data x: task.name = 'ridge' draws its own samples"):
        evaluate(folder, "x")
    with pytest.raises(ConfigError, match="--model gpt2 is for runs of a language model"):
        evaluate(folder, options=InferenceOptions(model="gpt2"))


def test_outputs_that_are_not_finite_are_null_in_json(home: Path) -> None:
    folder = play(home, "own_tasks.py:Line")
    np.save(home / "x.npy", np.array([[1.0, 2.0, np.nan], [1.0, 2.0, 3.0]]))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    done = CliRunner().invoke(cli.app, ["predict", str(folder), str(home / "x.npy"), "--json"])
    rows = json.loads(done.stdout, parse_constant=refuse)
    assert done.stderr == "warning: some numbers are not finite; they are null here\n"
    assert rows[0]["outputs"] == [None] and isinstance(rows[1]["outputs"][0], float)
