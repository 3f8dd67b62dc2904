"""`cyber0 run`: what it prints and writes, and how it resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import BLOBS, FAST, Command, rows_of_table
from safetensors.torch import load_file
from synthetic import Blobs
from synthetic import config as blobs_config

from cyber0 import api
from cyber0.cli import display as screen
from cyber0.config.schema import Config
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_quiet_run_says_nothing(cyber0: Command) -> None:
    assert cyber0("run", *FAST, "--out", "run", "--quiet") == (0, "", "")
    assert Path("run/summary.json").exists()
    assert cyber0("run", "--resume", "run", "--quiet") == (0, "", "")


@pytest.mark.slow
def test_without_out_every_run_gets_a_folder_of_its_own(cyber0: Command) -> None:
    for _ in range(3):
        assert cyber0("run", *FAST, "--set", "rounds=1", "--quiet").code == 0
    assert len(list(Path("runs").glob("ownblobs-*/summary.json"))) == 3


@pytest.mark.slow
def test_a_config_file_and_overrides_make_the_run(cyber0: Command) -> None:
    Path("my.toml").write_text(f"seed = 5\nrounds = 3\n[method]\nk = 4\n{BLOBS}")
    assert cyber0("run", "my.toml", "--set", "method.k=2", "--device", "cpu", "--out", "run", "--quiet").code == 0
    header = Ledger.open("run/ledger.bin").header
    assert (header.seed, header.k, header.config["rounds"]) == (5, 2, 3)


@pytest.mark.slow
def test_partial_participation_prints_its_risk(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "federation.clients=40", "--set", "federation.byzantine=2", "--set",
                    "federation.participation=0.25", "--out", "run")  # fmt: skip
    assert (
        "10 of 40 clients are invited per round; 0.00% of the rounds have more than the 2 Byzantine clients"
        in answer.out
    )
    assert json.loads(Path("run/summary.json").read_text())["probability_of_too_many_liars"] == 0


@pytest.mark.slow
def test_too_few_clients_for_silent_byzantine_clients_are_warned_of(cyber0: Command) -> None:
    answer = cyber0("run", *FAST, "--set", "aggregation.beta=0.4", "--out", "run")
    assert answer.code == 0
    assert "Byzantine clients that stay silent can halt training" in " ".join(answer.out.split())


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume(cyber0: Command, monkeypatch: pytest.MonkeyPatch) -> None:

    run_round = Simulation.run_round

    def interrupted(self: Simulation) -> object:
        if self.round == 5:
            raise KeyboardInterrupt
        return run_round(self)

    monkeypatch.setattr(Simulation, "run_round", interrupted)
    answer = cyber0("run", *FAST, "--out", "run")
    assert answer.code == 130
    assert "interrupted after 5 rounds; resume with: cyber0 run --resume run" in answer.err
    monkeypatch.setattr(Simulation, "run_round", run_round)
    answer = cyber0("run", "--resume", "run")
    assert answer.code == 0 and "resuming after round 5 of 12" in answer.out


@pytest.mark.slow
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
