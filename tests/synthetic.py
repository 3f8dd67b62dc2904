"""A tiny task for fast tests: Gaussian blobs, and models of every kind that the estimates must get right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import cyber0
from cyber0.config.schema import Config
from cyber0.directions import Directions, DirectionSpace
from cyber0.estimate.batches import Batch
from cyber0.ledger import Record

FEATURES, CLASSES = 16, 4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and on a busy machine threads that wait for each other cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Conv(nn.Module):
    """The features as a 4 x 4 picture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.head = nn.Linear(3 * FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.conv(x.view(-1, 1, 4, 4))).flatten(1))


class Attention(nn.Module):
    """The features as four tokens of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, 4, 4)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(self.norm(tokens + mixed).mean(1))


class Layer(nn.Module):
    """A transformer layer, as PyTorch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x.view(-1, 4, 4)).mean(1))


class Tied(nn.Module):
    """One weight at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branching(nn.Module):
    """Looks at its values to decide what to do, which vmap can't."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if float(hidden.detach().sum()) > 1e9:
            hidden = hidden * 2
        return self.head(torch.tanh(hidden))


class HalfUsed(nn.Module):
    """Has weights that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.used = nn.Linear(FEATURES, CLASSES)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(x))


class FrozenBackbone(nn.Module):
    """A trained linear head on a backbone that stays as it is; counts how often it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.backbone(x))


MODELS: dict[str, Any] = {
    "linear": lambda: nn.Linear(FEATURES, CLASSES),
    "no bias": lambda: nn.Linear(FEATURES, CLASSES, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "conv": Conv,
    "attention": Attention,
    "layer": Layer,
    "tied": Tied,
    "branching": Branching,
    "half used": HalfUsed,
    "frozen backbone": FrozenBackbone,
    "inplace": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.ReLU(inplace=True)),
}


