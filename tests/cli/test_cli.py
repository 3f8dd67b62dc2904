"""The command line: what it prints, what it refuses, and that no bad input ends in a traceback."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file
from synthetic import OWN_BLOBS, Blobs, one_thread  # noqa: F401
from synthetic import config as blobs_config

from cyber0 import __version__
from cyber0.cli import completion
from cyber0.cli import display as screen
from cyber0.cli import main as cli
from cyber0.config import choices, registry
from cyber0.config import schema as config
from cyber0.config.registry import RULES
from cyber0.config.schema import Config
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger
from cyber0.model.vector import Parameters
from cyber0.report import outcome
from cyber0.report.headline import rate_text
from cyber0.runs import api
from cyber0.runs.run import Row

BLOBS = f'[task]\nname = "{OWN_BLOBS}"\n'
FAST = ["--set", f"task.name={OWN_BLOBS}", "--set", "rounds=12", "--set", "method.k=4", "--set", "evaluate_every=4",
        "--set", "method.lr=0.1"]  # fmt: skip


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def cyber0(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command, run in this process in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["cyber0", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        code = stop.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())

    return call


def refused(answer: Answer, *words: str) -> None:
    """Check an answer to bad input: code 2, and an error in plain words."""
    assert answer.code == 2, answer
    assert "Traceback" not in answer.err and "Traceback" not in answer.out
    text = " ".join(answer.err.split())
    assert all(word in text for word in words), text


@pytest.fixture
def run(cyber0: Command) -> Path:
    """A finished run."""
    answer = cyber0("run", *FAST, "--out", "run", "--quiet")
    assert answer.code == 0, answer.err
    return Path("run")


def test_help_names_every_command_and_version_the_version(cyber0: Command) -> None:
    answer = cyber0("--help")
    assert answer.code == 0
    for name in ("run", "study", "report", "replay", "verify", "repair", "init", "list", "data"):
        assert f" {name} " in answer.out
        assert cyber0(name, "--help").code == 0
        assert cyber0(name, "-h") == cyber0(name, "--help")
    assert cyber0("--version") == (0, f"cyber0 {__version__}\n", "")


def test_list_names_every_setting_and_every_choice(cyber0: Command) -> None:
    answer = cyber0("list")
    assert answer.code == 0
    for key in config.describe():
        assert key.name in answer.out
    tables = [
        table
        for home in (choices, registry)
        for name, table in vars(home).items()
        if name.isupper() and not name.startswith("_")
    ]
    assert len(tables) > 12
    for name in (name for table in tables for name in table):
        assert f"{name}:" in answer.out, name


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("100", 100), ("", 120), ("0", 120), ("x", 120)])
@pytest.mark.parametrize("command", [("list",), ("theory", "--d", "100")])
def test_what_is_piped_is_as_wide_as_columns_says(
    command: tuple[str, ...], columns: str, width: int, cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    answer = cyber0(*command)
    assert answer.code == 0
    assert max(len(line) for line in answer.out.splitlines() if not line.startswith("- ")) == width


def test_theory_takes_whole_numbers_as_they_are_written_and_no_others(cyber0: Command) -> None:
    assert cyber0("theory", "--d", "1e6", "--n", "1e3") == cyber0("theory", "--d", "1000000", "--n", "1000")
    for wrong in ("1.5", "1e999999", "nan", "many"):
        answer = cyber0("theory", "--d", wrong)
        assert answer.code == 2 and "--d" in answer.err and not answer.out


def test_theory_refuses_a_picture_that_it_can_not_draw_before_it_says_anything(cyber0: Command) -> None:
    answer = cyber0("theory", "--d", "100", "--plot", "foo.xyz")
    assert answer.code == 2 and "--plot foo.xyz can't be drawn" in answer.err and not answer.out


def test_a_run_shows_its_progress_in_plain_lines_and_ends_with_a_table(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--out", "run")
    assert (answer.code, answer.err) == (0, "")
    assert "12 clients, 3 Byzantine (full_knowledge), iid, trimmed_mean, k = 4" in answer.out
    assert "round 12/12  accuracy 0." in answer.out
    assert "rounds/s" in answer.out and "model digest" in answer.out
    assert "\x1b" not in answer.out
    assert sum(line.startswith("round ") for line in answer.out.splitlines()) <= 11
    listed = next(line for line in answer.out.splitlines() if line.startswith("run/: "))
    assert " w0.safetensors, ledger.bin" in listed


@pytest.mark.parametrize("names", [None, ["awful", "dull", "fine", "great"]])
def test_a_partitions_table_names_the_labels_where_the_task_does(names: list[str] | None) -> None:
    task = Blobs()
    if names:
        task.label_names = names  # type: ignore[attr-defined]
    shown = screen.partition_table(Simulation(Config(), task=task), "iid")
    heads = [str(column.header) for column in shown.columns]
    assert heads == ["client", *(names or map(str, range(task.classes))), "all"]


class DevBlobs(Blobs):
    """Blobs that are evaluated on a dev set, and at the end on a test set too."""

    evaluated_on = "dev"

    def evaluate_more(self, model: torch.nn.Module, loss: float, accuracy: float) -> dict[str, float]:
        return {"dev_loss": loss, "dev_accuracy": accuracy, "test_loss": 1.25, "test_accuracy": 0.4321}


def rows_of_table(text: str) -> dict[str, str]:
    """Return the rows of the table of results by their names."""
    rows = [line.split("│")[1:3] for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in rows}


def test_a_run_on_the_dev_set_says_so_and_ends_with_both_accuracies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(task: Blobs, folder: Path) -> str:
        with screen.Display() as display:
            api.run(blobs_config("rounds=12"), task=task, out=folder, callbacks=[display])
        assert display.code == 0
        return capsys.readouterr().out

    one = rows_of_table(shown(Blobs(), tmp_path / "one").partition("Result")[2])
    assert {"accuracy", "loss"} <= set(one) and not {"dev accuracy", "test accuracy"} & set(one)
    text = shown(DevBlobs(), tmp_path / "run")
    assert "round 12/12  dev accuracy 0." in text
    table = rows_of_table(text.partition("Result")[2])
    assert table["dev accuracy"] == one["accuracy"] and table["dev loss"] == one["loss"]
    assert table["test accuracy"] == "43.21%" and "accuracy" not in table
    assert json.loads((tmp_path / "run/summary.json").read_text())["evaluated_on"] == "dev"
    assert "(43.21 % on the test set)" in (tmp_path / "run/report.html").read_text()


def test_a_quiet_run_says_nothing(cyber0: Command) -> None:
    assert cyber0("run", *FAST, "--out", "run", "--quiet") == (0, "", "")
    assert Path("run/summary.json").exists()
    assert cyber0("run", "--resume", "run", "--quiet") == (0, "", "")


def test_without_out_every_run_gets_a_folder_of_its_own(cyber0: Command) -> None:
    for _ in range(3):
        assert cyber0("run", *FAST, "--set", "rounds=1", "--quiet").code == 0
    assert len(list(Path("runs").glob("ownblobs-*/summary.json"))) == 3


def test_a_config_file_and_overrides_make_the_run(cyber0: Command) -> None:
    Path("my.toml").write_text(f"seed = 5\nrounds = 3\n[method]\nk = 4\n{BLOBS}")
    assert cyber0("run", "my.toml", "--set", "method.k=2", "--device", "cpu", "--out", "run", "--quiet").code == 0
    header = Ledger.open("run/ledger.bin").header
    assert (header.seed, header.k, header.config["rounds"]) == (5, 2, 3)


def test_partial_participation_prints_its_risk(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "federation.clients=40", "--set", "federation.byzantine=2", "--set",
                    "federation.participation=0.25", "--out", "run")  # fmt: skip
    assert "10 of 40 clients are asked a round; 0.00% of the rounds hold more than the 2 liars" in answer.out
    assert json.loads(Path("run/summary.json").read_text())["probability_of_too_many_liars"] == 0


def test_too_few_clients_for_silent_byzantine_clients_are_warned_of(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "aggregation.beta=0.4", "--out", "run")
    assert answer.code == 0
    assert "Byzantine clients that stay silent can halt training" in " ".join(answer.out.split())


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "missing.toml"], ["no config file missing.toml"]),
        (["run", "."], ["can't be read"]),
        (["run", "ridge"], ["there is no config file ridge", "--set task.name=ridge"]),
        (["reproduce", "table1", "--redraw"], ["reproduce/table1 lacks 27 of these 27 runs", "repeat the options"]),
        (["reproduce", "table1", "--redraw", "--rerun"], ["give one of them"]),
        (["reproduce", "theorem1", "--rerun"], ["theorem1 is not made of runs"]),
        (["run", "--set", "method.batchsize=4"], ["'method.batchsize'", "did you mean 'method.batch_size'?"]),
        (["run", "--set", "metod.k=4"], ["metod.k", "method.k"]),
        (["run", "--set", "k=4"], ["unknown key 'k'", "'method.k'"]),
        (["run", "--set", "method.k"], ["method.k", "has no value"]),
        (["run", "--set", "method.k=many"], ["method.k", "'many'", "whole number"]),
        (["run", "--set", "method.k=0"], ["method.k = 0", "at least 1"]),
        (["run", "--set", "method.lr=nan"], ["method.lr", "finite"]),
        (["run", "--set", "method.mu=0"], ["method.mu", "gradient"]),
        (["run", "--set", "method=4"], ["method is a section"]),
        (["run", "--set", "seed=-1"], ["seed = -1"]),
        (["run", "--set", "aggregation.rule=trimed_mean"], ["aggregation.rule", "did you mean 'trimmed_mean'?"]),
        (["run", "--set", "federation.attack=ful_knowledge"], ["did you mean 'full_knowledge'?"]),
        (["run", "--set", "aggregation.beta=0.5"], ["aggregation.beta = 0.5", "below 0.5"]),
        (["run", "--set", "federation.byzantine=12"], ["federation.byzantine = 12", "at most 11"]),
        (["run", OWN_BLOBS, "--set", "federation.clients=100000"], ["480 samples", "100000 clients"]),
        (["run", "--set", "task.name=cifar"], ["task.name", "cifar"]),
        (
            [
                "run",
                "--set",
                "method.estimator=forward",
                "--set",
                "method.local_epochs=2",
                "--set",
                "method.local_memory=regenerate",
            ],
            ["method.local_memory"],
        ),
        (
            [
                "run",
                "--set",
                "federation.clients=1000",
                "--set",
                "federation.byzantine=250",
                "--set",
                "federation.participation=0.012",
            ],
            ["35.", "federation.accept_risk"],
        ),
        (["run", "--device", "tpu"], ["device = 'tpu'"]),
        (["run", "--device", "gpu"], ["device = 'gpu'", "did you mean 'cuda'?"]),
        (["run", "--device", "cuda:1"], ["did you mean 'cuda'?"]),
        (["verify", "missing", "--device", "GPU"], ["did you mean 'cuda'?"]),
        (["run", "--out", "file"], ["the folder file can't be made"]),
        (["run", "--out", "file/deeper"], ["the folder file/deeper can't be made"]),
        (["run", "--resume", "missing"], ["missing holds no run to resume"]),
        (["run", "--resume", "run", "--set", "method.k=4"], ["--resume", "--set"]),
        (["run", "--resume", "run", "--out", "other"], ["--resume", "--out"]),
        (["run", "--resume", "run", "--device", "cpu"], ["--resume", "--device"]),
        (["run", "my.toml", "--resume", "run"], ["--resume", "config"]),
        (["run", "--nonsense"], ["No such option"]),
        (["run", "a.toml", "b.toml"], ["unexpected extra argument"]),
        (["replay", "missing", "--out", "m.safetensors"], ["missing holds no run"]),
        (["replay", "missing"], ["--out"]),
        (["replay"], ["Missing argument"]),
        (["verify", "missing"], ["missing holds no run"]),
        (["verify", "."], ["holds no run"]),
        (["verify", "file"], ["holds no run"]),
        (["verify", "missing", "--device", "tpu"], ["device = 'tpu'"]),
        (["init", "missing.toml", "--out", "header"], ["no config file"]),
        (["init", "my.toml", "--out", "file"], ["file exists already"]),
        (["init", "my.toml", "--out", "file/header"], ["file"]),
        (["data", "minst"], ["unknown data set 'minst'", "mnist"]),
        (["rum"], ["No such command"]),
    ],
)
def test_bad_input_is_refused_in_plain_words(arguments: list[str], words: list[str], cyber0: Command) -> None:
    Path("file").write_text("")
    Path("my.toml").write_text(f"rounds = 3\n{BLOBS}")
    before = sorted(Path(".").iterdir())
    refused(cyber0(*arguments), *words)
    if "federation.clients=100000" not in arguments:
        assert sorted(Path(".").iterdir()) == before, "something was left behind"


@pytest.mark.parametrize(
    ("text", "words"),
    [("rounds = \n", ["my.toml is not valid TOML"]), ("[method]\nkk = 3\n", ["'method.kk'", "'method.k'"]),
     ("[metod]\nk = 3\n", ["metod", "method"]), ("method = 3\n", ["method = 3 must be a table"]),
     ("rounds = 'many'\n", ["rounds = 'many'"]), ("\x00", ["not valid TOML"]), ("seed = 1\nseed = 2", ["not valid"])],
)  # fmt: skip
def test_a_bad_config_file_is_refused_in_plain_words(text: str, words: list[str], cyber0: Command) -> None:
    Path("my.toml").write_text(text)
    for arguments in (["run", "my.toml"], ["init", "my.toml", "--out", "header"]):
        refused(cyber0(*arguments), *words)
    Path("my.toml").write_bytes(b"\xff\xfe\x00")
    refused(cyber0("run", "my.toml"), "not valid TOML")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(cyber0: Command, run: Path) -> None:
    refused(cyber0("run", "--device", "cuda", "--out", "other"), "no CUDA GPU", 'set device = "cpu"')
    assert not Path("other").exists()
    refused(cyber0("verify", run, "--device", "cuda"), "no CUDA GPU")
    refused(cyber0("replay", run, "--out", "m", "--device", "cuda"), "no CUDA GPU")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_folder_that_can_not_be_written_to_is_refused(cyber0: Command, run: Path) -> None:
    refused(cyber0("run", *FAST, "--out", "/proc"), "/proc")
    refused(cyber0("run", *FAST, "--out", "/proc/run"), "/proc/run")
    refused(cyber0("replay", run, "--out", "/proc/m.safetensors"), "/proc")
    Path("my.toml").write_text(BLOBS)
    refused(cyber0("init", "my.toml", "--out", "/proc/header"), "/proc/header")


def test_a_folder_in_place_of_a_config_is_refused_with_what_to_do(cyber0: Command, run: Path) -> None:
    refused(cyber0("run", run), "`cyber0 run run/config.toml`", "`cyber0 run --resume run`")


def test_a_folder_that_holds_a_run_is_not_overwritten(cyber0: Command, run: Path) -> None:
    before = (run / "ledger.bin").read_bytes()
    refused(cyber0("run", *FAST, "--out", run), "run already holds a run", "--resume run")
    assert (run / "ledger.bin").read_bytes() == before


# Replay, verify, init.


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


@pytest.mark.parametrize("wrong", ["13", "-1", "1000000"])
def test_replay_refuses_a_round_beyond_the_end(wrong: str, cyber0: Command, run: Path) -> None:
    refused(cyber0("replay", run, "--round", wrong, "--out", "m.safetensors"), f"round {wrong}", "use 0 to 12")
    assert not Path("m.safetensors").exists()


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
    task = api.settings_of(settings).task
    assert (task.model, task.data) == (str(tmp_path / "model"), str(tmp_path / "data"))
    on_the_hub = config.Config().with_overrides(["task.name=sst2"])
    assert api.settings_of(on_the_hub) == on_the_hub


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


def test_verify_takes_the_summary_of_a_federator_that_holds_no_weights(cyber0: Command, run: Path) -> None:
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    chain = next(line for line in cyber0("verify", run).out.splitlines() if line.startswith("chain ")).split()[1]
    del summary["model_digest"]
    path.write_text(json.dumps(summary | {"chain": chain}))
    assert "claims no model, as a federator has none" in cyber0("verify", run).out
    path.write_text(json.dumps(summary | {"chain": "00" * 32}))
    refused(cyber0("verify", run), f"claims {'00' * 32}")


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


def test_ctrl_c_says_how_to_go_on(cyber0: Command, monkeypatch: pytest.MonkeyPatch) -> None:

    play = Simulation.run_round

    def interrupted(self: Simulation) -> object:
        if self.round == 5:
            raise KeyboardInterrupt
        return play(self)

    monkeypatch.setattr(Simulation, "run_round", interrupted)
    answer = cyber0("run", *FAST, "--out", "run")
    assert answer.code == 130
    assert "interrupted after 5 rounds; go on with: cyber0 run --resume run" in answer.err
    monkeypatch.setattr(Simulation, "run_round", play)
    answer = cyber0("run", "--resume", "run")
    assert answer.code == 0 and "resuming after round 5 of 12" in answer.out


# The real thing.


@pytest.mark.mnist
def test_the_default_run_learns_mnist_among_byzantine_clients_and_replays_to_the_same_model(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "cyber0"
    if not command.exists():
        pytest.skip("cyber0 is not installed as a command")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CYBER0_THREADS": "1"}

    def call(*arguments: str) -> str:
        done = subprocess.run([command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = call("run", "--set", "rounds=60", "--out", "run")
    assert "mnist, 12 clients, 3 Byzantine (full_knowledge), iid, trimmed_mean, k = 64" in out
    assert "d = 7,850" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert 0.70 < summary["final_accuracy"] < 0.85
    assert summary["uplink_bytes_per_client"] == summary["downlink_bytes_per_client"] == 60 * 64 * 4
    assert "all is well" in call("verify", "run")

    from cyber0.tasks.mnist import Mnist

    assert summary["model_digest"] in call("replay", "run", "--out", "model.safetensors")
    model = torch.nn.Linear(784, 10)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    loss, accuracy = Mnist().evaluate(model)
    assert accuracy == pytest.approx(summary["final_accuracy"], abs=2e-4)
    assert loss == pytest.approx(summary["final_loss"], rel=1e-4)


# How a run speaks.


def test_a_slow_run_is_said_in_seconds_a_round_and_a_fast_one_in_rounds_a_second() -> None:
    speeds = (0.0, 0.0021, 0.4, 0.99, 1.0, 3.21, 57.3, 1016.4)
    texts = ["", "476 s/round", "2.5 s/round", "1.0 s/round", "1.0 rounds/s", "3.2 rounds/s", "57 rounds/s",
             "1,016 rounds/s"]  # fmt: skip
    assert list(map(rate_text, speeds)) == texts


def row(round: int, accuracy: float = 0.5, loss: float = 1.0) -> Row:
    return Row(round, accuracy, loss, 0, 0, round, 1.0)


def shown_by(
    width: int, rounds: int, speed: float, *done: tuple[int, Row], terminal: bool = False, before: int = 0
) -> str:
    """Return what is shown of a run, of which is said how many rounds are done and what the last evaluation was."""
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, highlight=False)
    run: Any = SimpleNamespace(round=before, rounds=rounds, rounds_per_second=speed, is_due=lambda round: False,
                               simulation=SimpleNamespace(evaluated_on="test"))  # fmt: skip
    with screen.Display(console) as display:
        display.begin(run)
        for run.round, run.last_row in done:
            display.on_round(None)  # type: ignore[arg-type]
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_progress_line_shows_an_evaluation_once_and_names_its_round() -> None:
    rows = {5: row(4, 0.75, 0.5), 10: row(8, 0.875, 0.25), 20: row(20, 1.0, 0.125)}
    text = shown_by(100, 20, 0.25, *((r, rows[max((e for e in rows if e <= r), default=5)]) for r in range(1, 21)))
    lines = text.splitlines()
    assert "round 2/20  accuracy 0.7500  loss 0.5000 (at round 4)  4.0 s/round" in lines  # of a row, whatever it is
    assert "round 4/20  4.0 s/round" in lines and "round 8/20  4.0 s/round" in lines
    assert "round 10/20  accuracy 0.8750  loss 0.2500 (at round 8)  4.0 s/round" in lines
    assert "round 20/20  accuracy 1.0000  loss 0.1250  4.0 s/round" in lines
    assert text.count("accuracy") == 3 and "rounds/s" not in text


def test_the_evaluation_of_the_start_is_no_progress() -> None:
    assert shown_by(100, 10, 2.0, (1, row(0))) == "round 1/10  2.0 rounds/s\n"


def test_the_bar_names_the_round_of_the_evaluation_and_a_slow_speed_in_seconds() -> None:
    text = shown_by(200, 20, 0.1, (7, row(4, 0.75, 0.5)), terminal=True)
    assert "accuracy 0.750  loss 0.500 (at round 4)  10.0 s/round" in text


def test_the_bar_of_a_resumed_run_begins_where_the_run_stands() -> None:
    assert " 7/20" in shown_by(200, 20, 0.1, terminal=True, before=7)


def test_clients_that_are_trimmed_alike_are_said_to_be_in_a_sentence() -> None:
    def said(*shares: float, byzantine: tuple[int, ...] = ()) -> str:
        rows = [(i, int(i in byzantine), 100, round(100 * share), share) for i, share in enumerate(shares)]
        this = SimpleNamespace(suspects=lambda: rows, config=Config().with_overrides(["federation.byzantine=3"]))
        return screen._suspects(this)  # type: ignore[arg-type]

    assert said(0.5, 0.5, 0.5, 0.5) == "none stands out: each had 50% of the scalars trimmed"
    assert said(0.5, 0.5, 0.5, 0.5, 0.25) == "none stands out: 4 of 5 clients had 50% of the scalars trimmed"
    assert said(0.5, 0.25, 0.75, 0.1, byzantine=(2,)) == "2 (75% of its scalars, Byzantine), 0 (50%), 1 (25%)"
    assert said(0, 0, 0, 0) == ""


# A run that learned nothing.


def test_a_run_whose_rounds_were_all_abandoned_ends_with_3_and_points_to_diagnose(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "serve.quorum=12", "--set", "federation.attack=nonfinite", "--out", "r d")
    assert answer.code == 3
    assert "error: nothing was learned: every one of the 12 rounds was abandoned" in answer.err
    assert "cyber0 diagnose 'r d'" in answer.err and "Result" in answer.out


def test_a_run_that_diverged_ends_with_3_also_when_quiet(cyber0: Command) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of losses that are not finite
        answer = cyber0("run", *FAST, "--set", "method.lr=1e38", "--set", "federation.attack=none", "--set",
                        "method.estimator=gradient", "--out", "run", "--quiet")  # fmt: skip
    assert (answer.code, answer.out) == (3, "")
    assert "the loss is not a finite number at the end" in answer.err and "cyber0 diagnose run" in answer.err
    assert json.loads(Path("run/summary.json").read_text())["final_loss"] is None


def test_a_run_that_changed_no_weight_ends_with_3(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "method.lr=1e-30", "--out", "run")
    assert answer.code == 3 and "12 rounds were decided, and none of them changed a weight" in answer.err


def test_a_run_that_learned_is_not_warned_of_and_one_that_lost_it_again_is(cyber0: Command) -> None:
    assert "warning" not in cyber0("run", *FAST, "--set", "federation.byzantine=0", "--out", "good").out
    answer = cyber0("run", *FAST, "--set", "method.lr=300", "--set", "federation.byzantine=0", "--out", "bad")
    assert answer.code == 0 and "warning: the run diverged, its loss rose:" in answer.out
    assert "`cyber0 diagnose bad` says whether it is the learning rate" in answer.out
    assert cyber0("run", *FAST, "--set", "rounds=0", "--out", "none").code == 0


@pytest.mark.parametrize(
    ("evaluations", "abandoned", "doubt"),
    [
        ([row(0, 0.1, 2.0), row(5, 0.9, 0.5), row(10, 0.1, 1.9)], 0, "accuracy fell from 90.00% at round 5 to 10.00%"),
        ([row(0, 0.1, 2.0), row(10, 0.2, 2.0)], 0, "the loss did not fall: 2 at the start, 2 at the end"),
        ([row(0, 0.1, 2.0), row(10, 0.8, 1.0)], 6, "6 of 10 rounds were abandoned"),
        ([row(0, 0.1, 2.0), row(5, 0.92, 1.0), row(10, 0.9, 0.9)], 4, ""),
    ],
)
def test_what_looks_wrong_with_a_run_is_said(evaluations: list[Row], abandoned: int, doubt: str) -> None:
    summary = {"rounds": 10, "abandoned_rounds": abandoned, "final_loss": 1.0}
    found = outcome.judge(summary, evaluations, unchanged=False)
    assert found == ("", [doubt] if doubt else [])


def test_a_method_that_can_not_be_diagnosed_is_not_sent_to_diagnose() -> None:
    assert "diagnose" not in outcome.remedy("fedavg", "run") and "diagnose run" in outcome.remedy("mezo", "run")


# Help and completion.


def prose_of(text: str) -> list[list[str]]:
    """Return the paragraphs between the usage and the first panel of a command's help, line by line."""
    lines = [line.strip() for line in text.partition("╭")[0].splitlines()]
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return [paragraph.splitlines() for paragraph in paragraphs[1:]]


COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_help_is_broken_at_the_edge_of_the_terminal_and_nowhere_else(
    command: str, width: int, cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    answer = cyber0(command, "--help")
    assert answer.code == 0
    paragraphs = prose_of(answer.out)
    assert paragraphs
    for lines in paragraphs:
        for line, following in itertools.pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > width - 2, (line, following)
    found = next(c for c in cli.app.registered_commands if (c.name or c.callback.__name__) == command)  # type: ignore[union-attr]
    written = found.callback.__doc__  # type: ignore[union-attr]
    assert written and " ".join(written.split()) == " ".join(" ".join(" ".join(lines) for lines in paragraphs).split())
    assert "[[" not in answer.out


def completed(cyber0: Command, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Return what bash is offered for the last of the words."""
    monkeypatch.setenv("_CYBER0_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["cyber0", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    answer = cyber0()
    assert answer.code == 0, answer
    return answer.out.split()


@pytest.mark.parametrize("place", ["x", "", "-9", "1.5", None])
def test_a_place_that_bash_would_not_send_completes_to_nothing(
    place: str | None, cyber0: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_CYBER0_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cyber0 run")
    if place is None:
        monkeypatch.delenv("COMP_CWORD", raising=False)
    else:
        monkeypatch.setenv("COMP_CWORD", place)
    answer = cyber0()
    assert (answer.code, answer.out, answer.err) == (0, "", "")


def test_the_shell_completes_commands_settings_and_names(cyber0: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(*words: str) -> list[str]:
        return completed(cyber0, monkeypatch, *words)

    assert {"replay", "report", "reproduce"} <= set(offered("re")) <= set(COMMANDS)
    assert offered("run", "--dev") == ["--device"] and offered("run", "--device", "c") == ["cpu", "cuda"]
    assert "method.k=" in offered("run", "--set", "method.") and "seed=" in offered("run", "--set", "s")
    assert offered("run", "--set", "aggregation.r") == [f"aggregation.rule={rule}" for rule in RULES]
    assert offered("study", "--nothing-of-the-kind") == []
    assert offered("reproduce", "table3") == ["table3", "table3_lr"] and offered("data", "m") == ["mnist"]
    assert offered("serve", "c.toml", "--set", "serve.quo") == ["serve.quorum=", "serve.quorum=1"]
    # Bash hands the equals sign over as a word of its own.
    assert offered("run", "--set", "aggregation.rule", "=") == list(RULES)
    assert offered("run", "--set", "aggregation.rule", "=", "tri") == ["trimmed_mean"]
    assert offered("run", "--set", "method.k", "=") == ["64"]


def test_every_setting_is_offered_and_so_are_its_default_and_its_choices() -> None:
    assert completion.settings("") == [(f"{key.name}=", key.text) for key in config.describe()]
    for key in config.describe():
        offers = [offer for offer, _ in completion.settings(f"{key.name}=")]
        values = [offer.removeprefix(f"{key.name}=") for offer in offers]
        assert values == (list(key.choices) if key.choices else ["", config_text(key.default)])


def config_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
