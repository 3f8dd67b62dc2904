"""A curious federator: it keeps the weights where they are, and solves for a client's gradient.

Every answer is k projections of one gradient on directions that the federator knows. If the weights stay where they are
and the batch is all that the client has, the gradient stays too, and as many answers as there are weights determine it.
Of a linear model with few samples that is the samples themselves, up to their weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cyber0.directions import reference
from cyber0.ledger import Header, first_chain, next_chain
from cyber0.ledger.record import Decision
from cyber0.protocol import codec as codecs
from cyber0.protocol.messages import Opened, decode_report, encode_decision, encode_opened

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
        self.projections: list[NDArray[np.float64]] = []
        """The scalars of each answered round."""
        self._decided = None if decided is None else np.full(header.scalars, decided, np.float32)

    @property
    def scalars(self) -> int:
        """How many projections are known."""
        return sum(map(len, self.projections))

    def opened(self) -> bytes:
        """Return the announcement of the round."""
        return encode_opened(Opened(self.round, self.chain, self.header.rounds))

    def decision(self) -> bytes:
        """Return the message that ends the round and announces the next."""
        decision = Decision(self.round, self.header.lr, self._decided, bytes(16), self.header.rounds)
        self.chain, self.round = next_chain(self.chain, decision), self.round + 1
        return encode_decision(decision, codecs.make(self.header.codec))

    def collect(self, receive: Answer, rounds: int) -> None:
        """Have a participant answer so many rounds; what it raises ends this."""
        message = self.opened()
        for _ in range(rounds):
            answer = receive(message)
            assert answer is not None
            report = decode_report(answer, 0, self.header.scalars, codecs.make(self.header.codec))
            assert report.round == self.round
            self.projections.append(report.values.astype(np.float64))
            message = self.decision()

    def gradient(self) -> NDArray[np.float64]:
        """Return the shortest gradient that has these projections."""
        header = self.header
        directions = [
            reference(header.seed, t, j, 0, header.dimension, header.distribution, dimension=header.dimension)
            for t in range(len(self.projections))
            for j in range(header.scalars)
        ]
        found = np.linalg.lstsq(np.array(directions, np.float64), np.concatenate(self.projections), rcond=None)
        gradient: NDArray[np.float64] = found[0]
        return gradient


def relative_error(found: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    """Return ||found - true|| / ||true||; 1 is what knowing nothing gives."""
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))
