"""What a participant keeps between its starts: which run, its private seed, the last hash it saw; snapshots of w.

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
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load as deserialise
from safetensors.torch import save as serialise

from cyber0.errors import LedgerError
from cyber0.model.tensors import save_tensors
from cyber0.model.vector import Parameters
from cyber0.storage import write_text
from cyber0.storage.disk import lock_handle

STATE, SEEN, SNAPSHOT = "state.json", "seen.bin", "snapshot.safetensors"
RECORD_BYTES = 16 << 20  # of weights in a record, at most: the record travels between processes with every letter
_LARGEST_ITEM = 4
HASH_BYTES = 32
_SEEN = struct.Struct("<I32sI")


class Seen(NamedTuple):
    """The last hash of a ledger that a participant saw: after how many rounds, and the hash."""

    round: int
    chain: bytes


class Snapshot(NamedTuple):
    """Weights after some round of a run."""

    run: bytes
    round: int
    chain: bytes
    tensors: dict[str, torch.Tensor]


class State:
    """A participant's memory of one run; without a folder it lasts as long as the process."""

    def __init__(self, folder: Path | None, run: bytes, client: int) -> None:
        self.folder = folder
        self.seed = secrets.randbits(64)
        self.seen: Seen | None = None
        self._file: int | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / SEEN, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(self._file, folder)
        self._load(folder / STATE, run, client)
        self.seen = _read_seen(os.pread(self._file, 64, 0), folder / SEEN)

    def _load(self, path: Path, run: bytes, client: int) -> None:
        mine = {"run": run.hex(), "client": client}
        if not path.exists():
            write_text(path, json.dumps({**mine, "seed": self.seed}), private=True)
        try:
            found = json.loads(path.read_text())
            self.seed = int(found["seed"])
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{path} can't be read ({error!r}): use another folder") from None
        if {name: found.get(name) for name in mine} != mine:
            raise LedgerError(
                f"{path} belongs to client {found.get('client')} of run {str(found.get('run'))[:16]}, and this is "
                f"client {client} of run {run.hex()[:16]}: use another folder"
            )

    def remember(self, round: int, chain: bytes) -> None:
        """Keep the hash that the ledger has reached after so many rounds."""
        self.seen = Seen(round, chain)
        if self._file is not None:
            os.pwrite(self._file, _pack_seen(round, chain), 0)

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that were saved are there at the next start."""
        return self.folder is not None

    def save(self, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
        """Keep the weights, if there is a folder."""
        if self.folder is not None:
            save_snapshot(self.folder / SNAPSHOT, parameters, run, round, chain)

    def snapshot(self) -> Snapshot | None:
        """Return the weights that were kept, if any were."""
        if self.folder is None or not (self.folder / SNAPSHOT).exists():
            return None
        return load_snapshot(self.folder / SNAPSHOT)


class RecordState(State):
    """The same in a record that somebody else keeps between starts; weights only if they are small.

    A record of another run or client is forgotten: it is the place that is kept, not the run.
    """

    def __init__(self, record: MutableMapping[str, Any], run: bytes, client: int) -> None:
        super().__init__(None, run, client)
        self._record, self._run = record, run
        mine = {"run": run.hex(), "client": client}
        if {name: record.get(name) for name in mine} != mine:
            record.clear()
            record.update({**mine, "seed": str(self.seed)})  # as text: records hold signed integers
        self.seed = int(record["seed"])
        if "seen" in record:
            self.seen = _read_seen(record["seen"], "what the node has kept")

    def remember(self, round: int, chain: bytes) -> None:
        """Keep the hash that the ledger has reached after so many rounds."""
        super().remember(round, chain)
        self._record["seen"] = _pack_seen(round, chain)

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that were saved are there at the next start."""
        return "weights" in self._record

    def save(self, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
        """Keep the weights, if they are small."""
        if parameters.dimension * _LARGEST_ITEM <= RECORD_BYTES:
            tensors = {name: t.detach().cpu().contiguous() for name, t in parameters.state().items()}
            self._record.update({"round": round, "chain": chain, "weights": serialise(tensors)})

    def snapshot(self) -> Snapshot | None:
        """Return the weights that were kept, if any were."""
        record = self._record
        if not self.keeps_weights:
            return None
        return Snapshot(self._run, record["round"], record["chain"], deserialise(record["weights"]))


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
        raise LedgerError(f"{path} is damaged, so what this client last saw is lost: delete it to trust the federator")
    number, chain, _ = _SEEN.unpack(data)
    return Seen(number, chain)


def save_snapshot(path: Path, parameters: Parameters, run: bytes, round: int, chain: bytes) -> None:
    """Write w and where it stands to a safetensors file, in whole or not at all."""
    about = {"run": run.hex(), "round": str(round), "chain": chain.hex(), "digest": parameters.digest()}
    save_tensors(parameters.state(), path, about)


def load_snapshot(path: Path) -> Snapshot:
    """Read what `save_snapshot` wrote."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        run, chain = bytes.fromhex(about["run"]), bytes.fromhex(about["chain"])
        if (len(run), len(chain)) != (HASH_BYTES, HASH_BYTES):
            raise ValueError(f"its hashes have {len(run)} and {len(chain)} bytes, not {HASH_BYTES}")
        return Snapshot(run, int(about["round"]), chain, tensors)
    except Exception as error:  # safetensors' own error type is not public in every version
        raise LedgerError(f"{path} can't be read as a snapshot: {error!r}") from error
