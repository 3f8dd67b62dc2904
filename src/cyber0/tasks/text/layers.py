"""The layers of a language model, counted from 1: their hidden states, and passes that begin after some of them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from cyber0.errors import ConfigError, ModelError
from cyber0.tasks.text.tokens import Group

Tensor = torch.Tensor

MANY = 256  # samples that take a CPU so long that somebody wonders what is going on
progress = logging.getLogger("cyber0.progress")


def announce(name: str, samples: int) -> None:
    """Say that a language model is about to read samples, if that takes a while."""
    if samples >= MANY:
        progress.info("%s reads %s samples ...", name, f"{samples:,}")


def number_of(config: Any, layer: int, above: int = 0) -> int:
    """Return the number of a layer of a language model, by its config; 0: two thirds of the way up.

    Args:
        config: Of the model.
        layer: The number, or 0.
        above: How many layers must be left above it.
    """
    count = int(config.get_text_config().num_hidden_layers)
    if count <= above:
        raise ConfigError(f'the model has {count} layers, so none can be frozen and trained; set task.adapter = "none"')
    if not 0 <= layer <= count - above:
        left = ", of which one at least is trained" if above else ""
        raise ConfigError(f"task.layer = {layer}: the model has {count} layers{left}; set it to 1 to {count - above}, "
                          "or to 0 for two thirds of the way up")  # fmt: skip
    return layer or min(math.ceil(count * 2 / 3), count - above)


def blocks_of(model: Any) -> nn.ModuleList:
    """Return the layers of a language model."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"task.layer: {type(model).__name__} has no list of its {count} layers; use "
                     'task.adapter = "lora"')  # fmt: skip


def train_after(model: Any, layer: int) -> None:
    """Freeze all of a language model but the layers after one; 0: two thirds of the way up."""
    blocks, last = blocks_of(model), number_of(model.config, layer, above=1)
    frozen = {id(p) for block in blocks[:last] for p in block.parameters()}
    if any(id(p) in frozen for p in blocks[last:].parameters()):
        raise ModelError(f"layers of {type(model).__name__} share weights, so the lower ones can't be frozen while the "
                         'upper ones are trained; set task.adapter = "none" or "lora"')  # fmt: skip
    model.requires_grad_(False)
    blocks[last:].requires_grad_(True)


def states_after(model: Any, group: Group, layer: int, *, causal: bool) -> tuple[Tensor, int]:
    """Return the hidden states of samples after a layer, and how long a tuple the layer returns; 0: none.

    Args:
        model: The language model.
        group: The samples.
        layer: Counted from 1; 0: two thirds of the way up.
        causal: Whether the model looks back only, so that padding needs no mask.
    """
    given = {"use_cache": False} if causal else {"attention_mask": group.mask}
    with _stopped_after(blocks_of(model)[number_of(model.config, layer) - 1]) as reached, suppress(_Reached):
        model.base_model(input_ids=group.ids, **given)
    output = reached[0] if reached else None
    states = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[:2] != group.ids.shape:
        raise unusual(model)
    return states, len(output) if isinstance(output, tuple) else 0


def unusual(model: Any) -> ModelError:
    """Return the error of a model whose layers do not simply pass hidden states on."""
    return ModelError(f"the layers of {type(model).__name__} do not simply take what the layer below gives, so a pass "
                      'can neither end nor begin between them; set task.adapter = "none" or "lora"')  # fmt: skip


@contextmanager
def beginning_after(model: Any, layer: int, states: Tensor, width: int) -> Iterator[None]:
    """Within this context a pass takes these hidden states for what the first layers give, which do not run.

    Args:
        model: The language model.
        layer: The last of them, counted from 1.
        states: What it gave for these samples, (samples, tokens, width).
        width: How long a tuple a layer returns, its hidden states first; 0: none.
    """
    skipped, embeddings = list(blocks_of(model))[:layer], model.get_input_embeddings()
    given: dict[nn.Module, Any] = dict.fromkeys(skipped, (states, *[None] * (width - 1)) if width else states)
    if getattr(embeddings, "embedding_dim", None) == states.shape[-1]:
        given[embeddings] = states  # positions and masks then have the states' type
    with contextlib.ExitStack() as replaced:
        for module, output in given.items():
            replaced.enter_context(_giving(module, output))
        yield


@contextmanager
def ending_in(block: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within this context a layer returns its hidden states in a type of their own."""

    def converted(_block: nn.Module, _given: Any, output: Any) -> Any:
        return output.to(dtype) if isinstance(output, Tensor) else (output[0].to(dtype), *output[1:])

    hook = block.register_forward_hook(converted)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _giving(module: nn.Module, output: Any) -> Iterator[None]:
    """Within this context a module returns this output whatever it is given."""
    own = vars(module).get("forward")
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class _Reached(Exception):
    """The layer has been computed; what comes after it is not needed."""


@contextmanager
def _stopped_after(block: nn.Module) -> Iterator[list[Any]]:
    """Within this context a pass ends after a block, whose output is put into the list."""
    reached: list[Any] = []

    def stop(_block: nn.Module, _given: Any, output: Any) -> None:
        reached.append(output)
        raise _Reached

    hook = block.register_forward_hook(stop)
    try:
        yield reached
    finally:
        hook.remove()
