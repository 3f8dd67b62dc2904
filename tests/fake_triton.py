"""Triton's language in numpy, as far as our kernels use it: their logic is then tested without a GPU.

Programs run one after the other, a block of numbers is an array, and a pointer is an array with places in it. What only
a compiler can tell (types, registers, fused operations) is for tests on a GPU.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

from cyber0.directions.definition import narrow, widen

HALVES = ("float16", "bfloat16")
_program = [0, 0, 0]
_depth = 0


def _numpy(dtype: str) -> Any:
    return np.uint16 if dtype in HALVES else np.dtype("bool" if dtype == "int1" else dtype)


class T:
    """A block of numbers; 16-bit floats are their patterns."""

    def __init__(self, array: Any, dtype: str | None = None) -> None:
        self.a = np.asarray(array)
        self.dtype = dtype or ("int1" if self.a.dtype == bool else str(self.a.dtype))

    def to(self, dtype: str, bitcast: bool = False) -> T:
        if bitcast:
            assert np.dtype(_numpy(dtype)).itemsize == self.a.dtype.itemsize
            return T(np.array(self.a).view(_numpy(dtype)), dtype)
        if dtype in HALVES:
            return T(narrow(np.atleast_1d(self.a).astype(np.float32), dtype).reshape(self.a.shape), dtype)
        if self.dtype in HALVES:
            return T(widen(self.a, self.dtype), dtype)
        return T(self.a.astype(_numpy(dtype)), dtype)

    def __getitem__(self, key: Any) -> T:
        return T(self.a[key], self.dtype)

    def __bool__(self) -> bool:
        return bool(self.a)

    def __int__(self) -> int:
        return int(self.a)


class P:
    """Places in an array: what a pointer, or a block of pointers, points to."""

    def __init__(self, array: Any, at: Any, dtype: str) -> None:
        self.array, self.at, self.dtype = array, np.asarray(at), types.SimpleNamespace(element_ty=dtype)

    def __add__(self, by: Any) -> P:
        return P(self.array, self.at + (by.a if isinstance(by, T) else by), self.dtype.element_ty)


def _raw(x: Any) -> Any:
    return x.a if isinstance(x, T) else x


def _operator(name: str) -> Any:
    def method(self: T, other: Any) -> Any:
        assert self.dtype not in HALVES
        if isinstance(other, P):
            return other + self
        with np.errstate(all="ignore"):
            return T(getattr(np.asarray(self.a), name)(np.asarray(_raw(other)) if isinstance(other, T) else other))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(T, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(T, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(T, f"__{_name}__", _operator(f"__{_name}__"))


T.__neg__ = lambda self: 0 - self  # type: ignore[attr-defined]


class Kernel:
    """A function of a kernel: called by another one, or launched for every program of a grid."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launch(grid, args, kwargs)

    def launch(self, grid: tuple[int, ...], args: Any, kwargs: Any) -> None:
        global _depth
        fused = kwargs.pop("enable_fp_fusion", True)
        assert not fused or self.function.__module__.endswith(("triton_layers", "fusion_kernels"))  # no bits to keep
        kwargs.pop("num_warps", None)
        with torch._C.DisableTorchFunction():  # a mode does not meet what a launch reads
            given = [_argument(arg) for arg in args]
        _depth += 1
        try:
            for place in np.ndindex(*grid):
                _program[: len(grid)] = place
                self.function(*given, **kwargs)
        finally:
            _depth -= 1


