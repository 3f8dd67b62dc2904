"""The checkpoint of a method without a ledger: its weights and counters as of some round.

`state.safetensors` holds the weights by name, in float32 whatever they are stored in, and the rest as metadata, with a
digest of both. It is replaced as a whole, so killing the process at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from cyber0.errors import DataError, LedgerError
from cyber0.ledger import changed_settings
from cyber0.model.tensors import save_tensors
from cyber0.storage import CONFIG, STATE, STATE_DIGEST, STATE_PROGRESS, state_digest
from cyber0.storage.disk import locked


@dataclass(frozen=True)
class Checkpoint:
    """A run's progress without its weights; `config` and the digests identify the run."""

    round: int
    decided: int
    reports: int
    trimmed: list[int]
    sent: list[int]
    rejections: dict[str, int]
    weights_digest: str
    rest_digest: str
    config: dict[str, Any] = field(default_factory=dict)

    def check_same_run(self, other: Checkpoint, folder: Path) -> None:
        """Refuse the checkpoint of another run, by name."""
        odd = [name for name in ("weights_digest", "rest_digest") if getattr(self, name) != getattr(other, name)]
        changed = changed_settings(self.config, other.config)
        odd += changed
        if odd:
            remedy = f" (`cyber0 repair {folder}` writes {CONFIG} from {STATE})" if changed else ""
            raise LedgerError(
                f"{STATE} belongs to another run: it differs in {', '.join(odd)}. Settings can't change within a run: "
                f"restore them{remedy}, or start a new run in another folder"
            )


class CheckpointFile:
    """The file in a run's folder, which one process at a time may write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(folder))  # the file itself is replaced each time

    def write(self, weights: dict[str, torch.Tensor], progress: Checkpoint) -> None:
        """Replace the file."""
        about = json.dumps(asdict(progress))
        digest = state_digest(about, _bytes_of(weights))
        save_tensors(weights, self.path, {STATE_PROGRESS: about, STATE_DIGEST: digest})

    def read(self) -> tuple[dict[str, torch.Tensor], Checkpoint]:
        """Return what the file holds; refuse one that was damaged."""
        return read(self.path)

    def close(self) -> None:
        """Let go of the folder; a second time does nothing."""
        self._lock.close()


def read(path: Path) -> tuple[dict[str, torch.Tensor], Checkpoint]:
    """Return the weights in such a file, and how far they have come; refuse one that was damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            about = file.metadata() or {}
            progress = Checkpoint(**json.loads(about[STATE_PROGRESS]))
    except Exception as error:  # safetensors' own error type is not public in every version
        raise DataError(f"{path} can't be read as the state of a run: {error!r}") from error
    if STATE_DIGEST in about and about[STATE_DIGEST] != state_digest(about[STATE_PROGRESS], _bytes_of(weights)):
        raise DataError(
            f"{path} was changed after it was written: its digest is wrong; `cyber0 repair {path.parent}` puts it aside"
        )
    return weights, progress


def _bytes_of(weights: dict[str, torch.Tensor]) -> dict[str, NDArray[np.uint8]]:
    return {name: t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for name, t in weights.items()}
