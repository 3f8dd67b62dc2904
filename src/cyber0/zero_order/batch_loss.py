"""A loss whose data is given apart from its function: `optimizer.step(loss_fn, batch)`.

The tensors of a batch can be copied into fixed places, so passes are captured as CUDA graphs; and a small model is
evaluated at many directions at once. Where neither is possible, `loss_fn(batch)` is called at each probe.

A graph repeats what was done when it was captured, so it belongs to what the function computes with: its code, the
objects and numbers that it reaches, and what in the batch is not a tensor. When one of them changes, another graph is
captured. A function with which that happens all the time is not captured at all.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from cyber0.directions import Probe
from cyber0.directions.backends import backend_of
from cyber0.estimate import batched
from cyber0.estimate.loss_identity import LossIdentity
from cyber0.estimate.loss_value import loss_value
from cyber0.model import cuda_graphs
from cyber0.model.cuda_graphs import CapturedGraphs, GraphPool
from cyber0.model.vector import Parameters

Tensor = torch.Tensor
LossFunction = Callable[[Any], "Tensor | float"]
LossClosure = Callable[[], "Tensor | float"]

MOST_FUNCTIONS = 4  # whose graphs are kept
MOST_VERSIONS = 8  # of one code: beyond, something that it computes with changes from step to step
BATCHED_FROM = 4  # probes at once; for fewer, one after the other is as fast
LAUNCHED_FROM = 16  # the same on a device that captures: replaying a graph a few times takes less than launching vmap
BATCHED_WEIGHTS = 1 << 20  # perturbed weights in memory on a CPU, and
BATCHED_ROWS = 1 << 12  # samples times probes: what does not fit the caches takes longer than one after the other

log = logging.getLogger("cyber0")


class BatchLoss:
    """The loss of one batch; called without arguments it is a closure like any other.

    Args:
        passes: How the optimizer's passes are made.
        function: Takes the batch and returns its loss.
        batch: Tensors, in tuples, lists and dictionaries.
        capture: Whether passes may be captured, or made at many probes at once.
    """

    def __init__(self, passes: Passes, function: LossFunction, batch: Any, capture: bool = True) -> None:
        self._passes, self.function, self.batch, self._capture = passes, function, batch, capture
        self._known: dict[Probe, float] = {}

    def __call__(self) -> Tensor | float:
        return self.function(self.batch)

    def measure_ahead(self, probes: Sequence[Probe]) -> None:
        """Measure the loss at probes that `at` will be asked for, all of them before a device is waited for."""
        found = self._passes.all_at_once(self.function, self.batch, probes) if self._capture else None
        if found is None:
            run = self._passes.one_pass(self.function, self.batch, self._capture)
            found = [_scalar(run(probe)) for probe in probes]
        self._known = dict(zip(probes, torch.stack(list(found)).tolist(), strict=True))

    def at(self, probe: Probe) -> float:
        """Return the loss at a probe."""
        if probe not in self._known:
            return loss_value(self._passes.one_pass(self.function, self.batch, self._capture)(probe))
        return self._known[probe]


class Passes:
    """Passes of one model over batches: at many probes at once, captured, or plain.

    Args:
        parameters: The weights.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._identity = LossIdentity()
        self._exact = LossIdentity(values=True)
        self._captures = backend_of(parameters.device).captures
        self._graphs: OrderedDict[Hashable, CapturedGraphs] = OrderedDict()
        self._pool = GraphPool()
        self._versions: dict[Hashable, set[Hashable]] = {}
        light = sum(p.numel() for p in parameters.model.parameters()) <= batched.BATCHED_DIMENSION
        self._light = light and parameters.compute is None
        self._unbatchable: set[Hashable] = set()

    def all_at_once(self, function: LossFunction, batch: Any, probes: Sequence[Probe]) -> Sequence[Tensor] | None:
        """Return the losses at many probes of one round, None if the model is large or can't be batched."""
        if len(probes) < self._batched_from or not self._light or not self._parameters.substitutable:
            return None
        key = self._identity(function)
        if key in self._unbatchable:
            return None
        size = self._at_once(_rows(batch))
        if size < self._batched_from:
            return None
        found: list[Tensor] = []
        for begin in range(0, len(probes), size):
            losses = self._batched(partial(_one_number, function, batch), probes[begin : begin + size])
            if losses is None:
                self._unbatchable.add(key)
                return None
            found += losses.double().unbind()
        return found

    @property
    def _batched_from(self) -> int:
        return LAUNCHED_FROM if self._captures else BATCHED_FROM

    def _at_once(self, rows: int) -> int:
        """Return at how many probes a batch of so many samples is evaluated at once."""
        if self._parameters.backend.host:
            return min(BATCHED_WEIGHTS // self._parameters.dimension, BATCHED_ROWS // rows)
        return min(batched.BATCHED_WEIGHTS // self._parameters.dimension, batched.BATCHED_SAMPLES // rows)

    def _batched(self, compute: Callable[[], Tensor], probes: Sequence[Probe]) -> Tensor | None:
        try:
            return batched.losses_at(self._parameters, compute, probes)
        except Exception:  # the loss's own code may meet vmap's tensors anywhere; what is its own fault it raises again
            return None

    def one_pass(self, function: LossFunction, batch: Any, capture: bool) -> Callable[[Probe], Any]:
        """Return what computes the loss at a probe: captured if it can be."""
        tensors: list[Tensor] = []
        graphs = self._graphs_for(function, batch, tensors) if capture and self._captures else None
        return partial(self._plainly, function, batch) if graphs is None else partial(graphs, tuple(tensors))

    def _plainly(self, function: LossFunction, batch: Any, probe: Probe) -> Any:
        with self._parameters.perturbed(probe):
            return function(batch)

    def _graphs_for(self, function: LossFunction, batch: Any, tensors: list[Tensor]) -> CapturedGraphs | None:
        """Return the graphs of a function on batches of this structure, whose tensors are appended to `tensors`.

        None if they can't be captured.
        """
        if not cuda_graphs.enabled():
            return None
        structure = _structure(batch, tensors)
        if structure is None or not tensors:
            return None
        key = (self._exact(function), structure)
        if key not in self._graphs:
            code = self._identity(function)
            versions = self._versions.setdefault(code, set())
            if len(versions) >= MOST_VERSIONS:
                return None
            versions.add(key)
            if len(versions) == MOST_VERSIONS:
                log.info("this loss is launched kernel by kernel: what it computes with, or what in its batch is not a "
                         "tensor, changes from step to step")  # fmt: skip
                self._graphs.clear()
                return None
            template = _mapped(batch, lambda leaf: _PLACE if isinstance(leaf, Tensor) else leaf)
            self._graphs[key] = CapturedGraphs(self._parameters, partial(_call, function, template), pool=self._pool)
            if len(self._graphs) > MOST_FUNCTIONS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]


class _Place:
    """Where a tensor belongs in a batch."""


_PLACE = _Place()


def _call(function: LossFunction, template: Any, *tensors: Tensor) -> Any:
    """Call a function with a batch that consists of these tensors."""
    rest = iter(tensors)
    return function(_mapped(template, lambda leaf: next(rest) if leaf is _PLACE else leaf))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure with every leaf changed; dictionaries of any kind keep their class."""
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # a BatchEncoding of transformers keeps more than its items
        for name in value:
            result[name] = _mapped(value[name], change)
        return result
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def _structure(value: Any, tensors: list[Tensor]) -> Hashable | None:
    """Return what of a batch is not a tensor, and append its tensors; None if it holds anything but plain values."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout != torch.strided:
            return None
        tensors.append(value)
        return "tensor"
    if isinstance(value, MutableMapping):
        if not all(isinstance(name, (str, int)) for name in value):
            return None
        parts = [(name, _structure(value[name], tensors)) for name in value]
        return None if any(part is None for _, part in parts) else (type(value), tuple(parts))
    if isinstance(value, (tuple, list)):
        items = [_structure(item, tensors) for item in value]
        return None if any(item is None for item in items) else (type(value), tuple(items))
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value).__name__, repr(value)
    return None


