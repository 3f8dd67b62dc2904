"""The few logits that an answer needs.

A model is used as it is: its own forward pass runs, and on the way its head is given one position per sample and
computes the label words' logits alone. So every architecture's own way from the hidden states to the logits
(a transform, a scale, a soft cap) is kept, and a tied output layer is handled like any other use of a weight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from cyber0.errors import ModelError
from cyber0.tasks.text import fusion
from cyber0.tasks.text.adapters import base_of
from cyber0.tasks.text.replacement import Function, Replacement

Tensor = torch.Tensor


def answer_logits(model: Any, ids: Tensor, mask: Tensor | None, places: Tensor, tokens: Tensor, causal: bool) -> Tensor:
    """Return each sample's logits of some tokens at its position, in float32: (samples, tokens).

    A causal model needs no mask: padding comes after the position, where it does not attend.
    """
    given = {"use_cache": False} if causal else {"attention_mask": mask}
    shorter = fusion.fused(model, ids.device)
    with _answers_only(base_of(model), places, tokens), _tokens_known(all_real=causal or mask is None), shorter:
        logits: Tensor = model(input_ids=ids, **given).logits
    # A model that bypasses its head's forward gives all logits, which are right too.
    logits = logits[:, 0] if logits.shape[1] == 1 else _at(logits, places)[:, 0]
    return (logits if logits.shape[-1] == len(tokens) else logits.index_select(-1, tokens)).float()


def _at(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(len(places), device=places.device), places][:, None]


@contextlib.contextmanager
def _answers_only(model: Any, places: Tensor, tokens: Tensor) -> Iterator[None]:
    """Within this context the head sees one position per sample and computes only these tokens' logits, in float32.

    An output layer that is not a plain linear map (one with an adapter or a custom forward, say) computes all logits
    of the position.
    """
    output = model.get_output_embeddings()
    if model not in _HEADS:
        _HEADS[model] = None if output is None else _head(model, output, model.get_input_embeddings())
    head = _HEADS[model]
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output layer: it is not a language model")

    def one_place(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_at(args[0], places), *args[1:])

    def few_tokens(hidden: Tensor) -> Tensor:
        bias = None if output.bias is None else output.bias.index_select(0, tokens).float()
        return functional.linear(hidden.float(), output.weight.index_select(0, tokens).float(), bias)

    plain = type(output) is nn.Linear and "forward" not in vars(output)
    handle = head.register_forward_pre_hook(one_place)
    if plain:
        output.forward = few_tokens
    try:
        yield
    finally:
        handle.remove()
        if plain:
            del output.forward


class _Known(threading.local):
    """What this thread knows about the samples that are passing through a model."""

    unpacked = False
    all_real = False


_KNOWN = _Known()


@contextlib.contextmanager
def _tokens_known(all_real: bool) -> Iterator[None]:
    """Within this context transformers does not ask the device how samples are padded or packed.

    Asking synchronises with the device; and during a CUDA graph capture, where it can't ask, transformers would make a
    mask that masks nothing and rules out the fastest kernels.
    """
    before = _KNOWN.unpacked, _KNOWN.all_real
    with contextlib.ExitStack() as replaced:
        for question in _questions():
            replaced.enter_context(question())
        _KNOWN.unpacked, _KNOWN.all_real = True, all_real
        try:
            yield
        finally:
            _KNOWN.unpacked, _KNOWN.all_real = before


@cache
def _questions() -> list[Replacement]:
    """Return replacements for the checks in transformers' masks, answered by `_KNOWN`."""
    from transformers import masking_utils

    def packed(original: Function) -> Function:
        return lambda *args, **named: None if _KNOWN.unpacked else original(*args, **named)

    def tracing(original: Function) -> Function:
        return lambda tensor=None: False if _KNOWN.all_real and tensor is None else original(tensor)

    def ignored(original: Function) -> Function:
        def answer(padding_mask: Any, *args: Any, **named: Any) -> Any:
            return original(None if _KNOWN.all_real else padding_mask, *args, **named)

        return answer

    return [
        Replacement(masking_utils, "find_packed_sequence_indices", packed),
        Replacement(masking_utils, "is_tracing", tracing),
        Replacement(masking_utils, "_ignore_causal_mask_sdpa", ignored),
        Replacement(masking_utils, "_ignore_bidirectional_mask_sdpa", ignored),
    ]


_HEADS: WeakKeyDictionary[nn.Module, nn.Module | None] = WeakKeyDictionary()  # looked for once a model


def _head(module: nn.Module, output: nn.Module, inputs: nn.Module) -> nn.Module | None:
    """Return the largest part of a model that holds its output layer and not its input embeddings."""
    for child in module.children():
        parts = set(child.modules())
        if output in parts:
            return _head(child, output, inputs) if inputs in parts else child
    return None
