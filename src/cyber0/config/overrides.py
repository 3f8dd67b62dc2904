"""`section.key=value`: settings replaced one by one, as `--set` does."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

from cyber0.config import toml
from cyber0.config.keys import default_of, refuse_unknown, setting, table_of
from cyber0.errors import ConfigError


def apply(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the tables with `section.key=value` settings replaced."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for override in overrides:
        name, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(f"the override {override!r} has no value; write it as section.key=value")
        section, _, key = name.rpartition(".")
        if table_of(section) is not None:  # one option: section.options.name=value
            section, _, options = section.rpartition(".")
            value = {**_options_in(result, section, options), key: _read_value(name, text)}
            key = options
        else:
            refuse_unknown(section, key, text)
            value = _override_value(setting(section, key), name, text)
        target = result.setdefault(section, {}) if section else result
        if isinstance(target, dict):  # from_dict refuses what is not a table
            target[key] = value
    return result


def overridden(overrides: Iterable[str]) -> set[str]:
    """Return the names of the settings that `section.key=value` settings replace."""
    return {override.partition("=")[0].strip() for override in overrides}


def _options_in(data: Mapping[str, Any], section: str, name: str) -> dict[str, Any]:
    table = data.get(section, {})
    found = table.get(name, {}) if isinstance(table, Mapping) else {}
    return dict(found) if isinstance(found, Mapping) else {}


def _override_value(f: Field[Any], name: str, text: str) -> Any:
    """Read a value as TOML would; what is not quoted where a string is due is taken as it stands."""
    value = _read_value(name, text)
    return text if isinstance(default_of(f), str) and not isinstance(value, str) else value


def _read_value(name: str, text: str) -> Any:
    """Read a value as TOML would; what is not a TOML value is a string."""
    try:
        table = toml.parse(f"value = {text}")
    except toml.LimitError as error:
        raise ConfigError(f"{name} = {reprlib.repr(text)} {error}") from None
    except ConfigError:
        return text
    return table["value"] if list(table) == ["value"] else text