def make_model(kind: str, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a model at a starting point that the seed decides, without touching torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[kind]().to(getattr(torch, dtype)).eval()


class Blobs:
    """Gaussian blobs around one centre a class."""

    name = "blobs"
    classes = CLASSES

    def __init__(self, kind: str = "linear", samples: int = 480, spread: float = 1.2) -> None:
        self.kind = kind
        rng = np.random.default_rng(7)
        centres = rng.normal(size=(CLASSES, FEATURES))
        self.labels: NDArray[Any] = np.arange(2 * samples) % CLASSES
        points = torch.from_numpy(centres[self.labels] + spread * rng.normal(size=(2 * samples, FEATURES))).float()
        targets = torch.from_numpy(self.labels)
        self.train_inputs, self.test_inputs = points[:samples], points[samples:]
        self.train_targets, self.test_targets = targets[:samples], targets[samples:]
        self.labels = self.labels[:samples]

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        return make_model(self.kind, seed, dtype)

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def outputs(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(inputs.to(next(model.parameters()).dtype))
        return result

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.float(), targets, reduction="none")

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            outputs = self.outputs(model, self.test_inputs)
            loss = self.losses(outputs, self.test_targets).double().mean()
            accuracy = (outputs.argmax(1) == self.test_targets).double().mean()
        return float(loss), float(accuracy)

    def to(self, device: torch.device | str) -> Self:
        return self

    def batch(self, *counts: int) -> Batch:
        """Return the first samples, dealt to clients that have so many each."""
        total = sum(counts)
        return Batch(self.train_inputs[:total], self.train_targets[:total], np.array(counts, dtype=np.int64))


class After:
    """A callback that raises when so many rounds are done."""

    def __init__(self, rounds: int, error: BaseException) -> None:
        self.rounds, self.error = rounds, error

    def on_round(self, record: Record) -> None:
        if record.round + 1 >= self.rounds:
            raise self.error


def config(*overrides: str) -> Config:
    """Return settings that suit the blobs, some of them replaced."""
    base = ["rounds=30", "method.k=8", "method.lr=0.1", "method.batch_size=16", "evaluate_every=10"]
    return Config().with_overrides([*base, *overrides])


class OwnBlobs(cyber0.Task):
    """The blobs as a user writes a task, for configs that name it by its path."""

    def __init__(self, kind: str = "linear", *, penalised: bool = False) -> None:
        self.kind, self.penalised, self.blobs = kind, penalised, Blobs()

    def model(self) -> nn.Module:
        model: nn.Module = MODELS[self.kind]()
        return model

    def train_data(self) -> object:
        return self.blobs.train_inputs, self.blobs.train_targets

    def test_data(self) -> object:
        return self.blobs.test_inputs, self.blobs.test_targets

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """With a penalty, under which too large a learning rate diverges instead of standing still, if so asked."""
        return outputs.float().square().sum(1) if self.penalised else self.blobs.losses(outputs, targets)


class OtherBlobs(OwnBlobs):
    """The same samples, another model."""

    def __init__(self) -> None:
        super().__init__("mlp")


HERE = Path(__file__).resolve()
OWN_BLOBS, OTHER_BLOBS = f"{HERE}:OwnBlobs", f"{HERE}:OtherBlobs"


def own_config(*overrides: str) -> Config:
    """Return the same settings of a run that learns the blobs by their path, as those of a command line."""
    return config(f"task.name={OWN_BLOBS}", *overrides)


def direction(model: nn.Module, directions: Directions, r: int, distribution: str) -> NDArray[np.float32]:
    """Return the r-th direction, from the definition."""
    space = DirectionSpace.of(distribution, [p.shape for p in model.parameters() if p.requires_grad])
    return space.coordinates(directions.seed, directions.round, directions.first + r, 0, space.dimension)


def moved(model: nn.Module, by: NDArray[np.float32]) -> nn.Module:
    """Return a deep copy whose trainable weights were moved by a vector."""
    other, begin = copy.deepcopy(model), 0
    with torch.no_grad():
        for p in other.parameters():
            if p.requires_grad:
                part = torch.from_numpy(by[begin : begin + p.numel()]).view(p.shape)
                p.copy_(p.float() + part)
                begin += p.numel()
    return other


def split(batch: Batch) -> list[Batch]:
    """Return every client's samples on their own."""
    ends = np.cumsum(batch.counts)
    return [
        Batch(batch.inputs[e - n : e], batch.targets[e - n : e], np.array([n]))
        for e, n in zip(ends.tolist(), batch.counts.tolist(), strict=True)
    ]


def plain_two_point(
    model: nn.Module, task: Blobs, batch: Batch, directions: Directions, mu: float, distribution: str = "gaussian"
) -> NDArray[np.float64]:
    """The two-point estimate by deep copies, one direction and one sign after another."""
    return _plain_difference(model, task, batch, directions, mu, distribution, other=-1)


def plain_one_sided(
    model: nn.Module, task: Blobs, batch: Batch, directions: Directions, mu: float, distribution: str = "gaussian"
) -> NDArray[np.float64]:
    """The one-sided estimate by deep copies, one direction after another."""
    return _plain_difference(model, task, batch, directions, mu, distribution, other=0)


def _plain_difference(
    model: nn.Module, task: Blobs, batch: Batch, directions: Directions, mu: float, distribution: str, other: int
) -> NDArray[np.float64]:
    """The difference of the losses at w + mu z and at w + other mu z, over their distance."""
    step = np.float32(mu)
    factor = sum(p.numel() for p in model.parameters() if p.requires_grad) if distribution == "sphere" else 1
    ends = np.cumsum(batch.counts)
    matrix = np.empty((len(batch.counts), directions.k))
    for r in range(directions.k):
        z = direction(model, directions, r, distribution)
        with torch.no_grad():
            plus, minus = (
                task.losses(task.outputs(moved(model, c * z), batch.inputs), batch.targets).double().numpy()
                for c in (step, other * step)
            )
        for i, (end, count) in enumerate(zip(ends, batch.counts, strict=True)):
            means = [side[end - count : end].mean() for side in (plus, minus)]
            matrix[i, r] = factor * (means[0] - means[1]) / ((1 - other) * float(step))
    return matrix


def plain_slopes(
    model: nn.Module, task: Blobs, batch: Batch, directions: Directions, distribution: str = "gaussian"
) -> NDArray[np.float64]:
    """<grad f_i, z_r> by autograd on a float64 copy, client by client."""
    exact = copy.deepcopy(model).double()
    trained = [p for p in exact.parameters() if p.requires_grad]
    factor = sum(p.numel() for p in trained) if distribution == "sphere" else 1
    rows = []
    for part in split(batch):
        outputs = exact(part.inputs.double())
        loss = nn.functional.cross_entropy(outputs, part.targets)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        flat = torch.cat(
            [torch.zeros(p.numel()) if g is None else g.reshape(-1) for p, g in zip(trained, gradients, strict=True)]
        ).numpy()
        rows.append([factor * float(flat @ direction(model, directions, r, distribution)) for r in range(directions.k)])
    return np.array(rows)
