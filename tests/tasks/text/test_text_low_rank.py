"""Language models along low-rank directions: all probes of a batch in one pass, in every architecture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from low_rank_models import low_rank_parameters, moved_copy
from tiny_models import ARCHITECTURES

from cyber0.directions import Directions
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.objective import client_means
from cyber0.federation.simulation import Simulation
from cyber0.tasks import text
from cyber0.tasks.text import fusion
from cyber0.tasks.text.task import Text

DIRECTIONS = Directions(3, 5, 3, 1)
COUNTS = np.array([5, 1, 7])
MU = 1e-2


def compared(task: Text, model: Any, rank: int, **options: Any) -> tuple[Any, Any, Evaluator]:
    """Return slopes in one pass, and those of copies with moved weights."""
    batch = Batch(task.train_inputs[:13], task.train_targets[:13], COUNTS)
    evaluator = Evaluator(low_rank_parameters(model, rank, **options), task, "two_point", MU)
    found = evaluator.estimate(batch, DIRECTIONS)
    mu, losses = float(np.float32(MU)), []
    for r in range(DIRECTIONS.k):
        for c in (mu, -mu):
            copied = moved_copy(model, rank, DIRECTIONS, r, c)
            with torch.no_grad():
                losses.append(task.losses(task.outputs(copied, batch.inputs), batch.targets))
    means = client_means(torch.stack(losses), COUNTS)
    return found, (means[:, ::2] - means[:, 1::2]) / (2 * mu), evaluator


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora", "prefix", "top"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_slopes_are_those_of_copies_with_moved_weights(name: str, adapter: str, settings: Any) -> None:
    if (name, adapter) == ("roberta", "prefix"):
        pytest.skip("prefix tuning is for causal models")
    task = text.make(settings(name, f"task.adapter={adapter}", *(["task.layer=1"] if adapter == "top" else [])).task)
    model = task.model(0).eval()
    assert len(task.train_inputs[:13].groups) > 1
    for rank in (1, 3):
        found, right, evaluator = compared(task, model, rank)
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3 * np.abs(right).max())
        assert evaluator.low_rank.possible


def test_one_pass_a_group_of_lengths_serves_all_probes(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Text(settings("llama").task)
    found, right, evaluator = compared(task, task.model(0).eval(), 1)
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3 * np.abs(right).max())
    rows, outputs = [], task.piece_outputs

    def piece_outputs(model: Any, *piece: Any) -> torch.Tensor:
        rows.append(len(piece[0]))
        return outputs(model, *piece)

    monkeypatch.setattr(task, "piece_outputs", piece_outputs)
    inputs = task.train_inputs[:13]
    evaluator.estimate(Batch(inputs, task.train_targets[:13], COUNTS), DIRECTIONS)
    assert sorted(rows) == sorted(6 * len(group.ids) for group in inputs.in_copies(6).groups)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("rank", [1, 2])
def test_shortcuts_are_perturbed_too(rank: int, settings: Any) -> None:
    task = Text(settings("llama").task)
    with mock.patch.object(fusion, "gated_product", side_effect=fusion.gated_product) as called:
        found, right, evaluator = compared(task, task.model(0).eval(), rank)
    assert evaluator.low_rank.possible and called.called
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3 * np.abs(right).max())


@pytest.mark.usefixtures("on_the_cpu")
def test_weights_in_float32_take_the_shortcuts_of_sixteen_bits(settings: Any) -> None:
    task = Text(settings("llama").task)
    small = task.model(0)
    small.config.update({"head_dim": 32})
    torch.manual_seed(3)
    model = type(small)(small.config).eval()
    with mock.patch.object(fusion, "attended", side_effect=fusion.attended) as called:
        found, right, evaluator = compared(task, model, 1, compute=torch.float16)
    assert called.called and evaluator.low_rank.possible
    np.testing.assert_allclose(found, right, atol=0.2 * np.abs(right).max())


@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
def test_a_run_is_resumed_to_the_same_bits(estimator: str, settings: Any, tmp_path: Path) -> None:
    config = settings("llama", "method.distribution=low_rank", "method.rank=2", "method.k=3",
                      "method.rows_in_flight=40", f"method.estimator={estimator}", "rounds=4")  # fmt: skip
    whole, first = Simulation(config), Simulation.create(config, tmp_path, lambda: None)
    records = [whole.run_round() for _ in range(4)]
    assert whole.client.evaluator.low_rank._checked and whole.client.evaluator.low_rank.possible
    for _ in range(2):
        first.run_round()
    first.close()
    resumed = Simulation.resume(config, tmp_path)
    assert [resumed.run_round().chain for _ in range(2)] == [record.chain for record in records[2:]]


def test_local_epochs_along_low_rank_directions_return_to_w(settings: Any) -> None:
    """They move the weights, so their probes perturb stand-ins."""
    config = settings("gpt2", "method.distribution=low_rank", "method.k=2", "method.local_epochs=2",
                      "method.local_memory=regenerate")  # fmt: skip
    copied = settings("gpt2", "method.distribution=low_rank", "method.k=2", "method.local_epochs=2")
    found, right = Simulation(config).run_round().values, Simulation(copied).run_round().values
    assert found is not None and right is not None
    np.testing.assert_allclose(found, right, rtol=2e-2, atol=2e-2 * np.abs(right).max())
