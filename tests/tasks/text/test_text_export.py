"""A trained language model as a folder that from_pretrained loads, with its card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from typer.testing import CliRunner

from cyber0.cli import main as cli
from cyber0.config.schema import Config
from cyber0.errors import DataError, LedgerError
from cyber0.runs import export as exports
from cyber0.runs import replay as replays
from cyber0.runs import run as runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_an_exported_adapter_finds_its_base_from_any_folder(
    name: str, settings: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.chdir(folders[name].parent)
    run = runs.Run.start(settings(name, "task.adapter=lora", f"task.model={name}"), tmp_path / "run")
    run.run()
    assert exports.export(*replays.rebuild(tmp_path / "run"), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    auto = peft.AutoPeftModel if name == "roberta" else peft.AutoPeftModelForCausalLM
    loaded, task = auto.from_pretrained("out").eval(), run.simulation.task
    with torch.no_grad():
        trained = task.outputs(run.simulation.parameters.model.eval(), task.test_inputs)
        torch.testing.assert_close(task.outputs(loaded, task.test_inputs), trained)
    assert not (tmp_path / "out" / "base").exists()  # a folder is named, not copied


@pytest.mark.slow
def test_the_card_of_an_exported_model_says_what_is_known(settings: Any, tmp_path: Path) -> None:
    import typer.testing
    from huggingface_hub import ModelCard

    from cyber0.cli.main import app

    summary = runs.Run.start(settings("roberta", "task.adapter=lora"), tmp_path / "run").run()
    for rounds in ("2", "3"):
        given = ["replay", str(tmp_path / "run"), "--round", rounds, "--out", str(tmp_path / rounds)]
        assert typer.testing.CliRunner().invoke(app, given).exit_code == 0
    card, earlier = (ModelCard.load(tmp_path / rounds / "README.md") for rounds in ("3", "2"))
    assert card.data.library_name == "peft" and card.data.pipeline_tag == "fill-mask" and "lora" in card.data.tags
    assert card.data.base_model is card.data.license is None  # a folder of this machine is no name, a license unknown
    for known in (
        "LoRA adapter of rank 8", "of `roberta`", "4 clients, 1 of them Byzantine", "`{text} It was {mask}.`",
        "`0`: `terrible`", "| method.lr | 0.01 |", "| rounds | 3 |",
        f"| dev accuracy | {summary['dev_accuracy']:.4f} |", f"| test loss | {summary['test_loss']:.4f} |",
        summary["model_digest"], "cyber0 replay RUN --round 3",
    ):  # fmt: skip
        assert known in card.text
    assert "[More Information Needed]" not in card.text and str(tmp_path) not in card.text
    assert "| rounds | 2 |" in earlier.text and "Evaluation" not in earlier.text  # which is of other weights
    assert summary["model_digest"] not in earlier.text


def test_a_card_is_valid_whatever_names_and_settings_hold() -> None:
    from huggingface_hub import ModelCard

    from cyber0.tasks.text.model_card import model_card

    config = Config().with_overrides(
        ["task.name=text", "task.data=/home/me/a|b`c: #\n---", "task.model=org/odd: name", "method.name=mezo",
         "task.label_words=x=y, 1=`|", "task.template={text}\n`{mask}`", "federation.byzantine=0"]
    )  # fmt: skip
    card = ModelCard(model_card(config, causal=True, rounds=5, dimension=7, digest="ab"))
    assert card.data.base_model == "org/odd: name" and card.data.base_model_relation == "finetune"
    assert "| data | a\\|b'c: # --- |" in card.text and "federation" not in card.text and "/home" not in card.text
    hub = Config().with_overrides(["task.name=snli", "task.model=FacebookAI/roberta-large"])
    assert ModelCard(model_card(hub, causal=False, rounds=5, dimension=7, digest="")).data.datasets == [
        "stanfordnlp/snli"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter"), [("gpt2", "none"), ("roberta", "none"), ("gpt2", "lora"), ("gpt2", "prefix")]
)
def test_a_damaged_weight_of_a_runs_language_model_is_noticed_and_the_model_written_again(
    kind: str, adapter: str, settings: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def verify() -> str:
        return CliRunner().invoke(cli.app, ["verify", str(run)], catch_exceptions=False).output

    runs.Run.start(settings(kind, f"task.adapter={adapter}"), run).run()
    (file,) = (run / "model").glob("*.safetensors")
    whole, written = file.read_bytes(), file.stat().st_ino
    runs.Run.resume(run).run()
    assert file.stat().st_ino == written
    assert "model: the weights that w0 and the ledger give" in verify()
    for damaged in (whole[:-4] + bytes(4), whole[:-4], b"", b"[]" * 9):
        file.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"model is not the model that w0 and the ledger give"):
            verify()
        runs.Run.resume(run).run()
        assert file.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_ends_with_a_folder_that_from_pretrained_loads_and_writes_it_once(
    adapter: str, settings: Any, tmp_path: Path
) -> None:
    run = runs.Run.start(settings("gpt2", f"task.adapter={adapter}"), tmp_path / "run")
    digest = run.run()["model_digest"]
    folder = tmp_path / "run" / "model"
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert f"`{digest}`" in (folder / "README.md").read_text()
    trained = run.simulation.parameters.model
    if adapter == "none":
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder)
    else:
        from peft import AutoPeftModelForCausalLM

        loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, trained.get_parameter(name)) for name, p in loaded.named_parameters())
    written = folder.stat().st_ino
    (folder / "notes.txt").write_text("kept")
    runs.Run.resume(tmp_path / "run").run()
    assert folder.stat().st_ino == written and (folder / "notes.txt").exists()
    (folder / "README.md").unlink()
    with pytest.raises(DataError, match=r"model holds notes.txt, which is no file of a model and would be deleted"):
        runs.Run.resume(tmp_path / "run").run()
    (folder / "notes.txt").unlink()
    runs.Run.resume(tmp_path / "run").run()
    assert f"`{digest}`" in (folder / "README.md").read_text()
    leftovers = [path.name for path in (tmp_path / "run").glob(".*")]
    assert leftovers == []
