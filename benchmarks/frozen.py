"""A curious federator: it keeps the weights where they are, and solves for a client's gradient. For siege.py and tests.

Every answer is k projections of one gradient on directions that the federator knows. If the weights stay where they are
and the batch is all that the client has, the gradient stays too, and as many answers as there are weights determine it.
That of a linear model on a few images gives back the images.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.directions import reference
from cyber0.ledger import Header, first_chain, next_chain, opening_of
from cyber0.ledger.record import DETAILS_BYTES, Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.messages import Opened, decode_report, encode_decision, encode_opened

PIXELS, CLASSES = 784, 10
_FIXED_POINT_STEPS = 100

Matrix = NDArray[np.float64]
Answer = Callable[[bytes], bytes | None]
"""A participant's `receive`."""


class FrozenFederator:
    """Announces one round after the other and abandons each, or decides scalars that are next to nothing.

    Args:
        header: Of the run; its learning rate is constant.
        decided: What each round decides; None: it is abandoned.
    """

    def __init__(self, header: Header, decided: float | None = None) -> None:
        self.header, self.chain, self.round = header, first_chain(header), 0
        self.projections: list[Matrix] = []
        """The scalars of each answered round."""
        self._decided = None if decided is None else np.full(header.scalars, decided, np.float32)
        self._codec = codecs.make(header.codec)

    @property
    def scalars(self) -> int:
        """How many projections are known."""
        return sum(map(len, self.projections))

    def opened(self) -> bytes:
        """Return the announcement of the round."""
        return encode_opened(Opened(self.round, self.chain, self.header.rounds))

    def decision(self) -> bytes:
        """Return the message that ends the round and announces the next."""
        decision = Decision(self.round, self.header.lr, self._decided, bytes(DETAILS_BYTES), self.header.rounds)
        self.chain, self.round = next_chain(self.chain, decision), self.round + 1
        return encode_decision(decision, self._codec)

    def take(self, answer: bytes) -> bytes:
        """Store an answer to the open round, and return what ends it."""
        report = decode_report(answer, 0, self.header.scalars, self._codec)
        assert report.round == self.round
        self.projections.append(report.values.astype(np.float64))
        return self.decision()

    def collect(self, receive: Answer, rounds: int) -> None:
        """Have a participant answer so many rounds; what it raises ends this."""
        message = self.opened()
        for _ in range(rounds):
            answer = receive(message)
            assert answer is not None
            message = self.take(answer)

    def gradient(self) -> Matrix:
        """Return the shortest gradient that has these projections, or the one that fits them best."""
        header = self.header
        directions = np.empty((self.scalars, header.dimension))
        for row, place in enumerate(np.ndindex(len(self.projections), header.scalars)):
            directions[row] = reference(
                header.seed, *place, 0, header.dimension, header.distribution, dimension=header.dimension
            )
        return least_squares(directions, np.concatenate(self.projections))


def least_squares(directions: Matrix, measured: Matrix) -> Matrix:
    """Solve `directions` x = `measured`, in the sense of least squares; of many solutions the shortest."""
    rows, columns = directions.shape
    if rows < columns:
        return directions.T @ np.linalg.solve(directions @ directions.T, measured)
    return np.linalg.solve(directions.T @ directions, directions.T @ measured)


def relative_error(found: Matrix, true: Matrix) -> float:
    """Return ||found - true|| / ||true||; 1 is what knowing nothing gives."""
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


@contextlib.asynccontextmanager
async def listening(federator: FrozenFederator, certs: Path, wanted: int) -> AsyncIterator[int]:
    """Have it collect so many scalars over mutual TLS on a free port of loopback; yields the port."""
    import grpc
    import grpc.aio

    from cyber0.serve import tls as certificates
    from cyber0.serve.transport import SERVICE

    async def rounds(requests: Any, context: Any) -> None:
        await context.read()
        await context.write(federator.opened())
        while federator.scalars < wanted and isinstance(answer := await context.read(), bytes):
            await context.write(federator.take(answer))

    async def describe(request: bytes, context: Any) -> bytes:
        return opening_of(federator.header)

    server = grpc.aio.server()
    calls = {"Describe": grpc.unary_unary_rpc_method_handler(describe),
             "Rounds": grpc.stream_stream_rpc_method_handler(rounds)}  # fmt: skip
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
    mine = certificates.load(certs, "server")
    secured = grpc.ssl_server_credentials([(mine.key, mine.certificate)], mine.authority, require_client_auth=True)
    port = server.add_secure_port("localhost:0", secured)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


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
