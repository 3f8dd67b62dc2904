"""A model that is looked at holds still: eval mode, and buffers that do not move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from cyber0.errors import ModelError


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
        versions = {name: b._version for name, b in buffers.items()}
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
        self._checked = True

    def _enter_eval_mode(self) -> None:
        self.model.eval()
        for name, module in self.model.named_modules():
            if module.training:
                raise ModelError(
                    f"module {name or type(module).__name__!r} stays in train mode after eval(); losses must be taken "
                    "in eval mode"
                )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
