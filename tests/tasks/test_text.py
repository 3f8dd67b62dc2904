"""Language models: looked at where they stand, measured as each sample alone would be, rebuilt and exported."""

from __future__ import annotations

import copy
import io
import json
import os
import re
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

from tiny_models import ARCHITECTURES, SENTENCES, write_model, write_sentences, write_sets
from typer.testing import CliRunner

from cyber0 import directions
from cyber0.cli import main as cli
from cyber0.config.schema import Config
from cyber0.diagnose import federation
from cyber0.directions import Directions, Probe
from cyber0.directions.backends import backend_of
from cyber0.errors import ConfigError, DataError, LedgerError, ModelError, ModelMissingError
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.federation.simulation import Simulation
from cyber0.model.vector import Parameters
from cyber0.runs import export as exports
from cyber0.runs import inference
from cyber0.runs import replay as replays
from cyber0.runs import run as runs
from cyber0.tasks.text import language_model, sentences, tokens
from cyber0.tasks.text.language_model import LanguageModel
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.tokens import Tokens

SOME_PROBE = Probe(seed=3, round=5, index=1, coefficient=0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even these few short samples into several groups."""
    monkeypatch.setattr(tokens, "PASS_COST_ON_CPU", 16)


@pytest.fixture
def settings(folders: dict[str, Path], data: Path) -> Any:
    def make(name: str, *more: str) -> Config:
        return Config().with_overrides(
            ["task.name=sst2", f"task.model={folders[name]}", f"task.data={data}", "task.samples=16", "rounds=3",
             "federation.clients=4", "federation.byzantine=1", "method.batch_size=3", "method.lr=0.01", *more]
        )  # fmt: skip

    return make


def alone(task: Text, model: torch.nn.Module, inputs: Tokens) -> torch.Tensor:
    """Return the logits of the label words of each sample by itself, from all logits of the plain model."""
    rows = []
    for i, n in enumerate(inputs.lengths):
        logits = model(input_ids=inputs.ids[i : i + 1, :n]).logits
        rows.append(logits[0, int(inputs.places[i])].index_select(-1, task._word_tokens))
    return torch.stack(rows).float()


def moved(model: torch.nn.Module, parameters: Parameters) -> torch.nn.Module:
    """Return a deep copy whose trainable weights were set to w + c z, by the definition of a direction."""
    result = copy.deepcopy(model)
    z = directions.reference(SOME_PROBE.seed, SOME_PROBE.round, SOME_PROBE.index, 0, parameters.dimension, "gaussian")
    start = 0
    with torch.no_grad():
        for p in result.parameters():
            if p.requires_grad:
                step = torch.from_numpy(np.asarray(z[start : start + p.numel()], dtype=np.float32)).view(p.shape)
                p.copy_((p.float() + np.float32(SOME_PROBE.coefficient) * step).to(p.dtype))
                start += p.numel()
    assert start == parameters.dimension
    return result


@pytest.mark.parametrize("adapter", ["none", "lora", "prefix"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_look_equals_a_copy_with_moved_weights_and_packing_changes_nothing(
    name: str, adapter: str, settings: Any
) -> None:
    if (name, adapter) == ("roberta", "prefix"):
        pytest.skip("prefix tuning is for causal models")
    config = settings(name, f"task.adapter={adapter}")
    task = Text(config.task)
    model = task.model(0).eval()
    parameters, inputs = Parameters(model), task.train_inputs
    truth = moved(model, parameters)
    before = parameters.digest()
    with parameters.perturbed(SOME_PROBE):
        seen = task.outputs(model, inputs)
    assert len(inputs.groups) > 1 and any(g.mask is not None for g in inputs.groups)
    expected = alone(task, truth, inputs)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    assert (expected - alone(task, model, inputs)).abs().max() > 1e-3  # a look that saw nothing would not pass
    assert parameters.digest() == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["roberta", "llama"])
@torch.no_grad()
def test_sixteen_bit_weights_are_seen_where_they_are_moved(name: str, dtype: str, settings: Any) -> None:
    task = Text(settings(name).task)
    model = task.model(0, dtype).eval()
    parameters = Parameters(model)
    with parameters.perturbed(SOME_PROBE):
        seen = task.outputs(model, task.train_inputs)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, task.outputs(moved(model, parameters), task.train_inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["roberta", "gpt2"])
@pytest.mark.parametrize("light", [True, False])
@torch.no_grad()
def test_estimates_are_each_clients_own_whatever_the_packing(name: str, light: bool, settings: Any) -> None:
    task = Text(settings(name).task)
    model = task.model(0).eval()
    evaluator = Evaluator(Parameters(model), task, mu=1e-2)
    evaluator._light = light  # both roads: all directions at once, and streamed
    counts, inputs, targets = np.array([5, 1, 7]), task.train_inputs[:13], task.train_targets[:13]
    together = evaluator.estimate(Batch(inputs, targets, counts), Directions(1, 2, 2))
    begin = 0
    for row, count in zip(together, counts, strict=True):
        part = slice(begin, begin + count)
        single = evaluator.estimate(Batch(inputs[part], targets[part], np.array([count])), Directions(1, 2, 2))
        np.testing.assert_allclose(row, single[0], rtol=1e-2, atol=1e-3)
        begin += count


def test_the_head_is_left_as_it_was_also_after_an_error(settings: Any) -> None:
    task = Text(settings("gpt2").task)
    model: Any = task.model(0)
    bad = Tokens(task.train_inputs.ids + 10**6, task.train_inputs.lengths, task.train_inputs.places)
    with pytest.raises(IndexError):
        task.outputs(model, bad)
    assert "forward" not in vars(model.lm_head) and not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "sets", "evaluated"),
    [("sst2", ("dev", "test"), "dev"), ("sst2", ("test",), "test"), ("trec", ("dev", "test"), "test"),
     ("trec", ("dev",), "dev")],
)  # fmt: skip
def test_a_task_says_which_set_it_is_evaluated_on(
    name: str, sets: tuple[str, ...], evaluated: str, settings: Any, data: Path, tmp_path: Path
) -> None:
    for split in ("train", *sets):
        (tmp_path / f"{split}.tsv").write_text((data / f"{split}.tsv").read_text())
    own = () if name == "sst2" else ("task.label_words=0=terrible, 1=great",)
    task = Text(settings("opt", f"task.name={name}", f"task.data={tmp_path}", *own).task)
    assert task.evaluated_on == evaluated


@pytest.mark.parametrize("adapter", ["lora", "prefix"])
def test_only_the_adapter_is_trained_and_its_start_is_a_function_of_the_seed(adapter: str, settings: Any) -> None:
    task = Text(settings("llama", f"task.adapter={adapter}").task)
    first, again, other = (Parameters(task.model(seed)) for seed in (1, 1, 2))
    assert first.digest() == again.digest() != other.digest()
    assert first.rest_digest() == other.rest_digest()
    whole = sum(p.numel() for p in first.model.parameters())
    assert first.dimension < whole / 10
    assert all(adapter in name or "prompt" in name for name in first.state())


@torch.no_grad()
def test_lora_starts_as_the_model_itself(settings: Any) -> None:
    plain, wrapped = Text(settings("opt").task), Text(settings("opt", "task.adapter=lora").task)
    expected = plain.outputs(plain.model(0).eval(), plain.train_inputs)
    torch.testing.assert_close(wrapped.outputs(wrapped.model(0).eval(), wrapped.train_inputs), expected)


@pytest.mark.parametrize(
    ("name", "more"),
    [("roberta", []), ("llama", ["task.dtype=bfloat16"]), ("gpt2", ["task.adapter=lora"])],
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


@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_an_exported_adapter_finds_its_base_from_any_folder(
    name: str, settings: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.chdir(folders[name].parent)
    run = runs.Run.start(settings(name, "task.adapter=lora", f"task.model={name}"), tmp_path / "run")
    run.run()
    assert exports.export(*replays.rebuild(tmp_path / "run"), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    auto = peft.AutoPeftModel if name == "roberta" else peft.AutoPeftModelForCausalLM
    loaded, task = auto.from_pretrained("out").eval(), run.simulation.task
    with torch.no_grad():
        trained = task.outputs(run.simulation.parameters.model.eval(), task.test_inputs)
        torch.testing.assert_close(task.outputs(loaded, task.test_inputs), trained)
    assert not (tmp_path / "out" / "base").exists()  # a folder is named, not copied


def test_the_card_of_an_exported_model_says_what_is_known(settings: Any, tmp_path: Path) -> None:
    import typer.testing
    from huggingface_hub import ModelCard

    from cyber0.cli.main import app

    summary = runs.Run.start(settings("roberta", "task.adapter=lora"), tmp_path / "run").run()
    for rounds in ("2", "3"):
        given = ["replay", str(tmp_path / "run"), "--round", rounds, "--out", str(tmp_path / rounds)]
        assert typer.testing.CliRunner().invoke(app, given).exit_code == 0
    card, earlier = (ModelCard.load(tmp_path / rounds / "README.md") for rounds in ("3", "2"))
    assert card.data.library_name == "peft" and card.data.pipeline_tag == "fill-mask" and "lora" in card.data.tags
    assert card.data.base_model is card.data.license is None  # a folder of this machine is no name, a license unknown
    for known in (
        "LoRA adapter of rank 8", "of `roberta`", "4 clients, 1 of them Byzantine", "`{text} It was {mask}.`",
        "`0`: `terrible`", "| method.lr | 0.01 |", "| rounds | 3 |",
        f"| dev accuracy | {summary['dev_accuracy']:.4f} |", f"| test loss | {summary['test_loss']:.4f} |",
        summary["model_digest"], "cyber0 replay RUN --round 3",
    ):  # fmt: skip
        assert known in card.text
    assert "[More Information Needed]" not in card.text and str(tmp_path) not in card.text
    assert "| rounds | 2 |" in earlier.text and "Evaluation" not in earlier.text  # which is of other weights
    assert summary["model_digest"] not in earlier.text


def test_a_card_is_valid_whatever_names_and_settings_hold() -> None:
    from huggingface_hub import ModelCard

    from cyber0.tasks.text.model_card import model_card

    config = Config().with_overrides(
        ["task.name=text", "task.data=/home/me/a|b`c: #\n---", "task.model=org/odd: name", "method.name=mezo",
         "task.label_words=x=y, 1=`|", "task.template={text}\n`{mask}`", "federation.byzantine=0"]
    )  # fmt: skip
    card = ModelCard(model_card(config, causal=True, rounds=5, dimension=7, digest="ab"))
    assert card.data.base_model == "org/odd: name" and card.data.base_model_relation == "finetune"
    assert "| data | a\\|b'c: # --- |" in card.text and "federation" not in card.text and "/home" not in card.text
    hub = Config().with_overrides(["task.name=snli", "task.model=FacebookAI/roberta-large"])
    assert ModelCard(model_card(hub, causal=False, rounds=5, dimension=7, digest="")).data.datasets == [
        "stanfordnlp/snli"
    ]


@pytest.mark.parametrize(
    ("size", "more", "what"),
    [
        (200, [], "task.label_words"),
        (270, ["task.template={text}{mask}", "task.label_words=0=!, 1=?"], "the prompt of '"),
    ],
)
def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused_with_both_sizes(
    size: int, more: list[str], what: str, settings: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["llama"])
    model.resize_token_embeddings(size)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sizes = rf"tokenizer has {len(tokenizer)} tokens and the model embeds {size}; {what}"
    with pytest.raises(ModelError, match=sizes + r".* has token \d+.*resize_token_embeddings"):
        Simulation(settings("llama", f"task.model={tmp_path}", *more)).run_round()


def test_tokens_without_an_embedding_that_never_occur_do_no_harm(
    settings: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(folders["llama"], tmp_path / "model")
    tokenizer = LanguageModel(str(folders["llama"])).tokenizer
    tokenizer.add_tokens(["<never>"])
    tokenizer.save_pretrained(tmp_path / "model")
    config = settings("llama", f"task.model={tmp_path / 'model'}")
    Simulation(config).run_round()
    assert (
        len(LanguageModel(str(tmp_path / "model")).tokenizer) > LanguageModel(str(tmp_path / "model")).config.vocab_size
    )


def test_a_model_that_changed_meanwhile_is_refused(settings: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folders["gpt2"], tmp_path / "model")
    runs.Run.start(settings("gpt2", f"task.model={tmp_path / 'model'}"), tmp_path / "run").run()
    write_model("opt", tmp_path / "model")
    with pytest.raises((LedgerError, ModelError)):
        replays.rebuild(tmp_path / "run")


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(settings: Any, tmp_path: Path) -> None:
    whole = runs.Run.start(settings("gpt2"), tmp_path / "whole").run()
    cut = runs.Run.start(settings("gpt2"), tmp_path / "cut")
    cut.simulation.run_round()
    cut.simulation.ledger.close()
    assert runs.Run.resume(tmp_path / "cut").run()["model_digest"] == whole["model_digest"]


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
        assert exports.export(
            ledger, parameters, tmp_path / f"out-{number}"
        )  # still a folder that from_pretrained loads


@pytest.mark.parametrize(
    ("kind", "adapter"), [("gpt2", "none"), ("roberta", "none"), ("gpt2", "lora"), ("gpt2", "prefix")]
)
def test_a_damaged_weight_of_a_runs_language_model_is_noticed_and_the_model_written_again(
    kind: str, adapter: str, settings: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def verify() -> str:
        return CliRunner().invoke(cli.app, ["verify", str(run)], catch_exceptions=False).output

    runs.Run.start(settings(kind, f"task.adapter={adapter}"), run).run()
    (file,) = (run / "model").glob("*.safetensors")
    whole, written = file.read_bytes(), file.stat().st_ino
    runs.Run.resume(run).run()
    assert file.stat().st_ino == written
    assert "model: the weights that w0 and the ledger give" in verify()
    for damaged in (whole[:-4] + bytes(4), whole[:-4], b"", b"[]" * 9):
        file.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"model is not the model that w0 and the ledger give"):
            verify()
        runs.Run.resume(run).run()
        assert file.read_bytes() == whole


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_ends_with_a_folder_that_from_pretrained_loads_and_writes_it_once(
    adapter: str, settings: Any, tmp_path: Path
) -> None:
    run = runs.Run.start(settings("gpt2", f"task.adapter={adapter}"), tmp_path / "run")
    digest = run.run()["model_digest"]
    folder = tmp_path / "run" / "model"
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert f"`{digest}`" in (folder / "README.md").read_text()
    trained = run.simulation.parameters.model
    if adapter == "none":
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder)
    else:
        from peft import AutoPeftModelForCausalLM

        loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, trained.get_parameter(name)) for name, p in loaded.named_parameters())
    written = folder.stat().st_ino
    (folder / "notes.txt").write_text("kept")
    runs.Run.resume(tmp_path / "run").run()
    assert folder.stat().st_ino == written and (folder / "notes.txt").exists()
    (folder / "README.md").unlink()
    with pytest.raises(DataError, match=r"model holds notes.txt, which is no file of a model and would be deleted"):
        runs.Run.resume(tmp_path / "run").run()
    (folder / "notes.txt").unlink()
    runs.Run.resume(tmp_path / "run").run()
    assert f"`{digest}`" in (folder / "README.md").read_text()
    leftovers = [path.name for path in (tmp_path / "run").glob(".*")]
    assert leftovers == []


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


def test_two_texts_of_a_sample_are_separated_by_a_tab(settings: Any, tmp_path: Path) -> None:
    data = write_sets(tmp_path / "sets") / "snli"
    config = settings("gpt2", "task.name=snli", f"task.data={data}", "federation.clients=4")
    runs.Run.start(config, tmp_path / "run").run()
    (found,) = inference.predict(tmp_path / "run", "a fine cast\tgood")
    assert found["class"] in ("contradiction", "entailment", "neutral") and found["input"] == "a fine cast / good"
    with pytest.raises(DataError, match=r"'a fine cast' has 1 texts separated by tabs where the template needs 2"):
        inference.predict(tmp_path / "run", "a fine cast")
    assert len(inference.predict(tmp_path / "run", str(data / "test.tsv"))) == len(SENTENCES)


def test_a_batch_above_the_local_set_means_the_whole_set(settings: Any) -> None:
    simulation = Simulation(settings("gpt2", "method.batch_size=64"))
    assert simulation.client.samples.counts(np.arange(4)).tolist() == [4, 4, 4, 4]
    assert sorted(simulation.task.labels.tolist()) == [0] * 8 + [1] * 8
    simulation.run_round()


def test_losses_that_are_not_finite_name_their_batch(settings: Any) -> None:
    task = Text(settings("gpt2").task)

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.full((len(targets),), torch.nan)

    task.losses = broken  # type: ignore[method-assign]
    simulation = Simulation(settings("gpt2"), task=task)
    simulation.task.losses = broken
    with pytest.warns(
        RuntimeWarning, match=r"round 0: the losses of client \d+ are not finite .* training samples \d+"
    ):
        simulation.run_round()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        simulation.run_round()  # said once


def test_a_sample_whose_loss_is_not_finite_is_named_with_its_text(settings: Any) -> None:
    simulation = Simulation(settings("gpt2", "method.batch_size=100", "federation.byzantine=0"))
    task, number = simulation.task, int(simulation.shares[2][0])
    odd = simulation.samples.batch(np.array([2]), 0).inputs.ids[0]

    def outputs(model: torch.nn.Module, inputs: Tokens) -> torch.Tensor:
        logits = Text.outputs(task, model, inputs)
        width = min(len(odd), inputs.ids.shape[1])
        logits[(inputs.ids[:, :width] == odd[:width]).all(dim=1)] = torch.nan
        return logits

    task.outputs = outputs
    with pytest.warns(RuntimeWarning, match="not finite") as caught:
        simulation.run_round()
    (message,) = [str(w.message) for w in caught if "not finite" in str(w.message)]
    named = re.search(r"those of training samples (\d+); its batch is .*; sample \1 is ", message)
    assert named is not None and repr(task.shown(number)) in message
    assert task.shown(int(named[1])) == task.shown(number)  # the same words may be there twice


@pytest.mark.parametrize(("name", "adapter"), [("roberta", "none"), ("llama", "lora")])
def test_a_language_model_is_diagnosed(name: str, adapter: str, settings: Any) -> None:
    simulation = Simulation(settings(name, f"task.adapter={adapter}", "method.k=2"))
    before = simulation.parameters.digest()
    found = federation.measured(simulation, 2)
    assert found["real"] == pytest.approx(found["promised"], rel=0.5)
    assert found["mu_low"] is not None and found["lr_best"] is not None
    assert simulation.parameters.digest() == before
    assert federation.facts(simulation)["guessing"] == pytest.approx(np.log(2))


def test_a_long_text_loses_its_end_and_never_its_answer(settings: Any) -> None:
    for name in ("roberta", "llama"):
        task = Text(settings(name).task)
        long = {"text": "a very long film " * 60}
        long_one = task.tokenise(sentences.Sentences([long, {"text": "good"}], np.array([0, 1])))
        assert long_one.lengths[0] <= 62 and long_one.lengths[1] < 20
        if name == "roberta":
            assert long_one.ids[0, long_one.places[0]] == task.language_model.tokenizer.mask_token_id
        else:
            end = task.language_model.tokenizer.decode(long_one.ids[0, : long_one.lengths[0]])
            assert end.endswith("It was")


@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_a_word_of_several_tokens_is_refused_with_a_suggestion(name: str, settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"'disastrous' is \d+ tokens .*another word, for example"):
        Text(settings(name, "task.label_words=0=disastrous, 1=great").task)


def test_templates_and_words_of_the_users_own(settings: Any) -> None:
    task = Text(settings("llama", "task.template={text} No or Yes? {mask}", "task.label_words=1=Yes, 0=No").task)
    assert task.label_names == ["1", "0"]  # the classes in their order, as a partition's table heads them
    assert task.labels[:2].tolist() == [0, 1]  # classes in the order of the words
    with pytest.raises(ConfigError, match="put \\{mask\\} last"):
        Text(settings("llama", "task.template={mask}: {text}").task)
    with pytest.raises(ConfigError, match=r"prefix.*causal"):
        Text(settings("roberta", "task.adapter=prefix").task).model(0)


def test_what_can_not_be_had_says_what_to_do(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # wherever the tests are run
    with pytest.raises(ModelError, match=r"(?s)hub can.t be reached.*task\.model"):
        LanguageModel("nobody/no-such-model")
    with pytest.raises(DataError, match=r"(?s)Hugging Face hub.*task.data to a folder"):
        Text(settings("gpt2", "task.data=").task)
    with pytest.raises(ModelError, match="no such file"):
        LanguageModel("missing.gguf")
    task = Text(settings("gpt2").task)
    monkeypatch.setattr(type(backend_of(torch.device("cpu"))), "free_memory", lambda *_: 1000)
    with pytest.raises(ModelError, match=r"weights and needs .* GiB as float32"):
        task.model(0)


def test_a_type_that_the_device_can_not_compute_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise RuntimeError('"addmm" not implemented for Half')

    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    with pytest.raises(ModelError, match=r"task\.dtype = .float16"):
        language_model.check_dtype(torch.float16, torch.device("cpu"))


def test_long_texts_lose_their_ends_and_it_is_said(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain, prefixed = (Text(settings("gpt2", *more).task) for more in ((), ("task.adapter=prefix",)))
    words = "a warm film " * 200
    for text in (words, words.replace(" ", "")):  # not every script has spaces
        samples = sentences.Sentences([{"text": text}, {"text": "a"}], np.array([0, 1]))
        longest = int(plain.tokenise(samples).lengths.max())
        shorter = int(prefixed.tokenise(samples).lengths.max())
        room = min(256, plain.language_model.longest)
        assert 0.8 * room < longest <= room and shorter <= min(256, plain.language_model.longest - 5)
    assert "1 of 2 prompts are longer than" in caplog.text


def test_files_of_a_model_that_are_not_whole_are_refused(
    settings: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelMissingError, match=r"could not be loaded: .*\nLook whether all its files are there"):
        Text(settings("llama", f"task.model={folder}").task).model(0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(ModelError, match=r"an encoder and a decoder \(t5\)"):
        Text(settings("llama", f"task.model={folder}").task)


def test_a_folder_that_holds_no_model_is_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match=r"the folder has no config\.json"):
        Text(settings("llama", f"task.model={tmp_path}").task)
    with pytest.raises(ModelMissingError, match="there is no such folder"):
        Text(settings("llama", f"task.model={tmp_path / 'no'}").task)


def test_a_checkpoint_without_its_head_is_refused(settings: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.model.save_pretrained(tmp_path)
    Text(settings("llama").task).language_model.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks 1 weights, .lm_head\.weight"):
        Text(settings("llama", f"task.model={tmp_path}").task).model(0)


def test_a_model_that_moved_is_named(settings: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    import typer.testing

    from cyber0.cli.main import app

    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "out"
    shutil.copytree(folders["llama"], old)
    runs.Run.start(settings("llama", f"task.model={old}", "rounds=3"), tmp_path / "run").run()
    old.rename(new)
    invoke = typer.testing.CliRunner().invoke
    with pytest.raises(ModelMissingError, match=r"started from, .*old'.* no such folder\nSay by --model"):
        invoke(app, ["verify", str(tmp_path / "run")], catch_exceptions=False)
    assert "claims this model" in invoke(app, ["verify", str(tmp_path / "run"), "--model", str(new)]).output
    given = ["replay", str(tmp_path / "run"), "--out", str(out), "--model", str(new)]
    assert invoke(app, given).exit_code == 0 and (out / "config.json").exists()


def test_the_example_for_own_sentences_trains_and_goes_on(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpy

    import transformers

    script = str(Path(__file__).parents[2] / "examples" / "own_sentences.py")
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


@pytest.mark.parametrize("name", ["roberta", "llama"])
@torch.no_grad()
def test_groups_of_rounded_sizes_give_the_same_outputs(
    name: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Text(settings(name, "task.samples=0").task)
    model, inputs = task.model(0).eval(), task.train_inputs[:13]
    plain = task.outputs(model, inputs)
    monkeypatch.setattr(Tokens, "_rounds", property(lambda self: not self.comes_again))
    monkeypatch.setattr(tokens, "SAMPLE_BITS", 1)
    rounded, again = inputs[:13], inputs[:13].coming_again()
    torch.testing.assert_close(task.outputs(model, rounded), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.outputs(model, again), plain, rtol=1e-4, atol=1e-5)
    assert sum(len(g.ids) for g in again.groups) == 13 < sum(len(g.ids) for g in rounded.groups)
    assert sum(g.samples for g in rounded.groups) == 13


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_rounded_sizes_are_few_and_not_much_larger(bits: int) -> None:
    sizes = [tokens.rounded_up(n, bits) for n in range(1, 1025)]
    assert all(n <= s <= n * (1 + 2.0 ** (1 - bits)) for n, s in enumerate(sizes, 1))
    assert len(set(sizes)) <= 11 * 2 ** (bits - 1)


def test_a_batch_of_everything_is_drawn_once_and_comes_again(settings: Any) -> None:
    simulation = Simulation(settings("llama", "method.batch_size=100"))
    clients = np.arange(4)
    first, second = (simulation.client.samples.batch(clients, t) for t in range(2))
    assert first is second and first.inputs.comes_again
    part = simulation.client.samples.batch(clients[:2], 2)
    assert part is not first and part.inputs.comes_again and len(part.inputs) < len(first.inputs)
    fewer = Simulation(settings("llama", "method.batch_size=3")).client.samples
    assert not fewer.batch(clients, 0).inputs.comes_again and fewer.batch(clients, 0) is not fewer.batch(clients, 0)
