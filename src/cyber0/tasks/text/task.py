"""Prompt-based classification by a language model: SST-2, SNLI, TREC, or sentences of the user's own.

Each sample becomes a prompt with a place for an answer, and each class has a word. The logits of these words at that
place are the outputs, and cross entropy over them is the loss.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from cyber0.config.schema import Config, TaskConfig
from cyber0.errors import ConfigError, ModelError
from cyber0.model.cuda_graphs import GraphInputs
from cyber0.model.vector import Parameters
from cyber0.tasks import SETS, evaluated_on
from cyber0.tasks.text import prompts, saving, sentences
from cyber0.tasks.text.adapters import Adapter, adapted
from cyber0.tasks.text.answer import answer_logits
from cyber0.tasks.text.language_model import LanguageModel
from cyber0.tasks.text.model_cache import MODELS
from cyber0.tasks.text.model_card import model_card
from cyber0.tasks.text.sentences import Sentences
from cyber0.tasks.text.tokens import Tokens

log = logging.getLogger("cyber0")

FEW_SAMPLES = 4096  # to learn from; with more, their loss is not measured beside that of the test samples
LONGEST_PROMPT = 256  # tokens, as LM-BFF allows for pairs of sentences; longer texts lose their ends
VALIDATION = "validation"  # the set of samples that are held out
VALIDATION_LOSS, VALIDATION_ACCURACY = f"{VALIDATION}_loss", f"{VALIDATION}_accuracy"
LONGEST_SHOWN = 80  # characters of a sample in a message


class Text:
    """One set of labelled sentences and one language model.

    named_model: the weights can be loaded again by name, so a run need not store them.
    answers_by_words: the model answers by a label word, which must be a token of its own.

    Args:
        config: The task's settings.
        language_model: Loaded by the config's task.model if not given.
        evaluated: Whether accuracy is measured; otherwise a folder needs no test samples, and none are read.
        splits: The samples, if already loaded; empty for predictions only.
    """

    named_model = True
    answers_by_words = True

    def __init__(
        self, config: TaskConfig, language_model: LanguageModel | None = None, *, evaluated: bool = True,
        splits: dict[str, Sentences] | None = None,
    ) -> None:  # fmt: skip
        self.name = config.name
        words = prompts.label_words(config.name, config.label_words)
        # What is quickly found out first: a language model may take half a minute to load.
        fields = prompts.template(config.name, config.template, causal=False).fields  # the same for a causal one
        self._splits = _splits(config, fields, list(words), evaluated) if splits is None else splits
        self.language_model = language_model or MODELS.get_or_load(
            "tokenizer", identity(config.model), lambda: LanguageModel(config.model)
        )
        self.causal, tokenizer = self.language_model.causal, self.language_model.tokenizer
        self.template = prompts.template(config.name, config.template, self.causal)
        self.classes, self.label_names = len(words), list(words)
        if self.answers_by_words:
            word_tokens = prompts.word_tokens(words, tokenizer, self.template, self.causal)
            self.language_model.check_tokens(word_tokens, "task.label_words")
            self._word_tokens = torch.tensor(word_tokens)
        self._adapter = Adapter.of(config)
        self._device = torch.device("cpu")

    # What is learned from.

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels of the training samples, for the partitions."""
        return self._splits["train"].labels

    def keep(self, indices: NDArray[np.int64]) -> Self:
        """Return the same task with only these training samples."""
        result = copy.copy(self)
        result._splits = self._splits | {"train": self._splits["train"].take(indices)}
        for name in ("train_inputs", "train_targets"):
            result.__dict__.pop(name, None)
        return result

    def hold_out(self, indices: NDArray[np.int64]) -> Self:
        """Return the same task that also measures on these training samples; call it before `keep`."""
        result = copy.copy(self)
        result._splits = self._splits | {VALIDATION: self._splits["train"].take(indices)}
        return result

    def on_other(self, path: Path) -> Self:
        """Return the same task with the labelled sentences of a file or folder to evaluate on."""
        result, columns = copy.copy(self), sentences.columns_of(self.name)
        result._splits = sentences.read_other(path, self.template.fields, self.label_names, columns)
        for name in ("test_inputs", "test_targets"):
            result.__dict__.pop(name, None)
        return result

    def shown(self, number: int) -> str:
        """Return a training sample as text, shortened if it is long."""
        return _cut(" / ".join(self._splits["train"].texts[number].values()))

    @cached_property
    def train_inputs(self) -> Tokens:
        """The training samples; tokenised on first use."""
        return self._tokenised("train")

    @cached_property
    def train_targets(self) -> torch.Tensor:
        return self._targets("train")

    @cached_property
    def test_inputs(self) -> Tokens:
        """The samples that accuracy is measured on: SST-2's dev set, as in MeZO, else the test set."""
        return self._tokenised(self.evaluated_on)

    @cached_property
    def test_targets(self) -> torch.Tensor:
        return self._targets(self.evaluated_on)

    @cached_property
    def validation_inputs(self) -> Tokens:
        """The samples that are held out."""
        return self._tokenised(VALIDATION)

    @property
    def best(self) -> str:
        """What marks the best round: the loss on the samples that are held out, if any, else that on the others."""
        return f"-{VALIDATION_LOSS}" if VALIDATION in self._splits else ""

    @property
    def evaluated_on(self) -> str:
        """Which set accuracy is measured on, dev or test."""
        return evaluated_on(self.name, self._splits)

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        self._device = torch.device(device)
        held = ("train_inputs", "train_targets", "validation_inputs", "test_inputs", "test_targets", "_word_tokens")
        for name in held:
            if name in self.__dict__:
                self.__dict__[name] = self.__dict__[name].to(device)
        return self

    def _targets(self, split: str) -> torch.Tensor:
        return torch.from_numpy(self._splits[split].labels).to(self._device)

    def _tokenised(self, split: str) -> Tokens:
        samples = self._splits[split]
        if split in ("train", VALIDATION):  # which depend on the seed
            return self.tokenise(samples).to(self._device)
        # The cached entry keeps the samples, so that no others can have their id.
        which = (id(samples), self.template.text, self._adapter, identity(self.language_model.name), self._device)
        _, tokens = MODELS.get_or_load(
            f"{split} tokens", which, lambda: (samples, self.tokenise(samples).to(self._device))
        )
        return tokens

    def tokenise(self, samples: Sentences) -> Tokens:
        """Return the prompts of samples as tokens, texts that are too long cut at their end."""
        taken = self._adapter.length if self._adapter.kind == "prefix" else 0  # a prefix uses positions of its own
        longest = min(LONGEST_PROMPT, self.language_model.longest - taken)
        rows = self._encoded(samples.texts)
        long = [i for i, row in enumerate(rows) if len(row) > longest]
        for i in long:
            rows[i] = self._shortened(samples.texts[i], longest)
        if long:
            log.warning("%d of %d prompts are longer than %d tokens: the ends of their texts are cut off",
                        len(long), len(rows), longest)  # fmt: skip
        if self.causal:
            places = [len(row) - 1 for row in rows]
        else:
            places = [self._mask_place(row) for row in rows]
        padding = self.language_model.padding
        self.language_model.check_tokens([padding], "padding")
        for row, text in zip(rows, samples.texts, strict=True):
            self.language_model.check_tokens(row, f"the prompt of {_cut(' / '.join(text.values()))!r}")
        return Tokens.from_lists(rows, places, padding)

    def _encoded(self, texts: list[dict[str, str]]) -> list[list[int]]:
        tokenizer = self.language_model.tokenizer
        if self.causal:
            texts_in = [self.template.causal(text) for text in texts]
        else:
            texts_in = [self.template.masked(text, tokenizer.mask_token) for text in texts]
        rows: list[list[int]] = tokenizer(texts_in)["input_ids"]
        if self.causal and tokenizer.eos_token_id is not None:  # a causal model must not see an end-of-text token
            rows = [row[:-1] if len(row) > 1 and row[-1] == tokenizer.eos_token_id else row for row in rows]
        return rows

    def _shortened(self, text: dict[str, str], longest: int) -> list[int]:
        """Remove words from the end of the longest text until the prompt fits; from a single word, letters."""
        parts = dict(text)
        while any(parts.values()):
            widest = max(parts, key=lambda name: len(parts[name]))
            words = parts[widest].split()
            if len(words) > 1:
                parts[widest] = " ".join(words[: -max(1, len(words) // 16)])
            else:  # not every script has spaces
                parts[widest] = parts[widest][: -max(1, len(parts[widest]) // 16)]
            (row,) = self._encoded([parts])
            if len(row) <= longest:
                return row
        raise ConfigError(f"task.template = {self.template.text!r} alone is longer than the model's {longest} tokens")

    def _mask_place(self, row: list[int]) -> int:
        token = self.language_model.tokenizer.mask_token_id
        if row.count(token) != 1:
            raise ConfigError(f"a prompt has {row.count(token)} mask tokens instead of one; check whether the data "
                              "contains the mask token")  # fmt: skip
        return row.index(token)

    # What is measured.

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        """Return the model at its starting point: the loaded weights, an adapter's drawn by the seed."""
        if not MODELS.enabled:
            return self.language_model.load(dtype, self._device, seed, self._adapter)
        which = (identity(self.language_model.name), dtype, self._device.type)
        plain = MODELS.get_or_load(
            "weights", which, lambda: self.language_model.load(dtype, self._device, seed, Adapter())
        )
        return adapted(copy.deepcopy(plain), self._adapter, seed, self.causal)

    def prepare(self, inputs: Tokens) -> Tokens:
        """Return the samples unchanged: they are stored as the model takes them."""
        return inputs

    def outputs(self, model: nn.Module, inputs: Tokens) -> torch.Tensor:
        """Return the logits of the label words, in float32, group by group of similar lengths."""
        return self.joined([self.piece_outputs(model, *piece) for piece in self.pieces(inputs)], inputs)

    def in_copies(self, inputs: Tokens, copies: int) -> Tokens:
        """Return the samples, to be cut for passes in which each is repeated so often."""
        return inputs.in_copies(copies)

    def pieces(self, inputs: Tokens) -> list[GraphInputs]:
        """Return the groups of samples of similar lengths."""
        return [(g.ids, None if self.causal else g.mask, g.places) for g in inputs.groups]

    def piece_outputs(self, model: nn.Module, *piece: Any) -> torch.Tensor:
        """Return the label words' logits of one group."""
        ids, mask, places = piece
        try:
            return answer_logits(model, ids, mask, places, self._word_tokens, self.causal)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{len(ids)} samples of up to {ids.shape[1]} tokens do not fit in the memory of {ids.device}; lower "
                'method.batch_size, or use task.dtype = "bfloat16"'
            ) from error

    def joined(self, outputs: list[torch.Tensor], inputs: Tokens) -> torch.Tensor:
        """Return the groups' logits in the order of the samples."""
        return torch.cat(outputs).index_select(0, inputs.back)

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each sample's cross entropy over the label words, in float32."""
        return functional.cross_entropy(outputs.float(), targets, reduction="none")

    def evaluate(self, model: nn.Module) -> tuple[float, float, dict[str, float]]:
        """Return mean loss and accuracy (0 to 1) on the samples that accuracy is measured on.

        Both on the samples that are held out, if any, come third.
        """
        loss, accuracy = self._measure(model, self.test_inputs, self.test_targets)
        if VALIDATION not in self._splits:
            return loss, accuracy, {}
        held_out = self._measure(model, self.validation_inputs, self._targets(VALIDATION))
        return loss, accuracy, dict(zip((VALIDATION_LOSS, VALIDATION_ACCURACY), held_out, strict=True))

    def evaluate_more(self, model: nn.Module, loss: float, accuracy: float) -> dict[str, float]:
        """Return loss and accuracy on the dev and test sets that there are, by name; those of one set are given."""
        found = {f"{self.evaluated_on}_loss": loss, f"{self.evaluated_on}_accuracy": accuracy}
        for split in set(SETS) & set(self._splits) - {self.evaluated_on}:
            loss, accuracy = self._measure(model, self._tokenised(split), self._targets(split))
            found |= {f"{split}_loss": loss, f"{split}_accuracy": accuracy}
        return found

    def train_loss(self, model: nn.Module) -> float | None:
        """Return the mean loss on the training samples; None if they are many."""
        if len(self.labels) > FEW_SAMPLES:
            return None
        return self._measure(model, self.train_inputs, self.train_targets)[0]

    def _measure(self, model: nn.Module, inputs: Tokens, targets: torch.Tensor) -> tuple[float, float]:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                outputs = self.outputs(model, inputs)
                loss = self.losses(outputs, targets).double().mean()
                accuracy = (outputs.argmax(dim=1) == targets).double().mean()
        finally:
            model.train(was_training)
        return float(loss), float(accuracy)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def starting_model(config: TaskConfig, seed: int, device: str = "cpu") -> nn.Module:
    """Return the model that a run of this config starts with, without its data."""
    target = torch.device(device)
    if config.adapter == "head":
        from cyber0.tasks.text.head import starting_head

        return starting_head(config, len(prompts.label_words(config.name, config.label_words)), target)
    adapter = Adapter.of(config)
    return LanguageModel(config.model).load(config.dtype, target, seed, adapter).to(target)


def export(
    config: Config, parameters: Parameters, folder: Path, *, rounds: int, home: Path | None = None,
    summary: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a folder that from_pretrained loads: the whole model or the adapter, the tokenizer and a model card.

    Args:
        config: The run's settings.
        parameters: The trained weights, in their model.
        folder: Where to write.
        rounds: The number of rounds after which these are the weights.
        home: The final place of the folder, if another.
        summary: The run's summary.json, if there is one; it is ignored if it is about other weights.
    """
    found, model, digest = LanguageModel(config.task.model), parameters.model, parameters.digest()
    base = saving.name_base(model, config.task.model, folder, home) if config.task.adapts else ""
    saving.save(model, found.tokenizer, folder)
    card = model_card(
        config, causal=found.causal, rounds=rounds, dimension=parameters.dimension, digest=digest, base=base,
        summary=summary if summary and summary.get("model_digest") == digest else None,
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")


def identity(name: str) -> tuple[object, ...]:
    """Return what identifies a model, also against an earlier one in the same place."""
    path = Path(name).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return (name, *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def _splits(config: TaskConfig, fields: list[str], classes: list[str], evaluated: bool) -> dict[str, Sentences]:
    if config.data:
        folder, columns = Path(config.data).expanduser(), sentences.columns_of(config.name)
        return MODELS.get_or_load(
            "sentences", (config.name, identity(config.data), tuple(fields), tuple(classes), evaluated),
            lambda: sentences.read_folder(folder, fields, classes, columns, evaluated=evaluated),
        )  # fmt: skip
    if config.name not in sentences.HUB:
        raise ConfigError(f"task.name = {config.name!r} needs task.data: a folder with train and test files")
    return sentences.read_hub(config.name, fields, classes)
