"""What the documents say is so: commands and code run, links lead somewhere, and paragraphs are short."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import shutil
import socket
from pathlib import Path

import pytest
from commands import Command
from documents import DOCS, ROOT, Reader, anchors, blocks, commands, links, paragraphs, run_doctest
from processes import many_processes
from synthetic import one_thread  # noqa: F401

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
CONCEPTS = sorted(page for page in (DOCS / "concepts").glob("*.md") if "```pycon" in page.read_text(encoding="utf-8"))
SHORT = [ROOT / "README.md", DOCS / "index.md", DOCS / "start.md", *TUTORIALS]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def reader(command: Command, monkeypatch: pytest.MonkeyPatch, folder_without_pictures: Path) -> Reader:
    """Somebody in an empty folder with the examples, whose own modules can be imported."""
    (folder_without_pictures / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(folder_without_pictures)
    return Reader(command, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{link}: there is no such file"
        generated = name_of(target) in ("docs/reference/settings.md", "docs/reference/command_line.md")
        if anchor and target.suffix == ".md" and not generated:  # of generated pages, `make docs` checks them
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", SHORT, ids=name_of)
def test_no_paragraph_has_more_than_six_lines(page: Path) -> None:
    for lines in paragraphs(page.read_text(encoding="utf-8")):
        assert len(lines) <= 6 and max(map(len, lines)) <= 140, "\n".join(lines)


def test_every_page_is_in_the_navigation_or_is_output_of_a_command() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert name.startswith("results/") or re.search(rf"[-:] {re.escape(name)}$", navigation, re.MULTILINE), name


def test_the_generated_pages_have_every_setting_and_every_option() -> None:
    from typer.main import get_command

    from cyber0.cli.main import app
    from cyber0.config.keys import describe

    generate = runpy.run_path(str(DOCS / "generate.py"))
    settings, command_line = generate["settings_page"](), generate["command_line_page"]()
    assert [key.name for key in describe() if f"\n| `{key.name}` | " not in settings] == []
    assert "| `sign_flip` | " in settings and "Options: `" in settings
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        _, _, section = command_line.partition(f"\n## cyber0 {name}\n")
        section = section.partition("\n## ")[0]
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if option != "--help" and f"{option}" not in section] == [], name


def test_links_of_a_page_lead_to_the_same_files_in_the_site() -> None:
    for_site = runpy.run_path(str(DOCS / "generate.py"))["for_site"]
    assert for_site("[a](../../examples/round.py)", "concepts/round.md") == "[a](../examples/round.py)"
    assert for_site("[a](../README.md), [b](TEXT.md#prompts)", "PYTHON.md") == "[a](index.md), [b](TEXT.md#prompts)"
    assert for_site("[a](docs/TEXT.md) [b](https://x.y/z)", "CHANGELOG.md") == "[a](TEXT.md) [b](https://x.y/z)"
    assert for_site("- a\n  b\n```\n  c\n```", "TEXT.md") == "- a\n    b\n```\n  c\n```"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in TUTORIALS if page.stem != "three_machines"], ids=name_of)
def test_a_tutorial_runs_as_written(page: Path, reader: Reader) -> None:
    if page.stem == "language_model":
        pytest.importorskip("transformers")
    for block in blocks(page.read_text(encoding="utf-8")):
        reader.follow(block)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["ZeroOrder(model, lr=0.02", pytest.param("Simulation(", marks=pytest.mark.mnist)])
def test_the_code_for_one_model_and_for_rounds_runs(word: str, reader: Reader) -> None:
    found = blocks((DOCS / "PYTHON.md").read_text(encoding="utf-8"))
    (block,) = [block for block in found if word in block.code and block.language == "python"]
    reader.follow(block)


@pytest.mark.parametrize("page", CONCEPTS, ids=name_of)
def test_what_a_concept_shows_is_so(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "pycon":
            run_doctest(block.code)


@pytest.mark.slow
def test_the_deployment_on_three_machines_runs_as_written(reader: Reader, tmp_path: Path) -> None:
    """On one machine: `fed.example` is loopback, each client has its own folders, and the port is a free one."""
    pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
    own_task = blocks((DOCS / "tutorials/own_task.md").read_text(encoding="utf-8"))
    for block in own_task[:3]:  # the data and the task
        reader.follow(block)
    page = (DOCS / "tutorials/three_machines.md").read_text(encoding="utf-8")
    port = free_port()
    page = (
        page.replace("0.0.0.0:7171", f"127.0.0.1:{port}")
        .replace("fed.example", "127.0.0.1")
        .replace(":7171", f":{port}")
    )
    steps = [words for block in blocks(page) if block.language == "sh" for words in commands(block.code)]
    reader.follow(next(block for block in blocks(page) if block.file == "run.toml"))
    certs, serve, join, verify, replay = steps
    assert [words[1] for words in steps] == ["certs", "serve", "join", "verify", "replay"]
    reader.run(certs)
    for client in range(3):
        shutil.copytree(tmp_path / "pki", f"{client}/pki", ignore=shutil.ignore_patterns("ca.key", "server.*"))
        for other in {0, 1, 2} - {client}:
            for kind in ("pem", "key"):
                Path(f"{client}/pki/client-{other}.{kind}").unlink()
        Path(f"{client}/letters").mkdir()
        for file in ("train.pt", "test.pt"):
            shutil.copy(file, f"{client}/letters")
    for file in ("train.pt", "test.pt"):  # the federator has no data
        Path(file).unlink()
    with many_processes(tmp_path) as start:
        federator = start("federator", *serve[1:])
        federator.await_event("listening")
        places = {"pki": "{}/pki", "letters": "{}/letters", "state": "{}/state"}
        clients = [start(f"client{n}", *(places.get(word, word).format(n) for word in join[1:])) for n in range(3)]
        ends = {re.search(r"chain (\w+), digest (\w+)", client.output()) for client in clients}
        federator.output()
    said = {end.groups() for end in ends if end}
    assert len(said) == 1
    chain, digest = said.pop()
    verified = reader.run(verify)
    assert chain in verified and digest in verified
    assert digest in reader.run(replay)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WITH_EXAMPLES = [
    "aggregate.centres", "aggregate.columns", "aggregate.selection", "api", "attacks.field", "attacks.paper",
    "directions.definition", "ledger.log", "tasks.base", "zero_order.optimizer",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_docstrings_run(name: str, folder_without_pictures: Path) -> None:
    result = doctest.testmod(importlib.import_module(f"cyber0.{name}"), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
