"""Runs of a language model: resumed, rebuilt, evaluated, asked, diagnosed."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from tiny_models import ARCHITECTURES, SENTENCES, write_model, write_sets

from cyber0.config.schema import Config
from cyber0.diagnose import federation
from cyber0.errors import ConfigError, DataError, LedgerError, ModelError, ModelMissingError
from cyber0.federation.simulation import Simulation
from cyber0.runs import export as exports
from cyber0.runs import inference
from cyber0.runs import replay as replays
from cyber0.runs import run as runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("roberta", []),
        ("llama", ["task.dtype=bfloat16"]),
        ("llama", ["task.compute=bfloat16"]),
        ("gpt2", ["task.adapter=lora"]),
    ],
)
def test_a_run_stores_no_weights_and_is_rebuilt_verified_and_exported(
    name: str, more: list[str], settings: Any, tmp_path: Path
) -> None:
    import transformers

    config = settings(name, *more)
    run = runs.Run.start(config, tmp_path / "run")
    summary = run.run()
    assert not (tmp_path / "run" / runs.WEIGHTS).exists()
    assert {"dev_accuracy", "test_accuracy", "initial_accuracy"} <= set(summary)
    assert summary["evaluated_on"] == "dev" and summary["dev_accuracy"] == summary["final_accuracy"]
    ledger, parameters = replays.rebuild(tmp_path / "run")
    assert parameters.digest() == summary["model_digest"]
    assert exports.export(ledger, parameters, tmp_path / "out")
    exports.check_replaceable(tmp_path / "out", force=True)  # nothing in it is a stranger
    if more == ["task.adapter=lora"]:
        import peft

        base = transformers.AutoModelForCausalLM.from_pretrained(config.task.model)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    else:
        auto = transformers.AutoModelForMaskedLM if name == "roberta" else transformers.AutoModelForCausalLM
        loaded = auto.from_pretrained(tmp_path / "out", dtype=getattr(torch, config.task.dtype))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size
    task = run.simulation.task
    with torch.no_grad():
        trained = task.outputs(run.simulation.parameters.model.eval(), task.test_inputs)
        torch.testing.assert_close(task.outputs(loaded.eval(), task.test_inputs), trained)


@pytest.mark.slow
def test_a_model_that_changed_meanwhile_is_refused(settings: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folders["gpt2"], tmp_path / "model")
    runs.Run.start(settings("gpt2", f"task.model={tmp_path / 'model'}"), tmp_path / "run").run()
    write_model("opt", tmp_path / "model")
    with pytest.raises((LedgerError, ModelError)):
        replays.rebuild(tmp_path / "run")


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(settings: Any, tmp_path: Path) -> None:
    whole = runs.Run.start(settings("gpt2"), tmp_path / "whole").run()
    cut = runs.Run.start(settings("gpt2"), tmp_path / "cut")
    cut.simulation.run_round()
    cut.simulation.ledger.close()
    assert runs.Run.resume(tmp_path / "cut").run()["model_digest"] == whole["model_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "peft_file"), [("none", ""), ("lora", "adapter_model.safetensors"),
                                                    ("prefix", "adapter_model.safetensors")])  # fmt: skip
def test_a_run_starts_from_the_weights_of_another_and_does_not_need_their_file_again(
    adapter: str, peft_file: str, settings: Any, tmp_path: Path
) -> None:
    one = runs.Run.start(settings("gpt2", f"task.adapter={adapter}"), tmp_path / "one").run()
    ledger, parameters = replays.rebuild(tmp_path / "one")
    exports.save_weights(parameters, tmp_path / "after.safetensors")
    exports.export(ledger, parameters, tmp_path / "out")
    given = [tmp_path / "after.safetensors", tmp_path / "out" / (peft_file or "model.safetensors")]
    for number, path in enumerate(given):
        config = settings("gpt2", f"task.adapter={adapter}", f"task.weights={path}")
        run = runs.Run.start(config, tmp_path / f"two-{number}")
        assert run.simulation.parameters.digest() == one["model_digest"], path
        run.simulation.run_round()
        run.simulation.close()
        path.unlink()
        after = runs.Run.resume(tmp_path / f"two-{number}").run()["model_digest"]
        ledger, parameters = replays.rebuild(tmp_path / f"two-{number}")
        assert parameters.digest() == after != one["model_digest"]
        assert exports.export(ledger, parameters, tmp_path / f"out-{number}")  # from_pretrained still loads it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter", "dtype"),
    [("gpt2", "none", "float32"), ("llama", "lora", "float32"), ("roberta", "none", "bfloat16"),
     ("gpt2", "prefix", "float32")],
)  # fmt: skip
def test_an_evaluation_gives_the_summarys_figures_from_the_folder_or_from_the_ledger(
    name: str, adapter: str, dtype: str, settings: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    summary = runs.Run.start(settings(name, f"task.adapter={adapter}", f"task.dtype={dtype}"), folder).run()
    names = ["dev_loss", "dev_accuracy", "test_loss", "test_accuracy", "model_digest", "evaluated_on"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found = inference.evaluate(folder)
            assert [found[key] for key in names] == [summary[key] for key in names]
            assert (found["loss"], found["accuracy"]) == (summary["final_loss"], summary["final_accuracy"])
            shutil.rmtree(folder / "model", ignore_errors=True)


@pytest.mark.slow
def test_a_language_model_is_evaluated_on_a_file_and_asked_about_sentences(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    summary = runs.Run.start(settings("gpt2"), folder).run()
    texts = [text for text, _ in SENTENCES]
    (tmp_path / "other.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in SENTENCES))
    (tmp_path / "others").mkdir()
    (tmp_path / "others/dev.tsv").write_text("good\t1\n")
    assert inference.evaluate(folder, str(tmp_path / "other.tsv"))["accuracy"] == summary["test_accuracy"]
    found = inference.evaluate(folder, str(tmp_path / "others"))
    assert (found["samples"], found["evaluated_on"]) == (1, "dev")
    for data, message in (("nowhere.tsv", "there is no nowhere.tsv"), (str(tmp_path), "has no file test or dev")):
        with pytest.raises(DataError, match=f"{message}.*give a file of labelled sentences"):
            inference.evaluate(folder, data)
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n\n")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    many = inference.predict(folder, str(tmp_path / "lines.txt"))
    right = np.mean([row["class"] == label for row, (_, label) in zip(many, SENTENCES, strict=True)])
    assert right == pytest.approx(summary["test_accuracy"]) and [row["input"] for row in many] == texts
    for name in ("lines.jsonl", "other.tsv"):
        assert inference.predict(folder, str(tmp_path / name)) == many
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert inference.predict(folder, "-") == many
    (one,) = inference.predict(folder, texts[0])
    assert one["input"] == texts[0] and one["probabilities"] == pytest.approx(many[0]["probabilities"], rel=1e-4)
    assert len(inference.predict(folder, "word " * 40)) == 1
    for source, message in (("nowhere.txt", "no such file of sentences"), (" ", "the sentence is empty"),
                            (str(tmp_path / "empty.txt"), "holds no line of text"),
                            (str(tmp_path / "odd.jsonl"), r"line 1 has no text 'text'")):  # fmt: skip
        (tmp_path / "empty.txt").write_text("\n")
        (tmp_path / "odd.jsonl").write_text("{}\n")
        with pytest.raises(DataError, match=message):
            inference.predict(folder, source)


@pytest.mark.slow
def test_two_texts_of_a_sample_are_separated_by_a_tab(settings: Any, tmp_path: Path) -> None:
    data = write_sets(tmp_path / "sets") / "snli"
    config = settings("gpt2", "task.name=snli", f"task.data={data}", "federation.clients=4")
    runs.Run.start(config, tmp_path / "run").run()
    (found,) = inference.predict(tmp_path / "run", "a fine cast\tgood")
    assert found["class"] in ("contradiction", "entailment", "neutral") and found["input"] == "a fine cast / good"
    with pytest.raises(DataError, match=r"'a fine cast' has 1 texts separated by tabs where the template needs 2"):
        inference.predict(tmp_path / "run", "a fine cast")
    assert len(inference.predict(tmp_path / "run", str(data / "test.tsv"))) == len(SENTENCES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "adapter"), [("roberta", "none"), ("llama", "lora")])
def test_a_language_model_is_diagnosed(name: str, adapter: str, settings: Any) -> None:
    simulation = Simulation(settings(name, f"task.adapter={adapter}", "method.k=2"))
    before = simulation.parameters.digest()
    found = federation.measured(simulation, 2)
    assert found["real"] == pytest.approx(found["promised"], rel=0.5)
    assert found["mu_low"] is not None and found["lr_best"] is not None
    assert simulation.parameters.digest() == before
    assert federation.facts(simulation)["guessing"] == pytest.approx(np.log(2))


@pytest.mark.slow
def test_a_model_that_moved_is_named(settings: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    import typer.testing

    from cyber0.cli.main import app

    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "out"
    shutil.copytree(folders["llama"], old)
    runs.Run.start(settings("llama", f"task.model={old}", "rounds=3"), tmp_path / "run").run()
    old.rename(new)
    invoke = typer.testing.CliRunner().invoke
    with pytest.raises(ModelMissingError, match=r"started from, .*old'.* no such folder\nGive its place with --model"):
        invoke(app, ["verify", str(tmp_path / "run")], catch_exceptions=False)
    assert "claims this model" in invoke(app, ["verify", str(tmp_path / "run"), "--model", str(new)]).output
    given = ["replay", str(tmp_path / "run"), "--out", str(out), "--model", str(new)]
    assert invoke(app, given).exit_code == 0 and (out / "config.json").exists()


def test_a_run_is_resumed_with_its_model_in_another_place(
    settings: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    place, moved = tmp_path / "model", tmp_path / "moved"
    shutil.copytree(folders["llama"], place)
    config = settings("llama", f"task.model={place}", "rounds=4")
    whole = runs.Run.start(config, tmp_path / "whole").run()
    run = runs.Run.start(config, tmp_path / "run")
    run.simulation.run_round()
    run.simulation.close()
    place.rename(moved)
    file = tmp_path / "run" / "config.toml"
    with pytest.raises(ModelMissingError, match=r"If it was moved, set task\.model .* in .*config\.toml"):
        runs.Run.resume(tmp_path / "run")
    file.write_text(file.read_text().replace(str(place), str(moved)))
    assert runs.Run.resume(tmp_path / "run").run()["model_digest"] == whole["model_digest"]
    file.write_text(file.read_text().replace(str(moved), str(folders["gpt2"])))
    with pytest.raises(LedgerError, match="differs"):
        runs.Run.resume(tmp_path / "run")


def test_the_example_for_own_sentences_trains_and_resumes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpy

    import transformers

    script = str(Path(__file__).parents[3] / "examples" / "own_sentences.py")
    (tmp_path / "mine.txt").write_text("a warm film\n\nit goes on and on\nnever again\n")
    for steps in ("3", "5"):
        given = [script, str(folders["llama"]), str(tmp_path / "mine.txt"), str(tmp_path / "out"), steps, "1e-3"]
        monkeypatch.setattr("sys.argv", given)
        runpy.run_path(script)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (folders["llama"], tmp_path / "out")
    )
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    (tmp_path / "empty.txt").write_text("\n")
    for wrong, message in (([], "MODEL sentences.txt OUT"), (["m", str(tmp_path / "empty.txt"), "o"], "no sentence")):
        monkeypatch.setattr("sys.argv", [script, *wrong])
        with pytest.raises(SystemExit, match=message):
            runpy.run_path(script)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_may_compute_in_fewer_bits_than_its_weights_have(name: str, settings: Any) -> None:
    plain, rounded = (
        Simulation(settings(name, "method.k=4", "method.mu=0.05", *more)) for more in ([], ["task.compute=bfloat16"])
    )
    seen = []
    hook = rounded.parameters.model.get_input_embeddings().register_forward_hook(
        lambda *call: seen.append(call[2].dtype)
    )
    records = [simulation.run_round() for simulation in (plain, rounded)]
    hook.remove()
    assert torch.bfloat16 in seen and {entry.dtype for entry in rounded.parameters.layout} == {"float32"}
    assert rounded.parameters.substitutable
    a, b = (record.values.astype(np.float64) for record in records)
    assert not np.array_equal(a, b)
    # losses of about 1 with 8 bits, over 2 mu; the slopes themselves are larger than that
    assert np.abs(a - b).max() < 2**-8 / (2 * 0.05) + 0.1 * np.abs(a).max()
    before = rounded.evaluate().loss
    assert before == pytest.approx(plain.evaluate().loss, abs=0.05)


def test_what_can_not_compute_in_fewer_bits_is_refused() -> None:
    for overrides, fault in {
        ("task.name=sst2", "task.dtype=bfloat16"): r"task\.dtype = 'bfloat16' and task\.adapter = 'none'; set",
        ("task.name=sst2", "task.adapter=lora"): r"task\.adapter = 'lora'; set",
        ("task.name=mnist",): r"task\.compute = 'bfloat16' is for text tasks",
    }.items():
        with pytest.raises(ConfigError, match=fault):
            Config().with_overrides([*overrides, "task.compute=bfloat16"])
