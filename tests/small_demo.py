"""A demo whose task is small, for tests."""

from __future__ import annotations

import numpy as np

from cyber0.demo.data import Source
from cyber0.demo.session import Session
from cyber0.tasks.mnist import Arrays, Mnist


def small_source() -> Source:
    """Return images of MNIST's shape that are easy to tell apart: a bright patch for each digit."""
    rng = np.random.default_rng(3)
    labels = np.arange(600) % 10
    images = rng.integers(0, 60, (600, 784))
    for digit in range(10):
        images[labels == digit, 70 * digit : 70 * digit + 70] += 180
    pixels = images.astype(np.uint8)
    return Source(Mnist(arrays=Arrays(pixels[:480], labels[:480], pixels[480:], labels[480:])), "600 patches")


def small_session(rounds: int = 40) -> Session:
    """Return a session on these images."""
    return Session(small_source(), rounds)
