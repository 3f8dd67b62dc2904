"""Make a model compute at many probes along low-rank directions at once, without building perturbed weights.

A batch holds the same samples once for each probe: its rows are groups, one a probe. A torch function mode intercepts
every torch operation that takes a trained parameter. A matrix that is multiplied with the rows keeps its values, and
what the perturbation adds is computed beside it (low_rank_layers.py). A tensor that has entries instead of factors (a
bias, the weight of a norm) is small: its values are computed for each group, and vmap runs the operation for all of
them. So it is for a small matrix that is used otherwise, as a table of positions that is added. What is computed from
weights alone (a transpose, a selection of rows, 1 + weight) is remembered together with how it is perturbed.

Which dimension of an operand has the rows is learned once, by comparing the shapes of a pass over few samples with
those of the same pass over more copies of them (`Plan`). A use that this can't cover raises Ungroupable, and then
probes are taken one at a time: there all rows belong to one group, and a matrix that is used in any other way is built
for that use.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from cyber0.model import low_rank_layers as layers
from cyber0.model.factors import Factors, LowRank
from cyber0.model.low_rank_layers import unflattened
from cyber0.model.substitution import METADATA, EagerMode

Tensor = torch.Tensor

LOGGED = 2  # how often samples are repeated in the pass whose shapes are noted: some models treat one row otherwise
MOST_BUILT = 1 << 22  # perturbed weights that are built for a use of a small matrix that no layer covers

HANDLERS: dict[Any, Callable[[Use], Any]] = {}
"""What to do in functions that get more than `Use` does for all: see low_rank_uses.py."""


class Ungroupable(Exception):
    """A weight is used in a way that several probes can't share one pass, or that needs the perturbed weight itself."""


class Trained(NamedTuple):
    """A trained parameter: its number in the layout, and the type it is computed with."""

    number: int
    dtype: torch.dtype


class Values(NamedTuple):
    """What is computed from weights alone, for each group: (groups, ...)."""

    each: Tensor


Moved = LowRank | Values | Trained
"""How a tensor that depends on weights differs from group to group; `Trained` if it is a parameter, or equals one."""


class Call(NamedTuple):
    """A torch function that a pass called, with the shapes of tensors and the whole numbers among its arguments."""

    function: Any
    leaves: tuple[Any, ...]


class Layout(NamedTuple):
    """Where the rows are in a use of weights.

    For a tensor among the arguments that is its dimension of rows, None if it has none; for a whole number, whether it
    counts rows.
    """

    function: Any
    leaves: tuple[int | bool | None, ...]


@dataclass
class Plan:
    """The uses of weights in a pass, in order."""

    uses: list[Layout] = field(default_factory=list)
    rows_inside: bool = False
    """Whether a dimension that rows are merged into with others has them as its inner part, as (time, rows) has."""


class _CallMode(EagerMode):
    """Meets every torch function of a pass that reads values; those that have a body in Python, by what that calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the function's result."""
        raise NotImplementedError(f"{type(self).__name__} must say what it does with a function")


def perturbs_by_function() -> bool:
    """Return whether the innermost mode perturbs weights function by function, so that it should meet whole functions.

    Those that build the weights need them one at a time.
    """
    mode = torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]  # torch has no types for it
    return isinstance(mode, _CallMode)


