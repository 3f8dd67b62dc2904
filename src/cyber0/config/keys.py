"""One setting: how it is declared, checked and shown. What the settings are is in schema.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from cyber0.config.choices import Choices
from cyber0.config.suggestions import closest, suggestion
from cyber0.errors import ConfigError

Value = int | float | bool | str
OptionsTable = dict[str, Any]
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
    alias: str = "",
    parse: Callable[[_T, str], object] | None = None,
    word: str = "",
) -> _T:
    """Declare a setting.

    Args:
        default: Its default, whose type is the type of the setting.
        text: What it means, in one line.
        choices: The names that it may be.
        limits: What `valid` requires, in words.
        valid: Tells whether a value is possible.
        own: Tells which values are possible beside the choices: the path of an object of the user's, file.py:name.
        alias: What the setting is an old name of: an option, as table.option (see `with_aliases`).
        parse: For values with a form of their own: given the value and the key's name, it raises a ConfigError.
        word: The one word that a number may be instead, as "auto".
    """
    metadata = {"text": text, "choices": choices, "limits": limits, "valid": valid, "own": own, "alias": alias,
                "parse": parse, "word": word}  # fmt: skip
    result: _T = field(default=default, metadata=metadata)
    return result


def table(text: str) -> OptionsTable:
    """Declare a setting that is a table of options, empty by default: `options = {tau = 2.0}`."""
    metadata = {"text": text, "choices": None, "limits": "", "valid": None, "own": None, "alias": ""}
    result: OptionsTable = field(default_factory=dict, metadata=metadata)
    return result


@contextmanager
def as_recorded() -> Iterator[None]:
    """Build configs that others made: names of rules and the like are not looked up, and nothing is imported.

    A header may name objects that only its author has; reading, verifying and replaying need none of them.
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
    """Base of all sections: values are checked one by one, then together, whenever a section is built.

    A subclass is the section of a config file that it names, in the order of their definitions, or where it names none
    the top of the file.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if cls.section:
            SECTIONS[cls.section] = cls
        else:
            _top.append(cls)

    def __post_init__(self) -> None:
        for f in settings(type(self)):
            name = full_name(self.section, f.name)
            object.__setattr__(self, f.name, checked_value(name, f, getattr(self, f.name)))
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that are possible one by one and contradict each other."""


SECTIONS: dict[str, type[Checked]] = {}
"""The sections of a config file, by name."""
_top: list[type[Checked]] = []


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
    word = f.metadata["word"]
    if word and value == word:
        return value
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) is not kind:
        raise ConfigError(f"{name} = {value!r} must be {_KINDS[kind]}{f' or {word!r}' if word else ''}")
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


def _checked_table(name: str, value: Any) -> OptionsTable:
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
    """Return whether a string can be written to a file (one from the command line may hold undecodable bytes)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def comment(f: Field[Any]) -> str:
    """Return what a key means and which values it takes."""
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


class KeyDescription(NamedTuple):
    """One setting as shown to a reader."""

    name: str
    default: Any
    text: str
    limits: str
    choices: Choices


def describe() -> list[KeyDescription]:
    """Return every key that a config can have, in the order of the file."""
    from cyber0.config import schema  # noqa: F401 (it declares them, by this module)

    kinds = [*_top, *SECTIONS.values()]
    return [
        KeyDescription(full_name(kind.section, f.name), default_of(f), f.metadata["text"], *range_of(f))
        for kind in kinds
        for f in settings(kind)
    ]


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of one key or option, in the key's type; refuse what is unknown or impossible by itself."""
    section, _, key = name.rpartition(".")
    options = table_of(section)
    if options is not None:
        return checked_value(section, options, {key: value})[key]
    refuse_unknown(section, key, value)
    return checked_value(name, setting(section, key), value)


def table_of(name: str) -> Field[Any] | None:
    """Return the setting of that full name, if it is a table of options."""
    section, _, key = name.rpartition(".")
    if section not in SECTIONS:
        return None
    return next((f for f in settings(SECTIONS[section]) if f.name == key and is_table(f)), None)


def setting(section: str, key: str) -> Field[Any]:
    """Return the setting of that section, which must have one of that name."""
    kinds = [SECTIONS[section]] if section else _top
    return next(f for kind in kinds for f in settings(kind) if f.name == key)


def refuse_unknown(section: str, key: str, value: Any) -> None:
    """Refuse a key that no section has, with the nearest that one has."""
    name, known = full_name(section, key), [d.name for d in describe()]
    if name in known:
        return
    if name in SECTIONS:
        raise ConfigError(f"{name} is a section; set one of its keys: {names_in(SECTIONS[name])}")
    here = [full for full in [*known, *SECTIONS] if full.rpartition(".")[0] == section]
    # The same section comes first, but the right key in the wrong section is found as well.
    by_key = {full.rpartition(".")[2]: full for full in reversed([*here, *known])}
    near = closest(key, by_key)
    tables = [d.name for d in describe() if table_of(d.name) is not None]
    if meant := closest(section, tables) if "." in section else None:
        by_key, near = {key: full_name(meant, key)}, key
    remedy = f"did you mean {by_key[near]!r}?" if near else f"possible are {', '.join(here or SECTIONS)}"
    raise ConfigError(f"unknown key {name!r} (= {value!r}); {remedy}")


def names_in(kind: type[Checked]) -> str:
    """Return the names of a section's settings, to be read."""
    return ", ".join(f.name for f in settings(kind))


def with_aliases(
    section: Checked, table: str, takes: Callable[[], Iterable[str]], names: Mapping[str, str] | None = None
) -> OptionsTable:
    """Return a table of options with those that were set by their old names; refuse two values for one option.

    Args:
        section: Where the table and the old names are set.
        table: The table's name.
        takes: Returns which options are taken; what others were set to by an old name says nothing. It is called only
            where an old name was set, for the answer may need an import.
        names: The options that some old names stand for here, where that depends on more than the name.
    """
    options: OptionsTable = dict(getattr(section, table))
    for f in settings(type(section)):
        of, _, option = f.metadata["alias"].partition(".")
        option, value = (names or {}).get(option, option), getattr(section, f.name)
        if of != table or value == default_of(f) or option not in takes():
            continue
        if options.setdefault(option, value) != value:
            raise ConfigError(
                f"{full_name(section.section, f.name)} = {value!r} is an alias of "
                f"{full_name(section.section, table)}.{option}, which is {options[option]!r}; set one of them"
            )
    return options
