"""What the demo learns: MNIST if it is cached, otherwise digits drawn here, so that nothing is ever downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0.directions import Stream, words
from cyber0.tasks import mnist
from cyber0.tasks.mnist import Arrays, Mnist, Pixels

TRAIN, TEST = 6_000, 2_000
SIDE = 28
FONTS = ("DejaVuSans", "DejaVuSans-Oblique", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono")
SMALLEST, LARGEST = 22, 26  # of the fonts, in pixels
TURN, SHIFT, NOISE = 12.0, 1.8, 48.0  # at most: degrees, pixels, and shades of grey of 255


class Source(NamedTuple):
    """What is learned, and what to call it."""

    task: Mnist
    text: str


def choose() -> Source:
    """Return MNIST if this machine has it, otherwise drawn digits."""
    if mnist.cache_path().exists():
        arrays = mnist.load()
        return Source(Mnist(arrays=arrays), f"MNIST: {len(arrays.train_labels):,} handwritten digits")
    arrays = drawn_digits()
    text = f"{len(arrays.train_labels):,} digits drawn from fonts, since MNIST is not cached (cyber0 data mnist)"
    return Source(Mnist(arrays=arrays), text)


def drawn_digits(train: int = TRAIN, test: int = TEST, seed: int = 0) -> Arrays:
    """Return images of MNIST's shape: digits in several fonts and sizes, turned, shifted, with noise."""
    images, labels = _draw(train + test, seed)
    return Arrays(images[:train], labels[:train], images[train:], labels[train:])


def _draw(count: int, seed: int) -> tuple[Pixels, NDArray[np.int64]]:
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont  # comes with matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    sizes = range(SMALLEST, LARGEST + 1)
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), size) for name in FONTS for size in sizes]
    labels = np.arange(count) % mnist.CLASSES
    chance = (words(seed, Stream.DATA, 0, 0, 0, 4 * count) * 2.0**-32).reshape(count, 4)
    images = np.empty((count, SIDE * SIDE), np.uint8)
    for at, (font, turn, right, down) in enumerate(chance.tolist()):
        image = Image.new("L", (SIDE, SIDE))
        middle = (SIDE / 2 + (2 * right - 1) * SHIFT, SIDE / 2 + (2 * down - 1) * SHIFT)
        ImageDraw.Draw(image).text(middle, str(labels[at]), 255, fonts[int(font * len(fonts))], "mm")
        turned = image.rotate((2 * turn - 1) * TURN, Image.Resampling.BILINEAR)
        images[at] = np.asarray(turned).reshape(-1)
    grey = words(seed, Stream.DATA, 0, 1, 0, images.size).reshape(images.shape) * (2.0**-32 * NOISE)
    return np.minimum(images + grey, 255).astype(np.uint8), labels
