"""What the shell suggests after Tab: settings, devices, data sets and reproductions. Nothing heavy is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

Suggestion = tuple[str, str]
"""A completion, and what it means."""


def devices(incomplete: str) -> list[Suggestion]:
    """Suggest the devices."""
    from cyber0.config.choices import DEVICES

    return _beginning(incomplete, DEVICES.items())


def data_sets(incomplete: str) -> list[Suggestion]:
    """Suggest what `cyber0 data` fetches."""
    from cyber0.config.choices import DATASETS

    return _beginning(incomplete, DATASETS.items())


def reproductions(incomplete: str) -> list[Suggestion]:
    """Suggest what `cyber0 reproduce` reproduces."""
    from cyber0.reproduce import GROUPS, REPRODUCTIONS

    single = ((name, found.text) for name, found in REPRODUCTIONS.items())
    return _beginning(incomplete, [*single, *((name, ", ".join(members)) for name, members in GROUPS.items())])


def settings(incomplete: str) -> list[Suggestion]:
    """Suggest the settings, and once only one is possible, its values."""
    from cyber0.config.keys import describe

    named = [key for key in describe() if key.name == incomplete.partition("=")[0] or key.name.startswith(incomplete)]
    if len(named) != 1 and "=" not in incomplete:
        return [(f"{key.name}=", key.text) for key in named]
    return _beginning(incomplete, (value for key in named for value in _values(key.name, key.default, key.choices)))


def _values(name: str, default: object, choices: Mapping[str, str]) -> Iterator[Suggestion]:
    if choices:
        yield from ((f"{name}={value}", text) for value, text in choices.items())
        return
    # Two suggestions, so that the shell completes up to the equals sign, where both agree, and adds no space.
    yield f"{name}=", "another value"
    yield f"{name}={str(default).lower() if isinstance(default, bool) else default}", "the default"


def _beginning(incomplete: str, suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    return [suggestion for suggestion in suggestions if suggestion[0].startswith(incomplete)]


def answer_bash(environment: Mapping[str, str]) -> bool:
    """Answer bash if it asks for the value of a setting, and return whether it did.

    Bash splits words at the equals sign, so it passes `--set KEY = VALUE` as four words, which typer's completion does
    not expect; other shells pass `--set KEY=VALUE`.
    """
    if environment.get("_CYBER0_COMPLETE") != "complete_bash":
        return False
    words, place = environment.get("COMP_WORDS", "").split(), environment.get("COMP_CWORD", "")
    if not place.isdecimal():
        return True  # not what bash sends: suggest nothing, here or by typer
    at = int(place)
    typed = [*words[:at], words[at] if at < len(words) else ""]
    if typed[-1] == "=":  # the cursor is right behind it
        typed.append("")
    if len(typed) < 4 or typed[-4] != "--set" or typed[-2] != "=":
        return False
    key, value = typed[-3], typed[-1]
    for suggestion, _ in settings(f"{key}={value}"):
        if suggestion != f"{key}=":
            print(suggestion.removeprefix(f"{key}="))
    return True
