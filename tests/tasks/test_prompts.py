"""Prompts, sentences and the cut of a batch: what a text task needs before any model is loaded."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cyber0.config.files import load, to_toml
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError
from cyber0.tasks.partition import few_shot
from cyber0.tasks.text import prompts, sentences
from cyber0.tasks.text.tokens import Tokens, cut

PAIR = {"premise": "A man sleeps.", "hypothesis": "Someone rests."}


def test_the_built_in_prompts_are_those_of_the_field() -> None:
    def masked(name: str, sample: dict[str, str]) -> str:
        return prompts.template(name, "", causal=False).masked(sample, "<mask>")

    assert masked("sst2", {"text": "fine"}) == "fine It was <mask>."
    assert masked("snli", PAIR) == "A man sleeps? <mask>, someone rests."
    assert masked("trec", {"text": "Who ?"}) == "<mask>: Who ?"
    assert prompts.label_words("sst2", "") == {"0": "terrible", "1": "great"}
    assert prompts.label_words("snli", "")["neutral"] == "Maybe"
    assert list(prompts.label_words("trec", "").values()) == [
        "Description", "Entity", "Expression", "Human", "Location", "Number"
    ]  # fmt: skip


def test_a_causal_prompt_ends_where_the_answer_begins() -> None:
    sst2, snli = (prompts.template(name, "", causal=True) for name in ("sst2", "snli"))
    assert (sst2.causal({"text": "fine"}), sst2.separator) == ("fine It was", " ")
    expected = 'Suppose A man sleeps. Can we infer that "Someone rests."? Yes, No, or Maybe?\n'
    assert (snli.causal(PAIR), snli.separator) == (expected, "")
    assert snli.fields == ["premise", "hypothesis"]


@pytest.mark.parametrize(
    ("template", "message"),
    [("{text} It was", "must have {mask} once"), ("{mask} {mask} {text}", "once"), ("It was {mask}", "no field"),
     ("{text:upper} {mask}", "spec"), ("{text} {mask", "can't be read"), ("{0} {mask}", "fields are written"),
     ("{text!r} {mask}", "fields are written")],
)  # fmt: skip
def test_a_template_that_can_not_work_is_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prompts.template("text", template, causal=False)


@pytest.mark.parametrize("words", ["great", "0=good", "0=good, 0=bad", "0=good, 1=good", "0=, 1=bad", "=a, 1=b"])
def test_label_words_that_can_not_work_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.label_words"):
        prompts.label_words("text", words)


def test_a_set_of_ones_own_needs_a_template_and_words() -> None:
    with pytest.raises(ConfigError, match=r"needs task\.template"):
        prompts.template("text", "", causal=True)
    with pytest.raises(ConfigError, match=r"needs task\.label_words"):
        prompts.label_words("text", "")


# The paper's settings.


@pytest.mark.parametrize(
    ("task", "clients", "byzantine", "rounds"),
    [("sst2", 8, 2, 20_000), ("snli", 12, 3, 20_000), ("trec", 12, 3, 40_000)],
)
def test_the_defaults_of_a_text_task_are_the_papers(task: str, clients: int, byzantine: int, rounds: int) -> None:
    config = load(overrides=[f"task.name={task}"])
    assert (config.federation.clients, config.federation.byzantine, config.rounds) == (clients, byzantine, rounds)
    method = config.method
    assert (method.lr, method.mu, method.batch_size, method.k, config.task.samples) == (1e-6, 1e-3, 64, 1, 512)
    assert config == Config().with_overrides([f"task.name={task}"])
    assert config.with_overrides(["task.name=mnist"]) == Config()


def test_what_is_set_wins_over_a_tasks_default(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('rounds = 7\n[task]\nname = "trec"\n[method]\nlr = 0.5\n')
    config = load(file, ["federation.clients=20"])
    assert (config.rounds, config.method.lr, config.federation.clients) == (7, 0.5, 20)
    assert config.federation.byzantine == 3
    file.write_text(to_toml(config))
    assert load(file) == config


def test_keys_of_language_models_are_refused_elsewhere() -> None:
    for override in ("task.model=gpt2", "task.template={text} {mask}", "task.label_words=0=a", "task.adapter=lora"):
        with pytest.raises(ConfigError, match="is for text tasks"):
            Config().with_overrides([override])


@pytest.mark.parametrize("template", ["{text} {mask:lower}", "{text} {mask:}", "{{mask}} {text} is {mask}"])
def test_a_mask_is_written_plainly(template: str) -> None:
    with pytest.raises(ConfigError, match=r"must have \{mask\} once|braces are for fields"):
        prompts.Template(template)


def test_the_document_lists_the_prompts_as_they_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "TEXT.md").read_text(encoding="utf-8")
    for name, prompt in prompts.PROMPTS.items():
        masked, causal = (f"`{template}`".replace("\n", "\\n") for template in (prompt.masked, prompt.causal))
        words = ", ".join(f"{label}={word}" for label, word in prompt.words.items())
        assert f"| {name} | {masked} | {causal} | {words} |" in text


# Sentences.


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_tsv_and_jsonl_gzipped_or_not_give_the_same(tmp_path: Path) -> None:
    rows = [("good film", "1"), ("bad film", "0")]
    tsv = "".join(f"{text}\t{label}\n" for text, label in rows)
    jsonl = "".join(json.dumps({"label": int(label), "text": text, "other": None}) + "\n" for text, label in rows)
    (tmp_path / "train.tsv").write_text(tsv)
    (tmp_path / "dev.jsonl").write_text(jsonl)
    (tmp_path / "test.tsv.gz").write_bytes(gzip.compress(("sentence\tlabel\n" + tsv).encode()))
    found = sentences.read_folder(tmp_path, ["text"], ["0", "1"], sentences.columns_of("sst2"))
    assert set(found) == {"train", "dev", "test"}
    for split in found.values():
        assert split.texts == [{"text": "good film"}, {"text": "bad film"}]
        assert split.labels.tolist() == [1, 0]


def test_named_columns_may_come_in_any_order(tmp_path: Path) -> None:
    lines = "b\tnote\ta\tlabel\nB\tn\tA\tx\n"
    found = sentences.read_folder(write(tmp_path, train_tsv=lines, test_tsv=lines), ["a", "b"], ["x"])
    assert found["train"].texts == [{"a": "A", "b": "B"}]


@pytest.mark.parametrize("name", ["text", "sst2"])
def test_a_field_that_no_column_is_named_by_is_refused_with_the_columns(name: str, tmp_path: Path) -> None:
    lines = "text\tlabel\ngood\t1\n"
    write(tmp_path, train_tsv=lines, test_tsv=lines)
    columns = sentences.columns_of(name)
    with pytest.raises(DataError, match=r"train.tsv has no column 'txt', .*; its columns are text and label: correct"):
        sentences.read_folder(tmp_path, ["txt"], ["1"], columns)
    assert sentences.read_folder(tmp_path, ["text"], ["1"], columns)["train"].texts == [{"text": "good"}]


def test_without_a_line_of_names_the_one_text_of_an_own_set_has_the_name_of_the_field(tmp_path: Path) -> None:
    write(tmp_path, train_tsv="good\t1\n", test_tsv="good\t1\n")
    assert sentences.read_folder(tmp_path, ["txt"], ["1"])["train"].texts == [{"txt": "good"}]


def test_columns_do_not_depend_on_the_order_of_the_template(tmp_path: Path) -> None:
    lines = "A man.\tA person.\tentailment\n"
    write(tmp_path, train_tsv=lines, test_tsv="premise\thypothesis\tlabel\n" + lines)
    for fields in (["premise", "hypothesis"], ["hypothesis", "premise"], ["hypothesis"]):
        found = sentences.read_folder(tmp_path, fields, ["entailment"], sentences.columns_of("snli"))
        for split in found.values():
            assert split.texts == [{f: {"premise": "A man.", "hypothesis": "A person."}[f] for f in fields}]
    with pytest.raises(DataError, match=r"does not name its columns: .* hypothesis, premise and label last"):
        sentences.read_folder(tmp_path, ["hypothesis", "premise"], ["entailment"], sentences.columns_of("text"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("good\t2\n", "label '2'"),
        ("good\n", "1 columns where 2"),
        ("", "no labelled sample"),
        ("a\tb\t1\n", "3 columns"),
    ],
)
def test_a_bad_line_is_named(content: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, train_tsv=content, test_tsv="good\t1\n")
    with pytest.raises(DataError, match=message):
        sentences.read_folder(tmp_path, ["text"], ["0", "1"])


def test_a_folder_without_the_files_says_which_are_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        sentences.read_folder(tmp_path / "no", ["text"], ["0"])
    with pytest.raises(DataError, match=r"must hold the files train and test .* none of them"):
        sentences.read_folder(tmp_path, ["text"], ["0"])
    write(tmp_path, train_jsonl='{"text": "a", "label": 0}\n\n{"text": "a"')
    with pytest.raises(DataError, match=r"train.jsonl, line 3 is not JSON: .* column 13"):
        sentences.read_folder(tmp_path, ["text"], ["0"])
    write(tmp_path, train_jsonl='{"text": "a"}\n')
    with pytest.raises(DataError, match="line 1: the sample has no 'label'"):
        sentences.read_folder(tmp_path, ["text"], ["0"])
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.tsv.gz").write_bytes(b"not gzipped")
    with pytest.raises(DataError, match="can't be read"):
        sentences.read_folder(tmp_path, ["text"], ["0"])


def test_a_set_in_the_hubs_cache_is_found_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the hub needs the extra 'text'")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(hub.HfApi, "list_repo_files", unreachable)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )  # nothing there: really asked
    with pytest.raises(DataError, match=r"could not be fetched .* no network"):
        sentences.read_hub("sst2", ["text"], ["0", "1"])
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text('{"text": "good", "label": 1}\n')
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, local_files_only, **__: str(tmp_path))
    found = sentences.read_hub("sst2", ["text"], ["0", "1"])
    assert set(found) == {"train", "test"} and found["train"].texts == [{"text": "good"}]
    with pytest.raises(DataError, match="no network"):  # asked to fetch it anew
        sentences.read_hub("sst2", ["text"], ["0", "1"], force=True)


# Few samples.


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_few_shot_is_as_equal_as_possible_per_class(sizes: list[int], share: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)[::-1]
    samples = round(share * len(labels)) or 1
    chosen = few_shot(labels, samples, seed)
    assert len(chosen) == len(set(chosen.tolist())) == samples
    counts = np.bincount(labels[chosen], minlength=len(sizes))
    for one, size in zip(counts, sizes, strict=True):  # who has fewer than another has given all
        assert one == size or one >= counts.max() - 1


def test_few_shot_follows_the_seed() -> None:
    labels = np.arange(1000) % 2
    first, again, other = (few_shot(labels, 64, seed) for seed in (1, 1, 2))
    assert (first == again).all() and set(first.tolist()) != set(other.tolist())
    with pytest.raises(DataError, match=r"task\.samples = 1001"):
        few_shot(labels, 1001, 0)


# The cut.


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), pass_cost=st.integers(0, 20))
def test_the_cut_costs_least_of_all_cuts(lengths: list[int], pass_cost: int) -> None:
    ordered = np.array(sorted(lengths), dtype=np.int64)

    def cost(counts: list[int]) -> int:
        ends = np.cumsum(counts)
        return sum(int(n * ordered[end - 1]) + pass_cost for n, end in zip(counts, ends, strict=True))

    n = len(ordered)
    every = [np.diff([0, *places, n]).tolist() for r in range(min(n, 5)) for places in combinations(range(1, n), r)]
    found = cut(ordered, pass_cost, 1 << 16)
    assert sum(found) == n
    assert cost(found) <= min(map(cost, every))


def test_a_group_holds_no_more_tokens_than_fit() -> None:
    lengths = np.full(1000, 50, dtype=np.int64)
    groups = cut(lengths, 128, 4000)
    assert sum(groups) == 1000 and max(groups) <= 80 and len(groups) == 13


def test_groups_hold_every_sample_once_trimmed_to_their_longest() -> None:
    rows = [list(range(1, 2 + (7 * i) % 23)) for i in range(40)]
    tokens = Tokens.from_lists(rows, [len(row) - 1 for row in rows], pad=0)
    groups = tokens.groups
    assert len(groups) > 1
    last = torch.cat([g.ids.gather(1, g.places[:, None])[:, 0] for g in groups])[tokens.back]
    assert last.tolist() == [row[-1] for row in rows]
    for g in groups:
        real = torch.ones_like(g.ids) if g.mask is None else g.mask
        assert real[:, -1].any()  # no column is all padding
        assert torch.equal(real.bool(), g.ids != 0)


def test_samples_that_are_repeated_are_padded_less() -> None:
    rows = [list(range(1, 2 + (7 * i) % 23)) for i in range(40)]
    tokens = Tokens.from_lists(rows, [len(row) - 1 for row in rows], pad=0)
    padded = [sum(g.ids.numel() for g in tokens.in_copies(copies).groups) for copies in (1, 8, 1000)]
    assert padded[0] > padded[1] > padded[2] >= sum(map(len, rows))
    assert tokens.in_copies(1) is tokens and tokens.in_copies(8) is tokens.in_copies(8)
    assert max(g.ids.numel() for g in tokens.in_copies(1 << 12).groups) <= 1 << 5  # activations stay bounded


def test_samples_can_be_taken_and_sliced() -> None:
    tokens = Tokens.from_lists([[1], [2, 3], [4, 5, 6]], [0, 1, 2], pad=9)
    some = tokens.take(np.array([2, 0]))
    assert some.lengths.tolist() == [3, 1] and some.ids.tolist() == [[4, 5, 6], [1, 9, 9]]
    assert tokens[1:].places.tolist() == [1, 2] and len(tokens[:2]) == 2
