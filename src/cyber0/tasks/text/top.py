"""The upper layers of a language model are trained, and those below are frozen and read each sample once.

A probe then computes the upper layers only, from hidden states that are kept for every sample: with a third of the
layers, a third of the time. The states are kept for as long as the run lasts, in the type that the model computes in.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cyber0.config.schema import TaskConfig
from cyber0.directions.backends import backend_of
from cyber0.errors import ConfigError
from cyber0.model.cuda_graphs import GraphInputs
from cyber0.tasks.text import layers
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.tokens import Tokens

GIB = 1 << 30


class TopTask(Text):
    """The sentences of a text task with the hidden states after layer task.layer, above which the model is trained."""

    def __init__(self, config: TaskConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self._layer = layers.below_the_top(self.language_model.config, config.layer)
        self._dtype, self._compute = config.dtype, config.compute or config.dtype
        self._model: Any = None
        self._in_tuples = False

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        """Return the model with the layers up to task.layer frozen."""
        model = super().model(seed, dtype)
        self._model = model  # its frozen layers read the samples
        return model

    def read(self, tokens: Tokens) -> Tokens:
        """Return the samples with their hidden states after task.layer."""
        if self._model is None:
            self._model = super().model(0, self._dtype)
        model, device = self._model, next(self._model.parameters()).device
        self._check_memory(tokens, model)
        layers.announce(self.language_model.name, len(tokens))
        here, kind, found = tokens.to(device), getattr(torch, self._compute), []
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for group in here.groups:
                    states, self._in_tuples = layers.states_after(model, group, self._layer, causal=self.causal)
                    missing = tokens.ids.shape[1] - states.shape[1]
                    found.append(nn.functional.pad(states.to(self._device, kind), (0, 0, 0, missing)))
        finally:
            model.train(was_training)
        if not found:
            return tokens
        return replace(tokens, states=torch.cat(found).index_select(0, here.back.to(self._device)))

    def pieces(self, inputs: Tokens) -> list[GraphInputs]:
        """Return the groups of samples of similar lengths, with their hidden states."""
        return [(*piece, group.states) for piece, group in zip(super().pieces(inputs), inputs.groups, strict=True)]

    def piece_outputs(self, model: nn.Module, *piece: Any) -> torch.Tensor:
        """Return the label words' logits of one group, computed by the layers above task.layer."""
        *tokens, states = piece
        base: Any = model
        last, blocks = self._layer, layers.blocks_of(base)
        with contextlib.ExitStack() as between:
            if self._compute != self._dtype:
                # At w itself, weights have the type that they are stored in, as what comes after the layers always has.
                states = states.type_as(_vector(blocks[last]))
                between.enter_context(layers.ending_in(blocks[-1], getattr(torch, self._dtype)))
            between.enter_context(layers.beginning_after(base, last, states, self._in_tuples))
            return super().piece_outputs(model, *tokens)

    def _check_memory(self, tokens: Tokens, model: Any) -> None:
        """Refuse samples whose hidden states do not fit."""
        width = int(model.config.get_text_config().hidden_size)
        needed = 2 * tokens.ids.numel() * width * getattr(torch, self._compute).itemsize
        free = backend_of(self._device).free_memory(self._device)
        if needed > free:
            raise ConfigError(
                f'task.adapter = "top" keeps the hidden states of {len(tokens):,} samples of up to '
                f"{tokens.ids.shape[1]} tokens, which takes {needed / GIB:.1f} GiB while they are read, and "
                f"{self._device.type} has {free / GIB:.1f} GiB free; set task.samples lower, or task.adapter = "
                '"none", which keeps none'
            )


def _vector(block: nn.Module) -> torch.Tensor:
    """Return a small parameter of a layer, such as the weight of a norm."""
    return min(block.parameters(), key=lambda p: (p.dim(), p.numel()))
