"""Tiny language models of many shapes with tokenizers made on the spot, and a set of sentences for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SENTENCES = [
    ("a warm and funny film", "1"), ("dull", "0"), ("it goes on and on and on and on and never ends", "0"),
    ("good", "1"), ("a fine cast in a fine story", "1"), ("poor jokes , poor taste", "0"), ("not bad at all", "1"),
    ("the worst film of a long , long year", "0"), ("bright , quick and kind", "1"), ("no wit", "0"),
    ("you will want to see it again and again", "1"), ("i left early", "0"),
] * 2  # fmt: skip
ARCHITECTURES = ("roberta", "opt", "llama", "gemma", "gemma2", "gpt2")
WORDS = "No Yes Maybe Description Entity Expression Human Location Number"
CORPUS = [f"{text} It was terrible. It was great. {WORDS}\nNo\nYes\nMaybe" for text, _ in SENTENCES]


def tokenizer(masked: bool) -> Any:
    """Return a byte-level BPE tokenizer trained on the sentences, with the special tokens of RoBERTa or of GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if masked else ["<pad>", "</s>"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    )
    if not masked:
        return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="</s>")
    ends = [("<s>", tok.token_to_id("<s>")), ("</s>", tok.token_to_id("</s>"))]
    tok.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        mask_token=AddedToken("<mask>", lstrip=True),
    )  # fmt: skip


def config(name: str, words: int, pad: int) -> Any:
    """Return the config of a tiny model of an architecture."""
    import transformers as t

    usual = {
        "vocab_size": words, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": pad,
    }  # fmt: skip
    grouped = usual | {"num_key_value_heads": 1, "head_dim": 8}
    if name == "roberta":
        return t.RobertaConfig(**usual, type_vocab_size=1, attention_probs_dropout_prob=0.5)
    if name == "opt":
        return t.OPTConfig(**usual, ffn_dim=32, word_embed_proj_dim=16)
    if name == "llama":
        return t.LlamaConfig(**grouped, tie_word_embeddings=False)
    if name == "gemma":
        return t.GemmaConfig(**grouped)
    if name == "gemma2":
        return t.Gemma2Config(**grouped, sliding_window=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    return t.GPT2Config(
        vocab_size=words,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        pad_token_id=pad,
        bos_token_id=1,
        eos_token_id=1,
    )


def write_model(name: str, folder: Path) -> Path:
    """Write a tiny model with random weights that are large enough to matter, and its tokenizer."""
    import torch
    import transformers as t

    tok = tokenizer(masked=name == "roberta")
    auto = t.AutoModelForMaskedLM if name == "roberta" else t.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        model = auto.from_config(config(name, len(tok), tok.pad_token_id))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(0.2 * torch.randn_like(p) + (1.0 if p.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def write_sets(folder: Path) -> Path:
    """Write folders sst2, trec and snli of a few samples each."""
    write_sentences(folder / "sst2")
    kinds, relations = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"), ("contradiction", "entailment", "neutral")
    texts = [text for text, _ in SENTENCES]
    sets = {"trec": [f"{text}\t{kinds[i % 6]}" for i, text in enumerate(texts)],
            "snli": [f"{text}\tgood\t{relations[i % 3]}" for i, text in enumerate(texts)]}  # fmt: skip
    for name, lines in sets.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines))
    return folder


def write_sentences(folder: Path) -> Path:
    """Write the sentences as a folder of TSV files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev", "test"):
        (folder / f"{split}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in SENTENCES))
    return folder
