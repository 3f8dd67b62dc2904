"""The one parser of device names: `cpu`, `cuda`, or `cuda:N` for number N of several GPUs. Nothing heavy is loaded.

Which types there are is declared by directions/backends; whether this machine has the device is checked there too.
"""

from __future__ import annotations

import re

from cyber0.config.choices import DEVICES
from cyber0.config.suggestions import closest
from cyber0.errors import ConfigError


def parse_device(device: str, key: str = "device") -> tuple[str, int | None]:
    """Return the type of a device and its number, None if it has none; `key` is the setting that named it.

    Raises:
        ConfigError: there is no such type, or it takes no number.
    """
    found = re.fullmatch(r"([a-z]+)(?::(0|[1-9][0-9]{0,3}))?", device)
    kind, number = found.groups() if found else ("", None)
    if kind not in DEVICES or (kind == "cpu" and number is not None):
        near = closest(device, DEVICES)
        valid = [form for name in DEVICES for form in ([name] if name == "cpu" else [name, f"{name}:N"])]
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{key} = {device!r} is not a choice; possible are {', '.join(valid)}{hint}")
    return kind, None if number is None else int(number)
