"""Help, completion, and the commands that list and advise."""

from __future__ import annotations

import itertools
import re

import pytest
import typer
from commands import Command

from cyber0 import __version__
from cyber0.cli import completion
from cyber0.cli import main as cli
from cyber0.config import choices, registry
from cyber0.config import keys as config
from cyber0.config.registry import RULES


@pytest.mark.slow
def test_help_names_every_command_and_version_the_version(cyber0: Command) -> None:
    answer = cyber0("--help")
    assert answer.code == 0
    for name in ("run", "study", "report", "replay", "verify", "repair", "init", "list", "data"):
        assert f" {name} " in answer.out
        assert cyber0(name, "--help").code == 0
        assert cyber0(name, "-h") == cyber0(name, "--help")
    assert cyber0("--version") == (0, f"cyber0 {__version__}\n", "")


def test_the_help_of_a_study_names_its_table(cyber0: Command) -> None:
    assert "a table 'study' of" in cyber0("study", "--help").out  # in brackets it would be markup, and not shown


def test_list_names_every_setting_and_every_choice(cyber0: Command) -> None:
    answer = cyber0("list")
    assert answer.code == 0
    for key in config.describe():
        assert key.name in answer.out
    tables = [
        table
        for home in (choices, registry)
        for name, table in vars(home).items()
        if name.isupper() and not name.startswith("_")
    ]
    assert len(tables) > 12
    for name in (name for table in tables for name in table):
        assert f"{name}:" in answer.out, name


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("100", 100), ("", 120), ("0", 120), ("x", 120)])
@pytest.mark.parametrize("arguments", [("list",), ("theory", "--d", "100")])
def test_what_is_piped_is_as_wide_as_columns_says(
    arguments: tuple[str, ...], columns: str, width: int, cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    answer = cyber0(*arguments)
    assert answer.code == 0
    assert max(len(line) for line in answer.out.splitlines() if not line.startswith("- ")) == width


@pytest.mark.slow
def test_theory_takes_whole_numbers_as_they_are_written_and_no_others(cyber0: Command) -> None:
    assert cyber0("theory", "--d", "1e6", "--n", "1e3") == cyber0("theory", "--d", "1000000", "--n", "1000")
    for wrong in ("1.5", "1e999999", "nan", "many"):
        answer = cyber0("theory", "--d", wrong)
        assert answer.code == 2 and "--d" in answer.err and not answer.out


def test_theory_refuses_a_picture_that_it_can_not_draw_before_it_says_anything(cyber0: Command) -> None:
    answer = cyber0("theory", "--d", "100", "--plot", "foo.xyz")
    assert answer.code == 2 and "--plot foo.xyz can't be drawn" in answer.err and not answer.out


def prose_of(text: str) -> list[list[str]]:
    """Return the paragraphs between the usage and the first panel of a command's help, line by line."""
    lines = [line.strip() for line in text.partition("╭")[0].splitlines()]
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return [paragraph.splitlines() for paragraph in paragraphs[1:]]


COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_help_is_broken_at_the_edge_of_the_terminal_and_nowhere_else(
    name: str, width: int, cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    answer = cyber0(name, "--help")
    assert answer.code == 0
    paragraphs = prose_of(answer.out)
    assert paragraphs
    for lines in paragraphs:
        for line, following in itertools.pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > width - 2, (line, following)
    found = next(c for c in cli.app.registered_commands if (c.name or c.callback.__name__) == name)  # type: ignore[union-attr]
    written = found.callback.__doc__  # type: ignore[union-attr]
    assert written and " ".join(written.split()) == " ".join(" ".join(" ".join(lines) for lines in paragraphs).split())
    assert "[[" not in answer.out
    assert not re.search(r"<\w+>|[{}]", answer.out), "a type is shown, or braces around an argument"
    assert max(map(len, answer.out.splitlines())) <= width


def completed(cyber0: Command, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Return what bash is offered for the last of the words."""
    monkeypatch.setenv("_CYBER0_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["cyber0", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    answer = cyber0()
    assert answer.code == 0, answer
    return answer.out.split()


@pytest.mark.parametrize("place", ["x", "", "-9", "1.5", None])
def test_a_place_that_bash_would_not_send_completes_to_nothing(
    place: str | None, cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_CYBER0_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cyber0 run")
    if place is None:
        monkeypatch.delenv("COMP_CWORD", raising=False)
    else:
        monkeypatch.setenv("COMP_CWORD", place)
    answer = cyber0()
    assert (answer.code, answer.out, answer.err) == (0, "", "")


@pytest.mark.slow
def test_the_shell_completes_commands_settings_and_names(cyber0: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(*words: str) -> list[str]:
        return completed(cyber0, monkeypatch, *words)

    assert {"replay", "report", "reproduce"} <= set(offered("re")) <= set(COMMANDS)
    assert offered("run", "--dev") == ["--device"] and offered("run", "--device", "c") == ["cpu", "cuda"]
    assert "method.k=" in offered("run", "--set", "method.") and "seed=" in offered("run", "--set", "s")
    assert offered("run", "--set", "aggregation.ru") == [f"aggregation.rule={rule}" for rule in RULES]
    assert offered("study", "--nothing-of-the-kind") == []
    assert offered("reproduce", "table3") == ["table3", "table3_lr"] and offered("data", "m") == ["mnist"]
    assert offered("serve", "c.toml", "--set", "serve.quo") == ["serve.quorum=", "serve.quorum=1"]
    # Bash hands the equals sign over as a word of its own.
    assert offered("run", "--set", "aggregation.rule", "=") == list(RULES)
    assert offered("run", "--set", "aggregation.rule", "=", "tri") == ["trimmed_mean"]
    assert offered("run", "--set", "method.k", "=") == ["64"]


def test_every_setting_is_offered_and_so_are_its_default_and_its_choices() -> None:
    assert completion.settings("") == [(f"{key.name}=", key.text) for key in config.describe()]
    for key in config.describe():
        offers = [offer for offer, _ in completion.settings(f"{key.name}=")]
        values = [offer.removeprefix(f"{key.name}=") for offer in offers]
        assert values == (list(key.choices) if key.choices else ["", config_text(key.default)])


def config_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
