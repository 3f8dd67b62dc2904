"""A task of sentences: its sets, adapters, prompts, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")


from cyber0.directions.backends import backend_of
from cyber0.errors import ConfigError, DataError, ModelError, ModelMissingError
from cyber0.federation.simulation import Simulation
from cyber0.model.vector import Parameters
from cyber0.tasks.text import language_model, prompts, sentences
from cyber0.tasks.text import task as task_module
from cyber0.tasks.text.language_model import LanguageModel
from cyber0.tasks.text.task import Text


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

    shutil.copytree(folders["llama"], tmp_path / "model")
    tokenizer = LanguageModel(str(folders["llama"])).tokenizer
    tokenizer.add_tokens(["<never>"])
    tokenizer.save_pretrained(tmp_path / "model")
    config = settings("llama", f"task.model={tmp_path / 'model'}")
    Simulation(config).run_round()
    assert (
        len(LanguageModel(str(tmp_path / "model")).tokenizer) > LanguageModel(str(tmp_path / "model")).config.vocab_size
    )


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

    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelMissingError, match=r"could not be loaded: .*\nCheck that all its files are there"):
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("task.data=no_such_folder", r"task\.data = 'no_such_folder' is not a folder"),
        ("task.template=Q: {txt} {mask}", r"the sample has no text 'txt'"),
        ("task.label_words=0=bad, 2=good", r"the sample has the label '1', which has no word"),
    ],
)
def test_wrong_data_prompts_and_labels_are_refused_before_a_model_is_loaded(
    wrong: str, message: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("llama", wrong).task
    monkeypatch.setattr(task_module, "LanguageModel", lambda _: pytest.fail("a language model was loaded"))
    with pytest.raises((ConfigError, DataError), match=message):
        Text(config)


def test_built_in_prompts_name_the_same_texts_for_masked_and_causal_models() -> None:
    for name in prompts.PROMPTS:
        masked, causal = (prompts.template(name, "", causal).fields for causal in (False, True))
        assert sorted(masked) == sorted(causal)
