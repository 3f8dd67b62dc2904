"""The trainable parameters of a module: which there are, and the flat buffers that hold them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from cyber0.directions import engine
from cyber0.errors import ModelError
from cyber0.model.substitution import Stretch

Tensor = torch.Tensor

SAMPLED_WEIGHTS = 1 << 16  # of a tensor, to know its resolution


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
    """Return the trainable parameters, tied ones once, or refuse the model with the reason."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ModelError("the model has no trainable parameter: set requires_grad=True on what should be trained")
    if not any(isinstance(p, nn.parameter.UninitializedParameter) or p.numel() for _, p in named):
        raise ModelError(
            f"the trainable parameters hold no weight at all ({named[0][0]!r} is empty): there is nothing to train"
        )
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name!r} is not initialised yet: run the model once before training it")
        if p.layout != torch.strided or p.is_quantized or p.device.type == "meta":
            raise ModelError(
                f"parameter {name!r} is not an ordinary tensor ({p.layout}, {p.device}): it can't be trained"
            )
        if p.device != named[0][1].device:
            raise ModelError(
                f"parameters are on {named[0][1].device} and {p.device} ({name!r}): put them on one device"
            )
        engine.storage_name(p.dtype)
        if not torch.isfinite(p.detach()).all():
            raise ModelError(f"parameter {name!r} holds a value that is not finite: training can't start from it")
    _refuse_shared_memory(named)
    _refuse_memory_of_others(model, named)
    return named


def _refuse_shared_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    last = Stretch("", 0, 0)
    for stretch in sorted((Stretch.of(name, p) for name, p in named if p.numel()), key=lambda s: s.begin):
        if stretch.meets(last):
            raise ModelError(
                f"parameters {last.parameter!r} and {stretch.parameter!r} share memory without being one nn.Parameter: "
                "tie them by assigning the same nn.Parameter to both"
            )
        last = stretch


def _refuse_memory_of_others(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse a frozen weight or buffer in the memory of a trained one: it would no longer follow it."""
    trained = sorted(((Stretch.of(name, p), p) for name, p in named if p.numel()), key=lambda entry: entry[0].begin)
    begins = [stretch.begin for stretch, _ in trained]
    others = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    for name, t in others + list(model.named_buffers()):
        try:
            other = Stretch.of(name, t)
        except (RuntimeError, NotImplementedError):  # it has no memory of its own: sparse, quantised, not there yet
            continue
        # Trained parameters are stored in sequence: search backwards from the last that begins before this tensor ends.
        place = bisect.bisect_left(begins, other.end) - 1
        while place >= 0 and trained[place][0].meets(other):
            stretch, p = trained[place]
            if t.device == p.device and _overlap(p, t):
                raise ModelError(
                    f"{name!r} is not trained, but shares memory with the trained parameter {stretch.parameter!r}, and "
                    "would no longer follow it: tie them by assigning the same nn.Parameter to both, or clone() it"
                )
            place -= 1


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors whose stretches meet have an element in common, gaps considered."""
    begin, unit = min(a.data_ptr(), b.data_ptr()), a.element_size()
    if (a.is_contiguous() and b.is_contiguous()) or b.element_size() != unit:
        return True
    marks = torch.zeros((max(Stretch.of("", a).end, Stretch.of("", b).end) - begin) // unit, dtype=torch.bool)
    marks[_places(a, (a.data_ptr() - begin) // unit)] = True
    return bool(marks[_places(b, (b.data_ptr() - begin) // unit)].any())


def _places(t: Tensor, start: int) -> Tensor:
    """Return where the elements lie, counted in elements."""
    places = torch.tensor([start])
    for length, stride in zip(t.shape, t.stride(), strict=True):
        places = (places[:, None] + torch.arange(length) * stride).view(-1)
    return places


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


def point_at_decoys(segment: Segment) -> None:
    """Point the parameters at values that are not theirs, of a usual size and different from row to row.

    All columns share memory, so this takes as many values as the largest parameter has rows. They are finite, because
    a device-side assertion of a loss on a GPU would end the process.
    """
    rows = max((len(p) for _, p, _ in segment.members if p.dim()), default=1)
    steps = torch.arange(rows, device=segment.buffer.device) % 13
    decoys = ((steps - 6.5) / 50).to(segment.buffer.dtype)
    for _, p, _ in segment.members:
        column = decoys[: len(p)].view(-1, *[1] * (p.dim() - 1)) if p.dim() else decoys[0]
        p.data = column.expand(p.shape)


def resolution(tensors: Sequence[Tensor]) -> float:
    """Return the least step that moves half of these weights as they are stored, judged by a sample of each tensor.

    A weight |w| in [2^e, 2^(e + 1)) moves by 2^e eps at least, and half of that is rounded up to it. The result is 0
    where half of the weights are 0, which every step moves.
    """
    halves, counts = [], []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: -(-len(flat) // SAMPLED_WEIGHTS) or 1].abs().double().cpu().numpy()
        limits = torch.finfo(tensor.dtype)
        exponents = np.floor(np.log2(np.maximum(some, limits.tiny)))  # below `tiny` numbers are no denser
        halves.append(np.where(some > 0, 2.0**exponents * limits.eps / 2, 0.0))
        counts.append(np.full(len(some), len(flat) / max(len(some), 1)))
    sizes, weights = np.concatenate(halves), np.concatenate(counts)
    order = np.argsort(sizes)
    return float(sizes[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)])
