"""Where the trainable parameters of a module lie: which there are, and the flat buffers that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from cyber0.directions import engine
from cyber0.errors import ModelError

Tensor = torch.Tensor


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


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
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


def lay_out(named: list[tuple[str, nn.Parameter]]) -> list[Segment]:
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
        point(segment, segment.buffer)
        segments.append(segment)
        start += size
    return segments


def point(segment: Segment, buffer: Tensor) -> None:
    for _, p, offset in segment.members:
        p.data = buffer[offset : offset + p.numel()].view(p.shape)
