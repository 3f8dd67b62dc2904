"""A model does not change while it is probed: eval mode, constant buffers, and weights that nobody else writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from cyber0.errors import ModelError

if TYPE_CHECKING:
    from cyber0.model.segments import Segment
    from cyber0.model.vector import Parameters

KEPT_WHOLE = 1 << 12  # weights of a segment up to which all of them are kept
KEPT_EACH = 64  # and of a larger one so many of every parameter


class EvalGuard:
    """Evaluates a model in eval mode, and refuses a forward pass that changes a buffer.

    The first time it keeps a copy of the buffers, so that even a write that leaves no trace is detected and undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._checked = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        training = [m for m in self.model.modules() if m.training]
        buffers = dict(self.model.named_buffers())
        versions = {name: version_of(b) for name, b in buffers.items()}
        kept = {} if self._checked else {name: b.clone() for name, b in buffers.items()}
        changed: list[str] = []
        try:
            self._enter_eval_mode()
            yield
        finally:
            for module in training:
                module.training = True
            now = dict(self.model.named_buffers())
            changed += [
                name
                for name, b in buffers.items()
                if now.get(name) is not b or version_of(b) != versions[name] or not _same(b, kept.get(name, b))
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
        self._checked = True

    def _enter_eval_mode(self) -> None:
        self.model.eval()
        for name, module in self.model.named_modules():
            if module.training:
                raise ModelError(
                    f"module {name or type(module).__name__!r} stays in train mode after eval(); losses must be taken "
                    "in eval mode"
                )


class Untouched:
    """Notices that somebody else writes to a model, or changes what is trained, between `note` and `check`.

    A version counter shows every write that torch knows of. A write through `.data` leaves no trace, so a copy of some
    weights is kept for comparison: all of a small model, 64 of every parameter of a large one. What is usually done
    through .data (weight decay, clipping, averaging) changes whole tensors; a change of one weight of a large model may
    go unnoticed. A digest of all weights after every step would detect that too, but takes as long as some steps.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._names = {id(p): entry.name for entry, p in zip(parameters.layout, parameters.tensors, strict=True)}
        named = parameters.model.state_dict(keep_vars=True).items()
        self._rest = [(n, t) for n, t in named if isinstance(t, torch.Tensor) and id(t) not in self._names]
        self._samples = [
            _Sample([s for s in parameters.segments if s.buffer.element_size() == size]) for size in (2, 4)
        ]
        self.note()

    def note(self) -> None:
        """Remember the weights as they are."""
        self._versions = self._parameters.versions()
        self._rest_versions = [version_of(t) for _, t in self._rest]
        for sample in self._samples:
            sample.keep()

    def moved(self) -> bool:
        """Return whether one of the copied weights has changed since it was noted; this waits for a GPU."""
        return any(sample.changed() is not None for sample in self._samples)

    def check(self, step: int) -> None:
        """Refuse a model that has changed since it was noted, after `step` steps."""
        self.check_versions(step)
        self.check_values(step)

    def check_versions(self, step: int) -> None:
        """Refuse what shows without reading the weights: other storage, freezing, writes that torch knows of."""
        self._parameters.check_attached()
        self._check_trained()
        self._check_writes(step)

    def check_values(self, step: int) -> None:
        """Refuse writes, also through .data; this waits for a GPU."""
        self._check_writes(step)
        for sample in self._samples:
            changed = sample.changed()
            if changed is not None:
                raise self._touched(f"parameter {changed!r} was changed through .data", step)

    def _check_writes(self, step: int) -> None:
        now = self._parameters.versions()
        if now != self._versions:
            pairs = zip(self._names.values(), now, self._versions, strict=True)
            name = next(name for name, a, b in pairs if a != b)
            raise self._touched(f"parameter {name!r} was written to", step)
        for (name, t), version in zip(self._rest, self._rest_versions, strict=True):
            if version_of(t) != version:
                raise self._touched(f"{name!r}, which is not trained, was written to", step)

    def _touched(self, what: str, step: int) -> ModelError:
        return ModelError(
            f"{what} since step {step}, so the ledger no longer gives this model. Something else wrote to it: "
            "load_state_dict, another optimizer or a forward pass in train mode, for example. Call "
            "restore(starting_weights) to undo that; to keep it, make a new ZeroOrder of the model as it is now, with "
            "a ledger of its own"
        )

    def _check_trained(self) -> None:
        if _trained(self._parameters.model) == self._names.keys():
            return
        now = {id(p): name for name, p in self._parameters.model.named_parameters() if p.requires_grad}
        names = self._names
        if now.keys() == names.keys():
            return
        remedy = "ZeroOrder trains what was trainable when it was made: make a new one, with a ledger of its own"
        for key, name in names.items():
            if key not in now:
                raise ModelError(f"parameter {name!r} was frozen or replaced since; {remedy}")
        for key, name in now.items():
            if key not in names:
                raise ModelError(f"parameter {name!r} was added or made trainable since; {remedy}")


def _trained(model: nn.Module) -> set[int]:
    """Return the ids of the trainable parameters, sooner than `named_parameters`, which spells every name."""
    found: set[int] = set()
    modules = [model]
    while modules:
        module = modules.pop()
        found.update(id(p) for p in module._parameters.values() if p is not None and p.requires_grad)
        modules += [child for child in module._modules.values() if child is not None]
    return found


class _Sample:
    """Some weights of all segments of one element size, as one tensor: compared at once.

    Args:
        segments: Those segments.
    """

    def __init__(self, segments: list[Segment]) -> None:
        kind = torch.int16 if segments and segments[0].buffer.element_size() == 2 else torch.int32
        self._segments = segments
        self._buffers = [s.buffer.view(kind) for s in segments]
        self._places = [_places(s.count, [(offset, p.numel()) for _, p, offset in s.members], s.buffer.device)
                        for s in segments]  # fmt: skip
        self._kept: torch.Tensor | None = None

    def keep(self) -> None:
        self._kept = self._now()

    def changed(self) -> str | None:
        """Return which parameter differs from what was kept, None if none does."""
        now = self._now()
        if now is None or self._kept is None or torch.equal(now, self._kept):
            return None
        place = int((now != self._kept).nonzero()[0])
        for segment, places in zip(self._segments, self._places, strict=True):
            size = segment.count if places is None else len(places)
            if place < size:
                offset = place if places is None else int(places[place])
                return next(name for name, p, begin in segment.members if begin <= offset < begin + p.numel())
            place -= size
        raise AssertionError("the sample is longer than its parts")

    def _now(self) -> torch.Tensor | None:
        pairs = zip(self._buffers, self._places, strict=True)
        parts = [b if places is None else b.index_select(0, places) for b, places in pairs]
        return torch.cat(parts) if parts else None


def _places(count: int, members: list[tuple[int, int]], device: torch.device) -> torch.Tensor | None:
    """Return which weights of a segment are kept, None: all."""
    if count <= KEPT_WHOLE:
        return None
    parts = [offset + torch.linspace(0, size - 1, min(size, KEPT_EACH), dtype=torch.float64).long()
             for offset, size in members]  # fmt: skip
    return torch.cat(parts).to(device)


def version_of(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version  # inference tensors do not count, and can't be written to either


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
