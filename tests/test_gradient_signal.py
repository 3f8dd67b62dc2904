"""benchmarks/gradient_signal.py compares the mean gradient with those of single samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra 'text'")

import gradient_signal
from tiny_models import write_model, write_sentences

from cyber0.config.schema import Config
from cyber0.tasks.text.task import Text


@pytest.mark.parametrize(("sign", "s"), [(1.0, 25.0), (-1.0, -25.0)])
def test_signal_and_noise_of_equal_and_of_opposite_gradients(
    sign: float, s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {0: torch.tensor([3.0, 4.0]), 1: sign * torch.tensor([3.0, 4.0])}
    monkeypatch.setattr(gradient_signal, "gradients", lambda *a: (given[a[-1][0]],))
    assert gradient_signal.shares(None, torch.nn.Module(), [torch.zeros(2)], [0, 1]) == [(s, 25.0)]


def test_what_a_pass_gains_follows_from_signal_and_noise() -> None:
    assert gradient_signal.gain([(25.0, 25.0)], 1) == 25.0**2 / (50 * 25)
    assert gradient_signal.gain([(-25.0, 25.0)], 1) == 0


def test_the_table_has_a_line_for_the_start_and_for_each_number_of_steps(tmp_path: Path) -> None:
    write_sentences(tmp_path / "sst2")
    model = write_model("llama", tmp_path / "llama")
    config = Config().with_overrides(["task.name=sst2", f"task.model={model}", f"task.data={tmp_path / 'sst2'}"])
    task = Text(config.task)
    lines = list(gradient_signal.table(task, task.model(0).eval(), [1, 2], 4))
    assert len(lines) == 5 and [line.split("|")[1].strip() for line in lines[2:]] == ["0", "1", "2"]
