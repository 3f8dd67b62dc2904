"""What can be named in a config: one registry a kind, filled by a decorator at each factory.

    @cyber0.rule
    def clipped(*, tau: float = 1.0):
        "Average the reports, none of them longer than tau."
        return lambda matrix: ...

A factory is registered under its own name. Its text is the first line of its docstring; its options are its arguments,
checked against its signature. Some arguments are not options but come from elsewhere: the factory of a rule that has an
argument `beta` is given aggregation.beta. A name with a colon, `my_rules.py:clipped`, is the path of a factory, which
need not be decorated (see doors.py); what a file decorates is known by its path alone.

What else is known of a factory is declared where it is registered, as its traits:

    rule              pairwise      it compares every pair of reports, so there can't be many
                      history       it judges clients by earlier rounds, so every report is stored
                      judges        it can say which client is guilty beyond doubt (federation.expel)
                      reference     it needs the report of a trusted client (aggregation.reference)
    pre_aggregation   pairwise      likewise
    attack            needs_own     it looks at `Knowledge.own`, which has to be measured for it (the default)
                      needs_truth   it looks at `Knowledge.truth`: True, or a function of its options that says so
                      flips_labels  its clients measure on flipped labels
                      plans         it looks ahead by `Knowledge.rehearse`, where the rule has a history
                      strength      the option that federation.attack_strength sets

This module is light: the factories are imported when a name is first looked up.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar, overload

from cyber0.config import doors
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A factory, the name it goes by, and what is known of it."""

    name: str
    factory: Callable[..., Any]
    traits: Mapping[str, Any]
    given: frozenset[str]
    """Arguments that are no options."""
    own: bool = False
    """Whether it is a user's, not ours."""

    @property
    def text(self) -> str:
        """What it does, in one line."""
        return (inspect.getdoc(self.factory) or "").strip().partition("\n")[0]

    @cached_property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """All arguments of the factory that have a name, options and others."""
        try:
            found = inspect.signature(self.factory).parameters
        except (TypeError, ValueError):
            return {}
        return {name: p for name, p in found.items() if p.kind is not p.VAR_POSITIONAL}

    @property
    def options(self) -> list[str]:
        """The names of its options."""
        named = (name for name, p in self.arguments.items() if p.kind is not p.VAR_KEYWORD)
        return [name for name in named if name not in self.given]

    @property
    def required(self) -> list[str]:
        """The names of its options that have no default."""
        return [name for name in self.options if self.arguments[name].default is inspect.Parameter.empty]

    @property
    def shown_options(self) -> str:
        """Its options with their types and defaults, to be read."""
        return ", ".join(map(self._shown, self.options))

    @cached_property
    def kinds(self) -> Mapping[str, Any]:
        """The type of each argument whose type is known."""
        try:
            return typing.get_type_hints(self.factory)
        except Exception:  # an annotation may name what is imported for type checkers alone
            return {}

    def check(self, options: Mapping[str, Any], key: str) -> None:
        """Refuse options that the factory does not take; `key` is where they were set."""
        open_ended = any(p.kind is p.VAR_KEYWORD for p in self.arguments.values())
        for option, value in options.items():
            if option in self.given or (option not in self.options and not open_ended):
                raise ConfigError(f"{key}.{option} = {value!r}: {self.name} takes no such option; "
                                  f"{self._takes(option)}")  # fmt: skip
            if option in self.options and not _fits(value, self._kind(option)):
                raise ConfigError(f"{key}.{option} = {value!r} has the wrong type: {self.name} takes "
                                  f"{self._shown(option)}")  # fmt: skip
        for option in self.required:
            if option not in options:
                raise ConfigError(f"{key}.{option} is missing: {self.name} takes {self._shown(option)}")

    def _kind(self, option: str) -> Any:
        default = self.arguments[option].default
        if option in self.kinds:
            return self.kinds[option]
        return type(default) if isinstance(default, (bool, str)) else float if _is_number(default) else Any

    def _shown(self, option: str) -> str:
        parameter, kind = self.arguments[option], self._kind(option)
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        parts = typing.get_args(kind) or (kind,)
        plain = all(part in (bool, int, float, str, type(None)) for part in parts)
        names = " | ".join("None" if part is type(None) else part.__name__ for part in parts) if plain else ""
        return f"{option}{f': {names}' if names else ''}{default}"

    def _takes(self, option: str) -> str:
        if not self.options:
            return "it takes none"
        near = suggestion(option, self.options)
        return near if near.startswith("did") else f"it takes {self.shown_options}"


