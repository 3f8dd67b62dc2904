"""A torch module's trainable weights as one vector w: probe it at w + c z, commit a round, digest it.

`Parameters` is built in three layers: where w is stored (stored.py), how it changes (commit.py), and here how the model
is made to compute with other weights than w, which never changes a bit of w.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cyber0.directions import Probe, Step
from cyber0.errors import ModelError
from cyber0.model.blocks import Blocks, perturbed
from cyber0.model.commit import CommittedWeights
from cyber0.model.cuda_graphs import Prepared, PreparedPass
from cyber0.model.drawn import AnyPass
from cyber0.model.eval_mode import EvalGuard, version_of
from cyber0.model.factors import ProbeBatch
from cyber0.model.low_rank_probes import LowRankProbes
from cyber0.model.segments import Segment, point, point_at_decoys
from cyber0.model.substitution import METADATA, STRIDES, EscapeDetector, Readers, Stretch, Substitution

Tensor = torch.Tensor
Within = Callable[[contextlib.AbstractContextManager[None]], NDArray[np.float64] | None]
"""Computes the losses within a context; None if that raises."""

COPY_UNTOLD_BYTES = 64 << 20  # a second copy of the weights that is larger than this is worth a warning
CHECK_DISTANCE = 0.1  # how far the first probes go, which check whether all uses of the weights are met
# Parts of it at which low-rank probes are compared with perturbed weights, until one shows that they agree: far from w
# a deep model amplifies 16-bit rounding until nothing can be compared.
NEARER = (1.0, 1 / 8, 1 / 32)
REPEATS = 4  # of a loss at the same weights, to know how far it differs from itself


class Parameters(CommittedWeights):
    """The trainable weights of `model` as one vector.

    Args:
        model: Any nn.Module. Parameters with requires_grad=False are frozen: they stay out. Its parameters' storage is
            laid out anew (same values, same nn.Parameter objects).
        distribution: Of the directions, a name from directions.DISTRIBUTIONS.
        compute: The type that perturbed weights are rounded to before the model computes with them; None: that of the
            weights. In 16 bits a model computes faster, and weights in float32 still take the smallest steps.
        rank: Of low-rank directions; others have none.
    """

    def __init__(
        self,
        model: nn.Module,
        distribution: str = "gaussian",
        compute: torch.dtype | None = None,
        *,
        rank: int = 1,
    ) -> None:
        super().__init__(model, distribution, rank)
        self.compute = compute
        self._streamable = not any(isinstance(m, torch.jit.ScriptModule) or _compiled(m) for m in model.modules())
        self._eval_guard = EvalGuard(model)
        self._low_rank: LowRankProbes | None = None
        self._built = False
        """Whether low-rank probes need perturbed weights, because a model computes something else without them."""
        self._probed = False
        self.random = False
        """Whether a loss that could not be streamed did not repeat itself either."""
        # A scripted function meets a function mode only while a dispatch mode is on as well.
        self._scripted = any(_calls_scripted_functions(m) for m in model.modules())
        # An embedding with max_norm writes to its weight in forward, also in eval mode: it gets a copy to write to.
        limited = [m.weight for m in model.modules() if getattr(m, "max_norm", None) is not None]
        self.written = [p for p in self.tensors if any(p is w for w in limited)]
        """Parameters that the model itself writes to."""
        self._excused = dict.fromkeys(map(id, self.written), 0)

    @property
    def substitutable(self) -> bool:
        """Whether every use of a weight can be met: not so in scripted and compiled modules."""
        return self._streamable

    @property
    def low_rank(self) -> LowRankProbes | None:
        """What takes probes without building perturbed weights; None where that can't be."""
        if self.space.layout is None or self.moments.scaling or not self._streamable or self._built:
            return None
        if self._low_rank is None:
            self._low_rank = LowRankProbes(self, self.space.layout)
        return self._low_rank

    def prepare(self, probe: Probe) -> Prepared:
        """Return a probe in fixed places, which a captured pass reads."""
        by_factors = self._by_factors
        return PreparedPass(self, probe) if by_factors is None else by_factors.prepare(ProbeBatch.of(probe))

    @property
    def _by_factors(self) -> LowRankProbes | None:
        """What takes a single probe without building weights: once a first probe has shown that it can."""
        return self.low_rank if self._probed and not self._scripted else None

    def blocks(self, weight_pass: AnyPass) -> Blocks:
        """Return the weights after a pass, one segment at a time, in the type that the model computes in."""
        return Blocks(self.segments, weight_pass, self.compute)

    @contextlib.contextmanager
    def perturbed(self, probe: Probe | None, steps: Sequence[Step] = ()) -> Iterator[None]:
        """Within this context the model computes at (w after `steps`) + c z.

        The stand-ins need memory for one block of the model at a time. Scripted and compiled modules, whose
        use of weights can't be met one by one, get a whole second copy instead.
        """
        if probe is None and not steps:
            met = self.written and self._probed and self._streamable
            with self.held(), Substitution(self.written, lambda p: p.clone()) if met else self._spared():
                yield
        elif probe is not None and not steps and (by_factors := self._by_factors) is not None:
            with by_factors.at(ProbeBatch.of(probe)):
                yield
        elif self._streamable:
            with self.streamed(self.blocks(self.weight_pass(probe, steps))):
                yield
        else:
            with self.copied(probe, steps):
                yield

    @contextlib.contextmanager
    def streamed(self, blocks: Blocks, *, decoys: bool = False, spare: bool = False) -> Iterator[None]:
        """Within this context the model computes with the weights that `blocks` gives, one segment at a time.

        With `decoys` the parameters themselves hold other values meanwhile, which only a use that is not met can read.
        With `spare` those that the model writes to hold copies of themselves, in case such a use is not met.
        """

        def stand_in(parameter: Tensor) -> Tensor:
            number, offset = self._place[id(parameter)]
            return _like_a_parameter(blocks[number][offset : offset + parameter.numel()].view(parameter.shape))

        # Decoys are strided as no parameter is: a model that asks must not take another way because of them.
        asked = METADATA - STRIDES if decoys else METADATA
        copies = self._spared() if spare else contextlib.nullcontext()
        away = self._pointed(point_at_decoys) if decoys else copies
        with self.held(), self._watched(blocks), away, Substitution(self.tensors, stand_in, asked):
            yield

    @contextlib.contextmanager
    def copied(self, probe: Probe | None, steps: Sequence[Step] = ()) -> Iterator[None]:
        """Like `perturbed`, by pointing every parameter to a second copy of the weights instead of substituting."""
        weight_pass = self.weight_pass(probe, steps)
        with self.held(), self._pointed(lambda s: point(s, perturbed(s, weight_pass))):
            yield

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
                self.fill(cache[number], segment.start, seed, round, index)
            tangent = cache[number][offset : offset + p.numel()].view(p.shape).to(p.dtype)
            here = segment.buffer[offset : offset + p.numel()].view(p.shape)
            primal = here.clone() if any(p is w for w in self.written) else here
            dual: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
            return dual

        with self.held(), Substitution(self.tensors, stand_in):
            yield

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the model computes with these tensors, one for each parameter in layout order."""
        table = {id(p): t for p, t in zip(self.tensors, tensors, strict=True)}
        with self.held(), Substitution(self.tensors, lambda p: table[id(p)]):
            yield

    @contextlib.contextmanager
    def _pointed(
        self, away: Callable[[Segment], None], segments: Sequence[Segment] | None = None
    ) -> Iterator[None]:  # fmt: skip
        """Within this context parameters (of all segments, if none are given) lie where `away` points them."""
        segments = self.segments if segments is None else segments
        before = [p._version for p in self.written]
        try:
            for segment in segments:
                away(segment)
            torch.clear_autocast_cache()  # a cast of the weights is kept by the parameter it was made of
            yield
        finally:
            for segment in segments:
                point(segment, segment.buffer)
            torch.clear_autocast_cache()
            for p, version in zip(self.written, before, strict=True):
                self._excused[id(p)] += p._version - version

    def _spared(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which those parameters that the model writes to are copies, seen by every thread."""
        if not self.written:
            return contextlib.nullcontext()
        spared = [s for s in self.segments if any(p is w for _, p, _ in s.members for w in self.written)]
        return self._pointed(lambda s: point(s, s.buffer.clone()), spared)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this context the model is in eval mode and its weights are where they should be."""
        self.check_attached()
        with self._eval_guard():
            yield

    def versions(self) -> list[int]:
        """Return the version counter of every parameter, without the writes that went to a copy of it."""
        return [version_of(p) - self._excused.get(id(p), 0) for p in self._all]

    # Whether every use of a weight is met.

    def check_uses(self, compute: Callable[[], Tensor | float], probe: Probe) -> None:
        """Check by a few passes whether every weight that `compute` uses can be replaced; if not, copy w from now on.

        The parameters are pointed at decoys while stand-ins are handed out: the result changes if some use is not met
        (a scripted or traced module, a thread of its own). Unlike a comparison with a second copy of the weights
        this takes no memory, so it is done for models of any size.

        Raises:
            ModelError: The memory of a weight is read through a view kept from before, which no probe can reach.
        """
        others = [] if self.backend.host else [self.device]  # devices with a generator of their own
        generators = torch.get_device_module(self.device)

        def attempt(decoys: bool) -> NDArray[np.float64] | None:
            return within(streamed(decoys))

        def within(context: contextlib.AbstractContextManager[None]) -> NDArray[np.float64] | None:
            torch.set_rng_state(generator)  # the same dropout every time
            for device, state in zip(others, states, strict=True):
                generators.set_rng_state(state, device)
            try:
                with context:
                    return _array(compute())
            except Exception:  # whether it is the loss's own will be seen at a second copy
                return None

        def streamed(decoys: bool) -> contextlib.AbstractContextManager[None]:
            return self.streamed(self.blocks(self.weight_pass(probe)), decoys=decoys, spare=True)

        with torch.random.fork_rng(others, device_type=self.device.type):
            with self.held(), self._spared():  # a first call may trace the model, and must trace w itself
                at_w = _array(compute())
            self._probed = True  # by what follows, and without a detector, under which scripted modules act differently
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
                if self.low_rank is not None and seen is not None:
                    self._built = not self._takes_factors(within, probe, at_w)
            readers = Readers(self._stretches())
            with streamed(True) if self._streamable else self.copied(probe), readers:
                compute()
        if readers.found:
            raise ModelError(
                f"parameter {readers.found[0]!r} is also read through a view that was kept from before (in __init__, "
                "say): no probe reaches it, and it may not follow the weights. Use the parameter itself in forward, or "
                "clone() the view if it is meant to be a constant"
            )

    def _takes_factors(self, within: Within, probe: Probe, at_w: NDArray[np.float64]) -> bool:
        """Return whether low-rank probes give what perturbed weights give."""
        assert self.low_rank is not None
        for part in NEARER:
            nearer = replace(probe, coefficient=part * probe.coefficient)
            seen = within(self.streamed(self.blocks(self.weight_pass(nearer)), spare=True))
            found = within(self.low_rank.at(ProbeBatch.of(nearer)))
            if seen is None or found is None:
                return False
            if _alike(found, seen, at_w, self.low_rank.dtypes, visible=part < 1):
                return True
        return False

    def _stretches(self) -> dict[int, list[Stretch]]:
        """Return, by storage, where the parameters are and were, as far as that memory is still in use."""
        now = [
            (s.buffer.untyped_storage()._cdata, Stretch.of(name, p)) for s in self.segments for name, p, _ in s.members
        ]
        former = [(storage.cdata, stretch) for storage, stretch in self._former if not storage.expired()]
        found: dict[int, list[Stretch]] = {}
        for storage, stretch in now + former:
            found.setdefault(storage, []).append(stretch)
        return found

    def distrust(self) -> None:
        """Perturb a second copy from now on: some use of a weight was not met."""
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
        """The first time, check whether a use of a weight escapes the substitution; if so, do not rely on it again."""
        if self._probed and not self._scripted:
            yield
            return
        indices = {s.buffer.untyped_storage()._cdata: i for i, s in enumerate(self.segments)}
        with EscapeDetector(indices, blocks.__getitem__) as detector:
            yield
        self._probed = True
        self._streamable = self._streamable and not detector.caught  # what somebody else distrusts stays distrusted


def _like_a_parameter(stand_in: Tensor) -> Tensor:
    """Return a stand-in that asks for a gradient, as its parameter does, where no gradient is recorded.

    torch multiplies a strided batch by a weight that asks for one in a single product, by others in one product a
    sample: in nn.MultiheadAttention that takes 1.6 times as long. Autocast would keep a cast of every such weight.
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled(stand_in.device.type):
        return stand_in
    with torch._C._DisableFuncTorch():  # inside vmap or grad it would be refused
        return stand_in.detach().requires_grad_()  # torch looks at what a view was made from


