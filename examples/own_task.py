"""Your own model and data: a small convolutional network on idx files, such as MNIST's or Fashion-MNIST's.

    cyber0 run examples/own_task.py:Pictures --set task.options.data=FOLDER

FOLDER holds train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte,
gzipped or not. Fashion-MNIST's are at https://github.com/zalandoresearch/fashion-mnist, and in the package
dataset-fashion-mnist of Debian and Ubuntu, which puts them into /usr/share/datasets/fashion-mnist.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import nn

import cyber0


class Pictures(cyber0.Task):
    """Pictures of 28 x 28 pixels in ten classes.

    The keyword arguments of the constructor are the settings `task.options.data` and `task.options.width`.
    """

    best = "accuracy"  # best_round in summary.json is the round with the highest accuracy; by default, the lowest loss

    def __init__(self, data: str, width: int = 8) -> None:
        self.data, self.width = Path(data).expanduser(), width

    def model(self) -> nn.Module:
        # Losses are computed in eval mode and buffers never change: dropout does nothing, and batch normalisation keeps
        # the running mean and variance it starts with.
        return nn.Sequential(
            nn.Conv2d(1, self.width, 5, stride=2, padding=2), nn.BatchNorm2d(self.width), nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 5, stride=2, padding=2), nn.BatchNorm2d(2 * self.width), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.5), nn.Linear(98 * self.width, 10),
        )  # fmt: skip

    def train_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read("train")

    def test_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read("t10k")

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        right = outputs.argmax(1) == targets
        by_class = [right[targets == c].double().mean() for c in range(10) if (targets == c).any()]
        return {"accuracy": float(right.double().mean()), "worst_class": float(min(by_class))}

    def _read(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        images = read_idx(self.data / f"{name}-images-idx3-ubyte", header=16).view(-1, 1, 28, 28)
        return (images.float() - 128) / 64, read_idx(self.data / f"{name}-labels-idx1-ubyte", header=8)


class Perceptron(Pictures):
    """The same pictures for a network with one hidden layer of `width` units."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, self.width), nn.ReLU(), nn.Linear(self.width, 10))


def read_idx(path: Path, header: int) -> torch.Tensor:
    """Return the bytes of an idx file after its header."""
    zipped = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(zipped.read_bytes()) if zipped.exists() else path.read_bytes()
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8)
