"""TOML as text: parsed, with limits on what no setting needs and what no error message could show."""

from __future__ import annotations

from typing import Any

from cyber0.errors import ConfigError

MAX_DEPTH = 32
MAX_BITS = 1024  # of an integer: any that a float can hold


class LimitError(ConfigError):
    """A document is valid, but nested too deeply or with an integer that is too long."""


def parse(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises:
        ConfigError: it is no TOML, is nested too deeply, or has an integer that is too long; says which, without the
            name of the document.
    """
    import tomllib

    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not valid TOML: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python converts no more than some thousand digits
        raise _too_long("an integer") from None
    _check(tables)
    return tables


def _check(tables: dict[str, Any]) -> None:
    level: list[tuple[str, Any]] = list(tables.items())
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, dict):
                inner += [(f"{name}.{key}", item) for key, item in value.items()]
            elif isinstance(value, list):
                inner += [(name, item) for item in value]
            elif isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise _too_long(name)
        level = inner
    if level:
        raise _too_deep()


def _too_deep() -> LimitError:
    return LimitError(f"is nested too deeply: at most {MAX_DEPTH} tables or arrays may be inside one another")


def _too_long(name: str) -> LimitError:
    return LimitError(f"can't be read: {name} has too many digits; an integer has at most {MAX_BITS} bits")
