"""README.md: every command and every piece of code in it runs as written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from commands import Command
from documents import DOCS, ROOT, Reader, blocks, commands
from synthetic import one_thread  # noqa: F401
from tiny_models import SENTENCES, write_model

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
IN_TABLE = re.findall(r"\| `(cyber0 [^`]+)` \|$", TEXT, re.MULTILINE)
ELSEWHERE = {
    "cyber0 bench": "tests/bench",
    "cyber0 demo": "tests/demo",  # until Ctrl-C
    "cyber0 study examples/study.toml": "tests/study/test_study_grid.py",  # 120 runs take ten minutes: checked, not run
}
"""Commands that take too long here, and what runs them."""


def in_blocks(first: str) -> list[list[str]]:
    """Return the commands of the blocks that begin with a word."""
    found = [words for block in blocks(TEXT) if not block.language for words in commands(block.code)]
    return [words for words in found if words[0] == first]


def test_the_commands_of_make_are_there_and_run_what_is_tested_here() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [words[1] for words in in_blocks("make")] == ["run", "test"]
    assert "\nrun: $(STAMP)\n\t$(VENV)/bin/cyber0 run $(ARGS)\n" in makefile
    for target in set(re.findall(r"`make ([a-z-]+)", TEXT)):
        assert f"\n{target}: " in makefile, target


def test_every_command_is_run_here_or_elsewhere() -> None:
    known = {*IN_TABLE, *(shlex.join(words) for first in ("cyber0", "python", "make") for words in in_blocks(first))}
    written = re.findall(r"^(?:\| .* \| `)?((?:cyber0|python) [^`#\n]+)", TEXT, re.MULTILINE)
    assert [command for command in written if shlex.join(shlex.split(command)) not in known] == []
    for place in ELSEWHERE.values():
        assert (ROOT / place).exists()


def test_the_deployment_is_the_one_that_is_tested_as_the_tutorial() -> None:
    page = blocks((DOCS / "tutorials/three_machines.md").read_text(encoding="utf-8"))
    tutorial = [words for block in page if block.language == "sh" for words in commands(block.code)]
    assert [words for words in in_blocks("cyber0") if words[1] in ("certs", "serve", "join")] == tutorial[:3]


def test_fine_tuning_in_five_lines_moves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 1)
    before = [weight.clone() for weight in model.parameters()]
    (block,) = [block for block in blocks(TEXT) if block.language == "python" and "ZeroOrder" in block.code]
    exec(block.code, {"model": model, "batches": torch.ones(3, 5, 4), "loss_fn": lambda x: model(x).square().mean()})
    assert Path("tuning.ledger").exists()
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_the_script_for_sentences_runs_as_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    write_model("gpt2", tmp_path / "my_model")
    Path("sentences.txt").write_text("\n".join(text for text, _ in SENTENCES))
    Path("examples").symlink_to(ROOT / "examples")
    (words,) = in_blocks("python")
    Reader(command, monkeypatch).run(words)
    assert Path("tuned/model.safetensors").exists()


@pytest.mark.slow
def test_a_task_of_ones_own_trains_as_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, folder_without_pictures: Path
) -> None:
    (code,) = [block.code for block in blocks(TEXT) if "# my_task.py" in block.code]
    Path("my_task.py").write_text(code)
    inputs = torch.randn(600, 57, generator=torch.Generator().manual_seed(0))
    for name in ("train.pt", "test.pt"):
        torch.save((inputs, (inputs[:, 0] > 0).long()), name)
    (words,) = [words for words in in_blocks("cyber0") if words[1] == "run"]
    Reader(command, monkeypatch).run(words)
    (summary,) = Path("runs").glob("spam-*/summary.json")
    assert json.loads(summary.read_text())["final_accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.mnist
def test_the_commands_of_the_table_run_as_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, folder_without_pictures: Path
) -> None:
    Path("examples").symlink_to(ROOT / "examples")
    reader = Reader(command, monkeypatch)
    assert len(IN_TABLE) > 10
    for line in ["cyber0 run", *IN_TABLE]:
        if line not in ELSEWHERE:
            reader.run(shlex.split(line))
    assert reader.run(["cyber0", "study", "examples/study.toml", "--dry-run"])
    assert Path("report.html").exists() and Path("model.safetensors").exists()
