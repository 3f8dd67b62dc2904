"""Rules, attacks, partitions and schedules of the user's own: by a path in a config, and by a decorator in Python."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from processes import many_processes
from synthetic import one_thread  # noqa: F401

import cyber0
from cyber0 import aggregate, attacks
from cyber0.config import doors
from cyber0.config.files import load, to_toml
from cyber0.config.paths import agreed
from cyber0.config.registry import ATTACKS, PARTITIONS, RULES, SCHEDULES
from cyber0.config.schedules import learning_rate
from cyber0.config.schema import Config, FederationConfig, to_dict
from cyber0.errors import ConfigError, DataError
from cyber0.federation import build
from cyber0.ledger import Ledger
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run
from cyber0.serve import join, server
from cyber0.study import Study, identity, read_plan
from cyber0.tasks import partition

EXAMPLE = Path(__file__).parents[2] / "examples/own_rule.py"
OWN = '''
import numpy as np

def shortened(*, tau: float = 1.0, times=1):
    """Shorten each report to tau."""
    def rule(matrix):
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        return times * (matrix * np.minimum(1.0, tau / lengths)).mean(axis=0)
    return rule

def shift(by=1.0):
    return lambda known: np.tile(known.honest.mean(axis=0) - by, (known.byzantine, 1)) + 0 * known.own

def halves(*, first: int = 1):
    """Give the first client so many samples, and deal the rest."""
    def deal(labels, clients, seed):
        rest = np.arange(first, len(labels))
        return [np.arange(first), *np.array_split(rest, clients - 1)]
    return deal

def warmup(*, rounds: int):
    return lambda t, total: min(1.0, (t + 1) / rounds)

flat = lambda: lambda matrix: matrix
number = lambda: 3
no_factory = lambda matrix: matrix.mean(0)
nowhere = lambda: lambda matrix: np.nan * matrix[0]
few = lambda: lambda known: known.honest[:1]
crash = lambda: lambda known: 1 / 0
twice = lambda: lambda labels, clients, seed: [np.arange(len(labels))] * clients
some = lambda: lambda labels, clients, seed: [[client] for client in range(clients)]
nobody = lambda: lambda labels, clients, seed: [[]] * clients
one_less = lambda: lambda labels, clients, seed: np.array_split(np.arange(len(labels)), clients - 1)
beyond = lambda: lambda labels, clients, seed: np.array_split(1 + np.arange(len(labels)), clients)
falling = lambda: lambda t, total: -1.0
constant = 1.0
'''
SMALL = ["task.name=ridge", "rounds=4", "evaluate_every=2", "method.k=4", "federation.clients=8",
         "federation.byzantine=2"]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a file of the user's in `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a process has one working directory, tests have many
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(OWN)
    return tmp_path


@pytest.fixture
def command(here: Path, command: Command) -> Command:
    """The command, run in the folder to work in."""
    return command


@pytest.fixture
def registries() -> Iterator[None]:
    """Forget what a test registers."""
    before = [(registry, dict(registry._known())) for registry in (RULES, ATTACKS, PARTITIONS, SCHEDULES)]
    yield
    for registry, entries in before:
        registry._entries.clear()
        registry._entries.update(entries)


def small(*overrides: str) -> Config:
    return load(overrides=[*SMALL, *overrides])


# Registries and options.


@pytest.mark.usefixtures("registries")
def test_what_is_registered_in_python_is_run_and_listed_by_its_name(command: Command) -> None:
    @cyber0.rule
    def first_report(*, times: float = 1.0) -> Any:
        """Take the first report, times a number."""
        return lambda matrix: times * matrix[0]

    assert aggregate.make("first_report", 0.1, options={"times": 2.0})(np.eye(3)).tolist() == [2, 0, 0]
    simulation = cyber0.Simulation(small("aggregation.rule=first_report", "aggregation.options.times=0.5"))
    simulation.run_round()
    assert simulation.federator.rule.name == "first_report"
    text = " ".join(command("list").out.replace("│", " ").split())
    assert "first_report: Take the first report, times a number. Options: times: float = 1.0." in text
    with pytest.raises(ConfigError, match=r"'first_repor' is not a choice; did you mean 'first_report'"):
        small("aggregation.rule=first_repor")


@pytest.mark.usefixtures("registries")
def test_a_built_in_name_can_not_be_taken_and_only_known_traits_can_be_declared() -> None:
    def gaussian() -> Any:
        return None

    with pytest.raises(ConfigError, match=r"'gaussian' is the name of a built-in attack; .*name=\"my_gaussian\""):
        cyber0.attack(gaussian)
    with pytest.raises(ConfigError, match=r"has no trait 'need_own'; did you mean 'needs_own'"):
        cyber0.attack(name="noise", need_own=True)(gaussian)
    assert cyber0.attack(name="noise", needs_own=False)(gaussian) is gaussian
    assert not ATTACKS.entry("noise").traits["needs_own"] and ATTACKS.entry("gaussian").factory is attacks.gaussian


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["federation.attack=gaussian", "federation.attack_options.scal=2.0"],
         ["federation.attack_options.scal = 2.0", "gaussian", "did you mean 'scale'"]),
        (["federation.attack=gaussian", "federation.attack_options.scale=loud"],
         ["federation.attack_options.scale = 'loud'", "scale: float = 200.0"]),
        (["federation.attack=mimic", "federation.attack_options.far=1"], ["attack_options.far = 1", "takes none"]),
        (["aggregation.rule=geometric_median", "aggregation.options.iterations=1.5"],
         ["aggregation.options.iterations = 1.5", "int | None"]),
        (["aggregation.options.beta=0.1"], ["aggregation.options.beta", "trimmed_mean"]),
        (["aggregation.rule=geometric_median", "aggregation.options.iterations=0"],
         ["aggregation.rule = 'geometric_median'", "iterations = 0"]),
        (["federation.partition=dirichlet", "federation.partition_options.alpha=0"], ["alpha = 0", "1e-6"]),
        (["method.lr_options.speed=1"], ["method.lr_options.speed = 1", "constant takes no such option"]),
        (["federation.attack=mine/own.py:shift", "federation.attack_strength=2"],
         ["takes no strength", "federation.attack_strength = 2.0"]),
    ],
)  # fmt: skip
def test_options_that_a_factory_does_not_take_are_refused_by_name(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(overrides=overrides)
    assert "\n" not in str(refused.value) and all(word in str(refused.value) for word in words), refused.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["federation.attack=gaussian", "federation.attack_strength=3.0"], ["federation.attack=gaussian",
                                                                          "federation.attack_options.scale=3.0"]),
        (["federation.attack_reading=literal"], ["federation.attack_options.reading=literal"]),
        (["federation.attack=fang_krum", "federation.attack_sign=truth"],
         ["federation.attack=fang_krum", "federation.attack_options.sign_from=truth"]),
        (["federation.partition=gamma", "federation.similarity=0.3"],
         ["federation.partition=gamma", "federation.partition_options.similarity=0.3"]),
        (["federation.partition=shards", "federation.shards=3"],
         ["federation.partition=shards", "federation.partition_options.per_client=3"]),
        (["federation.partition=dirichlet", "federation.alpha=5.0"],
         ["federation.partition=dirichlet", "federation.partition_options.alpha=5.0"]),
    ],
)  # fmt: skip
def test_an_old_key_and_the_option_that_it_stands_for_give_the_same_run(old: list[str], new: list[str]) -> None:
    chains = []
    for overrides in (old, new, old[:-1]):
        simulation = cyber0.Simulation(small(*overrides))
        for _ in range(2):
            simulation.run_round()
        chains.append(simulation.parameters.digest())
    assert chains[0] == chains[1] != chains[2]
    load(overrides=[*SMALL, *old, new[-1]])  # saying the same twice is no contradiction


def test_an_alias_that_contradicts_its_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"federation.alpha = 0.1 is an alias of .*partition_options.alpha.* 0.2"):
        FederationConfig(partition="dirichlet", alpha=0.1, partition_options={"alpha": 0.2})
    assert FederationConfig(partition="iid", alpha=0.1).partition_arguments == {}  # as ever, it says nothing there


def test_empty_options_leave_no_trace_and_set_ones_survive_a_file(tmp_path: Path) -> None:
    assert "options" not in json.dumps(to_dict(Config()))
    config = load(overrides=["federation.attack=alie", "federation.attack_options={z = 2.0}"])
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load(tmp_path / "c.toml") == config and config.federation.attack_options == {"z": 2.0}


def test_a_schedule_takes_the_round_and_the_number_of_rounds(here: Path) -> None:
    assert [learning_rate(0.5, "linear", 4)(t) for t in range(5)] == [0.5, 0.375, 0.25, 0.125, 0.0]
    lr_at = learning_rate(0.5, "mine/own.py:warmup", 9, {"rounds": 4})
    assert [lr_at(t) for t in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]
    with pytest.raises(ConfigError, match=r"method.lr_options.rounds is missing: own.py:warmup takes rounds: int"):
        learning_rate(0.5, "mine/own.py:warmup", 9)
    with pytest.raises(ConfigError, match=r"own.py:falling' gives -1.0 in round 0 of 4"):
        build.resolve(small("method.lr_schedule=mine/own.py:falling"))


# What can be wrong with a path.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("aggregation.rule=nowhere.py:f", ["aggregation.rule = 'nowhere.py:f'", "there is no file", "relative to"]),
        ("aggregation.rule=no_such_package.rules:f", ["there is no module no_such_package", "file.py:name"]),
        ("aggregation.rule=mine/own.py:shortend", ["mine/own.py has no 'shortend'", "did you mean 'shortened'"]),
        ("aggregation.rule=mine/own.py:constant", ["is float, not a function"]),
        ("aggregation.rule=mine/own.py:", ["must be file.py:name"]),
        ("aggregation.before=mine/own.py:shortened",
         ["aggregation.before = 'mine/own.py:shortened'", "can't be the path of your own code", "nnm, bucketing"]),
        ("aggregation.rule=mine/broken.py:f",
         ["mine/broken.py can't be imported", "ZeroDivisionError", "(broken.py, line 2)"]),
        ("aggregation.rule=mine/typo.py:f", ["can't be imported: SyntaxError"]),
        ("aggregation.rule=mine/own.py:flat", ["own.py:flat", "shape (8, 3)", "it must return 3 numbers"]),
        ("aggregation.rule=mine/own.py:number", ["own.py:number", "returns int", "must return a function"]),
        ("aggregation.rule=mine/own.py:no_factory",
         ["'own.py:no_factory' must be a factory that returns the rule, and it takes matrix"]),
        ("federation.attack=mine/own.py:few", ["own.py:few", "shape (1, 3)", "shape (2, 3)"]),
        ("federation.attack=mine/own.py:crash", ["own.py:crash", "ZeroDivisionError", "(own.py, line "]),
        ("federation.attack=mine/own.py:number", ["own.py:number", "returns int"]),
        ("federation.partition=mine/own.py:twice", ["own.py:twice", "sample 0 8 times", "exactly once"]),
        ("federation.partition=mine/own.py:some", ["own.py:some", "sample 8 0 times"]),
        ("federation.partition=mine/own.py:nobody", ["own.py:nobody", "client 0", "at least 1 sample"]),
        ("federation.partition=mine/own.py:one_less", ["own.py:one_less", "7 arrays for 8 clients"]),
        ("federation.partition=mine/own.py:beyond", ["own.py:beyond", "but the samples are 0 to"]),
        ("method.lr_schedule=mine/own.py:number", ["own.py:number", "returns int"]),
        ("aggregation.rule=mine/own.py:shortened --set aggregation.options.tua=1.0",
         ["aggregation.options.tua = 1.0", "own.py:shortened", "did you mean 'tau'"]),
        ("aggregation.rule=mine/own.py:shortened --set aggregation.options.tau=high",
         ["aggregation.options.tau = 'high'", "own.py:shortened takes tau: float = 1.0"]),
    ],
)  # fmt: skip
def test_a_path_that_can_not_work_is_one_line_before_anything_is_written(
    setting: str, words: list[str], command: Command, here: Path
) -> None:
    (here / "mine/broken.py").write_text("f = 1\nf / 0\n")
    (here / "mine/typo.py").write_text("def f(:\n")
    small = [part for override in SMALL for part in ("--set", override)]
    answer = command("run", *small, "--set", *setting.split(), "--out", "run")
    assert answer.code == 2 and answer.err.startswith("error: ") and answer.err.count("\n") == 1, answer
    assert all(word in answer.err for word in words), answer.err
    assert not (here / "run").exists()


def test_a_file_is_loaded_once_and_again_when_it_has_changed(here: Path) -> None:
    file = here / "mine/own.py"
    first = doors.load(f"{file}:shortened", "x")
    assert doors.load("mine/own.py:shortened", "x") is first
    file.write_text(OWN.replace("3", "4321"))
    assert doors.load(f"{file}:number", "x")() == 4321
    (here / "mine/of_a_neighbour.py").write_text("number = 5\n")
    (here / "mine/neighbour.py").write_text("from of_a_neighbour import number\n")
    assert doors.load("mine/neighbour.py:number", "x") == 5


# The life of a run.


def write_config(here: Path, *overrides: str) -> Path:
    own = "mine/own.py"
    config = small(f"aggregation.rule={own}:shortened", "aggregation.options.tau=0.5", f"federation.attack={own}:shift",
                   f"federation.partition={own}:halves", "federation.partition_options.first=3",
                   f"method.lr_schedule={own}:warmup", "method.lr_options.rounds=2", *overrides)  # fmt: skip
    (here / "mine/c.toml").write_text(to_toml(config, here / "mine"))
    return here / "mine/c.toml"


@pytest.mark.slow
def test_a_run_of_ones_own_code_is_resumed_verified_replayed_and_reported(command: Command, here: Path) -> None:
    config = write_config(here, "serve.keep_reports=true")
    assert command("run", config, "--out", "runs/a", "--quiet") == (0, "", "")
    whole = json.loads((here / "runs/a/summary.json").read_text())
    text = (here / "runs/a/config.toml").read_text()
    assert 'rule = "../../mine/own.py:shortened"' in text and 'attack = "../../mine/own.py:shift"' in text
    sources = json.loads((here / "runs/a/sources.json").read_text())
    assert set(sources) == {"aggregation.rule", "federation.attack", "federation.partition", "method.lr_schedule"}
    assert sources["aggregation.rule"] == {
        "path": "../../mine/own.py:shortened", "sha256": doors.sha256("mine/own.py:shortened")
    }  # fmt: skip

    header = Ledger.open(here / "runs/a/ledger.bin").header
    assert header.config["aggregation"]["rule"] == header.config["federation"]["attack"].replace("shift", "shortened")
    assert (header.lr_schedule, header.config["aggregation"]["rule"]) == ("own.py:warmup", "own.py:shortened")
    assert (here / "runs/a/partition.csv").read_text().splitlines()[1].split(",")[2] == "3"

    # Cut off after two rounds and resumed, it ends as it did.
    run = Run.start(load(config), here / "runs/b")
    for _ in range(2):
        run.simulation.run_round()
    run.simulation.close()
    assert command("run", "--resume", "runs/b", "--quiet") == (0, "", "")
    assert json.loads((here / "runs/b/summary.json").read_text())["model_digest"] == whole["model_digest"]

    # Nobody who verifies, replays or reports needs the code.
    shutil.move(here / "mine", here / "gone")
    assert "all is well" in command("verify", "runs/a").out
    assert whole["model_digest"] in command("replay", "runs/a", "--out", "w.safetensors").out
    assert command("report", "runs/a").code == 0
    answer = command("verify", "runs/a", "--decisions")
    assert answer.code == 2 and "'own.py:shortened'" in answer.err and "--rule FILE.py:NAME" in answer.err
    answer = command("verify", "runs/a", "--decisions", "--rule", "gone/own.py:shortened")
    assert answer.code == 0 and "4 rounds decided again" in answer.out
    answer = command("run", "--resume", "runs/a")
    assert answer.code == 2 and "there is no file" in answer.err


@pytest.mark.slow
def test_a_file_that_changed_since_the_run_began_is_said_when_it_is_resumed(command: Command, here: Path) -> None:
    run = Run.start(load(write_config(here)), here / "run")
    run.simulation.close()
    (here / "mine/own.py").write_text(OWN + "\n# changed\n")
    with pytest.warns(RuntimeWarning, match=r"^own.py \(aggregation.rule, federation.*\) has changed since") as said:
        assert command("run", "--resume", "run", "--quiet").code == 0
    assert len([one for one in said if "has changed" in str(one.message)]) == 1


@pytest.mark.slow
def test_a_folder_whose_files_moved_with_it_is_resumed(command: Command, here: Path) -> None:
    run = Run.start(load(write_config(here)), here / "mine/run")
    run.simulation.close()
    shutil.move(here / "mine", here / "moved")
    assert command("run", "--resume", "moved/run", "--quiet") == (0, "", "")


def test_rows_that_are_not_finite_never_reach_a_rule_of_ones_own() -> None:
    rule = aggregate.make(f"{EXAMPLE}:clipped", 0.25, options={"tau": 1.0})
    rows = np.array([[1.0, 0.0], [0.0, 2.0], [np.nan, 1.0], [3.0, 3.0]])
    assert np.array_equal(rule(rows), rule(rows[[0, 1, 3]], invited=4))
    with pytest.raises(aggregate.AggregationError, match=r"own_rule.py:clipped has 2 usable rows of 4"):
        rule(rows[[0, 2, 3]], invited=4)


@pytest.mark.slow
def test_the_example_bears_its_own_attack_better_than_a_mean_does() -> None:
    def loss(*overrides: str) -> float:
        simulation = cyber0.Simulation(load(overrides=["task.name=ridge", "rounds=40", "method.lr=0.05", *overrides]))
        for _ in range(40):
            simulation.run_round()
        return simulation.evaluate().loss

    attack = (f"federation.attack={EXAMPLE}:shift", "federation.attack_options.by=20.0")
    clipped = (f"aggregation.rule={EXAMPLE}:clipped", "aggregation.options.tau=1.0")
    assert loss(*clipped, *attack) < loss("aggregation.rule=mean", *attack)


# Studies and deployments.


@pytest.mark.slow
def test_a_study_varies_rules_of_ones_own_and_their_options(here: Path) -> None:
    (here / "mine/s.toml").write_text(f"""
