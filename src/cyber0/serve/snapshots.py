"""Weights and the optimizer's state and vectors after some round, as a file; taken only if whole and as saved.

A vector is stored beside the weights under its name with a dot in front, with which no weight's name begins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from cyber0.errors import LedgerError
from cyber0.ledger import LayoutEntry
from cyber0.model.digests import digest_of
from cyber0.model.tensors import save_tensors
from cyber0.model.vector import Parameters
from cyber0.optimizers import Optimizer, State, state_digest
from cyber0.protocol.client import Client

HASH_BYTES = 32
_LAST_ROUND = (1 << 32) - 1
_NAMES = ("run", "round", "chain", "digest")
_STATE, _VECTOR = "optimizer", "."


class SnapshotError(LedgerError):
    """A snapshot is damaged, or does not belong to the run."""

    def __init__(self, source: str, fault: str) -> None:
        self.reason = f"the snapshot {source} can't be used: {fault}"
        super().__init__(f"{self.reason}; leave it out, and the ledger is replayed from w0")


class Snapshot(NamedTuple):
    """Weights after some round of a run, and the optimizer's state and vectors; `source` is where they come from."""

    run: bytes
    round: int
    chain: bytes
    digest: str
    """Of the weights, the state and the vectors: `Client.digest`."""
    state: State
    tensors: Mapping[str, torch.Tensor]
    vectors: Mapping[str, torch.Tensor]
    source: str

    def check(self, layout: Sequence[LayoutEntry], optimizer: Optimizer) -> None:
        """Refuse weights of another model, that are not finite, or that are not those that were saved.

        The same of the optimizer's state and vectors.
        """
        agreed = {entry.name: (entry.shape, entry.dtype) for entry in layout}
        self._check_tensors("weight", self.tensors, agreed)
        size = (sum(entry.size for entry in layout),)
        self._check_tensors("optimizer's vector", self.vectors, dict.fromkeys(optimizer.vectors, (size, "float32")))
        numbers = len(optimizer.start())
        if len(self.state) != numbers or not all(map(math.isfinite, self.state)):
            fault = f"the optimizer's state is {self.state!r}, and must be {numbers} finite numbers"
            raise SnapshotError(self.source, fault)
        least = {name: float(t.min()) for name, t in self.vectors.items() if t.numel()}
        if not optimizer.possible(self.state, least):
            fault = f"no rounds lead to the optimizer's state {self.state!r} with vectors of at least {least}"
            raise SnapshotError(self.source, fault)
        weights = digest_of(self.tensors[entry.name] for entry in layout)
        vectors = digest_of(self.vectors[name] for name in optimizer.vectors) if optimizer.vectors else ""
        found = state_digest(weights, self.state, vectors)
        if found != self.digest:
            fault = f"what it holds has the digest {found[:16]}..., not {self.digest[:16]}... as it states"
            raise SnapshotError(self.source, fault)

    def _check_tensors(
        self, kind: str, tensors: Mapping[str, torch.Tensor], agreed: Mapping[str, tuple[tuple[int, ...], str]]
    ) -> None:
        stored = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        for name in sorted(stored.keys() | agreed.keys()):
            found, expected = stored.get(name, "absent"), agreed.get(name, "absent")
            if found != expected:
                raise SnapshotError(self.source, f"the {kind} {name!r} is {found}, and in the run it is {expected}")
        for name, t in tensors.items():
            if not torch.isfinite(t).all():
                raise SnapshotError(self.source, f"the {kind} {name!r} is not finite")


def make_snapshot(about: Mapping[str, str], tensors: Mapping[str, torch.Tensor], source: str) -> Snapshot:
    """Return the snapshot that was stored with these facts about it."""
    missing = [name for name in _NAMES if name not in about]
    if missing:
        raise SnapshotError(source, f"it does not state its {missing[0]}")
    for name in ("run", "chain", "digest"):
        if re.fullmatch(rf"[0-9a-f]{{{2 * HASH_BYTES}}}", about[name]) is None:
            raise SnapshotError(source, f"its {name} is {about[name][:80]!r}, not {HASH_BYTES} bytes in hexadecimal")
    if re.fullmatch("[0-9]{1,10}", about["round"]) is None or int(about["round"]) > _LAST_ROUND:
        raise SnapshotError(source, f"its round is {about['round'][:80]!r}, not one from 0 to {_LAST_ROUND}")
    run, chain = bytes.fromhex(about["run"]), bytes.fromhex(about["chain"])
    try:
        state = tuple(float.fromhex(text) for text in about.get(_STATE, "").split())
    except (ValueError, OverflowError):
        raise SnapshotError(source, f"the optimizer's state is {about[_STATE][:80]!r}, not in hexadecimal") from None
    vectors = {name[1:]: t for name, t in tensors.items() if name.startswith(_VECTOR)}
    weights = {name: t for name, t in tensors.items() if not name.startswith(_VECTOR)}
    return Snapshot(run, int(about["round"]), chain, about["digest"], state, weights, vectors, source)


def about(client: Client[Parameters, Any], run: bytes) -> dict[str, str]:
    """Return what is stored with a client's weights."""
    stated = {"run": run.hex(), "round": str(client.next_round), "chain": client.chain.hex(), "digest": client.digest()}
    state = " ".join(number.hex() for number in client.updates.state)
    return {**stated, _STATE: state} if state else stated


def held(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return what a snapshot stores of weights and of the vectors beside them: views, not copies."""
    vectors = {_VECTOR + name: vector for name, vector in parameters.moments.vectors.items()}
    return {**parameters.state(), **vectors}


def save_snapshot(path: Path, client: Client[Parameters, Any], run: bytes) -> None:
    """Write a client's weights and where in which run it is to a safetensors file, in whole or not at all."""
    save_tensors(held(client.parameters), path, about(client, run))


def load_snapshot(path: Path) -> Snapshot:
    """Read what `save_snapshot` wrote; the weights are checked when they are used."""
    try:
        with safe_open(path, "pt") as file:
            stated = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except Exception as error:  # safetensors' own error type is not public in every version
        raise SnapshotError(str(path), f"it can't be read ({' '.join(str(error).split())})") from error
    return make_snapshot(stated, tensors, str(path))