def _argument(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        dtype = str(arg.dtype).removeprefix("torch.")
        span = 1 + sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
        flat = arg.detach().as_strided((span if arg.numel() else 0,), (1,))
        return P((flat.view(torch.uint16) if dtype in HALVES else flat).numpy(), 0, dtype)
    if isinstance(arg, float):
        return T(np.float32(arg))
    return T(np.int32(arg) if -(2**31) <= arg < 2**31 else np.int64(arg))


def _load(p: P, mask: Any = None, other: Any = 0) -> T:
    at, wanted = np.broadcast_arrays(p.at, True if mask is None else mask.a)
    assert ((at >= 0) & (at < len(p.array)))[wanted].all(), "read outside of the memory given"
    found = np.full(at.shape, other, p.array.dtype)
    found[wanted] = p.array[at[wanted]]
    return T(found, p.dtype.element_ty)


def _store(p: P, value: T, mask: Any = None) -> None:
    kind = p.dtype.element_ty
    value = value if value.dtype == kind else value.to(kind)
    at, wanted, given = np.broadcast_arrays(p.at, True if mask is None else mask.a, value.a)
    assert ((at >= 0) & (at < len(p.array)))[wanted].all(), "written outside of the memory given"
    p.array[at[wanted]] = given[wanted]


def _asm(text: str, constraints: str, args: Any, **_: Any) -> T:
    assert text.startswith("dp4a.s32.s32")
    word, weights, start = (np.asarray(_raw(arg)) for arg in args)
    total = start.astype(np.int64)
    for i in builtins.range(4):
        total = total + (word >> (8 * i)).astype(np.int8).astype(np.int64) * int(np.int8(int(weights) >> 8 * i & 0xFF))
    return T(total.astype(np.int32))


def _dot(a: T, b: T) -> T:
    """Return a product of 16-bit matrices, added up in float32."""
    assert a.dtype == b.dtype and a.dtype in HALVES and min(*a.a.shape, *b.a.shape) >= 16
    return T(widen(a.a, a.dtype) @ widen(b.a, b.dtype))


def _pair(function: Any) -> Any:
    return lambda a, b: T(function(_raw(a), _raw(b)))


def _interleave(a: T, b: T) -> T:
    return T(np.stack([a.a, b.a], axis=-1).reshape(*a.a.shape[:-1], -1))


def _range(*limits: Any) -> Any:
    found = builtins.range(*(int(limit) for limit in limits))
    return (T(np.int32(i)) for i in found) if _depth else found


def _where(condition: Any, a: Any, b: Any) -> T:
    kind = a.dtype if isinstance(a, T) and a.dtype in HALVES else None
    return T(np.where(_raw(condition), _raw(a), _raw(b)), kind)


def _language() -> types.ModuleType:
    tl = types.ModuleType("triton.language")
    for dtype in ("int8", "int32", "int64", "uint16", "uint32", "uint64", "float32", *HALVES):
        setattr(tl, dtype, dtype)
    tl.__dict__.update(
        constexpr=lambda value: value, load=_load, store=_store, where=_where, interleave=_interleave,
        inline_asm_elementwise=_asm, static_range=builtins.range, maximum=_pair(np.maximum), minimum=_pair(np.minimum),
        arange=lambda low, high: T(np.arange(low, high, dtype=np.int32)),
        zeros=lambda shape, dtype: T(np.zeros(shape, _numpy(dtype))),
        full=lambda shape, value, dtype: T(np.full(shape, value).astype(_numpy(dtype))),
        program_id=lambda axis: T(np.int32(_program[axis])), cast=lambda x, dtype: x.to(dtype),
        join=lambda a, b: T(np.stack([a.a, b.a], axis=-1), a.dtype),
        split=lambda x: (T(x.a[..., 0], x.dtype), T(x.a[..., 1], x.dtype)),
        reshape=lambda x, shape: T(x.a.reshape(shape)), abs=lambda x: T(np.abs(x.a)),
        sum=lambda x, axis: T(x.a.sum(axis=axis, dtype=x.a.dtype)), max=lambda x, axis: T(x.a.max(axis=axis)),
        exp=lambda x: T(np.exp(x.a)), rsqrt=lambda x: T(1 / np.sqrt(x.a)), trans=lambda x: T(x.a.T, x.dtype), dot=_dot,
    )  # fmt: skip
    return tl


PLACES = (
    "cyber0.directions.backends.triton_kernels", "cyber0.directions.backends.triton_rounded",
    "cyber0.directions.backends.triton_low_rank", "cyber0.directions.backends.triton_layers",
    "cyber0.tasks.text.fusion_kernels",
)  # fmt: skip


@contextmanager
def kernels() -> Iterator[tuple[Any, ...]]:
    """Import the modules of kernels with this language; they are forgotten afterwards."""
    triton = types.ModuleType("triton")
    triton.jit = lambda function=None, **_: Kernel(function) if function else Kernel  # type: ignore[attr-defined]
    triton.language = _language()  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    kept = {name: sys.modules.get(name) for name in ("triton", "triton.language", *PLACES)}
    sys.modules.update({"triton": triton, "triton.language": triton.language})  # type: ignore[dict-item]
    for place in PLACES:
        sys.modules.pop(place, None)
    try:
        made = [import_module(place) for place in PLACES]
        for module in made:
            module.range = _range  # type: ignore[attr-defined]
        yield tuple(made)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        for place in PLACES:
            package, _, name = place.rpartition(".")
            parent, before = import_module(package), kept[place]
            if before is None and hasattr(parent, name):
                delattr(parent, name)
            elif before is not None:
                setattr(parent, name, before)