rounds = 2
task.name = "ridge"
federation.attack = "own.py:shift"
federation.partition = "own.py:halves"
federation.partition_options.first = 3
[study.grid]
defence = [
    {{ label = "gentle", aggregation.rule = "own.py:shortened", aggregation.options.tau = 5.0 }},
    {{ label = "strict", aggregation.rule = "{EXAMPLE}:clipped", aggregation.options = {{ tau = 0.5 }} }},
]
""")
    plan = read_plan("mine/s.toml")
    results = Study(plan.cells, here / "out", 1, b"").run()
    assert [result.status for result in results] == ["done", "done"], results
    assert len({result.figures["model_digest"] for result in results}) == 2
    shares = [(here / "out" / str(r.folder) / "partition.csv").read_text().splitlines()[1] for r in results]
    assert [share.split(",")[2] for share in shares] == ["3", "3"]
    again = Study(read_plan("mine/s.toml").cells, here / "out", 1, b"")
    assert again.finished() == 2
    before = identity.digest(plan.cells[0].config)
    (here / "mine/own.py").write_text(OWN + "\n# changed\n")
    assert identity.digest(plan.cells[0].config) != before


def test_an_option_is_an_axis_of_a_study(here: Path) -> None:
    (here / "mine/s.toml").write_text("""
