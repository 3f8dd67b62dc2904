"""One builder: simulations, participants and federators are assembled in one place, which loads torch where it must."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cyber0
from cyber0.config import Config, load
from cyber0.errors import ConfigError
from cyber0.federation import build, population
from cyber0.ledger import Ledger

PACKAGE = Path(cyber0.__file__).parent
SMALL = ["task.name=ridge", "federation.clients=5", "federation.byzantine=1", "method.k=3", "rounds=6"]


def calls_in(source: Path) -> set[str]:
    """Return the names that a file calls as they stand, without a module before them."""
    calls = [node.func for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name)}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["Samples", "Evaluator", "Client", "Federator"])
def test_what_takes_part_in_a_round_is_assembled_in_one_file(part: str) -> None:
    assemblers = [str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if part in calls_in(file)]
    assert assemblers == [str(Path("federation") / "build.py")]


@pytest.mark.slow
def test_a_federator_is_built_without_torch() -> None:
    code = (
        "import sys; from cyber0.config import load; from cyber0.federation import build\n"
        "build.resolve(load(), served=True); build.make_rule(load())\n"
        "print([m for m in ('torch', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_builders_federator_follows_the_config() -> None:
    config = load(overrides=[*SMALL, "method.lr=0.5", "method.lr_schedule=linear", "serve.quorum=3"])
    simulation = cyber0.Simulation(config)
    federator = build.make_federator(Ledger.create(None, simulation.ledger.header), config)
    assert (federator.invited_count, federator.rule.name, federator.scalars) == (5, "trimmed_mean", 3)
    assert [build.learning_rates(config)(t) for t in (0, 3, 6)] == [0.5, 0.25, 0.0]


def test_a_population_is_the_task_its_shares_and_the_byzantine_clients() -> None:
    config = load(overrides=[*SMALL, "federation.partition=iid"])
    simulation = cyber0.Simulation(config)
    again = population.populate(simulation.task, config)
    assert again.byzantine.sum() == 1 and np.array_equal(again.byzantine, simulation.byzantine)
    assert sorted(np.concatenate(again.shares).tolist()) == list(range(len(simulation.task.labels)))


def test_what_a_config_names_is_resolved_before_anything_is_made(tmp_path: Path) -> None:
    rule = tmp_path / "mine.py"
    rule.write_text("def wrong():\n    return lambda matrix: matrix\n")
    config = Config().with_overrides([f"aggregation.rule={rule}:wrong"])
    with pytest.raises(ConfigError, match="must return 3 numbers, one for each column"):
        build.resolve(config)
