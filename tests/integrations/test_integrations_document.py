"""The code of docs/INTEGRATIONS.md runs as written, with stand-ins for packages that are not installed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from stand_ins import DataSet, Logged
from synthetic import one_thread  # noqa: F401
from tiny_models import config, tokenizer

from cyber0 import Ledger

PAGE = (Path(__file__).parents[2] / "docs/INTEGRATIONS.md").read_text(encoding="utf-8")


def blocks(title: str) -> list[str]:
    """The Python code of a section."""
    _, _, rest = PAGE.partition(f"## {title}\n")
    return re.findall(r"```python\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)


def execute(title: str, space: dict[str, Any]) -> dict[str, Any]:
    found = blocks(title)
    assert found, title
    for number, code in enumerate(found):
        exec(compile(code, f"INTEGRATIONS.md, {title}, block {number}", "exec"), space)
    return space


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_block_of_the_page_is_run_here() -> None:
    titles = ("A Hugging Face Trainer", "datasets and DataLoaders", "Loggers")
    assert sum(len(blocks(title)) for title in titles) == PAGE.count("```python") == PAGE.count("```") / 2 == 4


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set:UserWarning")
@pytest.mark.slow
def test_the_trainer_of_the_page_trains_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra text")
    import torch
    import transformers

    words = tokenizer(masked=True)
    torch.manual_seed(0)
    transformers.RobertaForMaskedLM(config("roberta", len(words), words.pad_token_id)).save_pretrained("my-model")
    words.save_pretrained("my-model")
    space = execute("A Hugging Face Trainer", {"__name__": "example"})
    assert space["trainer"].state.global_step == 20 and len(Ledger.open("tuned/tuning.ledger")) == 20
    assert Path("tuned/checkpoint-20/optimizer.pt").exists()


@pytest.mark.slow
def test_the_task_of_the_page_learns_from_a_data_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("datasets")
        stand_in.Dataset = types.SimpleNamespace(from_dict=DataSet)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", stand_in)
    execute("datasets and DataLoaders", {"__name__": "example"})
    assert 0 < float(capfd.readouterr().out) < 1 and Path("runs/points/summary.json").exists()


def test_the_loggers_of_the_page_get_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Logged] = []
    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.init = lambda **arguments: begun.append(Logged(**arguments)) or begun[-1]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    execute("Loggers", {"__name__": "example"})
    assert [list(run.entries) for run in begun] == [[0, 20, 40, 60]] * 2
