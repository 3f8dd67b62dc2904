"""Defaults that depend on another setting: those of a task are in TASK.toml beside this file, as a config has them.

A task without such a file has the defaults that schema.py declares, which are those of the default run on MNIST. An
adapter may have a file as well, which comes before the task's. A file has no setting that to_dict leaves out at its
default: what was left out would come back as the file has it. The default of aggregation.rule follows from the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cyber0.config.choices import ADAPTERS, TASKS
from cyber0.config.keys import Value, describe, full_name

_RULES = {"cyber0": "trimmed_mean", "trimmed_mean": "trimmed_mean", "krum": "krum"}  # of the other methods: mean


def of_task(name: str) -> Mapping[str, Value]:
    """Return the defaults that differ for a task, by the full names of the settings."""
    return _read(name) if name in TASKS else {}  # the name may come from a file of somebody else's


def of_adapter(name: str) -> Mapping[str, Value]:
    """Return the defaults that differ for an adapter of a language model, by the full names of the settings."""
    return _read(name) if name in ADAPTERS else {}


@cache
def _read(name: str) -> Mapping[str, Value]:
    """Return what is in the file NAME.toml, if there is one."""
    import tomllib
    from importlib.resources import files

    file = files(__name__) / f"{name}.toml"
    if not file.is_file():
        return {}
    tables: Mapping[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    found: dict[str, Value] = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    for section, table in tables.items():
        if isinstance(table, Mapping):
            found |= {full_name(section, key): value for key, value in table.items()}
    return found


def own_rule(method: str) -> str:
    """Return the rule that a method uses unless another is set."""
    return _RULES.get(method, "mean")


def defaults_for(data: Mapping[str, Any]) -> dict[str, Value]:
    """Return the default of every setting, by its full name, given the settings that defaults depend on."""
    return _defaults(data) | {"aggregation.rule": own_rule(_chosen(data, "method", "cyber0"))}


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with the defaults of the task and of the adapter filled in, where these are set."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for full, value in _preset(data).items():
        section, _, key = full.rpartition(".")
        target = result.setdefault(section, {}) if section else result
        if isinstance(target, dict):
            target.setdefault(key, value)
    return result


def without_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables without what stands at its default, but for the task, which the defaults depend on.

    The adapter that they depend on is not a default.
    """
    defaults = _defaults(data)

    def set_in(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
        names = {key: full_name(section, key) for key in table}
        return {key: value for key, value in table.items() if isinstance(value, Mapping)
                or names[key] == "task.name" or value != defaults[names[key]]}  # fmt: skip

    tables = {name: set_in(name, value) if isinstance(value, Mapping) else value for name, value in data.items()}
    return set_in("", tables)


def _defaults(data: Mapping[str, Any]) -> dict[str, Value]:
    return {d.name: d.default for d in describe()} | _preset(data)


def _preset(data: Mapping[str, Any]) -> dict[str, Value]:
    """Return the defaults that differ for the task and the adapter that the tables have."""
    return {**of_task(_chosen(data, "task", "")), **of_adapter(_chosen(data, "task", "", key="adapter"))}


def _chosen(data: Mapping[str, Any], section: str, default: str, *, key: str = "name") -> str:
    """Return the name of the task, the method or the adapter that the tables have."""
    table = data.get(section, {})
    return str(table.get(key, default)) if isinstance(table, Mapping) else default
