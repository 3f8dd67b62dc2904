"""SHA-256 of tensors: one pass over their bytes, and on a GPU the next piece is copied while the last one is hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from cyber0.directions.backends import backend_of

Tensor = torch.Tensor
Begun = Callable[[], Any]
"""Returns the bytes of a piece once they are on the host; they are valid until the piece after the next is begun."""

PIECE_BYTES = 1 << 24  # large enough that starting a copy costs nothing beside hashing, which takes 8 ms or more
BUFFERS = 2


def digest_of(parts: Iterable[Tensor | bytes]) -> str:
    """Return SHA-256 of parts, one after the other: bytes, or tensors by their little-endian storage bytes."""
    sha, before = hashlib.sha256(), None
    for begun in _pieces(parts):  # one ahead of what is hashed
        if before is not None:
            sha.update(before())
        before = begun
    if before is not None:
        sha.update(before())
    return sha.hexdigest()


def _pieces(parts: Iterable[Tensor | bytes]) -> Iterator[Begun]:
    """Begin to fetch piece after piece."""
    staging: Staging | None = None
    for part in parts:
        if isinstance(part, bytes):
            yield partial(bytes, part)
            continue
        flat, size = part.detach().contiguous().reshape(-1).view(torch.uint8), part.element_size()
        for piece in torch.split(flat, PIECE_BYTES):
            if on_host(piece):
                yield partial(_little_endian, piece, size)
                continue
            staging = staging or Staging(piece.device)
            yield staging.begin(piece, size)


def on_host(piece: Tensor) -> bool:
    """Return whether the processor can read a tensor where it is."""
    return piece.device.type == "cpu"


class Staging:
    """Host memory for the pieces of tensors on a device: one is hashed while another is being copied."""

    def __init__(self, device: torch.device) -> None:
        self._backend, self._begun = backend_of(device), 0
        self._buffers = [self._backend.host_buffer(PIECE_BYTES) for _ in range(BUFFERS)]

    def begin(self, piece: Tensor, size: int) -> Begun:
        """Begin to copy a piece, of numbers of that size, and return what waits for it."""
        here = self._buffers[self._begun % BUFFERS][: len(piece)]
        self._begun += 1
        wait = self._backend.begin_copy(piece, here)

        def fetched() -> Any:
            wait()
            return _little_endian(here, size)

        return fetched


def _little_endian(piece: Tensor, size: int) -> Any:
    """Return the bytes of numbers of that size, the lowest byte first."""
    array = piece.numpy()
    return array if np.little_endian else array.reshape(-1, size)[:, ::-1].tobytes()
