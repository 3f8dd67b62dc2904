"""Where w is stored: a torch module's trainable weights in segments, by name and as one vector, and their digests.

A segment is a flat buffer that consecutive parameters of one block of the model (say, one transformer layer) and one
type point into. A coordinate's index counts through all segments in named_parameters order, so the bits do not depend
on how the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions

from cyber0.directions import DirectionSpace, engine
from cyber0.directions.backends import backend_of
from cyber0.directions.definition import DISTRIBUTIONS
from cyber0.errors import ModelError
from cyber0.ledger import LayoutEntry
from cyber0.model.digests import digest_of
from cyber0.model.moments import Moments
from cyber0.model.segments import lay_out, resolution, trainable
from cyber0.model.substitution import Stretch

Tensor = torch.Tensor
_WeakStorage: Any = reductions.StorageWeakRef

DRAWN_BYTES = 4 << 20  # directions of the round that are kept, so that small models need not draw them for the commit


class StoredWeights:
    """The trainable weights of `model`, laid out.

    Args:
        model: Any nn.Module. Parameters with requires_grad=False are frozen: they stay out. Its parameters' storage is
            laid out anew (same values, same nn.Parameter objects).
        distribution: Of the directions, a name from directions.DISTRIBUTIONS.
        rank: Of low-rank directions; others have none.
    """

    def __init__(self, model: nn.Module, distribution: str, rank: int = 1) -> None:
        self.model = model
        self._names = trainable(model)
        # Memory that the parameters leave; a view that somebody else still holds there will no longer follow w.
        self._former = [(_WeakStorage(p.untyped_storage()), Stretch.of(name, p)) for name, p in self._names]
        self.segments = lay_out(self._names)
        self.space = DirectionSpace.of(distribution, [p.shape for s in self.segments for _, p, _ in s.members], rank)
        """Which directions are drawn."""
        self.dimension = self.space.dimension
        drawn_from = self.space.known
        if self.dimension < drawn_from.least_dimension:
            others = " or ".join(name for name, other in DISTRIBUTIONS.items() if other.least_dimension == 1)
            raise ModelError(
                f"{distribution} directions need at least {drawn_from.least_dimension} trainable weights, and the "
                f"model has {self.dimension}: use distribution {others}"
            )
        self.factor = self.space.factor
        """By which a slope along a direction is multiplied to estimate the gradient: d on the unit sphere."""
        self.layout = tuple(
            LayoutEntry(name, tuple(p.shape), engine.storage_name(p.dtype), s.start + offset)
            for s in self.segments
            for name, p, offset in s.members
        )
        self.backend = backend_of(self.device)
        self._place = {id(p): (i, offset) for i, s in enumerate(self.segments) for _, p, offset in s.members}
        self.moments = Moments({}, self.dimension, self.device)
        """What the optimizer keeps beside w; it changes with w, by the same steps."""
        self._torn = False
        """Whether a change of w, or of what is kept beside it, was interrupted half way."""
        self._bound: float | None = None
        """No weight is further from 0 than this; None: not known."""
        self._drawn: tuple[tuple[int, int, int, int], list[Tensor]] | None = None
        """Directions that are still in memory: (seed, round, first, count), one tensor a parameter."""
        self._all = self.tensors
        self._addresses = [p.data_ptr() for p in self._all]
        # Where the modules hold what is not trained; read anew each time, for a buffer may be replaced.
        held = [d for m in model.modules() for d in (m._parameters, m._buffers)]
        self._rest = [d for d in held if any(t is not None and id(t) not in self._place for t in d.values())]

    @property
    def device(self) -> torch.device:
        return self.segments[0].buffer.device

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The trainable parameters in layout order."""
        return [p for s in self.segments for _, p, _ in s.members]

    def vector(self) -> Tensor:
        """Return w as one float32 vector (a copy)."""
        return torch.cat([s.buffer.float() for s in self.segments])

    def unflatten(self, rows: Tensor) -> list[Tensor]:
        """Split a (..., d) tensor into one (..., *shape) tensor a parameter, of that parameter's type."""
        lead = rows.shape[:-1]
        return [
            rows[..., s.start + offset : s.start + offset + p.numel()].reshape(*lead, *p.shape).to(p.dtype)
            for s in self.segments
            for _, p, offset in s.members
        ]

    def state(self) -> dict[str, Tensor]:
        """Return w by name: views, not copies."""
        return {name: p.detach() for s in self.segments for name, p, _ in s.members}

    def fill(self, out: Tensor, start: int, seed: int, round: int, first: int) -> Tensor:
        """Write coordinates start, start + 1, ... of directions first, first + 1, ... to the rows of float32 `out`.

        They are those along which the loss is measured and w moves: scaled, if the optimizer does that.
        """
        engine.fill(out, start, seed, round, first, self.space)
        return self.moments.scale_directions(out, start)

    def directions(self, seed: int, round: int, first: int, count: int) -> Tensor:
        """Return `count` directions as the rows of a float32 matrix; for small models."""
        return self.fill(torch.empty(count, self.dimension, device=self.device), 0, seed, round, first)

    def direction_tensors(self, seed: int, round: int, first: int, count: int) -> list[Tensor]:
        """Return the same directions as one contiguous (count, *shape) float32 tensor for each parameter.

        They are kept for the commit: don't write to them.
        """
        parts = []
        for entry in self.layout:
            part = torch.empty(count, entry.size, device=self.device)
            parts.append(self.fill(part, entry.offset, seed, round, first))
        small = 4 * count * self.dimension <= DRAWN_BYTES and self.backend.host and not self.moments.scaling
        self._drawn = ((seed, round, first, count), parts) if small else None
        return [part.view(count, *e.shape) for part, e in zip(parts, self.layout, strict=True)]

    def least_moving(self) -> float:
        """Return the least mu with which w + mu z, as it is stored, differs from w in half of the weights."""
        return resolution(self.tensors) * math.sqrt(self.factor)  # a coordinate of z has the size 1 / sqrt(factor)

    # Overwriting w.

    def _write(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite all segments. Until that is done w is torn: an interrupt in between must be noticed."""
        self._torn, self._bound = True, None
        for s, buffer in zip(self.segments, buffers, strict=True):
            s.buffer.copy_(buffer)
        self._torn = False

    def hold_vectors(self, starts: Mapping[str, float]) -> None:
        """Hold these float32 vectors beside w, and no others, each filled with the value it starts with."""
        if self.moments.starts == dict(starts):
            self.moments.reset()
        else:
            self.moments = Moments(starts, self.dimension, self.device)

    def load(self, tensors: Mapping[str, Tensor], vectors: Mapping[str, Tensor] | None = None) -> None:
        """Set w from named tensors, which must match the layout in names, shapes and types.

        Vectors beside w are set to those given, or to the values they start with. This also repairs weights that an
        interrupt has left half moved.
        """
        if vectors is not None:
            self.moments.check(vectors)
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
        if vectors is None:
            self.moments.reset()
        else:
            self.moments.load(vectors)
        self._torn = False

    def set_vector(self, w: Tensor) -> None:
        """Set w from one vector, rounded to storage to nearest even and clamped to its finite range.

        It repairs w as `load` does.
        """
        self._check_storage()
        largest = [torch.finfo(s.buffer.dtype).max for s in self.segments]
        parts = [w[s.start : s.start + s.count] for s in self.segments]
        self._write([part.clamp(-limit, limit) for part, limit in zip(parts, largest, strict=True)])

    # Identity, and whether w is where it should be.

    def digest(self) -> str:
        """Return SHA-256 of w's little-endian storage bytes in layout order."""
        self.check_attached()
        return digest_of(s.buffer for s in self.segments)

    def vectors_digest(self) -> str:
        """Return SHA-256 of the vectors beside w as little-endian float32, one after the other; "" without any."""
        self.check_attached()
        return digest_of(self.moments.vectors.values()) if self.moments.vectors else ""

    def rest_digest(self) -> str:
        """Return SHA-256 of everything else that is part of the model: frozen weights and persistent buffers."""
        tensors = sorted(self.model.state_dict(keep_vars=True).items())
        rest = ((name, t) for name, t in tensors if isinstance(t, Tensor) and id(t) not in self._place)
        return digest_of(part for name, t in rest for part in (f"{name} {tuple(t.shape)} {t.dtype}\n".encode(), t))

    def rest_addresses(self) -> list[int]:
        """Return where the frozen weights and the buffers of the model are now."""
        tensors = [t for held in self._rest for t in held.values() if t is not None]
        return [t.data_ptr() if t.layout == torch.strided else id(t) for t in tensors]

    def check_attached(self) -> None:
        """Refuse to continue when the weights are torn, or no longer where they were laid out."""
        if self._torn:
            raise ModelError(
                "a change of the weights was interrupted half way: load w0 (Parameters.load) and replay the ledger, or "
                "start again from the model's starting weights"
            )
        self._check_storage()

    @property
    def attached(self) -> bool:
        """Whether the parameters are still where they were laid out."""
        return [p.data_ptr() for p in self._all] == self._addresses

    def _check_storage(self) -> None:
        if self.attached:
            return
        for (name, p), address in zip(self._names, self._addresses, strict=True):
            if p.data_ptr() != address:
                raise ModelError(
                    f"parameter {name!r} was moved or converted, as by .to(), .double() or a second ZeroOrder, after "
                    "cyber0 took the model over; do that first, and make the ZeroOrder or Parameters of it then"
                )
