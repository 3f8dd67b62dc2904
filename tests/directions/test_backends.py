"""The seam between the engine and its backends: a backend is one object, a distribution one entry of a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from spaces import some_space
from torch import nn

from cyber0 import optimizers
from cyber0.config import choices
from cyber0.config.devices import parse_device
from cyber0.config.schema import Config
from cyber0.directions import Directions, DirectionSpace, Probe, Step, backends, definition, engine
from cyber0.directions.backends import check_device, moment_kernels, moment_tensors
from cyber0.directions.backends.base import Backend, PackedProbe, PackedSteps
from cyber0.directions.backends.numba_kernels import CODES
from cyber0.directions.moments import RULES
from cyber0.errors import ConfigError, ModelError
from cyber0.ledger.header import DEFINITIONS
from cyber0.model.vector import Parameters

STEP = Step(3, 5, np.array([0.5, -0.25], np.float32))
PROBE = Probe(3, 5, 1, 1e-2)


class DefinitionBackend(Backend):
    """All that a new backend takes: here each function is that of definition.py."""

    hardware = "abacus"

    def __init__(self) -> None:
        self.passes = 0

    def fill(
        self, out: torch.Tensor, start: int, z: Directions, space: DirectionSpace, scales: NDArray[np.float32]
    ) -> None:
        for r, row in enumerate(out.numpy()):
            place = (z.seed, z.round, z.first + r, start, len(row))
            row[:] = space.coordinates(*place)

    def squared_norm_units(self, dimension: int, seed: int, round: int, index: int, device: torch.device) -> int:
        return definition.squared_norm_units(definition.reference(seed, round, index, 0, dimension, "gaussian"))

    def prepare(self, steps: PackedSteps, probe: PackedProbe, device: torch.device) -> Any:
        columns = zip(steps.keys, steps.rounds, steps.coefficients, steps.firsts, steps.roundings, strict=True)
        plain = [Step(int(key), int(t), c, int(first), int(rounding)) for key, t, c, first, rounding in columns]
        _, key, round, index, factor, _ = probe
        return plain, Probe(int(key), int(round), int(index), float(factor)) if probe.probing else None

    def apply(self, source: torch.Tensor, out: torch.Tensor, start: int, prepared: Any, space: DirectionSpace) -> None:
        self.passes += 1
        steps, probe = prepared
        stored = source.detach().numpy()
        new = definition.apply(stored, "float32", start, steps, probe, space)
        out.copy_(torch.from_numpy(new))

    def move_by(self, stored: torch.Tensor, by: torch.Tensor, start: int, step: PackedSteps) -> None:
        self.passes += 1
        stored.copy_(torch.from_numpy(definition.moved(stored.numpy(), by.numpy())))

    def scale(self, stored: torch.Tensor, factor: np.float32) -> None:
        stored.mul_(float(factor))

    def device_count(self) -> int:
        return 2

    def device_name(self, device: torch.device) -> str:
        return "abacus"

    def free_memory(self, device: torch.device) -> int:
        return 1 << 60


@pytest.fixture
def abacus(monkeypatch: pytest.MonkeyPatch) -> Iterator[DefinitionBackend]:
    """A backend in the place of the processor's; what is registered is one object."""
    made = DefinitionBackend()
    monkeypatch.setitem(sys.modules, "cyber0.directions.backends.cpu", SimpleNamespace(BACKEND=made))
    backends.backend_for.cache_clear()
    engine.sphere_scale.cache_clear()
    yield made
    backends.backend_for.cache_clear()


def linear() -> Parameters:
    torch.manual_seed(0)
    return Parameters(nn.Linear(40, 3))


def probed_and_committed(parameters: Parameters) -> tuple[torch.Tensor, str]:
    with torch.no_grad(), parameters.perturbed(PROBE):
        outputs = parameters.model(torch.ones(1, 40))
    parameters.commit(STEP)
    return outputs, parameters.digest()


def test_a_backend_of_one_object_probes_and_commits_with_the_same_bits(abacus: DefinitionBackend) -> None:
    outputs, digest = probed_and_committed(linear())
    assert abacus.passes == 2
    sys.modules.pop("cyber0.directions.backends.cpu")
    backends.backend_for.cache_clear()
    expected, expected_digest = probed_and_committed(linear())
    assert abacus.passes == 2
    assert torch.equal(outputs, expected) and digest == expected_digest


@pytest.mark.parametrize("name", RULES)
def test_a_backend_without_a_kernel_for_vectors_gives_the_same_bits_chunk_by_chunk(
    name: str, abacus: DefinitionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DefinitionBackend, "chunk", 50)

    def committed() -> tuple[str, str]:
        parameters, optimizer = linear(), optimizers.make(name)
        parameters.hold_vectors(optimizer.vectors)
        state = optimizer.start()
        for t in range(3):
            update = optimizer.step(state, 0.1, np.float32([t - 1.0, 2.0]), 2)
            state = update.state
            parameters.commit(Step(3, t, update.coefficients, elementwise=update.elementwise))
        return parameters.digest(), parameters.vectors_digest()

    found = committed()
    assert abacus.passes == 3 * 2 * 3  # steps, for each of the chunks: u, and the weights
    sys.modules.pop("cyber0.directions.backends.cpu")
    backends.backend_for.cache_clear()
    assert committed() == found and abacus.passes == 18


