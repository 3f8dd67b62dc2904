"""The upper layers of a language model are trained, and those below are frozen and read each sample once.

A probe then computes the upper layers only, from hidden states that are kept for every sample: with a third of the
layers, in a third of the time. The states are kept as long as the run lasts, in the type that the model computes in.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cyber0.config.schema import TaskConfig
from cyber0.directions.backends import backend_of
from cyber0.errors import ConfigError, ModelError
from cyber0.model.cuda_graphs import GraphInputs
from cyber0.tasks.text import layers
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.tokens import Tokens

Tensor = torch.Tensor

MIB = 1 << 20
FEW = 2  # samples by which a pass that begins at their hidden states is compared with a whole one
SPREAD, SPREAD_16 = 1e-3, 0.1  # how far logits may differ then, relative to the largest; where 16 bits are involved


class TopTask(Text):
    """The sentences of a text task with the hidden states after layer task.layer, above which the model is trained."""

    def __init__(self, config: TaskConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self._layer = layers.number_of(self.language_model.config, config.layer, above=1)
        self._dtype, self._compute = config.dtype, config.compute or config.dtype
        self._models: list[weakref.ref[nn.Module]] = []
        self._width, self._checked = 0, False  # of the tuples that layers return; whether a pass can begin after some

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        """Return the model with the layers up to task.layer frozen."""
        model = super().model(seed, dtype)
        self._models.append(weakref.ref(model))  # its frozen layers read the samples
        return model

    def outputs(self, model: nn.Module, inputs: Tokens) -> Tensor:
        """Return the logits of the label words, in float32, group by group of similar lengths."""
        if inputs.states is None:
            inputs = self._read(model, inputs.to(self._device))
        return self.joined([self.piece_outputs(model, *piece) for piece in self._each_piece(inputs)], inputs)

    def pieces(self, inputs: Tokens) -> list[GraphInputs]:
        """Return the groups of samples of similar lengths, with their hidden states."""
        return list(self._each_piece(inputs))

    def piece_outputs(self, model: nn.Module, *piece: Any) -> Tensor:
        """Return the label words' logits of one group, computed by the layers above task.layer."""
        *tokens, states = piece
        base: Any = model
        blocks = layers.blocks_of(base)
        with contextlib.ExitStack() as between:
            if self._compute != self._dtype:
                # At w itself, weights have the type that they are stored in, as what comes after the layers always has.
                states = states.type_as(_vector(blocks[self._layer]))
                between.enter_context(layers.ending_in(blocks[-1], getattr(torch, self._dtype)))
            between.enter_context(layers.beginning_after(base, self._layer, states, self._width))
            return super().piece_outputs(model, *tokens)

    def _each_piece(self, inputs: Tokens) -> Iterator[GraphInputs]:
        assert inputs.states is not None
        for piece, group in zip(super().pieces(inputs), inputs.groups, strict=True):
            yield (*piece, inputs.states[:, : group.ids.shape[1]].index_select(0, group.rows))

    # Reading the samples.

    def _tokenised(self, split: str) -> Tokens:
        model = next((found for ref in self._models if (found := ref()) is not None), None)
        if model is None:
            raise RuntimeError("the samples are read by the model's frozen layers: make the model first, and keep it")
        return self._read(model, super()._tokenised(split))

    def _read(self, model: Any, tokens: Tokens) -> Tokens:
        """Return samples with their hidden states after task.layer."""
        self._check_memory(tokens, model)
        layers.announce(self.language_model.name, len(tokens))
        device, was_training = next(model.parameters()).device, model.training
        model.eval()
        try:
            with torch.no_grad():
                found = self._states(model, tokens.to(device))
                if found is None:
                    return tokens
                result = replace(tokens, states=found)
                if not self._checked:
                    self._check(model, result.to(device))
        finally:
            model.train(was_training)
        return result

    def _states(self, model: Any, tokens: Tokens) -> Tensor | None:
        """Return the hidden states of samples, (samples, tokens, width); None if there are none."""
        kind, found = getattr(torch, self._compute), []
        for group in tokens.groups:
            states, self._width = layers.states_after(model, group, self._layer, causal=self.causal)
            missing = tokens.ids.shape[1] - states.shape[1]
            found.append(nn.functional.pad(states.to(self._device, kind), (0, 0, 0, missing)))
            if not torch.isfinite(found[-1]).all() and torch.isfinite(states).all():
                raise ConfigError(f"hidden states after layer {self._layer} are larger than {self._compute} can hold; "
                                  'set task.compute = "bfloat16", or leave it out')  # fmt: skip
        return torch.cat(found).index_select(0, tokens.back.to(self._device)) if found else None

    def _check(self, model: Any, tokens: Tokens) -> None:
        """Compare two passes that begin after the frozen layers with a whole one, once.

        Raises:
            ModelError: They gave something else, or failed.
        """
        few = tokens[:FEW]
        whole = super().piece_outputs(model, *super().pieces(few)[0])
        piece = next(self._each_piece(few))
        try:
            found = [self.piece_outputs(model, *piece) for _ in range(2)]  # a model may write to what it is given
        except (torch.OutOfMemoryError, ModelError):
            raise
        except Exception as error:  # models say in many ways that they miss what the layers below left for them
            raise layers.unusual(model) from error
        spread = SPREAD if self._compute == self._dtype == "float32" else SPREAD_16
        far = spread * float(whole.nan_to_num(0, 0, 0).abs().max())
        if not all(torch.allclose(one, whole, rtol=0, atol=far, equal_nan=True) for one in found):
            raise layers.unusual(model)
        self._checked = True

    def _check_memory(self, tokens: Tokens, model: Any) -> None:
        """Refuse samples whose hidden states do not fit."""
        width = int(model.config.get_text_config().hidden_size)
        needed = 2 * tokens.ids.numel() * width * getattr(torch, self._compute).itemsize
        free = backend_of(self._device).free_memory(self._device)
        if needed > free:
            raise ConfigError(
                f'task.adapter = "top" keeps the hidden states of {len(tokens):,} samples of up to '
                f"{tokens.ids.shape[1]} tokens, which takes {needed / MIB:,.1f} MiB while they are read, and "
                f"{self._device.type} has {free / MIB:,.1f} MiB free; learn from fewer samples (task.samples), "
                "evaluate on fewer, or shorten the longest"
            )


def _vector(block: nn.Module) -> Tensor:
    """Return a small parameter of a layer, such as the weight of a norm."""
    return min(block.parameters(), key=lambda p: (p.dim(), p.numel()))
