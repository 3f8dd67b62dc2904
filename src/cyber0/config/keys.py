"""How a setting is declared, checked and shown; what the settings are is in config.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from cyber0.config.choices import Choices
from cyber0.errors import ConfigError

OTHER_WORDS = {"gpu": "cuda", "nvidia": "cuda", "processor": "cpu", "fp32": "float32", "fp16": "float16",
               "half": "float16", "bf16": "bfloat16", "average": "mean", "normal": "gaussian",
               "learning_rate": "lr", "learningrate": "lr"}  # fmt: skip
"""What people type for a name: an error suggests the name, whatever else is spelled alike ("gpu" is not "cpu")."""

Value = int | float | bool | str
Table = dict[str, Any]
"""Options by name: what a factory takes as keyword arguments."""
_T = TypeVar("_T", int, float, bool, str)
_recorded: ContextVar[bool] = ContextVar("recorded", default=False)


def key(
    default: _T,
    text: str,
    *,
    choices: Choices | None = None,
    limits: str = "",
    valid: Callable[[_T], bool] | None = None,
    own: Callable[[_T], bool] | None = None,
    parse: Callable[[_T, str], object] | None = None,
) -> _T:
    """Declare a setting: `valid` says whether a value is possible, `limits` says the same in words.

    `own` says which values are possible beside the choices: the path of an object of the user's, file.py:name.
    `parse` is for values with a form of their own: given the value and the key's name, it raises a ConfigError.
    """
    metadata = {"text": text, "choices": choices, "limits": limits, "valid": valid, "own": own, "parse": parse}
    result: _T = field(default=default, metadata=metadata)
    return result


def table(text: str) -> Table:
    """Declare a setting that is a table of options, empty by default: `options = {tau = 2.0}`."""
    metadata = {"text": text, "choices": None, "limits": "", "valid": None, "own": None}
    result: Table = field(default_factory=dict, metadata=metadata)
    return result


@contextmanager
def as_recorded() -> Iterator[None]:
    """Build configs that others made: names of rules and the like are taken as they stand, and nothing is imported.

    A header may name what is registered or lies elsewhere; who reads the header, verifies or replays needs none of it.
    """
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def is_recorded() -> bool:
    """Return whether configs are built as others recorded them."""
    return _recorded.get()


class Checked:
    """Base of all sections: values are checked one by one, then together, whenever a section is built."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for f in settings(type(self)):
            name = full_name(self.section, f.name)
            object.__setattr__(self, f.name, checked_value(name, f, getattr(self, f.name)))
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that are possible one by one and contradict each other."""


def full_name(section: str, key: str) -> str:
    """Name a key as errors and overrides do: section.key."""
    return f"{section}.{key}" if section else key


def settings(kind: type[Checked]) -> list[Field[Any]]:
    """Return the fields that are keys, not sections."""
    assert is_dataclass(kind)
    return [f for f in fields(kind) if "text" in f.metadata]


def default_of(f: Field[Any]) -> Any:
    """Return a key's default, whose type is the type of the key."""
    return {} if is_table(f) else f.default


def is_table(f: Field[Any]) -> bool:
    """Return whether a key holds a table of options."""
    return f.default_factory is dict


def range_of(f: Field[Any]) -> tuple[str, Choices]:
    """Return which values a key takes: its limits in words, or its choices."""
    choices = f.metadata["choices"]
    return f.metadata["limits"], {} if choices is None else choices  # asking for the length would import the factories


def checked_value(name: str, f: Field[Any], value: Any) -> Any:
    """Return the value in its key's type, or refuse it."""
    if is_table(f):
        return _checked_table(name, value)
    kind: type[Any] = type(default_of(f))
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) is not kind:
        raise ConfigError(f"{name} = {value!r} must be {_KINDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r} must be a finite number")
    if kind is str and not _is_text(value):
        raise ConfigError(f"{name} = {value!r} can't be written as UTF-8; use another name")
    limits, names = range_of(f)
    if value == default_of(f):  # an empty default stands for another key's choice
        return value
    if f.metadata["parse"]:
        f.metadata["parse"](value, name)
        return value
    own = f.metadata["own"]
    if not (own and own(value)) and names and value not in names:
        remedy = suggestion(value, names)
        if own and (":" in value or ".py" in value):
            remedy = "one of your own must be file.py:name or package.module:name"
        elif ".py:" in value:
            remedy = f"it can't be the path of your own code; {remedy}"
        raise ConfigError(f"{name} = {value!r} is not a choice; {remedy}")
    if f.metadata["valid"] and not f.metadata["valid"](value):
        raise ConfigError(f"{name} = {value!r} is impossible; it must be {limits}")
    return value


def _checked_table(name: str, value: Any) -> Table:
    """Return a table of options, or refuse what can't be the keyword arguments of a factory."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r} must be a table of options, such as {{tau = 2.0}}")
    for option, found in value.items():
        if not isinstance(option, str) or not option.isidentifier():
            raise ConfigError(f"{name}: {option!r} can't be the name of an option; use letters, digits and _")
        for one in found if isinstance(found, list) else [found]:
            if not isinstance(one, Value) or (isinstance(one, float) and not math.isfinite(one)):
                raise ConfigError(f"{name}.{option} = {found!r} must be a finite number, a string, true or false, or a "
                                  "list of these")  # fmt: skip
            if isinstance(one, str) and not _is_text(one):
                raise ConfigError(f"{name}.{option} = {found!r} can't be written as UTF-8; use another value")
    return {option: list(found) if isinstance(found, list) else found for option, found in value.items()}


def _is_text(value: str) -> bool:
    """Tell whether a string can be written to a file (one from the command line may hold undecodable bytes)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant, if one is near."""
    import difflib

    known = list(names)
    if OTHER_WORDS.get(name.lower()) in known:
        return OTHER_WORDS[name.lower()]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def suggestion(name: str, names: Iterable[str]) -> str:
    """Say what was probably meant, or what is possible."""
    known = list(names)
    near = closest(name, known)
    return f"did you mean {near!r}?" if near else f"possible are {', '.join(known)}"


def check_known(what: str, name: str, names: Iterable[str]) -> None:
    """Refuse a name that nothing of this kind has."""
    known = list(names)
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}; {suggestion(str(name), known)}")


def comment(f: Field[Any]) -> str:
    """Say what a key means and which values it takes."""
    limits, names = range_of(f)
    text, possible = f.metadata["text"], " | ".join(names) or limits
    return f"{text} ({possible})" if possible else str(text)


def toml_value(value: Any) -> str:
    """Write a value as TOML; reading it back gives the same bits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import json

        # A JSON string is a TOML string, but for the delete character, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