def test_a_distribution_is_one_entry_of_the_definition(
    abacus: DefinitionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thirds(seed: int, round: int, index: int, start: int, count: int) -> Any:
        return (definition.DISTRIBUTIONS["rademacher"].coordinates(seed, round, index, start, count) / 3).astype("f4")

    new = definition.Distribution("signs, divided by three", thirds)
    monkeypatch.setitem(definition.DISTRIBUTIONS, "thirds", new)  # type: ignore[arg-type]
    assert choices.DISTRIBUTIONS["thirds"] == "signs, divided by three"
    assert Config.from_dict({"method": {"distribution": "thirds"}}).method.distribution == "thirds"
    parameters = Parameters(nn.Linear(40, 3), "thirds")
    before = parameters.vector()
    parameters.commit(STEP)
    z = torch.from_numpy(definition.reference(3, 5, 0, 0, 123, "thirds"))
    y = torch.from_numpy(definition.reference(3, 5, 1, 0, 123, "thirds"))
    assert torch.equal(parameters.vector(), before - (0.5 * z + -0.25 * y))


def test_a_distribution_without_a_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussian = definition.DISTRIBUTIONS["gaussian"]
    monkeypatch.setitem(definition.DISTRIBUTIONS, "thirds", gaussian)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the CPU backend has no kernel for distribution 'thirds': it has gaussian"):
        engine.fill(torch.empty(3), 0, 1, 2, 3, DirectionSpace("thirds", 3))


def test_kernels_know_the_rules_of_the_definition() -> None:
    assert set(moment_kernels.CODES) == set(moment_tensors.RULES) == set(RULES)


def test_kernels_settings_and_ledgers_know_the_distributions_of_the_definition() -> None:
    names = set(definition.DISTRIBUTIONS)
    assert set(CODES) == set(choices.DISTRIBUTIONS) == set(DEFINITIONS["distribution"]) == names


@pytest.mark.parametrize("distribution", definition.DISTRIBUTIONS)
def test_the_factor_undoes_the_second_moment_of_a_coordinate(distribution: str) -> None:
    d = 50
    space = some_space(distribution, d)
    z = np.stack([space.coordinates(1, 2, j, 0, d) for j in range(400)])
    assert space.factor * float(np.mean(z.astype(np.float64) ** 2)) == pytest.approx(1.0, rel=0.03)


# Names of devices.


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", ("cpu", None)), ("cuda", ("cuda", None)), ("cuda:0", ("cuda", 0)),
                             ("cuda:12", ("cuda", 12))]
)  # fmt: skip
def test_a_device_is_a_type_and_maybe_a_number(device: str, expected: tuple[str, int | None]) -> None:
    assert parse_device(device) == expected
    assert Config(device=device).device == device


@pytest.mark.parametrize(
    "device", ["tpu", "CUDA", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "cpu:0", "cuda:1:2", "", "my.py:cuda"]
)
def test_an_unknown_device_is_refused_with_the_valid_ones(device: str) -> None:
    for check in (parse_device, check_device, lambda name: Config(device=name)):
        with pytest.raises(ConfigError, match=r"device = .* is not a choice; possible are cpu, cuda, cuda:N"):
            check(device)


def test_another_word_for_a_device_is_understood() -> None:
    with pytest.raises(ConfigError, match=r"possible are cpu, cuda, cuda:N; did you mean 'cuda'\?"):
        parse_device("gpu")


def test_a_number_that_the_machine_does_not_have_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device("cuda")
    check_device("cuda:0")
    with pytest.raises(ConfigError, match=r'device = "cuda:7", but this machine has 1 CUDA GPU: use cuda:0 or "cpu"'):
        check_device("cuda:7")


def test_a_device_of_a_new_backend_is_checked_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.DEVICES, "abacus", "beads")
    home = SimpleNamespace(BACKEND=DefinitionBackend())
    monkeypatch.setitem(sys.modules, "cyber0.directions.backends.abacus", home)
    check_device("abacus:1")
    with pytest.raises(ConfigError, match=r"has 2 abacus: use abacus:0, abacus:1 or"):
        check_device("abacus:2")
    assert Config(device="abacus:1").device == "abacus:1"


def test_tensors_on_a_device_without_a_backend_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="no backend for tensors on 'meta'; move them to cpu or cuda"):
        engine.fill(torch.empty(3, device="meta"), 0, 1, 2, 3, DirectionSpace("gaussian", 3))
