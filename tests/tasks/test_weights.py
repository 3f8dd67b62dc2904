"""Starting from given weights: task.weights in runs, studies and deployments, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import many_processes
from safetensors.torch import load_file, save_file
from synthetic import Tied
from torch import nn

import cyber0
from cyber0.cli import main as cli
from cyber0.config.files import load, to_toml
from cyber0.config.paths import agreed
from cyber0.config.schema import Config
from cyber0.diagnose.federation import diagnose
from cyber0.errors import Cyber0Error, DataError, LedgerError, ModelError
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Header, Ledger
from cyber0.runs.repair import examine
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run
from cyber0.serve.join import JoinOptions, make_participant
from cyber0.study.cells import Cell
from cyber0.study.grid import read_plan
from cyber0.tasks.starting import load_into

HERE = Path(__file__).parents[1]
SETTINGS = "rounds = 6\nevaluate_every = 3\n[federation]\nclients = 5\nbyzantine = 1\n[method]\nk = 4\nbatch_size = 8\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: a task with batch normalisation, its weights in three forms, and a config that names one."""
    shutil.copy(HERE / "own_tasks.py", tmp_path / "my_task.py")
    model = pictures(seed=11)
    save_file(model.state_dict(), tmp_path / "whole.safetensors")
    save_file(dict(model.named_parameters()), tmp_path / "trained.safetensors")
    write_config(tmp_path, "whole.safetensors")
    return tmp_path


def pictures(seed: int) -> nn.Module:
    from own_tasks import Pictures

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Pictures().model()


def write_config(home: Path, weights: str, name: str = "my_task.py:Pictures") -> Path:
    path = home / "config.toml"
    path.write_text(f'{SETTINGS}[task]\nname = "{name}"\nweights = "{weights}"\n')
    return path


def start(home: Path, out: str = "run") -> Run:
    return Run.start(load(home / "config.toml"), home / out)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def header_of(folder: Path) -> Header:
    with Ledger.open(folder / "ledger.bin") as ledger:
        return ledger.header


def test_a_whole_state_dict_gives_weights_and_buffers_and_the_trainable_ones_alone_give_those(home: Path) -> None:
    given = pictures(seed=11)
    started = Simulation(load(home / "config.toml")).parameters.model
    for name, tensor in given.state_dict().items():
        assert torch.equal(started.state_dict()[name], tensor), name
    write_config(home, "trained.safetensors")
    started = Simulation(load(home / "config.toml")).parameters.model
    assert all(torch.equal(started.get_parameter(name), p) for name, p in given.named_parameters())
    own = Simulation(load(home / "config.toml", ["task.weights="])).parameters.model
    mean = "1.running_mean"
    assert torch.equal(started.state_dict()[mean], own.state_dict()[mean])
    assert not torch.equal(started.state_dict()[mean], given.state_dict()[mean])


