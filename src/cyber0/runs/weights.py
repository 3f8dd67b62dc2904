"""Files of weights, read without torch: what is in a safetensors file, and whether it has the expected digest."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyber0.config.schema import Config
from cyber0.ledger import LayoutEntry, read_opening
from cyber0.storage import LEDGER, WEIGHTS

_LENGTH = struct.Struct("<Q")


def fault_of_weights(
    path: Path, layout: Iterable[LayoutEntry], digest: str, *, shards: Iterable[Path] = (),
    names_of: Callable[[str], Iterable[str]] = lambda name: (name,),
) -> str:  # fmt: skip
    """Return what is wrong with a file of weights that must have that digest; "" if nothing is.

    Args:
        path: The file.
        layout: The weights in it.
        digest: Of all weights, in the order of the layout.
        shards: More files, where the weights are in several.
        names_of: The names that a weight of the layout may have in them.
    """
    try:
        tensors = {name: t for file in (path, *shards) for name, t in read_safetensors(file)[0].items()}
        sha = hashlib.sha256()
        for entry in layout:
            sha.update(tensors[next((name for name in names_of(entry.name) if name in tensors), entry.name)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"can't be read as safetensors: {error!r}"
    same = sha.hexdigest() == digest
    return "" if same else "they are not the starting weights of this run: their digest differs"


def read_safetensors(path: Path) -> tuple[dict[str, memoryview], dict[str, str]]:
    """Return the bytes of each tensor and the metadata of a safetensors file.

    The file is mapped, not read: a model may be larger than memory.
    """
    if path.stat().st_size < _LENGTH.size:
        raise ValueError("the file is too short")
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    first = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    about: dict[str, Any] = json.loads(bytes(data[_LENGTH.size : first]))
    if not isinstance(about, dict):
        raise ValueError("its header is no table")
    metadata = about.pop("__metadata__", {})
    tensors = {}
    for name, tensor in about.items():
        low, high = tensor["data_offsets"]
        if not 0 <= low <= high <= len(data) - first:
            raise ValueError(f"{name} is cut off")
        tensors[name] = data[first + low : first + high]
    return tensors, metadata


def with_stored_start(config: Config, folder: Path) -> Config:
    """Return the config with the w0 in the run's folder, where it is intact, in place of the file task.weights."""
    path = folder / WEIGHTS
    if not config.task.weights or not path.exists():
        return config
    if (folder / LEDGER).exists():
        with (folder / LEDGER).open("rb") as file:
            header = read_opening(file, folder / LEDGER)[0]
        if fault_of_weights(path, header.layout, header.weights_digest):
            return config
    return replace(config, task=replace(config.task, weights=os.path.abspath(path)))
