"""Defaults that depend on the task or the adapter: one file each, read when a config names it."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from cyber0.config import Config, load, presets
from cyber0.config.choices import ADAPTERS, TASKS
from cyber0.config.files import to_toml
from cyber0.config.keys import describe
from cyber0.config.schema import to_dict

FILES = sorted(file.name for file in files(presets).iterdir() if file.name.endswith(".toml"))


@pytest.mark.parametrize("name", FILES)
def test_a_preset_is_named_after_its_task_or_adapter_and_sets_what_a_config_that_names_it_has(name: str) -> None:
    stem = name.removesuffix(".toml")
    assert (stem in TASKS) != (stem in ADAPTERS)
    common, found = {d.name: d.default for d in describe()}, presets.of_task(stem) or presets.of_adapter(stem)
    assert found and all(type(value) is type(common[key]) for key, value in found.items())
    config = load(overrides=[f"task.name={stem}"] if stem in TASKS else ["task.name=trec", f"task.adapter={stem}"])
    for key, value in found.items():
        section, _, inner = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, inner) == value


@pytest.mark.parametrize("name", ["mnist", "ridge", "own", "../../secrets", "/etc/passwd", "my.py:Spam", ""])
def test_a_task_without_a_preset_has_the_common_defaults(name: str) -> None:
    assert presets.of_task(name) == presets.of_adapter(name) == {}


def test_an_adapter_brings_its_own_defaults_and_takes_them_away_again() -> None:
    plain, head = (Config().with_overrides(["task.name=trec", *more]) for more in ([], ["task.adapter=head"]))
    assert (head.method.k, plain.method.k, head.federation.clients) == (64, 1, plain.federation.clients)
    assert head.with_overrides(["task.adapter=none"]) == plain
    assert head.with_overrides(["rounds=7"]).method == head.method


@pytest.mark.parametrize("name", FILES)
def test_what_stands_at_the_common_default_where_a_preset_has_another_survives_being_written(name: str) -> None:
    stem, common = name.removesuffix(".toml"), {d.name: d.default for d in describe()}
    named = [f"task.name={stem}"] if stem in TASKS else ["task.name=trec", f"task.adapter={stem}"]
    found = presets.of_task(stem) or presets.of_adapter(stem)
    config = load(overrides=[*named, *(f"{key}={common[key]}" for key in found if key != "task.model")])
    assert Config.from_dict(to_dict(config)) == config
    assert Config.from_dict(tomllib.loads(to_toml(config))) == config


def test_another_task_brings_its_own_defaults_and_leaves_what_was_set() -> None:
    config = Config().with_overrides(["task.name=trec", "method.k=4"]).with_overrides(["task.name=sst2"])
    assert (config.federation.clients, config.federation.byzantine, config.rounds) == (8, 2, 20_000)
    assert config.method.k == 4
    assert presets.defaults_for({"task": {"name": "trec"}, "method": {"name": "fedavg"}})["aggregation.rule"] == "mean"
