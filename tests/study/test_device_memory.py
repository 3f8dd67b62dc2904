"""What a run's rounds take of a GPU's memory, with a GPU that is made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic import own_config

from cyber0.runs.run import Run
from cyber0.study.device_memory import MEMORY, DeviceMemory, held_bytes


class MadeUpGpu:
    """Counts what is allocated now and at most since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: int) -> None:
        self.allocated = self.peak = allocated
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.use(0))

    def use(self, more: int) -> None:
        """Have so much more for a moment; 0 forgets what was before."""
        self.peak = max(self.peak, self.allocated + more) if more else self.allocated


def test_rounds_are_compared_with_inference_and_evaluations_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, vectors = 1000, 200  # the process's own; an optimizer's state beside the weights
    model = torch.nn.Linear(10, 1)
    weights = 4 * 11
    gpu = MadeUpGpu(monkeypatch, held + weights + vectors)
    task = SimpleNamespace(prepare=lambda inputs: inputs, outputs=lambda model, inputs: gpu.use(30))
    simulation = SimpleNamespace(
        parameters=SimpleNamespace(device=torch.device("cuda"), model=model), task=task,
        first_batch=lambda alone: SimpleNamespace(inputs=None),
    )  # fmt: skip
    run: Any = SimpleNamespace(simulation=simulation, folder=tmp_path, is_due=lambda round: round % 2 == 0)
    memory = DeviceMemory(held)
    memory.on_start(run)
    for number in range(4):
        gpu.use(50)
        memory.on_round(SimpleNamespace(round=number))  # type: ignore[arg-type]  # no more of a record is read
        if run.is_due(number + 1):
            gpu.use(9999)
            memory.on_evaluate(number + 1, {})
    memory.on_end({})
    found = json.loads((tmp_path / MEMORY).read_text())
    assert found == {"round_bytes": weights + vectors + 50, "inference_bytes": weights + 30}


def test_nothing_is_recorded_on_a_cpu(tmp_path: Path) -> None:
    assert held_bytes("cpu") == held_bytes("cpu", cached=True) == 0
    Run.start(own_config("rounds=1"), tmp_path / "run").run([DeviceMemory()])
    assert not (tmp_path / "run" / MEMORY).exists()
