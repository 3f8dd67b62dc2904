"""Passes that are recorded as CUDA graphs give what passes launched kernel by kernel give."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cyber0.config.schema import Config
from cyber0.directions import DISTRIBUTIONS, Directions, Probe, Step
from cyber0.errors import ModelError
from cyber0.estimate import batched
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.federation.simulation import Simulation
from cyber0.model import cuda_graphs
from cyber0.model.cuda_graphs import CapturedGraphs
from cyber0.model.vector import Parameters

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.cuda


class Net(nn.Module):
    """Blocks of several sizes, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, 512)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(512, 8, 1100, batch_first=True) for _ in range(6)])
        self.norm = nn.LayerNorm(512)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x[:, -1]), self.embedding.weight[:7])


class Asking(Net):
    """Asks the device for a value on the way, which can't be recorded."""

    def forward(self, tokens: Tensor) -> Tensor:
        result = super().forward(tokens)
        return result if result.sum().item() > 1e9 else result + 1


def made(kind: type[nn.Module], dtype: torch.dtype = torch.float32, distribution: str = "gaussian") -> Parameters:
    torch.manual_seed(1)
    return Parameters(kind().to(dtype).cuda().eval(), distribution)


def tokens(seed: int, rows: int = 5) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 3000, (rows, 9))).cuda()


def probes(count: int) -> list[Probe]:
    return [Probe(2**63 + 7, t, t % 3, c) for t in range(count) for c in (0.05, -0.05)]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_replays_give_the_bits_of_plain_passes(dtype: torch.dtype, distribution: str) -> None:
    parameters = made(Net, dtype, distribution)
    parameters.check_uses(lambda: parameters.model(tokens(0)), probes(1)[0])  # from now on by factors, if low-rank
    graphs = CapturedGraphs(parameters, parameters.model)
    outputs = set()
    for t, probe in enumerate([*probes(3), None, None, None]):
        for rows in (5, 3):
            got = graphs((tokens(t, rows),), probe)
            with parameters.perturbed(probe):
                expected = parameters.model(tokens(t, rows))
            assert torch.equal(got, expected)
            outputs.add(got.double().sum().item())
    assert graphs._same_bits and len(graphs._captured) == 4  # two shapes, at a probe and at w itself
    assert len(outputs) == 18


@torch.no_grad()
def test_replays_see_the_weights_as_they_are_now() -> None:
    parameters = made(Net)
    graphs, probe, given = CapturedGraphs(parameters, parameters.model), probes(1)[0], tokens(0)
    before = [graphs((given,), probe) for _ in range(3)][-1]
    parameters.commit(Step(1, 2, np.float32([0.05, 0.02])))
    with parameters.perturbed(probe):
        expected = parameters.model(given)
    assert not torch.equal(before, expected)
    assert torch.equal(graphs((given,), probe), expected)
    parameters.model.norm.weight.data = parameters.model.norm.weight.data.clone()  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="was moved or converted"):
        graphs((given,), probe)


@torch.no_grad()
def test_a_model_that_asks_for_a_value_is_computed_as_ever() -> None:
    parameters = made(Asking)
    graphs = CapturedGraphs(parameters, parameters.model)
    for t, probe in enumerate(probes(3)):
        with parameters.perturbed(probe):
            expected = parameters.model(tokens(t))
        assert torch.equal(graphs((tokens(t),), probe), expected)
    assert not graphs._captured
    torch.cuda.synchronize()  # nothing is left broken
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    torch.randn(3, device="cuda")
    other = made(Net)
    again = CapturedGraphs(other, other.model)
    assert torch.equal(again((tokens(0),), probes(1)[0]), again((tokens(0),), probes(1)[0])) and again._captured


@torch.no_grad()
def test_frozen_weights_that_were_moved_are_read_where_they_are() -> None:
    torch.manual_seed(1)
    model = Net().cuda().eval()
    model.embedding.weight.requires_grad_(False)
    parameters = Parameters(model)
    graphs, probe, given = CapturedGraphs(parameters, model), probes(1)[0], tokens(0)
    for _ in range(3):
        graphs((given,), probe)
    assert graphs._captured
    model.embedding.weight.data = model.embedding.weight.data * 2
    with parameters.perturbed(probe):
        expected = model(given)
    assert torch.equal(graphs((given,), probe), expected)


