"""A model that is looked at holds still: eval mode, buffers that do not move, weights that nobody else writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from cyber0.errors import ModelError

if TYPE_CHECKING:
    from cyber0.parameters import Parameters

KEPT_WHOLE = 1 << 12  # weights of a segment up to which all of them are kept
KEPT_EACH = 64  # and of a larger one so many of every parameter


class Quiet:
    """Evaluates a model in eval mode, and insists that no buffer changes.

    The first time it keeps a copy of the buffers, so that even a write that leaves no trace is found and undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._checked = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        training = [m for m in self.model.modules() if m.training]
        buffers = dict(self.model.named_buffers())
        versions = {name: _version(b) for name, b in buffers.items()}
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
                if now.get(name) is not b or _version(b) != versions[name] or not _same(b, kept.get(name, b))
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

    A version counter tells of every write that torch knows of. A write through `.data` leaves no trace, so some of the
    weights are kept to compare: all of a small model, 64 of every parameter of a large one. What is done through .data
    (weight decay, clipping, averaging) changes whole tensors; a single weight of a large model may go unnoticed. A
    digest of all weights after every step would find that too, but takes as long as some steps do.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        trained = {id(p) for p in parameters.tensors}
        named = parameters.model.state_dict(keep_vars=True).items()
        self._rest = [(n, t) for n, t in named if isinstance(t, torch.Tensor) and id(t) not in trained]
        self._places = [_places(s.count, [(offset, p.numel()) for _, p, offset in s.members], s.buffer.device)
                        for s in parameters.segments]  # fmt: skip
        self.note()

    def note(self) -> None:
        """Remember the weights as they are."""
        self._versions = [_version(p) for p in self._parameters.tensors]
        self._rest_versions = [_version(t) for _, t in self._rest]
        self._kept = self._sample()

    def check(self, step: int) -> None:
        """Refuse a model that is not as it was noted after `step` steps."""
        self._parameters.check_attached()
        self._check_trained()
        names = [entry.name for entry in self._parameters.layout]
        for name, p, version in zip(names, self._parameters.tensors, self._versions, strict=True):
            if _version(p) != version:
                raise self._touched(f"parameter {name!r} was written to", step)
        for (name, t), version in zip(self._rest, self._rest_versions, strict=True):
            if _version(t) != version:
                raise self._touched(f"{name!r}, which is not trained, was written to", step)
        for segment, now, kept in zip(self._parameters.segments, self._sample(), self._kept, strict=True):
            if not torch.equal(now, kept):
                raise self._touched(
                    f"a weight beginning with {segment.members[0][0]!r} was changed through .data", step
                )

    def _sample(self) -> list[torch.Tensor]:
        kinds = {2: torch.int16, 4: torch.int32}
        buffers = [s.buffer.view(kinds[s.buffer.element_size()]) for s in self._parameters.segments]
        return [b.clone() if place is None else b[place] for b, place in zip(buffers, self._places, strict=True)]

    def _touched(self, what: str, step: int) -> ModelError:
        return ModelError(
            f"{what} since step {step} (by load_state_dict, another optimizer, or a forward pass in train mode, say): "
            "the ledger no longer gives this model. Change the model first and make a ZeroOrder of it then, with a "
            "ledger of its own; or go back by restore(starting_weights)"
        )

    def _check_trained(self) -> None:
        tensors = self._parameters.tensors
        now = {id(p): name for name, p in self._parameters.model.named_parameters() if p.requires_grad}
        names = {id(p): entry.name for entry, p in zip(self._parameters.layout, tensors, strict=True)}
        if now.keys() == names.keys():
            return
        remedy = "ZeroOrder trains what was trainable when it was made: make a new one, with a ledger of its own"
        for key, name in names.items():
            if key not in now:
                raise ModelError(f"parameter {name!r} was frozen or replaced since; {remedy}")
        for key, name in now.items():
            if key not in names:
                raise ModelError(f"parameter {name!r} was added or made trainable since; {remedy}")


def _places(count: int, members: list[tuple[int, int]], device: torch.device) -> torch.Tensor | None:
    """Return which weights of a segment are kept, None: all."""
    if count <= KEPT_WHOLE:
        return None
    parts = [offset + torch.linspace(0, size - 1, min(size, KEPT_EACH), dtype=torch.float64).long()
             for offset, size in members]  # fmt: skip
    return torch.cat(parts).to(device)


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version  # inference tensors do not count, and can't be written to either


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
