"""What a backend is: the functions that the engine calls, and what other code asks about a device."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions.definition import Directions

Tensor = torch.Tensor


class PackedSteps(NamedTuple):
    """Steps as the kernels read them: one entry a step, one column a direction."""

    keys: Any
    rounds: Any
    firsts: Any
    roundings: Any
    coefficients: Any
    scales: Any


class PackedProbe(NamedTuple):
    """A probe as the kernels read it; without one `probing` is False and the rest means nothing."""

    probing: bool
    key: Any
    round: Any
    index: Any
    factor: Any
    scale: Any


class Backend(ABC):
    """Computes on one type of device, with the bits of definition.py. Tensors passed to it lie on such a device."""

    hardware: ClassVar[str]
    """What the device is called in messages."""
    host: ClassVar[bool] = False
    """Whether it is the processor that runs Python: threads then share the work, and `move` exists."""
    captures: ClassVar[bool] = False
    """Whether model/cuda_graphs.py can capture passes on it."""

    # Kernels.

    @abstractmethod
    def fill(self, out: Tensor, start: int, z: Directions, distribution: str, scales: NDArray[np.float32]) -> None:
        """Write coordinates start, start + 1, ... of directions z to the rows of float32 `out`.

        Directions of a normalized distribution are multiplied by their scales.
        """

    @abstractmethod
    def squared_norm_units(self, dimension: int, seed: int, round: int, index: int, device: torch.device) -> int:
        """Return the sum of z^2 over a Gaussian direction, in units of 1 / NORM_GRID."""

    @abstractmethod
    def prepare(self, steps: PackedSteps, probe: PackedProbe, device: torch.device) -> Any:
        """Return what `apply` needs for a pass, where its kernels read it."""

    def prepare_again(self, prepared: Any, steps: PackedSteps, probe: PackedProbe, device: torch.device) -> Any:
        """Return the same for another pass of the same shape, in the memory of an earlier one where that matters."""
        return self.prepare(steps, probe, device)

    @abstractmethod
    def apply(self, source: Tensor, out: Tensor, start: int, prepared: Any, distribution: str) -> None:
        """Write to `out` the stored weights `source` (coordinates start, ...) after a pass; `out` may be `source`."""

    @abstractmethod
    def scale(self, stored: Tensor, factor: np.float32) -> None:
        """Multiply stored weights by one factor, rounded to nearest even, in place."""

    def move(self, stored: Tensor, z: Tensor, coefficients: NDArray[np.float32]) -> None:
        """Move float32 weights by a step whose directions, the rows of `z`, are in memory. Only on the host."""
        raise NotImplementedError(f"{type(self).__name__} draws directions anew: it keeps none in memory")

    # The device.

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices of this type this machine has that torch can use."""

    @abstractmethod
    def device_name(self, device: torch.device) -> str:
        """Return what the device calls itself."""

    @abstractmethod
    def free_memory(self, device: torch.device) -> int:
        """Return how many bytes are free on the device; very many where that is not known."""

    def multiplies(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the device can multiply matrices of that type, without emulating it."""
        try:
            torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
        except RuntimeError:
            return False
        return True

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this device is torch's current one, as launches of Triton kernels need it."""
        return contextlib.nullcontext()


def code_of(distribution: str, codes: dict[str, int], backend: str) -> int:
    """Return the number by which a backend's kernels know a distribution."""
    if distribution not in codes:
        raise ValueError(f"the {backend} backend has no kernel for distribution {distribution!r}: it has "
                         f"{', '.join(codes)}")  # fmt: skip
    return codes[distribution]