aggregation.rule = "own.py:shortened"
aggregation.options.times = 2
[study.grid]
aggregation.options.tau = [1.0, 3.0]
federation.attack_options.reading = ["accepted", "literal"]
[study]
skip = [{ "aggregation.options.tau" = 1.0, "federation.attack_options.reading" = "literal" }]
""")
    plan = read_plan("mine/s.toml")
    assert [cell.config.aggregation.options for cell in plan.cells] == [
        {"times": 2, "tau": 1.0}, {"times": 2, "tau": 3.0}, {"times": 2, "tau": 3.0}
    ]  # fmt: skip
    assert [cell.config.federation.attack_options["reading"] for cell in plan.cells] == ["accepted"] * 2 + ["literal"]


def test_a_study_whose_rule_can_not_be_imported_is_refused_before_it_runs(here: Path) -> None:
    (here / "mine/s.toml").write_text('[study.grid]\naggregation.rule = ["mean", "own.py:shortend"]\n')
    with pytest.raises(ConfigError, match=r"own.py:shortend.*did you mean 'shortened'"):
        read_plan("mine/s.toml")


TASK = """
import torch, cyber0

class Centre(cyber0.Task):
    "The centre of some points, which have no targets."
    def __init__(self, data: str = ""): self.data = data
    def model(self): return torch.nn.Linear(1, 3, bias=False)
    def outputs(self, model, inputs): return inputs - model.weight[:, 0]
    def losses(self, outputs, targets): return outputs.square().sum(1)
    def train_data(self): return torch.load(self.data) if self.data else torch.zeros(9, 3)
