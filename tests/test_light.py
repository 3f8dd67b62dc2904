"""Light where it can be: what must not load torch does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import make_folder

HEAVY = ("torch", "numba", "llvmlite", "triton", "transformers", "flwr", "grpc", "matplotlib", "safetensors")


def loaded_by(code: str, cwd: Path) -> list[str]:
    """Return which heavy packages a fresh interpreter has loaded after running the code."""
    tail = f"\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, cwd=cwd, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


CLI = """
import sys
from cyber0.cli import main as cli
sys.argv = ["cyber0", *{arguments!r}]
try:
    cli.main()
except SystemExit as stop:
    assert stop.code == {code}, stop.code
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    ["import cyber0; cyber0.__version__; dir(cyber0)", "import cyber0.cli.main", "import cyber0; cyber0.Config()",
     "import cyber0; assert callable(cyber0.run)", "import cyber0.runs.callbacks",
     "import cyber0.theory.theorems, cyber0.reproduce, cyber0.report.advice",
     "import cyber0.tasks, cyber0.directions, cyber0.config.choices, cyber0.config.schedules",
     "import cyber0.study, cyber0.runs.repair", "import cyber0.diagnose.source, cyber0.diagnose.verdict"],
)  # fmt: skip
def test_importing_loads_nothing_heavy(code: str, tmp_path: Path) -> None:
    assert loaded_by(code, tmp_path) == []


def test_importing_cyber0_does_not_even_load_numpy(tmp_path: Path) -> None:
    assert loaded_by("import sys, cyber0, cyber0.cli.main; assert 'numpy' not in sys.modules", tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--version"], 0), (["list"], 0), (["run", "--help"], 0), (["verify", "--help"], 0),
     (["run", "--set", "method.q=1"], 2), (["run", "--set", "aggregation.beta=0.5"], 2), (["run", "missing.toml"], 2),
     (["report", "--help"], 0), (["report", "nowhere"], 2), (["run", "--watch", "--watch-port", "-1"], 2),
     (["serve", "--help"], 0), (["join", "--help"], 0), (["follow", "--help"], 0), (["certs", "--help"], 0),
     (["join", "localhost:1"], 2), (["serve", "c.toml", "--listen", "0.0.0.0:1", "--out", "o"], 2),
     (["run", "--device", "tpu"], 2), (["init", "missing.toml", "--out", "h"], 2), (["data", "minst"], 2),
     (["study", "--help"], 0), (["study", "missing.toml"], 2), (["repair", "nowhere"], 2),
     (["theory", "--help"], 0), (["theory", "--d", "100"], 0), (["theory", "--d", "0"], 2),
     (["diagnose", "--help"], 0), (["diagnose", "missing.toml"], 2),
     (["evaluate", "--help"], 0), (["predict", "--help"], 0), (["demo", "--help"], 0), (["demo", "--port", "-1"], 2),
     (["reproduce", "--help"], 0), (["reproduce", "theorem4"], 2), (["data", "ridge"], 2),
     (["run", "--set", "task.name=ridge", "--set", "task.data=x"], 2)],
)  # fmt: skip
def test_help_and_refusals_load_nothing_heavy(arguments: list[str], code: int, tmp_path: Path) -> None:
    assert loaded_by(CLI.format(arguments=arguments, code=code), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["{'method': {'q': 1}}", "'missing.toml'", "callbacks=[object()]", "resume=True", "{'device': 'tpu'}"]
)
def test_what_python_asks_for_in_vain_loads_nothing_heavy(arguments: str, tmp_path: Path) -> None:
    code = f"import cyber0\ntry:\n    cyber0.run({arguments})\nexcept ValueError: pass\nelse: 1 / 0"
    assert loaded_by(code, tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_report_is_made_without_anything_heavy(tmp_path: Path) -> None:
    make_folder(tmp_path / "run")
    code = CLI.format(arguments=["report", "run"], code=0) + "\nassert 'numpy' not in sys.modules"
    assert loaded_by(code, tmp_path) == []
    assert (tmp_path / "run/report.html").exists()


def test_a_federator_runs_whole_rounds_and_keeps_its_ledger_without_torch(tmp_path: Path) -> None:
    code = """
import numpy as np
import cyber0
from cyber0 import aggregate, attacks, ledger
from cyber0.protocol import messages as protocol
from cyber0.protocol.federator import Federator
entry = ledger.LayoutEntry("w", (5,), "bfloat16", 0)
header = ledger.Header(seed=1, layout=(entry,), distribution="sphere", k=3, local_epochs=1, mu=1e-3,
                       estimator="two_point", lr=0.1, lr_schedule="constant", projection_radius=None,
                       weights_digest="a" * 64, rest_digest="b" * 64, clients=12)
log = cyber0.Ledger.create("ledger.bin", header)
federator = cyber0.Federator(log, aggregate.make("trimmed_mean", 0.25), 12, lr_at=lambda t: 0.1, participation=0.75)
for _ in range(3):
    announcement = federator.open_round()
    for i in announcement.invited.tolist():
        data = protocol.encode_report(protocol.Report(i, announcement.round, np.ones(3, np.float32)))
        federator.receive(protocol.decode_report(data, i, 3))
    decision = federator.decide(deadline=True)
    protocol.decode_decision(protocol.encode_decision(decision), 3)
log.close()
assert len(cyber0.Ledger.open("ledger.bin")) == 3
ledger.trim_counts(cyber0.Ledger.open("ledger.bin"))
cyber0.directions.reference(0, 0, 0, 0, 5, "sphere", dimension=5)
attacks.make("full_knowledge")(attacks.Knowledge(np.ones((3, 2)), np.ones((0, 2)), 1, 4, 1, 0))
"""
    assert loaded_by(code, tmp_path) == []


def test_every_public_name_can_be_had_and_others_are_named_in_the_error() -> None:
    import cyber0

    for name in [*cyber0.__all__, *cyber0._ROOMS]:
        assert getattr(cyber0, name) is not None
        assert name in dir(cyber0)
    with pytest.raises(AttributeError, match="no attribute 'Simulaton'"):
        cyber0.Simulaton  # noqa: B018