class Registry(Mapping[str, str]):
    """The factories of one kind: name -> what it does in one line.

    Args:
        kind: What they make.
        key: The setting that names one.
        options_key: The setting that holds its options.
        home: The module that registers ours when it is imported.
        traits: What can be declared of one at its registration, with the defaults.
        given: Arguments that a factory is given and that are no options.
    """

    def __init__(
        self, kind: str, key: str, options_key: str, home: str, *, traits: Mapping[str, Any] | None = None,
        given: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.kind, self.key, self.options_key = kind, key, options_key
        self._home, self._traits, self._given = home, dict(traits or {}), frozenset(given)
        self._entries: dict[str, Entry] = {}
        self._declared: dict[Callable[..., Any], Mapping[str, Any]] = {}

    def __getitem__(self, name: str) -> str:
        return self._known()[name].text

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    @overload
    def register(self, factory: _F, /) -> _F: ...

    @overload
    def register(self, /, *, name: str = "", **traits: Any) -> Callable[[_F], _F]: ...

    def register(self, factory: _F | None = None, /, *, name: str = "", **traits: Any) -> _F | Callable[[_F], _F]:
        """Register a factory, under its own name unless another is given: a decorator, with or without arguments."""
        if factory is None:
            return lambda decorated: self._add(decorated, name, traits)
        return self._add(factory, name, traits)

    def entry(self, name: str) -> Entry:
        """Return the factory of that name, or the one that a path names, which is imported.

        Raises:
            ConfigError: there is none.
        """
        if doors.is_path(name):
            factory = doors.load_factory(name, self.key)
            traits = self._declared.get(factory, self._traits)
            return Entry(doors.short(name), factory, traits, self._given, own=True)
        entries = self._known()
        if name not in entries:
            raise ConfigError(f"{self.key} = {name!r} is not a choice; {suggestion(name, entries)}")
        return entries[name]

    def find(self, name: str) -> Entry | None:
        """Return what is registered under a name; None for a path, and for what only the config of others names."""
        return self.entry(name) if name in self else None

    def make(self, name: str, options: Mapping[str, Any] | None = None, **given: Any) -> Any:
        """Call the factory of that name with its options and with those of the given arguments that it has.

        Raises:
            ConfigError: the factory does not take these options, or refuses their values.
        """
        entry, options = self.entry(name), options or {}
        needed = [o for o in entry.required if o not in options and entry.arguments[o].kind.name != "KEYWORD_ONLY"]
        if entry.own and needed:
            raise ConfigError(
                f"{self.key} = {doors.short(name)!r} must be a factory that returns the {self.kind}, and it takes "
                f"{', '.join(needed)}: name a function that returns it, or set {self.options_key}.{needed[0]}"
            )
        entry.check(options, self.options_key)
        try:
            return entry.factory(**options, **{key: value for key, value in given.items() if key in entry.arguments})
        except ConfigError as error:
            raise ConfigError(f"{self.key} = {name!r}: {error}") from None
        except Exception as error:  # a user's code may raise anything
            if not entry.own:
                raise
            reason = doors.described(error)
            raise ConfigError(f"{self.key} = {name!r} failed with {dict(options)}: {reason}") from error

    def _known(self) -> Mapping[str, Entry]:
        import_module(self._home)
        return self._entries

    def _add(self, factory: _F, name: str, traits: Mapping[str, Any]) -> _F:
        name = name or factory.__name__
        unknown = [trait for trait in traits if trait not in self._traits]
        if unknown:
            raise ConfigError(f"the {self.kind} {name!r} has no trait {unknown[0]!r}; "
                              f"{suggestion(unknown[0], ['name', *self._traits])}")  # fmt: skip
        self._declared[factory] = {**self._traits, **traits}
        if factory.__module__.startswith(doors.MODULE):
            return factory  # loaded from a file: known by its path alone
        own = not factory.__module__.startswith("cyber0.")
        if own and name in self._known() and not self._entries[name].own:
            raise ConfigError(
                f"{name!r} is the name of a built-in {self.kind}; choose another, or give one by name=..., as in "
                f'@cyber0.{self.kind.replace("-", "_")}(name="my_{name}")'
            )
        self._entries[name] = Entry(name, factory, self._declared[factory], self._given, own)
        return factory


def import_modules(package: str, path: Iterable[str], *, but: tuple[str, ...] = ()) -> None:
    """Import every module of a package but some: what it registers is known, so that a new one is a new file."""
    for module in iter_modules(path):
        if module.name not in but:
            import_module(f"{package}.{module.name}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value can stand where that type is wanted; what can't be judged can."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    if kind is type(None):
        return value is None
    if kind is float:
        return _is_number(value)
    if kind is int:
        return _is_number(value) and isinstance(value, int)
    return isinstance(value, kind) if kind in (bool, str) else True


RULES = Registry(
    "rule", "aggregation.rule", "aggregation.options", "cyber0.aggregate", given=("beta",),
    traits={"pairwise": False, "history": False, "judges": False, "reference": False},
)  # fmt: skip
PRE_AGGREGATIONS = Registry("pre-aggregation", "aggregation.before", "pre-aggregation", "cyber0.aggregate",
                            traits={"pairwise": False}, given=("rule", "beta", "seed"))  # fmt: skip
ATTACKS = Registry(
    "attack", "federation.attack", "federation.attack_options", "cyber0.attacks",
    traits={"needs_own": True, "needs_truth": False, "flips_labels": False, "plans": False, "strength": ""},
)  # fmt: skip
PARTITIONS = Registry("partition", "federation.partition", "federation.partition_options", "cyber0.tasks.partition")
SCHEDULES = Registry("schedule", "method.lr_schedule", "method.lr_options", "cyber0.config.schedules")
OPTIMIZERS = Registry("optimizer", "method.optimizer", "method.optimizer_options", "cyber0.optimizers")

rule, pre_aggregation, attack = RULES.register, PRE_AGGREGATIONS.register, ATTACKS.register
partition, schedule = PARTITIONS.register, SCHEDULES.register
optimizer = OPTIMIZERS.register  # ours alone: a ledger must be replayed by everybody
