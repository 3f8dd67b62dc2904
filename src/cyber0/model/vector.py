"""A torch module's trainable weights as one vector w: look at w + c z, commit a round, digest.

w lies in segments, flat buffers that the module's parameters point into; a segment holds consecutive
parameters of one block of the model (say, one transformer layer) and one type. A coordinate's number counts
through all segments in named_parameters order, so the bits do not depend on how the model is cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.multiprocessing import reductions

from cyber0.directions import Probe, Step, engine
from cyber0.directions.backends import backend_of
from cyber0.directions.definition import DISTRIBUTIONS, GAUSSIAN_REACH, distribution_named
from cyber0.directions.engine import WeightPass
from cyber0.directions.steps import STEPS_PER_PASS
from cyber0.errors import ModelError
from cyber0.ledger import Entry
from cyber0.model.blocks import Blocks, perturbed
from cyber0.model.cuda_graphs import CapturedMove
from cyber0.model.eval_mode import EvalGuard, version_of
from cyber0.model.segments import Segment, lay_out, point, point_at_decoys, resolution, trainable
from cyber0.model.substitution import METADATA, STRIDES, EscapeDetector, Readers, Stretch, Substitution

Tensor = torch.Tensor
_WeakStorage: Any = reductions.StorageWeakRef

DRAWN_BYTES = 4 << 20  # directions of the round that are kept, so that small models need not draw them for the commit
COPY_UNTOLD_BYTES = 64 << 20  # a second copy of the weights that is larger than this is worth a warning
PROBE = 0.1  # how far the first probes go, which see whether all uses of the weights are met
REPEATS = 4  # of a loss at the same weights, to know how far it differs from itself
BALL_GRID = 2.0**40  # (||w|| / R)^2 is summed in units of 1 / grid
BALL_LIMIT = 2.0**12  # a single (w / R)^2 counts at most this much: 1,024 of them fit 64 bits
BALL_PASSES = 64  # more than it takes to bring the largest float32 into the smallest ball


class Parameters:
    """The trainable weights of `model` as one vector.

    Args:
        model: Any nn.Module. Parameters with requires_grad=False are frozen: they stay out. Its
            parameters' storage is laid out anew (same values, same nn.Parameter objects).
        distribution: Of the directions, a name from directions.DISTRIBUTIONS.
    """

    def __init__(self, model: nn.Module, distribution: str = "gaussian") -> None:
        self.model = model
        self.distribution = distribution
        self._names = trainable(model)
        # Memory that the parameters leave; what somebody else still holds there will no longer follow w.
        self._former = [(_WeakStorage(p.untyped_storage()), Stretch.of(name, p)) for name, p in self._names]
        self.segments = lay_out(self._names)
        self.dimension = sum(s.count for s in self.segments)
        drawn_from = distribution_named(distribution)
        if self.dimension < drawn_from.least_dimension:
            others = " or ".join(name for name, other in DISTRIBUTIONS.items() if other.least_dimension == 1)
            raise ModelError(
                f"{distribution} directions need at least {drawn_from.least_dimension} trainable weights, and the "
                f"model has {self.dimension}: use distribution {others}"
            )
        self.factor = drawn_from.factor(self.dimension)
        """By which a slope along a direction is multiplied to estimate the gradient: d on the unit sphere."""
        self.layout = tuple(
            Entry(name, tuple(p.shape), engine.storage_name(p.dtype), s.start + offset)
            for s in self.segments
            for name, p, offset in s.members
        )
        self.backend = backend_of(self.device)
        self._place = {id(p): (i, offset) for i, s in enumerate(self.segments) for _, p, offset in s.members}
        self._streamable = not any(isinstance(m, torch.jit.ScriptModule) or _compiled(m) for m in model.modules())
        self._eval_guard = EvalGuard(model)
        self._probed = False
        self.random = False
        """Whether a loss that could not be streamed did not repeat itself either."""
        # A scripted function meets a function mode only while a dispatch mode is on as well.
        self._scripted = any(_calls_scripted_functions(m) for m in model.modules())
        self._torn = False
        self._bound: float | None = None
        """No weight is further from 0 than this; None: not known."""
        self._drawn: tuple[tuple[int, int, int, int], list[Tensor]] | None = None
        # An embedding with max_norm writes to its weight in forward, also in eval mode: it gets a copy to write to.
        limited = [m.weight for m in model.modules() if getattr(m, "max_norm", None) is not None]
        self._written = [p for p in self.tensors if any(p is w for w in limited)]
        self._excused = dict.fromkeys(map(id, self._written), 0)
        self._all = self.tensors
        self._addresses = [p.data_ptr() for p in self._all]
        self._moves: dict[int, CapturedMove] = {}
        # Where the modules hold what is not trained; looked through anew each time, for a buffer may be replaced.
        held = [d for m in model.modules() for d in (m._parameters, m._buffers)]
        self._rest = [d for d in held if any(t is not None and id(t) not in self._place for t in d.values())]

    @property
    def device(self) -> torch.device:
        return self.segments[0].buffer.device

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The trainable parameters in layout order."""
        return [p for s in self.segments for _, p, _ in s.members]

    @property
    def substitutable(self) -> bool:
        """Whether every use of a weight can be met: not so in scripted and compiled modules."""
        return self._streamable

    # Looking: nothing here changes a bit of w.

    def weight_pass(self, probe: Probe | None, steps: Sequence[Step] = ()) -> WeightPass:
        """Return the pass over w that a look at it, after steps, is."""
        return WeightPass(steps, probe, self.distribution, dimension=self.dimension, device=self.device)

    @contextlib.contextmanager
    def perturbed(self, probe: Probe | None, steps: Sequence[Step] = ()) -> Iterator[None]:
        """Within this context the model computes at (w after `steps`) + c z.

        The stand-ins need memory for one block of the model at a time. Scripted and compiled modules, whose
        use of weights can't be met one by one, get a whole second copy instead.
        """
        if probe is None and not steps:
            met = self._written and self._probed and self._streamable
            with self._held(), Substitution(self._written, lambda p: p.clone()) if met else self._spared():
                yield
        elif self._streamable:
            with self.streamed(Blocks(self.segments, self.weight_pass(probe, steps))):
                yield
        else:
            with self.copied(probe, steps):
                yield

    @contextlib.contextmanager
    def streamed(self, blocks: Blocks, *, decoys: bool = False, spare: bool = False) -> Iterator[None]:
        """Within this context the model computes with the weights that `blocks` gives, one segment at a time.

        With `decoys` the parameters themselves hold other numbers meanwhile, which only a use that is not met can read.
        With `spare` those that the model writes to hold copies of themselves, in case such a use is not met.
        """

        def stand_in(parameter: Tensor) -> Tensor:
            number, offset = self._place[id(parameter)]
            return blocks[number][offset : offset + parameter.numel()].view(parameter.shape)

        # Decoys are strided as no parameter is: a model that asks must not take another way because of them.
        asked = METADATA - STRIDES if decoys else METADATA
        copies = self._spared() if spare else contextlib.nullcontext()
        away = self._pointed(point_at_decoys) if decoys else copies
        with self._held(), self._watched(blocks), away, Substitution(self.tensors, stand_in, asked):
            yield

    @contextlib.contextmanager
    def copied(self, probe: Probe | None, steps: Sequence[Step] = ()) -> Iterator[None]:
        """Like `at`, by pointing every parameter to a second copy of the weights: needs no trust in anything."""
        weight_pass = self.weight_pass(probe, steps)
        with self._held(), self._pointed(lambda s: point(s, perturbed(s, weight_pass))):
            yield

    def check_uses(self, compute: Callable[[], Tensor | float], probe: Probe) -> None:
        """See, by a few passes, whether every weight that `compute` uses can be replaced; if not, copy w from now on.

        The parameters are pointed at decoys while stand-ins are handed out: the result changes if some use is not met
        (a scripted or traced module, a thread of its own). Unlike a comparison with a second copy of the weights
        this takes no memory, so it is done for models of any size.

        Raises:
            ModelError: The memory of a weight is read through a view kept from before, which no probe can reach.
        """
        others = [] if self.backend.host else [self.device]  # devices with a generator of their own
        generators = torch.get_device_module(self.device)

        def attempt(decoys: bool) -> NDArray[np.float64] | None:
            torch.set_rng_state(generator)  # the same dropout every time
            for device, state in zip(others, states, strict=True):
                generators.set_rng_state(state, device)
            with streamed(decoys):
                try:
                    value = compute()
                except Exception:  # whether it is the loss's own will be seen at a second copy
                    return None
            return np.asarray(value.detach().double().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)

        def streamed(decoys: bool) -> contextlib.AbstractContextManager[None]:
            return self.streamed(Blocks(self.segments, self.weight_pass(probe)), decoys=decoys, spare=True)

        with torch.random.fork_rng(others, device_type=self.device.type):
            with self._held(), self._spared():  # a first call may trace the model, and must trace w itself
                compute()
            self._probed = True  # by what follows, and without a net, under which scripted modules act differently
            generator, states = torch.get_rng_state(), [generators.get_rng_state(device) for device in others]
            if self._streamable:
                hidden, seen = attempt(True), attempt(False)
                if hidden is None or seen is None:
                    with self.copied(probe):
                        compute()
                    self.distrust()
                elif not _same(hidden, seen, 0.0):
                    repeats = [attempt(False) for _ in range(REPEATS)]
                    noise = [np.abs(again - seen) for again in repeats if again is not None]
                    if len(noise) < REPEATS or not _same(hidden, seen, np.max(noise, axis=0)):
                        self.random = any(again is not None and not _same(again, seen, 0.0) for again in repeats)
                        self.distrust()
            readers = Readers(self._stretches())
            with streamed(True) if self._streamable else self.copied(probe), readers:
                compute()
        if readers.found:
            raise ModelError(
                f"parameter {readers.found[0]!r} is also read through a view that was kept from before (in __init__, "
                "say): no probe reaches it, and it may not follow the weights. Use the parameter itself in forward, or "
                "clone() the view if it is meant to be a constant"
            )

    def _stretches(self) -> dict[int, list[Stretch]]:
        """Return where the parameters lie and, as far as that memory is still in use, have lain; by storage."""
        now = [
            (s.buffer.untyped_storage()._cdata, Stretch.of(name, p)) for s in self.segments for name, p, _ in s.members
        ]
        former = [(storage.cdata, stretch) for storage, stretch in self._former if not storage.expired()]
        found: dict[int, list[Stretch]] = {}
        for storage, stretch in now + former:
            found.setdefault(storage, []).append(stretch)
        return found

    def distrust(self) -> None:
        """Take the road of the second copy from now on: some use of a weight was not met."""
        self._streamable = False
        size = sum(s.buffer.nbytes for s in self.segments)
        if size > COPY_UNTOLD_BYTES:
            warnings.warn(
                "the model's weights can't be replaced one block at a time (it is traced, scripted or compiled, or "
                f"computes in a thread of its own): each probe takes a second copy of them, {size / 1e6:,.0f} MB. "
                "Compute with the plain module to avoid that",
                RuntimeWarning,
                stacklevel=3,
            )

    @contextlib.contextmanager
    def _watched(self, blocks: Blocks) -> Iterator[None]:
        """The first time, see whether a use of a weight escapes the substitution; if so, don't rely on it again."""
        if self._probed and not self._scripted:
            yield
            return
        numbers = {s.buffer.untyped_storage()._cdata: i for i, s in enumerate(self.segments)}
        with EscapeDetector(numbers, blocks.__getitem__) as net:
            yield
        self._probed = True
        self._streamable = self._streamable and not net.caught  # what somebody else distrusts stays distrusted

    @contextlib.contextmanager
    def along(self, seed: int, round: int, index: int) -> Iterator[None]:
        """Within this context, inside a dual level, every weight carries its coordinates of z as its tangent."""
        from torch.autograd import forward_ad

        cache: dict[int, Tensor] = {}

        def stand_in(p: Tensor) -> Tensor:
            number, offset = self._place[id(p)]
            segment = self.segments[number]
            if number not in cache:
                cache.clear()
                cache[number] = torch.empty(segment.count, device=self.device)
                engine.fill(
                    cache[number], segment.start, seed, round, index, self.distribution, dimension=self.dimension
                )
            tangent = cache[number][offset : offset + p.numel()].view(p.shape).to(p.dtype)
            here = segment.buffer[offset : offset + p.numel()].view(p.shape)
            primal = here.clone() if any(p is w for w in self._written) else here
            dual: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
            return dual

        with self._held(), Substitution(self.tensors, stand_in):
            yield

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the model computes with these tensors, one for each parameter in layout order."""
        table = {id(p): t for p, t in zip(self.tensors, tensors, strict=True)}
        with self._held(), Substitution(self.tensors, lambda p: table[id(p)]):
            yield

    @contextlib.contextmanager
    def _pointed(
        self, away: Callable[[Segment], None], segments: Sequence[Segment] | None = None
    ) -> Iterator[None]:  # fmt: skip
        """Within this context parameters (of all segments, if none are given) lie where `away` points them."""
        segments = self.segments if segments is None else segments
        before = [p._version for p in self._written]
        try:
            for segment in segments:
                away(segment)
            torch.clear_autocast_cache()  # a cast of the weights is kept by the parameter it was made of
            yield
        finally:
            for segment in segments:
                point(segment, segment.buffer)
            torch.clear_autocast_cache()
            for p, version in zip(self._written, before, strict=True):
                self._excused[id(p)] += p._version - version

    def _spared(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which those parameters that the model writes to are copies, seen by every thread."""
        if not self._written:
            return contextlib.nullcontext()
        spared = [s for s in self.segments if any(p is w for _, p, _ in s.members for w in self._written)]
        return self._pointed(lambda s: point(s, s.buffer.clone()), spared)

    def versions(self) -> list[int]:
        """Return the version counter of every parameter, without the writes that went to a copy of it."""
        return [version_of(p) - self._excused.get(id(p), 0) for p in self._all]

    def directions(self, seed: int, round: int, first: int, count: int) -> Tensor:
        """Return `count` directions as the rows of a float32 matrix; for small models."""
        out = torch.empty(count, self.dimension, device=self.device)
        return engine.fill(out, 0, seed, round, first, self.distribution, dimension=self.dimension)

    def direction_tensors(self, seed: int, round: int, first: int, count: int) -> list[Tensor]:
        """Return the same directions as one contiguous (count, *shape) float32 tensor for each parameter.

        They are kept for the commit: don't write to them.
        """
        parts = []
        for entry in self.layout:
            part = torch.empty(count, entry.size, device=self.device)
            engine.fill(part, entry.offset, seed, round, first, self.distribution, dimension=self.dimension)
            parts.append(part)
        small = 4 * count * self.dimension <= DRAWN_BYTES and self.backend.host
        self._drawn = ((seed, round, first, count), parts) if small else None
        return [part.view(count, *e.shape) for part, e in zip(parts, self.layout, strict=True)]

    def unflatten(self, rows: Tensor) -> list[Tensor]:
        """Split a (..., d) tensor into one (..., *shape) tensor a parameter, of that parameter's type."""
        lead = rows.shape[:-1]
        return [
            rows[..., s.start + offset : s.start + offset + p.numel()].reshape(*lead, *p.shape).to(p.dtype)
            for s in self.segments
            for _, p, offset in s.members
        ]

    def vector(self) -> Tensor:
        """Return w as one float32 vector (a copy)."""
        return torch.cat([s.buffer.float() for s in self.segments])

    def least_moving(self) -> float:
        """Return the least mu with which w + mu z, as it is stored, differs from w in half of the weights."""
        return resolution(self.tensors) * math.sqrt(self.factor)  # a coordinate of z has the size 1 / sqrt(factor)

    # Changing w.

    def commit(self, step: Step, radius: float | None = None) -> None:
        """Move w by one step, all its directions in one pass over memory; then onto the ball of `radius`."""
        self.replay([step], radius)

    def replay(self, steps: Sequence[Step], radius: float | None = None) -> None:
        """Move w by many steps. Without a ball, thousands of them in one pass over memory."""
        self.check_attached()
        size = STEPS_PER_PASS if radius is None else 1
        self._torn = True  # until all segments have moved: an interrupt in between must not go unnoticed
        for begin in range(0, len(steps), size):
            part = steps[begin : begin + size]
            if not self._move_by_drawn(part):
                self._move(part)
            if radius is not None:
                self.project(radius)
        self._torn = False
        self._bound = self._bound_after(steps)

    def _bound_after(self, steps: Sequence[Step]) -> float | None:
        """Return a bound on every |w| after one more step; after many it is cheaper to look."""
        if self._bound is None or len(steps) != 1:
            return self._bound if not steps else None
        reach = GAUSSIAN_REACH * float(np.abs(steps[0].coefficients.astype(np.float64)).sum())
        coarsest = max(torch.finfo(s.buffer.dtype).eps for s in self.segments)
        return (self._bound + reach) * (1 + coarsest)

    def saturated(self) -> int:
        """Return how many weights are at the largest finite value of their type, where a commit clamps them.

        The weights are only read where, by the steps since they were last read, one of them can be that large.
        """
        if self._bound is not None and self._bound < min(torch.finfo(s.buffer.dtype).max for s in self.segments):
            return 0
        count, bound = 0, 0.0
        for s in self.segments:
            reach = float(torch.linalg.vector_norm(s.buffer, math.inf)) if s.count else 0.0
            bound, largest = max(bound, reach), torch.finfo(s.buffer.dtype).max
            if reach >= largest:
                count += sum(int((part.abs() >= largest).sum()) for part in torch.split(s.buffer, 1 << 20))
        self._bound = bound
        return count

    def _move(self, steps: Sequence[Step]) -> None:
        """Move all segments; on a GPU single steps are recorded, because launching takes longer than moving."""
        if len(steps) == 1 and self.backend.captures:
            k = len(steps[0].coefficients)
            if k not in self._moves:
                self._moves[k] = CapturedMove(self.segments, self.weight_pass(None, steps))
            self._moves[k](steps)
            return
        weight_pass = self.weight_pass(None, steps)
        for s in self.segments:
            weight_pass.run(s.buffer, s.buffer, s.start)

    def _move_by_drawn(self, steps: Sequence[Step]) -> bool:
        """Move w by the step whose directions are still in memory, if that is the one: the same bits, sooner."""
        if self._drawn is None or len(steps) != 1:
            return False
        (step,), (drawn, parts) = steps, self._drawn
        if drawn != (step.seed, step.round, step.first, len(step.coefficients)):
            return False
        if any(s.buffer.dtype != torch.float32 for s in self.segments):
            return False
        for weights, part in zip(self.tensors, parts, strict=True):
            engine.move(weights.detach().view(-1), part, step.coefficients)
        self._drawn = None
        return True

    def project(self, radius: float) -> None:
        """Project w onto the ball of that radius around 0 (the paper's W). The norm is summed in integers."""
        for _ in range(BALL_PASSES):
            units = sum(squared_norm_units(s.buffer, radius) for s in self.segments)
            if units <= BALL_GRID:  # inside
                return
            for s in self.segments:
                engine.scale(s.buffer, 1.0 / math.sqrt(units / BALL_GRID))
            if units < BALL_LIMIT * BALL_GRID:  # no weight can have been counted for less than it is
                return

    @contextlib.contextmanager
    def excursion(self) -> Iterator[None]:
        """Let w wander within this context and put its very bits back afterwards, at the price of one copy."""
        self.check_attached()
        kept = [s.buffer.clone() for s in self.segments]
        try:
            yield
        finally:
            self._write(kept)

    def _write(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite all segments. Until that is done w is torn: an interrupt in between must not go unnoticed."""
        self._torn, self._bound = True, None
        for s, buffer in zip(self.segments, buffers, strict=True):
            s.buffer.copy_(buffer)
        self._torn = False

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set w from named tensors, which must match the layout in names, shapes and types.

        This also mends weights that an interrupt has left half moved.
        """
        expected = {e.name: (e.shape, e.dtype) for e in self.layout}
        given = {name: (tuple(t.shape), engine.storage_name(t.dtype)) for name, t in tensors.items()}
        if given != expected:
            wrong = sorted(set(given.items()) ^ set(expected.items()))[0]
            raise ModelError(f"these weights do not fit the model: {wrong[0]} {wrong[1]} is in one of them only")
        self._check_storage()
        self._torn, self._bound = True, None
        for s in self.segments:
            for name, p, offset in s.members:
                s.buffer[offset : offset + p.numel()].copy_(tensors[name].reshape(-1))
        self._torn = False

    def set_vector(self, w: Tensor) -> None:
        """Set w from one vector, rounded to storage to nearest even and clamped to its finite range.

        It mends w as `load` does.
        """
        self._check_storage()
        largest = [torch.finfo(s.buffer.dtype).max for s in self.segments]
        parts = [w[s.start : s.start + s.count] for s in self.segments]
        self._write([part.clamp(-limit, limit) for part, limit in zip(parts, largest, strict=True)])

    def state(self) -> dict[str, Tensor]:
        """Return w by name: views, not copies."""
        return {name: p.detach() for s in self.segments for name, p, _ in s.members}

    # Identity.

    def digest(self) -> str:
        """Return SHA-256 of w's little-endian storage bytes in layout order."""
        self.check_attached()
        sha = hashlib.sha256()
        for s in self.segments:
            for begin in range(0, s.count, 1 << 24):
                sha.update(_bytes(s.buffer[begin : begin + (1 << 24)]))
        return sha.hexdigest()

    def rest_digest(self) -> str:
        """Return SHA-256 of everything else that is part of the model: frozen weights and persistent buffers."""
        trained, sha = set(self._place), hashlib.sha256()
        tensors = self.model.state_dict(keep_vars=True)
        for name, t in sorted(tensors.items()):
            if isinstance(t, Tensor) and id(t) not in trained:
                sha.update(f"{name} {tuple(t.shape)} {t.dtype}\n".encode())
                sha.update(_bytes(t.detach().reshape(-1)))
        return sha.hexdigest()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self.check_attached()
        with self._eval_guard():
            yield

    def rest_addresses(self) -> list[int]:
        """Return where the frozen weights and the buffers of the model lie now."""
        tensors = [t for held in self._rest for t in held.values() if t is not None]
        return [t.data_ptr() if t.layout == torch.strided else id(t) for t in tensors]

    def check_attached(self) -> None:
        """Refuse to go on when the weights are not whole, or not where the model looks for them."""
        if self._torn:
            raise ModelError(
                "a change of the weights was interrupted half way: load w0 (Parameters.load) and replay the ledger, or "
                "start again from the model's starting weights"
            )
        self._check_storage()

    @property
    def attached(self) -> bool:
        """Whether the parameters still lie where they were laid out."""
        return [p.data_ptr() for p in self._all] == self._addresses

    def _check_storage(self) -> None:
        if self.attached:
            return
        for (name, p), address in zip(self._names, self._addresses, strict=True):
            if p.data_ptr() != address:
                raise ModelError(
                    f"parameter {name!r} was moved or converted, as by .to() or .double(), after cyber0 took the model "
                    "over; do that first, and make the ZeroOrder or the Parameters of the model then"
                )


def _bytes(t: Tensor) -> Any:
    """Return a tensor's little-endian bytes."""
    array = t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return array if np.little_endian else array.reshape(-1, t.element_size())[:, ::-1].tobytes()


def _same(a: NDArray[np.float64], b: NDArray[np.float64], noise: NDArray[np.float64] | float) -> bool:
    """Return whether two results of the same computation are the same, as far as it repeats itself."""
    with np.errstate(invalid="ignore"):
        return bool(np.all((np.abs(a - b) <= 8 * noise + 1e-5 * np.abs(b)) | (a == b) | (np.isnan(a) & np.isnan(b))))


def squared_norm_units(w: Tensor, radius: float) -> int:
    """Return (||w|| / radius)^2 in units of 1 / BALL_GRID: every square rounded to the grid, the sum in integers."""
    total = 0
    for begin in range(0, w.numel(), 1 << 22):
        x = w[begin : begin + (1 << 22)].double() * (1.0 / radius)  # CUDA would divide by multiplying: say so on both
        units = (x * x).nan_to_num_(nan=0.0).clamp_(max=BALL_LIMIT).mul_(BALL_GRID).add_(0.5).to(torch.int64)
        units = nn.functional.pad(units, (0, -units.numel() % 1024)).view(-1, 1024).sum(1)
        total += int((units >> 32).sum()) << 32
        total += int((units & 0xFFFFFFFF).sum())
    return total


def _calls_scripted_functions(module: nn.Module) -> bool:
    """Return whether a @torch.jit.script function is an attribute of the module or a name that its forward uses."""
    forward = getattr(type(module), "forward", None)
    forward = getattr(forward, "__wrapped__", forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    known = getattr(forward, "__globals__", {})
    used = [*vars(module).values(), *(known.get(name) for name in names)]
    return any(isinstance(value, torch.jit.ScriptFunction) for value in used)


def _compiled(module: nn.Module) -> bool:
    """Return whether it is torch.compile(module), or module.compile() or module.forward = torch.compile() was done."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    by_forward = hasattr(module.forward, "_torchdynamo_orig_callable")
    return in_place or by_forward or type(module).__name__ == "OptimizedModule"