def _same(a: NDArray[np.float64], b: NDArray[np.float64], noise: NDArray[np.float64] | float) -> bool:
    """Return whether two results of the same computation are the same, as far as it repeats itself."""
    with np.errstate(invalid="ignore"):
        return bool(np.all((np.abs(a - b) <= 8 * noise + 1e-5 * np.abs(b)) | (a == b) | (np.isnan(a) & np.isnan(b))))


def _alike(
    low_rank: NDArray[np.float64], seen: NDArray[np.float64], at_w: NDArray[np.float64],
    dtypes: Sequence[torch.dtype], *, visible: bool,
) -> bool:  # fmt: skip
    """Return whether a low-rank probe gives what perturbed weights give, up to what the two round differently.

    What a probe changes is the measure: a use that is not perturbed would miss a good part of it. With `visible`, the
    probe must change more than rounding does.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    share, roundings = (1e-2, 64) if eps < 1e-5 else (0.25, 8)
    with np.errstate(invalid="ignore"):
        largest, change = np.nanmax(np.abs(seen), initial=0.0), np.nanmax(np.abs(seen - at_w), initial=0.0)
        if visible and change <= 2 * roundings * eps * largest:
            return False
        near = np.abs(low_rank - seen) <= share * change + roundings * eps * largest
        return bool(np.all(near | (low_rank == seen) | (np.isnan(low_rank) & np.isnan(seen))))


def _array(value: Tensor | float) -> NDArray[np.float64]:
    return np.asarray(value.detach().double().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)


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
