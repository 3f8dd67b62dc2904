"""A language model in a .gguf file, made on the spot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra 'text'")
gguf = pytest.importorskip("gguf", reason="a .gguf file needs the extra 'text'")

from cyber0.tasks.text.adapters import Adapter  # noqa: E402
from cyber0.tasks.text.language_model import LanguageModel  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
HIDDEN, LAYERS, WORDS = 16, 2, ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, one of them in 8 bit."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        square, norm = {"attn_q": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}, (HIDDEN,)
        wide = {"ffn_gate": (32, HIDDEN), "ffn_up": (32, HIDDEN), "ffn_down": (HIDDEN, 32)}
        block = square | wide | {"attn_k": (8, HIDDEN), "attn_v": (8, HIDDEN), "attn_norm": norm, "ffn_norm": norm}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if name == "blk.0.ffn_down":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_gives_what_transformers_gives_and_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    reads: list[Any] = []
    reader = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: reads.append(path) or reader(path))
    counting = gguf.GGUFReader
    found = LanguageModel(str(file))
    model = found.load("float32", torch.device("cpu"), 0, Adapter())
    assert len(reads) == 1 and gguf.GGUFReader is counting
    expected = plain.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    assert found.causal and found.tokenizer.decode(found.tokenizer("ab a", add_special_tokens=False)["input_ids"])

    found.load("bfloat16", torch.device("cpu"), 0, Adapter())  # what was read is forgotten by then
    assert len(reads) == 2


def test_a_damaged_file_is_refused_and_leaves_the_reader_alone(tmp_path: Path) -> None:
    from cyber0.errors import ModelError

    (tmp_path / "bad.gguf").write_bytes(b"no model at all" * 20)
    reader = gguf.GGUFReader
    with pytest.raises(ModelError, match="could not be loaded"):
        LanguageModel(str(tmp_path / "bad.gguf"))
    assert gguf.GGUFReader is reader


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "prefix"])
def test_an_adapter_of_a_file_is_exported_with_a_base_that_peft_loads(
    adapter: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft", reason="adapters need the extra 'text'")
    import transformers
    import typer.testing

    from cyber0.cli.main import app
    from cyber0.config.schema import Config
    from cyber0.runs import export as exports
    from cyber0.runs import run as runs

    (tmp_path / "data").mkdir()
    lines = "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(["a b", "b a a", "ab", "a"] * 4))
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.tsv").write_text(lines)
    settings = Config().with_overrides(
        ["task.name=text", f"task.data={tmp_path / 'data'}", f"task.model={file}", "task.template={text}{mask}",
         "task.label_words=0=a, 1=b", f"task.adapter={adapter}", "federation.clients=4", "federation.byzantine=1",
         "method.lr=0.1", "rounds=3"]
    )  # fmt: skip
    run = runs.Run.start(settings, tmp_path / "run")
    run.run()
    monkeypatch.chdir(tmp_path)
    done = typer.testing.CliRunner().invoke(app, ["replay", "run", "--out", "out"], catch_exceptions=False)
    assert done.exit_code == 0 and "dequantised" in caplog.text and "MiB" in caplog.text
    exports.check_replaceable(Path("out"), force=True)  # nothing in it is a stranger
    over = typer.testing.CliRunner().invoke(app, ["replay", "run", "--out", str(file), "--force"])
    assert "the model that the run started from" in str(over.exception) and file.is_file()

    monkeypatch.chdir("/")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    task, trained = run.simulation.task, run.simulation.parameters.model.eval()
    with torch.no_grad():
        expected = task.outputs(trained, task.test_inputs)
        torch.testing.assert_close(task.outputs(loaded, task.test_inputs), expected)

    dequantised = LanguageModel(str(file)).load("float32", torch.device("cpu"), 0, Adapter()).state_dict()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base").state_dict()
    assert base.keys() == dequantised.keys() and all(torch.equal(t, dequantised[name]) for name, t in base.items())


def test_a_disk_that_is_too_small_for_the_base_is_named_before_anything_is_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'text'")
    from cyber0.errors import DataError
    from cyber0.tasks.text import saving

    model = LanguageModel(str(file)).load("float32", torch.device("cpu"), 0, Adapter("lora"))
    monkeypatch.setattr(saving, "_free_disk", lambda _: 1000)
    with pytest.raises(DataError, match=r"dequantised base model.*safetensors"):
        saving.name_base(model, str(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()
