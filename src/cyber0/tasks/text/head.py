"""A linear classifier of what a layer of a frozen language model makes of the prompts (linear probing).

The language model reads each sample once; after that a round costs two small matrix products, on a CPU too. A middle
layer says more about a sentence than the last one, which is about the next word.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cyber0.config.schema import TaskConfig
from cyber0.errors import DataError
from cyber0.model.cuda_graphs import GraphInputs
from cyber0.model.digests import digest_of
from cyber0.model.tensors import save_tensors
from cyber0.storage import naming
from cyber0.tasks.text import layers
from cyber0.tasks.text.adapters import Adapter
from cyber0.tasks.text.language_model import LanguageModel
from cyber0.tasks.text.model_cache import MODELS
from cyber0.tasks.text.sentences import Sentences
from cyber0.tasks.text.task import Text, identity
from cyber0.tasks.text.tokens import Tokens

SETS = 8  # of samples whose features a process keeps for its next run: those of a run are three at most
KEPT_IN, FEATURES, DIGEST = "CYBER0_FEATURES", "features", "digest"  # the environment's name of a folder; its files
log = logging.getLogger("cyber0")


class Head(nn.Linear):
    """The classifier, which starts at zero, and the digest of the language model that it belongs to.

    The digest is a buffer, so participants and runs whose language models differ are told apart like any others.

    Args:
        language_model: Frozen; its hidden states are what the classifier takes.
        classes: How many there are.
    """

    digest: torch.Tensor
    fixed_entries: ClassVar = ("digest",)  # no file of weights may replace it: tasks/starting.py

    def __init__(self, language_model: Any, classes: int) -> None:
        width = hidden_size(language_model)
        with torch.random.fork_rng(devices=[]):  # torch's own initial weights are replaced
            super().__init__(width, classes, bias=False)
        nn.init.zeros_(self.weight)
        self.register_buffer("digest", bytes_of(digest_of(language_model.state_dict().values())))


class HeadTask(Text):
    """The sentences of a text task as features, and a head that is trained on them.

    A sample's features are the hidden state at the place of the answer after layer task.layer, scaled to a root mean
    square of 1, in float32.
    """

    answers_by_words = False
    named_model = False  # zeros are stored beside the ledger, so that replaying needs no language model

    def __init__(self, config: TaskConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        layers.number_of(self.language_model.config, config.layer)
        self._layer, self._dtype = config.layer, config.dtype

    @cached_property
    def _backbone(self) -> Any:
        return backbone(self.language_model, self._dtype, self._device)

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        """Return the head at zero; `dtype` is that of the language model, a head is always in float32."""
        return Head(self._backbone, self.classes).to(self._device)

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        if torch.device(device) != self._device:
            self.__dict__.pop("_backbone", None)
        return super().to(device)

    def tokenise(self, samples: Sentences) -> torch.Tensor:  # type: ignore[override]  # what the model takes
        """Return the features of samples, one row each."""
        which = (identity(self.language_model.name), self._dtype, self._device, self._layer, self.template.text)
        read: dict[object, torch.Tensor] = MODELS.get_or_load("features", which, dict)
        # whole sets: a sample's last bits depend on those it is read with
        key = tuple(tuple(text.items()) for text in samples.texts)
        found = read.pop(key, None)
        if found is None:
            found = self._features(super().tokenise(samples).to(self._device))
        while len(read) >= SETS:
            del read[next(iter(read))]
        read[key] = found  # last: the first is the one that has not been used for longest
        return found

    def _tokenised(self, split: str) -> torch.Tensor:  # type: ignore[override]  # as above; depends on the type too
        return self.tokenise(self._splits[split])

    def _features(self, tokens: Tokens) -> torch.Tensor:
        """Return the features of samples; those that a folder named by the user has need not be computed."""
        path = self._kept(tokens)
        if path is not None:
            with suppress(OSError, SafetensorError, KeyError):  # what is damaged is computed and written again
                kept = load_file(path)
                if kept[DIGEST].numpy().tobytes().hex() == digest_of([kept[FEATURES]]):
                    return kept[FEATURES].to(self._device)
            with naming(path.parent, f"set {KEPT_IN} to a folder that can be written to"):  # before hours of reading
                path.parent.mkdir(parents=True, exist_ok=True)
        layers.announce(self.language_model.name, len(tokens))
        found = features(self._backbone, tokens, self._layer, causal=self.causal)
        if path is not None:
            try:
                whole = {FEATURES: found, DIGEST: bytes_of(digest_of([found]))}
                save_tensors(whole, path, durable=False, private=True)
            except DataError as error:  # a run that has them in memory can go on
                log.warning("what the language model has read is not kept: %s", error)
        return found

    def _kept(self, tokens: Tokens) -> Path | None:
        """Return the file for the features of samples, whose name says all that they depend on; None: no folder."""
        folder = os.environ.get(KEPT_IN)
        if not folder:
            return None
        import transformers

        config = {name: value for name, value in self._backbone.config.to_dict().items() if name != "_name_or_path"}
        read_as = {
            "model": digest_of(self._backbone.state_dict().values()), "config": config,
            "samples": digest_of([tokens.ids, torch.from_numpy(tokens.lengths), tokens.places]),
            "dtype": self._dtype, "device": self._device.type, "layer": self._layer, "causal": self.causal,
            "versions": [torch.__version__, transformers.__version__],
        }  # fmt: skip
        key = json.dumps(read_as, sort_keys=True, default=str)
        return Path(folder).expanduser() / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"

    def outputs(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the logits of the classes."""
        logits: torch.Tensor = model(inputs)
        return logits

    def in_copies(self, inputs: torch.Tensor, copies: int) -> torch.Tensor:  # type: ignore[override]
        return inputs

    def pieces(self, inputs: torch.Tensor) -> list[GraphInputs]:  # type: ignore[override]
        return [(inputs,)]

    def piece_outputs(self, model: nn.Module, *piece: Any) -> torch.Tensor:
        return self.outputs(model, *piece)

    def joined(self, outputs: list[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.cat(outputs)


def starting_head(config: TaskConfig, classes: int, device: torch.device) -> Head:
    """Return the head that a run of this config starts with, without its data."""
    return Head(backbone(LanguageModel(config.model), config.dtype, device), classes).to(device)


def backbone(language_model: LanguageModel, dtype: str, device: torch.device) -> nn.Module:
    """Return the frozen language model."""
    which = (identity(language_model.name), dtype, device.type)
    return MODELS.get_or_load("weights", which, lambda: language_model.load(dtype, device, 0, Adapter()))


def hidden_size(model: Any) -> int:
    """Return the width of a language model's hidden states."""
    return int(model.config.get_text_config().hidden_size)


@torch.no_grad()
def features(model: Any, tokens: Tokens, layer: int, *, causal: bool) -> torch.Tensor:
    """Return the hidden states of samples at their places after a layer, each with a root mean square of 1.

    Args:
        model: The language model.
        tokens: The samples.
        layer: Counted from 1; 0: two thirds of the way up.
        causal: Whether the model looks back only, so that padding needs no mask.
    """
    found = []
    for group in tokens.groups:
        states, _ = layers.states_after(model, group, layer, causal=causal)
        hidden = states[torch.arange(len(group.places), device=group.places.device), group.places].float()
        found.append(hidden / hidden.square().mean(1, keepdim=True).sqrt())
    if not found:
        return torch.empty(0, hidden_size(model), device=tokens.device)
    return torch.cat(found).index_select(0, tokens.back)


def bytes_of(digest: str) -> torch.Tensor:
    """Return a digest in hexadecimal digits as a tensor of its bytes."""
    return torch.frombuffer(bytearray(bytes.fromhex(digest)), dtype=torch.uint8)
