"""What a participant stores between its starts: which run, its private seed, the last hash it saw; snapshots of w.

In a folder these are

state.json            run id, client, the private seed that its batches are drawn with
seen.bin              u32 round | 32 bytes chain | u32 CRC-32, written in place every round
snapshot.safetensors  the weights after some round, so that a restart replays less
"""

from __future__ import annotations

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
from cyber0.serve.snapshots import Snapshot, SnapshotError, about, load_snapshot, make_snapshot, save_snapshot
from cyber0.storage import write_text
from cyber0.storage.disk import lock_handle

STATE_FILE, SEEN_FILE, SNAPSHOT_FILE = "state.json", "seen.bin", "snapshot.safetensors"
RECORD_BYTES = 16 << 20  # of weights in a record, at most: the record travels between processes with every message
_LARGEST_ITEM = 4
_RECORD = "the node's record"
_SEEN = struct.Struct("<I32sI")


class Seen(NamedTuple):
    """The last hash of a ledger that a participant saw: after how many rounds, and the hash."""

    round: int
    chain: bytes


class ParticipantState(Protocol):
    """What a participant of one run remembers, wherever that is stored."""

    seed: int
    """The private seed of its batches."""
    seen: Seen | None
    """The last hash of the ledger that it saw."""

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that were saved are there at the next start."""
        ...

    def remember(self, round: int, chain: bytes) -> None:
        """Store the hash that the ledger has reached after so many rounds."""
        ...

    def save(self, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
        """Store the weights, if there is room for them."""
        ...

    def snapshot(self) -> Snapshot | None:
        """Return the weights that were stored, if any were."""
        ...


def open_state(folder: Path | None, run: bytes, client: int) -> ParticipantState:
    """Return the state in a folder; without a folder, one that lasts as long as the process."""
    return MemoryState() if folder is None else FolderState(folder, run, client)


class MemoryState:
    """State that lasts as long as this object; weights are not stored."""

    keeps_weights = False

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self.seen: Seen | None = None

    def remember(self, round: int, chain: bytes) -> None:
        """Store the hash that the ledger has reached after so many rounds."""
        self.seen = Seen(round, chain)

    def save(self, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
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
        self.seen = _read_seen(os.pread(self._file, 64, 0), folder / SEEN_FILE)

    def remember(self, round: int, chain: bytes) -> None:
        """Store the hash that the ledger has reached after so many rounds."""
        self.seen = Seen(round, chain)
        os.pwrite(self._file, _pack_seen(round, chain), 0)

    def save(self, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
        """Store the weights."""
        save_snapshot(self.folder / SNAPSHOT_FILE, parameters, run, round, chain)

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
        self.seen = _read_seen(record["seen"], _RECORD) if "seen" in record else None

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that were saved are there at the next start."""
        return "weights" in self._record

    def remember(self, round: int, chain: bytes) -> None:
        """Store the hash that the ledger has reached after so many rounds."""
        self.seen = Seen(round, chain)
        self._record["seen"] = _pack_seen(round, chain)

    def save(self, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
        """Store the weights, if they are small."""
        if parameters.dimension * _LARGEST_ITEM <= RECORD_BYTES:
            tensors = {name: t.detach().cpu().contiguous() for name, t in parameters.state().items()}
            self._record.update({**about(parameters, run, round, chain), "weights": serialise(tensors)})

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


def _pack_seen(round: int, chain: bytes) -> bytes:
    body = _SEEN.pack(round, chain, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def _lock(handle: int, folder: Path) -> None:
    """Refuse a folder that another process uses: each would overwrite the hash that the other saw last.

    A lock of the process, not of the handle: one process may open its folder again.
    """
    try:
        lock_handle(handle, by_process=True)
    except BlockingIOError:
        raise LedgerError(f"{folder} is used by another process: stop that, or use another folder") from None


def _read_seen(data: bytes, path: Path | str) -> Seen | None:
    if not data:
        return None
    if len(data) != _SEEN.size or zlib.crc32(data[:-4]) != _SEEN.unpack(data)[2]:
        raise LedgerError(
            f"{path} is damaged, so the last hash that this client saw is lost: delete it to trust the federator"
        )
    number, chain, _ = _SEEN.unpack(data)
    return Seen(number, chain)
