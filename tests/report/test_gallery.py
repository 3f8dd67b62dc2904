"""The gallery: its pictures are there, small, and made by the script that says so."""

from __future__ import annotations

import re
from pathlib import Path

import gallery
import numpy as np
import pytest
import round_picture
from small_demo import small_source
from synthetic import one_thread  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/GALLERY.md").read_text(encoding="utf-8")


def test_every_picture_of_the_page_is_there_and_every_picture_of_the_script_is_on_the_page() -> None:
    shown = re.findall(r"\]\(images/(\w+)\.png\)", PAGE)
    assert len(shown) == len(set(shown)) and set(gallery.PICTURES) <= set(shown)
    assert [name for name in shown if not (gallery.IMAGES / f"{name}.png").exists()] == []
    assert PAGE.count("(g)\n") == len(gallery.PICTURES)


@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_is_small(name: str) -> None:
    assert (gallery.IMAGES / f"{name}.png").stat().st_size <= gallery.LARGEST_BYTES


@pytest.mark.slow
def test_the_picture_of_a_round_shows_what_the_federator_decided(tmp_path: Path) -> None:
    seen = round_picture.measured(2, small_source().task)
    assert seen.number == 2 and seen.byzantine.nonzero()[0].tolist() == [2, 5, 9]
    for r, column in enumerate(seen.reports.T):
        kept = column[~round_picture.left_out(column, seen.trimmed)]
        assert kept.mean() == pytest.approx(seen.decided[r], rel=1e-4, abs=1e-6)
    steps, losses = seen.losses
    middle = len(steps) // 2
    slope = (losses[middle + 1] - losses[middle - 1]) / (steps[middle + 1] - steps[middle - 1])
    assert slope == pytest.approx(seen.reports[round_picture.CLIENT, round_picture.DIRECTION], rel=0.05, abs=0.05)
    assert np.corrcoef(seen.truth, seen.decided)[0, 1] > 0.5
    assert round_picture.draw(seen, tmp_path / "round.png").read_bytes().startswith(b"\x89PNG")
