"""NVIDIA GPUs: Triton kernels, launched on the device that a tensor lies on.

Triton is loaded with the first kernel, so that a machine without a GPU needs no Triton to be told that it has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions.backends.base import NO_PROBE, Backend, PackedProbe, PackedSteps, code_of
from cyber0.directions.definition import Directions
from cyber0.directions.low_rank import LowRankLayout
from cyber0.directions.space import DirectionSpace

if TYPE_CHECKING:
    from cyber0.directions.backends.triton_kernels import LaunchTable

Tensor = torch.Tensor


class CudaBackend(Backend):
    """One or several NVIDIA GPUs."""

    hardware = "CUDA GPU"
    captures = True

    def fill(self, out: Tensor, start: int, z: Directions, space: DirectionSpace, scales: NDArray[np.float32]) -> None:
        from cyber0.directions.backends import triton_kernels as kernels

        if space.layout is not None:
            self._fill_low_rank(out, start, z, space.layout)
            return
        code = code_of(space.distribution, kernels.CODES, "CUDA")
        with torch.cuda.device(out.device):
            kernels.fill(out, start, z.seed, z.round, z.first, code, torch.from_numpy(scales).to(out.device))

    def _fill_low_rank(self, out: Tensor, start: int, z: Directions, layout: LowRankLayout) -> None:
        from cyber0.directions.backends import triton_low_rank

        ones = np.ones((1, len(out)), np.float32)
        key, round, first, rounding = (np.array([n], np.uint64) for n in (z.seed, z.round, z.first, 0))
        step = PackedSteps(key, round, first, rounding, ones, ones)
        with torch.cuda.device(out.device):
            triton_low_rank.fill(out, start, self.prepare(step, NO_PROBE, out.device), layout)

    def squared_norm_units(self, dimension: int, seed: int, round: int, index: int, device: torch.device) -> int:
        from cyber0.directions.backends import triton_kernels as kernels

        with torch.cuda.device(device):
            return kernels.squared_norm_units(dimension, seed, round, index, device)

    def prepare(self, steps: PackedSteps, probe: PackedProbe, device: torch.device) -> LaunchTable:
        from cyber0.directions.backends import triton_kernels as kernels

        return kernels.LaunchTable(steps, probe, device)

    def prepare_again(
        self, prepared: LaunchTable, steps: PackedSteps, probe: PackedProbe, device: torch.device
    ) -> LaunchTable:
        prepared.write(steps, probe)  # a captured launch reads from there
        return prepared

    def apply(self, source: Tensor, out: Tensor, start: int, prepared: LaunchTable, space: DirectionSpace) -> None:
        from cyber0.directions.backends import triton_kernels as kernels

        if space.layout is not None:
            from cyber0.directions.backends import triton_low_rank

            with torch.cuda.device(source.device):
                triton_low_rank.apply(source, out, start, prepared, space.layout)
            return
        code = code_of(space.distribution, kernels.CODES, "CUDA")
        with torch.cuda.device(source.device):
            kernels.apply(source, out, start, prepared, code)

    def move_by(self, stored: Tensor, by: Tensor, start: int, step: PackedSteps) -> None:
        from cyber0.directions.backends import triton_kernels as kernels

        kernels.move_by(stored, by, start, step)

    def scale(self, stored: Tensor, factor: np.float32) -> None:
        scaled = stored.float().mul_(float(factor))
        stored.copy_(scaled.masked_fill_(scaled.isnan(), torch.nan))  # one NaN, as everywhere

    def add_product(
        self, y: Tensor, x: Tensor, inner: Tensor, outer: Tensor, scaled: Tensor, bias: tuple[Tensor, Tensor] | None
    ) -> bool:
        from cyber0.directions.backends import triton_layers

        with torch.cuda.device(y.device):
            return triton_layers.add_product(y, x, inner, outer, scaled, bias)

    def norm(
        self, x: Tensor, weight: tuple[Tensor, Tensor], bias: tuple[Tensor, Tensor] | None, distances: Tensor,
        eps: float, *, centred: bool,
    ) -> Tensor | None:  # fmt: skip
        from cyber0.directions.backends import triton_layers

        with torch.cuda.device(x.device):
            return triton_layers.norm(x, weight, bias, distances, eps, centred=centred)

    def device_count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def device_name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def free_memory(self, device: torch.device) -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    def multiplies(self, dtype: torch.dtype, device: torch.device) -> bool:
        with torch.cuda.device(device):
            if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
                return False
        return super().multiplies(dtype, device)

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)  # the GPU writes to it by itself

    def begin_copy(self, piece: Tensor, here: Tensor) -> Callable[[], None]:
        with torch.cuda.device(piece.device):
            here.copy_(piece, non_blocking=True)
            done: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return lambda: done.synchronize()

    def current(self, device: torch.device) -> Any:
        return torch.cuda.device(device)


BACKEND = CudaBackend()
