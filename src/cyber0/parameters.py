"""A torch module's trainable weights as one vector w: look at w + c z, commit a round, digest.

w lies in segments, flat buffers that the module's parameters point into; a segment holds consecutive
parameters of one block of the model (say, one transformer layer) and one type. A coordinate's number counts
through all segments in named_parameters order, so the bits do not depend on how the model is cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from cyber0.directions import Perturbation, Step, engine
from cyber0.errors import ModelError
from cyber0.ledger import Entry
from cyber0.substitution import Substitution

Tensor = torch.Tensor

CACHE_BYTES = 4 << 20  # perturbed segments kept beyond the one in use, so that small models are perturbed once
STEPS_PER_PASS = 4096  # bounds the table of coefficients that one replaying pass carries
_BALL_GRID = 2.0**20  # ||w||^2 is summed in units of 1 / grid
_BALL_LIMIT = 2.0**30  # a single w^2 counts at most this much: 1,024 of them fit 64 bits


@dataclass
class Segment:
    """Consecutive parameters of one block and type in one flat buffer."""

    start: int
    buffer: Tensor
    members: list[tuple[str, nn.Parameter, int]] = field(default_factory=list)  # name, parameter, offset in buffer

    @property
    def count(self) -> int:
        return self.buffer.numel()


def block_of(name: str) -> str:
    """Return the block a parameter belongs to: up to the first number in its path, else its module."""
    parts = name.split(".")[:-1]
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts)


class Parameters:
    """The trainable weights of `model` as one vector.

    Args:
        model: Any nn.Module. Parameters with requires_grad=False are frozen: they stay out. It is put into
            eval mode, and its parameters' storage is laid out anew (same values, same nn.Parameter objects).
        distribution: Of the directions: "gaussian", "rademacher" or "sphere".
    """

    def __init__(self, model: nn.Module, distribution: str = "gaussian") -> None:
        self.model = model
        self.distribution = distribution
        self._names = _trainable(model)
        self.segments = _lay_out(self._names)
        self.dimension = sum(s.count for s in self.segments)
        self.layout = tuple(
            Entry(name, tuple(p.shape), engine.storage_name(p.dtype), s.start + offset)
            for s in self.segments
            for name, p, offset in s.members
        )
        self._place = {id(p): (i, offset) for i, s in enumerate(self.segments) for _, p, offset in s.members}
        self._streamable = not any(isinstance(m, torch.jit.ScriptModule) or _compiled(m) for m in model.modules())
        self._buffers_checked = False
        # An embedding with max_norm writes to its weight in forward, also in eval mode: it gets a copy to write to.
        limited = [m.weight for m in model.modules() if getattr(m, "max_norm", None) is not None]
        self._written = [p for p in self.tensors if any(p is w for w in limited)]

    @property
    def device(self) -> torch.device:
        return self.segments[0].buffer.device

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The trainable parameters in layout order."""
        return [p for s in self.segments for _, p, _ in s.members]

    # Looking: nothing here changes a bit of w.

    @contextlib.contextmanager
    def at(self, look: Perturbation | None, steps: Sequence[Step] = ()) -> Iterator[None]:
        """Within this context the model computes at (w after `steps`) + c z.

        The stand-ins need memory for one block of the model at a time. Scripted and compiled modules, whose
        use of weights can't be met one by one, get a whole second copy instead.
        """
        with self._quiet_model():
            if look is None and not steps:
                with Substitution(self._written, lambda p: p.clone()) if self._written else contextlib.nullcontext():
                    yield
            elif self._streamable:
                cache: dict[int, Tensor] = {}
                with Substitution(self.tensors, lambda p: self._stand_in(p, look, steps, cache)):
                    yield
            else:
                with self._swapped([self._perturbed(s, look, steps) for s in self.segments]):
                    yield

    def _stand_in(
        self, parameter: Tensor, look: Perturbation | None, steps: Sequence[Step], cache: dict[int, Tensor]
    ) -> Tensor:
        number, offset = self._place[id(parameter)]
        if number not in cache:
            size = self.segments[number].buffer.nbytes
            while cache and sum(b.nbytes for b in cache.values()) + size > CACHE_BYTES:
                del cache[next(iter(cache))]
            cache[number] = self._perturbed(self.segments[number], look, steps)
        return cache[number][offset : offset + parameter.numel()].view(parameter.shape)

    def _perturbed(self, segment: Segment, look: Perturbation | None, steps: Sequence[Step]) -> Tensor:
        d = self.dimension
        with torch._C._DisableFuncTorch():  # a model may use its weights inside vmap or grad: stay a plain tensor
            out = torch.empty_like(segment.buffer)
            return engine.apply(segment.buffer, out, segment.start, steps, look, self.distribution, dimension=d)

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
            primal = p.detach().clone() if any(p is w for w in self._written) else p.detach()
            dual: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
            return dual

        with self._quiet_model(), Substitution(self.tensors, stand_in):
            yield

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the model computes with these tensors, one for each parameter in layout order."""
        table = {id(p): t for p, t in zip(self.tensors, tensors, strict=True)}
        with self._quiet_model(), Substitution(self.tensors, lambda p: table[id(p)]):
            yield

    @contextlib.contextmanager
    def _swapped(self, buffers: list[Tensor]) -> Iterator[None]:
        try:
            for segment, buffer in zip(self.segments, buffers, strict=True):
                _point(segment, buffer)
            yield
        finally:
            for segment in self.segments:
                _point(segment, segment.buffer)

    def directions(self, seed: int, round: int, first: int, count: int) -> Tensor:
        """Return `count` directions as the rows of a float32 matrix; for small models."""
        out = torch.empty(count, self.dimension, device=self.device)
        return engine.fill(out, 0, seed, round, first, self.distribution, dimension=self.dimension)

    def direction_tensors(self, seed: int, round: int, first: int, count: int) -> list[Tensor]:
        """Return the same directions as one contiguous (count, *shape) float32 tensor for each parameter."""
        parts = []
        for entry in self.layout:
            part = torch.empty(count, entry.size, device=self.device)
            engine.fill(part, entry.offset, seed, round, first, self.distribution, dimension=self.dimension)
            parts.append(part.view(count, *entry.shape))
        return parts

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

    # Changing w.

    def commit(self, step: Step, radius: float | None = None) -> None:
        """Move w by one step, all its directions in one pass over memory; then onto the ball of `radius`."""
        self.replay([step], radius)

    def replay(self, steps: Sequence[Step], radius: float | None = None) -> None:
        """Move w by many steps. Without a ball, thousands of them in one pass over memory."""
        self._check_attached()
        size = STEPS_PER_PASS if radius is None else 1
        for begin in range(0, len(steps), size):
            part = steps[begin : begin + size]
            for s in self.segments:
                engine.apply(s.buffer, s.buffer, s.start, part, None, self.distribution, dimension=self.dimension)
            if radius is not None:
                self.project(radius)

    def project(self, radius: float) -> None:
        """Project w onto the ball of that radius around 0 (the paper's W). The norm is summed in integers."""
        squared = sum(_squared_norm_units(s.buffer) for s in self.segments) / _BALL_GRID
        if squared > radius * radius:
            for s in self.segments:
                engine.scale(s.buffer, radius / math.sqrt(squared))

    @contextlib.contextmanager
    def excursion(self) -> Iterator[None]:
        """Let w wander within this context and put its very bits back afterwards, at the price of one copy."""
        kept = [s.buffer.clone() for s in self.segments]
        try:
            yield
        finally:
            for s, buffer in zip(self.segments, kept, strict=True):
                s.buffer.copy_(buffer)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set w from named tensors, which must match the layout in names, shapes and types."""
        expected = {e.name: (e.shape, e.dtype) for e in self.layout}
        given = {name: (tuple(t.shape), engine.storage_name(t.dtype)) for name, t in tensors.items()}
        if given != expected:
            wrong = sorted(set(given.items()) ^ set(expected.items()))[0]
            raise ModelError(f"these weights do not fit the model: {wrong[0]} {wrong[1]} is in one of them only")
        self._check_attached()
        for s in self.segments:
            for name, p, offset in s.members:
                s.buffer[offset : offset + p.numel()].copy_(tensors[name].reshape(-1))

    def state(self) -> dict[str, Tensor]:
        """Return w by name: views, not copies."""
        return {name: p.detach() for s in self.segments for name, p, _ in s.members}

    # Identity.

    def digest(self) -> str:
        """Return SHA-256 of w's little-endian storage bytes in layout order."""
        self._check_attached()
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

    # Guarding the model while it is looked at.

    @contextlib.contextmanager
    def _quiet_model(self) -> Iterator[None]:
        """Evaluate in eval mode, and insist that no buffer changes."""
        self._check_attached()
        training = [m for m in self.model.modules() if m.training]
        self.model.eval()
        stubborn = [n or type(m).__name__ for n, m in self.model.named_modules() if m.training]
        if stubborn:
            raise ModelError(
                f"module {stubborn[0]!r} stays in train mode after eval(); losses must be taken in eval mode"
            )
        buffers = dict(self.model.named_buffers())
        versions = {name: b._version for name, b in buffers.items()}
        kept = {} if self._buffers_checked else {name: b.clone() for name, b in buffers.items()}
        try:
            yield
        finally:
            for module in training:
                module.training = True
            now = dict(self.model.named_buffers())
            changed = [
                name
                for name, b in buffers.items()
                if now.get(name) is not b or b._version != versions[name] or not _same(b, kept.get(name, b))
            ]
            for name in changed:
                owner, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(owner), leaf, buffers[name])
                if name in kept:
                    buffers[name].data.copy_(kept[name])
        if changed:
            raise ModelError(
                f"buffer {changed[0]!r} was changed by a forward pass in eval mode; a model whose buffers move "
                "is not its starting point plus a ledger: make that module stateless in eval mode"
            )
        self._buffers_checked = True

    def _check_attached(self) -> None:
        for s in self.segments:
            address, size = s.buffer.data_ptr(), s.buffer.element_size()
            for name, p, offset in s.members:
                if p.data_ptr() != address + offset * size:
                    raise ModelError(
                        f"parameter {name!r} was given other storage after Parameters took the model over; "
                        "move or load the model first, and make Parameters of it then"
                    )


