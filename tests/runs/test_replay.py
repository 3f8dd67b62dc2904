"""The model from w0 and the ledger alone; what was tampered with is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import SETTINGS, copy_of, summary_of
from headers import make_header
from safetensors.torch import load_file, save_file
from synthetic import OTHER_BLOBS, OWN_BLOBS, After, one_thread  # noqa: F401
from synthetic import own_config as config

from cyber0.errors import DataError, LedgerError
from cyber0.federation.simulation import Simulation
from cyber0.ledger import LayoutEntry, Ledger
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run


@pytest.mark.slow
def test_the_ledger_rebuilds_the_model_of_every_round(finished: Path) -> None:
    simulation = Simulation(config(*SETTINGS))
    for t in range(24):
        if t:
            simulation.run_round()
        _, parameters = rebuild(finished, t)
        assert parameters.digest() == simulation.parameters.digest(), t
    assert rebuild(finished)[1].digest() == simulation.parameters.digest()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "attention", "frozen backbone"])
def test_models_of_all_kinds_are_rebuilt_from_their_folder(kind: str, dtype: str, tmp_path: Path) -> None:
    settings = ("rounds=4", f"task.options.kind={kind}", f"task.dtype={dtype}", "method.mu=0.05",
                "method.distribution=sphere", "method.lr=0.01")  # fmt: skip
    summary = Run.start(config(*settings, "method.projection_radius=3"), tmp_path / "run").run()
    ledger, parameters = rebuild(tmp_path / "run")
    assert parameters.digest() == summary["model_digest"] and len(ledger) == 4


@pytest.mark.parametrize("wrong", [-1, 24, 10**9])
def test_a_round_that_is_not_there_is_refused(wrong: int, finished: Path) -> None:
    with pytest.raises(LedgerError, match="use 0 to 23"):
        rebuild(finished, wrong)


def tamper_ledger(folder: Path) -> None:
    data = bytearray((folder / "ledger.bin").read_bytes())
    data[-200] ^= 1
    (folder / "ledger.bin").write_bytes(data)


def tamper_weights(folder: Path) -> None:
    weights = load_file(folder / "w0.safetensors")
    weights["weight"] = weights["weight"].clone()
    weights["weight"][0, 0] += 1e-6
    save_file(weights, folder / "w0.safetensors")


def rename_weights(folder: Path) -> None:
    weights = load_file(folder / "w0.safetensors")
    save_file({f"other.{name}": t for name, t in weights.items()}, folder / "w0.safetensors")


def reshape_weights(folder: Path) -> None:
    weights = load_file(folder / "w0.safetensors")
    save_file({**weights, "weight": weights["weight"].T.contiguous()}, folder / "w0.safetensors")


@pytest.mark.parametrize(
    ("tamper", "error", "message"),
    [(tamper_ledger, LedgerError, r"record 2\d of .*does not verify"), (tamper_weights, LedgerError, "starting point"),
     (rename_weights, LedgerError, "lack 'weight'"), (reshape_weights, LedgerError, "names, shapes or types"),
     (lambda f: (f / "w0.safetensors").write_bytes(b"junk"), DataError, "can't be read as safetensors"),
     (lambda f: (f / "ledger.bin").write_bytes(b"junk"), LedgerError, "not a ledger"),
     (lambda f: (f / "ledger.bin").unlink(), LedgerError, "holds no run")],
)  # fmt: skip
def test_a_folder_that_was_tampered_with_is_refused_and_says_where(
    tamper: Callable[[Path], Any], error: type[Exception], message: str, finished: Path, tmp_path: Path
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    tamper(folder)
    with pytest.raises(error, match=message):
        rebuild(folder)


@pytest.mark.parametrize(
    ("section", "key", "named"),
    [("task", "vision", r"unknown key 'task\.vision' \(= 'on'\)"), ("method", "momentum", r"unknown key 'method\.mom"),
     ("privacy", None, r"unknown key 'privacy'"), ("task", None, "task = 'on' must be a table")],
)  # fmt: skip
def test_a_setting_of_a_newer_version_in_the_header_is_named(
    section: str, key: str | None, named: str, finished: Path, tmp_path: Path
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    header = Ledger.open(finished / "ledger.bin").header
    changed = {**header.settings, section: {**header.settings.get(section, {}), key: "on"} if key else "on"}
    (folder / "ledger.bin").unlink()
    Ledger.create(folder / "ledger.bin", replace(header, settings=changed)).close()
    with pytest.raises(LedgerError, match=rf"{named}.*A newer version may have written it"):
        rebuild(folder)


def test_without_stored_weights_the_task_is_asked_for_them_and_only_the_right_ones_do(
    finished: Path, tmp_path: Path
) -> None:
    """As after a deployment, whose federator has no weights to store."""
    folder = copy_of(finished, tmp_path / "run")
    (folder / "w0.safetensors").unlink()
    assert rebuild(folder, task=OWN_BLOBS)[1].digest() == summary_of(finished)["model_digest"]
    with pytest.raises(DataError, match="starting weights"):
        rebuild(folder, task=OTHER_BLOBS)


@pytest.mark.parametrize(
    "names", [("",), ("a.",), ("a..b",), ("forward",), ("training",), ("__class__.x",), ("a", "a.b"), ("_weights", "1")]
)
def test_weights_of_any_name_are_rebuilt(names: tuple[str, ...], tmp_path: Path) -> None:
    weights = {name: torch.full((5,), float(i)) for i, name in enumerate(names)}
    digest = hashlib.sha256(torch.cat(list(weights.values())).numpy().tobytes()).hexdigest()
    layout = tuple(LayoutEntry(name, (5,), "float32", 5 * i) for i, name in enumerate(names))
    header = replace(make_header(), layout=layout, weights_digest=digest)
    Ledger.create(tmp_path / "ledger.bin", header).close()
    save_file(weights, tmp_path / "w0.safetensors")
    _, parameters = rebuild(tmp_path)
    assert parameters.layout == layout
    assert parameters.digest() == digest
    assert list(parameters.state()) == list(names)


@pytest.mark.parametrize("wrong", [torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.float64)])
def test_starting_weights_of_another_type_are_refused(wrong: torch.Tensor, tmp_path: Path) -> None:
    Ledger.create(
        tmp_path / "ledger.bin", replace(make_header(), layout=(LayoutEntry("w", (5,), "float32", 0),))
    ).close()
    save_file({"w": wrong}, tmp_path / "w0.safetensors")
    with pytest.raises(LedgerError, match=f"shapes or types .*'w' is {wrong.dtype} of shape"):
        rebuild(tmp_path)
