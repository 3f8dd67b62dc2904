"""Make a model compute with other weights than it has, wherever it uses them.

A torch function mode intercepts every torch operation that takes one of the model's trainable parameters and passes it
a stand-in instead: in a module's forward, in a functional use, at the second use of a tied weight, inside
nn.MultiheadAttention. The parameter itself is never written to, so nothing has to be restored, not even after an
exception. Stand-ins are fresh tensors kept alive by whoever uses them, so a stand-in can be dropped as soon as the
model uses other weights.

torch.compile does not work under the mode, so compiled code runs eagerly meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Tensor = torch.Tensor

# Properties of a parameter that do not read its values: they need no stand-in.
_PROPERTIES = ["shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf"]
_PROPERTIES += [
    "is_cuda",
    "is_cpu",
    "is_mps",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "itemsize",
    "nbytes",
]
_METHODS = ["size", "dim", "numel", "nelement", "element_size", "get_device", "__len__"]
_METHODS += ["is_floating_point", "is_complex", "requires_grad_", "__hash__"]
STRIDES = frozenset([Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous])
METADATA = STRIDES | frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(getattr(Tensor, name, None), "__get__")]
    + [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
    + [torch.autograd.grad]  # the gradient is asked for by the parameter, not by a stand-in made from it
)


class _Eagerly:
    """Keeps torch.compile eager from the first thread's entry until the last thread's exit: its stance is global."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._stance: Any = None

    def enter(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                # Otherwise nothing has been compiled, and importing it takes a second.
                self._stance = torch.compiler.set_stance("force_eager")
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


_EAGERLY = _Eagerly()


class EagerMode(TorchFunctionMode):
    """A torch function mode under which compiled code runs eagerly."""

    def __enter__(self) -> Any:
        _EAGERLY.enter()
        try:
            return super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        except BaseException:
            _EAGERLY.leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types for it
        finally:
            _EAGERLY.leave()


class Substitution(EagerMode):
    """Replace each of the parameters (by identity) with what `stand_in(parameter)` returns.

    Questions in `asked_of_itself` are answered by the parameter.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        stand_in: Callable[[Tensor], Tensor],
        asked_of_itself: frozenset[Any] = METADATA,
    ) -> None:
        super().__init__()
        self._known = {id(p) for p in parameters}
        self._stand_in = stand_in
        self._asked_of_itself = asked_of_itself

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._asked_of_itself:
            return func(*args, **kwargs)
        return func(*self._replace(args), **{name: self._replace(value) for name, value in kwargs.items()})

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._stand_in(value) if id(value) in self._known else value
        if isinstance(value, (tuple, list)):
            replaced = [self._replace(v) for v in value]
            if all(new is old for new, old in zip(replaced, value, strict=True)):
                return value
            return type(value)(*replaced) if hasattr(value, "_fields") else type(value)(replaced)
        if isinstance(value, dict):
            return {name: self._replace(v) for name, v in value.items()}
        return value


class EscapeDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detect uses of weights that no torch function shows: inside vmap over a parameter, in a scripted function.

    Args:
        indices: The index of each segment, by the identity of its storage.
        stand_in: Returns the stand-in of a whole segment.
    """

    def __init__(self, indices: dict[int, int], stand_in: Callable[[int], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._indices, self._stand_in = indices, stand_in
        self.caught = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # shielding it from the compiler would import the compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(Tensor, self._met, args), **tree_map_only(Tensor, self._met, kwargs or {}))

    def _met(self, value: Tensor) -> Tensor:
        index = self._indices.get(_storage(value))
        if index is None:
            return value
        self.caught = True
        return self._stand_in(index).as_strided(value.size(), value.stride(), value.storage_offset())


class Stretch(NamedTuple):
    """The memory of a parameter, or what was its memory: from the first address up to, not including, the last."""

    parameter: str
    begin: int
    end: int

    @classmethod
    def of(cls, parameter: str, t: Tensor) -> Stretch:
        """Return where the tensor lies; its strides may leave gaps in between."""
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        return cls(parameter, t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size() * (t.numel() > 0))

    def meets(self, other: Stretch) -> bool:
        return self.begin < other.end and other.begin < self.end


class Readers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note whose memory a computation reads.

    Args:
        stretches: What is watched, by the identity of the storage that it lies in.
    """

    def __init__(self, stretches: Mapping[int, Sequence[Stretch]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stretches = stretches
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            watched = self._stretches.get(_storage(value)) if isinstance(value, Tensor) else None
            if watched:
                read = Stretch.of("", value)
                self.found += [stretch.parameter for stretch in watched if stretch.meets(read)]
        return func(*args, **(kwargs or {}))


def _storage(value: Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapped tensors have no storage of their own
        return 0


class LinearUse(TorchFunctionMode):
    """Watch one forward pass: is its result one F.linear(x, W, b) and no other use of the parameters?

    Then the outputs are affine in w, and X W and X Z give the outputs at every w + c z.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {id(p) for p in parameters}
        self._result: Tensor | None = None
        self._versions = (0, 0)
        self._other_use = False
        self.inputs: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.outputs: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and self._result is None and self._fits(args, kwargs):
            self._result = func(*args, **kwargs)
            assert self._result is not None and self.inputs is not None
            self._versions = (self._result._version, self.inputs._version)
            return self._result
        if func not in METADATA and self._touches((args, kwargs)):
            self._other_use = True
        return func(*args, **kwargs)

    def _fits(self, args: Any, kwargs: Any) -> bool:
        names = ("input", "weight", "bias")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x, weight, bias = (given.get(name) for name in names)
        trained = id(weight) in self._known and (bias is None or id(bias) in self._known) and id(x) not in self._known
        if not trained or x is None or x.dim() != 2:
            return False
        self.inputs, self.weight, self.bias = x, weight, bias
        return True

    def _touches(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return id(value) in self._known
        if isinstance(value, dict):
            return any(self._touches(v) for v in value.values())
        return isinstance(value, (tuple, list)) and any(self._touches(v) for v in value)

    def explains(self, outputs: Any) -> bool:
        """Return whether `outputs` is the one linear map that was seen, and it used every parameter."""
        if self._result is None or self.inputs is None or outputs is not self._result:
            return False
        if (self._result._version, self.inputs._version) != self._versions:  # an inplace ReLU returns the same tensor
            return False
        used = {id(p) for p in (self.weight, self.bias) if p is not None}
        return not self._other_use and used == self._known
