"""Run folders that an earlier version wrote are still read, to the same bits (tests/fixtures/format1/README.md).

These tests go by the command line and the public names alone, so that they hold whatever moves inside the package.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import runpy
import shutil
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cyber0

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
HERE = Path(__file__).parents[1] / "fixtures" / "format1"
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
RUNS = [name for name in EXPECTED if name != "zero-order"]
TEXT = ("language-model", "lora", "lora-cut-off")
RESUMABLE = ("simulation", "baseline", "lora")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all folders that a test may write to; settings name data and models relative to it."""
    shutil.copytree(HERE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def command(*arguments: object) -> str:
    """Return what `cyber0 ARGUMENTS` prints; it must succeed."""
    code, output, error = outcome(*arguments)
    assert code == 0, error
    return output


def outcome(*arguments: object) -> tuple[int, str, str]:
    """Return exit status, output and errors of `cyber0 ARGUMENTS`, run in this process."""
    output, error, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["cyber0", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            runpy.run_module("cyber0", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return code, output.getvalue(), error.getvalue()


def need_text(name: str) -> tuple[object, ...]:
    """Return the option that says where a fixture's language model is; skip where none can be loaded."""
    if name not in TEXT:
        return ()
    pytest.importorskip("transformers", reason="language models need the extra 'text'")
    pytest.importorskip("peft", reason="adapters need the extra 'text'")
    return ("--model", HERE / "model")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


# Reading.


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_ledger_verifies_to_the_chain_and_the_digest_that_were_recorded(name: str) -> None:
    expected, said = EXPECTED[name], command("verify", HERE / name, *need_text(name))
    abandoned = expected["records"] - expected["decided"]
    counts = f"{expected['records']} records verify ({expected['decided']} decided, {abandoned} abandoned)"
    assert counts in said
    assert f"chain {expected['chain']}" in said and f"digest {expected['digest']}" in said
    assert "torn" not in said
    if (HERE / name / "summary.json").exists():
        assert "all is well" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulation", "mnist", "deployment", "simulation-cut-off"])
def test_every_round_is_decided_again_from_the_reports_that_were_kept(name: str) -> None:
    assert f"{EXPECTED[name]['records']} rounds decided again" in command("verify", HERE / name, "--decisions")


def test_reports_that_do_not_give_the_decision_are_found(copy: Path) -> None:
    reports = bytearray((copy / "mnist/reports.bin").read_bytes())
    reports[-20] ^= 64
    (copy / "mnist/reports.bin").write_bytes(reports)
    code, _, error = outcome("verify", "mnist", "--decisions")
    assert code == 2 and error.startswith("error:")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_replaying_half_of_a_ledger_gives_the_weights_of_then(name: str, tmp_path: Path) -> None:
    expected, out = EXPECTED[name], tmp_path / "half.safetensors"
    half = expected["record"]["round"]
    said = command("replay", HERE / name, "--round", half, "--out", out, *need_text(name))
    assert f"digest {expected['middle_digest']}" in said
    # The digest is SHA-256 of the storage bytes in the order of the layout, whoever computes it.
    weights, layout = load_file(out), cyber0.Ledger.open(HERE / name / "ledger.bin").header.layout
    stored = b"".join(weights[entry.name].contiguous().view(torch.uint8).numpy().tobytes() for entry in layout)
    assert hashlib.sha256(stored).hexdigest() == expected["middle_digest"]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_record_reads_as_it_was_written(name: str) -> None:
    expected = EXPECTED[name]
    path = HERE / name / ("tuning.ledger" if name == "zero-order" else "ledger.bin")
    ledger = cyber0.Ledger.open(path)
    assert len(ledger) == expected["records"] and ledger.chain.hex() == expected["chain"]
    records = list(ledger)
    assert [record.round for record in records] == list(range(len(records)))
    assert sum(record.values is not None for record in records) == expected["decided"]
    record = records[expected["record"]["round"]]
    assert record.values is not None and record.values.dtype == np.float32
    found = {"round": record.round, "lr": record.lr, "values": record.values.astype(np.float64).tolist(),
             "reported": record.reported.astype(int).tolist(), "trimmed": record.trimmed.tolist()}  # fmt: skip
    assert found == expected["record"]


def test_a_header_says_what_was_agreed_on() -> None:
    header = cyber0.Ledger.open(HERE / "mnist/ledger.bin").header
    assert (header.seed, header.dimension, header.k, header.local_epochs, header.clients) == (12, 7850, 3, 2, 4)
    assert (header.distribution, header.codec, header.estimator) == ("sphere", "log8", "two_point")
    assert (header.mu, header.lr, header.lr_schedule, header.projection_radius) == (0.001, 0.001, "constant", None)
    assert {entry.dtype for entry in header.layout} == {"bfloat16"}
    assert cyber0.Ledger.open(HERE / "float16/ledger.bin").header.seed == 2**64 - 1
    assert cyber0.Ledger.open(HERE / "float16/ledger.bin").header.projection_radius == 0.9


@pytest.mark.parametrize("name", ["simulation", "mnist", "float16", "language-model", "lora", "deployment"])
def test_the_settings_in_a_header_are_those_of_the_config_file(name: str) -> None:
    settings = tomllib.loads((HERE / name / "config.toml").read_text())
    assert cyber0.Ledger.open(HERE / name / "ledger.bin").header.config == settings
    assert cyber0.Config.from_dict(settings).rounds == settings["rounds"]


def test_a_language_model_is_exported_for_from_pretrained(tmp_path: Path) -> None:
    out = tmp_path / "exported"
    said = command("replay", HERE / "language-model", "--out", out, *need_text("language-model"))
    assert f"digest {EXPECTED['language-model']['digest']}" in said
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(AutoTokenizer.from_pretrained(out)) == model.config.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("names", [[name] for name in (*RUNS, "baseline", "baseline-cut-off")] + [["mnist", "lora"]])
def test_a_report_is_made_of_it(names: list[str], tmp_path: Path) -> None:
    command("report", *(HERE / name for name in names), "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in names)


# Resuming.


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run, from its ledger or its state."""
    if (folder / "state.safetensors").exists():
        return load_file(folder / "state.safetensors")
    out = folder / "replayed.safetensors"
    command("replay", folder, "--out", out)
    return load_file(out)


def digest_of(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["model_digest"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMABLE)
def test_a_run_that_was_cut_off_ends_like_the_one_that_was_not(name: str, copy: Path) -> None:
    need_text(name)
    cut = copy / f"{name}-cut-off"
    kept = (cut / "ledger.bin").read_bytes() if name != "baseline" else b""
    command("run", "--resume", f"{name}-cut-off", "--quiet")
    if kept:
        assert (cut / "ledger.bin").read_bytes().startswith(kept)
    settings = tomllib.loads((copy / name / "config.toml").read_text())
    assert json.loads((cut / "summary.json").read_text())["rounds"] == settings["rounds"]
    whole, resumed = weights_of(copy / name), weights_of(cut)
    assert whole.keys() == resumed.keys()
    for tensor, weights in whole.items():
        # Two processors differ by some 1e-6 here; one other batch or direction changes weights by more than 1e-3.
        torch.testing.assert_close(resumed[tensor], weights, rtol=0, atol=5e-5)
    command("run", copy / name / "config.toml", "--out", copy / "again", "--quiet")
    if digest_of(copy / "again") == digest_of(copy / name):  # this machine's losses have the same bits
        assert digest_of(cut) == digest_of(copy / name)
        assert rows(cut / "metrics.csv") == rows(copy / name / "metrics.csv")
        assert rows(cut / "clients.csv") == rows(copy / name / "clients.csv")


@pytest.mark.slow
def test_a_baseline_that_is_resumed_still_knows_whom_it_rejected(copy: Path) -> None:
    command("run", "--resume", "baseline-cut-off", "--quiet")
    for name in ("baseline", "baseline-cut-off"):
        assert json.loads((copy / name / "summary.json").read_text())["rejected_reports"] == {"not_finite": 18}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulation", "mnist", "float16", "baseline", "lora"])
def test_a_run_that_has_ended_can_be_resumed_and_stays_as_it_is(name: str, copy: Path) -> None:
    need_text(name)
    before = digest_of(copy / name)
    command("run", "--resume", name, "--quiet")
    assert digest_of(copy / name) == before
    assert rows(copy / name / "clients.csv") == rows(HERE / name / "clients.csv")


@pytest.mark.parametrize("name", ["simulation-cut-off", "baseline-cut-off"])
def test_a_run_is_not_resumed_with_other_settings(name: str, copy: Path) -> None:
    config = copy / name / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1 ", "lr = 0.2 "))
    code, _, error = outcome("run", "--resume", name, "--quiet")
    assert code == 2 and "method.lr (now 0.2, on record 0.1)" in error, error


def model_of_the_tuning() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model.load_state_dict(load_file(HERE / "zero-order/w0.safetensors"))
    return model


def test_zero_order_continues_where_its_ledger_ends(copy: Path) -> None:
    expected, path = EXPECTED["zero-order"], copy / "zero-order/tuning.ledger"
    assert [record.lr for record in cyber0.Ledger.open(path)] == expected["lr"]
    before, digests = path.read_bytes(), []
    for steps in (10, 11):
        model = model_of_the_tuning()
        optimizer = cyber0.ZeroOrder(model, lr=0.2, mu=0.01, k=3, seed=17, ledger=path)
        assert optimizer.round == steps
        digests.append(optimizer.parameters.digest())
        inputs, targets = torch.eye(5), torch.arange(5) % 3
        optimizer.step(lambda m=model, x=inputs, y=targets: nn.functional.cross_entropy(m(x), y))  # type: ignore[misc]
        optimizer.close()
    assert digests[0] == expected["digest"] != digests[1]
    assert path.read_bytes().startswith(before) and len(cyber0.Ledger.open(path)) == 12


def test_a_deployment_is_not_continued_but_its_model_can_be_the_start_of_another_run(copy: Path) -> None:
    pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
    kept = (copy / "deployment/ledger.bin").read_bytes()
    code, _, error = outcome("serve", "deployment/config.toml", "--listen", "127.0.0.1:0", "--insecure", "--out",
                             "deployment", "--resume")  # fmt: skip
    assert code == 2 and "ledger of format 1, which is not served any more" in error and "task.weights" in error
    assert (copy / "deployment/ledger.bin").read_bytes() == kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulation", "mnist"])
def test_a_run_is_diagnosed(name: str, copy: Path) -> None:
    assert "lr" in command("diagnose", name, "--round", 2, "--rounds", 1)


def test_a_run_of_format_1_is_not_lengthened(copy: Path) -> None:
    config = copy / "simulation-cut-off/config.toml"
    config.write_text(config.read_text().replace("rounds = 24 ", "rounds = 30 "))
    kept = (copy / "simulation-cut-off/ledger.bin").read_bytes()
    code, _, error = outcome("run", "--resume", "simulation-cut-off", "--quiet")
    assert code == 2 and "rounds = 30, and the ledger was started with 24" in error and "task.weights" in error
    assert (copy / "simulation-cut-off/ledger.bin").read_bytes() == kept


def test_a_header_that_contradicts_its_own_config_is_refused_by_name(tmp_path: Path) -> None:
    data = (HERE / "mnist/ledger.bin").read_bytes()
    length = int.from_bytes(data[8:12], "little")
    found = json.loads(data[12 : 12 + length])
    found["config"]["method"]["k"] = 4
    text = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    opening = data[:8] + len(text).to_bytes(4, "little") + text
    (tmp_path / "ledger.bin").write_bytes(opening + zlib.crc32(opening).to_bytes(4, "little"))
    with pytest.raises(cyber0.Cyber0Error, match=r"contradicts itself: k = 3, but method\.k = 4"):
        cyber0.Ledger.open(tmp_path / "ledger.bin")
