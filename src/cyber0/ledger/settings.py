"""The settings of a run that its header holds: each once, as a field of the header or in its `settings`."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cyber0.errors import LedgerError

DEPTH_LIMIT = 16

IN_CONFIG = {
    "seed": "seed",
    "k": "method.k",
    "local_epochs": "method.local_epochs",
    "mu": "method.mu",
    "estimator": "method.estimator",
    "optimizer": "method.optimizer",
    "optimizer_options": "method.optimizer_options",
    "lr": "method.lr",
    "lr_schedule": "method.lr_schedule",
    "distribution": "method.distribution",
    "rank": "method.rank",
    "rounding": "method.rounding",
    "projection_radius": "method.projection_radius",
    "clients": "federation.clients",
    "codec": "serve.codec",
    "seed_mode": "serve.seed_mode",
}
"""The fields that are settings of a run, and where its config has them."""

_YOUNGER: dict[str, Any] = {"optimizer": "sgd", "optimizer_options": {}, "rank": 1, "rounding": "stochastic"}
"""Settings that are younger than headers that exist: a config leaves them out at these defaults."""


def with_fields(settings: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole config of a header: its `settings`, and those that are fields of their own."""
    tables: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    for name, path in IN_CONFIG.items():
        if name in _YOUNGER and fields[name] == _YOUNGER[name]:
            continue
        section, _, key = path.rpartition(".")
        (tables.setdefault(section, {}) if section else tables)[key] = _in_config(name, fields[name])
    return tables


def check_settings(settings: dict[str, Any], fields: Mapping[str, Any], *, repeated: bool) -> None:
    """Refuse settings that contradict the fields of their header, or repeat them.

    Args:
        settings: As the header has them.
        fields: The header's fields of its own, by name.
        repeated: Whether they may be repeated, as in format 1.
    """
    if _depth(settings) > DEPTH_LIMIT:  # on every version of Python alike
        raise LedgerError(f"settings in a ledger's header are nested too deeply: {DEPTH_LIMIT} levels are the most")
    for name, path in IN_CONFIG.items():
        section, _, key = path.rpartition(".")
        table = settings.get(section, {}) if section else settings
        if not isinstance(table, dict):
            raise LedgerError(
                f"settings.{section} = {reprlib.repr(table)} in a ledger's header is impossible; it must be a table"
            )
        if key not in table:
            continue
        mine, stated = fields[name], table[key]
        if stated != _in_config(name, mine):
            raise LedgerError(
                f"a ledger's header contradicts itself: {name} = {mine!r}, but {path} = {reprlib.repr(stated)} in its "
                "config. One of them was changed: use the header as its federator made it"
            )
        if not repeated:
            raise LedgerError(
                f"a ledger's header has a setting twice: {path} = {stated!r} is its field {name}, and is left out of "
                "its settings"
            )


def _in_config(name: str, value: Any) -> Any:
    """Return the value of a field as a config has it."""
    return 0.0 if name == "projection_radius" and value is None else value  # in a config, 0: no ball


def without_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config that are not fields of a header: its `settings`."""
    places = set(IN_CONFIG.values())
    return {
        name: {key: one for key, one in value.items() if f"{name}.{key}" not in places}
        if isinstance(value, dict)
        else value
        for name, value in config.items()
        if name not in places
    }


def _depth(value: object) -> int:
    """Return how deeply a value is nested, without recursion and no further than matters."""
    depth, level = 0, [value]
    while depth <= DEPTH_LIMIT and (level := [one for part in level for one in _parts(part)]):
        depth += 1
    return depth


def _parts(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def changed_settings(
    settings: dict[str, Any], recorded: dict[str, Any], within: str = "", free: Collection[str] = ("rounds",)
) -> list[str]:
    """Return which settings differ from those on record, each by its full name with both values.

    Args:
        settings: The settings, in tables.
        recorded: Those on record.
        within: The name of the table that they are in, with a dot.
        free: The full names of settings that may differ. The number of rounds may: a run can be lengthened, and each
            record says how many there were to be.
    """
    changed = []
    for key in sorted(settings.keys() | recorded.keys()):
        name, mine, theirs = f"{within}{key}", settings.get(key), recorded.get(key)
        if name in free:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            changed += changed_settings(mine, theirs, f"{name}.", free)
        elif mine != theirs:
            changed.append(f"{name} (now {mine!r}, on record {theirs!r})")
    return changed