class ShapeLog(_CallMode):
    """Note all torch functions of a pass with the shapes they met."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tuple(tuple(v.shape) if isinstance(v, Tensor) else v for v in leaves_of((args, kwargs)))
        self.calls.append(Call(func, leaves))
        return func(*args, **kwargs)


class LowRankMode(_CallMode):
    """Within this mode trained parameters are perturbed, each group of rows by its own probe.

    Args:
        trained: By the identity of the parameter.
        factors: Of the probes.
        rows: How many rows the batch has; a single probe needs none.
        plan: Where rows are; None for a single probe, to which all rows belong.
        log: The same pass over the samples, repeated LOGGED times, while the plan is made.
    """

    def __init__(
        self, trained: Mapping[int, Trained], factors: Factors, rows: int = 0, plan: Plan | None = None,
        log: Sequence[Call] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._trained, self._factors, self._plan, self._log = trained, factors, plan, log
        self.rows = rows
        self.groups = factors.distances.numel()
        self.failed = False
        """Whether something could not be grouped, even if the model's own code has caught the exception."""
        self._calls = self._uses = 0
        self._derived: dict[int, tuple[weakref.ref[Tensor], Moved]] = {}
        if plan is None and self.groups != 1:
            raise ValueError(f"{self.groups} probes at once need a plan")
        if log is not None and self.groups <= LOGGED:
            raise ValueError(f"a plan is made with more than {LOGGED} probes")

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        leaves = leaves_of((args, kwargs))
        moved = [self._known(v) for v in leaves]
        if not any(m is not None for m in moved):
            return func(*args, **kwargs)
        try:
            if _writes(func, args, kwargs, moved, leaves):
                raise Ungroupable(f"{_name(func)} writes to a weight, or to what was computed from weights")
            layout = None if self.groups == 1 else self._layout(func, leaves, moved)
            return Use(self, func, args, kwargs, leaves, moved, layout).result()
        except Ungroupable:
            self.failed = True
            raise

    # What depends on weights.

    def _known(self, value: Any) -> Moved | None:
        if not isinstance(value, Tensor):
            return None
        known = self._trained.get(id(value))
        if known is not None:
            return known
        found = self._derived.get(id(value))
        return found[1] if found is not None and found[0]() is value else None

    def remember(self, handle: Tensor, moved: Moved) -> Tensor:
        """Return the tensor, which depends on weights alone, and know it from now on."""
        self._derived[id(handle)] = (weakref.ref(handle), moved)
        return handle

    def factors(self, known: Moved | None) -> LowRank | Tensor | None:
        """Return the factors of a matrix, or the entries of a parameter that has none; None for anything else."""
        if isinstance(known, Trained):
            return self._factors.of(known.number, known.dtype)
        return known if isinstance(known, LowRank) else None

    def values(self, value: Tensor, known: Moved | None) -> Tensor | None:
        """Return what a tensor without factors is in each group."""
        if isinstance(known, Values):
            return known.each
        z = self.factors(known)
        if not isinstance(known, Trained) or not isinstance(z, Tensor):
            return None
        d, s = self.distances.shape
        each = torch.empty(d, s, z.shape[1], dtype=known.dtype, device=value.device)
        torch.addcmul(value.detach().reshape(1, 1, -1), self.distances[:, :, None], z[:, None], out=each)
        return each.view(d * s, *value.shape)

    @property
    def distances(self) -> Tensor:
        return self._factors.distances

    @property
    def unit(self) -> Tensor:
        return self._factors.unit

    @property
    def scaled(self) -> Tensor:
        return self._factors.scaled_distances

    # Where the rows are.

    def _layout(self, func: Any, leaves: Sequence[Any], moved: Sequence[Any]) -> Layout:
        assert self._plan is not None
        if self._log is not None:
            self._plan.uses.append(self._learned(func, leaves, moved))
        if self._uses >= len(self._plan.uses) or self._plan.uses[self._uses].function != func:
            raise Ungroupable(f"{_name(func)} is not what the model did at this point when it was checked")
        self._uses += 1
        return self._plan.uses[self._uses - 1]

    def _learned(self, func: Any, leaves: Sequence[Any], moved: Sequence[Any]) -> Layout:
        assert self._log is not None and self._plan is not None
        call = self._log[self._calls - 1] if self._calls <= len(self._log) else None
        if call is None or call.function != func or len(call.leaves) != len(leaves):
            raise Ungroupable(f"{_name(func)} is not what the model did with fewer rows")
        found = []
        for before, now, known in zip(call.leaves, leaves, moved, strict=True):
            if isinstance(now, Tensor):
                found.append(None if known is not None else self._scaled_dimension(before, tuple(now.shape)))
            else:
                found.append(isinstance(now, int) and now != before and LOGGED * now == self.groups * before)
        return Layout(func, tuple(found))

    def _scaled_dimension(self, before: tuple[int, ...], now: tuple[int, ...]) -> int | None:
        if before == now:
            return None
        changed = [i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b]
        if len(before) != len(now) or len(changed) != 1 or LOGGED * now[changed[0]] != self.groups * before[changed[0]]:
            raise Ungroupable(f"rows are in no single dimension: {before} became {now}")
        return changed[0]

    @property
    def rows_inside(self) -> bool:
        """Whether rows are the inner part of dimensions that they are merged into with others."""
        return self._plan is not None and self._plan.rows_inside


