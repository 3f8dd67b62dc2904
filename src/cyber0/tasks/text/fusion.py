"""Chains of small operations in Llama-style models, each fused into one kernel.

On a GPU a small model spends more time between its matrix products than in them: a norm alone is six passes over the
hidden states. Norms, rotations of queries and keys, and gated activations that are, operation for operation, those of
transformers' Llama (Mistral's, Qwen's and SmolLM's are) are computed in one pass each, in float32 until the result is
rounded. Causal attention over few tokens has a kernel of its own as well: torch's work in tiles of 64 to 128 tokens,
which a short sentence leaves almost empty. Whatever differs from Llama's is left alone, and replacements are undone as
soon as the forward pass ends. CYBER0_FUSION=0 turns this off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from inspect import unwrap
from types import ModuleType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from cyber0.directions.backends import backend_of
from cyber0.tasks.text.gated import gated_product, is_plain
from cyber0.tasks.text.replacement import Function, Replacement

Tensor = torch.Tensor
Shortcut = tuple[nn.Module, Callable[[Any, Tensor], Tensor]]

ROTATION, ATTENTION = "apply_rotary_pos_emb", "scaled_dot_product_attention"
FEW_TOKENS = 64  # up to which attention takes the short kernel

log = logging.getLogger("cyber0")


class _Here(threading.local):
    """Whether this thread is inside a model that takes its shortcuts."""

    fused = False


class _Found(NamedTuple):
    """What of a model has a shortcut: some of its parts, and functions that they call."""

    parts: list[Shortcut]
    functions: list[Replacement]


_HERE = _Here()
_FOUND: WeakKeyDictionary[nn.Module, _Found] = WeakKeyDictionary()  # looked for once a model


@contextlib.contextmanager
def fused(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within this context the model computes with fewer kernels, where it can and nothing is differentiated."""
    if not (_wanted(device) and _right(device)):
        yield
        return
    if model not in _FOUND:
        parts, rotations = _find(model), [_rotation(module) for module in _modules(model)]
        _FOUND[model] = _Found(parts, [*rotations, _attention()] if parts or rotations else [])
    found = _FOUND[model]
    # A part may have got a forward of its own meanwhile, or this one from another thread.
    shortcuts = [(part, forward) for part, forward in found.parts if "forward" not in vars(part)]
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(backend_of(device).current(device))
        for function in found.functions:
            replaced.enter_context(function())
        before, _HERE.fused = _HERE.fused, True
        try:
            for part, forward in shortcuts:
                part.forward = partial(forward, part)
            yield
        finally:
            _HERE.fused = before
            for part, _ in shortcuts:
                vars(part).pop("forward", None)


def _wanted(device: torch.device) -> bool:
    if backend_of(device).host or os.environ.get("CYBER0_FUSION", "1") == "0":
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # vmap and the like
    return not transformed and forward_ad._current_level < 0 and find_spec("triton") is not None


def _find(model: nn.Module) -> list[Shortcut]:
    """Return the parts of a model that have a shortcut, each with it."""
    found: list[Shortcut] = []
    for part in model.modules():
        if _is_norm(part):
            found.append((part, norm))
        elif _is_gated(part):
            found.append((part, gated))
    return found


def _modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define a model's parts and have a rotation."""
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    return [module for module in map(sys.modules.get, names) if module is not None and hasattr(module, ROTATION)]


# What is operation for operation Llama's.


@cache
def _llama() -> Any:
    from transformers.models.llama import modeling_llama

    return modeling_llama


def _is_norm(part: Any) -> bool:
    return _same(type(part).forward, _llama().LlamaRMSNorm.forward)


def _is_gated(part: Any) -> bool:
    """Return whether it is a Llama's two layers: with SiLU, which has two classes."""
    return _same(type(part).forward, _llama().LlamaMLP.forward) and type(part.act_fn).__name__.startswith("SiLU")


def _same(one: Any, other: Any) -> bool:
    """Return whether two functions have the same code, apart from docstrings and other strings."""
    a, b = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if a is None or b is None:
        return False
    return (a.co_code, a.co_names, _constants(a)) == (b.co_code, b.co_names, _constants(b))


def _constants(code: Any) -> list[object]:
    return [c for c in code.co_consts if not isinstance(c, str)]


@cache
def _rotation(module: ModuleType) -> Replacement:
    """Return a replacement by which the attention layers of a module rotate in one pass, for threads in `fused`."""

    def make(original: Function) -> Function | None:
        llama = _llama()
        alike = _same(unwrap(original), unwrap(getattr(llama, ROTATION)))
        if not (alike and _same(getattr(module, "rotate_half", None), llama.rotate_half)):
            return None

        def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            if _HERE.fused and unsqueeze_dim == 1 and rotatable(q, cos, sin) and rotatable(k, cos, sin):
                return rotated(q, cos, sin), rotated(k, cos, sin)
            return original(q, k, cos, sin, unsqueeze_dim)

        return rotation

    return Replacement(module, ROTATION, make)


