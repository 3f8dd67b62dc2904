"""What each torch function does with a weight that has a low-rank perturbation, or differs from group to group.

A handler gets a `Use` and returns the result, or NotImplemented for what it does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from cyber0.directions.backends import backend_of
from cyber0.model import low_rank_layers as layers
from cyber0.model.factors import LowRank
from cyber0.model.low_rank import HANDLERS, Trained, Use

Tensor = torch.Tensor

LAYER_EPS = 1e-5  # what functional.layer_norm adds unless it is told otherwise


def _handles(*functions: Any) -> Callable[[Callable[[Use], Any]], Callable[[Use], Any]]:
    def register(handler: Callable[[Use], Any]) -> Callable[[Use], Any]:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


# Products of rows with a matrix.


def _product(
    use: Use, x: Tensor, inner: Tensor, outer: Tensor, bias: Any, at_w: Callable[[Tensor, Any], Tensor]
) -> Any:  # fmt: skip
    """Return at_w(x, bias) + c (x inner) outer, where the bias may be perturbed as well."""
    if use.low_rank(x) is not None or use.low_rank(bias) is not None:
        return NotImplemented
    z = use.entries(bias)
    along = None if z is None else (z, use.mode.distances, use.mode.unit)
    late = use.values(bias) if z is None else None  # computed from a bias, or not a bias at all
    own = None if late is not None else use.base(bias)

    def perturbed(y: Tensor, each: Tensor) -> Tensor:
        y = layers.add_product(y, each, inner, outer, use.mode.scaled, along)
        return y if late is None else y + late.view(len(late), *[1] * (y.dim() - 2), late.shape[-1])

    if late is not None and late.dim() != 2:
        return NotImplemented
    each = use.values(x)
    if each is None and use.has_rows(x):
        return use.join(perturbed(use.split(at_w(x, own), x), use.split(x)), x)
    if each is None:  # the same for all groups
        each = x.expand(use.mode.groups, *x.shape)
    if use.layout is None:
        return perturbed(at_w(each, own), each)[0]
    return use.remembered(use.at_w(), perturbed(at_w(each, own).contiguous(), each))


@_handles(functional.linear)
def _linear(use: Use) -> Any:
    given = use.named("input", "weight", "bias")
    weight = given["weight"]
    found = use.low_rank(weight)
    if found is None or found.right.dim() != 3:
        return NotImplemented
    base = use.base(weight)
    return _product(
        use, given["input"], found.right, found.left, given.get("bias"), lambda x, b: functional.linear(x, base, b)
    )


@_handles(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(use: Use) -> Any:
    if len(use.args) != 2 or use.kwargs:
        return NotImplemented
    x, weight = use.args
    found = use.low_rank(weight)
    if found is None or found.right.dim() != 3:
        return NotImplemented
    base = use.base(weight)
    return _product(use, x, found.left, found.right, None, lambda x, _: torch.matmul(x, base))


@_handles(torch.addmm, Tensor.addmm)
def _addmm(use: Use) -> Any:
    given = use.named("input", "mat1", "mat2")
    bias, x, weight = given.pop("input"), given.pop("mat1"), given.pop("mat2")
    found = use.low_rank(weight)
    if given or found is None or found.right.dim() != 3 or bias.dim() != 1:
        return NotImplemented
    base = use.base(weight)

    def at_w(x: Tensor, b: Tensor | None) -> Tensor:
        if b is None:
            return torch.matmul(x, base)
        return torch.addmm(b, x, base) if x.dim() == 2 else torch.matmul(x, base) + b

    return _product(use, x, found.left, found.right, bias, at_w)


# Other layers.


@_handles(functional.embedding)
def _embedding(use: Use) -> Any:
    given = use.named(
        "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
    )  # fmt: skip
    tokens, weight = given["input"], given["weight"]
    found = use.low_rank(weight)
    if found is None or found.right.dim() != 3 or given.get("max_norm") is not None or use.known(tokens):
        return NotImplemented
    at_w = functional.embedding(tokens, use.base(weight))
    if use.has_rows(tokens):
        return use.join(layers.add_rows(use.split(at_w, tokens), use.split(tokens), found, use.mode.scaled), tokens)
    groups = use.mode.groups
    each = at_w.expand(groups, *at_w.shape).contiguous()
    each = layers.add_rows(each, tokens.expand(groups, *tokens.shape), found, use.mode.scaled)
    return use.remembered(at_w, each)


@_handles(functional.conv1d, functional.conv2d, functional.conv3d)
def _convolution(use: Use) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = use.named(*names)
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    found = use.low_rank(weight)
    if found is None or use.known(x) or not use.has_rows(x) or x.dim() != weight.dim():
        return NotImplemented
    late = use.values(bias)
    y = use.func(x, use.base(weight), None if late is not None else bias, **given)
    y_each, x_each = use.split(y, x), use.split(x)
    if x_each.shape[1] != x_each[0].shape[0] or not y_each.is_contiguous():  # rows are the channels, or lie elsewhere
        return NotImplemented
    rows = layers.add_convolution(y_each.flatten(0, 1), x_each.flatten(0, 1), found, use.mode.scaled, given)
    y_each = rows.view(y_each.shape)
    if late is not None:
        y_each.add_(late.view(len(late), 1, -1, *[1] * (y_each.dim() - 3)))
    return use.join(y_each, x)


# Tensors that have entries: norms and elementwise operations, for several groups.


@_handles(functional.layer_norm, functional.rms_norm)
def _norm(use: Use) -> Any:
    layer = use.func is functional.layer_norm
    names = ("input", "normalized_shape", "weight", "bias", "eps") if layer else (
        "input", "normalized_shape", "weight", "eps")  # fmt: skip
    given = use.named(*names)
    x, weight, bias = given.pop("input"), given.pop("weight", None), given.pop("bias", None)
    eps = given.get("eps", LAYER_EPS if layer else None)
    if (fused := _fused_norm(use, x, weight, bias, eps, centred=layer)) is not None:
        return fused
    each, shift = use.values(weight), use.values(bias)
    if each is None or each.dim() != 2 or (bias is not None and shift is None) or use.known(x) or not use.has_rows(x):
        return NotImplemented
    normed = use.split(use.func(x, **given), x)
    middle = [1] * (normed.dim() - 2)
    each = each.view(len(each), *middle, -1)
    if shift is None:
        found = normed.mul_(each) if each.dtype == normed.dtype else normed * each
    elif shift.dtype == normed.dtype == each.dtype:
        found = torch.addcmul(shift.view(len(shift), *middle, -1), normed, each, out=normed)
    else:
        found = normed * each + shift.view(len(shift), *middle, -1)
    return use.join(found, x)


def _fused_norm(use: Use, x: Tensor, weight: Any, bias: Any, eps: float | None, *, centred: bool) -> Tensor | None:
    """Return a norm with a perturbed weight and bias in one pass, where the device has a kernel for it."""
    z, shift = use.entries(weight), use.entries(bias)
    if z is None or weight.shape != x.shape[-1:] or eps is None or use.known(x) or not use.has_rows(x):
        return None
    if x.dtype != z.dtype or (bias is not None and (shift is None or shift.dtype != z.dtype)):
        return None  # the result has the wider type; and what is added is perturbed as well
    each = use.split(x)
    added = None if shift is None else (use.base(bias), shift)
    found = backend_of(x.device).norm(
        each.flatten(0, 1), (use.base(weight), z), added, use.mode.distances, eps, centred=centred
    )
    return None if found is None else use.join(found.view(each.shape), x)


_ARITHMETIC = ["add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"]
_ARITHMETIC += ["__truediv__", "__rtruediv__"]


@_handles(torch.add, torch.sub, torch.mul, torch.div, *(getattr(Tensor, name) for name in _ARITHMETIC))
def _arithmetic(use: Use) -> Any:
    """Vectors that are broadcast over rows: what norms and biases that a model writes out are made of."""
    if use.layout is None or len(use.args) != 2 or use.kwargs or not all(isinstance(a, Tensor) for a in use.args):
        return NotImplemented
    given = []
    x: Tensor | None = None
    for value in use.args:
        each = use.values(value)
        if each is None and use.has_rows(value) and value.dim() > 1:
            x = value
            given.append(use.split(value))
        elif each is not None and each.dim() == 2:
            given.append(each)
        else:
            return NotImplemented
    if x is None or all(a is x for a in use.args):
        return NotImplemented
    dimensions = max(t.dim() for t in given)
    given = [t if t.dim() == dimensions else t.view(len(t), *[1] * (dimensions - 2), -1) for t in given]
    return use.join(use.func(*given), x)


# What stays a matrix with factors, or a parameter.


def _names(*names: str) -> list[Any]:
    return [getattr(where, name) for name in names for where in (torch, Tensor) if hasattr(where, name)]


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


@_handles(*_getters("data"), *_names("detach", "clone", "contiguous"),
          *_names("float", "half", "bfloat16", "double", "to", "type", "type_as"))  # fmt: skip
def _kept(use: Use) -> Any:
    weight = use.args[0]
    found = use.low_rank(weight) or use.trained(weight)
    if found is None:
        return NotImplemented
    at_w = use.at_w()
    if isinstance(found, Trained) and found.dtype != at_w.dtype:  # its entries are in the type it is computed with
        return NotImplemented
    return use.mode.remember(use.own(at_w), found)


@_handles(*_getters("T", "mT"), *_names("t"))
def _transposed(use: Use) -> Any:
    found = use.low_rank(use.args[0])
    if found is None or found.right.dim() != 3:
        return NotImplemented
    return use.mode.remember(use.at_w(), LowRank(found.right, found.left))


@_handles(*_names("transpose", "swapaxes", "swapdims"))
def _swapped(use: Use) -> Any:
    plain = len(use.args) == 3 and not use.kwargs and sorted(d % 2 for d in use.args[1:]) == [0, 1]
    return _transposed(use) if plain else NotImplemented


@_handles(*_names("index_select", "narrow", "split", "chunk"), Tensor.__getitem__)
def _rows_taken(use: Use) -> Any:
    """Some rows of a matrix: apply the same to their numbers."""
    found = use.low_rank(use.args[0])
    if found is None or any(use.known(a) or (isinstance(a, Tensor) and not _is_shared(use, a)) for a in use.args[1:]):
        return NotImplemented
    dimension = _dimension(use)
    if dimension != 0:
        return NotImplemented
    numbers = torch.arange(found.left.shape[2], device=found.left.device)
    rows, at_w = use.func(numbers, *use.args[1:], **use.kwargs), use.at_w()

    def taken(rows: Tensor, at_w: Tensor) -> Tensor:
        assert found is not None
        return use.mode.remember(use.own(at_w), LowRank(found.left.index_select(2, rows), found.right))

    if isinstance(rows, Tensor):
        return taken(rows, at_w) if rows.dim() == 1 else NotImplemented
    return tuple(taken(r, a) for r, a in zip(rows, at_w, strict=True))


def _is_shared(use: Use, value: Tensor) -> bool:
    """Return whether an argument is the same for all groups."""
    return use.layout is None or not use.has_rows(value)


def _dimension(use: Use) -> int | None:
    """Return the dimension that a selection is made in; None where that is not plain."""
    if use.func is Tensor.__getitem__:
        return 0 if isinstance(use.args[1], slice) else None
    position = 1 if use.func in _names("index_select", "narrow") else 2
    found = use.kwargs.get("dim", use.args[position] if len(use.args) > position else 0)
    return found if isinstance(found, int) else None
