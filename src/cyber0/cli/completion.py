"""What the shell offers after Tab: names of settings, devices, data sets and reproductions. Nothing heavy is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

Offer = tuple[str, str]
"""What is offered, and what it means."""


def devices(incomplete: str) -> list[Offer]:
    """Offer the devices."""
    from cyber0.config.choices import DEVICES

    return _beginning(incomplete, DEVICES.items())


def data_sets(incomplete: str) -> list[Offer]:
    """Offer what `cyber0 data` fetches."""
    from cyber0.config.choices import DATASETS

    return _beginning(incomplete, DATASETS.items())


def reproductions(incomplete: str) -> list[Offer]:
    """Offer what `cyber0 reproduce` makes again."""
    from cyber0.reproduce import GROUPS, REPRODUCTIONS

    single = ((name, found.text) for name, found in REPRODUCTIONS.items())
    return _beginning(incomplete, [*single, *((name, ", ".join(members)) for name, members in GROUPS.items())])


def settings(incomplete: str) -> list[Offer]:
    """Offer the settings, and once it is clear which one is meant, its values."""
    from cyber0.config.keys import describe

    named = [key for key in describe() if key.name == incomplete.partition("=")[0] or key.name.startswith(incomplete)]
    if len(named) != 1 and "=" not in incomplete:
        return [(f"{key.name}=", key.text) for key in named]
    return _beginning(incomplete, (offer for key in named for offer in _values(key.name, key.default, key.choices)))


def _values(name: str, default: object, choices: Mapping[str, str]) -> Iterator[Offer]:
    if choices:
        yield from ((f"{name}={value}", text) for value, text in choices.items())
        return
    # Two of them, so that the shell completes as far as both agree, the equals sign, and adds no space.
    yield f"{name}=", "another value"
    yield f"{name}={str(default).lower() if isinstance(default, bool) else default}", "the default"


def _beginning(incomplete: str, offers: Iterable[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer[0].startswith(incomplete)]


def answer_bash(environment: Mapping[str, str]) -> bool:
    """Answer bash if it asks for the value of a setting, and return whether it does.

    Bash takes the equals sign for the end of a word, so what it hands over is `--set KEY = VALUE` in four words, which
    the options' own completion can't know; in other shells it is `--set KEY=VALUE`.
    """
    if environment.get("_CYBER0_COMPLETE") != "complete_bash":
        return False
    words, place = environment.get("COMP_WORDS", "").split(), environment.get("COMP_CWORD", "")
    if not place.isdecimal():
        return True  # not what bash sends: nothing is offered, here or by the options' own completion
    at = int(place)
    begun = [*words[:at], words[at] if at < len(words) else ""]
    if begun[-1] == "=":  # the cursor is right behind it
        begun.append("")
    if len(begun) < 4 or begun[-4] != "--set" or begun[-2] != "=":
        return False
    key, value = begun[-3], begun[-1]
    for offer, _ in settings(f"{key}={value}"):
        if offer != f"{key}=":
            print(offer.removeprefix(f"{key}="))
    return True
