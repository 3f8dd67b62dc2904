"""Defaults that depend on the task: one file a task, read when a config names it."""

from __future__ import annotations

from importlib.resources import files

import pytest

from cyber0.config import Config, load, presets
from cyber0.config.choices import TASKS
from cyber0.config.keys import describe

FILES = sorted(file.name for file in files(presets).iterdir() if file.name.endswith(".toml"))


@pytest.mark.parametrize("name", FILES)
def test_a_preset_is_named_after_its_task_and_sets_other_values_than_the_common_defaults(name: str) -> None:
    task = name.removesuffix(".toml")
    assert task in TASKS
    common, found = {d.name: d.default for d in describe()}, presets.of_task(task)
    assert found and all(type(value) is type(common[key]) for key, value in found.items())
    config = load(overrides=[f"task.name={task}"])
    for key, value in found.items():
        section, _, inner = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, inner) == value


@pytest.mark.parametrize("name", ["mnist", "ridge", "own", "../../secrets", "/etc/passwd", "my.py:Spam", ""])
def test_a_task_without_a_preset_has_the_common_defaults(name: str) -> None:
    assert presets.of_task(name) == {}


def test_another_task_brings_its_own_defaults_and_leaves_what_was_set() -> None:
    config = Config().with_overrides(["task.name=trec", "method.k=4"]).with_overrides(["task.name=sst2"])
    assert (config.federation.clients, config.federation.byzantine, config.rounds) == (8, 2, 20_000)
    assert config.method.k == 4
    assert presets.defaults_for({"task": {"name": "trec"}, "method": {"name": "fedavg"}})["aggregation.rule"] == "mean"