@cache
def _attention() -> Replacement:
    """Return a replacement by which causal attention over few tokens takes one short kernel, for threads in `fused`."""

    def make(original: Function) -> Function:
        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
        ) -> Any:  # fmt: skip
            plain = is_causal and attn_mask is None and not dropout_p and (enable_gqa or query.shape == key.shape)
            if _HERE.fused and plain and attendable(query, key, value):
                return attended(query, key, value, scale)
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        return attention

    return Replacement(functional, ATTENTION, make)


# The shortcuts.


def norm(part: Any, hidden: Tensor) -> Tensor:
    """Return what Llama's norm gives."""
    weight = part.weight.detach()  # what it computes with: a parameter itself states the type it is stored in
    if weight.dtype != hidden.dtype:  # the result has the wider type of the two
        return cast(Tensor, type(part).forward(part, hidden))
    return functional.rms_norm(hidden, weight.shape, weight, part.variance_epsilon)


def gated(part: Any, hidden: Tensor) -> Tensor:
    """Return what Llama's two layers give."""
    from cyber0.tasks.text import fusion_kernels

    gate, up = part.gate_proj, part.up_proj
    if is_plain(gate) and is_plain(up):
        return cast(Tensor, part.down_proj(gated_product(hidden, gate.weight, up.weight)))
    return cast(Tensor, part.down_proj(fusion_kernels.silu_times(gate(hidden), up(hidden))))


def rotatable(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether queries or keys, (samples, heads, tokens, size), lie as the kernel takes them: token by token."""
    samples, _, tokens, size = x.shape
    half = size // 2
    if half < 2 or half & (half - 1) or size % 2 or not x.transpose(1, 2).is_contiguous():
        return False
    fits = cos.dim() == 3 and cos.shape[0] in (1, samples) and tuple(cos.shape[1:]) == (tokens, size)
    return fits and cos.shape == sin.shape and cos.is_contiguous() and sin.is_contiguous()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what Llama's rotation gives of `rotatable` queries or keys."""
    from cyber0.tasks.text import fusion_kernels

    return fusion_kernels.rotate(x.transpose(1, 2), cos, sin).transpose(1, 2)


def attendable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel takes queries, keys and values, (samples, heads, tokens, size)."""
    if not q.dim() == k.dim() == 4 or k.shape != v.shape or not q.numel():
        return False
    heads, tokens, size = q.shape[1:]
    if k.shape != (len(q), k.shape[1], tokens, size) or heads % k.shape[1]:
        return False
    fits = tokens <= FEW_TOKENS and size in (32, 64, 128) and q.dtype in (torch.float16, torch.bfloat16)
    return fits and q.dtype == k.dtype == v.dtype and all(t.stride(-1) == 1 for t in (q, k, v))


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return causal attention of `attendable` queries, keys and values."""
    from cyber0.tasks.text import fusion_kernels

    if has_torch_function((q, k, v)):  # one function to modes, as torch's is: passes in other types are compared
        found: Tensor = handle_torch_function(attended, (q, k, v), q, k, v, scale)
        return found
    return fusion_kernels.attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


@cache
def _right(device: torch.device) -> bool:
    """Return whether the shortcuts give what the Llama of the transformers that are installed gives."""
    llama, generator = _llama(), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    class Layers(nn.Module):
        gate_proj, up_proj, down_proj, act_fn = (nn.Identity(), nn.Identity(), nn.Identity(), nn.SiLU())

    class Norm(nn.Module):
        weight, variance_epsilon = drawn(64), 1e-5

    x, heads = drawn(2, 3, 64), drawn(2, 3, 4, 16).transpose(1, 2)
    cos, sin = drawn(2, 3, 16), drawn(2, 3, 16)
    rotation = unwrap(getattr(llama, ROTATION))
    with backend_of(device).current(device):
        pairs = [
            (norm(Norm(), x), llama.LlamaRMSNorm.forward(Norm(), x)),
            (gated(Layers(), x), llama.LlamaMLP.forward(Layers(), x)),
            (rotated(heads, cos, sin), rotation(heads, heads, cos, sin)[0]),
        ]
        near = all(torch.allclose(got, expected, rtol=1e-4, atol=1e-4) for got, expected in pairs)
        q, k = drawn(2, 4, 5, 32).half(), drawn(2, 2, 5, 32).half()
        expected = functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        near = near and torch.allclose(attended(q, k, k), expected, rtol=1e-2, atol=1e-2)
    if near:
        return True
    log.warning("shortcuts through Llama-style models are not taken: this version of transformers computes differently")
    return False
