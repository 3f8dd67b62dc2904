"""Methods that cyber0 is compared with, on language models; what a process keeps between two of their runs."""

from __future__ import annotations

import copy
import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from tiny_models import write_model, write_sentences

from cyber0.config.schema import Config, to_dict
from cyber0.errors import ConfigError, DataError
from cyber0.estimate.batches import Batch
from cyber0.estimate.gradients import Gradients
from cyber0.federation import methods
from cyber0.model.vector import Parameters
from cyber0.runs import run as runs
from cyber0.tasks.text import model_cache
from cyber0.tasks.text import task as text
from cyber0.tasks.text.task import Text

NUMBERS = {"fedavg": "d", "trimmed_mean": "d", "krum": "d", "fedzo": "d", "mezo": "none"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_sentences(folder / "data")
    for name in ("roberta", "llama"):
        write_model(name, folder / name)
    return folder


@pytest.fixture
def settings(root: Path) -> Any:
    def make(name: str, *more: str) -> Config:
        return Config().with_overrides(
            ["task.name=sst2", f"task.model={root / name}", f"task.data={root / 'data'}", "task.samples=20", "rounds=6",
             "evaluate_every=3", "federation.clients=5", "federation.byzantine=0", "method.batch_size=3", *more]
        )  # fmt: skip

    return make


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = model_cache.ModelCache()
    cache.enable()
    monkeypatch.setattr(text, "MODELS", cache)


@pytest.mark.slow
def test_a_process_with_many_runs_reads_and_tokenises_the_sentences_once(settings: Any, own_cache: None) -> None:
    first, second = (Text(settings("llama", f"seed={seed}").task) for seed in (0, 1))
    assert first.test_inputs is second.keep(np.arange(5)).test_inputs
    assert first.train_inputs is not second.train_inputs
    prompted = Text(settings("llama", "task.template={text} So {mask}").task)
    assert prompted.test_inputs is not first.test_inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_gradients_of_sentences_are_each_clients_own(name: str, settings: Any) -> None:
    task = Text(settings(name).task)
    model = task.model(0).eval()
    parameters, counts = Parameters(model), np.array([4, 1, 4])
    batch = Batch(task.train_inputs[:9], task.train_targets[:9], counts)
    rows = Gradients(parameters, task).each(batch)
    begin = 0
    for row, count in zip(rows, counts.tolist(), strict=True):
        part, twin = slice(begin, begin + count), copy.deepcopy(model)
        begin += count
        task.losses(task.outputs(twin, batch.inputs[part]), batch.targets[part]).mean().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
        torch.testing.assert_close(row, torch.cat([g.reshape(-1) for g in grads]), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", NUMBERS)
@pytest.mark.parametrize("more", [["task.dtype=bfloat16"], ["task.adapter=lora", "method.local_epochs=2"]])
def test_every_method_trains_a_language_model(method: str, more: list[str], settings: Any, tmp_path: Path) -> None:
    rate = "method.lr=0.02" if NUMBERS[method] == "d" and method != "fedzo" else "method.lr=0.002"
    config = settings("llama", f"method.name={method}", "method.k=8", rate, *more)
    summary = runs.Run.start(config, tmp_path / "run").run()
    sent = 6 * 4 * summary["dimension"] if NUMBERS[method] == "d" else 0
    assert summary["uplink_bytes_per_client"] == sent
    losses = [float(row["train_loss"]) for row in csv.DictReader((tmp_path / "run" / "metrics.csv").open())]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_an_attacked_federation_of_gradients_runs_on_sentences(settings: Any) -> None:
    attack = ("federation.byzantine=1", "federation.attack=fang_trimmed_mean", "federation.attack_sign=truth")
    federation = methods.make(settings("roberta", "method.name=trimmed_mean", "method.lr=0.01", *attack))
    assert federation.run_round().values is not None


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(settings: Any, tmp_path: Path) -> None:
    config = settings("llama", "method.name=fedavg", "method.lr=0.01")
    whole = runs.Run.start(config, tmp_path / "whole").run()
    cut = runs.Run.start(config, tmp_path / "cut")
    cut.simulation.run_round()
    cut.simulation.checkpoint()
    cut.simulation.close()
    assert runs.Run.resume(tmp_path / "cut").run()["model_digest"] == whole["model_digest"]


def test_the_training_loss_is_that_of_the_samples_learned_from(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = methods.make(settings("roberta"))
    task, model = federation.task, federation.parameters.model
    assert len(task.labels) == 20
    with torch.no_grad():
        expected = task.losses(task.outputs(model, task.train_inputs), task.train_targets).mean()
    assert federation.train_loss() == pytest.approx(float(expected), rel=1e-5)
    monkeypatch.setattr(text, "FEW_SAMPLES", 19)
    assert federation.train_loss() is None  # they are many


def test_samples_that_are_held_out_are_measured_on_and_not_learned_from(settings: Any, tmp_path: Path) -> None:
    plain, held = (methods.make(settings("roberta", *more)) for more in ([], ["task.validation=4"]))
    assert isinstance(held.task, Text) and held.task.train_inputs.ids.equal(plain.task.train_inputs.ids)
    texts = {split: [str(text) for text in held.task._splits[split].texts] for split in ("train", "validation")}
    assert len(texts["train"]) == 20 and len(texts["validation"]) == 4
    there_are = Text(settings("roberta").task)._splits["train"].texts
    assert sorted(texts["train"] + texts["validation"]) == sorted(map(str, there_are))
    labels = held.task._splits["validation"].labels
    assert np.bincount(labels).tolist() == [2, 2]
    loss, accuracy, metrics = held.evaluate()
    assert (loss, accuracy, {}) == plain.evaluate()
    outputs = held.task.outputs(held.parameters.model, held.task.validation_inputs)
    expected = float(held.task.losses(outputs, torch.from_numpy(labels)).mean())
    assert metrics["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["validation_accuracy"] == float((outputs.argmax(1).numpy() == labels).mean())

    summary = runs.Run.start(settings("roberta", "task.validation=4"), tmp_path / "run").run()
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert summary["best_round"] == int(best["round"])
    assert summary["metrics"]["validation_loss"] == pytest.approx(float(rows[-1]["validation_loss"]))


def test_no_more_samples_are_held_out_than_there_are(settings: Any) -> None:
    with pytest.raises(DataError, match=r"task\.validation = 500, and task\.samples = 20 leaves \d+ of"):
        methods.make(settings("roberta", "task.validation=500"))
    with pytest.raises(ConfigError, match=r"task\.samples = 0 learns from all; set task\.samples"):
        settings("roberta", "task.validation=5", "task.samples=0")
    with pytest.raises(ConfigError, match=r"task\.validation = 5 is for text tasks"):
        Config().with_overrides(["task.validation=5"])
    assert "validation" not in to_dict(settings("roberta"))["task"]  # so the identity of earlier runs stays


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_cached_model_starts_like_one_that_is_loaded(adapter: str, settings: Any) -> None:
    config = settings("llama", f"task.adapter={adapter}", "method.lr=0.1")
    first = methods.make(config)
    start = first.parameters.digest()
    first.run_round()
    assert first.parameters.digest() != start
    again = methods.make(config)
    assert again.parameters.digest() == start
    assert again.task.language_model is first.task.language_model  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_cache")
def test_a_cached_model_is_loaded_again_when_its_folder_changes(settings: Any, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "model")
    config = settings("llama", f"task.model={tmp_path / 'model'}")
    before = Parameters(Text(config.task).model(0)).digest()
    write_model("opt", tmp_path / "model")
    assert Parameters(Text(config.task).model(0)).digest() != before