def test_the_model_of_one_run_is_the_start_of_the_next(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(home)
    first.run()
    monkeypatch.chdir(home)
    cli.app(["replay", "run", "--out", "after.safetensors"], standalone_mode=False)
    again = Run.start(load(home / "config.toml", ["task.weights=after.safetensors"]), home / "next")
    assert again.simulation.parameters.digest() == summary_of(home / "run")["model_digest"]
    again.simulation.close()


def test_a_path_is_relative_to_its_config_file_and_a_folder_keeps_it_relative_to_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(home, "runs/one").run()
    kept = (home / "runs/one/config.toml").read_text()
    assert 'weights = "../../whole.safetensors"' in kept and str(home) not in kept
    assert load(home / "runs/one/config.toml") == load(home / "config.toml")
    monkeypatch.setenv("HOME", str(home))
    assert load(None, ["task.weights=~/whole.safetensors"]).task.weights == str(home / "whole.safetensors")
    monkeypatch.chdir(home)
    assert load(None, ["task.weights=whole.safetensors"]).task.weights == str(home / "whole.safetensors")


@pytest.mark.slow
def test_a_run_goes_on_verifies_and_is_diagnosed_without_the_file_that_it_started_from(home: Path) -> None:
    start(home, "whole").run()
    cut = start(home, "cut")
    cut.simulation.run_round()
    cut.simulation.close()
    (home / "whole.safetensors").unlink()
    Run.resume(home / "cut").run()
    assert summary_of(home / "cut")["model_digest"] == summary_of(home / "whole")["model_digest"]
    assert rebuild(home / "cut")[1].digest() == summary_of(home / "whole")["model_digest"]
    assert diagnose(home / "cut", round=2, trials=2)["stations"]


def test_a_method_without_a_ledger_goes_on_without_the_file_too(home: Path) -> None:
    config = load(home / "config.toml", ["method.name=fedavg", "federation.byzantine=0"])
    Run.start(config, home / "whole").run()
    cut = Run.start(config, home / "cut")
    cut.simulation.run_round()
    cut.simulation.checkpoint()
    cut.simulation.close()
    (home / "whole.safetensors").unlink()
    Run.resume(home / "cut").run()
    assert summary_of(home / "cut")["model_digest"] == summary_of(home / "whole")["model_digest"]


def test_a_damaged_start_is_taken_from_the_file_again_and_without_it_the_error_names_it(home: Path) -> None:
    run = start(home)
    run.simulation.run_round()
    run.simulation.close()
    kept = home / "run/w0.safetensors"
    damaged = bytearray(kept.read_bytes())
    damaged[-1] ^= 1
    kept.write_bytes(damaged)
    with pytest.warns(RuntimeWarning, match="was damaged and is written again"):
        Run.resume(home / "run").simulation.close()
    kept.unlink()
    (home / "whole.safetensors").unlink()
    with pytest.raises(DataError, match=r"task.weights = '.*whole.safetensors': there is no file"):
        Run.resume(home / "run")


def test_where_the_file_lies_is_nothing_to_agree_on_but_that_there_is_one_is(home: Path) -> None:
    shutil.copy(home / "whole.safetensors", home / "elsewhere.safetensors")
    config = load(home / "config.toml")
    moved = load(home / "config.toml", [f"task.weights={home / 'elsewhere.safetensors'}"])
    assert agreed(config) == agreed(moved) and agreed(config)["task"]["weights"] == "w0.safetensors"
    assert "weights" not in agreed(Config())["task"]  # a header without it is as it always was
    start(home).simulation.close()
    kept = home / "run/config.toml"
    kept.write_text(kept.read_text().replace("../whole.safetensors", ""))
    with pytest.raises(LedgerError, match=r"differs in .*task.weights \(now None, on record 'w0.safetensors'\)"):
        Run.resume(home / "run")


def test_a_config_that_is_repaired_starts_from_the_weights_in_the_folder(home: Path) -> None:
    start(home).simulation.close()
    (home / "run/config.toml").unlink()
    for finding in examine(home / "run").remedies:
        assert finding.apply is not None
        finding.apply()
    assert load(home / "run/config.toml").task.weights == str(home / "run/w0.safetensors")


def test_who_joins_without_the_weights_is_told_to_pass_them_and_with_them_takes_part(home: Path) -> None:
    start(home).simulation.close()
    header = header_of(home / "run")
    options = {"address": "", "credentials": None, "number": 0, "task": f"{home / 'my_task.py'}:Pictures"}
    with pytest.raises(ModelError, match=r"buffers differ .*in a file \(task.weights\): .*--weights FILE"):
        make_participant(header, JoinOptions(**options))
    with pytest.raises(ModelError, match=r"buffers differ .*--weights FILE"):
        make_participant(header, JoinOptions(**options, weights=home / "trained.safetensors"))
    joined = make_participant(header, JoinOptions(**options, weights=home / "whole.safetensors"))
    assert joined.client.parameters.digest() == header.weights_digest
    write_config(home, "trained.safetensors")
    start(home, "other").simulation.close()
    with pytest.raises(ModelError, match=r"trainable weights differ .*--weights FILE"):
        make_participant(header_of(home / "other"), JoinOptions(**options))


@pytest.mark.slow
def test_a_served_run_starts_from_the_weights_that_its_participants_pass(home: Path) -> None:
    pytest.importorskip("grpc", reason="a deployment needs the extra 'deploy'")
    config = home / "config.toml"
    text = config.read_text().replace("clients = 5\nbyzantine = 1", "clients = 2\nbyzantine = 0")
    config.write_text(f"{text}[serve]\nquorum = 2\n")  # the run must not end before the slower client has joined
    own = ["--task", f"{home / 'my_task.py'}:Pictures"]
    with many_processes(home) as start_process:
        server = start_process("serve", "serve", config, "--listen", "127.0.0.1:0", "--insecure", "--out", home / "out")
        address = f"127.0.0.1:{server.await_event('listening')['port']}"
        command = [sys.executable, "-m", "cyber0", "join", address, "--insecure", "--client", "0", *own]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and "--weights FILE of join and follow" in refused.stderr
        own += ["--weights", str(home / "whole.safetensors")]
        follower = start_process("follow", "follow", address, "--insecure", "--out", home / "f", *own)
        server.await_event("joined")  # nor before the follower has
        clients = [start_process(f"client-{i}", "join", address, "--insecure", "--client", i, *own) for i in range(2)]
        digests = {process.output().strip().rpartition(" ")[2] for process in (*clients, follower)}
        server.output()
    shutil.copy(home / "whole.safetensors", home / "out/w0.safetensors")
    assert {rebuild(home / "out")[1].digest()} == digests


def test_a_federators_folder_without_the_weights_says_which_file_belongs_there(home: Path) -> None:
    start(home).run()
    (home / "run/w0.safetensors").unlink()
    with pytest.raises(DataError, match=r"the run started from the weights of a file \(task.weights\); copy that file"):
        rebuild(home / "run", task=f"{home / 'my_task.py'}:Pictures")
    shutil.copy(home / "whole.safetensors", home / "run/w0.safetensors")
    assert rebuild(home / "run")[1].digest() == summary_of(home / "run")["model_digest"]


def write(home: Path, change: Any) -> None:
    tensors = load_file(home / "whole.safetensors")
    change(tensors)
    save_file(tensors, home / "whole.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda home: (home / "whole.safetensors").unlink(), "whole.safetensors': there is no file"),
        (lambda home: (home / "whole.safetensors").write_bytes(b"PK\3\4 torch"), "can't be read as safetensors"),
        (lambda home: (home / "whole.safetensors").write_bytes(b""), "save_file(model.state_dict(), FILE)"),
        (lambda home: write_config(home, "."), "is a folder; name a file in it, such as model.safetensors"),
        (lambda home: write(home, lambda t: t.pop("0.bias")), "the file lacks '0.bias'; give the whole state dict"),
        (lambda home: write(home, lambda t: t.pop("1.running_var")), "the file lacks '1.running_var'"),
        (lambda home: write(home, lambda t: t.update({"7.weight": torch.zeros(2)})),
         "the file has '7.weight', which the model does not have"),
        (lambda home: write(home, lambda t: t.update({"0.bias": torch.zeros(9)})),
         "'0.bias' has shape (9,) in the file and (4,) in the model"),
        (lambda home: write(home, lambda t: t.update({"0.bias": torch.zeros(4, dtype=torch.float16)})),
         "'0.bias' is float16 in the file and float32 in the model; set task.dtype"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_in_one_line_and_nothing_is_written(
    change: Any, message: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(home)
    before = sorted(path.name for path in home.iterdir())
    monkeypatch.chdir(home)
    with pytest.raises(Cyber0Error) as refused:
        cli.app(["run", "config.toml", "--out", "run"], standalone_mode=False)
    assert message in str(refused.value) and "task.weights = " in str(refused.value)
    assert "\n" not in str(refused.value)
    shutil.rmtree(home / "__pycache__", ignore_errors=True)
    assert sorted(path.name for path in home.iterdir()) == before


def test_a_tied_weight_needs_to_be_there_once_and_must_not_contradict_itself(tmp_path: Path) -> None:
    given, model, path = Tied(), Tied(), tmp_path / "tied.safetensors"
    once = {name: t for name, t in given.state_dict().items() if name != "second.weight"}
    save_file(once, path)
    load_into(model, path, "the file")
    assert torch.equal(model.second.weight, given.first.weight) and model.second.weight is model.first.weight
    save_file({**once, "second.weight": given.first.weight.detach().clone()}, path)
    load_into(model, path, "the file")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    save_file({**once, "second.weight": torch.zeros(16, 16), "head.bias": torch.ones(4)}, path)
    with pytest.raises(ModelError, match=r"'first.weight' and 'second.weight' are one weight of the model and differ"):
        load_into(model, path, "the file")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_task_given_in_python_takes_weights_too_and_16_bit_ones_in_their_own_type(tmp_path: Path) -> None:
    task = cyber0.Task.of(nn.Linear(3, 2), (torch.eye(3).repeat(20, 1), torch.arange(60) % 2))
    given = nn.Linear(3, 2).to(torch.bfloat16)
    save_file(given.state_dict(), tmp_path / "half.safetensors")
    weights = f"task.weights={tmp_path / 'half.safetensors'}"
    with pytest.raises(ModelError, match="is bfloat16 in the file and float32 in the model"):
        Simulation(Config().with_overrides([weights]), task=task)
    started = Simulation(Config().with_overrides([weights, "task.dtype=bfloat16"]), task=task)
    assert torch.equal(started.parameters.model.get_parameter("weight"), given.weight)


def test_a_study_knows_its_runs_by_what_is_in_the_file(home: Path) -> None:
    shutil.copy(home / "whole.safetensors", home / "same.safetensors")
    config = load(home / "config.toml")
    moved = load(home / "config.toml", [f"task.weights={home / 'same.safetensors'}"])
    other = load(home / "config.toml", [f"task.weights={home / 'trained.safetensors'}"])
    assert Cell({}, config).digest == Cell({}, moved).digest != Cell({}, other).digest
    grid = '[study.grid]\n"task.weights" = ["whole.safetensors", "trained.safetensors"]\n'
    (home / "study.toml").write_text(f'{SETTINGS}[task]\nname = "my_task.py:Pictures"\n[study]\nname = "s"\n{grid}')
    plan = read_plan(home / "study.toml")
    assert [cell.config.task.weights for cell in plan.cells] == [
        str(home / "whole.safetensors"), str(home / "trained.safetensors")
    ]  # fmt: skip


def test_a_config_with_weights_is_written_and_read_back(tmp_path: Path) -> None:
    config = Config().with_overrides([f"task.weights={tmp_path / 'w.safetensors'}"])
    (tmp_path / "config.toml").write_text(to_toml(config, tmp_path))
    assert 'weights = "w.safetensors"' in (tmp_path / "config.toml").read_text()
    assert load(tmp_path / "config.toml") == config