def _rows(batch: Any) -> int:
    """Return how many samples a batch seems to have: the longest first dimension."""
    sizes = [1]
    _mapped(batch, lambda leaf: sizes.append(len(leaf)) if isinstance(leaf, Tensor) and leaf.dim() else None)
    return max(sizes)


def _one_number(function: LossFunction, batch: Any) -> Tensor:
    """Return a loss as a scalar tensor, without reading it."""
    result = function(batch)
    if not isinstance(result, Tensor) or math.prod(result.shape) != 1:
        raise NotImplementedError("vmap needs the loss as a tensor")  # told to the user when it is called plainly
    return result.reshape(())


def _scalar(result: Any) -> Tensor:
    """Return a loss as a float64 tensor of its own: the function may write to the same memory at its next call."""
    if isinstance(result, Tensor) and math.prod(result.shape) == 1 and not result.is_complex():
        return result.detach().reshape(()).to(torch.float64, copy=True)
    return torch.tensor(loss_value(result), dtype=torch.float64)


def closures_of(
    caller: str, passes: Passes, losses: Sequence[LossFunction | LossClosure], batches: Iterable[Any] | None
) -> list[LossClosure]:
    """Return one loss without an argument for each batch; `caller` is the method that was given them."""
    if batches is None:
        found = list(cast(Sequence[LossClosure], losses))
    elif len(losses) != 1:
        raise ValueError(
            f"{caller} takes one function with batches, got {len(losses)}: {caller}(loss_fn, batches=[...])"
        )
    else:
        found = [BatchLoss(passes, cast(LossFunction, losses[0]), batch) for batch in batches]
    if not found:
        raise ValueError(f"{caller} needs at least one loss, better several on different batches")
    return found
