"""Passes over a model captured as CUDA graphs: many small launches become one.

A captured pass reads its samples and its probe from fixed places in device memory, so one graph serves every batch of
its shape and every direction. A pass that can't be captured, for example because the model reads a value back from the
device, is launched kernel by kernel. CYBER0_CUDA_GRAPHS=0 turns capturing off.

What a model computes must depend on nothing but its tensors and torch's precision settings: a graph repeats what was
done when it was captured.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch

from cyber0.directions import Probe, Step
from cyber0.directions.backends import backend_of
from cyber0.directions.engine import WeightPass
from cyber0.model.segments import Segment

if TYPE_CHECKING:
    from cyber0.model.vector import Parameters

Tensor = torch.Tensor
GraphInputs = tuple["Tensor | None", ...]

MOST_GRAPHS = 64  # one for each shape of a batch
REMEMBERED = 4096  # shapes that were seen once

log = logging.getLogger("cyber0")


def enabled() -> bool:
    """Return whether the user allows passes to be captured."""
    return os.environ.get("CYBER0_CUDA_GRAPHS", "1") != "0"


def capture(
    call: Callable[[], Any], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any] | None:  # fmt: skip
    """Return the captured call and what it returned, or None if it can't be captured. It is not executed.

    `call` must have been executed before: what is compiled at first use can't be compiled during a capture.
    """
    with backend_of(device).current(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"):
                result = call()
        except Exception as error:  # the model's own code runs here, and may raise anything
            _leave_capture(stream, pool)
            reason = error.__context__ or error  # ending a capture that failed fails as well
            log.info("this pass is launched kernel by kernel: it can't be captured: %s", str(reason).split("\n")[0])
            return None
    return graph, result


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that a device's passes are captured on; torch's own default is the first device's."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it


def _leave_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo what torch leaves behind when the end of a capture fails.

    Its stream stays the current one. Older versions also behave as if the capture were still running: cached memory is
    not released, neither by empty_cache nor when memory runs out, and torch's random numbers can't be drawn unless the
    state of their generator is replaced by a copy.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    end = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
    if end is not None:
        with contextlib.suppress(RuntimeError, TypeError):  # it has ended, or is called otherwise
            end(stream.device_index, pool)


class CapturedMove:
    """A step of all weights, with k coefficients that change from step to step.

    Args:
        segments: The weights.
        weight_pass: Any step of that k.
    """

    def __init__(self, segments: Sequence[Segment], weight_pass: WeightPass) -> None:
        self._segments, self._pass = segments, weight_pass
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, steps: Sequence[Step]) -> None:
        """Move the weights."""
        self._pass.renew(steps, None)
        self._calls += 1
        if self._calls == 2 and enabled():  # the first time compiles
            captured = capture(self._move, self._segments[0].buffer.device)
            self._graph = None if captured is None else captured[0]
        if self._graph is None:
            self._move()
        else:
            self._graph.replay()

    def _move(self) -> None:
        for s in self._segments:
            self._pass.run(s.buffer, s.buffer, s.start)


class Prepared(Protocol):
    """What a pass at a probe reads from fixed places."""

    def renew(self, probe: Any) -> None:
        """Prepare another probe of the same shape in the same places."""
        ...

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes at the probe."""
        ...