def _compiled(module: nn.Module) -> bool:
    """Return whether it is torch.compile(module), or module.compile() or module.forward = torch.compile() was done."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    by_forward = hasattr(module.forward, "_torchdynamo_orig_callable")
    return in_place or by_forward or type(module).__name__ == "OptimizedModule"


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters, tied ones once, or say why there are none that can be trained."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ModelError("the model has no trainable parameter: set requires_grad=True on what should be trained")
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name!r} is not initialised yet: run the model once before training it")
        if p.layout != torch.strided or p.is_quantized or p.device.type == "meta":
            raise ModelError(
                f"parameter {name!r} is not an ordinary tensor ({p.layout}, {p.device}): it can't be trained"
            )
        if p.device != named[0][1].device:
            raise ModelError(
                f"parameters lie on {named[0][1].device} and {p.device} ({name!r}): put them on one device"
            )
        engine.storage_name(p.dtype)
        if not torch.isfinite(p.detach()).all():
            raise ModelError(f"parameter {name!r} holds a value that is not finite: training can't start from it")
    _refuse_shared_memory(named)
    return named


def _refuse_shared_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    end, owner = 0, ""
    for name, p in sorted(((n, p) for n, p in named if p.numel()), key=lambda entry: entry[1].data_ptr()):
        if p.data_ptr() < end:
            raise ModelError(
                f"parameters {owner!r} and {name!r} share memory without being one nn.Parameter: "
                "tie them by assigning the same nn.Parameter to both"
            )
        last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
        end, owner = p.data_ptr() + (last + 1) * p.element_size(), name


def _lay_out(named: list[tuple[str, nn.Parameter]]) -> list[Segment]:
    """Move the parameters into segments, one block and type each, and point them there."""
    groups: list[list[tuple[str, nn.Parameter]]] = []
    for name, p in named:
        last = groups[-1][-1] if groups else None
        if last is not None and block_of(last[0]) == block_of(name) and last[1].dtype == p.dtype:
            groups[-1].append((name, p))
        else:
            groups.append([(name, p)])
    segments, start = [], 0
    for group in groups:
        size = sum(p.numel() for _, p in group)
        segment = Segment(start, torch.empty(size, dtype=group[0][1].dtype, device=group[0][1].device))
        offset = 0
        for name, p in group:
            segment.buffer[offset : offset + p.numel()].copy_(p.detach().reshape(-1))
            segment.members.append((name, p, offset))
            offset += p.numel()
        _point(segment, segment.buffer)
        segments.append(segment)
        start += size
    return segments


def _point(segment: Segment, buffer: Tensor) -> None:
    for _, p, offset in segment.members:
        p.data = buffer[offset : offset + p.numel()].view(p.shape)


def _bytes(t: Tensor) -> Any:
    """Return a tensor's little-endian bytes."""
    array = t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return array if np.little_endian else array.reshape(-1, t.element_size())[:, ::-1].tobytes()


def _squared_norm_units(w: Tensor) -> int:
    """Return ||w||^2 in units of 1 / grid: every square rounded to the grid, the sum in integers."""
    total = 0
    for begin in range(0, w.numel(), 1 << 22):
        x = w[begin : begin + (1 << 22)].double()
        units = (x * x).clamp_(max=_BALL_LIMIT).mul_(_BALL_GRID).add_(0.5).to(torch.int64)
        units = nn.functional.pad(units, (0, -units.numel() % 1024)).view(-1, 1024).sum(1)
        total += int((units >> 32).sum()) << 32
        total += int((units & 0xFFFFFFFF).sum())
    return total
