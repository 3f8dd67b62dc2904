"""The documents in tests: their code blocks, commands, paragraphs and links, and a way to run what they show."""

from __future__ import annotations

import doctest
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import Command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: its language, the file that it is the content of, if any, and the code."""

    language: str
    file: str
    code: str


def blocks(text: str) -> list[Block]:
    """Return the blocks of code of a document, in order."""
    return [Block(*found.groups(default="")) for found in FENCE.finditer(text)]


def commands(code: str) -> list[list[str]]:
    """Return the commands of a block for the shell, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def paragraphs(text: str) -> Iterator[list[str]]:
    """Return the lines of each paragraph and each item of a list, without code, tables and headings."""
    found: list[str] = []
    for line in [*FENCE.sub("", text).splitlines(), ""]:
        item = re.match(r" *([-*]|\d+\.) ", line)
        if item or not line.strip() or line.startswith(("|", "#", "![")):
            if found:
                yield found
            found = [line] if item else []
        else:
            found.append(line)


def links(text: str) -> list[str]:
    """Return the relative links of a document."""
    plain = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", plain)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as code hosts and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


class Reader:
    """Somebody who does what a document says, block by block, in the working directory."""

    def __init__(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        self._command, self._monkeypatch = command, monkeypatch
        self._space: dict[str, Any] = {"__name__": "document"}
        self.output = ""
        """What the last block of commands has printed."""

    def follow(self, block: Block) -> None:
        """Write a file, run code or commands, or compare the lines of a `text` block with what was printed."""
        if block.file:
            Path(block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.code, "document", "exec"), self._space)
        elif block.language == "pycon":
            run_doctest(block.code)
        elif block.language == "sh":
            self.output = "".join(self.run(words) for words in commands(block.code))
        elif block.language == "text":
            for line in block.code.splitlines():
                pattern = ".*".join(re.escape(part) for part in line.split("..."))
                assert re.search(pattern, self.output), f"nothing like {line!r} in\n{self.output}"

    def run(self, words: list[str]) -> str:
        """Run a command of a document and return what it prints."""
        if words[0] == "cyber0":
            answer = self._command(*words[1:])
            assert answer.code == 0, (words, answer)
            return answer.out + answer.err
        assert words[0] == "python", f"{shlex.join(words)}: how is this run?"
        self._monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
        return ""


def run_doctest(text: str) -> None:
    """Run the examples of a text, and fail with what they give instead."""
    examples = doctest.DocTestParser().get_doctest(text, {}, "document", None, None)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(examples, out=report.append)
    assert examples.examples and not report, "".join(report)