"""


@pytest.mark.slow
def test_a_federator_serves_its_own_rule_attack_and_partition_and_its_clients_need_none_of_it(here: Path) -> None:
    (here / "mine/task.py").write_text(TASK)
    config = write_config(here, "task.name=mine/task.py:Centre", "federation.clients=2", "federation.byzantine=0",
                          "aggregation.beta=0.0", "serve.quorum=2")  # fmt: skip
    (here / "site").mkdir()
    (here / "site/task.py").write_text(TASK)
    for i in range(2):
        torch.save(torch.full((5 + i, 3), float(i)), here / f"site/{i}.pt")
    with many_processes(here) as start:
        federator = start("serve", "serve", config, "--listen", "127.0.0.1:0", "--insecure", "--out", here / "served")
        port = federator.await_event("listening")["port"]
        clients = [start(f"join-{i}", "join", f"127.0.0.1:{port}", "--insecure", "--client", i, "--task",
                         "site/task.py:Centre", "--data", f"site/{i}.pt") for i in range(2)]  # fmt: skip
        for process in (*clients, federator):
            process.output()
        assert [process.events("joining")[0]["samples"] for process in clients] == [5, 6]
    ledger, parameters = rebuild(here / "served", task="site/task.py:Centre")
    assert len(ledger) == 4 and all(record.values is not None for record in ledger)
    simulation = cyber0.Simulation(load(here / "served/config.toml"))
    assert agreed(simulation.config) == ledger.header.config
    assert [record.lr for record in ledger] == [0.005, 0.01, 0.01, 0.01]
    assert parameters.digest() != ledger.header.weights_digest


def test_a_header_never_makes_anybody_import_anything(here: Path) -> None:
    trap = "import pathlib; pathlib.Path('sprung').touch()\n"
    (here / "own.py").write_text(trap + OWN)  # where a header's "own.py" would be found
    simulation = cyber0.Simulation(load(write_config(here)))
    header = simulation.ledger.header
    options = join.JoinOptions("127.0.0.1:1", None, 0)
    with pytest.raises(ConfigError, match=r"federation.partition = 'own.py:halves' is code .*--data DIR"):
        join.make_participant(header, options)
    with pytest.raises(ConfigError, match=r"aggregation.rule = 'own.py:shortened' is code .*own config"):
        server.make_federator(simulation.ledger)
    Ledger.create(here / "header.bin", header).close()
    with pytest.raises(ConfigError, match=r"'own.py:shortened' of the header .*serve the config"):
        server.prepare(here / "header.bin", here / "out", [], resume=False)
    with pytest.warns(RuntimeWarning, match=r"rates are not checked.*'own.py:warmup' is not built in.*--schedule"):
        join.make_participant(header, join.JoinOptions("127.0.0.1:1", None, 0, follows=True))
    assert not (here / "sprung").exists() and not (here / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mine/task.py:Centre", "module_of_header:Centre"])
def test_a_folder_that_was_started_from_a_header_makes_nobody_import_anything(
    command: Command, here: Path, task: str
) -> None:
    (here / "mine/task.py").write_text(TASK)
    (here / "module_of_header.py").write_text(TASK)
    config = here / "mine/c.toml"
    options = [f"task.name={task}", "federation.attack=mine/own.py:shift", "federation.partition=mine/own.py:halves"]
    config.write_text(to_toml(small(*options), here / "mine"))
    assert command("init", config, "--out", "header.bin").code == 0
    sys.modules.pop("module_of_header", None)
    trap = "import pathlib; pathlib.Path('sprung').touch()\n"
    header = Ledger.open(here / "header.bin").header
    server.prepare(here / "header.bin", here / "out", [], resume=False).close()
    for place in (here, here / "out"):  # where the names of the header would be found
        for name in ("task.py", "own.py", "module_of_header.py"):
            (place / name).write_text(trap + TASK + OWN)
    for again in ("header.bin", "out/config.toml"):
        with server.prepare(here / again, here / "out", [], resume=True) as ledger:
            assert agreed(load(here / "out/config.toml")) == ledger.header.config == header.config
    np.save(here / "x.npy", np.zeros((2, 3), np.float32))
    for arguments in (["evaluate", "out"], ["predict", "out", "x.npy"], ["diagnose", "out"], ["run", "--resume", "out"],
                      ["run", "out/config.toml"], ["diagnose", "out/config.toml"],
                      ["init", "out/config.toml", "--out", "again.bin"]):  # fmt: skip
        code, _, said = command(*arguments)
        assert code == 2 and len(said.splitlines()) == 1, (arguments, said)
        assert "name your copy with --" in said or "belongs to a federator" in said, (arguments, said)
    with pytest.raises(ConfigError, match="from a header, which never makes anybody import code"):
        server.prepare(here / "out/config.toml", here / "other", [], resume=False)
    assert not (here / "sprung").exists() and not (here / "other").exists()
    assert command("evaluate", "out", "--task", "mine/task.py:Centre").code == 0


@pytest.mark.slow
def test_a_folder_that_was_begun_with_a_config_keeps_its_paths_when_a_header_resumes_it(here: Path) -> None:
    (here / "mine/task.py").write_text(TASK)
    config = here / "mine/c.toml"
    config.write_text(to_toml(small("task.name=mine/task.py:Centre"), here / "mine"))
    with server.prepare(config, here / "served/out", [], resume=False) as ledger:
        Ledger.create(here / "header.bin", ledger.header).close()
    written = (here / "served/out/config.toml").read_text()
    assert 'name = "../../mine/task.py:Centre"' in written
    server.prepare(here / "header.bin", here / "served/out", [], resume=True).close()
    assert (here / "served/out/config.toml").read_text() == written


def test_what_a_path_names_is_known_by_its_path_alone(here: Path) -> None:
    before = [list(registry) for registry in (RULES, ATTACKS, PARTITIONS, SCHEDULES)]
    build.resolve(load(write_config(here)))
    assert RULES.entry(f"{EXAMPLE}:clipped").text.startswith("Average the reports, each shortened")
    assert (
        not ATTACKS.entry(f"{EXAMPLE}:shift").traits["needs_own"]
        and ATTACKS.entry("mine/own.py:shift").traits["needs_own"]
    )
    assert before == [list(registry) for registry in (RULES, ATTACKS, PARTITIONS, SCHEDULES)]
    with pytest.raises(DataError, match=r"own.py:twice"):
        partition.make("mine/own.py:twice")(np.arange(6), 2, 0)


@pytest.mark.slow
def test_a_rule_that_never_gives_a_finite_decision_is_named(command: Command) -> None:
    small = [part for override in SMALL for part in ("--set", override)]
    answer = command("run", *small, "--set", "aggregation.rule=mine/own.py:nowhere", "--out", "run")
    assert answer.code == 3
    assert "(no report was rejected: aggregation.rule = 'own.py:nowhere' gave no finite decision)" in answer.err
