"""The attacks of benchmarks/siege.py run, and give back what they are after; their figures are in docs/RESULTS.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
pytest.importorskip("cryptography", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
pytest.importorskip("resource", reason="limits open files as POSIX does")

import frozen

from cyber0.tasks.mnist import DEVIATION, MEAN
from cyber0.tasks.mnist import load as load_images

SIEGE = Path(__file__).parent.parent / "benchmarks" / "siege.py"
SECTIONS = ("pace", "stopped", "slow", "followers", "reread", "halfopen", "files", "frozen")


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_of_the_siege_gives_its_figures(section: str, tmp_path: Path) -> None:
    command = [sys.executable, SIEGE, "--quick", "--only", section, "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert len(figures) >= 2 and {figure["section"] for figure in figures} == {section}


def test_as_many_projections_as_weights_give_back_a_gradient_and_its_images(tmp_path: Path) -> None:
    count, generator = 4, np.random.default_rng(0)
    pixels = load_images(str(frozen.write_images(tmp_path / "images", count))).train_images
    images = (pixels.astype(np.float64) / 255 - MEAN) / DEVIATION
    weights = generator.uniform(-1 / 28, 1 / 28, 10 * 785)
    gradient = frozen.linear_gradient(weights, images)
    assert frozen.relative_error(frozen.images_from(gradient, weights, count), images) < 1e-9


@pytest.mark.parametrize(("projections", "bound"), [(80, 1e-9), (20, 1.0)])
def test_least_squares_finds_the_shortest_gradient_that_explains_the_projections(
    projections: int, bound: float
) -> None:
    generator = np.random.default_rng(1)
    true, directions = generator.normal(size=40), generator.normal(size=(projections, 40))
    measured = directions @ true
    found = frozen.least_squares(directions, measured)
    assert frozen.relative_error(found, np.linalg.pinv(directions) @ measured) < 1e-9
    assert frozen.relative_error(found, true) < bound