class PreparedPass:
    """A probe whose weights are perturbed as the model uses them.

    Args:
        parameters: The weights.
        probe: The first one.
    """

    def __init__(self, parameters: Parameters, probe: Probe) -> None:
        self._parameters, self._pass = parameters, parameters.weight_pass(probe)

    def renew(self, probe: Probe) -> None:
        """Prepare another probe in the same place."""
        self._pass.renew((), probe)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes at the probe."""
        return self._parameters.streamed(self._parameters.blocks(self._pass))


class _CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: GraphInputs
    prepared: Prepared | None
    output: Tensor

    def __call__(self, piece: GraphInputs, probe: Any) -> Tensor:
        for static, given in zip(self.inputs, piece, strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        if self.prepared is not None:
            self.prepared.renew(probe)
        self.graph.replay()
        return self.output.clone()  # the next replay of any graph may write there


class GraphPool:
    """Memory that graphs share which are never replayed at the same time, and whose outputs are copied at once."""

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:
        """Return torch's handle of it, which exists from the first capture on."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class CapturedGraphs:
    """A model's outputs at w or at a probe, captured for each shape of samples that comes twice.

    Some libraries choose other kernels during a capture, and the outputs differ in their last bits. Where they do,
    every pass is captured, from the first on: a run must not depend on where it was interrupted.

    Args:
        parameters: The weights.
        compute: The model's outputs for some tensors.
        reference: Makes the inputs that show whether bits differ; defaults to the first inputs. That may depend on the
            shape, so a run that can be resumed needs a reference that is the same wherever it starts.
        pool: The memory of the graphs, if other graphs share it.
    """

    def __init__(
        self,
        parameters: Parameters,
        compute: Callable[..., Tensor],
        reference: Callable[[], GraphInputs] | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self._parameters, self._compute, self._reference = parameters, compute, reference
        self._captured: OrderedDict[Any, _CapturedGraph] = OrderedDict()
        self._seen: set[Any] = set()
        self._plain: set[Any] = set()
        self._able = backend_of(parameters.device).captures and enabled()
        self._same_bits: bool | None = None
        """Whether captured and plain passes give the same bits; known once a first shape was captured."""
        self._pool = pool or GraphPool()
        self._rest: list[int] = []
        """The addresses of what is not trained, when they were last checked."""

    def prepare(self, probe: Any, piece: GraphInputs) -> Prepared:
        """Return what a captured pass reads: probes of one shape share it."""
        return self._parameters.prepare(probe)

    def reference_inputs(self, probe: Any) -> GraphInputs:
        """Return the inputs that show whether captured and plain passes give the same bits."""
        assert self._reference is not None
        return self._reference()

    def perturbed(self, probe: Any, piece: GraphInputs) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes at a probe, without being captured."""
        return self._parameters.perturbed(probe)

    def __call__(self, piece: GraphInputs, probe: Any) -> Tensor:
        """Return the outputs for a piece of a batch at a probe, or at w if that is None."""
        if not self._capturable(piece):
            return self._plainly(piece, probe)
        if self._reference is not None:
            reference, self._reference = self.reference_inputs(probe), None
            self(reference, probe)
            return self(piece, probe)
        self._forget_if_moved()
        shape = (
            getattr(probe, "shape", probe is None),
            _precision(),
            *(None if t is None else (t.shape, t.dtype) for t in piece),
        )
        if shape in self._plain or (self._same_bits and shape not in self._captured and not self._worth(shape)):
            return self._plainly(piece, probe)
        if shape not in self._captured:
            made = self._capture(piece, probe, shape)
            if made is None:
                return self._plainly(piece, probe)
            self._captured[shape] = made
            if len(self._captured) > MOST_GRAPHS:
                self._captured.popitem(last=False)
        self._parameters.check_attached()
        self._captured.move_to_end(shape)
        return self._captured[shape](piece, probe)

    def _capturable(self, piece: GraphInputs) -> bool:
        if not self._able or torch.is_grad_enabled() or not self._parameters.substitutable:
            return False
        if self._parameters.moments.scaling:  # what draws and scales a direction is launched with the probe itself
            return False
        return all(t is None or t.device == self._parameters.device for t in piece)

    def _forget_if_moved(self) -> None:
        """Drop all graphs when a tensor that is not trained has moved: they read it where it was."""
        found = self._parameters.rest_addresses()
        if found != self._rest:
            self._captured.clear()
            self._rest = found

    def _plainly(self, piece: GraphInputs, probe: Any) -> Tensor:
        with self.perturbed(probe, piece):
            return self._compute(*piece)

    def _worth(self, shape: Any) -> bool:
        """Return whether the shape came before and there is room: a capture takes as long as many plain passes."""
        if len(self._captured) >= MOST_GRAPHS:
            return False
        known = shape in self._seen
        if len(self._seen) >= REMEMBERED:
            self._seen.clear()
        self._seen.add(shape)
        return known

    def _capture(self, piece: GraphInputs, probe: Any, shape: Any) -> _CapturedGraph | None:
        inputs = tuple(None if t is None else t.clone() for t in piece)
        prepared = None if probe is None else self.prepare(probe, piece)

        def call() -> Tensor:
            with self._parameters.perturbed(None) if prepared is None else prepared.computing():
                return self._compute(*inputs)

        expected = call()
        read = not isinstance(expected, Tensor)  # the model has read its outputs back already
        captured = None if read else capture(call, self._parameters.device, self._pool.handle())
        if captured is None:
            self._give_up()
            return None
        made = _CapturedGraph(captured[0], inputs, prepared, captured[1])
        return made if self._agrees(made(inputs, probe), expected, shape) else None

    def _agrees(self, got: Tensor, expected: Tensor, shape: Any) -> bool:
        """Compare a captured pass with a plain one, and return whether it may be used."""
        if not torch.allclose(got, expected, rtol=1e-2, atol=1e-2, equal_nan=True):
            log.info("this model is launched kernel by kernel: a captured pass gave other outputs")
            self._give_up()
            return False
        same = torch.equal(got.nan_to_num(), expected.nan_to_num())
        if self._same_bits is None:
            self._same_bits = same
        elif self._same_bits and not same:
            self._plain.add(shape)  # it was computed plainly when it came first
            return False
        return True

    def _give_up(self) -> None:
        """Capture nothing from now on, and free the memory of all graphs."""
        self._able = False
        self._captured.clear()


def _precision() -> tuple[object, ...]:
    """What decides how matrix products are computed, and so must not change between captures."""
    products, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if hasattr(products, "fp32_precision"):  # where there are these settings, the older ones may refuse to be read
        return autocast, products.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return autocast, products.allow_tf32, cudnn.allow_tf32
