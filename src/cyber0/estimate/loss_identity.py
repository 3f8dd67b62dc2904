"""What a loss function computes with: two functions of one identity run the same code on the same networks.

A lambda is made anew for every step, so its own identity is useless. Its code is not, together with the modules and
other callables that it can reach: in its closure, its defaults, its globals, the arguments of a functools.partial, the
object that a method is bound to. Tensors do not count: batches change from step to step.
"""

from __future__ import annotations

import functools
import itertools
import numbers
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

LEVELS = 4  # how many objects lie between a loss and the furthest network that is told apart
ITEMS = 64  # of a container, so that a list of all samples does not slow every step down

# What computes nothing itself, or is the same as long as the code is.
_DATA = (torch.Tensor, np.ndarray, np.generic, numbers.Number, str, bytes, type(None), types.ModuleType, types.CodeType,
         torch.dtype, torch.device, weakref.ReferenceType, torch.optim.Optimizer)  # fmt: skip


class LossIdentity:
    """Identifies, by a key, what a loss computes with. It keeps neither batches nor networks alive.

    Objects are told apart by numbers of our own: an id() is given again when its object is gone.

    Args:
        values: Whether tensors, by where they are, and numbers, by their values, count too.
    """

    def __init__(self, values: bool = False) -> None:
        self._values = values
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = itertools.count()

    def __call__(self, loss: Callable[..., Any]) -> Hashable:
        """Return the key: equal for two losses that differ in nothing, or in tensors and numbers only."""
        return self._describe(loss, LEVELS, {})

    def _describe(self, value: Any, levels: int, known: dict[tuple[int, int], tuple[Any, Hashable]]) -> Hashable:
        """Return a description of a value, `levels` deep; None if it is only data."""
        if _is_data(value.__class__):
            return self._data(value) if self._values else None
        if isinstance(value, (nn.Module, type)):
            return self._number(value)
        place = (id(value), levels)
        if place not in known:
            parts = _parts(value)
            if parts is None:
                known[place] = (value, self._number(value) if callable(value) else None)
            else:
                code, reached = parts
                if isinstance(code, type):
                    code = self._number(code)
                items = reached if levels else ()
                told = [(name, self._describe(item, levels - 1, known)) for name, item in items]
                rest = tuple(entry for entry in told if entry[1] is not None)
                known[place] = (value, (code, rest) if rest or code is not None else None)
        return known[place][1]

    def _data(self, value: Any) -> Hashable:
        """Return a description of data that tells it from other data of its kind."""
        if isinstance(value, torch.Tensor):
            return "tensor", self._number(value), value.data_ptr() if value.layout == torch.strided else 0
        if isinstance(value, np.ndarray):
            return "array", self._number(value)
        if isinstance(value, (types.ModuleType, weakref.ReferenceType, torch.optim.Optimizer)):
            return None
        return value if isinstance(value, types.CodeType) else (type(value).__name__, repr(value))

    def _number(self, value: Any) -> int:
        key = id(value)
        found = self._numbers.get(key)
        if found is None or found[0]() is not value:
            reference: Callable[[], Any]
            try:
                reference = weakref.ref(value, lambda _: self._numbers.pop(key, None))
            except TypeError:  # few objects can't be referred to weakly; those, such as numpy's functions, are kept

                def reference() -> Any:
                    return value

            found = self._numbers[key] = (reference, next(self._count))
        return found[1]


@functools.lru_cache(maxsize=1024)
def _is_data(kind: Hashable) -> bool:
    return isinstance(kind, type) and issubclass(kind, _DATA)


Parts = tuple[Any, Iterable[tuple[Hashable, Any]]]


def _parts(value: Any) -> Parts | None:
    """Return the code of a value (None: it has none) and what it reaches; None if it can't be inspected."""
    if isinstance(value, types.FunctionType):
        return value.__code__, _reached_by_function(value)
    if isinstance(value, types.MethodType):
        return None, [(0, value.__func__), (1, value.__self__)]
    if isinstance(value, types.BuiltinFunctionType):
        return value.__qualname__, [(0, value.__self__)]
    if isinstance(value, functools.partial):
        return None, [("", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, Mapping):
        return None, _named(itertools.islice(value.items(), ITEMS))
    if isinstance(value, (list, tuple, set, frozenset)):
        return None, enumerate(itertools.islice(value, ITEMS))
    attributes = _attributes(value)
    if not callable(value):
        return None, attributes or []
    by_python = isinstance(type(value).__call__, types.FunctionType)
    return None if attributes is None or not by_python else (type(value), attributes)


def _reached_by_function(function: types.FunctionType) -> Iterable[tuple[Hashable, Any]]:
    for number, cell in enumerate(function.__closure__ or ()):
        try:
            yield number, cell.cell_contents
        except ValueError:  # nothing has been put there yet
            continue
    yield from ((f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    if not function.__module__ or not function.__module__.startswith("torch."):
        known = function.__globals__
        yield from ((f"global {name}", known[name]) for name in _names(function.__code__) if name in known)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that the code, and the functions in it, look up outside."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


def _attributes(value: Any) -> list[tuple[Hashable, Any]] | None:
    """Return an object's attributes, None if it has no place for any."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    filled = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return [*filled, *itertools.islice(getattr(value, "__dict__", {}).items(), ITEMS)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _named(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Hashable, Any]]:
    return ((name if isinstance(name, str) else number, value) for number, (name, value) in enumerate(items))
