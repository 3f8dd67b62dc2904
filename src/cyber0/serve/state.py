"""What a participant stores between its starts: which run, its private seed, the last hash it saw; snapshots of w.

In a folder these are

state.json            run id, client, the private seed that its batches are drawn with
seen.bin              u32 round | 32 bytes chain | stall | u32 CRC-32, written in place every round; earlier versions
                      wrote none of the stall, which is what a client has sent while w stood still (conduct.py):
                      u32 answered | u64 scalars | f64 moved | f64 squares
snapshot.safetensors  the weights after some round, so that a restart replays less
evidence-ROUND.json   what a federator did that was not agreed on; until it is deleted, nothing starts here
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import struct
import zlib
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors.torch import load as deserialise
from safetensors.torch import save as serialise

from cyber0.errors import LedgerError
from cyber0.model.vector import Parameters
from cyber0.protocol.client import Client
from cyber0.serve.conduct import Stall
from cyber0.serve.snapshots import Snapshot, SnapshotError, about, held, load_snapshot, make_snapshot, save_snapshot
from cyber0.storage import write_text
from cyber0.storage.disk import lock_handle

STATE_FILE, SEEN_FILE, SNAPSHOT_FILE = "state.json", "seen.bin", "snapshot.safetensors"
RECORD_BYTES = (
    16 << 20
)  # of weights and vectors in a record, at most: the record travels between processes with every message
_LARGEST_ITEM = 4
_SEEN = struct.Struct("<I32sIQdd")
_OLD_SEEN = struct.Struct("<I32s")
_CRC = struct.Struct("<I")
_LARGEST_COUNT = (1 << 32) - 1
_RECORD = "the node's record"


class Seen(NamedTuple):
    """The last hash of a ledger that a participant saw: after how many rounds, and the hash."""

    round: int
    chain: bytes


class Evidence(NamedTuple):
    """What a federator did that was not agreed on."""

    run: bytes
    client: int
    header: str
    """As canonical JSON."""
    round: int
    """That the participant had reached, and the chain before it."""
    chain: bytes
    message: bytes
    text: str
    """What was agreed on, and what came."""

    def write(self, path: Path) -> str:
        """Write a JSON file in whole or not at all; return its path."""
        fields = {name: value.hex() if isinstance(value, bytes) else value for name, value in self._asdict().items()}
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_text(path, json.dumps({"time": time, **fields}, indent=1) + "\n")
        return str(path)


class ParticipantState(Protocol):
    """What a participant of one run remembers, wherever that is stored."""

    seed: int
    """The private seed of its batches."""
    seen: Seen | None
    """The last hash of the ledger that it saw."""
    stall: Stall
    """What it has sent while the weights stood still."""

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that were saved are there at the next start."""
        ...

    def remember(self, round: int, chain: bytes, stall: Stall | None = None) -> None:
        """Store the hash that the ledger has reached after so many rounds, and what was sent meanwhile, if given."""
        ...

    def store_evidence(self, evidence: Evidence) -> str:
        """Store what a federator did that was not agreed on; return where."""
        ...

    def save(self, client: Client[Parameters, Any], run: bytes) -> None:
        """Store the client's weights, if there is room for them."""
        ...

    def snapshot(self) -> Snapshot | None:
        """Return the weights that were stored, if any were."""
        ...


def open_state(folder: Path | None, run: bytes, client: int) -> ParticipantState:
    """Return the state in a folder; without a folder, one that lasts as long as the process."""
    if folder is not None:
        return FolderState(folder, run, client)
    _refuse_evidence(Path.cwd(), _name_here(run, client, "*"))
    return MemoryState()


class MemoryState:
    """State that lasts as long as this object; weights are not stored."""

    keeps_weights = False

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self.seen: Seen | None = None
        self.stall = Stall()

    def remember(self, round: int, chain: bytes, stall: Stall | None = None) -> None:
        """Store the hash that the ledger has reached after so many rounds, and what was sent meanwhile, if given."""
        self.seen, self.stall = Seen(round, chain), self.stall if stall is None else stall

    def store_evidence(self, evidence: Evidence) -> str:
        """Write it to the working directory, where it prevents the next start."""
        return _write_here(evidence)

    def save(self, client: Client[Parameters, Any], run: bytes) -> None:
        """Store nothing: there is no next start."""

    def snapshot(self) -> Snapshot | None:
        """Return None: no weights are stored."""
        return None


