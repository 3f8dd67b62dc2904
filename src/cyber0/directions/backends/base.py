"""What a backend is: the functions that the engine calls, and what other code asks about a device."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions.backends import moment_tensors
from cyber0.directions.definition import Directions
from cyber0.directions.space import DirectionSpace

Tensor = torch.Tensor


class PackedSteps(NamedTuple):
    """Steps as the kernels read them: one entry a step, one column a direction.

    An entry of `roundings` is the index of the rounding words, with HALF_WORDS where they serve two weights each.
    """

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


NO_PROBE = PackedProbe(False, np.uint64(0), np.uint64(0), np.uint64(0), np.float64(0), np.float32(1))


class PackedRule(NamedTuple):
    """What the steps of an optimizer with vectors do at each coordinate: a rule, and one row of constants a step."""

    name: str
    constants: NDArray[np.float32]


class Backend(ABC):
    """Computes on one type of device, with the bits of definition.py. Tensors passed to it lie on such a device."""

    hardware: ClassVar[str]
    """What the device is called in messages."""
    host: ClassVar[bool] = False
    """Whether it is the processor that runs Python: threads then share the work, and `move` and `perturb` exist."""
    chunk: ClassVar[int] = 1 << 24
    """Coordinates of w whose update `advance` has in memory at a time: 64 MiB, and few launches."""
    captures: ClassVar[bool] = False
    """Whether model/cuda_graphs.py can capture passes on it."""

    # Kernels.

    @abstractmethod
    def fill(self, out: Tensor, start: int, z: Directions, space: DirectionSpace, scales: NDArray[np.float32]) -> None:
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
    def apply(self, source: Tensor, out: Tensor, start: int, prepared: Any, space: DirectionSpace) -> None:
        """Write to `out` the stored weights `source` (coordinates start, ...) after a pass; `out` may be `source`."""

    def advance(
        self,
        pieces: Sequence[tuple[Tensor, int]],
        vectors: Sequence[Tensor],
        steps: PackedSteps,
        rule: PackedRule,
        space: DirectionSpace,
    ) -> None:
        """Move stored weights, each piece with its first coordinate, and the vectors beside all of w, in place.

        Chunk by chunk: u by a pass over zeros, the vectors by torch's operations, the weights by `move_by`.
        """
        device, dimension = vectors[0].device, len(vectors[0])
        each = [PackedSteps(*(part[i : i + 1] for part in steps)) for i in range(len(steps.keys))]
        with self.current(device):
            prepared = [self.prepare(step, NO_PROBE, device) for step in each]
            scratch = torch.empty(min(dimension, self.chunk), dtype=torch.float32, device=device)
            for begin in range(0, dimension, self.chunk):
                end = min(begin + self.chunk, dimension)
                beside, there = [v[begin:end] for v in vectors], _overlaps(pieces, begin, end)
                for step, ready, constants in zip(each, prepared, rule.constants.tolist(), strict=True):
                    u = scratch[: end - begin].zero_()
                    self.apply(u, u, begin, ready, space)  # 0 - u, and 0 where u is not a number
                    by = moment_tensors.advance(rule.name, u, beside, constants)
                    for stored, low in there:
                        self.move_by(stored, by[low - begin :][: stored.numel()], low, step)

    def move_by(self, stored: Tensor, by: Tensor, start: int, step: PackedSteps) -> None:
        """Move stored weights (coordinates start, ...) by float32 `by`, rounded by the words of the only step."""
        raise NotImplementedError(f"{type(self).__name__} moves weights and vectors in one kernel: see `advance`")

    @abstractmethod
    def scale(self, stored: Tensor, factor: np.float32) -> None:
        """Multiply stored weights by one factor, rounded to nearest even, in place."""

    def move(self, stored: Tensor, z: Tensor, coefficients: NDArray[np.float32]) -> None:
        """Move float32 weights by a step whose directions, the rows of `z`, are in memory. Only on the host."""
        raise NotImplementedError(f"{type(self).__name__} draws directions anew: it keeps none in memory")

    def perturb(self, stored: Tensor, out: Tensor, z: Tensor, coefficient: float) -> None:
        """Write float32 weights, perturbed by a direction that is in memory, to `out`. Only on the host."""
        raise NotImplementedError(f"{type(self).__name__} draws directions anew: it keeps none in memory")

    def add_product(
        self, y: Tensor, x: Tensor, inner: Tensor, outer: Tensor, scaled: Tensor, bias: tuple[Tensor, Tensor] | None
    ) -> bool:
        """Add c (x inner) outer, what a low-rank probe changes in a layer, to y in place if there is a kernel for it.

        Return whether that was done. For the arguments see model/low_rank_layers.py.
        """
        return False

    def norm(
        self, x: Tensor, weight: tuple[Tensor, Tensor], bias: tuple[Tensor, Tensor] | None, distances: Tensor,
        eps: float, *, centred: bool,
    ) -> Tensor | None:  # fmt: skip
        """Return a norm of x with the weight and bias of each group; None if there is no kernel for it.

        The arguments are described in triton_layers.py.
        """
        return None

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

    def host_buffer(self, size: int) -> Tensor:
        """Return so many bytes of host memory, for `begin_copy`."""
        return torch.empty(size, dtype=torch.uint8)

    def begin_copy(self, piece: Tensor, here: Tensor) -> Callable[[], None]:
        """Begin to copy from a device to a host buffer of the same size, and return what waits for the end of it."""
        here.copy_(piece)
        return lambda: None

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this device is torch's current one, as launches of Triton kernels need it."""
        return contextlib.nullcontext()


def _overlaps(pieces: Sequence[tuple[Tensor, int]], begin: int, end: int) -> list[tuple[Tensor, int]]:
    """Return what of the pieces lies among the coordinates begin .. end - 1, each with its first coordinate."""
    found = []
    for stored, start in pieces:
        low, high = max(begin, start), min(end, start + stored.numel())
        if low < high:
            found.append((stored.view(-1)[low - start : high - start], low))
    return found


def code_of(distribution: str, codes: dict[str, int], backend: str) -> int:
    """Return the number by which a backend's kernels know a distribution."""
    if distribution not in codes:
        raise ValueError(f"the {backend} backend has no kernel for distribution {distribution!r}: it has "
                         f"{', '.join(codes)}")  # fmt: skip
    return codes[distribution]