class Use:
    """One torch function that takes weights.

    Args:
        mode: What it runs in.
        func: The function.
        args: Its arguments.
        kwargs: Its arguments by name.
        leaves: The tensors and whole numbers among them.
        known: What is known of each of those.
        layout: Where rows are; None for a single probe.
    """

    def __init__(
        self, mode: LowRankMode, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any],
        known: Sequence[Moved | None], layout: Layout | None,
    ) -> None:  # fmt: skip
        self.mode, self.func, self.args, self.kwargs, self.layout = mode, func, args, kwargs, layout
        self.leaves, self._known = leaves, {id(v): k for v, k in zip(leaves, known, strict=True) if k is not None}
        self._rows: dict[int, int] = {}
        for value, where in zip(leaves, () if layout is None else layout.leaves, strict=layout is not None):
            if isinstance(value, Tensor) and where is not None:
                if value.shape[where] % mode.rows:
                    raise Ungroupable(f"{value.shape[where]} is no multiple of the {mode.rows} rows of the batch")
                self._rows[id(value)] = int(where)

    def result(self) -> Any:
        """Return what the function gives with perturbed weights."""
        # Inside vmap or grad a tensor may be a wrapper, which the layers here can't take.
        handler = None if _transformed() else HANDLERS.get(self.func)
        matrices = any(self.low_rank(v) is not None for v in self.leaves)
        if handler is not None and (matrices or self.layout is not None):
            found = handler(self)
            if found is not NotImplemented:
                return found
        if self.layout is None:
            with torch._C._DisableFuncTorch():
                args, kwargs = _mapped((self.args, self.kwargs), self._stand_in)
            return self.func(*args, **kwargs)
        if _transformed():
            raise Ungroupable(f"{_name(self.func)} is differentiated or mapped over")
        return self._over_groups(self.layout)

    # What is known of an argument.

    def named(self, *names: str) -> dict[str, Any]:
        """Return the arguments by name, those that are not given left out."""
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def known(self, value: Any) -> bool:
        """Return whether an argument depends on weights."""
        return id(value) in self._known

    def trained(self, value: Any) -> Trained | None:
        """Return what is known of an argument that is a parameter, or equals one."""
        known = self._known.get(id(value))
        return known if isinstance(known, Trained) else None

    def low_rank(self, value: Any) -> LowRank | None:
        """Return the factors of an argument that is a matrix with factors."""
        found = self.mode.factors(self._known.get(id(value)))
        return found if isinstance(found, LowRank) else None

    def entries(self, value: Any) -> Tensor | None:
        """Return z of an argument that is a parameter with entries."""
        found = self.mode.factors(self._known.get(id(value)))
        return found if isinstance(found, Tensor) else None

    def values(self, value: Any) -> Tensor | None:
        """Return each group's values of an argument that depends on weights without factors."""
        return self.mode.values(value, self._known.get(id(value)))

    def base(self, value: Any) -> Any:
        """Return an argument at w, in the type that the model computes with."""
        known = self.trained(value)
        return value if known is None or known.dtype == value.dtype else value.detach().to(known.dtype)

    def at_w(self) -> Any:
        """Return what the function gives at w."""
        return self.func(*_mapped(self.args, self.base), **_mapped(self.kwargs, self.base))

    def _stand_in(self, value: Any) -> Any:
        matrix = self.low_rank(value)
        if matrix is not None:
            return layers.build(self.base(value), matrix, self.mode.scaled)[0]
        each = self.values(value)
        return value if each is None else each[0]

    # Rows and groups.

    def has_rows(self, x: Tensor) -> bool:
        """Return whether an argument has rows of the batch; for a single probe, everything counts as such."""
        return self.layout is None or id(x) in self._rows

    def split(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """Return rows as (groups, ...): the dimension of the rows has those of a group only.

        The rows are where the argument `like` has them, `x` itself if it is None.
        """
        if self.layout is None:
            return x[None]
        where, g = self._rows[id(x if like is None else like)], self.mode.groups
        if self.mode.rows_inside and x.shape[where] != self.mode.rows:
            parts = unflattened(x, where, x.shape[where] // self.mode.rows, g, -1).movedim(where + 1, 0)
            return parts.flatten(where + 1, where + 2)
        return unflattened(x, where, g, -1).movedim(where, 0)

    def join(self, each: Tensor, like: Tensor) -> Tensor:
        """Undo `split`."""
        if self.layout is None:
            return each[0]
        where, g = self._rows[id(like)], self.mode.groups
        if each.dim() <= where + 1:
            raise Ungroupable(f"{_name(self.func)} gives no rows")
        if self.mode.rows_inside and each.shape[where + 1] != self.mode.rows // g:
            parts = unflattened(each, where + 1, -1, self.mode.rows // g)
            return parts.movedim(0, where + 1).flatten(where, where + 2)
        return each.movedim(0, where).flatten(where, where + 1)

    def remembered(self, at_w: Any, each: Any) -> Any:
        """Return what the function gives at w, which depends on weights alone, and remember each group's values."""
        if isinstance(at_w, Tensor):
            return self.mode.remember(self.own(at_w), Values(each))
        if isinstance(at_w, (tuple, list)):
            return type(at_w)(self.remembered(a, e) for a, e in zip(at_w, each, strict=True))
        raise Ungroupable(f"{_name(self.func)} gives {type(at_w).__name__}")

    def own(self, found: Tensor) -> Tensor:
        """Return a result as an object of its own: `.float()` of float32, say, returns its argument."""
        return found.view_as(found) if any(found is v for v in self.leaves) else found

    def _built(self, value: Any) -> Tensor | None:
        """Return each group's values of an argument that depends on weights; a matrix is built if it is small."""
        matrix = self.low_rank(value)
        if matrix is None:
            return self.values(value)
        if self.mode.groups * value.numel() > MOST_BUILT:
            raise Ungroupable(f"{_name(self.func)} of a matrix of {value.numel():,} weights")
        return layers.build(self.base(value), matrix, self.mode.scaled)

    def _over_groups(self, layout: Layout) -> Any:
        """Run the function for all groups by vmap."""
        batched: list[Tensor] = []
        given: list[Any] = []
        first: Tensor | None = None
        counted = False
        for value, where in zip(self.leaves, layout.leaves, strict=True):
            each = self._built(value)
            if each is None and isinstance(value, Tensor) and where is not None:
                each, first = self.split(value), value if first is None else first
            counted = counted or where is True
            given.append(value // self.mode.groups if where is True else value)
            if each is not None:
                given[-1] = _Batched(len(batched))
                batched.append(each)

        def one(*tensors: Tensor) -> Any:
            leaves = iter([tensors[v.number] if isinstance(v, _Batched) else v for v in given])
            args, kwargs = _mapped((self.args, self.kwargs), lambda _: next(leaves))
            return self.func(*args, **kwargs)

        try:
            with warnings.catch_warnings():  # what has no rule of its own is slower than it could be, and right
                warnings.filterwarnings("ignore", message="There is a performance drop")
                found = torch.vmap(one, randomness="same")(*batched)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # what vmap refuses by
            raise Ungroupable(f"{_name(self.func)}: {error}") from error
        if first is None and not counted:
            return self.remembered(self.at_w(), found)
        if not isinstance(found, Tensor):
            raise Ungroupable(f"{_name(self.func)} gives {type(found).__name__}")
        return self.join(found, first) if first is not None else self._join_counted(found, self.at_w().shape)

    def _join_counted(self, each: Tensor, shape: torch.Size) -> Tensor:
        """Join groups in the dimension whose length the function was told: `expand(rows, ...)`, say."""
        changed = [i for i, (a, b) in enumerate(zip(shape, each.shape[1:], strict=True)) if a != b]
        if len(changed) != 1:
            raise Ungroupable(f"{_name(self.func)} gives no rows")
        return each.movedim(0, changed[0]).flatten(changed[0], changed[0] + 1)


class _Batched(NamedTuple):
    """The place of an argument that has one value for each group."""

    number: int


def _body(function: Any) -> Callable[..., Any]:
    """Return a function of torch.nn.functional that never asks a mode to run it, but whose parts do."""
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_BODIES = {functional.multi_head_attention_forward: _body(functional.multi_head_attention_forward)}
"""Functions that are run part by part, because they take the weights of several layers."""


_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or",
                                                  "xor", "lshift", "rshift"))  # fmt: skip


def _writes(func: Any, args: Any, kwargs: Any, known: Sequence[Any], leaves: Sequence[Any]) -> bool:
    """Return whether a function writes to something that depends on weights."""
    name = _name(func)
    in_place = name in _IN_PLACE or name in ("__setitem__", "__set__") or kwargs.get("inplace") is True
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    written = [args[0]] if in_place and args else []
    written += [kwargs["out"]] if kwargs.get("out") is not None else []
    return any(k is not None and any(v is w for w in written) for k, v in zip(known, leaves, strict=True))


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def leaves_of(value: Any) -> list[Any]:
    """Return the tensors and whole numbers in arguments, in order."""
    if _is_leaf(value):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    elif not isinstance(value, (tuple, list)):
        return []
    return [leaf for part in value for leaf in leaves_of(part)]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with every tensor and whole number replaced by what `change` gives of it, in the same order."""
    if _is_leaf(value):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(v, change) for name, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(v, change) for v in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        parts = [_mapped(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool))