class FolderState:
    """State in a folder, which no other process may use meanwhile."""

    keeps_weights = True

    def __init__(self, folder: Path, run: bytes, client: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / SEEN_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(self._file, folder)
        self.seed = _read_seed(folder / STATE_FILE, run, client)
        self.seen, self.stall = _read_seen(os.pread(self._file, 128, 0), folder / SEEN_FILE)
        _refuse_evidence(folder, "evidence-*.json")

    def remember(self, round: int, chain: bytes, stall: Stall | None = None) -> None:
        """Store the hash that the ledger has reached after so many rounds, and what was sent meanwhile, if given."""
        self.seen, self.stall = Seen(round, chain), self.stall if stall is None else stall
        os.pwrite(self._file, _pack_seen(self.seen, self.stall), 0)

    def store_evidence(self, evidence: Evidence) -> str:
        """Write it to the folder, where it prevents the next start."""
        return evidence.write(self.folder / f"evidence-{evidence.round}.json")

    def save(self, client: Client[Parameters, Any], run: bytes) -> None:
        """Store the weights."""
        save_snapshot(self.folder / SNAPSHOT_FILE, client, run)

    def snapshot(self) -> Snapshot | None:
        """Return the weights that were stored, if any were."""
        path = self.folder / SNAPSHOT_FILE
        return load_snapshot(path) if path.exists() else None


def _read_seed(path: Path, run: bytes, client: int) -> int:
    """Return the private seed of a client in a run; draw it if there is none yet."""
    mine = {"run": run.hex(), "client": client}
    if not path.exists():
        write_text(path, json.dumps({**mine, "seed": secrets.randbits(64)}), private=True)
    try:
        stored = json.loads(path.read_text())
        seed = int(stored["seed"])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} can't be read ({error!r}): use another folder") from None
    if {name: stored.get(name) for name in mine} != mine:
        raise LedgerError(
            f"{path} belongs to client {stored.get('client')} of run {str(stored.get('run'))[:16]}, and this is "
            f"client {client} of run {run.hex()[:16]}: use another folder"
        )
    return seed


class RecordState:
    """State in a mapping that somebody else stores between starts; weights only if they are small.

    The record of another run or client is cleared: the place stays, not what is in it.
    """

    def __init__(self, record: MutableMapping[str, Any], run: bytes, client: int, *, seed: int | None = None) -> None:
        self._record = record
        mine = {"run": run.hex(), "client": client}
        if {name: record.get(name) for name in mine} != mine:
            record.clear()
            drawn = secrets.randbits(64) if seed is None else seed
            record.update({**mine, "seed": str(drawn)})  # as text: records hold signed integers
        self.seed = int(record["seed"])
        self.seen, self.stall = _read_seen(record.get("seen", b""), _RECORD)
        _refuse_evidence(Path.cwd(), _name_here(run, client, "*"))

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that were saved are there at the next start."""
        return "weights" in self._record

    def remember(self, round: int, chain: bytes, stall: Stall | None = None) -> None:
        """Store the hash that the ledger has reached after so many rounds, and what was sent meanwhile, if given."""
        self.seen, self.stall = Seen(round, chain), self.stall if stall is None else stall
        self._record["seen"] = _pack_seen(self.seen, self.stall)

    def store_evidence(self, evidence: Evidence) -> str:
        """Write it to the working directory, where it prevents the next start."""
        return _write_here(evidence)

    def save(self, client: Client[Parameters, Any], run: bytes) -> None:
        """Store the weights, if they are small."""
        numbers = client.parameters.dimension * (1 + len(client.updates.optimizer.vectors))
        if numbers * _LARGEST_ITEM <= RECORD_BYTES:
            tensors = {name: t.detach().cpu().contiguous() for name, t in held(client.parameters).items()}
            self._record.update({**about(client, run), "weights": serialise(tensors)})

    def snapshot(self) -> Snapshot | None:
        """Return the weights that were stored, if any were."""
        if not self.keeps_weights:
            return None
        try:
            tensors = deserialise(self._record["weights"])
        except Exception as error:  # safetensors' own error type is not public in every version
            raise SnapshotError(_RECORD, f"it can't be read ({' '.join(str(error).split())})") from error
        stated = {name: value for name, value in self._record.items() if isinstance(value, str)}
        return make_snapshot(stated, tensors, _RECORD)


def _pack_seen(seen: Seen, stall: Stall) -> bytes:
    count = min(stall.scalars, (1 << 64) - 1)
    body = _SEEN.pack(*seen, min(stall.answered, _LARGEST_COUNT), count, stall.moved, stall.squares)
    return body + _CRC.pack(zlib.crc32(body))


def _name_here(run: bytes, client: int, round: int | str) -> str:
    """Return how evidence is called in the working directory, which several clients may share."""
    return f"evidence-{run.hex()[:8]}-{client}-{round}.json"


def _write_here(evidence: Evidence) -> str:
    return evidence.write(Path.cwd() / _name_here(evidence.run, evidence.client, evidence.round))


def _refuse_evidence(folder: Path, pattern: str) -> None:
    """Refuse to start where evidence against the federator lies: a service manager would restart for ever."""
    if found := sorted(folder.glob(pattern)):
        raise LedgerError(
            f"{found[0]} says that this federator broke the agreement: look at it, ask who runs the federator, and "
            "delete the file to trust it again"
        )


def _lock(handle: int, folder: Path) -> None:
    """Refuse a folder that another process uses: each would overwrite the hash that the other saw last.

    A lock of the process, not of the handle: one process may open its folder again.
    """
    try:
        lock_handle(handle, by_process=True)
    except BlockingIOError:
        raise LedgerError(f"{folder} is used by another process: stop that, or use another folder") from None


def _read_seen(data: bytes, path: Path | str) -> tuple[Seen | None, Stall]:
    if not data:
        return None, Stall()
    body = data[: -_CRC.size]
    if len(body) not in (_SEEN.size, _OLD_SEEN.size) or zlib.crc32(body) != _CRC.unpack(data[-_CRC.size :])[0]:
        raise LedgerError(
            f"{path} is damaged, so the last hash that this client saw is lost: delete it to trust the federator"
        )
    if len(body) == _OLD_SEEN.size:
        return Seen(*_OLD_SEEN.unpack(body)), Stall()
    number, chain, *stall = _SEEN.unpack(body)
    return Seen(number, chain), Stall(*stall)
