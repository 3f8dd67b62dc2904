"""Backends: who computes directions and passes over weights on which type of device, with the bits of definition.py.

A new backend is one file of this folder, named after torch's device type, with an object BACKEND of a class derived
from `base.Backend`, and one line in DEVICES. This module loads neither torch nor a backend until one is needed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from cyber0.config.devices import parse_device
from cyber0.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

    from cyber0.directions.backends.base import Backend

DEVICES = {"cpu": "the processor", "cuda": "an NVIDIA GPU: the first one, or cuda:N for number N, counted from 0"}
"""torch's device types that have a backend, each with what it is in one line."""


@cache
def backend_for(device_type: str) -> Backend:
    """Return the backend for a type of device.

    Raises:
        ModelError: there is none.
    """
    if device_type not in DEVICES:
        raise ModelError(f"there is no backend for tensors on {device_type!r}; move them to {' or '.join(DEVICES)}")
    backend: Backend = import_module(f"{__name__}.{device_type}").BACKEND
    return backend


def backend_of(device: torch.device) -> Backend:
    """Return the backend that computes on a device."""
    return backend_for(device.type)


def check_device(device: str) -> None:
    """Refuse a device that is unknown or that this machine does not have.

    Raises:
        ConfigError: with the devices that are valid.
    """
    kind, index = parse_device(device)
    backend = backend_for(kind)
    count = backend.device_count()
    if count == 0:
        raise ConfigError(
            f'device = "{device}", but this machine has no {backend.hardware} that torch can use; set device = "cpu"'
        )
    if index is not None and index >= count:
        valid = ", ".join(f"{kind}:{i}" for i in range(count))
        raise ConfigError(f'device = "{device}", but this machine has {count} {backend.hardware}: use {valid} or "cpu"')


def device_name(device: str) -> str:
    """Return what the hardware calls itself, or the device as it was given where that says nothing."""
    import torch

    backend = backend_for(parse_device(device)[0])
    return backend.device_name(torch.device(device)) if backend.device_count() else device
