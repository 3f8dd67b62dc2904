"""Headers, records and files of ledgers for tests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from cyber0.ledger import (
    Header,
    LayoutEntry,
    Ledger,
    Record,
)
from cyber0.storage.memory import MemoryDisk

COUNTER = itertools.count()


def make_header(**changes: Any) -> Header:
    settings: dict[str, Any] = {
        "seed": 2**64 - 1,
        "layout": (LayoutEntry("weight", (5, 2), "float32", 0), LayoutEntry("bias", (2,), "bfloat16", 10)),
        "distribution": "gaussian",
        "k": 1,
        "local_epochs": 1,
        "mu": 1e-3,
        "estimator": "two_point",
        "lr": 0.01,
        "lr_schedule": "constant",
        "projection_radius": None,
        "weights_digest": "ab" * 32,
        "rest_digest": "cd" * 32,
        "clients": 8,
        "settings": {"rounds": 9, "task": {"name": "mnist", "shape": [1, 2]}, "ä": None},
    }
    return Header(**{**settings, **changes})


def make_record(header: Header, number: int, abandoned: bool = False) -> Record:
    generator = np.random.default_rng(number)
    reported = generator.random(header.clients) < 0.7
    trimmed = np.where(reported, generator.integers(0, header.scalars + 1, header.clients), 0)
    if abandoned:
        return Record(number, 0.5 / (number + 1), None, reported, np.zeros(header.clients, np.int64))
    values = generator.standard_normal(header.scalars).astype(np.float32)
    return Record(number, 0.5 / (number + 1), values, reported, trimmed)


def assert_same(found: Record, expected: Record) -> None:
    assert (found.round, found.lr) == (expected.round, expected.lr)
    assert (found.values is None) == (expected.values is None)
    if found.values is not None and expected.values is not None:
        assert found.values.dtype == np.float32
        assert found.values.tobytes() == expected.values.tobytes()
    assert found.reported.tolist() == expected.reported.tolist()
    assert found.trimmed.tolist() == expected.trimmed.tolist()


def write(folder: Path, header: Header, records: list[Record]) -> Path:
    path = folder / f"{next(COUNTER)}.bin"
    with Ledger.create(path, header, durability="none") as ledger:
        for record in records:
            ledger.append(record)
    return path


def copy_with(folder: Path, data: bytes) -> Path:
    path = folder / f"{next(COUNTER)}.bin"
    path.write_bytes(data)
    return path


def disk_with(path: str, data: bytes) -> MemoryDisk:
    """Return a disk in memory that holds one file: tests that try every byte of it would spend their time in fsync."""
    disk = MemoryDisk()
    disk.create(path, data).close()
    return disk
