"""The examples do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from synthetic import one_thread  # noqa: F401

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"


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
    assert drawn == ["Three of twelve clients lie", "Who was trimmed how often"]
    assert space["curves"]["trimmed_mean"][-1] > 0.6 > 0.3 > space["curves"]["mean"][-1]
    liars = space["robust"].byzantine
    assert space["share"][liars].min() > space["share"][~liars].max()
    assert space["newcomer"].parameters.digest() == space["robust"].parameters.digest()


def test_the_notebook_is_committed_as_it_ran() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds.count("display_data") == 2 and "error" not in kinds
    assert "/home/" not in NOTEBOOK.read_text() and "/work/" not in NOTEBOOK.read_text()


def code_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 12
    return [cell for cell in cells if cell["cell_type"] == "code"]
