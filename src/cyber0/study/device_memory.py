"""How much memory of a GPU a run's rounds take, beside what inference over the same samples takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cyber0.storage import write_text

if TYPE_CHECKING:
    from cyber0.ledger import Record
    from cyber0.runs.run import Run

MEMORY = "memory.json"


def held_bytes(device: str, *, cached: bool = False) -> int:
    """Return the bytes of a GPU's memory that the process holds, or that its cached language model does."""
    if device == "cpu":
        return 0
    import torch

    if not cached:
        return int(torch.cuda.memory_allocated(device))  # 0 before the first use of the GPU
    from cyber0.tasks.text.model_cache import MODELS

    model = MODELS.cached("weights")
    tensors = [] if model is None else [t for t in model.parameters() if t.device.type != "cpu"]
    return sum(t.numel() * t.element_size() for t in tensors)


class DeviceMemory:
    """A callback that writes memory.json at the end of a run on a GPU: round_bytes and inference_bytes.

    Evaluations don't count. What the process held before the run, such as the model that it caches for the next one, is
    subtracted.

    Args:
        held: Bytes of the GPU's memory that belong to the process, not to the run.
    """

    def __init__(self, held: int = 0) -> None:
        self._held, self._peak, self._inference = held, 0, 0
        self._device: Any = None

    def on_start(self, run: Run) -> None:
        import torch

        device = run.simulation.parameters.device
        if device.type != "cuda":
            return
        self._run, self._device = run, device
        simulation = run.simulation
        model, batch = simulation.parameters.model, simulation.first_batch(alone=False)
        weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with torch.no_grad():
            simulation.task.outputs(model, simulation.task.prepare(batch.inputs))
        self._inference = weights + torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)

    def on_round(self, record: Record) -> None:
        if self._device is not None and self._run.is_due(record.round + 1):  # before the evaluation
            import torch

            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device) - self._held)

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
        if self._device is not None:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)

    def on_end(self, summary: dict[str, Any]) -> None:
        if self._peak:
            figures = {"round_bytes": self._peak, "inference_bytes": self._inference}
            write_text(self._run.folder / MEMORY, json.dumps(figures) + "\n")
