"""What a federator appends its decisions to: a ledger, or the last record alone where checkpoints keep progress."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cyber0.errors import ProtocolError
from cyber0.ledger.record import Record


class Agreed(Protocol):
    """What a federator must know of what was agreed on."""

    @property
    def seed(self) -> int: ...

    @property
    def clients(self) -> int: ...

    @property
    def scalars(self) -> int: ...

    @property
    def codec(self) -> str: ...


class Log(Protocol):
    """Where a federator's decisions go: a ledger, or what stands in for one."""

    @property
    def header(self) -> Agreed: ...

    @property
    def next_round(self) -> int: ...

    @property
    def last(self) -> Record | None: ...

    @property
    def chain(self) -> bytes: ...

    def append(self, record: Record) -> Record:
        """Take the record of the next round; return it with the hash that the log has reached, if it has one."""
        ...

    def __iter__(self) -> Iterator[Record]: ...


class LastRecord:
    """A log that holds no more than the last record."""

    def __init__(self, header: Agreed) -> None:
        self.header = header
        self.next_round = 0
        self.last: Record | None = None
        self.chain = b""

    def append(self, record: Record) -> Record:
        if record.round != self.next_round:
            raise ProtocolError(f"the next round is {self.next_round}, not {record.round}")
        self.last, self.next_round = record, record.round + 1
        return record

    def __iter__(self) -> Iterator[Record]:
        return iter(())


def trim_counts(ledger: Log) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, per client, how many of its scalars were trimmed and how many it sent, in all decided rounds.

    A client that is trimmed far more often than the others is probably Byzantine.
    """
    trimmed = np.zeros(ledger.header.clients, np.int64)
    sent = np.zeros(ledger.header.clients, np.int64)
    for record in ledger:
        if record.values is not None:
            trimmed += record.trimmed
            sent += record.reported
    return trimmed, sent * ledger.header.scalars