@torch.no_grad()
def test_a_shape_that_comes_once_is_not_recorded_nor_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    parameters = made(Net)
    graphs, probe = CapturedGraphs(parameters, parameters.model), probes(1)[0]
    for rows in (1, 2, 3, 2, 3, 4, 4, 2):
        with parameters.perturbed(probe):
            expected = parameters.model(tokens(rows, rows))
        assert torch.equal(graphs((tokens(rows, rows),), probe), expected)
    assert len(graphs._captured) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_move_to_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Net().to(dtype)
    here, there = Parameters(copy.deepcopy(model)), Parameters(model.cuda())
    rng = np.random.default_rng(2)
    for t in range(7):
        step = Step(2**64 - 9, t, np.float32(rng.normal(size=1 + 2 * (t % 2)) * 1e-2), first=t, rounding=t % 3)
        here.commit(step)
        there.commit(step)
        assert here.digest() == there.digest()
    assert all(move._graph is not None for move in there._moves.values())


class FirstOutput:
    """The loss of a sample is its first output."""

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        result: Tensor = model(inputs)
        return result

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sided_slopes_come_from_one_graph_and_have_the_bits_of_plain_passes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(tokens(0), torch.zeros(5, device="cuda"), np.array([2, 3]))
    captured = Evaluator(made(Net, dtype), FirstOutput(), "one_sided", 0.05)
    monkeypatch.setenv("CYBER0_CUDA_GRAPHS", "0")
    plain = Evaluator(made(Net, dtype), FirstOutput(), "one_sided", 0.05)
    for t in range(3):
        directions = Directions(2**63 + 7, t, 4)
        found = captured.estimate(batch, directions)
        assert np.abs(found).max() > 0.1
        assert np.array_equal(found, plain.estimate(batch, directions))
    assert len(captured.streamed.graphs._captured) == 1 and not plain.streamed.graphs._captured


@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
def test_a_run_of_recorded_passes_can_be_repeated_and_resumed(
    estimator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="language models need the extra 'text'")
    from tiny_models import ARCHITECTURES, write_model, write_sentences

    monkeypatch.setattr(batched, "BATCHED_DIMENSION", 0)  # small as they are, stream them
    data = write_sentences(tmp_path / "data")
    for name in ARCHITECTURES:
        model = write_model(name, tmp_path / name)
        for dtype in ("float32", "bfloat16"):
            config = Config().with_overrides(
                ["task.name=sst2", f"task.model={model}", f"task.data={data}", f"task.dtype={dtype}", "device=cuda",
                 "task.samples=16", "rounds=5", "federation.clients=4", "federation.byzantine=1", "method.k=2",
                 "method.batch_size=4", "method.lr=0.01", f"method.estimator={estimator}"]
            )  # fmt: skip
            folder = tmp_path / f"{name}-{dtype}"
            folder.mkdir()
            whole, first = Simulation(config), Simulation.create(config, folder, lambda: None)
            records = [whole.run_round() for _ in range(5)]
            assert whole.client.evaluator.streamed.graphs._captured, (name, dtype)
            for _ in range(2):
                first.run_round()
            first.close()
            resumed = Simulation.resume(config, folder)
            assert [resumed.run_round().chain for _ in range(3)] == [r.chain for r in records[2:]], (name, dtype)
            resumed.close()
            monkeypatch.setenv("CYBER0_CUDA_GRAPHS", "0")
            plain = Simulation(config)
            values = [plain.run_round().values for _ in range(5)]
            monkeypatch.delenv("CYBER0_CUDA_GRAPHS")
            for record, value in zip(records, values, strict=True):
                assert record.values is not None and value is not None
                np.testing.assert_allclose(record.values, value, rtol=0.02, atol=0.02)
