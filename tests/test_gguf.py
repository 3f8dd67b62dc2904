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

from cyber0.tasks.language_model import Adapter, LanguageModel  # noqa: E402

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
