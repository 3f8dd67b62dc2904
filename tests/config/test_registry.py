"""What a change touches: a rule, an attack or a codec inside the package is one file, a schedule one function."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cyber0
from cyber0.config import choices, load
from cyber0.config.registry import SCHEDULES
from cyber0.config.schedules import learning_rate
from cyber0.protocol import codec

RULE = '''
"""One rule more."""
from cyber0.aggregate.columns import median
from cyber0.config.registry import rule

@rule(pairwise=True)
def half_median(*, factor: float = 0.5, beta: float = 0.25):
    """Take the median times a factor."""
    return lambda matrix: factor * median(beta)(matrix)
'''
ATTACK = '''
"""One attack more."""
from cyber0.attacks.knowledge import from_honest
from cyber0.config.registry import attack

@attack(strength="by", needs_own=False)
def shift(by: float = 3.0):
    """Send the honest mean plus a constant."""
    return from_honest(lambda honest, known: honest.mean(axis=0) + by)
'''
USE = """
import cyber0
from cyber0.config import load
from cyber0.config.keys import describe
config = load(overrides=["task.name=ridge", "rounds=2", "method.k=2", "aggregation.rule=half_median",
                         "aggregation.options.factor=0.25", "federation.attack=shift", "federation.attack_strength=2"])
assert config.federation.attack_arguments == {"by": 2.0}
simulation = cyber0.Simulation(config)
simulation.run_round()
choices = {key.name: key.choices for key in describe()}
print(choices["aggregation.rule"]["half_median"], choices["federation.attack"]["shift"])
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one file more in aggregate and one in attacks."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(cyber0.__file__).parent, place / "cyber0", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "cyber0/aggregate/extra.py").write_text(RULE)
    (place / "cyber0/attacks/extra.py").write_text(ATTACK)
    return place


@pytest.mark.slow
def test_a_rule_and_an_attack_are_one_new_file_each(extended: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(extended)}
    done = subprocess.run([sys.executable, "-c", USE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Take the median times a factor. Send the honest mean plus a constant."


def test_a_schedule_with_a_parameter_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES._known()))

    @cyber0.schedule
    def stairs(*, every: int = 10, factor: float = 0.5):  # type: ignore[no-untyped-def]
        """Multiply lr by a factor every so many rounds."""
        return lambda t, rounds: factor ** (t // every)

    config = load(overrides=["method.lr_schedule=stairs", "method.lr_options.every=2"])
    rates = learning_rate(1.0, config.method.lr_schedule, 6, config.method.lr_options)
    assert [rates(t) for t in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    with pytest.raises(cyber0.Cyber0Error, match=r"method\.lr_options\.evry = 2: .* did you mean 'every'"):
        load(overrides=["method.lr_schedule=stairs", "method.lr_options.evry=2"])


def test_a_codec_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(choices.CODECS) == ["float32", "bfloat16", "log8"]
    plain = codec.CODECS["float32"]
    monkeypatch.setitem(codec.CODECS, "mine", codec.Codec("mine", "as they are", 4, plain.encode, plain.decode))
    assert choices.CODECS["mine"] == "as they are"
    assert load(overrides=["serve.codec=mine"]).serve.codec == "mine"
