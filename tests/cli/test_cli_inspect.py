"""Commands that inspect a run: replay, verify, repair; and init."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import BLOBS, Command, refused
from safetensors.torch import load_file, save_file
from synthetic import Blobs

from cyber0.config import schema as config
from cyber0.ledger import Ledger
from cyber0.model.vector import Parameters
from cyber0.runs.settings import settings_of


@pytest.mark.slow
def test_replay_writes_the_weights_of_any_round(cyber0: Command, run: Path) -> None:
    digests = set()
    for t in (0, 5, 12):
        answer = cyber0("replay", run, "--round", t, "--out", f"models/{t}.safetensors")
        assert answer.code == 0 and f"68 weights after {t} rounds" in answer.out
        model = torch.nn.Linear(16, 4)
        model.load_state_dict(load_file(f"models/{t}.safetensors"))
        digest = Parameters(model).digest()
        assert f"digest {digest}" in answer.out
        digests.add(digest)
    assert len(digests) == 3
    assert Path("models/0.safetensors").read_bytes() == (run / "w0.safetensors").read_bytes()
    summary = json.loads((run / "summary.json").read_text())
    assert Blobs().evaluate(model) == (summary["final_loss"], summary["final_accuracy"])
    assert f"digest {summary['model_digest']}" in cyber0("replay", run, "--out", "last.safetensors").out


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["13", "-1", "1000000"])
def test_replay_refuses_a_round_beyond_the_end(wrong: str, cyber0: Command, run: Path) -> None:
    refused(cyber0("replay", run, "--round", wrong, "--out", "m.safetensors"), f"round {wrong}", "use 0 to 12")
    assert not Path("m.safetensors").exists()


@pytest.mark.slow
def test_replay_refuses_a_place_that_can_not_be_written_to(cyber0: Command, run: Path) -> None:
    Path("folder").mkdir()
    refused(cyber0("replay", run, "--out", "folder"), "folder can't be written")
    refused(cyber0("replay", run, "--out", run / "summary.json" / "m.safetensors"), "summary.json")
    assert sorted(p.name for p in Path(".").iterdir()) == ["folder", "run"]


def test_a_run_knows_where_its_model_and_data_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    settings = config.Config().with_overrides(["task.name=sst2", "task.model=model", "task.data=data"])
    task = settings_of(settings).task
    assert (task.model, task.data) == (str(tmp_path / "model"), str(tmp_path / "data"))
    on_the_hub = config.Config().with_overrides(["task.name=sst2"])
    assert settings_of(on_the_hub) == on_the_hub


@pytest.mark.slow
def test_replay_writes_over_nothing_that_may_be_needed(cyber0: Command, run: Path) -> None:
    weights = run / "w0.safetensors"
    before = weights.read_bytes()
    for forced in ([], ["--force"]):
        refused(cyber0("replay", run, "--out", weights, *forced), "w0.safetensors exists already", "belongs to a run")
        refused(cyber0("replay", run, "--out", run, *forced), "run exists already", "belongs to a run")
    assert weights.read_bytes() == before
    Path("model").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("model", name).write_text("mine")
    refused(cyber0("replay", run, "--out", "model"), "model is a folder that holds files already")
    refused(cyber0("replay", run, "--out", "model/model.safetensors"), "model.safetensors is a file that is there")
    refused(cyber0("replay", run, "--out", "model/config.json"), "config.json is a file")
    assert {path.read_text() for path in Path("model").iterdir()} == {"mine"}


@pytest.mark.slow
def test_replay_overwrites_a_model_only_if_told_to(cyber0: Command, run: Path) -> None:
    out = Path("model.safetensors")
    assert cyber0("replay", run, "--round", 5, "--out", out).code == 0
    older = out.read_bytes()
    refused(cyber0("replay", run, "--out", out), "model.safetensors is a file that is there already", "--force")
    assert out.read_bytes() == older
    assert cyber0("replay", run, "--out", out, "--force").code == 0
    assert cyber0("replay", run, "--out", "last.safetensors").code == 0
    assert out.read_bytes() == Path("last.safetensors").read_bytes() != older
    Path("papers").mkdir()
    Path("papers/thesis.tex").write_text("mine")
    refused(cyber0("replay", run, "--out", "papers", "--force"), "papers is a folder without config.json")
    assert Path("papers/thesis.tex").read_text() == "mine"


@pytest.mark.slow
def test_verify_takes_the_summary_of_a_federator_that_holds_no_weights(cyber0: Command, run: Path) -> None:
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    chain = next(line for line in cyber0("verify", run).out.splitlines() if line.startswith("chain ")).split()[1]
    del summary["model_digest"]
    path.write_text(json.dumps(summary | {"chain": chain}))
    assert "claims no model, as a federator has none" in cyber0("verify", run).out
    path.write_text(json.dumps(summary | {"chain": "00" * 32}))
    refused(cyber0("verify", run), f"claims {'00' * 32}")


@pytest.mark.slow
def test_repair_asks_first_and_then_verify_is_content(cyber0: Command, run: Path) -> None:
    assert "nothing to repair" in cyber0("repair", run).out
    data = bytearray((run / "ledger.bin").read_bytes())
    data[-60] ^= 1
    (run / "ledger.bin").write_bytes(data)
    refused(cyber0("verify", run), "record 11", "cyber0 repair run")
    answer = cyber0("repair", run)  # no terminal
    assert answer.code == 1 and "losing about 1 round," in answer.out and "nothing was changed" in answer.out
    assert (run / "ledger.bin").read_bytes() == data
    answer = cyber0("repair", run, "--yes")
    assert answer.code == 0 and "keep a copy of all of it as ledger.bin.damaged" in answer.out
    assert "11 records verify" in cyber0("verify", run).out
    assert (run / "ledger.bin.damaged").read_bytes() == data
    refused(cyber0("repair", "nowhere"), "nowhere holds no run")


@pytest.mark.slow
def test_verify_says_what_it_found(cyber0: Command, run: Path) -> None:
    answer = cyber0("verify", run)
    assert answer.code == 0
    assert "12 records verify (12 decided, 0 abandoned)" in answer.out and "all is well" in answer.out
    assert json.loads((run / "summary.json").read_text())["model_digest"] in answer.out
    assert Ledger.open(run / "ledger.bin").chain.hex() in answer.out
    with (run / "ledger.bin").open("ab") as file:
        file.write(b"\x01\x0c\0\0\0torn")
    assert "9 bytes of a torn last record" in cyber0("verify", run).out
    (run / "summary.json").unlink()
    answer = cyber0("verify", run)
    assert answer.code == 0 and "has not ended" in answer.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "words"),
    [("summary.json", ["claims", "after 12"]), ("rounds", ["claims", "after 11 rounds"]), ("ledger.bin", ["record"]),
     ("w0.safetensors", ["starting point"]), ("not json", ["can't be read as a summary"]),
     ("no keys", ["can't be read as a summary"]), ("a list", ["can't be read as a summary"])],
)  # fmt: skip
def test_verify_fails_on_whatever_was_tampered_with(file: str, words: list[str], cyber0: Command, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    match file:
        case "summary.json":
            (run / "summary.json").write_text(json.dumps({**summary, "model_digest": "0" * 64}))
        case "rounds":
            (run / "summary.json").write_text(json.dumps({**summary, "rounds": 11}))
        case "not json":
            (run / "summary.json").write_text("{")
        case "no keys":
            (run / "summary.json").write_text("{}")
        case "a list":
            (run / "summary.json").write_text("[]")
        case "ledger.bin":
            data = bytearray((run / "ledger.bin").read_bytes())
            data[-60] ^= 1
            (run / "ledger.bin").write_bytes(data)
        case "w0.safetensors":
            weights = {name: t.clone() for name, t in load_file(run / "w0.safetensors").items()}
            weights["bias"][0] += 1e-6
            save_file(weights, run / "w0.safetensors")
    refused(cyber0("verify", run), *words)


@pytest.mark.slow
def test_init_writes_the_header_that_a_run_would_have(cyber0: Command) -> None:
    Path("my.toml").write_text(f"rounds = 1\nseed = 9\n[method]\nk = 3\n{BLOBS}")
    answer = cyber0("init", "my.toml", "--out", "deep/header.bin")
    assert answer.code == 0 and "d = 68" in answer.out
    assert cyber0("run", "my.toml", "--out", "run", "--quiet").code == 0
    header = Ledger.open("deep/header.bin").header
    assert len(header.id) == 32 and replace(header, id="") == Ledger.open("run/ledger.bin").header
    assert cyber0("init", "my.toml", "--out", "other.bin").code == 0
    assert Ledger.open("other.bin").header.id != header.id  # another run of the same config
    assert len(Ledger.open("deep/header.bin")) == 0
    assert [entry.name for entry in header.layout] == ["weight", "bias"]


def test_run_report_and_verify_show_who_was_expelled_and_why(cyber0: Command) -> None:
    settings = ["task.name=logistic", "rounds=60", "method.k=32", "method.lr=0.05", "federation.attack=sign_flip",
                "federation.expel=true", "aggregation.rule=reputation"]  # fmt: skip
    shown = cyber0("run", *(word for one in settings for word in ("--set", one)), "--out", "out")
    expelled = json.loads(Path("out/summary.json").read_text())["expelled"]
    assert len(expelled) == 3 and " ".join(shown.out.split()).count("was expelled") == 3
    assert all(one["evidence"]["deviations"] < one["evidence"]["deviations_limit"] for one in expelled)
    verified = cyber0("verify", "out", "--decisions").out
    assert [f"expelled: {one['text']}" in verified for one in expelled] == [True] * 3
    assert expelled[0]["text"] in Path("out/report.html").read_text()
