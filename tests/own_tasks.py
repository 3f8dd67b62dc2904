"""Tasks as a user writes them, for the tests; test_own_task.py runs them by path."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import cyber0

CLASSES = 4


def blobs(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 4 x 4 pictures of four classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, CLASSES, (samples,), generator=generator)
    return centres[targets] + torch.randn(samples, 1, 4, 4, generator=generator), targets


class Pictures(cyber0.Task):
    """A convolutional network with batch normalisation and dropout."""

    def __init__(self, width: int = 4, samples: int = 160) -> None:
        self.width, self.samples = width, samples

    def model(self) -> nn.Module:
        norm = nn.BatchNorm2d(self.width)
        norm.running_mean.normal_()
        return nn.Sequential(nn.Conv2d(1, self.width, 3, padding=1), norm, nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
                             nn.Linear(16 * self.width, CLASSES))  # fmt: skip

    def train_data(self) -> object:
        return blobs(self.samples, 2)

    def test_data(self) -> object:
        return blobs(60, 3)


class Line(cyber0.Task):
    """A regression without classes, on NumPy arrays, with a loss that can't be differentiated."""

    best = "-error"

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_data(self) -> object:
        inputs = np.random.default_rng(0).normal(size=(96, 3))
        return inputs, inputs @ np.array([1.0, -2.0, 0.5])

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> object:
        return np.abs(outputs[:, 0].numpy() - targets.numpy())

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, object]:
        return {"error": (outputs[:, 0] - targets).square().mean().sqrt(), "rows": len(targets)}


class Codes(cyber0.Task):
    """No targets at all: an autoencoder, on a dictionary of tensors."""

    def model(self) -> nn.Module:
        class Coder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(6, 2)
                self.outer = nn.Linear(2, 6)

            def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
                both = torch.cat([left, right], 1)
                return self.outer(self.inner(both)) - both

        return Coder()

    def train_data(self) -> object:
        generator = torch.Generator().manual_seed(5)
        return {"left": torch.randn(64, 2, generator=generator), "right": torch.randn(64, 4, generator=generator)}, None

    def losses(self, outputs: torch.Tensor, targets: None) -> torch.Tensor:
        assert targets is None
        return outputs.square().mean(1)


given = cyber0.Task.of(nn.Linear(3, 2), (torch.eye(3).repeat(20, 1), torch.arange(60) % 2))
neither = "a string"


class Changeable(cyber0.Task):
    """Has an attribute of the class that anybody may change."""

    noise = 0.0

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2)

    def train_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.eye(3).repeat(20, 1) + self.noise, torch.arange(60) % 2
