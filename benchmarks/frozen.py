"""A federator that keeps the weights where they are and collects one gradient, scalar by scalar; for siege.py.

It announces round after round and never moves w: every report is k more projections of the same gradient on directions
that it can draw itself. As many of them as there are weights give back the gradient, and that of a linear model on a
few images gives back the images.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from cyber0.directions import Stream, words
from cyber0.directions.definition import gaussian_from_words
from cyber0.ledger import Header, first_chain, next_chain, opening_of
from cyber0.ledger.record import DETAILS_BYTES, Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.messages import Opened, decode_hello, decode_report, encode_decision, encode_opened
from cyber0.serve import tls as certificates
from cyber0.serve.transport import SERVICE

PIXELS, CLASSES = 784, 10
_CG_STEPS, _CG_ACCURACY = 200, 1e-5
_FIXED_POINT_STEPS = 100

Matrix = NDArray[np.float64]


class FrozenFederator:
    """Abandons every round, or decides on zeros, until it has `wanted` scalars of each client."""

    def __init__(self, header: Header, wanted: int, *, zeros: bool) -> None:
        self.reports: dict[int, NDArray[np.float32]] = {}
        """What was reported, by round."""
        self.full = False
        self._header, self._wanted = header, wanted
        self._values = np.zeros(header.scalars, np.float32) if zeros else None
        self._codec = codecs.make(header.codec)
        self._chain = first_chain(header)

    @property
    def scalars(self) -> int:
        """How many scalars it has collected."""
        return len(self.reports) * self._header.scalars

    def _decide(self, number: int) -> bytes:
        header = self._header
        rounds = int(header.config["rounds"])
        decision = Decision(number, header.lr, self._values, bytes(DETAILS_BYTES), rounds)
        self._chain = next_chain(self._chain, decision)
        return encode_decision(decision, self._codec)

    async def _rounds(self, requests: Any, context: Any) -> None:
        number = decode_hello(await context.read()).round
        await context.write(encode_opened(Opened(number, self._chain, int(self._header.config["rounds"]))))
        while isinstance(frame := await context.read(), bytes):
            report = decode_report(frame, 0, self._header.scalars, self._codec)
            self.reports[report.round] = report.values
            self.full = self.scalars >= self._wanted
            if self.full:
                return
            await context.write(self._decide(report.round))

    async def _describe(self, request: bytes, context: Any) -> bytes:
        return opening_of(self._header)

    @contextlib.asynccontextmanager
    async def listening(self, certs: Path) -> AsyncIterator[int]:
        """Listen with mutual TLS on a free port of loopback, and yield it."""
        server = grpc.aio.server()
        calls = {"Describe": grpc.unary_unary_rpc_method_handler(self._describe),
                 "Rounds": grpc.stream_stream_rpc_method_handler(self._rounds)}  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
        mine = certificates.load(certs, "server")
        secured = grpc.ssl_server_credentials([(mine.key, mine.certificate)], mine.authority, require_client_auth=True)
        port = server.add_secure_port("localhost:0", secured)
        await server.start()
        try:
            yield port
        finally:
            await server.stop(None)

    def gradient(self) -> Matrix:
        """Return the gradient of least squares by what was reported, the shortest if that is not enough."""
        header = self._header
        dimension = sum(entry.size for entry in header.layout)
        directions = np.empty((self.scalars, dimension), np.float32)
        for place, number in enumerate(sorted(self.reports)):
            for index in range(header.k):
                drawn = words(header.seed, Stream.DIRECTIONS, number, index, 0, dimension)
                directions[place * header.k + index] = gaussian_from_words(drawn)
        return least_squares(directions, np.concatenate([self.reports[n] for n in sorted(self.reports)]))


def least_squares(directions: NDArray[np.float32], measured: NDArray[np.float32]) -> Matrix:
    """Solve `directions` x = `measured` by conjugate gradients; of many solutions the shortest."""
    x = np.zeros(directions.shape[1])
    rest = measured.astype(np.float64)
    slope = (directions.T @ rest.astype(np.float32)).astype(np.float64)
    step, size = slope.copy(), slope @ slope
    first = size
    for _ in range(_CG_STEPS):
        if size <= _CG_ACCURACY**2 * first:
            break
        image = (directions @ step.astype(np.float32)).astype(np.float64)
        length = size / (image @ image)
        x += length * step
        rest -= length * image
        slope = (directions.T @ rest.astype(np.float32)).astype(np.float64)
        size, before = slope @ slope, size
        step = slope + size / before * step
    return x


def relative_error(found: Matrix, true: Matrix) -> float:
    """Return ||found - true|| / ||true||."""
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


# Logistic regression on a few images, one of each label: 0, 1, ...


def linear_gradient(weights: Matrix, images: Matrix) -> Matrix:
    """Return the gradient of the mean loss, that of the bias last."""
    blame = _blame(weights, images)
    return np.concatenate([(blame.T @ images).ravel(), blame.sum(0)])


def images_from(gradient: Matrix, weights: Matrix, count: int) -> Matrix:
    """Return the images whose gradient that is: those that the blame of the last guess explains it by, repeatedly."""
    wanted, guess = gradient[: CLASSES * PIXELS].reshape(CLASSES, PIXELS), np.zeros((count, PIXELS))
    for _ in range(_FIXED_POINT_STEPS):
        guess = np.linalg.pinv(_blame(weights, guess).T) @ wanted
    return guess


def _blame(weights: Matrix, images: Matrix) -> Matrix:
    """Return by how much each image pulls at each logit: (softmax - label) / n."""
    logits = images @ weights[: CLASSES * PIXELS].reshape(CLASSES, PIXELS).T + weights[CLASSES * PIXELS :]
    odds = np.exp(logits - logits.max(1, keepdims=True))
    pull: Matrix = odds / odds.sum(1, keepdims=True) - np.eye(CLASSES)[: len(images)]
    return pull / len(images)


def write_images(folder: Path, count: int) -> Path:
    """Write files like MNIST's with an image of each label: a few strokes of light on dark."""
    folder.mkdir()
    generator = np.random.default_rng(5)
    across, down = np.meshgrid(np.arange(28), np.arange(28))
    images = np.zeros((count, 28, 28))
    for image in images:
        for x, y, wide, high in generator.uniform((6, 6, 1, 1), (22, 22, 4, 4), (5, 4)):
            image += 255 * np.exp(-(((across - x) / wide) ** 2) - ((down - y) / high) ** 2)
    pixels = np.clip(images, 0, 255).astype(np.uint8)
    for name in ("train", "t10k"):
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        labels = struct.pack(">II", 0x801, count) + bytes(range(count))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return folder
