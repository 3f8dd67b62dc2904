"""`cyber0 doctor`: what it finds, and that it survives what it looks for."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from packaging.specifiers import SpecifierSet

from cyber0.cli import health
from cyber0.directions import check, engine


@pytest.fixture
def quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that need not be compiled for a test of the rest."""
    monkeypatch.setattr(check, "wrong_bits", lambda device: [])


@pytest.mark.slow
def test_a_sound_installation_ends_with_0_and_names_what_it_has(cyber0: Command) -> None:
    answer = cyber0("doctor", "--json")
    found = json.loads(answer.out)
    assert answer.code == 0 and found["ok"] and found["faults"] == []
    packages = {one["name"]: one for one in found["packages"]}
    assert packages["torch"]["state"] == "ok" and packages["torch"]["needed_by"] == ["base"]
    assert packages["grpcio"]["needed_by"][:1] == ["deploy"] and "dev" in packages["grpcio"]["needed_by"]
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["kernels"] == "ok"
    assert {one["name"] for one in found["extras"]} >= {"text", "deploy", "flower"}
    assert found["disks"][0]["free_bytes"] > 0
    shown = cyber0("doctor")
    assert shown.code == 0 and "all that the base install needs works" in shown.out
    assert all(name in shown.out for name in packages)


@pytest.mark.usefixtures("quick_kernels")
def test_the_caches_are_those_that_tasks_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cyber0.tasks import mnist

    monkeypatch.setenv("CYBER0_CACHE", str(tmp_path))
    caches = {one["what"]: one for one in health.examine(lambda _: None)["caches"]}
    assert caches["MNIST"]["path"] == mnist.cache_path() and not caches["MNIST"]["present"]
    mnist.cache_path().write_bytes(b"")
    assert next(one for one in health.examine(lambda _: None)["caches"] if one["what"] == "MNIST")["present"]


def test_the_hub_is_found_where_its_client_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    assert str(health._hub_cache()) == constants.HF_HUB_CACHE
    monkeypatch.setenv("HF_HOME", "/other")
    assert health._hub_cache() == Path("/other/hub")


def break_packages(monkeypatch: pytest.MonkeyPatch, *, missing: str = "", broken: str = "", old: str = "") -> None:
    """Have one package be missing, raise on import, or be of an old version."""
    version, import_module = metadata.version, importlib.import_module

    def version_of(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == old else version(name)

    def imported(name: str, *rest: Any) -> Any:
        if name == broken:
            raise OSError("lib.so: cannot open shared object file\nmore")
        return import_module(name, *rest)

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(importlib, "import_module", imported)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(
    ("how", "words"),
    [({"missing": "matplotlib"}, ["matplotlib: missing", "pip install 'matplotlib>="]),
     ({"old": "safetensors"}, ["safetensors: version 0.1 is not >=", "pip install 'safetensors>="]),
     ({"broken": "numba"}, ["numba: broken: OSError: lib.so", "--force-reinstall"])],
)  # fmt: skip
def test_what_the_base_install_lacks_is_a_fault_with_a_remedy(
    how: dict[str, str], words: list[str], cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_packages(monkeypatch, **how)
    answer = cyber0("doctor")
    assert answer.code == 1 and "Traceback" not in answer.err
    assert all(word in answer.out for word in words), answer.out


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("how", [{"missing": "grpcio"}, {"broken": "grpc"}, {"old": "grpcio"}])
def test_an_optional_package_may_be_missing_or_broken(
    how: dict[str, str], cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_packages(monkeypatch, **how)
    answer = cyber0("doctor", "--json")
    found = json.loads(answer.out)
    extras = {one["name"]: one for one in found["extras"]}
    assert answer.code == 0 and found["ok"] and extras["deploy"]["missing"] == ["grpcio"]
    assert extras["deploy"]["remedy"] == "pip install 'cyber0[deploy]'"


def test_without_torch_the_rest_is_still_shown(monkeypatch: pytest.MonkeyPatch, cyber0: Command) -> None:
    def fail(kind: str) -> Any:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr("cyber0.directions.backends.backend_for", fail)
    answer = cyber0("doctor")
    assert answer.code == 1 and "fault: kernels on cpu: not usable: ImportError" in answer.out


@pytest.mark.usefixtures("quick_kernels")
def test_a_package_that_is_not_installed_by_pip_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, cyber0: Command
) -> None:
    def none(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", none)
    answer = cyber0("doctor")
    assert answer.code == 1 and "fault: what cyber0 needs can't be read" in answer.out


@pytest.mark.slow
def test_kernels_that_give_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.wrong_bits("cpu") == []
    fill, apply = engine.fill, engine.apply
    monkeypatch.setattr(engine, "fill", lambda *a: fill(*a).nextafter(a[0] + 1))
    monkeypatch.setattr(engine, "apply", lambda source, *a: apply(source, *a).neg_())
    wrong = check.wrong_bits("cpu")
    assert "gaussian directions" in wrong and "low_rank directions" in wrong and "steps of bfloat16 weights" in wrong


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_kernels_on_a_gpu_are_checked_too(cyber0: Command) -> None:
    found = json.loads(cyber0("doctor", "--json").out)
    assert [d["kernels"] for d in found["devices"]] == ["ok"] * (1 + torch.cuda.device_count())
    assert found["devices"][1]["memory_bytes"] > 0


def test_the_check_covers_more_than_a_tile_and_a_rounding() -> None:
    from cyber0.kernels.threads import TILE

    assert check.START < TILE < check.START + check.COUNT < sum(int(np.prod(shape)) for shape in check.SHAPES)


def test_a_remedy_is_named_for_damaged_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "not a version")
    row = health._package("numpy", SpecifierSet(">=1"), ["base"])
    assert row["state"] == "version not a version is not >=1" and row["remedy"] == "pip install 'numpy>=1'"
