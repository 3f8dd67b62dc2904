"""A head: a linear classifier of a frozen language model's hidden states."""

from __future__ import annotations

import json
import math
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, SENTENCES

from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError, LedgerError, ModelError
from cyber0.federation.simulation import Simulation
from cyber0.model.vector import Parameters
from cyber0.runs import export as exports
from cyber0.runs import inference, trained
from cyber0.runs import replay as replays
from cyber0.runs import run as runs
from cyber0.runs.trained import InferenceOptions
from cyber0.tasks import text
from cyber0.tasks.text import head
from cyber0.tasks.text.model_cache import MODELS
from cyber0.tasks.text.task import Text

HEAD = ("task.adapter=head", "task.layer=1", "method.lr=0.1")


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_features_are_the_hidden_states_at_the_answers_place(name: str, settings: Any) -> None:
    task, plain = text.make(settings(name, *HEAD).task), Text(settings(name).task)
    model = plain.model(0).eval()
    for number, found in enumerate(task.train_inputs):
        (group,) = plain.tokenise(plain._splits["train"].take(np.array([number]))).groups
        states = model.base_model(input_ids=group.ids, output_hidden_states=True).hidden_states
        expected = states[1][0, group.places[0]]
        torch.testing.assert_close(found, expected / expected.square().mean().sqrt(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_a_number_the_layer_is_two_thirds_of_the_way_up(settings: Any) -> None:
    usual, second = (text.make(settings("llama", "task.adapter=head", *more).task) for more in ([], ["task.layer=2"]))
    assert torch.equal(usual.train_inputs, second.train_inputs)  # of two
    plain = Text(settings("llama").task)
    model = plain.model(0).eval()
    logits = model.lm_head(model.base_model.norm(second.train_inputs))[:, plain._word_tokens]  # scale does not matter
    torch.testing.assert_close(logits, plain.outputs(model, plain.train_inputs), rtol=1e-3, atol=1e-4)


def test_a_head_starts_at_zero_and_is_all_that_is_trained(settings: Any) -> None:
    simulation = Simulation(settings("llama", *HEAD))
    assert simulation.parameters.dimension == 2 * 16
    assert simulation.evaluate().loss == pytest.approx(math.log(2))
    for _ in range(3):
        simulation.run_round()
    assert simulation.evaluate().loss != pytest.approx(math.log(2))


def test_a_head_learns_what_the_features_tell(settings: Any) -> None:
    simulation = Simulation(
        settings(
            "llama", *HEAD, "task.samples=24", "federation.byzantine=0", "aggregation.rule=mean", "method.k=8",
            "method.optimizer=adam", "method.batch_size=6",
        )
    )  # fmt: skip
    for _ in range(150):
        simulation.run_round()
    assert simulation.evaluate().accuracy > 0.9  # the same sentences, which twelve points in 16 dimensions separate


@pytest.mark.parametrize("name", ["roberta", "gpt2"])
def test_a_heads_run_is_rebuilt_without_the_language_model(
    name: str, settings: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[name], tmp_path / "language-model")
    config = settings(name, *HEAD, f"task.model={tmp_path / 'language-model'}")
    summary = runs.Run.start(config, tmp_path / "run").run()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    found = inference.evaluate(tmp_path / "run")
    assert [found[key] for key in ("dev_accuracy", "model_digest")] == [
        summary[key] for key in ("dev_accuracy", "model_digest")
    ]
    shutil.rmtree(tmp_path / "language-model")
    ledger, parameters = replays.rebuild(tmp_path / "run")
    assert parameters.digest() == summary["model_digest"]
    assert exports.check_exported(tmp_path / "run", ledger, parameters, parameters.digest()) is not None


def test_a_heads_run_goes_on_after_a_stop_and_answers_about_sentences(settings: Any, tmp_path: Path) -> None:
    whole = runs.Run.start(settings("gpt2", *HEAD), tmp_path / "whole").run()
    cut = runs.Run.start(settings("gpt2", *HEAD), tmp_path / "cut")
    cut.simulation.run_round()
    cut.simulation.ledger.close()
    assert runs.Run.resume(tmp_path / "cut").run()["model_digest"] == whole["model_digest"]
    (tmp_path / "sentences.tsv").write_text("".join(f"{line}\t{label}\n" for line, label in SENTENCES))
    many = inference.predict(tmp_path / "cut", str(tmp_path / "sentences.tsv"))
    right = sum(row["class"] == label for row, (_, label) in zip(many, SENTENCES, strict=True))
    assert right / len(SENTENCES) == pytest.approx(whole["test_accuracy"])
    assert inference.evaluate(tmp_path / "cut", str(tmp_path / "sentences.tsv"))["accuracy"] == whole["test_accuracy"]
    (one,) = inference.predict(tmp_path / "cut", SENTENCES[0][0])
    assert one["probabilities"] == pytest.approx(many[0]["probabilities"], rel=1e-4)


def test_a_language_model_that_changed_is_refused(
    settings: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders["gpt2"], tmp_path / "model")
    config = settings("gpt2", *HEAD, f"task.model={tmp_path / 'model'}")
    runs.Run.start(config, tmp_path / "run").run()
    cut = runs.Run.start(config, tmp_path / "cut")
    cut.simulation.run_round()
    cut.simulation.close()
    weights = tmp_path / "model" / "model.safetensors"
    state = load_file(weights)
    state["transformer.h.0.mlp.c_fc.weight"] += 1e-3
    save_file(state, weights, metadata={"format": "pt"})
    save_file(load_file(tmp_path / "run" / "model.safetensors"), tmp_path / "weights.safetensors")
    for use in (
        lambda: inference.predict(tmp_path / "run", "good"),
        lambda: inference.evaluate(tmp_path / "run"),
        lambda: runs.Run.resume(tmp_path / "cut"),
        lambda: Simulation(config.with_overrides([f"task.weights={tmp_path / 'weights.safetensors'}"])),
    ):
        with pytest.raises((LedgerError, ModelError)):
            use()
    monkeypatch.setattr(trained, "REPLAYED_COORDINATES", 0)  # as after a run that takes long to replay
    with (
        pytest.warns(RuntimeWarning, match="'digest' is of another language model; set task.model to that one"),
        pytest.raises((LedgerError, ModelError)),
    ):
        inference.predict(tmp_path / "run", "good")


def test_a_head_is_not_used_on_another_layer(settings: Any, tmp_path: Path) -> None:
    runs.Run.start(settings("llama", *HEAD), tmp_path / "run").run()
    with pytest.raises(ConfigError, match=r"--set task\.layer=2 can't be used here: .* after layer 1 "):
        inference.evaluate(tmp_path / "run", options=InferenceOptions(overrides=["task.layer=2"]))


@pytest.mark.parametrize("adapter", ["head", "top"])
def test_another_layer_in_the_config_than_in_the_ledger_is_noticed(adapter: str, settings: Any, tmp_path: Path) -> None:
    runs.Run.start(settings("llama", *HEAD, f"task.adapter={adapter}"), tmp_path / "run").run()
    file = tmp_path / "run" / "config.toml"
    before = file.read_text()
    file.write_text(before.replace("layer = 1", "layer = 2"))
    assert file.read_text() != before
    for use in (inference.evaluate, lambda folder: inference.predict(folder, "good")):
        with pytest.raises(
            LedgerError, match=r"says task\.layer = 2, and the run was trained with 1; restore it .* repair"
        ):
            use(tmp_path / "run")
    file.write_text(before)
    assert inference.evaluate(tmp_path / "run")["samples"]


def test_label_words_of_a_head_are_names_and_need_not_be_tokens(settings: Any) -> None:
    words = "task.label_words=0=not good at all, 1=not bad"
    assert text.make(settings("llama", *HEAD, words).task).classes == 2
    with pytest.raises(ConfigError, match=r"task\.label_words"):
        text.make(settings("llama", words).task)


def test_layers_that_a_model_does_not_have_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"task\.layer = 3: the model has 2 layers; set it to 1 to 2"):
        Simulation(settings("llama", "task.adapter=head", "task.layer=3")).evaluate()
    with pytest.raises(ConfigError, match=r'task\.layer = 1 is for task\.adapter = "head" or "top", and'):
        settings("llama", "task.layer=1")
    with pytest.raises(ConfigError, match=r"task\.layer"):
        settings("llama", "task.adapter=head", "task.layer=-1")


@pytest.mark.parametrize("optimizer", ["sgd", "zscore", "adam"])
def test_a_header_tells_what_optimizer_a_head_was_trained_with(optimizer: str, settings: Any) -> None:
    simulation = Simulation(settings("llama", *HEAD, f"method.optimizer={optimizer}"))
    assert replays.settings_in(simulation.ledger.header).method.optimizer == optimizer


def test_runs_of_a_study_read_their_samples_once(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "enabled", True)
    monkeypatch.setattr(MODELS, "_entries", {})
    config: Config = settings("llama", *HEAD)
    first, again = Simulation(config).task, Simulation(config).task
    assert first.train_inputs is again.train_inputs and first.test_inputs is again.test_inputs
    third = Simulation(settings("llama", *HEAD, "task.layer=2")).task
    assert not torch.equal(third.train_inputs, first.train_inputs)
    half = Simulation(settings("llama", *HEAD, "task.layer=2", "task.dtype=bfloat16")).task
    assert not torch.equal(half.test_inputs, third.test_inputs)


def test_a_study_does_not_keep_the_samples_of_all_its_seeds(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "enabled", True)
    monkeypatch.setattr(MODELS, "_entries", {})
    task = text.make(settings("llama", *HEAD).task)
    (test, *_), computed, compute = [task.test_inputs], [], head.features
    monkeypatch.setattr(head, "features", lambda *given, **more: computed.append(1) or compute(*given, **more))
    for number in range(2 * head.SETS):
        _ = task.keep(np.array([number])).train_inputs
        assert text.make(settings("llama", *HEAD).task).test_inputs is test
    assert len(MODELS.cached("features")) == head.SETS and len(computed) == 2 * head.SETS


def test_features_that_are_kept_in_a_folder_are_not_computed_again(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBER0_FEATURES", str(tmp_path / "kept" / "here"))
    task = text.make(settings("llama", *HEAD).task)
    first = task.train_inputs
    (file,) = (tmp_path / "kept" / "here").iterdir()
    other = text.make(settings("llama", "task.adapter=head", "task.layer=2").task).train_inputs
    assert not torch.equal(other, first)
    assert not torch.equal(text.make(settings("gemma", *HEAD).task).train_inputs, first)
    computed: list[int] = []
    compute = head.features
    monkeypatch.setattr(head, "features", lambda *given, **more: computed.append(1) or compute(*given, **more))
    assert torch.equal(text.make(settings("llama", *HEAD).task).train_inputs, first) and not computed
    file.write_bytes(file.read_bytes()[:-8])
    assert torch.equal(text.make(settings("llama", *HEAD).task).train_inputs, first) and len(computed) == 1
    assert torch.equal(text.make(settings("llama", *HEAD).task).train_inputs, first) and len(computed) == 1
    kept = load_file(file)
    save_file({**kept, "features": kept["features"] + 1}, file)
    assert torch.equal(text.make(settings("llama", *HEAD).task).train_inputs, first) and len(computed) == 2
    monkeypatch.setenv("CYBER0_FEATURES", str(file))
    with pytest.raises(DataError, match="set CYBER0_FEATURES to a folder that can be written to"):
        _ = text.make(settings("llama", *HEAD).task).train_inputs
    assert len(computed) == 2  # the folder is tried before the model reads


def test_features_are_those_of_the_models_config(
    settings: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBER0_FEATURES", str(tmp_path / "kept"))
    shutil.copytree(folders["llama"], tmp_path / "model")
    config = settings("llama", *HEAD, f"task.model={tmp_path / 'model'}").task
    first = text.make(config).train_inputs
    about = tmp_path / "model" / "config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "hidden_act": "relu"}))
    assert not torch.equal(text.make(config).train_inputs, first)


def test_a_run_goes_on_if_what_the_model_has_read_cannot_be_kept(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CYBER0_FEATURES", str(tmp_path))

    def full(*_: Any, **__: Any) -> None:
        raise DataError("no space left")

    monkeypatch.setattr(head, "save_tensors", full)
    assert len(text.make(settings("llama", *HEAD).task).train_inputs)
    assert "what the language model has read is not kept: no space left" in caplog.text


def test_sentences_to_predict_are_read_on_the_runs_device(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.Run.start(settings("llama", *HEAD), tmp_path / "run").run()
    calls: list[str] = []
    to, tokenise = head.HeadTask.to, head.HeadTask.tokenise
    monkeypatch.setattr(head.HeadTask, "to", lambda self, device: calls.append("to") or to(self, device))
    monkeypatch.setattr(head.HeadTask, "tokenise", lambda self, given: calls.append("read") or tokenise(self, given))
    inference.predict(tmp_path / "run", "good")
    assert calls[:2] == ["to", "read"]


def test_another_language_model_gives_another_digest(settings: Any) -> None:
    gemma, gemma2 = (Parameters(text.make(settings(name, *HEAD).task).model(0)) for name in ("gemma", "gemma2"))
    assert gemma.digest() == gemma2.digest() and gemma.rest_digest() != gemma2.rest_digest()


def test_the_benchmark_judges_every_layer_by_held_out_samples(
    folders: dict[str, Path], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "layers.py"
    given = ["--model", str(folders["llama"]), "--data", str(data), "--task", "sst2", "--samples", "12"]
    monkeypatch.setattr("sys.argv", [str(script), *given, "--held-out", "12"])
    runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert "12 held-out" in shown[0] and [line.split()[1] for line in shown[2:]] == ["1", "2"]
    assert sum("**" in line for line in shown) >= 1
