"""Fixtures of tests with small language models and sentences."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from tiny_models import ARCHITECTURES, write_model, write_sentences

from cyber0.config.schema import Config
from cyber0.report import plots
from cyber0.tasks.text import tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def several_groups_and_no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even these few short samples into several groups, and leave pictures to the tests that look at them."""
    monkeypatch.setattr(tokens, "PASS_COST_ON_CPU", 16)
    for picture in ("accuracy_picture", "suspects_picture", "partition_picture"):
        monkeypatch.setattr(plots, picture, lambda *_, **__: None)


@pytest.fixture
def settings(folders: dict[str, Path], data: Path) -> Any:
    def make(name: str, *more: str) -> Config:
        return Config().with_overrides(
            ["task.name=sst2", f"task.model={folders[name]}", f"task.data={data}", "task.samples=16", "rounds=3",
             "federation.clients=4", "federation.byzantine=1", "method.batch_size=3", "method.lr=0.01", *more]
        )  # fmt: skip

    return make
