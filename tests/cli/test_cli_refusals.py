"""No bad input ends in a traceback: errors are one line, with a remedy, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import BLOBS, FAST, Command, refused
from synthetic import OWN_BLOBS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "missing.toml"], ["no config file missing.toml", "examples/mnist.toml shows"]),
        (["run", "examples/mnist.toml"], ["no config file examples/mnist.toml: the working directory is"]),
        (["run", "."], ["can't be read"]),
        (["reproduce", "table1", "--redraw"], ["reproduce/table1 lacks 27 of these 27 runs", "repeat the options"]),
        (["reproduce", "table1", "--redraw", "--rerun"], ["give only one of them"]),
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
        (["run", "--device", "cudda"], ["did you mean 'cuda'?"]),
        (["verify", "missing", "--device", "GPU"], ["did you mean 'cuda'?"]),
        (["run", "--out", "file"], ["--out file can't be a folder", "choose another"]),
        (["run", "--out", "file/deeper"], ["--out file/deeper can't be a folder", "choose another"]),
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
        (["init", "my.toml", "--out", "file"], ["file already exists"]),
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(cyber0: Command, run: Path) -> None:
    refused(cyber0("run", "--device", "cuda", "--out", "other"), "no CUDA GPU", 'set device = "cpu"')
    assert not Path("other").exists()
    refused(cyber0("verify", run, "--device", "cuda"), "no CUDA GPU")
    refused(cyber0("replay", run, "--out", "m", "--device", "cuda"), "no CUDA GPU")


@pytest.mark.slow
def test_a_file_in_place_of_a_runs_folder_is_refused_by_its_name(cyber0: Command, run: Path) -> None:
    file = run / "config.toml"
    for command in (["run"], ["serve", "c.toml", "--insecure", "--listen", "127.0.0.1:0"]):
        refused(cyber0(*command, "--out", file), f"--out {file} can't be a folder", "is a file; choose another")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_folder_that_can_not_be_written_to_is_refused(cyber0: Command, run: Path) -> None:
    refused(cyber0("run", *FAST, "--out", "/proc"), "/proc")
    refused(cyber0("run", *FAST, "--out", "/proc/run"), "/proc/run")
    refused(cyber0("replay", run, "--out", "/proc/m.safetensors"), "/proc")
    Path("my.toml").write_text(BLOBS)
    refused(cyber0("init", "my.toml", "--out", "/proc/header"), "/proc/header")


@pytest.mark.slow
def test_a_folder_in_place_of_a_config_is_refused_with_what_to_do(cyber0: Command, run: Path) -> None:
    refused(cyber0("run", run), "`cyber0 run run/config.toml`", "`cyber0 run --resume run`")


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten(cyber0: Command, run: Path) -> None:
    before = (run / "ledger.bin").read_bytes()
    refused(cyber0("run", *FAST, "--out", run), "run already holds a run", "--resume run")
    assert (run / "ledger.bin").read_bytes() == before
