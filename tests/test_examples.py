"""The examples do what they say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from processes import write_digits
from synthetic import one_thread  # noqa: F401

from cyber0 import Ledger, Simulation
from cyber0.config.files import load
from cyber0.runs.run import Run

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.mnist
def test_the_notebook_goes_from_import_to_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells, in order, in one namespace: what a kernel does, without the need for one."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[str] = []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.append(pyplot.gca().get_title()))
    space: dict[str, Any] = {}
    for number, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"quickstart.ipynb, code cell {number}", "exec"), space)
    pyplot.close("all")
    assert drawn == ["Three of twelve clients are Byzantine", "Who was trimmed how often"]
    assert space["curves"]["trimmed_mean"][-1] > 0.6 > 0.3 > space["curves"]["mean"][-1]
    byzantine = space["robust"].byzantine
    assert space["share"][byzantine].min() > space["share"][~byzantine].max()
    assert space["newcomer"].parameters.digest() == space["robust"].parameters.digest()


def test_the_notebook_is_committed_as_it_ran() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds.count("display_data") == 2 and "error" not in kinds
    assert "/home/" not in NOTEBOOK.read_text() and "/work/" not in NOTEBOOK.read_text()


@pytest.mark.slow
def test_a_network_of_ones_own_learns_pictures_from_idx_files(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "data")
    task = Path(__file__).parents[1] / "examples/own_task.py"
    config = load(None, [f"task.name={task}:Pictures", f"task.options.data={data}", "task.options.width=2", "rounds=60",
                         "method.k=32", "method.lr=0.1", "method.batch_size=8", "federation.clients=8",
                         "federation.byzantine=2", "evaluate_every=20"])  # fmt: skip
    summary = Run.start(config, tmp_path / "run").run()
    assert summary["final_accuracy"] > 0.4 > 0.2 > summary["initial_accuracy"]
    assert set(summary["metrics"]) == {"accuracy", "worst_class"} and summary["best_round"] in (20, 40, 60)


@pytest.mark.parametrize("byzantine", [0, 2])
def test_the_algorithm_written_out_gives_the_ledger_of_the_simulation(
    byzantine: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_digits(tmp_path / "data")
    train = runpy.run_path(str(Path(__file__).parents[1] / "examples/round.py"))["train"]
    config = load(None, [f"task.data={data}", "rounds=7", "method.k=6", "method.batch_size=8", "federation.clients=8",
                         f"federation.byzantine={byzantine}", "seed=5"])  # fmt: skip
    simulation = Simulation(config, ledger=lambda header: Ledger.create(tmp_path / "simulation.bin", header))
    for _ in range(config.rounds):
        simulation.run_round()
    simulation.close()
    train(config, path=tmp_path / "example.bin").close()
    assert (tmp_path / "example.bin").read_bytes() == (tmp_path / "simulation.bin").read_bytes()
    assert f"digest {simulation.parameters.digest()[:16]}" in capsys.readouterr().out


def code_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 12
    return [cell for cell in cells if cell["cell_type"] == "code"]
