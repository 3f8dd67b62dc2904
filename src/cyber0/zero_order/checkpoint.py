"""A ZeroOrder's progress, to be saved beside the weights: whoever loads both continues without the starting weights.

A ledger file needs the weights that it starts from, which are moved through all its steps. A checkpoint holds the
ledger and the state that the steps have led to, with a digest that says which weights it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cyber0.errors import LedgerError, ModelError
from cyber0.ledger import Ledger, opening_of
from cyber0.optimizers import state_digest
from cyber0.protocol.client import Updates
from cyber0.storage.memory import MemoryDisk

if TYPE_CHECKING:
    from cyber0.zero_order.optimizer import ZeroOrder

_NAMES = {"ledger", "state", "vectors", "digest"}
_FILE = "of a checkpoint"  # its name in messages: "the ledger of a checkpoint ..."


def ledger_bytes(ledger: Ledger) -> bytes:
    """Return what the file of a ledger holds."""
    return opening_of(ledger.header) + ledger.chunk(0, ledger.size)[0]


def make_checkpoint(optimizer: ZeroOrder) -> dict[str, Any]:
    """Return the ledger, and the optimizer's state and vectors (not copies) with a digest of them and the weights."""
    return {
        "ledger": torch.from_numpy(np.frombuffer(ledger_bytes(optimizer.ledger), np.uint8).copy()),
        "state": list(optimizer.updates.state),
        "vectors": dict(optimizer.parameters.moments.vectors),
        "digest": _digest(optimizer, optimizer.updates),
    }


def read_checkpoint(optimizer: ZeroOrder, checkpoint: Mapping[str, Any]) -> tuple[Ledger, Updates]:
    """Return the ledger and the state of a checkpoint, if it belongs to a new optimizer's settings and weights.

    The vectors beside the weights are then those of the checkpoint.
    """
    if not isinstance(checkpoint, Mapping) or not set(checkpoint) >= _NAMES:
        raise LedgerError("this is not what checkpoint() of a ZeroOrder returned: it holds no ledger and state")
    disk = MemoryDisk()
    disk.create(_FILE, checkpoint["ledger"].cpu().numpy().tobytes()).close()
    ledger = Ledger.open(_FILE, writable=True, disk=disk)
    odd = [name for name in ledger.header.differences(optimizer.ledger.header) if name != "weights_digest"]
    if "rest_digest" in odd:
        raise ModelError("the checkpoint belongs to a model with other frozen weights or buffers: load the same ones")
    if odd:
        raise LedgerError(f"the checkpoint was made with other settings (it differs in {', '.join(odd)}); continue it "
                          "with the same ones")  # fmt: skip
    updates = Updates(ledger.header)
    updates.state = tuple(map(float, checkpoint["state"]))
    optimizer.parameters.moments.check(checkpoint["vectors"])
    optimizer.parameters.moments.load(checkpoint["vectors"])
    if _digest(optimizer, updates) != checkpoint["digest"]:
        optimizer.parameters.moments.reset()
        raise ModelError(f"the checkpoint of step {len(ledger)} belongs to other weights: first load the weights that "
                         "were saved with it")  # fmt: skip
    return ledger, updates


def _digest(optimizer: ZeroOrder, updates: Updates) -> str:
    parameters = optimizer.parameters
    return state_digest(parameters.digest(), updates.state, parameters.vectors_digest())
